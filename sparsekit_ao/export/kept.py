"""Which units of a group are left: those that hold anything but zeros.

A unit is dropped where every weight of the group (its parameters of two or more dimensions) is exactly zero. Among
them are the tensors that read the unit, so whatever a bias or a norm still writes there is multiplied by zero. To keep
a unit of zeros is always exact, and so a scope without any other keeps as many of them as the others keep units.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..coupling import BoundCoupling, Member
from ..errors import CouplingError, SparsityError

__all__ = ["Cut", "make_cut"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A group of one model and the units of it that stay.

    Attributes:
        group: the group.
        keep: bool, of the group's grid; the same number in each scope.
        source: which of the groups that the caller gave it is one of.
        partly: units that stay although some of their weights hold zeros only, over all scopes.
    """

    group: BoundCoupling
    keep: Tensor
    source: int = 0
    partly: int = 0

    @property
    def of(self) -> int:
        """Units of a scope."""
        return self.group.grid[-1]

    @property
    def kept(self) -> int:
        """Units of a scope that stay."""
        return int(self.keep.reshape(-1, self.of)[0].sum())

    @property
    def is_whole(self) -> bool:
        """Whether nothing is removed."""
        return self.kept == self.of


def make_cut(group: BoundCoupling, tensors: Mapping[str, Tensor], multiple_of: int, source: int = 0) -> Cut:
    """Find the dropped units, and keep as many of them as make a multiple (at least one unit is left).

    Args:
        group: bound to the model.
        tensors: its members by name.
        multiple_of: units kept in a scope are rounded up to a multiple, or to all there are.
        source: see `Cut`.

    Raises:
        CouplingError: scopes keep different numbers.
        SparsityError: multiple_of is no positive int.
    """
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise SparsityError(f"group {group.name!r}: multiple_of must be a positive int, got {multiple_of!r}")
    zero = _zeros(group, tensors)
    dropped = zero.all(0)
    keep = ~dropped.reshape(-1, group.grid[-1])
    counts = keep.sum(1)
    most = int(counts.max())
    odd = ((counts != most) & (counts != 0)).nonzero()
    if odd.numel():
        at = int(odd[0, 0])
        raise CouplingError(
            f"group {group.name!r}: scope {int(counts.argmax())} of {' '.join(group.scope)} keeps {most} of "
            f"{group.grid[-1]} units, but scope {at} keeps {int(counts[at])}; a dense layer needs the same number in "
            "each. Prune by the group's own entries, which share one budget."
        )
    wanted = min(-(-max(most, 1) // multiple_of) * multiple_of, group.grid[-1])
    spare = ~keep
    keep = keep | (spare & (spare.cumsum(1) <= (wanted - counts)[:, None]))
    partly = int((zero.any(0) & ~dropped).sum())
    return Cut(group=group, keep=keep.reshape(group.grid), source=source, partly=partly)


def _zeros(group: BoundCoupling, tensors: Mapping[str, Tensor]) -> Tensor:
    """For each weight, which units it holds zeros of; bool, (weights, *grid)."""
    parameters = [m for m in group.members if m.is_parameter]
    weights = [m for m in parameters if tensors[m.fqn].ndim > 1] or parameters
    if not weights:
        raise SparsityError(f"group {group.name!r}: no member is a parameter, so nothing says which units are dropped")
    return torch.stack([_zero(m, tensors[m.fqn], len(group.grid)) for m in weights])


def _zero(member: Member, tensor: Tensor, ndim: int) -> Tensor:
    view = member.pattern(tensor.detach())
    return (view == 0).unsqueeze(-1).flatten(ndim).all(-1).cpu()
