"""A group as it was found in one model: which tensors, and how many units.

Sizes of the axes that members share are worked out here, across members: a unit that one tensor counts need not be
given for another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..algebra import AxisPattern, dimensions_of
from ..errors import CouplingError, SparsityError
from ..selection.strides import Shape

__all__ = ["BoundCoupling", "Member", "bind", "lacking"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One tensor of a group.

    Attributes:
        fqn: its name in the model.
        pattern: its axes; as a view they are (*scope, unit, the rest).
        is_parameter: False for a buffer, which no mask can sit on.
    """

    fqn: str
    pattern: AxisPattern
    is_parameter: bool


@dataclass(frozen=True, kw_only=True)
class BoundCoupling:
    """One coupled group of one model; see `Coupling.bind`.

    Attributes:
        name: for errors and reports.
        captured: what the `*`s of the names stood for.
        members: the tensors, in the order of the group's patterns.
        unit: the axis that is kept or dropped.
        scope: axes of independent budgets.
        sizes: length of every scope axis, of the unit axis, and of the axes whose sizes were given.
        attrs: {pattern of attributes: axes whose product they hold}, as the group has them.
    """

    name: str
    captured: tuple[str, ...]
    members: tuple[Member, ...]
    unit: str
    scope: tuple[str, ...]
    sizes: Mapping[str, int]
    attrs: Mapping[str, str]

    @property
    def grid(self) -> Shape:
        """(*scope sizes, units of a scope): the shape in which units are counted."""
        return tuple(self.sizes[axis] for axis in (*self.scope, self.unit))


def bind(
    name: str,
    captured: tuple[str, ...],
    tensors: Iterable[tuple[str, str, Shape, bool]],
    *,
    unit: str,
    scope: Sequence[str],
    sizes: Mapping[str, int],
    attrs: Mapping[str, str],
) -> BoundCoupling:
    """Work out all shared sizes and check every member against them.

    Args:
        name, captured, unit, scope, attrs: see `BoundCoupling`.
        tensors: (name, axes, shape, is a parameter) of every member.
        sizes: lengths that the caller gave.

    Raises:
        CouplingError: two members count different numbers of units.
        SparsityError: a pattern does not fit a shape, or leaves a size open.
    """
    found = list(tensors)
    known = _solved(name, found, {*scope, unit}, dict(sizes))
    members = []
    for fqn, axes, shape, is_parameter in found:
        own = {axis: known[axis] for dimension in dimensions_of(axes) for axis in dimension if axis in known}
        pattern = AxisPattern(axes=axes, unit=(*scope, unit), scope=tuple(scope), sizes=own, where=f"{fqn}: ")
        pattern.check_shape(shape)
        members.append(Member(fqn=fqn, pattern=pattern, is_parameter=is_parameter))
    return BoundCoupling(
        name=name, captured=captured, members=tuple(members), unit=unit, scope=tuple(scope), sizes=known, attrs=attrs
    )


def _solved(
    name: str, tensors: Sequence[tuple[str, str, Shape, bool]], shared: set[str], sizes: dict[str, int]
) -> dict[str, int]:
    """Every size that follows: a dimension with one open axis gives its length, again until nothing new follows."""
    said_by: dict[str, str] = {}
    given = set(sizes)
    while True:
        before = len(sizes)
        for fqn, axes, shape, _ in tensors:
            for axis, size in _follows(axes, shape, sizes, f"{fqn}: "):
                if axis not in shared or axis in given:
                    continue  # a member's own axis (h and w of two kernels need not agree); one the pattern checks
                if sizes.setdefault(axis, size) != size:
                    raise CouplingError(
                        f"group {name!r}: {fqn} has {axis}={size}, but {said_by[axis]} has {axis}={sizes[axis]}. Units "
                        "must correspond one to one; mend the axes, or give the sizes of the axes inside a unit."
                    )
                said_by.setdefault(axis, fqn)
        if len(sizes) == before:
            return sizes


def _follows(axes: str, shape: Shape, sizes: Mapping[str, int], where: str) -> Iterable[tuple[str, int]]:
    dimensions = dimensions_of(axes, where)
    if len(dimensions) != len(shape):
        return  # the pattern itself says so, in its own words
    for size, factors in zip(shape, dimensions, strict=True):
        given = {axis: sizes[axis] for axis in factors if axis in sizes}
        for axis in factors:
            rest = math.prod(n for other, n in given.items() if other != axis)
            if len(given.keys() - {axis}) == len(factors) - 1 and rest and size % rest == 0:
                yield axis, size // rest


def lacking(name: str, captured: Iterable[str], member: str) -> SparsityError:
    """The error of a group that is not whole."""
    return SparsityError(
        f"group {name!r}: {', '.join(captured) or 'the model'} has no tensor {member!r}. Every member must be there "
        "for every value of *; leave the member out, or make two groups."
    )
