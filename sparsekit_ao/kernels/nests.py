"""The canonical form: scopes as three strided nests, scope x block x element.

Every pattern lowers to it. An address is the sum of three parts, one a nest, so a kernel needs nothing but three short
lists of sizes and strides. Knows sizes and strides; never a value.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ..layout import Shape
from .tiling import Blocks, Scopes

__all__ = ["Nest", "Nests", "lower"]


@dataclass(frozen=True, kw_only=True)
class Nest:
    """Loops over one or more tensors at once, outermost first.

    Attributes:
        sizes: trips of each loop.
        strides: for each tensor its step in elements, one entry a loop.
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

    Attributes:
        scope: over scopes, in the aligned order; tensors are each member's values and mask, as far as given.
        block: over the blocks of a scope, same tensors; its order is the one that ties go by.
        elements: over a block's elements, one nest a member (its values and mask).
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
    n = len(scopes.shape)
    grid = scopes.grid
    outer = scopes.order or tuple(range(n))
    steps = [_block_steps(m, t, n) for m in scopes.members for t in tensors_of(m)]
    scope = Nest(
        sizes=tuple(grid[k] // scopes.shape[k] for k in outer),
        strides=tuple(tuple(step[k] * scopes.shape[k] for k in outer) for step in steps),
    )
    block = Nest(sizes=scopes.shape, strides=tuple(steps))
    elements = tuple(
        Nest(sizes=m.shape, strides=tuple(t.stride() for t in tensors_of(m))).coalesced() for m in scopes.members
    )
    return Nests(scope=scope.coalesced(), block=block.coalesced(), elements=elements)


def tensors_of(m: Blocks) -> tuple[Tensor, ...]:
    """A member's values and mask, as far as it has them."""
    return tuple(t for t in (m.values, m.mask) if t is not None)


def _block_steps(m: Blocks, t: Tensor, ndim: int) -> Shape:
    """How far the next block lies along each dimension of the aligned grid."""
    own = tuple(d * b for d, b in zip(t.stride(), m.shape, strict=True)) + (0,) * (ndim - t.ndim)
    return tuple(own[k] for k in m.order) if m.order else own
