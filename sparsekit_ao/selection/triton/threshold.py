"""Soft and hard thresholding of blocks in place, launched."""

import math
from typing import Any

import torch
from torch import Tensor

from ..tiling import Blocks, Scopes
from ..work import Update
from .launch import changed, on
from .plan import score_plan
from .ready import Launch, budget_of, key_of, prepared
from .reasons import score_reasons
from .shrink import condition_kernel, threshold_kernel
from .specialise import Limits

__all__ = ["condition", "condition_reasons", "threshold", "threshold_reasons"]

FINEST = 1e-6  # tolerance that float32 can meet


def threshold_reasons(scopes: Scopes, as_mean: bool | None = None) -> list[str]:
    """Why blocks are not for the threshold kernel."""
    partial = any(g % n for g, n in zip(scopes.grid, scopes.shape, strict=True))
    return score_reasons(scopes.members, 2, as_mean) + ["a scope at an edge is smaller than the others"] * partial


def condition_reasons(scopes: Scopes, atol: float) -> list[str]:
    """Why blocks with conditioners (in the place of masks) are not for the conditioned kernel."""
    found, held = threshold_reasons(scopes), Limits().held
    if len(scopes.members) > 1:
        found.append("conditioned thresholding of coupled blocks needs all of a block at once")
    elif math.prod(scopes.members[0].shape) > held:
        found.append(f"conditioned thresholding holds blocks of {held} elements at most")
    if atol < FINEST:
        found.append(f"conditioned thresholding reaches atol={FINEST:g} in float32, not {atol:g}")
    return found


def threshold(
    scopes: Scopes, thresholds: Tensor | float, *, soft: bool, factor: float = 1.0, limits: Limits | None = None
) -> None:
    """Shrink blocks by the prox of `thresholds * factor` times their 2-norm, or zero those strictly below, in place.

    Args:
        scopes: windows with values, nothing partial; the blocks of a scope share a threshold.
        thresholds: a number, or float32 with one element or one for each scope, in the order of the scope grid.
        soft: shrink; else zero.
        factor: multiplies the thresholds.
        limits: sizes that decide between ways.
    """
    plain = [Blocks(shape=m.shape, values=m.values, order=m.order) for m in scopes.members]
    _launched(scopes.with_members(plain), thresholds, factor, limits, (), threshold_kernel, SOFT=soft)


def condition(
    scopes: Scopes,
    thresholds: Tensor | float,
    *,
    factor: float,
    eps: float,
    atol: float,
    max_iter: int,
    limits: Limits | None = None,
) -> Tensor:
    """The soft variant under a positive diagonal, which stands in the place of masks.

    Args:
        scopes, thresholds, factor, limits: see `threshold`.
        eps: added to the diagonal.
        atol, max_iter: when Newton's method stops.

    Returns:
        One number a program: 0, or by how much a block missed, which then is as it was.
    """
    device = scopes.members[0].window.device
    found = _launched(scopes, thresholds, factor, limits, (eps, atol, max(max_iter, 0)), condition_kernel)
    return torch.zeros(1, device=device) if found is None else found


def _launched(
    scopes: Scopes,
    thresholds: Tensor | float,
    factor: float,
    limits: Limits | None,
    settings: tuple[float, ...],
    kernel: Any,
    **constants: Any,
) -> Tensor | None:
    """Launch a kernel over all blocks; with `settings` it says what was missed. None where there is no block."""
    device, misses = scopes.members[0].window.device, None
    each = isinstance(thresholds, Tensor) and thresholds.numel() > 1
    with on(device):
        launch = _launch_of(scopes, each, limits or Limits(), device, whole=bool(settings))
        if launch is None:
            return None
        t = thresholds.reshape(-1).contiguous() if isinstance(thresholds, Tensor) else None
        arguments = [t, 0.0 if isinstance(thresholds, Tensor) else float(thresholds), float(factor)]
        if settings:
            misses = torch.empty(launch.programs, dtype=torch.float32, device=device)
            arguments += [misses, *settings]
        launch.run(kernel, *arguments, **constants)
    changed(m.values for m in scopes.members)
    return misses


def _launch_of(scopes: Scopes, each: bool, limits: Limits, device: torch.device, *, whole: bool) -> Launch | None:
    """The table of blocks that compete with nobody; None where there is no block."""
    if any(m.window.numel() == 0 for m in scopes.members):
        return None
    update, held = Update(scopes=(scopes,), keep=0), limits.held if whole else 0
    budget = budget_of(0, device)
    key = (limits, device, "threshold", each, whole, key_of(update, budget))
    ready = prepared(key, [budget], device, lambda: score_plan(update, limits, flat=False, each=each, held=held))
    return ready.scored[0]
