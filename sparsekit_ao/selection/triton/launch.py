"""From updates to masks: which kernel after which.

Nothing here waits for the device: sizes come from shapes, budgets are read by the kernels.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..tiling import Blocks, Scopes
from ..work import Update
from .blocks import fill_kernel, score_kernel
from .fused import fused_kernel
from .parts import strided_part
from .plan import make_plan, rows_plan, score_plan
from .ready import Ready, budget_of, key_of, prepared
from .select import select_wide
from .specialise import Limits

__all__ = ["block_scores", "changed", "keep_mask", "on", "scope_masks"]


def scope_masks(updates: Sequence[Update], limits: Limits | None = None) -> None:
    """Fill the masks of all updates; those of the same kind share launches.

    Args:
        updates: on one device, each one that `reasons_of` finds nothing against.
        limits: sizes that decide between ways.

    Raises:
        SparsityError: a CUDA graph is being captured and these tensors were not updated before.
    """
    limits, device = limits or Limits(), updates[0].scopes[0].members[0].window.device
    with on(device):
        budgets = [budget_of(u.keep, device) for u in updates]
        key = (limits, device, tuple(key_of(u, b) for u, b in zip(updates, budgets, strict=True)))
        ready = prepared(key, budgets, device, lambda: make_plan(updates, limits))
        scores = torch.empty(max(ready.slots, 1), dtype=torch.float32, device=device)
        kept = torch.empty(max(ready.slots, 1), dtype=torch.uint8, device=device)
        for launch in ready.fused:
            launch.run(fused_kernel, scores, kept)
        for launch in ready.scored:
            launch.run(score_kernel, scores, kept)
        _select(ready, scores, kept)
        for launch in ready.scored:
            launch.run(fill_kernel, kept)
    changed(m.mask for update in updates for group in update.scopes for m in group.members)


def _select(ready: Ready, scores: Tensor, kept: Tensor) -> None:
    """Rows of stored scores, and long rows of any kind."""
    for launch in ready.rows:
        launch.run(fused_kernel, scores, kept)
    for rows in ready.wide:
        select_wide(rows, scores, kept)


def changed(tensors: Iterable[Tensor | None]) -> None:
    """Tell autograd, which cannot see kernels write: a backward pass that saved the old values must fail, not go on."""
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def keep_mask(
    scores: Tensor, keep: int | Tensor, candidates: Tensor | None, *, magnitude: bool, limits: Limits | None = None
) -> Tensor:
    """As `api.keep_mask`, on rows of scores of any strides."""
    limits, device = limits or Limits(), scores.device
    kept = torch.empty(scores.shape, dtype=torch.uint8, device=device)
    if candidates is not None:
        kept.copy_(candidates)
    if kept.numel():
        with on(device):
            level, among_kept, budget = scores.data_ptr() % 16 == 0, candidates is not None, budget_of(keep, device)
            # any scores of this shape may take the table, so its number is never another
            own = (level, among_kept, magnitude, budget.key, budget.number)
            key = (limits, device, scores.shape, scores.stride(), scores.dtype, *own)
            rows, width = scores.shape
            part = strided_part(rows, width, scores.stride(), dtype=scores.dtype, big=limits.big, level=level)
            ready = prepared(key, [budget], device, lambda: rows_plan(part, keep, among_kept, not magnitude, limits))
            _select(ready, scores, kept)
    return kept.view(torch.bool)


def block_scores(members: Sequence[Blocks], norm: float, ndim: int, limits: Limits | None = None) -> Tensor:
    """As `api.block_scores`: float32, of the aligned grid's shape."""
    limits, device = limits or Limits(), members[0].window.device
    grid = Scopes(members=tuple(members), shape=(1,) * ndim).grid
    out = torch.empty(grid, dtype=torch.float32, device=device)
    if out.numel():
        with on(device):
            update = Update(scopes=(Scopes(members=tuple(members), shape=grid),), keep=0, norm=norm)
            budget = budget_of(0, device)
            key = (limits, device, "scores", key_of(update, budget))
            for launch in prepared(key, [budget], device, lambda: score_plan(update, limits)).scored:
                launch.run(score_kernel, out, out)
    return out


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the tensors' own device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
