"""What all scopes have in common: budgets, k-th largest norms, exact masks, thresholding.

`scope.ScopeSpec` is one block grid tiled into scopes, `coupling.ScopeCoupling` joins several. Every mask comes from
the one selection rule (`kernels`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import selection as kernels
from ..errors import SparsityError
from ..selection import Norm, Scopes, Update, from_scopes, keep_mask, scope_masks, to_scopes
from ..selection.strides import Shape
from ..selection.tiling import real_slots, tile_volumes
from .block import BlockSpec, SparseBlock, Values
from .budget import Budget, checked_budget, sparsity_to_nnz
from .in_place import Settings, on_grid, refuse_triton, shrink_in_place, threshold_in_place

__all__ = ["SparseScope"]

if TYPE_CHECKING:
    from .scope import ScopeSpec

BlockValues = Tensor | Mapping[SparseBlock, Tensor] | None


class SparseScope(ABC):
    """Scopes on one aligned grid; `ScopeSpec` and `ScopeCoupling` are the two kinds.

    `values` are parameter-shaped (a mapping {parameter: tensor} for several parameters), None the parameters
    themselves. Budgets `nnz` count blocks kept in each scope: an int, or an integer tensor of the scope grid's shape.
    """

    name: str | None

    @abstractmethod
    def scopes(self) -> "list[tuple[ScopeSpec, Shape]]":
        """Every spec with its order: aligned scope dimension k is the spec's dimension order[k] (() = identity)."""

    @property
    @abstractmethod
    def grid_shape(self) -> Shape:
        """Scopes along each dimension of the aligned scope grid."""

    def numscp(self) -> int:
        """Number of scopes."""
        return math.prod(self.grid_shape)

    def numblk_per_scope(self) -> int:
        """Blocks that compete in a full scope, over all members."""
        return sum(math.prod(s.shape) for s, _ in self.scopes())

    def numblk(self) -> int:
        """Blocks in all scopes."""
        return sum(s.block.numblk() for s, _ in self.scopes())

    def numel_per_scope(self) -> int:
        """Elements in a full scope."""
        return sum(math.prod(s.shape) * s.block.numel_per_block() for s, _ in self.scopes())

    def members_per_scope(self) -> Tensor:
        """Blocks that each scope really has (fewer at a partial edge); int64, of the scope grid's shape."""
        volumes = [(tile_volumes(g.grid, g.shape), g.order) for g in self.groups(None, None)]
        aligned = [(v.permute(order) if order else v).reshape(self.grid_shape) for v, order in volumes]
        return torch.stack(aligned).sum(0)

    @property
    def is_partial(self) -> bool:
        """Whether some scope at an edge holds fewer blocks than the others."""
        return any(g % n for spec, _ in self.scopes() for g, n in zip(spec.block.grid_shape, spec.shape, strict=True))

    def sparsity_to_nnz(self, sparsity: float) -> Budget:
        """Blocks to keep in each scope at a level; an int, or int64 of the scope grid's shape if scopes differ."""
        whole = sparsity_to_nnz(sparsity, self.numblk_per_scope(), self._where())
        if not self.is_partial:
            return whole
        count = self.members_per_scope()
        return count - torch.floor(count.double() * float(sparsity) + 1e-9).long()

    def level_of(self, nnz: Budget) -> float:
        """The fraction of all blocks that a budget drops."""
        if isinstance(nnz, int) and not self.is_partial:
            return 1 - nnz / self.numblk_per_scope()
        counts = self.members_per_scope()
        return 1 - int(torch.minimum(torch.as_tensor(nnz), counts).sum()) / max(int(counts.sum()), 1)

    def block_norms(self, values: Values = None) -> Tensor:
        """2-norms of the competing blocks: (*scope grid, blocks per scope); slots beyond a partial scope hold 0."""
        rows = self._scores(values, None)
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
    def get_masks(
        self, nnz: Budget, values: Values = None, block_scores: BlockValues = None, block_mask: BlockValues = None
    ) -> dict[BlockSpec, Tensor]:
        """Keep exactly nnz blocks in every scope.

        Args:
            nnz: blocks kept in each scope.
            values: what is scored (by 2-norm); not together with `block_scores`.
            block_scores: scores of the block grid's shape instead of norms; a mapping {block: tensor} for several.
            block_mask: bool of the block grid's shape, True where a block may compete; the others are dropped.

        Returns:
            {block: parameter-shaped bool mask}, True = keep; elements outside a view are kept.

        >>> from sparsekit_ao import ScopeSpec
        >>> s = ScopeSpec(BlockSpec(torch.tensor([[1.0, 4.0, 3.0, 2.0]])), (1, 4))
        >>> next(iter(s.get_masks(2).values()))
        tensor([[False,  True,  True, False]])
        """
        if values is not None and block_scores is not None:
            raise SparsityError(f"{self._where()}get_masks takes values to score, or block_scores, not both")
        rows = self._scores(values, block_scores)
        allowed = self._rows_of(block_mask, "block_mask")
        kept = self._select(rows, self.budget(nnz), None if allowed is None else allowed.bool())
        out: dict[BlockSpec, Tensor] = {}
        groups = self.groups(None, None)
        for group, (spec, _), part in zip(groups, self.scopes(), kept.split(self._widths(), dim=1), strict=True):
            out.update(spec.block.get_masks(from_scopes(part, group)))
        return out

    @torch.no_grad()
    def hard_threshold(
        self,
        thresholds: Tensor | float | None = None,
        nnz: Budget | None = None,
        values: Values = None,
        *,
        impl: str = "auto",
    ) -> None:
        """Zero blocks in place: those with a norm strictly below the scope's threshold, or all but nnz a scope.

        Args:
            thresholds: a number, or a tensor that broadcasts to the scope grid.
            nnz: blocks kept in each scope; exactly one of the two is given.
            values: what the norms are taken of.
            impl: `"auto"`, `"reference"` or `"triton"` (which takes thresholds, and no other values).
        """
        if (thresholds is None) == (nnz is None):
            raise SparsityError(f"{self._where()}hard_threshold takes exactly one of thresholds and nnz")
        if nnz is not None or values is not None:
            refuse_triton(impl, "hard_threshold by a count or by other values", self._where())
        if nnz is not None:
            for leaf, mask in self.get_masks(nnz, values).items():
                leaf.view.param.detach().masked_fill_(~mask, 0)
            return
        assert thresholds is not None
        self._check_values(values)
        t = on_grid(thresholds, self.grid_shape, self._where(), "scope grid")
        groups = self._live(None)
        if values is None and threshold_in_place(groups, t, soft=False, factors=[1.0] * len(groups), impl=impl):
            return
        blocks = [spec.block for spec, _ in self.scopes()]
        drops = [b.below(t, values, self.as_mean) for b, t in zip(blocks, self._spread(thresholds), strict=True)]
        for block, drop in zip(blocks, drops, strict=True):
            block.zero_blocks(drop)

    @torch.no_grad()
    def soft_threshold(
        self,
        thresholds: Tensor | float,
        conditioners: Values = None,
        scale: bool = False,
        max_iter: int = 50,
        atol: float | None = None,
        eps: float = 0.0,
        *,
        impl: str = "auto",
    ) -> None:
        """Shrink every block by its scope's threshold, in place; see `SparseBlock.soft_threshold`.

        Args:
            thresholds: t >= 0, a number or a tensor that broadcasts to the scope grid.
            conditioners, scale, max_iter, atol, eps, impl: as there; `scale` multiplies by sqrt(elements per block).
        """
        self._check_values(conditioners)
        blocks = [spec.block for spec, _ in self.scopes()]
        t = on_grid(thresholds, self.grid_shape, self._where(), "scope grid")
        factors = [math.sqrt(b.numel_per_block()) if scale else 1.0 for b in blocks]
        settings = Settings(conditioned=conditioners is not None, max_iter=max_iter, atol=atol, eps=eps)
        live = self._live(conditioners)
        if shrink_in_place(live, t, factors=factors, settings=settings, impl=impl, where=self._where()):
            return
        shrunk = [
            b.shrunk(t, conditioners, scale, max_iter, atol, eps)
            for b, t in zip(blocks, self._spread(thresholds), strict=True)
        ]
        for block, elements in zip(blocks, shrunk, strict=True):
            block.write_elements(elements)

    def budget(self, nnz: Budget, *, least: int = 0, spare: int = 0) -> Budget:
        """The budget, checked: least <= nnz <= blocks per scope - spare."""
        return checked_budget(nnz, self.grid_shape, least, self.numblk_per_scope(), spare, self._where())

    def groups(self, values: Values, masks: Mapping[BlockSpec, Tensor] | None) -> list[Scopes]:
        """The scopes as the kernels take them: windows on the values, and on the masks if given."""
        self._check_values(values)
        return [
            Scopes(members=spec.block.operands(values, masks), shape=spec.shape, order=order)
            for spec, order in self.scopes()
        ]

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
        """Fill parameter-shaped masks in place: what a sparsifier's step calls.

        Args:
            masks: {block: mask} for every block, of any dtype (1 = keep).
            nnz: blocks kept in each scope.
            values: what is scored.
            norm: see `kernels.block_scores`.
            stage: choose only among what the masks still keep.
            impl: see `kernels`.
        """
        update = self.update_of(masks, nnz, values, norm=norm, among_kept=among_kept)
        scope_masks([update], impl=impl)
        self.write_back(update, masks)

    def update_of(
        self,
        masks: Mapping[BlockSpec, Tensor],
        nnz: Budget,
        values: Values = None,
        *,
        norm: Norm = 2,
        among_kept: bool = False,
    ) -> Update:
        """What `update_masks` hands to the kernels; several of them may go together (`kernels.scope_masks`)."""
        return Update(scopes=tuple(self.groups(values, masks)), keep=self.budget(nnz), norm=norm, among_kept=among_kept)

    def write_back(self, update: Update, masks: Mapping[BlockSpec, Tensor]) -> None:
        """Copy the masks that lie otherwise than their parameter back from where the kernels filled them."""
        for group, (spec, _) in zip(update.scopes, self.scopes(), strict=True):
            for member, leaf in zip(group.members, spec.block.blocks(), strict=True):
                if not leaf.view.is_aligned(masks[leaf]):
                    assert member.mask is not None
                    leaf.view.write_back(member.mask, masks[leaf])

    def _scores(self, values: Values, block_scores: BlockValues) -> Tensor:
        """[scopes, competitors]: norms of the values, or the scores given."""
        given = self._rows_of(block_scores, "block_scores")
        if given is not None:
            return given
        self._check_values(values)
        blocks = [spec.block for spec, _ in self.scopes()]
        norms: dict[SparseBlock, Tensor] = {
            b: kernels.block_scores(b.operands(values), 2, ndim=b.grid_ndim, as_mean=self.as_mean) for b in blocks
        }
        rows = self._rows_of(norms, "norms")
        assert rows is not None
        return rows

    @property
    def as_mean(self) -> bool:
        """Whether norms are power means: competitors are scored alike, so as soon as some block is partial."""
        return any(m.is_partial for spec, _ in self.scopes() for m in spec.block.operands())

    def _rows_of(self, per_block: BlockValues, what: str) -> Tensor | None:
        if per_block is None:
            return None
        specs = self.scopes()
        if isinstance(per_block, Tensor):
            if len(specs) > 1:
                raise SparsityError(f"{self._where()}{what} must be a mapping {{block: tensor}} for coupled scopes")
            per_block = {specs[0][0].block: per_block}
        rows = []
        for group, (spec, _) in zip(self.groups(None, None), specs, strict=True):
            if spec.block not in per_block or tuple(per_block[spec.block].shape) != spec.block.grid_shape:
                raise SparsityError(f"{spec._where()}{what} must have the block grid's shape {spec.block.grid_shape}")
            rows.append(to_scopes(per_block[spec.block], group, 0))
        return torch.cat(rows, dim=1)

    def _select(self, rows: Tensor, keep: Budget, allowed: Tensor | None = None) -> Tensor:
        """The selection rule on these rows; slots without a block never compete."""
        real = real_slots(self.groups(None, None))
        candidates = allowed if real is None else real if allowed is None else real & allowed
        return keep_mask(rows, keep.reshape(-1) if isinstance(keep, Tensor) else keep, candidates=candidates)

    def _kth(self, rows: Tensor, keep: Budget) -> Tensor:
        """The smallest score that the selection keeps, for each row."""
        number = self._select(rows, keep) & ~rows.isnan()
        smallest = torch.where(number, rows, float("inf")).amin(1)
        return torch.where(number.any(1), smallest, float("nan"))

    def _spread(self, per_scope: Tensor | float) -> list[Tensor]:
        """One value a scope as one value a block: of each member's block grid's shape."""
        device = self.scopes()[0][0].block.blocks()[0].view.param.device
        dtype = per_scope.dtype if isinstance(per_scope, Tensor) and per_scope.is_floating_point() else torch.float64
        t = torch.as_tensor(
            on_grid(per_scope, self.grid_shape, self._where(), "scope grid"), dtype=dtype, device=device
        )
        rows = t.expand(self.grid_shape).reshape(-1, 1)
        return [
            from_scopes(rows.expand(-1, width), group)
            for group, width in zip(self.groups(None, None), self._widths(), strict=True)
        ]

    def _live(self, conditioners: Values) -> list[Scopes]:
        """Scopes over the parameters themselves, to be changed; conditioners stand where masks do."""
        return [Scopes(members=s.block.live(conditioners), shape=s.shape, order=order) for s, order in self.scopes()]

    def _check_values(self, values: Values) -> None:
        if isinstance(values, Tensor) and len({id(p) for s, _ in self.scopes() for p in s.block.parameters()}) > 1:
            raise SparsityError(f"{self._where()}coupled scopes take values as a mapping {{parameter: tensor}}")

    def _widths(self) -> list[int]:
        return [math.prod(spec.shape) for spec, _ in self.scopes()]

    def _where(self) -> str:
        return f"{self.name}: " if self.name else ""
