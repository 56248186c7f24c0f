"""Which slots every component holds after an update: the settings' rules put together, with their budgets.

Knows parts, budgets and rules; changes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..sparsifiers.config import TensorGroup
from .budgets import distribute, overall_level, spread
from .parts import Kept, Part
from .settings import Settings
from .update import drop, grow, redistribute

__all__ = ["choose"]


def choose(
    parts: Sequence[Part], settings: Settings, groups: Sequence[TensorGroup], iteration: int, fraction: float
) -> tuple[list[Kept], list[Tensor]]:
    """What every part keeps, and how many blocks each of its scopes then holds.

    Args:
        parts: every component as it is now.
        settings: rules and target.
        groups: what budgets are read from.
        iteration: what the target is asked for.
        fraction: of the active blocks to drop.

    Returns:
        What is kept and int64 [scopes], one each a part.
    """
    components = [p.slots.component for p in parts]
    total = None
    if settings.target is not None:
        level = overall_level(settings, 0.0, iteration)
        wanted = distribute(components, groups, settings, level)
        if settings.prune.is_global:
            total = next(iter(wanted.values()))[1] // next(p.size for p in parts if p.is_open)
        else:
            parts = _with_budgets(parts, spread(components, wanted, high=_ceilings(parts, settings)))
    kept = drop(parts, settings.prune, fraction, total=total, regrows=settings.grow is not None)
    if settings.grow is None:
        new = [k if p.is_open else p.keep(p.slots.active) for k, p in zip(kept, parts, strict=True)]
        return new, [k.count for k in new]
    if total is not None:
        low = {k: int(found.count.max()) for k, found in enumerate(kept)}
        parts = _with_budgets(parts, spread(components, wanted, low=low))
    budgets = [p.budget for p in parts]
    if settings.redistribute is not None:
        budgets = redistribute(parts, kept, settings.redistribute)
    return grow(parts, kept, budgets, settings.grow), budgets


def _ceilings(parts: Sequence[Part], settings: Settings) -> dict[int, int] | None:
    """Without growth nothing can hold more than it does now."""
    if settings.grow is not None:
        return None
    out = {}
    for k, part in enumerate(parts):
        out[k] = int(part.slots.active[0].sum())
        part.forget()
    return out


def _with_budgets(parts: Sequence[Part], nnz: dict[int, int]) -> list[Part]:
    return [replace(p, budget=torch.full_like(p.budget, nnz[k])) if k in nnz else p for k, p in enumerate(parts)]
