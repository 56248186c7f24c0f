"""One update of masks: prune the lowest scores, redistribute budgets, grow the highest scores, write the result.

`Settings` says when updates happen and by which criteria. `run_update` calls criteria, and whatever else may raise an
error, before it writes anything. Pruning groups are read one after the other, so that sharded weights are gathered for
only one of them at a time. Pruning groups that compete with each other (prune="global") are read together.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..calibration import Statistics
from ..densities import allocate, shares
from ..distributed import LocalParts, full_tensor, is_sharded, local, placed_like, sum_over_ranks
from ..errors import SparsityError, is_number
from ..masking import select
from ..models.running import keyed_generator
from ..schedules import Schedule, constant, is_schedule
from ..selection import keep_mask
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.optimizer_state import (
    check_state,
    dequantized,
    original,
    refuse_closed_state,
    reset_state,
    second_moments,
    trainer_of,
)
from ..structure import counts_after_dropping, sparsity_to_nnz
from .budgets import Budgets, exchange
from .criteria import Criterion, Slots, Tensors, parse_criterion
from .dynamic_mask import mask_of
from .gradients import ORDER, GradientCapture

NewValues = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """The numbers of elements that one update of the masks changed.

    Attributes:
        iteration: The iteration of the update.
        fraction: The fraction of the active blocks that `update_fraction` asked to prune. Pruned blocks may have grown
            again in the same update. It is 0 if there is a target and nothing grows, because the target alone decides
            then how many blocks are pruned.
        grown: {tensor_fqn: number of elements that became active}.
        pruned: {tensor_fqn: number of elements that became inactive}.
        kept: {tensor_fqn: number of elements that are active now}.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sparsifier = sparsekit_ao.SET(0.5, optimizer, update_every=1)
    >>> sparsifier.prepare(model)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> sparsifier.step()
    >>> sparsifier.last_update.iteration, sparsifier.last_update.kept
    (1, {'0.weight': 4})
    """

    iteration: int
    fraction: float
    grown: Mapping[str, int]
    pruned: Mapping[str, int]
    kept: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked arguments of `DynamicSparsifier`, which say when updates happen and what they do."""

    update_every: int | None
    update_fraction: Schedule
    until: int | None
    prune: Criterion
    grow: Criterion | None
    redistribute: Criterion | None
    target: Schedule | None
    seed: int
    state_init: str
    new_values: NewValues | None

    @property
    def updates(self) -> bool:
        """Return whether masks ever change."""
        return self.update_every is not None and self.until != 0

    @property
    def criteria(self) -> list[Criterion]:
        """Return the criteria that updates call; none if there are no updates."""
        criteria = (self.prune, self.grow, self.redistribute)
        return [criterion for criterion in criteria if criterion is not None and self.updates]

    @property
    def needs_gradient(self) -> bool:
        """Return whether an update reads dense gradients."""
        return self.needs_squares or any("gradient" in criterion.needs for criterion in self.criteria)

    @property
    def needs_momentum(self) -> bool:
        """Return whether an update reads momentum, which must then include inactive weights in every iteration."""
        return any("momentum" in criterion.needs for criterion in self.criteria)

    @property
    def needs_squares(self) -> bool:
        """Return whether an update sets the optimizer's second moments."""
        return self.updates and self.state_init == "grad"

    def is_due(self, iteration: int) -> bool:
        """Return whether an update is scheduled for this iteration (counted from 1)."""
        return iteration % (self.update_every or 1) == 0 and self.may_update(iteration)

    def due(self) -> range:
        """Return the iterations with scheduled updates, or the first 1000 of them if `until` is None."""
        every = self.update_every or 1
        return range(every, (every * 1000 if self.until is None else self.until) + 1, every)

    def may_update(self, iteration: int) -> bool:
        """Return whether this iteration is not later than `until`, and masks change at all."""
        return self.updates and (self.until is None or iteration <= self.until)

    def opening(self, iteration: int, is_pending: bool) -> dict[str, bool]:
        """Return the arguments of `GradientCapture.set_open` for an iteration; `is_pending` if an update is overdue."""
        feeds_update = self.is_due(iteration) or (is_pending and self.may_update(iteration))
        feeds_momentum = self.needs_momentum and self.may_update(iteration)
        is_open = feeds_momentum or (feeds_update and self.needs_gradient)
        return {"is_open": is_open, "captures": feeds_update, "masked": not feeds_momentum}

    def fraction_at(self, iteration: int) -> float:
        """Return the fraction of the active blocks that `update_fraction` asks to prune in this iteration."""
        if self.grow is None and self.target is not None:
            return 0.0  # the target alone decides
        fraction = _value_at(self.update_fraction, iteration, "update_fraction")
        if not 0 <= fraction < 1:
            raise SparsityError(f"the update fraction must be in [0, 1), so that no layer is emptied; got {fraction!r}")
        return fraction

    def target_at(self, iteration: int) -> float:
        """Return the overall sparsity that the target demands in this iteration."""
        assert self.target is not None
        level = _value_at(self.target, iteration, "target")
        if not 0 <= level <= 1:
            raise SparsityError(
                f"target: an overall sparsity must be in [0, 1], got {level!r} at iteration {iteration}"
            )
        return level

    def extreme_targets(self) -> tuple[float, ...]:
        """Check the target in all updates, and return its lowest and highest level; () without a target or `until`."""
        if self.target is None:
            return ()
        levels = [self.target_at(t) for t in (0, *self.due())]
        falls = [k for k in range(1, len(levels)) if levels[k] < levels[k - 1] - 1e-9]  # a tolerance for rounding
        if self.grow is None and falls:
            raise SparsityError(
                f"target: falls from {levels[falls[0] - 1]:g} to {levels[falls[0]]:g} at iteration "
                f"{self.due()[falls[0] - 1]}, and grow=None never adds a block; pass grow= or another target"
            )
        return () if self.until is None else (min(levels), max(levels))

    def check_budgets(self, budgets: Budgets) -> None:
        """Raise an error if a setting moves budgets between tensors, but these budgets cannot be moved."""
        moving = [name for name in ("redistribute", "target") if getattr(self, name) is not None]
        moving += ["prune='global'"] if self.prune.is_global else []
        if moving and not budgets.shared:
            raise SparsityError(
                f"{moving[0]} moves budgets between tensors, but every tensor has one of its own; leave nnz and "
                "sparsity_level out of the entries that should share"
            )
        if self.prune.is_global and self.target and len({budgets.sizes[k] for k in budgets.shared}) > 1:
            raise SparsityError(
                "prune='global' with a target counts blocks of all tensors together, so all must have one size; "
                "use prune='magnitude'"
            )
        if self.redistribute is not None:
            budgets.refuse_uneven_scopes()
            budgets.refuse_without_exchange()

    def check_optimizers(self, optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup]) -> None:
        """Raise unless each optimizer trains a parameter, and each parameter has one that stores what updates read."""
        used = set()
        for group in groups:
            parameter, name = original(group), group["tensor_fqn"]
            index = trainer_of(optimizers, parameter, name, *([ORDER] if is_sharded(parameter) else []))
            check_state(optimizers[index], parameter, name, momentum=self.needs_momentum, squares=self.needs_squares)
            used.add(index)
        if groups and len(used) < len(optimizers):
            raise SparsityError(
                "an optimizer was given that trains none of the sparsified parameters, so no update could wait for its "
                "step; leave it out"
            )


def make_settings(**arguments: Any) -> Settings:
    """Check the arguments of `DynamicSparsifier`, each alone and all together, and return them as `Settings`."""
    criteria = {purpose: parse_criterion(purpose, arguments[purpose]) for purpose in ("prune", "grow", "redistribute")}
    target, fraction = arguments["target"], arguments["update_fraction"]
    if arguments["state_init"] not in ("zero", "grad"):
        raise SparsityError(f"state_init must be 'zero' or 'grad', got {arguments['state_init']!r}")
    kinds = ("a schedule (iteration -> sparsity)", "a function (weight, generator) -> values")
    for name, kind in zip(("target", "new_values"), kinds, strict=True):
        if arguments[name] is not None and not is_schedule(arguments[name]):
            raise SparsityError(f"{name} must be {kind} or None, got {arguments[name]!r}")
    if target is not None and arguments["update_every"] is None:
        raise SparsityError(
            "target takes effect in updates, and update_every=None means that there are none; pass sparsity_level"
        )
    if criteria["prune"] is None:
        raise SparsityError("prune must be a criterion; for masks that never change use update_every=None")
    if criteria["grow"] is None and criteria["redistribute"] is not None:
        raise SparsityError("redistribute distributes what grows, but grow is None; give grow=, or leave it out")
    if criteria["grow"] is None and target is not None and fraction is not None:
        raise SparsityError(
            "update_fraction has no effect, because nothing grows again with a target and grow=None; leave it out"
        )
    for name, least in (("update_every", 1), ("until", 0), ("seed", 0)):
        value = arguments[name]
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not (is_integer and int(value) >= least) and (value is not None or name == "seed"):
            raise SparsityError(f"{name} must be an int >= {least}, got {value!r}")
        arguments[name] = None if value is None else int(value)
    every, until = arguments["update_every"], arguments["until"]
    if every is not None and until and until < every:
        raise SparsityError(
            f"until={until} allows no update, since the first one is in iteration update_every={every}; lower "
            "update_every, or set update_every=None for masks that never change"
        )
    fraction = 0.3 if fraction is None else fraction
    if is_number(fraction) and 0 <= float(fraction) < 1:
        fraction = constant(float(fraction))
    elif not is_schedule(fraction):
        raise SparsityError(f"update_fraction must be a schedule or a number in [0, 1), got {fraction!r}")
    return Settings(**{**arguments, **criteria, "update_fraction": fraction})


def run_update(
    budgets: Budgets,
    settings: Settings,
    capture: GradientCapture,
    momenta: Mapping[str, Tensor | None],
    iteration: int,
    statistics: Callable[[str], Statistics],
) -> UpdateStatistics:
    """Choose new masks, write them, and set shared budgets; if a criterion raises an error, nothing has changed."""
    fraction, slots = settings.fraction_at(iteration), []
    for pruning in budgets.pruning_groups:
        names = {spec: name for name, spec in pruning.specs.items()}
        group_of = {spec: budgets.groups[name] for spec, name in names.items()}
        placed = {
            "weights": {spec: original(group).detach() for spec, group in group_of.items()},
            "masks": {spec: mask_of(group).mask for spec, group in group_of.items()},
            "gradients": {spec: capture.gradients[n] for spec, n in names.items() if n in capture.gradients},
            "momenta": {spec: m for spec, n in names.items() if (m := momenta.get(n)) is not None},
        }
        recorded = {spec: statistics(name) for spec, name in names.items()}
        slots.append(
            Slots(pruning=pruning, placed=placed, statistics=recorded, iteration=iteration, seed=settings.seed)
        )
    masks, shared_counts = _choose(slots, budgets, settings, iteration, fraction)
    chosen = zip(budgets.pruning_groups, masks, strict=True)
    by_tensor = {name: new[spec] for pruning, new in chosen for name, spec in pruning.specs.items()}
    groups = list(budgets.groups.values())
    counts = _apply(groups, [by_tensor[name] for name in budgets.groups], settings, capture, iteration)
    for k, count in shared_counts.items():
        budgets.set(k, count)
    return UpdateStatistics(
        iteration=iteration,
        fraction=fraction,
        grown={fqn: grown for fqn, (grown, _, _) in counts.items()},
        pruned={fqn: changed - grown for fqn, (grown, changed, _) in counts.items()},
        kept={fqn: kept for fqn, (_, _, kept) in counts.items()},
    )


def _choose(
    slots: list[Slots], budgets: Budgets, settings: Settings, iteration: int, fraction: float
) -> tuple[list[Tensors], dict[int, int]]:
    """Return new masks of every pruning group, and {index of one with a shared budget: blocks in each scope}."""
    limits = [budgets.of_scopes(k) for k in range(len(slots))]  # how many blocks each scope may keep
    shared, regrows = budgets.shared, settings.grow is not None
    # RigL and SET prune each pruning group by itself and grow as many blocks; only with global criteria they compete.
    competing = shared if settings.prune.is_global else []
    most = None  # blocks that all pruning groups may keep together, if they compete and there is a target
    if settings.target is not None and competing:
        most = budgets.ideals(settings.target_at(iteration))[1] // budgets.sizes[shared[0]]
    elif settings.target is not None:
        # Without growth, a scope cannot keep more blocks than are active; all scopes have the same number of them.
        high = None if regrows else {k: int(slots[k].active[0].sum()) for k in shared}
        limits = _with_budgets(limits, budgets.counts(settings.target_at(iteration), high=high))
    pruned = {}  # {index: (masks after pruning, int64 [scopes] of the slots that are left in each scope)}
    if competing:
        rivals, their_limits = [slots[k] for k in competing], [limits[k] for k in competing]
        together = _prune_together(rivals, their_limits, settings, fraction, most)
        pruned = dict(zip(competing, together, strict=True))
    for k in (k for k in range(len(slots)) if k not in pruned):
        if regrows or k in shared:
            pruned[k] = _prune(slots[k], limits[k], settings, fraction)
        else:  # it has a budget of its own, which pruning would undercut, since nothing grows back
            pruned[k] = _masks_and_counts(slots[k], slots[k].active)
    masks, left = [pruned[k][0] for k in range(len(slots))], [pruned[k][1] for k in range(len(slots))]
    if settings.grow is None:
        return masks, {k: int(left[k][0]) for k in shared}
    if most is not None:  # the target's budgets follow only now, when it is known which blocks are left
        low = {k: int(left[k].max()) for k in shared}
        limits = _with_budgets(limits, budgets.counts(settings.target_at(iteration), low=low))
    if settings.redistribute is not None:
        limits = _redistribute(slots, limits, left, budgets, settings.redistribute)
    grown = [_grow(s, mask, n, settings.grow) for s, mask, n in zip(slots, masks, limits, strict=True)]
    return grown, {k: int(limits[k][0]) for k in shared}


def _with_budgets(limits: Sequence[Tensor], counts: Mapping[int, int]) -> list[Tensor]:
    """Return the budgets, with the same count in all scopes of the pruning groups that `counts` has."""
    return [torch.full_like(n, counts[k]) if k in counts else n for k, n in enumerate(limits)]


def _masks_and_counts(slots: Slots, rows: Tensor) -> tuple[Tensors, Tensor]:
    """Return the masks that keep these slots (bool rows), sharded like the weights, and the count of each scope."""
    return slots.masks_of(rows), rows.sum(1)  # masks in place of rows, because only masks can be sharded


def _prune(slots: Slots, limits: Tensor, settings: Settings, fraction: float) -> tuple[Tensors, Tensor]:
    """Prune floor(fraction * active) slots, or more where a scope exceeds its limit; return `_masks_and_counts`."""
    active, scores = slots.active, _scores(settings.prune, slots)
    count = torch.minimum(counts_after_dropping(active.sum(1), fraction), limits.to(active.device))
    rows = keep_mask(scores, count, candidates=active)
    # Every scope has lost its lowest floor(fraction * active) slots, which may be too few for the pruning group as a
    # whole (scopes with 2 active slots lose none at 0.3). If scopes grow to their budgets again, the group then also
    # loses the lowest of the slots that are the weakest in their scope: with four scopes of 2 active slots, the lowest
    # 2 of 4.
    still_to_prune = int(rows.sum() - counts_after_dropping(active.sum(), fraction))
    if settings.grow is not None and len(rows) > 1 and still_to_prune > 0:
        all_but_weakest = keep_mask(scores, (rows.sum(1) - 1).clamp(min=0), candidates=rows)
        weakest = (rows & ~all_but_weakest).reshape(1, -1)
        still_kept = keep_mask(scores.reshape(1, -1), max(int(weakest.sum()) - still_to_prune, 0), candidates=weakest)
        rows = all_but_weakest | still_kept.reshape(rows.shape)
    return _masks_and_counts(slots, rows)


def _prune_together(
    slots: list[Slots], limits: list[Tensor], settings: Settings, fraction: float, most: int | None
) -> list[tuple[Tensors, Tensor]]:
    """Let pruning groups compete: together they lose floor(fraction * active) slots, and keep at most `most` blocks."""
    scores, active = [_scores(settings.prune, s) for s in slots], [s.active for s in slots]
    # With a target, or without growth, all scopes of a pruning group keep the same number of slots.
    totals, is_even = [int(a.sum()) for a in active], most is not None or settings.grow is None
    count = sparsity_to_nnz(fraction, sum(totals))
    count = count if most is None else min(count, most)
    least = [s.shape[0] if is_even else 1 for s in slots]  # one block in each scope, or in the whole pruning group
    if count < sum(least):
        raise SparsityError(
            f"global pruning would keep {count} blocks, but every {'scope' if is_even else 'tensor'} keeps at least "
            f"one, and there are {sum(least)}; prune a smaller fraction, or lower the sparsity"
        )
    ranked = []
    for score, a, n in zip(scores, active, least, strict=True):
        best = keep_mask(score.reshape(n, -1), 1, candidates=a.reshape(n, -1))
        ranked.append(score.double().reshape(n, -1).masked_fill(best, math.inf).reshape(1, -1))
    all_active = torch.cat([a.reshape(1, -1) for a in active], dim=1)
    winners = keep_mask(torch.cat(ranked, dim=1), count, candidates=all_active)
    rows = list(winners.split([a.numel() for a in active], dim=1))
    if is_even:  # how many slots each pruning group has won is rounded to the same number in all of its scopes
        counts = allocate([float(r.sum()) for r in rows], count, least, totals, least)
        each = zip(scores, counts, least, active, strict=True)
        rows = [keep_mask(score, n // scopes, candidates=a) for score, n, scopes, a in each]
    together = []
    for s, score, row, budget in zip(slots, scores, rows, limits, strict=True):
        candidates = row.reshape(s.shape)
        limit = torch.minimum(candidates.sum(1), budget.to(row.device))  # a scheduler may have lowered the budget
        together.append(_masks_and_counts(s, keep_mask(score, limit, candidates=candidates)))
    return together


def _redistribute(
    slots: Sequence[Slots], limits: Sequence[Tensor], left: Sequence[Tensor], budgets: Budgets, criterion: Criterion
) -> list[Tensor]:
    """Return the budgets after the criterion distributes what was pruned; `left` are the slots left in each scope."""
    shared = budgets.shared
    units, capacity = [budgets.units[k] for k in shared], [budgets.capacities[k] for k in shared]
    requirement = f"criterion {criterion.name!r} must return one number for redistribution"
    weights = [_number(criterion.share_of(slots[k]), f"{slots[k].name}: {requirement}") for k in shared]
    remaining = [int(left[k].sum()) * budgets.sizes[k] for k in shared]
    now = [int(limits[k].sum()) * budgets.sizes[k] for k in shared]
    if not any(math.isfinite(w) and w > 0 for w in weights):  # each pruning group then gets back what it has lost
        weights = [float(b - n) for b, n in zip(now, remaining, strict=True)]
    free = [c - n for c, n in zip(capacity, remaining, strict=True)]
    growth = shares(weights, sum(now) - sum(remaining), free)
    ideals = [n + g for n, g in zip(remaining, growth, strict=True)]
    low = [int(left[k].max()) * unit for k, unit in zip(shared, units, strict=True)]
    bounds = low, capacity, units
    # If one more block in every scope costs the same number of elements in all pruning groups, the largest remainders
    # are rounded up. Otherwise pruning groups exchange numbers of blocks that cost both of them the same.
    is_even = len(set(units)) == 1
    nnz = allocate(ideals, sum(now), *bounds) if is_even else exchange(now, ideals, *bounds)
    return _with_budgets(limits, {k: n // unit for k, n, unit in zip(shared, nnz, units, strict=True)})


def _grow(slots: Slots, pruned_masks: Tensors, limits: Tensor, criterion: Criterion) -> Tensors:
    """Return the masks of a pruning group with the kept slots and, up to its budget, the highest of the other slots."""
    rows = slots.rows_of(pruned_masks)
    grown = keep_mask(_scores(criterion, slots), limits.to(rows.device) - rows.sum(1), candidates=slots.real & ~rows)
    return slots.masks_of(rows | grown)


def _scores(criterion: Criterion, slots: Slots) -> Tensor:
    """Return the scores that a criterion gives every slot; raise an error if they are not float rows."""
    scores = criterion.score(slots)
    if not isinstance(scores, Tensor) or tuple(scores.shape) != slots.shape or not scores.is_floating_point():
        kind = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise SparsityError(
            f"{slots.name}: criterion {criterion.name!r} must return float scores of shape {slots.shape}, got {kind}"
        )
    return scores


def _value_at(schedule: Schedule, iteration: int, name: str) -> float:
    """Return the number that a user's schedule gives for an iteration."""
    return _number(schedule(iteration), f"{name}: a schedule must return a number", f" at iteration {iteration}")


def _number(value: Any, requirement: str, when: str = "") -> float:
    """Return a user's number, or tensor of one number, as a float; an error states `requirement` and `when`."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not is_number(value):
        raise SparsityError(f"{requirement}, got {value!r}{when}")
    return float(value)


def _apply(
    groups: Sequence[TensorGroup], masks: list[Tensor], settings: Settings, capture: GradientCapture, iteration: int
) -> dict[str, list[int]]:
    """Write new masks (bool, sharded as the weights) in place, and the weights and optimizer state that they change.

    Returns {tensor_fqn: [grown, grown or pruned, kept]}, in elements, summed over ranks.
    """
    optimizers, is_grad = capture.optimizers, settings.state_init == "grad"
    for group in groups:
        refuse_closed_state(optimizers, original(group), group["tensor_fqn"])
    # What may raise an error comes before the first write.
    moments = [second_moments(optimizers, original(g), g["tensor_fqn"]) if is_grad else [] for g in groups]
    values = [_new_values(g, new_mask, settings, iteration) for g, new_mask in zip(groups, masks, strict=True)]
    counts = {}
    for group, new_mask, value, squares in zip(groups, masks, values, moments, strict=True):
        parts, new_part = LocalParts(original(group), mask_of(group).mask), local(new_mask)
        changed = new_part ^ (parts.mask != 0)
        grown = changed & new_part
        parts.weight.masked_fill_(changed, 0)
        if value is not None:
            parts.weight.copy_(torch.where(grown, local(value), parts.weight))
        reset_state(optimizers, parts.parameter, parts.put_back(changed))
        for square in map(local, squares):  # of grown weights they become squared gradients
            gradient, values_now = local(capture.gradients[group["tensor_fqn"]]), dequantized(square)
            square.copy_(torch.where(grown, gradient.to(values_now.dtype).square(), values_now))
        parts.mask.copy_(new_part)
        count = torch.stack([t.count_nonzero() for t in (grown, changed, new_part)])
        counts[group["tensor_fqn"]] = sum_over_ranks(count, parts.parameter).tolist()
    return counts


def _new_values(group: TensorGroup, new: Tensor, settings: Settings, iteration: int) -> Tensor | None:
    """Return the values that a user's `new_values` gives for the new mask, sharded as the weight; None without it."""
    if settings.new_values is None:
        return None
    weight, fqn = original(group).detach(), group["tensor_fqn"]
    zeroed = full_tensor(weight).masked_fill(full_tensor(new) ^ (full_tensor(mask_of(group).mask) != 0), 0)
    values = settings.new_values(zeroed, keyed_generator(settings.seed, fqn, iteration, "values"))
    if not isinstance(values, Tensor) or values.shape != weight.shape:
        kind = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise SparsityError(
            f"{fqn}: new_values must return a tensor of the weight's shape {tuple(weight.shape)}, got {kind}"
        )
    return placed_like(values.to(zeroed), weight)


@torch.no_grad()
def zero_dropped(groups: Sequence[TensorGroup]) -> None:
    """Zero every weight that its mask drops, in place."""
    for group in groups:
        parts = LocalParts(original(group), mask_of(group).mask)
        parts.weight.copy_(select(parts.weight, parts.mask))


def zero_dropped_state(groups: Sequence[TensorGroup], optimizers: Sequence[Optimizer]) -> None:
    """Zero the optimizer state of dropped weights, because momentum would go on changing them for many steps."""
    for group in groups:
        reset_state(optimizers, original(group), mask_of(group).mask == 0)
