"""`Scopes` lowered through `nests` to what kernels are given: sizes, strides, and what those permit at compile time."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod

import torch

from ..nests import Nest, Nests, lower
from ..strides import Shape, cosize
from ..tiling import Scopes

LOOPS = 6  # most loops of a nest: the columns that the tables have for it
BIG = (1 << 31) - (1 << 20)  # elements from which offsets take 64 bits: a last tile may reach beyond its tensor


@dataclass(frozen=True, kw_only=True)
class Member:
    """One tensor of a part: its strides over scopes, blocks and elements, each of values, then of the mask."""

    elements: Nest
    scope: tuple[Shape, Shape]
    block: tuple[Shape, Shape]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is known of one `Scopes`, but for addresses.

    Attributes:
        members: block-coupled tensors.
        scope_sizes: loops over scopes.
        block_sizes: loops over the blocks of a scope.
        dtype: of all members' values.
        mask_dtype: of all members' masks (uint8 for bool).
        big: whether some offset needs 64 bits.
        aligned: whether all memory starts at a multiple of 16 bytes.
        block: sides of a block longer than 1, outermost first, where all members share them.
    """

    members: tuple[Member, ...]
    scope_sizes: Shape
    block_sizes: Shape
    dtype: torch.dtype
    mask_dtype: torch.dtype
    big: bool
    aligned: bool
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
        """The same scopes in order of descending strides; not for scopes with their own budgets, which go by index."""
        strides = [own for m in self.members for own in m.scope]
        order = sorted(range(len(self.scope_sizes)), key=lambda k: -strides[0][k])
        sizes = tuple(self.scope_sizes[k] for k in order)
        nest = Nest(sizes=sizes, strides=tuple(tuple(own[k] for k in order) for own in strides)).coalesced()
        members = [replace(m, scope=_pair(nest, (2 * at, 2 * at + 1))) for at, m in enumerate(self.members)]
        return replace(self, members=tuple(members), scope_sizes=nest.sizes)

    @property
    def single(self) -> bool:
        """Whether a block is one element of one tensor, so that its score is |x| as it is."""
        return len(self.members) == 1 and self.elements == 1

    @property
    def nests(self) -> Shape:
        """Number of loops over scope, block and element."""
        return len(self.scope_sizes), len(self.block_sizes), max(len(m.elements.sizes) for m in self.members)

    @property
    def inner(self) -> int:
        """The innermost element loop where all members share it, else 0 (read from the table)."""
        sizes = {m.elements.sizes[-1:] for m in self.members}
        return next(iter(sizes))[0] if self.nests[2] > 1 and len(sizes) == 1 else 0

    @property
    def unit_strides(self) -> tuple[bool, ...]:
        """Whether the innermost stride is 1: over scopes, blocks and elements, each of values, then of masks."""
        strides = [(*m.scope, *m.block, *m.elements.strides) for m in self.members]
        return tuple(all(own[-1:] == (1,) for own in column) for column in zip(*strides, strict=True))

    @property
    def contiguous(self) -> bool:
        """Whether scopes, blocks and elements are contiguous in this order, in values and mask alike."""
        m = self.members[0]
        whole = Nest(
            sizes=self.scope_sizes + self.block_sizes + m.elements.sizes,
            strides=tuple(m.scope[t] + m.block[t] + m.elements.strides[t] for t in (0, 1)),
        ).coalesced()
        return len(self.members) == 1 and whole.strides in (((1,), (1,)), ((), ()))

    def alignment(self, contiguous: bool) -> int:
        """The power of two (16 at most) that divides strides and loops over memory; 0 if memory starts anywhere.

        Tiles of `contiguous` memory have no strides.
        """
        if not self.aligned:
            return 0
        if contiguous:
            return 16
        read = [  # strides that are read from the table; an innermost 1 that all members share is not
            own[:-1] if unit else own
            for m in self.members
            for unit, own in zip(self.unit_strides, (*m.scope, *m.block, *m.elements.strides), strict=True)
        ]
        scope, block, element = (any(self.unit_strides[k : k + 2]) for k in (0, 2, 4))
        loops = [  # sizes of innermost loops along memory, where vectors must end with the loop
            sizes[-1]
            for sizes, unit in ((self.scope_sizes, scope), (self.block_sizes, block))
            if len(sizes) > 1 and unit
        ]
        if self.nests[2] > 1 and element:  # a member of fewer loops is addressed by as many as the one with most
            loops += [m.elements.sizes[-1] for m in self.members if m.elements.sizes]
        return gcd(16, *(d for own in read for d in own), *loops)


def to_part(scopes: Scopes, *, big: bool) -> Part:
    """Lower scopes; members without a mask (or without values) get the other's strides.

    Args:
        scopes: nothing partial; every member has values or a mask.
        big: compute offsets in 64 bits even where 32 would do.
    """
    tensors = [t for m in scopes.members for t in (m.values, m.mask) if t is not None]
    far = any(cosize(tuple(t.shape), t.stride()) >= BIG for t in tensors)
    aligned = not any(start % 16 for pair in starts_of(scopes) for start in pair)
    first = scopes.members[0]
    mask_dtype = torch.uint8 if first.mask is None or first.mask.dtype == torch.bool else first.mask.dtype
    blocks = {tuple(n for n in m.shape if n > 1) for m in scopes.members}
    block = next(iter(blocks)) if len(blocks) == 1 else ()
    return _part(lower(scopes), (first.window.dtype, mask_dtype), big or far, aligned, block)


@lru_cache(maxsize=4096)
def _part(nests: Nests, dtypes: tuple[torch.dtype, torch.dtype], big: bool, aligned: bool, block: Shape) -> Part:
    members, at = [], 0
    for nest in nests.elements:
        pair = (at, at + len(nest.strides) - 1)  # the member's values and mask among all tensors, or the one it has
        at += len(nest.strides)
        elements = Nest(sizes=nest.sizes, strides=(nest.strides[0], nest.strides[-1]))
        members.append(Member(elements=elements, scope=_pair(nests.scope, pair), block=_pair(nests.block, pair)))
    return Part(
        members=tuple(members),
        scope_sizes=nests.scope.sizes,
        block_sizes=nests.block.sizes,
        dtype=dtypes[0],
        mask_dtype=dtypes[1],
        big=big,
        aligned=aligned,
        block=block,
    )


def starts_of(scopes: Scopes) -> tuple[Shape, ...]:
    """Addresses of each member's values and mask; 0 for what it lacks."""
    return tuple(tuple(0 if t is None else t.data_ptr() for t in (m.values, m.mask)) for m in scopes.members)


def strided_part(rows: int, width: int, stride: Shape, *, dtype: torch.dtype, big: bool, aligned: bool = True) -> Part:
    """Rows of stored scores as single elements; decisions are contiguous."""
    scope, block = ((stride[0],), (width,)), ((stride[1],), (1,))
    far = max(cosize((rows, width), stride), rows * width) >= BIG
    return Part(
        members=(Member(elements=Nest(sizes=(), strides=((), ())), scope=scope, block=block),),
        scope_sizes=(rows,),
        block_sizes=(width,),
        dtype=dtype,
        mask_dtype=torch.uint8,
        big=big or far,
        aligned=aligned,
    )


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n.

    >>> [power_of_two(n) for n in (1, 3, 4, 100)]
    [1, 4, 4, 128]
    """
    return 1 << max(n - 1, 0).bit_length()


def _pair(nest: Nest, tensors: Shape) -> tuple[Shape, Shape]:
    return nest.strides[tensors[0]], nest.strides[tensors[1]]
