"""Axes made of factors: what a reshape splits and merges, and what an operation ties together.

A dimension of a tensor is a row of factors, outermost first, as einops writes them: `(h d)`. A factor is a node that
may be found equal to another one or be split in two at any time, and every axis that mentions it sees that. Knows
integers and reasons, neither tensors nor operations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Axis", "Factor", "Part", "cut", "fixed", "freeze", "leaves", "regroup", "tie"]


class Factor:
    """A factor of an axis; `frozen` says why nothing may be removed from it.

    >>> n = Factor(6)
    >>> outer, inner = n.split(2)
    >>> [f.size for f in n.leaves()]
    [2, 3]
    """

    __slots__ = ("_frozen", "_parts", "_same", "size")

    def __init__(self, size: int, frozen: str = ""):
        self.size = size
        self._frozen = frozen
        self._same: Factor | None = None
        self._parts: tuple[Factor, ...] = ()

    @property
    def root(self) -> "Factor":
        """The one node that speaks for all that are equal to this one."""
        node = self
        while node._same is not None:
            node = node._same
        return node

    @property
    def frozen(self) -> str:
        """Why it is frozen; empty while it is not."""
        return self.root._frozen

    def leaves(self) -> list["Factor"]:
        """The roots of what it has been split into, outermost first."""
        root = self.root
        return [leaf for part in root._parts for leaf in part.leaves()] if root._parts else [root]

    def split(self, outer: int) -> tuple["Factor", "Factor"]:
        """Two factors in place of an undivided one; `outer` divides its size."""
        root = self.root
        parts = Factor(outer, root._frozen), Factor(root.size // outer, root._frozen)
        root._parts = parts
        return parts

    def unite(self, other: "Factor") -> None:
        """Say that two undivided factors of one size are the same."""
        a, b = self.root, other.root
        if a is not b:
            b._frozen = b._frozen or a._frozen
            a._same = b

    def freeze(self, why: str) -> None:
        """Nothing may be removed from any of its leaves; the first reason stays."""
        for leaf in self.leaves():
            leaf._frozen = leaf._frozen or why


@dataclass(frozen=True)
class Part:
    """A factor as one tensor has it.

    Args:
        factor: which.
        zero: whether the tensor is exactly zero wherever a unit of this factor has been dropped, that is, where the
            parameters that have the factor are zero.
    """

    factor: Factor
    zero: bool = False


Axis = tuple[Part, ...]


def leaves(axis: Sequence[Part]) -> Axis:
    """The axis with every factor replaced by what it has been split into."""
    return tuple(replace(part, factor=leaf) for part in axis for leaf in part.factor.leaves())


def freeze(axis: Sequence[Part], why: str) -> None:
    """Nothing may be removed from the axis."""
    for part in axis:
        part.factor.freeze(why)


def fixed(size: int, why: str) -> Axis:
    """An axis of its own from which nothing may be removed; a dimension of size 1 has no factors."""
    return () if size == 1 else (Part(Factor(size, why)),)


def tie(axes: Sequence[Axis], why: str) -> None:
    """Say that axes of one size are the same, factor by factor; what does not line up is frozen, because of `why`."""
    for other in axes[1:]:
        left, right = _Row(axes[0]), _Row(other)
        while left and right:
            a, b = left.pop().factor, right.pop().factor
            if 0 < b.size < a.size and a.size % b.size == 0:
                a = left.take(a, b.size)
            elif 0 < a.size < b.size and b.size % a.size == 0:
                b = right.take(b, a.size)
            if a.size != b.size:
                freeze((*axes[0], *other), f"{why}: its factors do not line up")
                return
            a.unite(b)


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...] | None:
    """The same elements in row-major order under another shape; None where that cuts across factors, or is empty.

    >>> row = (Part(Factor(2)), Part(Factor(12)))
    >>> [[p.factor.size for p in axis] for axis in regroup([row], (8, 3))]
    [[2, 4], [3]]
    >>> regroup([row], (3, 8)) is None
    True
    """
    if 0 in shape:  # no elements, no order
        return None
    row, grouped = _Row([part for axis in axes for part in axis]), []
    for size in shape:
        axis: list[Part] = []
        left = size
        while left > 1 and row:
            part = row.pop()
            if left % part.factor.size and part.factor.size % left == 0:
                part = replace(part, factor=row.take(part.factor, left, part.zero))
            if left % part.factor.size:
                return None
            left //= part.factor.size
            axis.append(part)
        if left != 1:
            return None
        grouped.append(tuple(axis))
    return tuple(grouped)


def cut(axis: Axis, outer: int, why: str) -> tuple[Axis, Axis]:
    """The axis as (outer, rest); where that cuts across its factors, both are frozen, because of `why`."""
    size = math.prod(part.factor.size for part in axis)
    found = regroup([axis], (outer, size // outer))
    if found is None:
        freeze(axis, why)
        return fixed(outer, why), fixed(size // outer, why)
    return found[0], found[1]


class _Row:
    """Parts to be read from the left; each is divided as far as it is by the time it is read."""

    def __init__(self, parts: Sequence[Part]):
        self._rest = list(reversed(parts))

    def __bool__(self) -> bool:
        return bool(self._rest)

    def pop(self) -> Part:
        part = self._rest.pop()
        first, *rest = leaves([part])
        self._rest += reversed(rest)
        return first

    def take(self, factor: Factor, outer: int, zero: bool = False) -> Factor:
        """Split a factor just read and put its inner half back."""
        first, second = factor.split(outer)
        self._rest.append(Part(second, zero))
        return first
