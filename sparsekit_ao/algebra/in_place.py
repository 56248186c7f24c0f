"""Thresholding by kernels: one read and one write of the weight.

Knows groups of scopes as the kernels take them, and one threshold a scope. `block` and `sparse_scope` go on in plain
torch where these functions return False.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Newton, Scopes, Threshold, check_impl, threshold_backend
from ..selection.strides import Shape

__all__ = ["Settings", "negative_threshold", "on_grid", "refuse_triton", "shrink_in_place", "threshold_in_place"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Whether conditioners stand where masks do, and when Newton's method on them stops; see `SparseBlock`."""

    conditioned: bool
    max_iter: int
    atol: float | None
    eps: float


def threshold_in_place(
    groups: Sequence[Scopes], thresholds: Tensor | float, *, soft: bool, factors: Sequence[float], impl: str
) -> bool:
    """Shrink blocks by the prox of `thresholds * factor` times their norm, or zero those strictly below.

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
        SparsityError: a threshold below 0 or a conditioner that is not positive, before anything changes; or a block
            did not converge: then it is as it was, and the others are written.
    """
    atol = 1e-6 if settings.atol is None else settings.atol
    newton = Newton(eps=settings.eps, atol=atol, max_iter=settings.max_iter) if settings.conditioned else None
    work = _work(groups, thresholds, factors, soft=True, newton=newton)
    backend = threshold_backend(work, impl)
    if backend is None:
        return False
    _check_thresholds(thresholds, where)
    if settings.conditioned:
        _check_conditioners(groups, settings.eps, where)
    backend.run(work)
    worst = max(float(one.missed) for one in work if one.missed is not None) if settings.conditioned else 0.0
    if worst > 0:
        raise SparsityError(
            f"{where}soft_threshold: no convergence to atol={atol:g} in {settings.max_iter} steps (missed by "
            f"{worst:.1e}); the blocks that missed are as they were, the others are written. Raise max_iter or atol; "
            'impl="reference" writes nothing before all have converged.'
        )
    return True


def _work(
    groups: Sequence[Scopes],
    thresholds: Tensor | float,
    factors: Sequence[float],
    *,
    soft: bool,
    newton: Newton | None = None,
) -> list[Threshold]:
    """The work of each group, with a tensor for what did not converge."""
    device = groups[0].members[0].window.device
    return [
        Threshold(
            scopes=group,
            thresholds=_as_read(thresholds, group),
            soft=soft,
            factor=factor,
            newton=newton,
            missed=None if newton is None else torch.zeros((), dtype=torch.float32, device=device),
        )
        for group, factor in zip(groups, factors, strict=True)
    ]


def on_grid(thresholds: Tensor | float, grid: Shape, where: str, what: str = "grid") -> Tensor | float:
    """Thresholds that fit a grid: a number or a single element as it is, others expanded.

    Raises:
        SparsityError: they do not broadcast to the grid.
    """
    if not isinstance(thresholds, Tensor):
        return thresholds
    try:
        expanded = thresholds.expand(grid)
    except RuntimeError:
        raise SparsityError(
            f"{where}thresholds must broadcast to the {what} {grid}, got shape {tuple(thresholds.shape)}"
        ) from None
    return thresholds.reshape(()) if thresholds.numel() == 1 else expanded


def refuse_triton(impl: str, what: str, where: str) -> None:
    """Refuse a backend that was asked for by name where none does `what`, and any unknown `impl`."""
    check_impl(impl)
    if impl not in ("auto", "reference"):
        raise SparsityError(f'{where}impl="{impl}" has no {what}. Use impl="auto".')


def negative_threshold(least: float, where: str) -> SparsityError:
    """The error for thresholds of which one is below 0 or NaN."""
    return SparsityError(f"{where}soft_threshold needs thresholds >= 0, got {least}")


def _check_thresholds(thresholds: Tensor | float, where: str) -> None:
    if isinstance(thresholds, Tensor):
        if not bool((thresholds >= 0).all()):
            raise negative_threshold(float(thresholds.min()), where)
    elif not thresholds >= 0:
        raise negative_threshold(float(thresholds), where)


def _check_conditioners(groups: Sequence[Scopes], eps: float, where: str) -> None:
    for h in (m.mask for group in groups for m in group.members if m.mask is not None and m.mask.numel()):
        least = float(h.amin().float() + eps)
        if not least > 0:
            raise SparsityError(f"{where}soft_threshold needs conditioners > 0, got {least}")


def _as_read(thresholds: Tensor | float, group: Scopes) -> Tensor | float:
    """Thresholds as kernels read them: float32 on the group's device."""
    if not isinstance(thresholds, Tensor):
        return thresholds
    return thresholds.detach().to(group.members[0].window.device, torch.float32)
