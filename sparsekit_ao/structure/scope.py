"""Block grids tiled into scopes, the sets of blocks that compete; and scopes of several grids that share one budget."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import SparsityError
from ..selection import from_scopes
from ..selection.strides import grid_of
from .block import BlockSpec, SparseBlock, aligned_members, check_distinct, refuse_others
from .elements import tiles_of
from .layout import resolve_tile
from .member import ScopeMember
from .sparse_scope import SparseScope, scope_windows
from .view import View


class ScopeSpec(SparseScope):
    """One block grid tiled into scopes.

    Args:
        block: a `SparseBlock`, or a View or parameter taken as single elements.
        shape: blocks of a scope; () and missing trailing entries mean the whole dimension, as does -1.
        name: opening words of error messages; the block's by default.
        edge: `"partial"` allows smaller scopes at the edge; the block's by default.

    Raises:
        SparsityError: (a ValueError) a shape that does not fit the block grid.

    >>> s = ScopeSpec(BlockSpec(torch.ones(4, 8)), (1, 4))  # N:4 along the input
    >>> s.grid_shape, s.numblk_per_scope(), s.sparsity_to_nnz(0.5)
    ((4, 2), 4, 2)
    """

    def __init__(
        self,
        block: SparseBlock | View | Tensor,
        shape: Sequence[int] = (),
        name: str | None = None,
        *,
        edge: str | None = None,
    ) -> None:
        self.block = block if isinstance(block, SparseBlock) else BlockSpec(block)
        self.name = name if name is not None else self.block.name
        self.edge = edge or ("partial" if any(b.edge == "partial" for b in self.block.blocks()) else "error")
        self.shape = resolve_tile("scope", self.block.grid_shape, shape, edge=self.edge, where=self._where())
        self.grid_shape = grid_of(self.block.grid_shape, self.shape)

    def members(self) -> list[ScopeMember]:
        """The spec's own blocks."""
        return [ScopeMember(block=self.block, shape=self.shape, name=self.name)]

    def block_to_scope(self, t: Tensor, reorder: bool = True, merge: bool = False) -> Tensor:
        """A tensor of the block grid's shape cut into scopes.

        Args:
            t: of the block grid's shape; scopes must divide it.
            reorder: True gives (*scope grid, *scope); False interleaves (g0, s0, g1, s1, ...).
            merge: with `reorder`, the scope's dimensions become one: (*scope grid, blocks per scope).
        """
        if tuple(t.shape) != self.block.grid_shape:
            raise SparsityError(
                f"{self._where()}block_to_scope takes the block grid's shape {self.block.grid_shape}, "
                f"got {tuple(t.shape)}"
            )
        if self.is_partial:
            raise SparsityError(f"{self._where()}block_to_scope needs whole scopes; {self.shape} leaves partial ones")
        return tiles_of(t, self.shape, reorder, merge)

    def scope_to_block(self, t: Tensor, reorder: bool = True) -> Tensor:
        """The inverse of `block_to_scope`: back to the block grid's shape.

        Args:
            t: (*scope grid, *scope) or (*scope grid, blocks per scope); (g0, s0, g1, s1, ...) without `reorder`.
            reorder: as it was given there.
        """
        grid, width = self.grid_shape, math.prod(self.shape)
        interleaved = tuple(size for pair in zip(grid, self.shape, strict=True) for size in pair)
        taken = [(*grid, *self.shape), (*grid, width)] if reorder else [interleaved]
        if tuple(t.shape) not in taken:
            raise SparsityError(
                f"{self._where()}scope_to_block takes {' or '.join(map(str, taken))}, got {tuple(t.shape)}"
            )
        if not reorder:
            return t.reshape(self.block.grid_shape)
        return from_scopes(t.reshape(self.numscp(), width), scope_windows(self)[0])

    def __repr__(self) -> str:
        return f"ScopeSpec({self.block!r}, shape={self.shape})"


class ScopeCoupling(SparseScope):
    """Scopes of several block grids that share one budget: their blocks compete with each other.

    Args:
        scopes: the members, which may have different counts of blocks in a scope; budgets count all of them.
        orders: for each member None, or a permutation: aligned scope dimension k is the member's dimension order[k].
        name: opening words of error messages.

    Raises:
        CouplingError: aligned scope grids differ, or an order is no permutation.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> c = ScopeCoupling([ScopeSpec(BlockSpec(a)), ScopeSpec(BlockSpec(b))])
    >>> [m.tolist() for m in c.get_masks(2).values()]
    [[False, True], [True]]
    """

    def __init__(
        self, scopes: Sequence[ScopeSpec], orders: Sequence[Sequence[int] | None] | None = None, name: str | None = None
    ) -> None:
        self.name = name
        refuse_others("ScopeCoupling", scopes, ScopeSpec, self._where())
        check_distinct([spec for s in scopes for spec in s.block.blocks()], self._where())
        full, self.grid_shape = aligned_members("scope", scopes, orders, self._where())
        self._specs, self._members = list(scopes), []
        for s, order in zip(scopes, full, strict=True):
            # dimensions that a member lacks have one scope each, so they do not change the order of its scopes
            own = tuple(k for k in order if k < len(s.shape))
            self._members.append(ScopeMember(block=s.block, shape=s.shape, order=own, name=s.name))

    def members(self) -> list[ScopeMember]:
        """The members with their orders."""
        return list(self._members)

    def block_to_scope(self, t: Mapping[SparseBlock, Tensor], reorder: bool = True, merge: bool = False) -> Tensor:
        """Tensors of the members' block grids as (*scope grid, blocks per scope of all members); needs `merge=True`."""
        if not (reorder and merge):
            raise SparsityError(f"{self._where()}members may differ in shape; use merge=True")
        rows = self._rows_of(t, "t")
        assert rows is not None
        return rows.reshape([*self.grid_shape, rows.shape[1]])

    def scope_to_block(self, t: Tensor, reorder: bool = True) -> dict[SparseBlock, Tensor]:
        """The inverse of `block_to_scope`: {block: tensor of its grid's shape}."""
        want = (*self.grid_shape, self.numblk_per_scope())
        if not reorder or tuple(t.shape) != want:
            raise SparsityError(f"{self._where()}scope_to_block takes {want}, got {tuple(t.shape)}")
        return dict(self._grids_of(t.reshape(self.numscp(), want[-1])))

    def __repr__(self) -> str:
        return f"ScopeCoupling({self._specs!r})"
