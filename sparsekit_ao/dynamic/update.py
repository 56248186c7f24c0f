"""One update of the masks: drop, redistribute, grow. Nothing is changed here.

Knows parts, budgets and rules; no optimizer and no model. Every choice goes through the one selection rule, so counts
are exact in every scope. One part after the other is looked at, and of each only what it keeps is held meanwhile; where
all tensors compete, all are looked at together.
"""

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from ..densities import allocate, shares
from ..errors import SparsityError
from ..selection import keep_mask
from .parts import Kept, Part
from .rules import Rule
from .slots import Slots

__all__ = ["drop", "exchange", "grow", "redistribute"]


def drop(
    parts: Sequence[Part], rule: Rule, fraction: float, *, total: int | None = None, regrows: bool = True
) -> list[Kept]:
    """Which active slots stay: all but exactly floor(fraction * active) in every part.

    Every scope loses the smallest floor(fraction * active) of its own. Where scopes are so small that this falls
    short of the part's number (2 of 4 loses none at 0.3), the rest are the smallest of the weakest one of each scope.

    Args:
        parts: every component; no scope is left with more than its budget.
        rule: a global one drops floor(fraction * active) of all open parts together, whichever those are.
        fraction: of the active blocks, in [0, 1).
        total: with a global rule, blocks that all open parts hold at most.
        regrows: scopes grow to their budgets afterwards; else all scopes of a part lose alike.
    """
    if not 0 <= fraction < 1:
        raise SparsityError(f"the update fraction must lie in [0, 1), so that no layer is emptied; got {fraction!r}")
    together = {k: p for k, p in enumerate(parts) if p.is_open and rule.is_global}
    even = total is not None or not regrows
    found = dict(zip(together, _drop_together(list(together.values()), rule, fraction, total, even), strict=True))
    return [found[k] if k in found else _drop_alone(p, rule, fraction, regrows) for k, p in enumerate(parts)]


def _drop_alone(part: Part, rule: Rule, fraction: float, regrows: bool) -> Kept:
    scores, active = _scores(rule, part.slots), part.slots.active
    rows = keep_mask(scores, torch.minimum(_after(active.sum(1), fraction), part.budget), candidates=active)
    return part.keep(_without_weakest(part, scores, rows, fraction) if regrows else rows)


def _drop_together(parts: Sequence[Part], rule: Rule, fraction: float, total: int | None, even: bool) -> list[Kept]:
    if not parts:
        return []
    scored = [_scores(rule, p.slots) for p in parts]
    found = _compete(parts, scored, fraction, total, even)
    return [  # a scheduler may have lowered a budget
        p.keep(keep_mask(s, torch.minimum(rows.sum(1), p.budget), candidates=rows))
        for p, s, rows in zip(parts, scored, found, strict=True)
    ]


def _after(count: Tensor, fraction: float) -> Tensor:
    return count - torch.floor(count.double() * fraction + 1e-9).long()


def _without_weakest(part: Part, scores: Tensor, kept: Tensor, fraction: float) -> Tensor:
    """Drop what is still missing from the part's number, at most one more in every scope."""
    surplus = int(kept.sum() - _after(part.slots.active.sum(), fraction))
    if surplus <= 0 or part.scopes == 1:
        return kept
    weakest = kept & ~keep_mask(scores, (kept.sum(1) - 1).clamp(min=0), candidates=kept)
    flat, row = weakest.reshape(1, -1), scores.reshape(1, -1)
    stays = keep_mask(row, max(int(flat.sum()) - surplus, 0), candidates=flat)
    return kept & ~(flat & ~stays).reshape(kept.shape)


def _compete(
    parts: Sequence[Part], scored: Sequence[Tensor], fraction: float, total: int | None, even: bool
) -> list[Tensor]:
    """Which active slots stay when all parts compete: never the best of a part, or with `even` of a scope, goes.

    With `even` every scope of a part keeps the same number: the competition says how many, its scores which.
    """
    active = [p.slots.active for p in parts]
    held = [int(a.sum()) for a in active]
    keep = sum(held) - math.floor(sum(held) * fraction + 1e-9)
    keep = keep if total is None else min(keep, total)
    scopes = [p.scopes if even else 1 for p in parts]
    if keep < sum(scopes):
        raise SparsityError(
            f"global pruning would keep {keep} blocks, but every {'scope' if even else 'tensor'} keeps one, and there "
            f"are {sum(scopes)}; drop a smaller fraction, or ask for a lower sparsity"
        )
    shaped = [(n, -1) for n in scopes]
    best = [keep_mask(s.reshape(n), 1, candidates=a.reshape(n)) for s, a, n in zip(scored, active, shaped, strict=True)]
    rows = [
        s.double().reshape(n).masked_fill(b, math.inf).reshape(1, -1)
        for s, b, n in zip(scored, best, shaped, strict=True)
    ]
    flat = torch.cat([a.reshape(1, -1) for a in active], dim=1)
    kept = keep_mask(torch.cat(rows, dim=1), keep, candidates=flat).split([a.numel() for a in active], dim=1)
    if not even:
        return [k.reshape(a.shape) for k, a in zip(kept, active, strict=True)]
    whole = allocate([float(k.sum()) for k in kept], keep, scopes, held, scopes)
    return [keep_mask(s, n // m, candidates=a) for s, n, m, a in zip(scored, whole, scopes, active, strict=True)]


def redistribute(parts: Sequence[Part], kept: Sequence[Kept], rule: Rule) -> list[Tensor]:
    """Budgets after what was dropped is shared out anew over the open parts; they sum to what they did.

    Shares are in proportion to the rule's number. Where a block more costs the same in all open parts the largest
    remainders are rounded up; else blocks move by whole exchanges (see `exchange`).

    Returns:
        int64 [scopes] for each part.
    """
    at = [k for k, p in enumerate(parts) if p.is_open]
    open_ = [parts[k] for k in at]
    units = [p.unit for p in open_]
    left = [int(kept[k].count.sum()) * parts[k].size for k in at]
    now = [int(p.budget.sum()) * p.size for p in open_]
    room = [math.prod(p.slots.shape) * p.size - n for p, n in zip(open_, left, strict=True)]
    weights = [_statistic(rule, p) for p in open_]
    if not any(math.isfinite(w) and w > 0 for w in weights):
        weights = [float(b - n) for b, n in zip(now, left, strict=True)]
    given = shares(weights, sum(now) - sum(left), room)
    ideals = [n + g for n, g in zip(left, given, strict=True)]
    low = [int(kept[k].count.max()) * parts[k].unit for k in at]
    full = [n + r for n, r in zip(left, room, strict=True)]
    even = len(set(units)) == 1
    whole = allocate(ideals, sum(now), low, full, units) if even else exchange(now, ideals, low, full, units)
    out = [p.budget for p in parts]
    for k, n in zip(at, whole, strict=True):
        out[k] = torch.full_like(out[k], n // parts[k].unit)
    return out


def exchange(
    now: Sequence[int], ideals: Sequence[float], low: Sequence[int], high: Sequence[int], unit: Sequence[int]
) -> list[int]:
    """Move from those above their ideal to those below, in amounts that both can take whole: the sum never changes.

    >>> exchange([12, 12], [5.0, 19.0], [0, 0], [24, 24], [2, 3])
    [6, 18]
    """
    out = list(now)
    for giver in range(len(out)):
        for taker in range(len(out)):
            step = math.lcm(unit[giver], unit[taker])
            spare = min(out[giver] - ideals[giver], out[giver] - low[giver])
            need = min(ideals[taker] - out[taker], high[taker] - out[taker])
            moved = max(math.floor(min(spare, need) / step + 1e-9), 0) * step
            out[giver] -= moved
            out[taker] += moved
    return out


def grow(parts: Sequence[Part], kept: Sequence[Kept], budgets: Sequence[Tensor], rule: Rule) -> list[Kept]:
    """What each part holds then: what it kept, and its highest inactive slots up to its budget."""
    return [_grow_one(p, k, b, rule) for p, k, b in zip(parts, kept, budgets, strict=True)]


def _grow_one(part: Part, kept: Kept, budget: Tensor, rule: Rule) -> Kept:
    stay, missing = part.rows(kept), budget.to(kept.count.device) - kept.count
    grown = keep_mask(_scores(rule, part.slots), missing, candidates=part.slots.real & ~stay)
    return part.keep(stay | grown)


def _scores(rule: Rule, slots: Slots) -> Tensor:
    """What a rule says of every slot; the rule may be a user's."""
    found, shape = rule.score(slots), tuple(slots.active.shape)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SparsityError(f"{slots.name}: rule {rule.name!r} must return float scores of shape {shape}, got {what}")
    return found


def _statistic(rule: Rule, part: Part) -> float:
    found = rule.score(part.slots)
    part.forget()
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, numbers.Real):
        raise SparsityError(
            f"{part.slots.name}: rule {rule.name!r} must return one number for redistribution, got {found!r}"
        )
    return float(found)
