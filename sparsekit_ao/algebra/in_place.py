"""Thresholding by GPU kernels: one read and one write of the weight.

Takes scopes as `selection` does, and one threshold a scope. Where a function returns False nothing has changed, and
`threshold` continues in plain torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Scopes, check_impl, condition_path, threshold_path

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
    path = threshold_path(groups, impl)
    if path is None:
        return False
    for group, factor in zip(groups, factors, strict=True):
        path.threshold(group, _as_read(thresholds, group), soft=soft, factor=factor)
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
    path = condition_path(groups, atol=atol, impl=impl)
    if path is None:
        return False
    worst = 0.0
    for group, factor in zip(groups, factors, strict=True):
        given = _as_read(thresholds, group)
        misses = path.condition(group, given, factor=factor, eps=settings.eps, atol=atol, max_iter=settings.max_iter)
        worst = max(worst, float(misses.max()))
    if worst > 0:
        raise SparsityError(
            f"{where}soft_threshold: no convergence to atol={atol:g} in {settings.max_iter} steps (missed by "
            f"{worst:.1e}); the blocks that missed are as they were, the others are written. Raise max_iter or atol; "
            'impl="reference" writes nothing before all have converged.'
        )
    return True


def refuse_triton(impl: str, what: str, where: str) -> None:
    """Raise where `impl` is unknown, or is `"triton"`, which has no kernel for `what`."""
    check_impl(impl)
    if impl == "triton":
        raise SparsityError(f'{where}impl="triton" has no {what}. Use impl="auto".')


def _as_read(thresholds: Tensor | float, group: Scopes) -> Tensor | float:
    """Thresholds as the kernels read them: float32 on the group's device."""
    if not isinstance(thresholds, Tensor):
        return thresholds
    return thresholds.detach().to(group.members[0].window.device, torch.float32)
