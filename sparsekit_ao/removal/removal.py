"""Removing units: which units of a coupling hold only zeros, and the model's tensors without them.

A unit is dropped where every weight of the coupling (its parameters of two or more dimensions) is exactly zero. Among
them are the tensors that read the unit, so whatever a bias or a norm still writes there is multiplied by zero. To keep
a unit of zeros is always exact; so a scope with fewer other units keeps some, to have as many as the others. A unit
that is a module of a list is dropped where all its parameters are zero, biases too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from ..coupling import BoundCoupling, Member
from ..errors import CouplingError, SparsityError
from ..structure.tiles import Shape
from ..sparsifiers.names import owner_of
from ..sparsifiers.progress import shown
from ..structure import AxisPattern
from .attention import fit_attention

_Removed = Sequence[tuple[AxisPattern, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Removal:
    """A coupling of one model, and which of its units are kept and removed.

    Attributes:
        coupling: the coupling.
        keep: bool, of the coupling's grid; the same number is True in each scope.
        source: index of the `Coupling` that it was bound from.
        partly: kept units of which some weights hold only zeros, over all scopes.
    """

    coupling: BoundCoupling
    keep: Tensor
    source: int = 0
    partly: int = 0

    @property
    def of(self) -> int:
        """Units of a scope."""
        return self.coupling.grid[-1]

    @property
    def kept(self) -> int:
        """Kept units of a scope."""
        return int(self.keep.reshape(-1, self.of)[0].sum())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is removed."""
        return self.kept == self.of


def check_multiple(multiple_of: object, where: str) -> None:
    """Raise unless `multiple_of` is a positive int."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise SparsityError(f"{where}multiple_of must be a positive int, got {multiple_of!r}")


def find_removal(coupling: BoundCoupling, tensors: Mapping[str, Tensor], multiple_of: int, source: int = 0) -> Removal:
    """Find the dropped units of a coupling, and keep some so that a multiple is left (at least one, at most all).

    `tensors` are its members and the parameters of its listed modules, by name; `source` as in `Removal`.

    Raises:
        CouplingError: scopes keep different numbers.
        SparsityError: multiple_of is no positive int; no member is a parameter.
    """
    where = f"coupling {coupling.name!r}: "
    check_multiple(multiple_of, where)
    zero = _zeros(coupling, tensors, where)
    dropped, units = zero.all(0), coupling.grid[-1]
    keep = ~dropped.reshape(-1, units)
    counts = keep.sum(1)
    most = int(counts.max())
    other = ((counts != most) & (counts != 0)).nonzero()
    if other.numel():
        at = int(other[0, 0])
        raise CouplingError(
            f"{where}scope {int(counts.argmax())} of {' '.join(coupling.scope)} keeps {most} of {units} units, but "
            f"scope {at} keeps {int(counts[at])}; a dense layer needs the same number in each. Prune with the "
            "coupling's own entries, which give every scope the same budget."
        )
    wanted = min(-(-max(most, 1) // multiple_of) * multiple_of, units)
    keep = keep | (~keep & ((~keep).cumsum(1) <= (wanted - counts)[:, None]))
    partly = int((zero.any(0) & ~dropped).sum())
    return Removal(coupling=coupling, keep=keep.reshape(coupling.grid), source=source, partly=partly)


def _zeros(coupling: BoundCoupling, tensors: Mapping[str, Tensor], where: str) -> Tensor:
    """Which units are zero in each weight, [weights, *grid]; for modules of lists, in all of their parameters."""
    if coupling.listed:
        zero = [not any(tensors[fqn].any() for fqn in own) for own in coupling.listed]
        return torch.tensor(zero).reshape(1, *coupling.grid)
    parameters = [m for m in coupling.members if m.is_parameter]
    weights = [m for m in parameters if tensors[m.fqn].ndim > 1] or parameters
    if not weights:
        raise SparsityError(f"{where}no member is a parameter, so there are no zeros that mark dropped units")
    views, ndim = [m.pattern(tensors[m.fqn].detach()) for m in weights], len(coupling.grid)
    return torch.stack([(view == 0).unsqueeze(-1).flatten(ndim).all(-1).cpu() for view in views])


def plain_tensors(model: nn.Module, fqns: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of these names.

    Raises:
        SparsityError: one is parametrized, so its mask is not yet applied to its values.
    """
    found = {}
    for fqn in fqns:
        module, name = owner_of(model, fqn)
        if parametrize.is_parametrized(module, name):
            raise SparsityError(
                f"{fqn} is still parametrized (masked, perhaps), so nothing can be removed from it; call squash_mask "
                "first"
            )
        found[fqn] = getattr(module, name)
    return found


def remove_units(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Remove the dropped units from every member, in place; sizes held by torch.nn's layers are updated.

    Raises:
        CouplingError: what couplings keep of one tensor is not rectangular.
        SparsityError: a grouped convolution that loses parts of its groups.
    """
    todo: dict[int, list[tuple[Member, Removal]]] = {}
    tensors: dict[int, Tensor] = {}
    for removal in removals:
        for member in removal.coupling.members:
            tensor = plain_tensors(model, [member.fqn])[member.fqn]
            tensors[id(tensor)] = tensor
            own, shape = todo.setdefault(id(tensor), []), tuple(tensor.shape)
            kept = kept_elements(member, removal, shape)
            if not any(r is removal and torch.equal(kept_elements(m, r, shape), kept) for m, r in own):
                own.append((member, removal))  # two names of one tensor count once
    work = shown(list(todo.items()), "compact", sum(tensors[key].numel() for key in todo))
    smaller = {key: _smaller(tensors[key], own) for key, own in work}
    held = [
        (module, tensors_of, name, id(tensor))
        for module in model.modules()
        for tensors_of in (module._parameters, module._buffers)
        for name, tensor in tensors_of.items()
        if id(tensor) in smaller
    ]
    sizes = [sizes_of(m, n, smaller[key], [(mb.pattern, r.kept) for mb, r in todo[key]]) for m, _, n, key in held]
    for (module, tensors_of, name, key), own_sizes in zip(held, sizes, strict=True):
        tensors_of[name] = smaller[key]  # type: ignore[assignment]
        for attribute, size in own_sizes.items():
            setattr(module, attribute, size)
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and any(module is m for m, *_ in held):
            fit_attention(module, path)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def zero_units(model: nn.Module, removal: Removal) -> None:
    """Write zeros into the parameters of the units that a removal removes, in place."""
    members = [member for member in removal.coupling.members if member.is_parameter]
    tensors = plain_tensors(model, [member.fqn for member in members])
    for member in members:
        tensor = tensors[member.fqn]
        tensor.data.masked_fill_(~kept_elements(member, removal, tuple(tensor.shape)).to(tensor.device), 0)


def kept_elements(member: Member, removal: Removal, shape: Shape) -> Tensor:
    """Which elements of a member of this shape belong to kept units; bool, of its shape."""
    kept = torch.ones(shape, dtype=torch.bool, device="cpu")
    view = member.pattern(kept)
    view.copy_(removal.keep.reshape(removal.keep.shape + (1,) * (view.ndim - removal.keep.ndim)).expand_as(view))
    return kept


def _smaller(tensor: Tensor, own: Sequence[tuple[Member, Removal]]) -> Tensor:
    """A copy without the removed units; of the same kind (parameter or not) and memory format."""
    shape = _shape_left(tuple(tensor.shape), own)
    if tensor.is_meta:
        data = tensor.new_empty(shape)
    else:
        is_one = len(own) == 1 and not own[0][0].pattern.outside
        data = _without_units(tensor.detach(), *own[0]) if is_one else _without_all(tensor.detach(), own, shape)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    keeps_last = last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
    data = data.contiguous(memory_format=last if last is not None and keeps_last else torch.contiguous_format)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _shape_left(shape: Shape, own: Sequence[tuple[Member, Removal]]) -> list[int]:
    """The shape without the removed units; those of one part of a concatenation shrink that part."""
    parts: dict[tuple[int, tuple[int, int]], int] = {}  # entries left of (dimension, entries before and after)
    for member, removal in own:
        d = member.pattern.dimension_of(removal.coupling.unit)
        around = member.pattern.outside.get(d, (0, 0))
        left = parts.get((d, around), shape[d] - sum(around))
        parts[d, around] = left // removal.of * removal.kept
    found = list(shape)
    for (d, around), left in parts.items():
        found[d] -= shape[d] - sum(around) - left
    return found


def _without_units(tensor: Tensor, member: Member, removal: Removal) -> Tensor:
    units = member.pattern(tensor)[removal.keep.to(tensor.device)]
    return member.pattern.undo(units.reshape(*removal.keep.shape[:-1], removal.kept, *units.shape[1:]))


def _without_all(tensor: Tensor, own: Sequence[tuple[Member, Removal]], shape: Sequence[int]) -> Tensor:
    """What all removals keep, in the tensor's own order: right where no unit varies more slowly than its scopes."""
    keep = torch.ones(tensor.shape, dtype=torch.bool, device="cpu")
    for member, removal in own:
        keep &= kept_elements(member, removal, tuple(tensor.shape))
    where = f"{own[0][0].fqn}: the couplings {', '.join(repr(removal.coupling.name) for _, removal in own)} "
    if int(keep.sum()) != math.prod(shape):
        raise CouplingError(
            f"{where}keep elements of its {tuple(tensor.shape)} that do not form a rectangle; write their axes as "
            "factors of one pattern"
        )
    if not all(_scopes_first(member, removal) for member, removal in own):
        raise CouplingError(
            f"{where}share one tensor, and one of them keeps different units in scopes that vary faster than the unit; "
            "compact by one coupling after the other"
        )
    return tensor[keep.to(tensor.device)].reshape(*shape)


def _scopes_first(member: Member, removal: Removal) -> bool:
    rows = removal.keep.reshape(-1, removal.of)
    order = [axis for dimension in member.pattern.dimensions for axis in dimension]
    before = order[: order.index(removal.coupling.unit)]
    return set(removal.coupling.scope) <= set(before) or bool((rows == rows[0]).all())


def sizes_of(module: nn.Module, name: str, tensor: Tensor, removed: _Removed) -> dict[str, Any]:
    """The integers of a torch.nn layer, by attribute, as its new tensor has them; {} for other modules.

    The module has its old attributes; `removed` are (axes, kept units of a scope) of every coupling of the tensor. A
    SparsityError if a grouped layer would lose parts of its groups, or an embedding rows.

    >>> sizes_of(torch.nn.Linear(4, 8), "weight", torch.zeros(5, 4), [])
    {'out_features': 5, 'in_features': 4}
    """
    shape = tuple(tensor.shape)
    if isinstance(module, _NormBase):
        return {"num_features": shape[0]}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": shape}
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return _recurrent_sizes(module, name, shape)
    if name != "weight":
        return {}
    if isinstance(module, nn.GroupNorm):
        return {"num_groups": _groups_left(module, module.num_groups, removed), "num_channels": shape[0]}
    if isinstance(module, _ConvNd):
        groups = _groups_left(module, module.groups, removed)
        ends = (shape[0], shape[1] * groups) if module.transposed else (shape[1] * groups, shape[0])
        return {"groups": groups, **dict(zip(("in_channels", "out_channels"), ends, strict=True))}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        _check_rows(module, shape[0], removed)
    return dict(zip(_matrix_sizes(module), shape, strict=False))


def _recurrent_sizes(module: nn.RNNBase | nn.RNNCellBase, name: str, shape: Shape) -> dict[str, Any]:
    """The integers of a recurrent layer or cell that one of its tensors determines."""
    if name in ("weight_ih_l0", "weight_ih"):
        return {"input_size": shape[1]}
    if name == "weight_hr_l0":
        return {"proj_size": shape[0], "hidden_size": shape[1]}
    if name in ("weight_hh_l0", "weight_hh") and not getattr(module, "proj_size", 0):
        return {"hidden_size": shape[1]}
    return {}


def _matrix_sizes(module: nn.Module) -> tuple[str, ...]:
    """The attributes that hold the dimensions of a layer's weight, in order."""
    if isinstance(module, nn.Linear):
        return "out_features", "in_features"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "num_embeddings", "embedding_dim"
    if isinstance(module, nn.PReLU):
        return ("num_parameters",)
    if type(module).__name__ == "Conv1D" and {"nx", "nf"} <= vars(module).keys():
        return "nx", "nf"  # transformers' Linear, whose weight is stored transposed
    return ()


def _check_rows(module: nn.Embedding | nn.EmbeddingBag, rows: int, removed: _Removed) -> None:
    """Rows are read by index: without some, later indices read other rows, which example inputs need not show."""
    if rows != module.num_embeddings:
        pattern = next(p for p, _ in removed if p.dimension_of(p.unit[-1]) == 0)
        raise SparsityError(
            f"{pattern.where}axes {pattern.axes!r} would keep {rows} of the {module.num_embeddings} rows of an "
            f"{type(module).__name__}. Rows are read by index, so the indices of later ones would change; use units of "
            "its second dimension, or leave it out."
        )


def _groups_left(module: nn.GroupNorm | _ConvNd, groups: int, removed: _Removed) -> int:
    """Groups of a layer whose first dimension is smaller: fewer of the same width, or as many of a smaller width."""
    left = groups
    for pattern, kept in removed:
        unit = pattern.unit[-1]
        if groups == 1 or pattern.dimension_of(unit) != 0:
            continue
        if 0 in pattern.outside and len(module.weight) == groups:  # a channel in each group
            part = groups - sum(pattern.outside[0])
            left -= part - part // pattern.sizes[unit] * kept
            continue
        outer = pattern.leading(groups)
        if outer is None:
            raise SparsityError(
                f"{pattern.where}axes {pattern.axes!r}: a {type(module).__name__} of {groups} groups can lose whole "
                "groups, or equally many channels of each; write its first dimension as factors of which the first "
                f"make {groups}"
            )
        if unit in outer:
            left = left // pattern.sizes[unit] * kept
    return left
