"""Soft and hard thresholding of blocks in place, launched."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..tiling import Blocks, Scopes
from ..update import Update
from .launch import changed, on, warps_of
from .plan import Limits, score_plan
from .ready import Launch, budget_of, key_of, prepared
from .reasons import score_reasons
from .select import WARPS
from .shrink import condition_kernel, threshold_kernel

__all__ = ["condition_reasons", "hard_threshold", "soft_threshold", "threshold_reasons"]

HELD = 1024  # longest block that the conditioned map keeps in registers


def threshold_reasons(members: Sequence[Blocks], as_mean: bool | None = None) -> list[str]:
    """Why blocks are not for the threshold kernels."""
    return score_reasons(members, 2, as_mean)


def condition_reasons(members: Sequence[Blocks]) -> list[str]:
    """Why blocks with conditioners (in the place of masks) are not for the conditioned kernel."""
    found = score_reasons(members, 2, None)
    if len(members) > 1:
        found.append("conditioned thresholding of coupled blocks needs all of a block at once")
    elif math.prod(members[0].shape) > HELD:
        found.append(f"conditioned thresholding holds blocks of {HELD} elements at most")
    return found


def hard_threshold(members: Sequence[Blocks], thresholds: Tensor, ndim: int, limits: Limits | None = None) -> None:
    """Zero the blocks whose 2-norm is strictly below the threshold, in place.

    Args:
        members: windows with values, nothing partial.
        thresholds: float32, of the aligned grid's shape or with one element.
        ndim: dimensions of the aligned grid.
        limits: sizes that decide between ways.
    """
    _threshold(members, thresholds, 1.0, ndim, limits, soft=False)


def soft_threshold(
    members: Sequence[Blocks],
    thresholds: Tensor,
    ndim: int,
    *,
    factor: float = 1.0,
    conditioned: bool = False,
    eps: float = 0.0,
    atol: float = 1e-6,
    max_iter: int = 50,
    limits: Limits | None = None,
) -> Tensor | None:
    """Shrink blocks by the prox of `thresholds * factor` times their 2-norm, in place.

    Args:
        members: windows with values, nothing partial; with `conditioned` the masks are the positive diagonals.
        thresholds: float32, of the aligned grid's shape or with one element.
        ndim: dimensions of the aligned grid.
        factor: multiplies the thresholds.
        conditioned: the variant under a positive diagonal.
        eps: added to the diagonal.
        atol, max_iter: when the conditioned variant stops.
        limits: sizes that decide between ways.

    Returns:
        With `conditioned`, one number a program: 0, or by how much it missed; its blocks are then as they were.
    """
    if not conditioned:
        _threshold(members, thresholds, factor, ndim, limits, soft=True)
        return None
    device = members[0].window.device
    with on(device):
        launch = _launch_of(members, ndim, limits, held=HELD)
        if launch is None:
            return torch.zeros(1, device=device)
        misses = torch.empty(launch.programs, dtype=torch.float32, device=device)
        traits = launch.traits_but("NORM", "SINGLE", "STAGE", "FLAT", "LONG", "EVEN")
        t, each = _spread(thresholds)
        condition_kernel[(launch.programs,)](
            *launch.tables, t, factor, misses, eps, atol, max_iter, EACH=each, **traits, num_warps=WARPS
        )
    changed(m.values for m in members)
    return misses


def _threshold(
    members: Sequence[Blocks], thresholds: Tensor, factor: float, ndim: int, limits: Limits | None, *, soft: bool
) -> None:
    with on(members[0].window.device):
        plain = [Blocks(shape=m.shape, values=m.values, order=m.order) for m in members]
        launch = _launch_of(plain, ndim, limits)
        if launch is not None:
            traits = launch.traits_but("MASK_DTYPE", "NORM", "STAGE", "FLAT", "EVEN")
            t, each = _spread(thresholds)
            threshold_kernel[(launch.programs,)](
                *launch.tables, t, factor, SOFT=soft, EACH=each, **traits, num_warps=warps_of(traits)
            )
    changed(m.values for m in members)


def _launch_of(members: Sequence[Blocks], ndim: int, limits: Limits | None, held: int = 0) -> Launch | None:
    """The table of blocks that compete with nobody: one scope over the aligned grid; None where there is no block."""
    limits, device = limits or Limits(), members[0].window.device
    grid = Scopes(members=tuple(members), shape=(1,) * ndim).grid
    if any(m.window.numel() == 0 for m in members):
        return None
    update = Update(groups=(Scopes(members=tuple(members), shape=grid),), keep=0)
    budget = budget_of(0, device)
    key = (limits, device, "threshold", held, key_of(update, budget))
    ready = prepared(key, [budget], device, lambda: score_plan(update, limits, flat=False, held=held))
    return ready.scored[0]


def _spread(thresholds: Tensor) -> tuple[Tensor, bool]:
    """Thresholds as the kernels read them, and whether every block has its own."""
    return thresholds.to(torch.float32).reshape(-1).contiguous(), thresholds.numel() > 1
