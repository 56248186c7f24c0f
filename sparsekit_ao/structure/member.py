"""`ScopeMember`: one block grid of a `SparseScope`, and how its scopes are ordered."""

import math
from dataclasses import dataclass

from ..selection.strides import Shape, grid_of
from .block import SparseBlock


@dataclass(frozen=True, kw_only=True, eq=False)
class ScopeMember:
    """One block grid of a `SparseScope`, tiled into scopes.

    Attributes:
        block: the blocks that compete.
        shape: blocks of a scope along each dimension of the block grid.
        order: aligned scope dimension k is this scope grid's dimension order[k]; () is the identity.
        name: opening words of error messages.
    """

    block: SparseBlock
    shape: Shape
    order: Shape = ()
    name: str | None = None

    @property
    def grid_shape(self) -> Shape:
        """Scopes along each dimension of the block grid."""
        return grid_of(self.block.grid_shape, self.shape)

    @property
    def width(self) -> int:
        """Blocks of a full scope."""
        return math.prod(self.shape)
