"""Chooses the slots that every part of an update keeps, by pruning, redistribution and growth.

Takes parts, settings and budgets; returns `KeptSlots` and changes nothing. Counts are exact in every scope. Parts are
read one after the other, on a GPU several at once so that they share launches, and only what each keeps is held
meanwhile; where all compete, all are read together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..densities import allocate, shares
from ..errors import SparsityError
from ..selection import keep_mask, keep_masks
from .budgets import Budgets, overall_level
from .rules import Rule
from .settings import number_of, read_numbers
from .slots import KeptSlots, Part, Slots

AT_ONCE = 1 << 26  # slots on a GPU that share launches: their scores and rows take some ten bytes each


class NotReadyError(Exception):
    """An update cannot happen, since something that it reads is not finite."""


class Reader:
    """Reads numbers of tensors, all together: one wait for a device.

    The first time it also reads whether the update can happen (`is_ready`: a bool, or a tensor of one number).

    Raises:
        NotReadyError: it cannot.
    """

    def __init__(self, is_ready: bool | Tensor = True) -> None:
        self._is_ready = is_ready

    def __call__(self, found: Sequence[Tensor | float]) -> list[float]:
        """See `read_numbers`."""
        if self._is_ready is True:
            return read_numbers(found) if found else []
        *numbers, is_ready = read_numbers([*found, self._is_ready])
        if not is_ready:
            raise NotReadyError
        self._is_ready = True
        return numbers


def choose(
    parts: Sequence[Part], budgets: Budgets, iteration: int, fraction: float, read: Reader
) -> tuple[list[KeptSlots], list[Tensor]]:
    """What every part keeps, and how many blocks each of its scopes then holds (int64 [scopes]).

    `fraction`, in [0, 1), of the active blocks is pruned; the target is evaluated at `iteration`.
    """
    if not 0 <= fraction < 1:
        raise SparsityError(f"the update fraction must be in [0, 1), so that no layer is emptied; got {fraction!r}")
    settings, shared = budgets.settings, budgets.shared
    level = overall_level(settings, 0.0, iteration)
    most = None  # blocks that all parts may keep together, if they compete and there is a target
    if settings.target is not None and settings.prune.is_global:
        most = budgets.ideals(level)[1] // budgets.sizes[shared[0]]
    elif settings.target is not None:
        high = _active_counts(parts, read) if settings.grow is None else None  # without growth no scope can keep more
        parts = _with_budgets(parts, budgets.counts(level, high=high))
    competing = shared if settings.prune.is_global else []
    kept = _prune(parts, competing, settings.prune, fraction, most, read, regrows=settings.grow is not None)
    if settings.grow is None:
        new = [kept[k] if k in shared else p.store(p.slots.active) for k, p in enumerate(parts)]
        is_known = settings.target is not None and most is None  # no scope held fewer blocks than its budget is now
        return new, [p.budget if is_known else k.count for p, k in zip(parts, new, strict=True)]
    if most is not None:
        low = dict(enumerate(map(int, read([found.count.max() for found in kept]))))
        parts = _with_budgets(parts, budgets.counts(level, low=low))
    after = [p.budget for p in parts]
    if settings.redistribute is not None:
        after = _redistribute(parts, kept, budgets, settings.redistribute, read)
    grown: list[KeptSlots] = []
    for at in _batches(parts):
        grown += _grow(parts[at], kept[at], after[at], settings.grow)
    return grown, after


def _batches(parts: Sequence[Part]) -> Iterator[slice]:
    """Which parts are read at once: on a GPU as many as `AT_ONCE` allows, else one, which limits memory."""
    begin = held = 0
    for k, part in enumerate(parts):
        size = math.prod(part.slots.shape)
        is_alone = part.slots.device.type == "cpu" or part.sharded or parts[begin].sharded or held + size > AT_ONCE
        if k > begin and is_alone:
            yield slice(begin, k)
            begin, held = k, 0
        held += size
    if parts:
        yield slice(begin, len(parts))


def _active_counts(parts: Sequence[Part], read: Reader) -> dict[int, int]:
    """Blocks that the first scope of each part holds now; with a target all scopes hold the same number."""
    out = []
    for part in parts:
        out.append(part.slots.active[0].sum())
        part.release()
    return dict(enumerate(map(int, read(out))))


def _with_budgets(parts: Sequence[Part], nnz: Mapping[int, int]) -> list[Part]:
    return [replace(p, budget=torch.full_like(p.budget, nnz[k])) if k in nnz else p for k, p in enumerate(parts)]


def _prune(
    parts: Sequence[Part],
    competing: Sequence[int],
    rule: Rule,
    fraction: float,
    most: int | None,
    read: Reader,
    *,
    regrows: bool,
) -> list[KeptSlots]:
    """Which active slots stay: all but exactly floor(fraction * active) in every part; never more than its budget.

    Every scope loses the smallest floor(fraction * active) of its own. Where scopes are so small that this falls
    short of the part's number (2 of 4 loses none at 0.3), the rest are the smallest of the weakest one of each scope.

    The `competing` parts (indices) lose that number together, and keep at most `most` blocks. Unless scopes regrow to
    their budgets afterwards, all scopes of a part lose the same number.
    """
    even = most is not None or not regrows
    together = _prune_together([parts[k] for k in competing], rule, fraction, most, even, read)
    found = dict(zip(competing, together, strict=True))
    alone = [k for k in range(len(parts)) if k not in found]
    for at in _batches([parts[k] for k in alone]):
        kept = _prune_alone([parts[k] for k in alone[at]], rule, fraction, regrows)
        found.update(zip(alone[at], kept, strict=True))
    return [found[k] for k in range(len(parts))]


def _prune_alone(parts: Sequence[Part], rule: Rule, fraction: float, regrows: bool) -> list[KeptSlots]:
    """Parts that do not compete with others, read at once."""
    scores, active = [_scores(rule, p.slots) for p in parts], [p.slots.active for p in parts]
    counts = [p.at_most_budget(count_after_pruning(a.sum(1), fraction)) for p, a in zip(parts, active, strict=True)]
    rows = keep_masks([*zip(scores, counts, active, strict=True)])
    if regrows:
        _drop_weakest(parts, scores, rows, fraction)
    return [p.store(kept) for p, kept in zip(parts, rows, strict=True)]


def _prune_together(
    parts: Sequence[Part], rule: Rule, fraction: float, most: int | None, even: bool, read: Reader
) -> list[KeptSlots]:
    if not parts:
        return []
    scored = [_scores(rule, p.slots) for p in parts]
    found = _compete(parts, scored, fraction, most, even, read)
    counts = [p.at_most_budget(rows.sum(1)) for p, rows in zip(parts, found, strict=True)]  # a scheduler may lower one
    kept = keep_masks([*zip(scored, counts, found, strict=True)])
    return [p.store(rows) for p, rows in zip(parts, kept, strict=True)]


def count_after_pruning(count: Tensor, fraction: float) -> Tensor:
    """What is left of int64 counts; the fraction is exact to 1e-9, so that 0.3 of 10 is 3."""
    return count - torch.floor(count.double() * fraction + 1e-9).long()


def _drop_weakest(parts: Sequence[Part], scores: Sequence[Tensor], rows: list[Tensor], fraction: float) -> None:
    """Drop from `rows` what is still missing from each part's number, at most one more in every scope."""
    surplus = [r.sum() - count_after_pruning(p.slots.active.sum(), fraction) for p, r in zip(parts, rows, strict=True)]
    # on a GPU the numbers are not looked at, since that would wait for it: where none are missing none are dropped
    at = [k for k, p in enumerate(parts) if p.scopes > 1 and (rows[k].device.type != "cpu" or surplus[k] > 0)]
    fewer = keep_masks([(scores[k], (rows[k].sum(1) - 1).clamp(min=0), rows[k]) for k in at])
    flat = [(rows[k] & ~less).reshape(1, -1) for k, less in zip(at, fewer, strict=True)]
    counts = [(weakest.sum() - surplus[k].clamp(min=0)).clamp(min=0) for k, weakest in zip(at, flat, strict=True)]
    stays = keep_masks([(scores[k].reshape(1, -1), c, w) for k, c, w in zip(at, counts, flat, strict=True)])
    for k, weakest, kept in zip(at, flat, stays, strict=True):
        rows[k] = rows[k] & ~(weakest & ~kept).reshape(rows[k].shape)


def _compete(
    parts: Sequence[Part], scored: Sequence[Tensor], fraction: float, most: int | None, even: bool, read: Reader
) -> list[Tensor]:
    """Which active slots stay when all parts compete; the best of a part, or with `even` of a scope, always stays.

    With `even` every scope of a part keeps the same number: the competition decides how many, its scores which.
    """
    active = [p.slots.active for p in parts]
    held = [int(n) for n in read([a.sum() for a in active])]
    keep = sum(held) - math.floor(sum(held) * fraction + 1e-9)
    keep = keep if most is None else min(keep, most)
    scopes = [p.scopes if even else 1 for p in parts]
    if keep < sum(scopes):
        raise SparsityError(
            f"global pruning would keep {keep} blocks, but every {'scope' if even else 'tensor'} keeps one, and there "
            f"are {sum(scopes)}; prune a smaller fraction, or lower the sparsity"
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
    counts = allocate(read([k.sum() for k in kept]), keep, scopes, held, scopes)
    return [keep_mask(s, n // m, candidates=a) for s, n, m, a in zip(scored, counts, scopes, active, strict=True)]


def _redistribute(
    parts: Sequence[Part], kept: Sequence[KeptSlots], budgets: Budgets, rule: Rule, read: Reader
) -> list[Tensor]:
    """Budgets after the pruned blocks are shared out anew over the parts that share the budget; their sum stays.

    In proportion to the rule's share; int64 [scopes] for each part. Where one more block in every scope costs the same
    in all these parts, the largest remainders are rounded up; else blocks are moved in whole exchanges (`exchange`).
    """
    at = budgets.shared
    units, capacity = [budgets.units[k] for k in at], [budgets.capacities[k] for k in at]
    shares_of_rule = [_share(rule, parts[k]) for k in at]
    counts_left = [n for k in at for n in (kept[k].count.sum(), kept[k].count.max())]
    numbers = read([*shares_of_rule, *counts_left])
    weights, most_of_scope = numbers[: len(at)], [int(n) for n in numbers[len(at) + 1 :: 2]]
    left = [int(n) * budgets.sizes[k] for k, n in zip(at, numbers[len(at) :: 2], strict=True)]
    now = [int(parts[k].budget.sum()) * budgets.sizes[k] for k in at]
    if not any(math.isfinite(w) and w > 0 for w in weights):
        weights = [float(b - n) for b, n in zip(now, left, strict=True)]
    free = [c - n for c, n in zip(capacity, left, strict=True)]
    given = shares(weights, sum(now) - sum(left), free)
    ideals = [n + g for n, g in zip(left, given, strict=True)]
    low = [n * unit for n, unit in zip(most_of_scope, units, strict=True)]
    is_even = len(set(units)) == 1
    bounds = low, capacity, units
    counts = allocate(ideals, sum(now), *bounds) if is_even else exchange(now, ideals, *bounds)
    out = [p.budget for p in parts]
    for k, n, unit in zip(at, counts, units, strict=True):
        out[k] = torch.full_like(out[k], n // unit)
    return out


def exchange(
    now: Sequence[int], ideals: Sequence[float], low: Sequence[int], high: Sequence[int], unit: Sequence[int]
) -> list[int]:
    """Move from those above their ideal to those below, in multiples of both units: the sum never changes.

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


def _share(rule: Rule, part: Part) -> Tensor | float:
    found = rule.share_of(part.slots)
    part.release()
    if isinstance(found, Tensor) and found.numel() == 1:
        return found  # read later, together with others
    return number_of(found, f"{part.slots.name}: rule {rule.name!r} must return one number for redistribution")


def _grow(parts: Sequence[Part], kept: Sequence[KeptSlots], budgets: Sequence[Tensor], rule: Rule) -> list[KeptSlots]:
    """What each part kept, and its highest inactive slots up to its budget."""
    stay = [p.rows(k) for p, k in zip(parts, kept, strict=True)]
    missing = [b.to(k.count.device, non_blocking=True) - k.count for b, k in zip(budgets, kept, strict=True)]
    free = [p.slots.real & ~s for p, s in zip(parts, stay, strict=True)]
    grown = keep_masks([(_scores(rule, p.slots), m, f) for p, m, f in zip(parts, missing, free, strict=True)])
    return [p.store(s | g) for p, s, g in zip(parts, stay, grown, strict=True)]


def _scores(rule: Rule, slots: Slots) -> Tensor:
    """A rule's scores of every slot, checked, since the rule may be a user's."""
    found, shape = rule.score(slots), tuple(slots.active.shape)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SparsityError(f"{slots.name}: rule {rule.name!r} must return float scores of shape {shape}, got {what}")
    return found
