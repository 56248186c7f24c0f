"""for_model: a model whose tensors have the names of a common architecture gets its groups ready-made.

Looks at names, shapes and a few integers; imports no library of models and runs nothing.
"""

from torch import nn

from ...errors import SparsityError
from ...sparsifiers.config import named_tensors
from ..coupling import Coupling
from .layouts import LAYOUTS
from .resnet import is_resnet, resnet_groups
from .transformer import find_stack, transformer_groups

__all__ = ["for_model"]


def for_model(model: nn.Module) -> dict[str, Coupling]:
    """The groups of a Hugging Face Llama/Qwen/Mistral-like decoder, BERT-like encoder or ViT, or torchvision ResNet.

    Transformers have `"mlp"` (hidden units) and `"heads"`. Where query heads share key heads, `"heads"` are the query
    heads, an equal number within each key head (scope `kv`), and `"kv_heads"` whole key heads with their queries. A
    decoder with an `lm_head` also has `"residual"`, its hidden size (exact where its norms are RMSNorms). A ResNet has
    `"conv1"` (and `"conv2"`, of bottlenecks), the channels inside of blocks, and `"stem"`, `"layer2"`, ...: the
    channels of residual streams, each named after what opens it. Integers that hold such a size (`num_attention_heads`
    of modules and config, say) are in the groups' `attrs`, for `compact`. Groups that share a tensor are pruned one
    after the other.

    The head size is the attention module's `head_dim` or `attention_head_size`, else the config's `head_dim`, else its
    `hidden_size // num_attention_heads`; numbers of heads follow from the shapes.

    Args:
        model: with plain tensors or prepared ones; only looked at.

    Returns:
        {kind of unit: group}.

    Raises:
        SparsityError: another architecture; layers with tensors that this does not know, or of different shapes.

    >>> class Layer(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8) for n in ("q_lin", "k_lin", "v_lin")})
    ...         self.attention["out_lin"] = torch.nn.Linear(8, 8)
    ...         self.attention.head_dim = 4
    ...         self.ffn = torch.nn.ModuleDict({"lin1": torch.nn.Linear(8, 16), "lin2": torch.nn.Linear(16, 8)})
    >>> groups = for_model(torch.nn.ModuleList([Layer(), Layer()]))
    >>> groups["mlp"].members
    {'*.ffn.lin1.weight': 'u i', '*.ffn.lin1.bias': 'u', '*.ffn.lin2.weight': 'o u'}
    >>> groups["heads"].members["*.attention.out_lin.weight"], groups["heads"].sizes
    ('o (u d)', {'d': 4})
    """
    tensors = dict(named_tensors(model))
    for layout in LAYOUTS:
        stack = find_stack(layout, model, tensors)
        if stack is not None:
            return transformer_groups(stack)
    if is_resnet(model):
        return resnet_groups(model)
    looked = ", ".join(f"{layout.family} ('*.{layout.required[0]}')" for layout in LAYOUTS)
    raise SparsityError(
        f"for_model does not know {type(model).__name__}. It looked for the tensor names of {looked} and torchvision's "
        "ResNet ('layer1.0.conv1.weight'). discover(model, example_inputs) suggests couplings for any model; Coupling "
        "says them by hand."
    )
