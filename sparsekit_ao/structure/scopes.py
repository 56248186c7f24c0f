"""Scopes, the sets of blocks that compete with each other, with their budgets, k-th largest norms and exact masks.

`SparseScope` is the base class of one block grid's scopes (`ScopeSpec`) and of scopes of several grids that share one
budget (`ScopeCoupling`).
"""

import math
import numbers
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparsityError, is_number
from .blocks import BlockSpec, SparseBlock, aligned_members, block_windows
from .rule import KEY_DTYPES, keep_rows
from .thresholds import Thresholded, Values
from .tiles import Shape, grid_of, tile_volumes, tiles_of
from .view import View, resolve_tile
from .windows import Norm, ScopeWindows, from_scopes, real_slots, scope_scores, to_scopes

Budget = int | Tensor


def checked_level(level: object, where: str) -> float:
    """Return a sparsity level as a float. Raise an error unless it is a number in [0, 1]."""
    if is_number(level) and 0 <= float(level) <= 1:
        return float(level)
    is_scalar = isinstance(level, (numbers.Number, str, type(None)))
    text = repr(level) if is_scalar else f"a {type(level).__name__}, which is not a number"
    if is_number(level) and 2 <= level <= 100:
        text += f"; it is a fraction, so {level} % is {float(level) / 100:g}"
    raise SparsityError(f"{where}sparsity level must lie in [0, 1], got {text}")


def sparsity_to_nnz(sparsity: float, blocks: int, where: str = "") -> int:
    """Return how many of n `blocks` are kept if the fraction s = `sparsity` is dropped: `n - floor(s n + 1e-9)`.

    >>> sparsity_to_nnz(0.9, 10), sparsity_to_nnz(0.5, 5)
    (1, 3)
    """
    return blocks - math.floor(checked_level(sparsity, where) * blocks + 1e-9)


def counts_after_dropping(counts: Tensor, sparsity: float) -> Tensor:
    """Return `sparsity_to_nnz` of each of several numbers of blocks: an int64 tensor, for an integer tensor.

    >>> counts_after_dropping(torch.tensor([10, 5]), 0.3)
    tensor([7, 4])
    """
    return counts - torch.floor(counts.double() * sparsity + 1e-9).long()


@dataclass(frozen=True, kw_only=True, eq=False)
class ScopeMember:
    """One block grid of a `SparseScope`, tiled into scopes."""

    block: SparseBlock  # the blocks that compete
    shape: Shape  # blocks of a scope along each dimension of the block grid
    order: Shape = ()  # aligned scope dimension k is this scope grid's dimension order[k]; () is the identity

    @property
    def grid_shape(self) -> Shape:
        """The number of scopes along each dimension of the block grid."""
        return grid_of(self.block.grid_shape, self.shape)

    @property
    def width(self) -> int:
        """The number of blocks of a full scope."""
        return math.prod(self.shape)


BlockValues = Tensor | Mapping[SparseBlock, Tensor] | None


class SparseScope(Thresholded):
    """Base class of `ScopeSpec` and `ScopeCoupling`: scopes on one grid.

    Arguments called `values` have the parameter's shape (for several parameters, a mapping {parameter: tensor}); None
    means the parameters themselves. A budget `nnz` is the number of blocks kept in each scope: an int, or an integer
    tensor of the scope grid's shape. `grid_shape` is the number of scopes along each dimension of the aligned grid.
    """

    _grid_name = "scope grid"
    #: whether some scope at an edge holds fewer blocks than the others
    is_partial: bool

    @abstractmethod
    def members(self) -> list[ScopeMember]:
        """The block grids whose blocks compete at each aligned scope index, in order."""

    def blocks(self) -> list[BlockSpec]:
        """The block specs of all members, in order."""
        return [spec for m in self.members() for spec in m.block.blocks()]

    def numscp(self) -> int:
        """The number of scopes."""
        return math.prod(self.grid_shape)

    def numblk_per_scope(self) -> int:
        """The number of blocks that compete in a full scope, over all members."""
        return sum(m.width for m in self.members())

    def numblk(self) -> int:
        """The number of blocks in all scopes."""
        return sum(m.block.numblk() for m in self.members())

    def numel_per_scope(self) -> int:
        """The number of elements in a full scope."""
        return sum(m.width * m.block.numel_per_block() for m in self.members())

    def blocks_per_scope(self) -> Tensor:
        """Return how many blocks each scope has (fewer at a partial edge), int64 in the scope grid's shape."""
        volumes = [(tile_volumes(m.block.grid_shape, m.shape), m.order) for m in self.members()]
        aligned = [(v.permute(order) if order else v).reshape(self.grid_shape) for v, order in volumes]
        return torch.stack(aligned).sum(0)

    def sparsity_to_nnz(self, sparsity: float) -> Budget:
        """Return how many blocks each scope keeps at a level; int64 in the scope grid's shape if scopes differ."""
        of_full_scope = sparsity_to_nnz(sparsity, self.numblk_per_scope(), self.prefix())
        if not self.is_partial:
            return of_full_scope
        return counts_after_dropping(self.blocks_per_scope(), float(sparsity))

    def level_of(self, nnz: Budget) -> float:
        """Return the fraction of all blocks that a budget drops."""
        if isinstance(nnz, int) and not self.is_partial:
            return 1 - nnz / self.numblk_per_scope()
        counts = self.blocks_per_scope()
        return 1 - int(torch.minimum(torch.as_tensor(nnz, device="cpu"), counts).sum()) / max(int(counts.sum()), 1)

    def block_norms(self, values: Values = None, norm: Norm = 2) -> Tensor:
        """Return the norms of the blocks as (*scope grid, blocks per scope); slots beyond a partial scope hold 0."""
        rows = self._scores(values, norm)
        return rows.reshape([*self.grid_shape, rows.shape[1]])

    def kth_largest(self, values: Values = None, nnz: Budget = 1) -> Tensor:
        """Return the nnz-th largest block norm of each scope [*scope grid]; 1 <= nnz <= blocks per scope."""
        return self._kth(self._scores(values), self.budget(nnz, least=1)).reshape(self.grid_shape)

    def kth_mid(self, values: Values = None, nnz: Budget = 1, k_weight: float = 1.0) -> Tensor:
        """Return a threshold between the last block kept and the first dropped: `(x_k + w x_{k+1}) / (1 + w)`.

        It needs 1 <= nnz < blocks per scope, so that both exist. The result has the scope grid's shape. If some blocks
        are partial, it is a root mean square, as their scores are: `soft_threshold` then needs `scale=True`.
        """
        keep = self.budget(nnz, least=1, spare=1)
        scores = self._scores(values)
        low, high = self._kth(scores, keep + 1), self._kth(scores, keep)
        return ((high + k_weight * low) / (1 + k_weight)).reshape(self.grid_shape)

    @torch.no_grad()
    def keep_thresholds(self, nnz: Budget, values: Values = None) -> dict[SparseBlock, Tensor]:
        """Return a threshold for each block with which `soft_threshold` leaves exactly nnz blocks in every scope.

        The threshold of a kept block is the mean of the norms of the last block kept and the first dropped, but it is
        always so far below the block's own norm that some element stays nonzero in the parameter's dtype. A dropped
        block has the threshold inf, even if its norm equals a kept one.
        If some blocks are partial, these are root mean squares: `soft_threshold` then needs `scale=True`. The results
        have the shape of each member's block grid.
        """
        rows = self._scores(values)
        kept, real = self._select(rows, self.budget(nnz)), real_slots(scope_windows(self), rows.device)
        dropped = ~kept if real is None else real & ~kept
        low = torch.where(dropped, rows, 0).amax(1, keepdim=True)
        high = torch.where(kept & ~rows.isnan(), rows, math.inf).amin(1, keepdim=True)
        middle = torch.where(dropped.any(1, keepdim=True), low / 2 + high / 2, 0)
        # What is left of a kept block is above the smallest number of its dtype in at least one element.
        dtypes = {b.view.param.dtype for b in self.blocks() if b.view.param.is_floating_point()}
        least = max((info.smallest_normal * info.eps for info in map(torch.finfo, dtypes)), default=0)
        least *= math.sqrt(sum(math.prod(b.shape) for b in self.blocks()))  # a block has no more elements
        below = torch.minimum(rows * (1 - 2**-18), rows - least).clamp(min=0)
        return dict(self._grids_of(torch.where(kept, torch.minimum(middle, below), math.inf)))

    @torch.no_grad()
    def get_masks(
        self, nnz: Budget, values: Values = None, block_scores: BlockValues = None, candidates: BlockValues = None
    ) -> dict[BlockSpec, Tensor]:
        """Keep exactly nnz blocks in every scope.

        Args:
            nnz: The number of blocks kept in each scope.
            values: The tensors that are scored by the 2-norm of their blocks; not together with `block_scores`.
            block_scores: Scores to use instead of norms, in the block grid's shape (for several grids, a mapping
                {block: tensor}), or as (*scope grid, blocks per scope), which `block_norms` returns.
            candidates: A bool tensor of either shape, True where a block may be kept. The others are dropped.

        Returns:
            {block: bool mask in the parameter's shape}, True = keep. Elements outside a view are kept.

        >>> from sparsekit_ao import ScopeSpec
        >>> s = ScopeSpec(BlockSpec(torch.tensor([[1.0, 4.0, 3.0, 2.0]])), (1, 4))
        >>> next(iter(s.get_masks(2).values()))
        tensor([[False,  True,  True, False]])
        """
        if values is not None and block_scores is not None:
            raise SparsityError(f"{self.prefix()}get_masks: values and block_scores are mutually exclusive")
        rows = self._scores(values) if block_scores is None else self._rows_of(block_scores, "block_scores")
        if rows.dtype not in KEY_DTYPES:
            raise SparsityError(
                f"{self.prefix()}block_scores must be float16, bfloat16, float32 or float64, got {rows.dtype}"
            )
        allowed = None if candidates is None else self._rows_of(candidates, "candidates").bool()
        kept = self._select(rows, self.budget(nnz), allowed)
        return {spec: m for block, grid in self._grids_of(kept) for spec, m in block.get_masks(grid).items()}

    @torch.no_grad()
    def hard_threshold(  # type: ignore[override]
        self, thresholds: Tensor | float | None = None, nnz: Budget | None = None, values: Values = None
    ) -> None:
        """Zero blocks in place: those whose norm is strictly below a threshold, or all but nnz in each scope.

        Args:
            thresholds: A number, or a tensor that broadcasts to the scope grid.
            nnz: The number of blocks kept in each scope. Give exactly one of `thresholds` and `nnz`.
            values: The tensors whose norms are compared; None means the parameters.
        """
        if (thresholds is None) == (nnz is None):
            raise SparsityError(f"{self.prefix()}hard_threshold needs either thresholds or nnz, not both")
        if nnz is not None:
            for spec, mask in self.get_masks(nnz, values).items():
                spec.view.param.detach().masked_fill_(~mask, 0)
            return
        super().hard_threshold(thresholds, values)  # type: ignore[arg-type]

    def budget(self, nnz: Budget, *, least: int = 0, spare: int = 0) -> Budget:
        """Check that least <= nnz <= blocks per scope - spare; return an int, or int64 of the scope grid's shape.

        The values of a tensor on another device than the CPU are not checked: that would wait for the device.
        """
        if isinstance(nnz, bool) or not isinstance(nnz, (int, Tensor)):
            raise SparsityError(f"{self.prefix()}nnz must be an int or an integer tensor, got {nnz!r}")
        low = high = nnz
        if isinstance(nnz, Tensor):
            if nnz.is_floating_point() or nnz.dtype == torch.bool or tuple(nnz.shape) not in ((), self.grid_shape):
                raise SparsityError(
                    f"{self.prefix()}nnz must be an integer tensor of the scope grid's shape {self.grid_shape}, "
                    f"got {nnz.dtype} {tuple(nnz.shape)}"
                )
            readable = nnz.numel() > 0 and nnz.device.type == "cpu"
            low, high = map(int, nnz.aminmax()) if readable else (least, least)
            nnz = nnz.to(torch.int64).expand(self.grid_shape)
        blocks = self.numblk_per_scope()
        if not (least <= low and high <= blocks - spare):
            raise SparsityError(
                f"{self.prefix()}nnz must lie in {least} .. {blocks - spare} (a scope has {blocks} blocks), got "
                + (f"{low}" if low == high else f"{low} .. {high}")
            )
        return nnz

    def _scores(self, values: Values, norm: Norm = 2) -> Tensor:
        """Return the norms of the values, [scopes, competitors]."""
        return torch.cat([scope_scores(w, norm, self.as_mean) for w in scope_windows(self, values)], dim=1)

    @property
    def as_mean(self) -> bool:
        """Whether norms are power means, which are comparable between blocks if some block is partial."""
        return any(spec.is_partial for spec in self.blocks())

    def _rows_of(self, per_block: Tensor | Mapping[SparseBlock, Tensor], what: str) -> Tensor:
        members, in_rows = self.members(), (*self.grid_shape, self.numblk_per_scope())
        if isinstance(per_block, Tensor):
            if tuple(per_block.shape) == in_rows:
                return per_block.reshape(self.numscp(), in_rows[-1])
            if len(members) > 1:
                raise SparsityError(
                    f"{self.prefix()}{what} must be a mapping {{block: tensor}} for coupled scopes, or of the shape "
                    f"{in_rows}, got {tuple(per_block.shape)}"
                )
            per_block = {members[0].block: per_block}
        for m in members:
            if m.block not in per_block or tuple(per_block[m.block].shape) != m.block.grid_shape:
                shapes = f"the block grid's shape {m.block.grid_shape} or, as block_norms, {in_rows}"
                raise SparsityError(f"{m.block.prefix()}{what} must have {shapes}")
        rows = [to_scopes(per_block[m.block], w, 0) for m, w in zip(members, scope_windows(self), strict=True)]
        return torch.cat(rows, dim=1)

    def _grids_of(self, rows: Tensor) -> list[tuple[SparseBlock, Tensor]]:
        """Return rows [scopes, blocks of a scope over all members] as a tensor of the block grid's shape per member."""
        members, windows = self.members(), scope_windows(self)
        parts = rows.split([m.width for m in members], dim=1)
        return [(m.block, from_scopes(part, w)) for m, part, w in zip(members, parts, windows, strict=True)]

    def _select(self, rows: Tensor, keep: Budget, allowed: Tensor | None = None) -> Tensor:
        """Apply the selection rule to rows; slots without a block never compete."""
        real = real_slots(scope_windows(self), rows.device)
        candidates = allowed if real is None else real if allowed is None else real & allowed
        keep = keep.reshape(-1).to(rows.device) if isinstance(keep, Tensor) else keep
        return keep_rows(rows, keep, candidates)

    def _kth(self, rows: Tensor, keep: Budget) -> Tensor:
        """Return the smallest score that the selection keeps, for each row."""
        number = self._select(rows, keep) & ~rows.isnan()
        smallest = torch.where(number, rows, float("inf")).amin(1)
        return torch.where(number.any(1), smallest, float("nan"))

    def _windows(self, values: Values = None) -> list[ScopeWindows]:
        return scope_windows(self, values)


def scope_windows(
    scope: SparseScope, values: Values = None, masks: Mapping[BlockSpec, Tensor] | None = None
) -> list[ScopeWindows]:
    """Return a scope's members as `selection` takes them; see `block_windows`."""
    if isinstance(values, Tensor) and len({id(spec.view.param) for spec in scope.blocks()}) > 1:
        raise SparsityError(f"{scope.prefix()}coupled scopes take values as a mapping {{parameter: tensor}}")
    windows = []
    for m in scope.members():
        windows.append(ScopeWindows(windows=block_windows(m.block, values, masks), shape=m.shape, order=m.order))
    return windows


def write_back(windows: Sequence[ScopeWindows], scope: SparseScope, masks: Mapping[BlockSpec, Tensor]) -> None:
    """Copy filled windows of `scope_windows` to masks whose strides differ from the parameter's: these are copies."""
    for scopes, member in zip(windows, scope.members(), strict=True):
        for window, (spec, _) in zip(scopes.windows, member.block.members(), strict=True):
            spec.view.write_back(window.mask, masks[spec])  # type: ignore[arg-type]


class ScopeSpec(SparseScope):
    """Divide the grid of blocks into scopes, in which blocks compete with each other.

    Args:
        block: A `BlockSpec` or `BlockCoupling`; or a `View` or parameter, whose elements are then the blocks.
        shape: Number of blocks of a scope along each dimension of the grid. -1 means the whole dimension, and so do ()
            and missing last entries.
        name: The first words of error messages; by default those of the block.
        edge: With `"partial"`, the last scope of a dimension may be smaller; with `"error"` it may not. By default as
            for the block.

    Raises:
        SparsityError: The shape does not fit the block grid (also a `ValueError`).

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
        self.edge = edge or self.block.edge
        self.shape = resolve_tile("scope", self.block.grid_shape, shape, edge=self.edge, where=self.prefix())
        self.grid_shape = grid_of(self.block.grid_shape, self.shape)
        self.is_partial = math.prod((*self.grid_shape, *self.shape)) != math.prod(self.block.grid_shape)
        is_single = isinstance(self.block, BlockSpec) and math.prod(self.block.shape) == 1
        #: whether the scopes divide a view of single elements evenly
        self.has_single_elements = is_single and not self.is_partial

    def numblk_per_scope(self) -> int:
        """Number of blocks that compete in a full scope."""
        return math.prod(self.shape)

    def members(self) -> list[ScopeMember]:
        """The spec's own blocks."""
        return [ScopeMember(block=self.block, shape=self.shape)]

    def block_to_scope(self, t: Tensor, reorder: bool = True, merge: bool = False) -> Tensor:
        """Cut a tensor of the block grid's shape into scopes.

        Args:
            t: A tensor of the block grid's shape; scopes must divide it.
            reorder: True gives (*scope grid, *scope); False interleaves (g0, s0, g1, s1, ...).
            merge: With `reorder`, the scope's dimensions become one: (*scope grid, blocks per scope).
        """
        if tuple(t.shape) != self.block.grid_shape:
            raise SparsityError(
                f"{self.prefix()}block_to_scope takes the block grid's shape {self.block.grid_shape}, "
                f"got {tuple(t.shape)}"
            )
        if self.is_partial:
            raise SparsityError(f"{self.prefix()}block_to_scope needs whole scopes; {self.shape} leaves partial ones")
        return tiles_of(t, self.shape, reorder, merge)

    def scope_to_block(self, t: Tensor, reorder: bool = True) -> Tensor:
        """Bring a tensor of scopes back to the block grid's shape: the inverse of `block_to_scope`.

        Args:
            t: (*scope grid, *scope) or (*scope grid, blocks per scope); (g0, s0, g1, s1, ...) without `reorder`.
            reorder: As for `block_to_scope`.
        """
        grid, width = self.grid_shape, math.prod(self.shape)
        interleaved = tuple(size for pair in zip(grid, self.shape, strict=True) for size in pair)
        taken = [(*grid, *self.shape), (*grid, width)] if reorder else [interleaved]
        if tuple(t.shape) not in taken:
            raise SparsityError(
                f"{self.prefix()}scope_to_block takes {' or '.join(map(str, taken))}, got {tuple(t.shape)}"
            )
        if not reorder:
            return t.reshape(self.block.grid_shape)
        return from_scopes(t.reshape(self.numscp(), width), scope_windows(self)[0])

    def __repr__(self) -> str:
        return f"ScopeSpec({self.block!r}, shape={self.shape})"


class ScopeCoupling(SparseScope):
    """Let blocks of several grids compete with each other for one budget.

    Args:
        scopes: A sequence of `ScopeSpec`s, the members. They may have different numbers of blocks in a scope; budgets
            count the blocks of all members.
        orders: For each member None, or a permutation: dimension k of the aligned scope grid is the member's dimension
            order[k].
        name: The first words of error messages.

    Raises:
        CouplingError: The aligned scope grids differ, or an order is not a permutation.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> c = ScopeCoupling([ScopeSpec(BlockSpec(a)), ScopeSpec(BlockSpec(b))])
    >>> [m.tolist() for m in c.get_masks(2).values()]
    [[False, True], [True]]
    """

    def __init__(
        self, scopes: Sequence[ScopeSpec], orders: Sequence[Sequence[int] | None] | None = None, name: str | None = None
    ) -> None:
        self.name = name
        full, self.grid_shape = aligned_members(ScopeSpec, scopes, orders, self.prefix())
        self._specs, self._members, self.is_partial = list(scopes), [], any(s.is_partial for s in scopes)
        for s, order in zip(scopes, full, strict=True):
            # dimensions that a member lacks have one scope each, so they do not change the order of its scopes
            present = tuple(k for k in order if k < len(s.shape))
            self._members.append(ScopeMember(block=s.block, shape=s.shape, order=present))

    def members(self) -> list[ScopeMember]:
        """The members with their orders."""
        return list(self._members)

    def block_to_scope(self, t: Mapping[SparseBlock, Tensor], reorder: bool = True, merge: bool = False) -> Tensor:
        """Join tensors of the members' grids as (*scope grid, blocks per scope of all members); needs `merge=True`."""
        if not (reorder and merge):
            raise SparsityError(f"{self.prefix()}members may differ in shape; use merge=True")
        rows = self._rows_of(t, "t")
        return rows.reshape([*self.grid_shape, rows.shape[1]])

    def scope_to_block(self, t: Tensor, reorder: bool = True) -> dict[SparseBlock, Tensor]:
        """Return {block: tensor of its grid's shape}: the inverse of `block_to_scope`."""
        want = (*self.grid_shape, self.numblk_per_scope())
        if not reorder or tuple(t.shape) != want:
            raise SparsityError(f"{self.prefix()}scope_to_block takes {want}, got {tuple(t.shape)}")
        return dict(self._grids_of(t.reshape(self.numscp(), want[-1])))

    def __repr__(self) -> str:
        return f"ScopeCoupling({self._specs!r})"
