"""`check`: whether an export target takes the weights of a model, masked or squashed, before anything is converted."""

from collections.abc import Mapping, Sequence

from torch import nn

from ..errors import SparsityError
from . import coreml, quantization, sparse_file, two_four
from .fbgemm import reasons as fbgemm_reasons
from .layers import Layer, Reasons, checked_layers
from .openvino import reasons as openvino_reasons

# Each target by the name of its function in `export`. A target's own file imports its library only when it is called.
TARGETS: Mapping[str, Reasons] = {
    "coreml_metadata": coreml.reasons,
    "fbgemm": fbgemm_reasons,
    "openvino": openvino_reasons,
    "pack_2_4": two_four.reasons,
    "quantize": quantization.reasons,
    "save_sparse": sparse_file.reasons,
}


def check(model: nn.Module, target: str, tensors: Sequence[str] | None = None) -> list[Layer]:
    """Check that a target takes the weights of a model; works before `squash_mask`, and changes nothing.

    Args:
        model: masked, or squashed.
        target: the name of the function that converts: "pack_2_4", ...
        tensors: names, globs or `re:` expressions of weights. None is every masked weight; in a model without masks,
            every weight of which at least a tenth is zero.

    Returns:
        The layers that were checked.

    Raises:
        SparsityError: some are not taken: with tensor, rule and first place that breaks it; there is no such target or
            tensor, or nothing to check.

    >>> from sparsekit_ao import ScopeSparsifier, export, patterns
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32)).half()
    >>> sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4))
    >>> sparsifier.prepare(model)
    >>> sparsifier.step()
    >>> [layer.fqn for layer in export.check(model, "pack_2_4")]
    ['0.weight']
    """
    if target not in TARGETS:
        raise SparsityError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    return checked_layers(model, target, TARGETS[target], tensors)[0]
