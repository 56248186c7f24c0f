"""Axes made of factors: what a reshape splits and merges, and what an operation makes equal.

A dimension of a tensor is a sequence of factors, outermost first, as einops writes them: `(h d)`. A factor is a node
that may be united with another one or split in two at any time, and every axis that contains it is affected. It may
also be a concatenation of axes of other lengths.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


class Factor:
    """A factor of an axis; `frozen` is the reason why nothing may be removed from it.

    >>> n = Factor(6)
    >>> outer, inner = n.split(2)
    >>> [f.size for f in n.leaves()]
    [2, 3]
    """

    __slots__ = ("_frozen", "_parts", "_pieces", "_same", "size")

    def __init__(self, size: int, frozen: str = ""):
        self.size = size
        self._frozen = frozen
        self._same: Factor | None = None
        self._parts: tuple[Factor, ...] = ()
        self._pieces: tuple[tuple[Factor, ...], ...] = ()

    @property
    def root(self) -> "Factor":
        """The representative of all factors that were united with this one."""
        node = self
        while node._same is not None:
            node = node._same
        return node

    @property
    def frozen(self) -> str:
        """Why it is frozen; empty if it is not."""
        return self.root._frozen

    def leaves(self) -> list["Factor"]:
        """The roots of what it has been split into, outermost first."""
        root = self.root
        return [leaf for part in root._parts for leaf in part.leaves()] if root._parts else [root]

    def split(self, outer: int) -> tuple["Factor", "Factor"]:
        """Divide an undivided factor into two, the outer one of size `outer`."""
        root = self.root
        if root._pieces:
            root.freeze("a concatenation of unequal parts that is divided")
            root._pieces = ()
        parts = Factor(outer, root._frozen), Factor(root.size // outer, root._frozen)
        root._parts = parts
        return parts

    @property
    def pieces(self) -> "list[list[Factor]]":
        """The leaves of each part of a concatenation, in order; of another factor, its own leaves."""
        root, pieces = self.root, list[list[Factor]]()
        if not root._pieces:
            return [root.leaves()]
        for piece in root._pieces:
            roots = [leaf for factor in piece for leaf in factor.leaves()]
            pieces += roots[0].pieces if len(roots) == 1 else [roots]
        return pieces

    @property
    def is_concatenation(self) -> bool:
        """Whether it consists of parts that follow each other."""
        return bool(self.root._pieces)

    def unite(self, other: "Factor", why: str = "") -> None:
        """Make two undivided factors of one size the same; of two concatenations, their parts."""
        a, b = self.root, other.root
        if a is b:
            return
        if a._pieces and b._pieces:
            _unite_pieces(a, b, why)
        elif a._pieces:
            a, b = b, a
        if a._frozen:
            b.freeze(a._frozen)
        a._same = b

    def freeze(self, why: str) -> None:
        """Freeze all of its leaves, so that nothing is removed from them; the first reason is kept."""
        for leaf in self.leaves():
            leaf._frozen = leaf._frozen or why
            for factor in (factor for piece in leaf._pieces for factor in piece):
                factor.freeze(why)


@dataclass(frozen=True)
class AxisFactor:
    """A factor in one tensor, which with `zero` is exactly zero wherever a unit of the factor has been dropped."""

    factor: Factor
    zero: bool = False


Axis = tuple[AxisFactor, ...]


def leaves(axis: Sequence[AxisFactor]) -> Axis:
    """Replace every factor of an axis by what it has been split into."""
    return tuple(replace(part, factor=leaf) for part in axis for leaf in part.factor.leaves())


def freeze(axis: Sequence[AxisFactor], why: str) -> None:
    """Freeze every factor of an axis, so that nothing is removed from it."""
    for part in axis:
        part.factor.freeze(why)


def fixed(size: int, why: str) -> Axis:
    """Return a new axis, frozen if `why` is not empty; a dimension of size 1 has no factors."""
    return () if size == 1 else (AxisFactor(Factor(size, why)),)


def unify(axes: Sequence[Axis], why: str) -> None:
    """Make axes of one size the same, factor by factor; those whose factors do not align are frozen, with `why`."""
    for other in axes[1:]:
        first, second = _Reader(axes[0]), _Reader(other)
        while first and second:
            a, b = first.read().factor, second.read().factor
            if 0 < b.size < a.size and a.size % b.size == 0:
                a = first.read_outer(a, b.size)
            elif 0 < a.size < b.size and b.size % a.size == 0:
                b = second.read_outer(b, a.size)
            if a.size != b.size:
                freeze((*axes[0], *other), f"{why}: its factors do not line up")
                return
            a.unite(b, why)


def concatenated(axes: Sequence[Axis]) -> Axis:
    """Return one axis of several that follow each other; it is zero where all of them are."""
    whole = Factor(sum(math.prod(part.factor.size for part in axis) for axis in axes))
    whole._pieces = tuple(tuple(part.factor for part in axis) for axis in axes)
    return (AxisFactor(whole, all(part.zero for axis in axes for part in leaves(axis))),)


def _unite_pieces(a: Factor, b: Factor, why: str) -> None:
    """Make the parts of two concatenations of one size the same; undivided ones are cut where the other has an end."""
    ends = [set(itertools.accumulate(math.prod(f.size for f in piece) for piece in whole.pieces)) for whole in (a, b)]
    for whole in (a, b):
        start = 0
        for piece in whole.pieces:
            size = math.prod(factor.size for factor in piece)
            inside = sorted(end - start for end in ends[0] | ends[1] if start < end <= start + size)
            if len(inside) > 1 and len(piece) > 1:
                for factor in (a, b):
                    factor.freeze(f"{why}: its parts do not line up")
                return
            if len(inside) > 1:
                root, lengths = piece[0].root, [end - begin for begin, end in itertools.pairwise([0, *inside])]
                root._pieces = tuple((Factor(n, root._frozen),) if n > 1 else () for n in lengths)
            start += size
    for ours, theirs in zip(a.pieces, b.pieces, strict=True):
        unify([tuple(map(AxisFactor, ours)), tuple(map(AxisFactor, theirs))], why)


def reshape_axes(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...] | None:
    """Return the axes of another shape with the same elements in row-major order; None if that divides a factor.

    >>> row = (AxisFactor(Factor(2)), AxisFactor(Factor(12)))
    >>> [[p.factor.size for p in axis] for axis in reshape_axes([row], (8, 3))]
    [[2, 4], [3]]
    >>> reshape_axes([row], (3, 8)) is None
    True
    """
    if 0 in shape:  # no elements, no order
        return None
    reader, new_axes = _Reader([part for axis in axes for part in axis]), []
    for size in shape:
        axis: list[AxisFactor] = []
        missing = size
        while missing > 1 and reader:
            part = reader.read()
            if missing % part.factor.size and part.factor.size % missing == 0:
                part = replace(part, factor=reader.read_outer(part.factor, missing, part.zero))
            if missing % part.factor.size:
                return None
            missing //= part.factor.size
            axis.append(part)
        if missing != 1:
            return None
        new_axes.append(tuple(axis))
    return None if reader else tuple(new_axes)  # a view of another dtype has fewer elements


def split_axis(axis: Axis, outer: int, why: str) -> tuple[Axis, Axis]:
    """Divide an axis into (outer, rest); where that divides one of its factors, both are frozen, with `why`."""
    size = math.prod(part.factor.size for part in axis)
    halves = reshape_axes([axis], (outer, size // outer))
    if halves is None:
        freeze(axis, why)
        return fixed(outer, why), fixed(size // outer, why)
    return halves[0], halves[1]


class _Reader:
    """A reader of factors from the left, each as far divided as it is at that time."""

    def __init__(self, parts: Sequence[AxisFactor]):
        self._rest = list(reversed(parts))

    def __bool__(self) -> bool:
        return bool(self._rest)

    def read(self) -> AxisFactor:
        part = self._rest.pop()
        first, *rest = leaves([part])
        self._rest += reversed(rest)
        return first

    def read_outer(self, factor: Factor, outer: int, zero: bool = False) -> Factor:
        """Split a factor just read: return its outer part, the inner one is read next."""
        first, second = factor.split(outer)
        self._rest.append(AxisFactor(second, zero))
        return first
