"""The canonical form: scopes as three strided nests, scope x block x element.

Every pattern lowers to it. An address is the sum of three parts, one for each nest, so a kernel needs only three short
lists of sizes and strides.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from .strides import Shape, grid_of
from .tiling import Blocks, Scopes, aligned_grid


@dataclass(frozen=True, kw_only=True)
class Nest:
    """Loops over one or more tensors at once, outermost first.

    Attributes:
        sizes: trips of each loop.
        strides: for each tensor its step in elements, one entry for each loop.
    """

    sizes: Shape
    strides: tuple[Shape, ...]

    @property
    def count(self) -> int:
        """Trips of all loops together."""
        return math.prod(self.sizes)

    def coalesced(self) -> "Nest":
        """The same addresses in the same order with the fewest loops.

        >>> Nest(sizes=(8, 1, 4), strides=((4, 9, 1),)).coalesced()
        Nest(sizes=(32,), strides=((1,),))
        """
        loops: list[tuple[int, Shape]] = []
        for size, *steps in zip(self.sizes, *self.strides, strict=True):
            if size == 1:
                continue
            if loops and all(outer == inner * size for outer, inner in zip(loops[-1][1], steps, strict=True)):
                loops[-1] = (loops[-1][0] * size, tuple(steps))
            else:
                loops.append((size, tuple(steps)))
        return Nest(
            sizes=tuple(size for size, _ in loops),
            strides=tuple(tuple(steps[t] for _, steps in loops) for t in range(len(self.strides))),
        )


@dataclass(frozen=True, kw_only=True)
class Nests:
    """Scopes lowered: tensor t's element is at `scope + block + element`, each an address in its nest.

    `scope` is over scopes in the aligned order, `block` over the blocks of a scope in the order that ties go by; their
    tensors are each member's values and mask, if given. `elements` has one nest for each member, over a block's
    elements.
    """

    scope: Nest
    block: Nest
    elements: tuple[Nest, ...]


def lower(scopes: Scopes) -> Nests:
    """The three nests of scopes that divide their windows evenly (nothing partial).

    >>> weight = torch.zeros(4, 8)
    >>> nests = lower(Scopes(members=(Blocks(shape=(1, 1), values=weight),), shape=(1, 4)))  # N:4
    >>> nests.scope, nests.block
    (Nest(sizes=(8,), strides=((4,),)), Nest(sizes=(4,), strides=((1,),)))
    """
    windows = tuple(
        (m.shape, m.order, tuple(m.window.shape), tuple(t.stride() for t in tensors_of(m))) for m in scopes.members
    )
    return _lower(tuple(scopes.shape), tuple(scopes.order), windows)


@lru_cache(maxsize=4096)  # a model has many tensors of few shapes
def _lower(shape: Shape, order: Shape, windows: tuple[tuple[Shape, Shape, Shape, tuple[Shape, ...]], ...]) -> Nests:
    """See `lower`; windows are (block shape, order, sizes, strides of each tensor)."""
    n = len(shape)
    first = windows[0]
    grid = aligned_grid(grid_of(first[2], first[0]), first[1], n)
    outer = order or tuple(range(n))
    steps = [_block_steps(block, turn, stride, n) for block, turn, _, strides in windows for stride in strides]
    scope = Nest(
        sizes=tuple(grid[k] // shape[k] for k in outer),
        strides=tuple(tuple(step[k] * shape[k] for k in outer) for step in steps),
    )
    block_nest = Nest(sizes=shape, strides=tuple(steps))
    elements = tuple(Nest(sizes=block, strides=strides).coalesced() for block, _, _, strides in windows)
    return Nests(scope=scope.coalesced(), block=block_nest.coalesced(), elements=elements)


def tensors_of(m: Blocks) -> tuple[Tensor, ...]:
    """A member's values and mask, those that it has."""
    return tuple(t for t in (m.values, m.mask) if t is not None)


def _block_steps(block: Shape, order: Shape, stride: Shape, ndim: int) -> Shape:
    """The distance to the next block along each dimension of the aligned grid."""
    own = tuple(d * b for d, b in zip(stride, block, strict=True)) + (0,) * (ndim - len(stride))
    return tuple(own[k] for k in order) if order else own
