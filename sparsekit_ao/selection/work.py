"""The kinds of work that backends take: a mask update, block scores, and thresholding in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .tiling import Blocks, Scopes

Norm = float | None


class _OnWindows:
    """What all kinds share: `members`, their windows."""

    members: tuple[Blocks, ...]

    @property
    def device(self) -> torch.device:
        """The device of the first window."""
        return self.members[0].window.device

    @property
    def numel(self) -> int:
        """Elements of all windows."""
        return sum(m.window.numel() for m in self.members)


@dataclass(frozen=True, kw_only=True, eq=False)
class Update(_OnWindows):
    """One mask update: keep the best blocks of each scope.

    Attributes:
        scopes: windows with values and masks; at one aligned scope index the blocks of all entries compete.
        keep: blocks kept in each scope: an int, or an integer tensor of the shape of the aligned scope grid (or of
            no dimension); members may lack dimensions of one scope.
        norm: 1, 2 or inf: a block's score is this norm of its values. None: the values are saliencies, and a block's
            score is their signed sum (their mean where some block is partial).
        among_kept: choose only among blocks that the masks still keep, scored as with `masked`.
        masked: score the values that the masks keep, and 0 for the others, which still compete.
    """

    scopes: tuple[Scopes, ...]
    keep: int | Tensor
    norm: Norm = 2
    among_kept: bool = False
    masked: bool = False

    @property
    def members(self) -> tuple[Blocks, ...]:  # type: ignore[override]
        """All windows."""
        return tuple(m for s in self.scopes for m in s.members)

    @property
    def scores_masked(self) -> bool:
        """Whether values that the masks drop score 0."""
        return self.masked or self.among_kept

    @property
    def budget(self) -> int | Tensor:
        """`keep` as an int, or int64 of the shape of the first scope grid on the windows' device."""
        if not isinstance(self.keep, Tensor):
            return self.keep
        keep, grid = self.keep.to(self.device, torch.int64, non_blocking=True), self.scopes[0].scope_grid
        return keep.reshape(grid) if keep.ndim else keep.expand(grid)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores(_OnWindows):
    """Block scores, which are written to `out`.

    Attributes:
        members: windows with values, whose aligned grids agree.
        out: float32 (float64 if some values are), of the aligned grid's shape.
        norm: as in `Update`.
        as_mean: score by the power mean over the elements of a block; None: where some block is partial.
    """

    members: tuple[Blocks, ...]
    out: Tensor
    norm: Norm = 2
    as_mean: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Newton:
    """When Newton's method for conditioned thresholding stops, and what is added to the conditioners."""

    eps: float
    atol: float
    max_iter: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Threshold(_OnWindows):
    """Blocks to be shrunk, or zeroed where their norm is below a threshold, in place.

    Attributes:
        scopes: windows on the values that change; the blocks of a scope share a threshold.
        thresholds: a number, or float32 with one element or one for each scope, in the order of the scope grid.
        soft: shrink by the prox of `thresholds * factor` times the 2-norm; else zero blocks strictly below.
        factor: multiplies the thresholds.
        newton: shrink under a positive diagonal, which the members have in place of masks.
        missed: with `newton`, a float32 tensor of no dimension that receives the largest error of a block that did
            not converge (such blocks are left unchanged), or 0.
    """

    scopes: Scopes
    thresholds: Tensor | float
    soft: bool
    factor: float = 1.0
    newton: Newton | None = None
    missed: Tensor | None = None

    @property
    def members(self) -> tuple[Blocks, ...]:  # type: ignore[override]
        """All windows."""
        return self.scopes.members


Work = Update | Scores | Threshold
