"""Cutting: every member of the groups without its dropped units, put into a model in place.

What several groups take from one tensor is worked out together, in the tensor's own coordinates. Layers of torch.nn
are told their new sizes.
"""

import math
from collections.abc import Iterator, Sequence

import einops
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..coupling import Member
from ..errors import CouplingError, SparsityError
from ..selection.strides import Shape
from .kept import Cut
from .layers import sizes_of

__all__ = ["cut_model", "kept_elements", "members_of", "owner_of"]


def owner_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name in it."""
    prefix, _, name = fqn.rpartition(".")
    return model.get_submodule(prefix), name


def members_of(model: nn.Module, fqns: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of these names.

    Raises:
        SparsityError: one is parametrized, so its zeros are not its own yet.
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


def cut_model(model: nn.Module, cuts: Sequence[Cut]) -> None:
    """Remove the dropped units from every member, in place; a tensor under several names is cut once.

    Raises:
        CouplingError: what groups take from one tensor does not leave a rectangle.
        SparsityError: a grouped convolution that loses parts of its groups.
    """
    todo: dict[int, list[tuple[Member, Cut]]] = {}
    tensors: dict[int, Tensor] = {}
    for cut in cuts:
        for member in cut.group.members:
            tensor = members_of(model, [member.fqn])[member.fqn]
            tensors[id(tensor)] = tensor
            own = todo.setdefault(id(tensor), [])
            shape = tuple(tensor.shape)
            if not any(c is cut and _alike(m, member, cut, shape) for m, c in own):
                own.append((member, cut))
    smaller = {key: _smaller(tensors[key], own) for key, own in todo.items()}
    places = list(_places(model, smaller))
    sizes = [sizes_of(m, n, smaller[key], [(mb.pattern, c.kept) for mb, c in todo[key]]) for m, n, key in places]
    for (module, name, key), own_sizes in zip(places, sizes, strict=True):
        held = module._parameters if name in module._parameters else module._buffers
        held[name] = smaller[key]  # type: ignore[assignment]
        for attribute, size in own_sizes.items():
            setattr(module, attribute, size)


def kept_elements(member: Member, cut: Cut, shape: Shape) -> Tensor:
    """Which elements of a member of this shape belong to units that stay; bool, of its shape."""
    pattern = member.pattern
    inner = {axis: size for axis, size in pattern.lengths(shape).items() if axis not in pattern.unit}
    kept: Tensor = einops.repeat(cut.keep, f"{' '.join(pattern.unit)} -> {pattern.axes}", **inner)
    return kept


def _alike(one: Member, other: Member, cut: Cut, shape: Shape) -> bool:
    """Whether two names of one tensor take the same from it."""
    return torch.equal(kept_elements(one, cut, shape), kept_elements(other, cut, shape))


def _places(model: nn.Module, tensors: dict[int, Tensor]) -> Iterator[tuple[nn.Module, str, int]]:
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in tensors:
                yield module, name, id(tensor)


def _smaller(tensor: Tensor, own: Sequence[tuple[Member, Cut]]) -> Tensor:
    """A copy without what the cuts take; of the same kind (parameter or not)."""
    shape = list(tensor.shape)
    for member, cut in own:
        dimension = member.pattern.dimension_of(cut.group.unit)
        shape[dimension] = shape[dimension] // cut.of * cut.kept
    if tensor.is_meta:
        data = tensor.new_empty(shape)
    else:
        data = _taken(tensor.detach(), *own[0]) if len(own) == 1 else _taken_by_all(tensor.detach(), own, shape)
    data = data.contiguous(memory_format=_format_of(tensor))
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _format_of(tensor: Tensor) -> torch.memory_format:
    """How the tensor lies: channels last, if it does and not plainly as well."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _taken(tensor: Tensor, member: Member, cut: Cut) -> Tensor:
    view = member.pattern(tensor)
    units = view[cut.keep.to(tensor.device)]
    return member.pattern.undo(units.reshape(*cut.keep.shape[:-1], cut.kept, *units.shape[1:]))


def _taken_by_all(tensor: Tensor, own: Sequence[tuple[Member, Cut]], shape: Sequence[int]) -> Tensor:
    """What all cuts leave, in the tensor's own order: right where no unit varies more slowly than its scopes."""
    keep = torch.ones(tensor.shape, dtype=torch.bool)
    for member, cut in own:
        keep &= kept_elements(member, cut, tuple(tensor.shape))
    names = ", ".join(repr(cut.group.name) for _, cut in own)
    if int(keep.sum()) != math.prod(shape):
        raise CouplingError(
            f"{own[0][0].fqn}: the groups {names} leave no rectangle of its {tuple(tensor.shape)}; write their axes as "
            "factors of one pattern"
        )
    if not all(_scopes_first(member, cut) for member, cut in own):
        raise CouplingError(
            f"{own[0][0].fqn}: the groups {names} cut one tensor, and one of them chooses units differently in scopes "
            "that lie inside the unit; compact by one group after the other"
        )
    return tensor[keep.to(tensor.device)].reshape(*shape)


def _scopes_first(member: Member, cut: Cut) -> bool:
    rows = cut.keep.reshape(-1, cut.of)
    order = [axis for dimension in member.pattern.dimensions for axis in dimension]
    before = order[: order.index(cut.group.unit)]
    return set(cut.group.scope) <= set(before) or bool((rows == rows[0]).all())
