"""Scopes: the sets of blocks that compete, their budgets, k-th largest norms and exact masks.

`SparseScope` is the base class of one block grid's scopes (`scope.ScopeSpec`) and coupled ones
(`scope.ScopeCoupling`). `MaskUpdate` describes one update of masks, `update_masks` carries updates out.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Norm, Scopes, Update, from_scopes, keep_mask, scope_masks, scope_scores, to_scopes
from ..selection.tiling import real_slots, tile_volumes
from .block import BlockSpec, SparseBlock, block_windows, live_windows
from .budget import Budget, checked_budget, sparsity_to_nnz
from .member import ScopeMember
from .proximal import Thresholded, Values, zero_below

BlockValues = Tensor | Mapping[SparseBlock, Tensor] | None


class SparseScope(Thresholded):
    """Scopes on one aligned grid; base class of `ScopeSpec` and `ScopeCoupling`.

    `values` are parameter-shaped (a mapping {parameter: tensor} for several parameters), None the parameters
    themselves. Budgets `nnz` count blocks kept in each scope: an int, or an integer tensor of the scope grid's shape.
    `grid_shape` counts the scopes along each dimension of the aligned scope grid.
    """

    _grid_name = "scope grid"

    @abstractmethod
    def members(self) -> list[ScopeMember]:
        """The block grids whose blocks compete at each aligned scope index, in order."""

    def blocks(self) -> list[BlockSpec]:
        """The block specs of all members, in order."""
        return [spec for m in self.members() for spec in m.block.blocks()]

    def numscp(self) -> int:
        """Number of scopes."""
        return math.prod(self.grid_shape)

    def numblk_per_scope(self) -> int:
        """Blocks that compete in a full scope, over all members."""
        return sum(m.width for m in self.members())

    def numblk(self) -> int:
        """Blocks in all scopes."""
        return sum(m.block.numblk() for m in self.members())

    def numel_per_scope(self) -> int:
        """Elements in a full scope."""
        return sum(m.width * m.block.numel_per_block() for m in self.members())

    def blocks_per_scope(self) -> Tensor:
        """Blocks of each scope (fewer at a partial edge); int64, of the scope grid's shape."""
        volumes = [(tile_volumes(m.block.grid_shape, m.shape), m.order) for m in self.members()]
        aligned = [(v.permute(order) if order else v).reshape(self.grid_shape) for v, order in volumes]
        return torch.stack(aligned).sum(0)

    @property
    def is_partial(self) -> bool:
        """Whether some scope at an edge holds fewer blocks than the others."""
        return any(g % n for m in self.members() for g, n in zip(m.block.grid_shape, m.shape, strict=True))

    def sparsity_to_nnz(self, sparsity: float) -> Budget:
        """Blocks to keep in each scope at a level; an int, or int64 of the scope grid's shape if scopes differ."""
        of_full_scope = sparsity_to_nnz(sparsity, self.numblk_per_scope(), self._where())
        if not self.is_partial:
            return of_full_scope
        count = self.blocks_per_scope()
        return count - torch.floor(count.double() * float(sparsity) + 1e-9).long()

    def level_of(self, nnz: Budget) -> float:
        """The fraction of all blocks that a budget drops."""
        if isinstance(nnz, int) and not self.is_partial:
            return 1 - nnz / self.numblk_per_scope()
        counts = self.blocks_per_scope()
        return 1 - int(torch.minimum(torch.as_tensor(nnz, device="cpu"), counts).sum()) / max(int(counts.sum()), 1)

    def block_norms(self, values: Values = None, norm: Norm = 2) -> Tensor:
        """Norms of the competing blocks: (*scope grid, blocks per scope); slots beyond a partial scope hold 0."""
        rows = self._scores(values, None, norm)
        return rows.reshape([*self.grid_shape, rows.shape[1]])

    def kth_largest(self, values: Values = None, nnz: Budget = 1) -> Tensor:
        """The nnz-th largest block norm of each scope, 1 <= nnz <= blocks per scope; of the scope grid's shape."""
        return self._kth(self._scores(values, None), self.budget(nnz, least=1)).reshape(self.grid_shape)

    def kth_mid(self, values: Values = None, nnz: Budget = 1, k_weight: float = 1.0) -> Tensor:
        """`(x_k + w x_{k+1}) / (1 + w)`: a threshold between the last block kept and the first dropped.

        Needs 1 <= nnz < blocks per scope, so that both exist. Of the scope grid's shape.
        """
        keep = self.budget(nnz, least=1, spare=1)
        scores = self._scores(values, None)
        low, high = self._kth(scores, keep + 1), self._kth(scores, keep)
        return ((high + k_weight * low) / (1 + k_weight)).reshape(self.grid_shape)

    @torch.no_grad()
    def keep_thresholds(self, nnz: Budget, values: Values = None) -> dict[SparseBlock, Tensor]:
        """Thresholds of `soft_threshold` for each block that leave exactly nnz blocks in every scope.

        They are the mean of the norms of the last block kept and the first dropped, inf for blocks that are dropped
        (ties included), and below the block's own norm for those kept. Of each member's block grid shape.
        """
        rows = self._scores(values, None)
        kept, real = self._select(rows, self.budget(nnz)), real_slots(scope_windows(self), rows.device)
        dropped = ~kept if real is None else real & ~kept
        low = torch.where(dropped, rows, 0).amax(1, keepdim=True)
        high = torch.where(kept & ~rows.isnan(), rows, math.inf).amin(1, keepdim=True)
        middle = torch.where(dropped.any(1, keepdim=True), low / 2 + high / 2, 0)
        return dict(self._grids_of(torch.where(kept, torch.minimum(middle, rows * (1 - 2**-18)), math.inf)))

    @torch.no_grad()
    def get_masks(
        self, nnz: Budget, values: Values = None, block_scores: BlockValues = None, candidates: BlockValues = None
    ) -> dict[BlockSpec, Tensor]:
        """Keep exactly nnz blocks in every scope.

        Args:
            nnz: blocks kept in each scope.
            values: what is scored (by 2-norm); not together with `block_scores`.
            block_scores: scores instead of norms: of the block grid's shape, a mapping {block: tensor} for several; or
                (*scope grid, blocks per scope), as `block_norms` returns them.
            candidates: bool of either shape, True where a block may compete; the others are dropped.

        Returns:
            {block: parameter-shaped bool mask}, True = keep; elements outside a view are kept.

        >>> from sparsekit_ao import ScopeSpec
        >>> s = ScopeSpec(BlockSpec(torch.tensor([[1.0, 4.0, 3.0, 2.0]])), (1, 4))
        >>> next(iter(s.get_masks(2).values()))
        tensor([[False,  True,  True, False]])
        """
        if values is not None and block_scores is not None:
            raise SparsityError(f"{self._where()}get_masks: values and block_scores are mutually exclusive")
        rows = self._scores(values, block_scores)
        allowed = self._rows_of(candidates, "candidates")
        kept = self._select(rows, self.budget(nnz), None if allowed is None else allowed.bool())
        return {spec: m for block, grid in self._grids_of(kept) for spec, m in block.get_masks(grid).items()}

    @torch.no_grad()
    def hard_threshold(
        self,
        thresholds: Tensor | float | None = None,
        nnz: Budget | None = None,
        values: Values = None,
    ) -> None:
        """Zero blocks in place: those with a norm strictly below the scope's threshold, or all but nnz a scope.

        Args:
            thresholds: a number, or a tensor that broadcasts to the scope grid.
            nnz: blocks kept in each scope; exactly one of the two is given.
            values: what the norms are taken of.
        """
        if (thresholds is None) == (nnz is None):
            raise SparsityError(f"{self._where()}hard_threshold needs either thresholds or nnz, not both")
        if nnz is not None:
            for spec, mask in self.get_masks(nnz, values).items():
                spec.view.param.detach().masked_fill_(~mask, 0)
            return
        assert thresholds is not None
        scored = None if values is None else scope_windows(self, values)
        zero_below(self._live(), self._thresholds(thresholds), scored=scored)

    def budget(self, nnz: Budget, *, least: int = 0, spare: int = 0) -> Budget:
        """The budget, checked: least <= nnz <= blocks per scope - spare."""
        return checked_budget(nnz, self.grid_shape, least, self.numblk_per_scope(), spare, self._where())

    @torch.no_grad()
    def update_masks(
        self,
        masks: Mapping[BlockSpec, Tensor],
        nnz: Budget,
        values: Values = None,
        *,
        norm: Norm = 2,
        among_kept: bool = False,
        impl: str = "auto",
    ) -> None:
        """Fill parameter-shaped masks in place; see `MaskUpdate` for the arguments, and `selection` for `impl`."""
        update = MaskUpdate(scope=self, masks=masks, keep=nnz, values=values, norm=norm, among_kept=among_kept)
        update_masks([update], impl=impl)

    def _scores(self, values: Values, block_scores: BlockValues, norm: Norm = 2) -> Tensor:
        """[scopes, competitors]: norms of the values, or the scores given."""
        given = self._rows_of(block_scores, "block_scores")
        if given is not None:
            return given
        return torch.cat([scope_scores(w, norm, as_mean=self.as_mean) for w in scope_windows(self, values)], dim=1)

    @property
    def as_mean(self) -> bool:
        """Whether norms are power means, so that they compare: where some block is partial."""
        return any(n % b for spec in self.blocks() for n, b in zip(spec.view.shape, spec.shape, strict=True))

    def _rows_of(self, per_block: BlockValues, what: str) -> Tensor | None:
        if per_block is None:
            return None
        members, in_rows = self.members(), (*self.grid_shape, self.numblk_per_scope())
        if isinstance(per_block, Tensor):
            if tuple(per_block.shape) == in_rows:
                return per_block.reshape(self.numscp(), in_rows[-1])
            if len(members) > 1:
                raise SparsityError(
                    f"{self._where()}{what} must be a mapping {{block: tensor}} for coupled scopes, or of the shape "
                    f"{in_rows}, got {tuple(per_block.shape)}"
                )
            per_block = {members[0].block: per_block}
        for m in members:
            if m.block not in per_block or tuple(per_block[m.block].shape) != m.block.grid_shape:
                where = f"{m.name}: " if m.name else ""
                raise SparsityError(
                    f"{where}{what} must have the block grid's shape {m.block.grid_shape} or, as block_norms, {in_rows}"
                )
        rows = [to_scopes(per_block[m.block], w, 0) for m, w in zip(members, scope_windows(self), strict=True)]
        return torch.cat(rows, dim=1)

    def _grids_of(self, rows: Tensor) -> list[tuple[SparseBlock, Tensor]]:
        """Rows [scopes, blocks of a scope over all members] as one tensor of the block grid's shape for each member."""
        members, windows = self.members(), scope_windows(self)
        parts = rows.split([m.width for m in members], dim=1)
        return [(m.block, from_scopes(part, w)) for m, part, w in zip(members, parts, windows, strict=True)]

    def _select(self, rows: Tensor, keep: Budget, allowed: Tensor | None = None) -> Tensor:
        """The selection rule on these rows; slots without a block never compete."""
        real = real_slots(scope_windows(self), rows.device)
        candidates = allowed if real is None else real if allowed is None else real & allowed
        return keep_mask(rows, keep.reshape(-1) if isinstance(keep, Tensor) else keep, candidates=candidates)

    def _kth(self, rows: Tensor, keep: Budget) -> Tensor:
        """The smallest score that the selection keeps, for each row."""
        number = self._select(rows, keep) & ~rows.isnan()
        smallest = torch.where(number, rows, float("inf")).amin(1)
        return torch.where(number.any(1), smallest, float("nan"))

    def _live(self, conditioners: Values = None) -> list[Scopes]:
        self._check_values(conditioners)
        return [
            Scopes(members=live_windows(m.block, conditioners), shape=m.shape, order=m.order) for m in self.members()
        ]

    def _check_values(self, values: Values) -> None:
        if isinstance(values, Tensor) and len({id(spec.view.param) for spec in self.blocks()}) > 1:
            raise SparsityError(f"{self._where()}coupled scopes take values as a mapping {{parameter: tensor}}")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskUpdate:
    """The masks of one set of scopes, to be chosen and filled in place.

    Attributes:
        scope: the scopes.
        masks: {block: parameter-shaped mask} for every block, of any dtype (1 = keep).
        keep: blocks kept in each scope: an int, or an integer tensor of the scope grid's shape.
        values: what is scored: parameter-shaped, {parameter: tensor} for several, None for the parameters.
        norm: 1, 2 or inf; see `selection.block_scores`.
        among_kept: choose only among what the masks still keep.
        masked: score by the values that the masks keep; see `selection.Update`.
    """

    scope: SparseScope
    masks: Mapping[BlockSpec, Tensor]
    keep: Budget
    values: Values = None
    norm: Norm = 2
    among_kept: bool = False
    masked: bool = False

    def value_of(self, spec: BlockSpec) -> Tensor:
        """The values of one of the scope's block specs."""
        param = spec.view.param
        return param if self.values is None else self.values if isinstance(self.values, Tensor) else self.values[param]


def update_masks(updates: Sequence[MaskUpdate], *, impl: str = "auto") -> None:
    """Fill the masks of updates that do not depend on each other, in place; those of one kind share GPU launches.

    All are checked before any mask changes. Their tensors are whole on this process; for `impl` see `selection`.
    """
    windows = [tuple(scope_windows(u.scope, u.values, u.masks)) for u in updates]
    chosen = [
        Update(scopes=w, keep=u.scope.budget(u.keep), norm=u.norm, among_kept=u.among_kept, masked=u.masked)
        for u, w in zip(updates, windows, strict=True)
    ]
    scope_masks(chosen, impl=impl)
    for update, w in zip(updates, windows, strict=True):
        write_back(w, update.scope, update.masks)


def scope_windows(
    scope: SparseScope, values: Values = None, masks: Mapping[BlockSpec, Tensor] | None = None
) -> list[Scopes]:
    """A scope's members as `selection` takes them; see `block_windows`."""
    scope._check_values(values)
    return [
        Scopes(members=block_windows(m.block, values, masks), shape=m.shape, order=m.order) for m in scope.members()
    ]


def write_back(windows: Sequence[Scopes], scope: SparseScope, masks: Mapping[BlockSpec, Tensor]) -> None:
    """Copy windows of `scope_windows(scope, ..., masks)`, filled, to masks of other strides than their parameter's.

    For those the windows are copies.
    """
    for spec, window in zip(scope.blocks(), (m for w in windows for m in w.members), strict=True):
        if not spec.view.is_aligned(masks[spec]):
            assert window.mask is not None
            spec.view.write_back(window.mask, masks[spec])
