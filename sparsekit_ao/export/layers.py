"""Sizes that torch.nn's own layers keep as integers, for a tensor of theirs that got smaller.

Knows layers one at a time; sizes that a model keeps elsewhere are `attrs`' business.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ..algebra import AxisPattern
from ..errors import SparsityError

__all__ = ["sizes_of"]

Cuts = Sequence[tuple[AxisPattern, int]]


def sizes_of(module: nn.Module, name: str, tensor: Tensor, cuts: Cuts) -> dict[str, Any]:
    """The integers of a torch.nn layer, by attribute, as its new tensor has them; {} for other modules.

    Args:
        module: with its old attributes.
        name: of the tensor in the module.
        tensor: the new tensor.
        cuts: (axes, units kept of a scope) of all that was taken from it.

    Raises:
        SparsityError: a grouped convolution or normalization that loses parts of its groups; an embedding that loses
            rows.

    >>> sizes_of(torch.nn.Linear(4, 8), "weight", torch.zeros(5, 4), [])
    {'out_features': 5, 'in_features': 4}
    """
    shape = tuple(tensor.shape)
    if isinstance(module, _NormBase):
        return {"num_features": shape[0]}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": shape}
    if name != "weight":
        return {}
    if isinstance(module, nn.GroupNorm):
        return {"num_groups": _groups_left(module, module.num_groups, cuts), "num_channels": shape[0]}
    if isinstance(module, _ConvNd):
        groups = _groups_left(module, module.groups, cuts)
        ends = (shape[0], shape[1] * groups) if module.transposed else (shape[1] * groups, shape[0])
        return {"groups": groups, **dict(zip(("in_channels", "out_channels"), ends, strict=True))}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        _check_rows(module, shape[0], cuts)
    return dict(zip(_matrix_sizes(module), shape, strict=False))


def _matrix_sizes(module: nn.Module) -> tuple[str, ...]:
    """The attributes that hold the dimensions of a layer's weight, in order."""
    if isinstance(module, nn.Linear):
        return "out_features", "in_features"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "num_embeddings", "embedding_dim"
    if isinstance(module, nn.PReLU):
        return ("num_parameters",)
    if type(module).__name__ == "Conv1D" and {"nx", "nf"} <= vars(module).keys():
        return "nx", "nf"  # transformers' Linear that lies transposed
    return ()


def _check_rows(module: nn.Embedding | nn.EmbeddingBag, rows: int, cuts: Cuts) -> None:
    """Rows are read by index: without some, all later indices mean others, which example inputs need not show."""
    if rows != module.num_embeddings:
        pattern = next(p for p, _ in cuts if p.dimension_of(p.unit[-1]) == 0)
        raise SparsityError(
            f"{pattern.where}axes {pattern.axes!r} would leave {rows} of the {module.num_embeddings} rows of an "
            f"{type(module).__name__}. Those are read by index, so the later ones would change places; cut it along "
            "its second dimension, or leave it out."
        )


def _groups_left(module: nn.Module, groups: int, cuts: Cuts) -> int:
    """Groups of a layer after its first dimension was cut: fewer whole ones, or as many narrower ones."""
    left = groups
    for pattern, kept in cuts:
        unit = pattern.unit[-1]
        if groups == 1 or pattern.dimension_of(unit) != 0:
            continue
        outer = pattern.leading(groups)
        if outer is None:
            raise SparsityError(
                f"{pattern.where}axes {pattern.axes!r}: a {type(module).__name__} of {groups} groups is cut by whole "
                f"groups or equally within each; write its first dimension as factors of which the first make {groups}"
            )
        if unit in outer:
            left = left // pattern.sizes[unit] * kept
    return left
