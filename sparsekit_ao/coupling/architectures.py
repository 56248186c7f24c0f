"""for_model: the couplings of a known architecture, recognized by the names of its tensors; no forward runs.

To add a family of transformers, add a row to `transformer.LAYOUTS`; other architectures are modules such as `resnet`.
"""

from torch import nn

from ..errors import SparsityError, checked_model
from ..sparsifiers.config import named_tensors
from .coupling import Coupling
from .experts import expert_couplings
from .falcon import falcon_couplings
from .resnet import resnet_couplings
from .transformer import LAYOUTS, find_stack, transformer_couplings


def for_model(model: nn.Module) -> dict[str, Coupling]:
    """The couplings of a Hugging Face Llama/Qwen/Mistral-like decoder, BERT-like encoder or ViT, or torchvision ResNet.

    Transformers have `"mlp"` (hidden units) and `"heads"`. Where query heads share key heads, `"heads"` are the query
    heads, an equal number within each key head (scope `kv`), and `"kv_heads"` whole key heads with their queries;
    Falcon's are those of its one key head. A decoder with an `lm_head` also has `"residual"`, its hidden size (exact
    where its norms are RMSNorms). A ResNet has `"conv1"` (and `"conv2"`, of bottlenecks), the channels inside of
    blocks, and `"stem"`, `"layer2"`, ...: the channels of residual streams, each named after the layer that begins it.

    A mixture of experts has `"expert_units"`, hidden units inside of each expert, and `"experts"`, whole ones with
    their rows of the router, whether they are packed or modules of a list (`discover` finds its heads and hidden size).
    The latter are not exact: a router without a row never chooses a dropped expert, while one that is only zero may be
    chosen. So `compact` takes them with a larger `tolerance` only (`tolerance=10`, say), and reports the difference.

    Integers that hold such a size (`num_attention_heads` of modules and config, say) are in the couplings' `attrs`, for
    `compact`. Couplings that share a tensor are prepared together by `joint_entries`.

    The head size is the attention module's `head_dim` or `attention_head_size`, else the config's `head_dim`, else its
    `hidden_size // num_attention_heads`; numbers of heads follow from the shapes.

    Args:
        model: with plain tensors or after `prepare`; it is not changed.

    Returns:
        {kind of unit: coupling}.

    Raises:
        SparsityError: another architecture; layers with unknown tensors, or of different shapes.

    >>> class Layer(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8) for n in ("q_lin", "k_lin", "v_lin")})
    ...         self.attention["out_lin"] = torch.nn.Linear(8, 8)
    ...         self.attention.head_dim = 4
    ...         self.ffn = torch.nn.ModuleDict({"lin1": torch.nn.Linear(8, 16), "lin2": torch.nn.Linear(16, 8)})
    >>> couplings = for_model(torch.nn.ModuleList([Layer(), Layer()]))
    >>> couplings["mlp"].members
    {'*.ffn.lin1.weight': 'u i', '*.ffn.lin1.bias': 'u', '*.ffn.lin2.weight': 'o u'}
    >>> couplings["heads"].members["*.attention.out_lin.weight"], couplings["heads"].sizes
    ('o (u d)', {'d': 4})
    """
    tensors = dict(named_tensors(checked_model(model, "for_model")))
    experts = expert_couplings(model, tensors | dict(model.named_buffers()))
    if experts:
        return experts
    for layout in LAYOUTS:
        stack = find_stack(layout, model, tensors)
        if stack is not None:
            return transformer_couplings(stack)
    known = falcon_couplings(model, tensors), resnet_couplings(tensors | dict(model.named_buffers()))
    for couplings in known:
        if couplings is not None:
            return couplings
    names = ", ".join(f"{layout.family} ('*.{layout.required[0]}')" for layout in LAYOUTS)
    raise SparsityError(
        f"for_model does not know {type(model).__name__}. It looked for the tensor names of {names} and torchvision's "
        "ResNet ('layer1.0.conv1.weight'). discover(model, example_inputs) suggests couplings for any model; Coupling "
        "writes them by hand."
    )
