"""Thresholding by GPU kernels: one read and one write of the weight.

Takes scopes as `selection` does, and one threshold a scope. Where a function returns False nothing has changed, and
`threshold` continues in plain torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Newton, Scopes, Threshold, check_impl, threshold_backend

__all__ = ["Settings", "refuse_triton", "shrink_in_place", "threshold_in_place"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `soft_threshold`; `conditioned` if conditioners are passed in the place of masks."""

    conditioned: bool
    scale: bool
    max_iter: int
    atol: float | None
    eps: float


def threshold_in_place(
    groups: Sequence[Scopes], thresholds: Tensor | float, *, soft: bool, factors: Sequence[float], impl: str
) -> bool:
    """Shrink blocks by the proximal map of `thresholds * factor` times their norm, or zero those strictly below.

    Args:
        groups: windows on the parameters.
        thresholds: a number, or a tensor with one element or of the scope grid's shape. A number waits for no device.
        soft: shrink; else zero.
        factors: one for each group.
        impl: `"auto"`, `"reference"` or `"triton"`.

    Returns:
        Whether it was done; if not, nothing has changed.
    """
    work = _work(groups, thresholds, factors, soft=soft)
    backend = threshold_backend(work, impl)
    if backend is None:
        return False
    backend.run(work)
    return True


def shrink_in_place(
    groups: Sequence[Scopes],
    thresholds: Tensor | float,
    *,
    factors: Sequence[float],
    settings: Settings,
    impl: str,
    where: str,
) -> bool:
    """Soft thresholding, conditioned or not; arguments and result as `threshold_in_place`.

    Raises:
        SparsityError: a block did not converge: it is unchanged, and the others are written.
    """
    if not settings.conditioned:
        return threshold_in_place(groups, thresholds, soft=True, factors=factors, impl=impl)
    atol = 1e-6 if settings.atol is None else settings.atol
    newton = Newton(eps=settings.eps, atol=atol, max_iter=settings.max_iter)
    work = _work(groups, thresholds, factors, soft=True, newton=newton)
    backend = threshold_backend(work, impl)
    if backend is None:
        return False
    backend.run(work)
    worst = max(float(one.missed) for one in work if one.missed is not None)
    if worst > 0:
        raise SparsityError(
            f"{where}soft_threshold: no convergence to atol={atol:g} in {settings.max_iter} steps (missed by "
            f"{worst:.1e}); the blocks that missed are as they were, the others are written. Raise max_iter or atol; "
            'impl="reference" writes nothing before all have converged.'
        )
    return True


def refuse_triton(impl: str, what: str, where: str) -> None:
    """Raise where `impl` is unknown, or names a backend, none of which does `what`."""
    check_impl(impl)
    if impl not in ("auto", "reference"):
        raise SparsityError(f'{where}impl="{impl}" has no {what}. Use impl="auto".')


def _work(
    groups: Sequence[Scopes],
    thresholds: Tensor | float,
    factors: Sequence[float],
    *,
    soft: bool,
    newton: Newton | None = None,
) -> list[Threshold]:
    """The work of each group; with `newton`, with a tensor for the error of blocks that do not converge."""
    device = groups[0].members[0].window.device
    if isinstance(thresholds, Tensor):
        thresholds = thresholds.detach().to(device, torch.float32)
    return [
        Threshold(
            scopes=group,
            thresholds=thresholds,
            soft=soft,
            factor=factor,
            newton=newton,
            missed=None if newton is None else torch.zeros((), dtype=torch.float32, device=device),
        )
        for group, factor in zip(groups, factors, strict=True)
    ]
