"""What a kernel must know of one group of scopes, as plain numbers: sizes, strides, and what they allow.

Lowers `Scopes` through `nests`. Knows no kernel and launches nothing.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod

import torch
from torch import Tensor

from ..nests import Nest, Nests, lower
from ..strides import Shape, cosize
from ..tiling import Blocks, Scopes

__all__ = ["LOOPS", "Member", "Part", "power_of_two", "starts_of", "strided_part", "to_part"]

LOOPS = 6  # longest nest that the table has room for
BIG = (1 << 31) - (1 << 20)  # from here on in 64 bits: a last tile may reach beyond its tensor


@dataclass(frozen=True, kw_only=True)
class Member:
    """One tensor's share: its strides along scope, block and element (values, then mask)."""

    elements: Nest
    scope: tuple[Shape, Shape]
    block: tuple[Shape, Shape]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The scopes of one group, wherever they lie.

    Attributes:
        members: tensors whose blocks share one fate.
        scope_sizes: loops over scopes.
        block_sizes: loops over the blocks of a scope.
        dtype: of all members' values.
        mask_dtype: of all members' masks (uint8 for bool).
        big: whether some address needs 64 bits.
        level: whether all memory starts at a multiple of 16 bytes.
        block: sides of a block longer than 1, outermost first, where all members share them.
    """

    members: tuple[Member, ...]
    scope_sizes: Shape
    block_sizes: Shape
    dtype: torch.dtype
    mask_dtype: torch.dtype
    big: bool
    level: bool
    block: Shape = ()

    @property
    def rows(self) -> int:
        """Scopes."""
        return prod(self.scope_sizes)

    @property
    def width(self) -> int:
        """Blocks of a scope."""
        return prod(self.block_sizes)

    @property
    def elements(self) -> int:
        """Elements of the largest member's block."""
        return max(m.elements.count for m in self.members)

    @cached_property
    def in_memory_order(self) -> "Part":
        """The same scopes counted so that neighbours lie next to each other; only where no scope has its own number."""
        steps = [walk for m in self.members for walk in m.scope]
        order = sorted(range(len(self.scope_sizes)), key=lambda k: -steps[0][k])
        sizes = tuple(self.scope_sizes[k] for k in order)
        nest = Nest(sizes=sizes, strides=tuple(tuple(walk[k] for k in order) for walk in steps)).coalesced()
        members = [replace(m, scope=_pair(nest, (2 * at, 2 * at + 1))) for at, m in enumerate(self.members)]
        return replace(self, members=tuple(members), scope_sizes=nest.sizes)

    @property
    def single(self) -> bool:
        """Whether a block is one element of one tensor, so that its score is |x| as it is."""
        return len(self.members) == 1 and self.elements == 1

    @property
    def nests(self) -> Shape:
        """Loops over scope, block and element."""
        return len(self.scope_sizes), len(self.block_sizes), max(len(m.elements.sizes) for m in self.members)

    @property
    def inner(self) -> int:
        """The innermost element loop where all members share it, else 0 (read from the table)."""
        sizes = {m.elements.sizes[-1:] for m in self.members}
        return next(iter(sizes))[0] if self.nests[2] > 1 and len(sizes) == 1 else 0

    @property
    def units(self) -> tuple[bool, ...]:
        """Whether the innermost stride is 1: for scope, block and element, of values and of masks."""
        walks = [(m.scope[t], m.block[t], m.elements.strides[t]) for t in (0, 1) for m in self.members]
        half = len(self.members)
        return tuple(
            all(steps[level][-1:] == (1,) for steps in walks[t * half : (t + 1) * half])
            for level in range(3)
            for t in (0, 1)
        )

    @property
    def flat(self) -> bool:
        """Whether scopes, blocks and elements follow each other in memory without a gap, in values and mask alike."""
        m = self.members[0]
        whole = Nest(
            sizes=self.scope_sizes + self.block_sizes + m.elements.sizes,
            strides=tuple(m.scope[t] + m.block[t] + m.elements.strides[t] for t in (0, 1)),
        ).coalesced()
        return len(self.members) == 1 and whole.strides in (((1,), (1,)), ((), ()))

    def aligned(self, flat: bool) -> int:
        """Of what power of two (16 at most) strides and runs of memory are multiples; 0 if memory starts anywhere.

        Memory that is one `flat` run has none.
        """
        if not self.level:
            return 0
        if flat:
            return 16
        read = [  # strides that are read from the table; an innermost 1 that all members share is not
            walk[:-1] if unit else walk
            for m in self.members
            for unit, walk in zip(self.units, (*m.scope, *m.block, *m.elements.strides), strict=True)
        ]
        runs = [  # sizes of innermost loops along memory, where vectors must end with the loop
            sizes[-1]
            for sizes, units in ((self.scope_sizes, self.units[:2]), (self.block_sizes, self.units[2:4]))
            if len(sizes) > 1 and any(units)
        ]
        if self.nests[2] > 1 and any(self.units[4:]):  # a member of fewer loops is walked by as many as the widest
            runs += [m.elements.sizes[-1] for m in self.members if m.elements.sizes]
        return gcd(16, *(d for walk in read for d in walk), *runs)


def to_part(scopes: Scopes, *, big: bool) -> Part:
    """Lower a group of scopes; members without a mask (or without values) get the other's strides.

    Args:
        scopes: nothing partial; every member has values or a mask.
        big: count addresses in 64 bits even where 32 would do.
    """
    far = any(_reaches_far(t) for m in scopes.members for t in (m.values, m.mask))
    level = not any(start % 16 for pair in starts_of(scopes) for start in pair)
    both = tuple(m.values is not None and m.mask is not None for m in scopes.members)
    dtype = scopes.members[0].window.dtype
    blocks = {tuple(n for n in m.shape if n > 1) for m in scopes.members}
    block = next(iter(blocks)) if len(blocks) == 1 else ()
    return _part(lower(scopes), both, dtype, _stored(scopes.members[0]), big or far, level, block)


@lru_cache(maxsize=4096)
def _part(
    nests: Nests,
    both: tuple[bool, ...],
    dtype: torch.dtype,
    mask_dtype: torch.dtype,
    big: bool,
    level: bool,
    block: Shape,
) -> Part:
    members, at = [], 0
    for has_both, elements in zip(both, nests.elements, strict=True):
        places = (at, at + 1) if has_both else (at, at)
        at += 2 if has_both else 1
        members.append(
            Member(
                elements=Nest(sizes=elements.sizes, strides=(elements.strides[0], elements.strides[-1])),
                scope=_pair(nests.scope, places),
                block=_pair(nests.block, places),
            )
        )
    return Part(
        members=tuple(members),
        scope_sizes=nests.scope.sizes,
        block_sizes=nests.block.sizes,
        dtype=dtype,
        mask_dtype=mask_dtype,
        big=big,
        level=level,
        block=block,
    )


def starts_of(scopes: Scopes) -> tuple[Shape, ...]:
    """Where each member's values and mask begin in memory; 0 for what it lacks."""
    return tuple(tuple(0 if t is None else t.data_ptr() for t in (m.values, m.mask)) for m in scopes.members)


def strided_part(rows: int, width: int, stride: Shape, *, dtype: torch.dtype, big: bool, level: bool = True) -> Part:
    """Rows of stored scores as single elements; decisions lie row by row, without gaps."""
    sizes = (rows, width)
    member = Member(
        elements=Nest(sizes=(), strides=((), ())),
        scope=((stride[0],), (width,)),
        block=((stride[1],), (1,)),
    )
    far = max(cosize(sizes, stride), rows * width) >= BIG
    return Part(
        members=(member,),
        scope_sizes=(rows,),
        block_sizes=(width,),
        dtype=dtype,
        mask_dtype=torch.uint8,
        big=big or far,
        level=level,
    )


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n.

    >>> [power_of_two(n) for n in (1, 3, 4, 100)]
    [1, 4, 4, 128]
    """
    return 1 << max(n - 1, 0).bit_length()


def _pair(nest: Nest, places: Shape) -> tuple[Shape, Shape]:
    return nest.strides[places[0]], nest.strides[places[1]]


def _stored(m: Blocks) -> torch.dtype:
    dtype = torch.uint8 if m.mask is None else m.mask.dtype
    return torch.uint8 if dtype == torch.bool else dtype


def _reaches_far(t: Tensor | None) -> bool:
    return t is not None and cosize(tuple(t.shape), t.stride()) >= BIG
