"""One update of masks: prune the lowest scores, redistribute budgets, grow the highest scores, write the result.

`Settings` says when updates happen and by which criteria. `run_update` computes all that may raise before it writes
anything. Pruning groups are read one after the other, so that only one group of sharded weights is gathered at a time.
Tensors that compete with each other (prune="global") are read together.
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
from ..distributed import copy_values, full_tensor, is_sharded, local, placed_like, sum_over_ranks
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
from .budgets import Budgets, exchange
from .criteria import Criterion, Slots, Tensors, parse_criterion
from .dynamic_mask import mask_of
from .gradients import ORDER, GradientCapture

NewValues = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """What one update of the masks changed.

    Attributes:
        iteration: The iteration of the update.
        fraction: The fraction of the active blocks that was pruned; some may have grown again in the same update.
        grown, pruned: {tensor_fqn: number of elements} that became active, and that became inactive.
        kept: {tensor_fqn: number of elements} that are active now.

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
    """The checked arguments of `DynamicSparsifier` that say when updates happen and what they do."""

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
        """Whether masks ever change."""
        return self.update_every is not None and self.until != 0

    @property
    def criteria(self) -> list[Criterion]:
        """The criteria of updates, if there are any updates."""
        return [r for r in (self.prune, self.grow, self.redistribute) if r is not None and self.updates]

    @property
    def needs_gradient(self) -> bool:
        """Whether an update reads dense gradients."""
        return self.needs_squares or any("gradient" in criterion.needs for criterion in self.criteria)

    @property
    def needs_momentum(self) -> bool:
        """Whether an update reads momentum, which must then include inactive weights in every iteration."""
        return any("momentum" in criterion.needs for criterion in self.criteria)

    @property
    def needs_squares(self) -> bool:
        """Whether an update sets the optimizer's second moments."""
        return self.updates and self.state_init == "grad"

    def is_due(self, iteration: int) -> bool:
        """Return whether an update is scheduled for this iteration (counted from 1)."""
        return iteration % (self.update_every or 1) == 0 and self.may_update(iteration)

    def due(self) -> range:
        """Return the iterations with scheduled updates, or the first 1000 of them if `until` is None."""
        every = self.update_every or 1
        return range(every, (every * 1000 if self.until is None else self.until) + 1, every)

    def may_update(self, iteration: int) -> bool:
        """Return whether an update may still happen in this iteration."""
        return self.updates and (self.until is None or iteration <= self.until)

    def opening(self, iteration: int, is_pending: bool) -> dict[str, bool]:
        """Return the arguments of `GradientCapture.set_open` for an iteration; `is_pending` if an update is late.

        Masks are open if an update reads the gradients of this iteration, or if a later one reads momentum.
        """
        feeds = self.is_due(iteration) or (is_pending and self.may_update(iteration))
        always = self.needs_momentum and self.may_update(iteration)
        return {"is_open": always or (feeds and self.needs_gradient), "keep": feeds, "masked": not always}

    def fraction_at(self, iteration: int) -> float:
        """Return the fraction of the active blocks that an update prunes."""
        if self.grow is None and self.target is not None:  # the target alone decides
            return 0.0
        fraction = _value_at(self.update_fraction, iteration, "update_fraction")
        if not 0 <= fraction < 1:
            raise SparsityError(f"the update fraction must be in [0, 1), so that no layer is emptied; got {fraction!r}")
        return fraction

    def target_at(self, iteration: int) -> float:
        """Return the overall sparsity that the target demands."""
        assert self.target is not None
        level = _value_at(self.target, iteration, "target")
        if not 0 <= level <= 1:
            raise SparsityError(
                f"target: an overall sparsity must be in [0, 1], got {level!r} at iteration {iteration}"
            )
        return level

    def extreme_targets(self) -> tuple[float, ...]:
        """Return the lowest and highest overall sparsity of a target, if `until` is given."""
        if self.target is None:
            return ()
        levels = [self.target_at(t) for t in (0, *self.due())]
        falls = [k for k in range(1, len(levels)) if levels[k] < levels[k - 1] - 1e-9]
        if self.grow is None and falls:
            raise SparsityError(
                f"target: falls from {levels[falls[0] - 1]:g} to {levels[falls[0]]:g} at iteration "
                f"{self.due()[falls[0] - 1]}, and grow=None never adds a block; pass grow= or another target"
            )
        return () if self.until is None else (min(levels), max(levels))

    def check_budgets(self, budgets: Budgets) -> None:
        """Raise an error if a setting moves budgets between tensors that cannot be moved."""
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
        """Raise an error unless optimizers train each parameter and store what updates read, and each trains some."""
        momentum, squares = self.needs_momentum, self.needs_squares
        used = set()
        for group in groups:
            parameter, name = original(group), group["tensor_fqn"]
            index = trainer_of(optimizers, parameter, name, *([ORDER] if is_sharded(parameter) else []))
            check_state(optimizers[index], parameter, name, momentum=momentum, squares=squares)
            used.add(index)
        if groups and len(used) < len(optimizers):
            raise SparsityError(
                "an optimizer was given that trains none of the sparsified parameters, so no update could wait for its "
                "step; leave it out"
            )


def make_settings(**arguments: Any) -> Settings:
    """Check the arguments of `DynamicSparsifier`, each alone and together, and return them as Settings."""
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
    """Choose new masks of all pruning groups and write them; if a criterion raises, nothing has changed.

    Shared budgets are set to their new values. `momenta` is {tensor_fqn: momentum}, if a criterion needs it;
    `statistics(name)` returns the statistics of a tensor.
    """
    fraction, slots = settings.fraction_at(iteration), []
    for pruning in budgets.pruning_groups:
        names = {spec: name for name, spec in pruning.specs.items()}
        leaves = {spec: budgets.groups[name] for spec, name in names.items()}
        placed = {
            "weights": {spec: original(g).detach() for spec, g in leaves.items()},
            "masks": {spec: mask_of(g).mask for spec, g in leaves.items()},
            "gradients": {spec: capture.gradients[n] for spec, n in names.items() if n in capture.gradients},
            "momenta": {spec: m for spec, n in names.items() if (m := momenta.get(n)) is not None},
        }
        recorded = {spec: statistics(name) for spec, name in names.items()}
        slots.append(Slots(pruning=pruning, placed=placed, statistics=recorded, step=iteration, seed=settings.seed))
    keep = [budgets.of_scopes(k) for k in range(len(slots))]
    masks, nnz = _choose(slots, keep, budgets, settings, iteration, fraction)
    chosen = zip(budgets.pruning_groups, masks, strict=True)
    by_tensor = {name: new[spec] for pruning, new in chosen for name, spec in pruning.specs.items()}
    groups = list(budgets.groups.values())
    counts = _apply(groups, [by_tensor[name] for name in budgets.groups], settings, capture, iteration)
    for k, count in nnz.items():
        budgets.set(k, count)
    return UpdateStatistics(
        iteration=iteration,
        fraction=fraction,
        grown={fqn: grown for fqn, (grown, _, _) in counts.items()},
        pruned={fqn: changed - grown for fqn, (grown, changed, _) in counts.items()},
        kept={fqn: kept for fqn, (_, _, kept) in counts.items()},
    )


def _choose(
    slots: list[Slots], keep: list[Tensor], budgets: Budgets, settings: Settings, iteration: int, fraction: float
) -> tuple[list[Tensors], dict[int, int]]:
    """Return new masks of every pruning group, and {pruning group that shares the budget: blocks of each scope}.

    `keep` is the budget of every scope, int64 [scopes] on the CPU for each pruning group. A target for the sparsity of
    all changes it first. RigL and SET prune each pruning group by itself (`_prune`) and grow as many blocks (`_grow`);
    only global criteria let pruning groups compete (`_prune_together`).
    """
    shared, regrows = budgets.shared, settings.grow is not None
    competing = shared if settings.prune.is_global else []
    most = None  # blocks that all pruning groups may keep together, if they compete and there is a target
    if settings.target is not None and competing:
        most = budgets.ideals(settings.target_at(iteration))[1] // budgets.sizes[shared[0]]
    elif settings.target is not None:
        high = None if regrows else {k: int(slots[k].active[0].sum()) for k in shared}  # no scope can keep more
        keep = _with_budgets(keep, budgets.counts(settings.target_at(iteration), high=high))
    kept = {}  # masks, and int64 [scopes]: how many slots are left in each scope
    if competing:
        rivals, limits = [slots[k] for k in competing], [keep[k] for k in competing]
        together = _prune_together(rivals, limits, settings.prune, fraction, most, regrows)
        kept = dict(zip(competing, together, strict=True))
    for k in (k for k in range(len(slots)) if k not in kept):
        if regrows or k in shared:
            kept[k] = _prune(slots[k], keep[k], settings.prune, fraction, regrows)
        else:  # it has a budget of its own, and nothing would grow back
            kept[k] = _stored(slots[k], slots[k].active)
    masks, counts = [kept[k][0] for k in range(len(slots))], [kept[k][1] for k in range(len(slots))]
    if settings.grow is None:
        return masks, {k: int(counts[k][0]) for k in shared}
    if most is not None:
        low = {k: int(counts[k].max()) for k in shared}
        keep = _with_budgets(keep, budgets.counts(settings.target_at(iteration), low=low))
    if settings.redistribute is not None:
        keep = _redistribute(slots, keep, counts, budgets, settings.redistribute)
    grown = [_grow(s, mask, n, settings.grow) for s, mask, n in zip(slots, masks, keep, strict=True)]
    return grown, {k: int(keep[k][0]) for k in shared}


def _with_budgets(keep: Sequence[Tensor], nnz: Mapping[int, int]) -> list[Tensor]:
    return [torch.full_like(n, nnz[k]) if k in nnz else n for k, n in enumerate(keep)]


def _stored(slots: Slots, rows: Tensor) -> tuple[Tensors, Tensor]:
    """Return rows as masks, which are sharded like the weights, and the count of each scope."""
    return slots.masks_of(rows), rows.sum(1)


def count_after_pruning(count: Tensor, fraction: float) -> Tensor:
    """Return what is left of int64 counts; the fraction is exact to 1e-9, so that 0.3 of 10 is 3."""
    return count - torch.floor(count.double() * fraction + 1e-9).long()


def _prune(slots: Slots, keep: Tensor, criterion: Criterion, fraction: float, regrows: bool) -> tuple[Tensors, Tensor]:
    """Prune floor(fraction * active) slots of a pruning group, and more if a scope would exceed its budget.

    Every scope loses its lowest floor(fraction * active) slots. If these are too few for the pruning group (2 of 4 lose
    none at 0.3) and scopes regrow to their budgets, the lowest among the weakest slots of all scopes are pruned too.
    """
    active, scores = slots.active, _scores(criterion, slots)
    count = torch.minimum(count_after_pruning(active.sum(1), fraction), keep.to(active.device))
    rows = keep_mask(scores, count, candidates=active)
    surplus = int(rows.sum() - count_after_pruning(active.sum(), fraction))
    if regrows and len(rows) > 1 and surplus > 0:
        fewer = keep_mask(scores, (rows.sum(1) - 1).clamp(min=0), candidates=rows)
        weakest = (rows & ~fewer).reshape(1, -1)
        stays = keep_mask(scores.reshape(1, -1), max(int(weakest.sum()) - surplus, 0), candidates=weakest)
        rows = fewer | stays.reshape(rows.shape)
    return _stored(slots, rows)


def _prune_together(
    slots: Sequence[Slots],
    keep: Sequence[Tensor],
    criterion: Criterion,
    fraction: float,
    most: int | None,
    regrows: bool,
) -> list[tuple[Tensors, Tensor]]:
    """Let pruning groups compete: they lose floor(fraction * active) slots together, and keep at most `most` blocks.

    The best slot of a pruning group always stays. With a target, or without growth, the best of every scope stays, and
    all scopes of a pruning group keep the same number.
    """
    scores, active = [_scores(criterion, s) for s in slots], [s.active for s in slots]
    totals, even = [int(a.sum()) for a in active], most is not None or not regrows
    count = sum(totals) - math.floor(sum(totals) * fraction + 1e-9)
    count = count if most is None else min(count, most)
    scopes = [s.shape[0] if even else 1 for s in slots]
    if count < sum(scopes):
        raise SparsityError(
            f"global pruning would keep {count} blocks, but every {'scope' if even else 'tensor'} keeps at least "
            f"one, and there are {sum(scopes)}; prune a smaller fraction, or lower the sparsity"
        )
    ranked = []
    for score, a, n in zip(scores, active, scopes, strict=True):
        best = keep_mask(score.reshape(n, -1), 1, candidates=a.reshape(n, -1))
        ranked.append(score.double().reshape(n, -1).masked_fill(best, math.inf).reshape(1, -1))
    flat = torch.cat([a.reshape(1, -1) for a in active], dim=1)
    rows = list(keep_mask(torch.cat(ranked, dim=1), count, candidates=flat).split([a.numel() for a in active], dim=1))
    if even:
        counts = allocate([float(r.sum()) for r in rows], count, scopes, totals, scopes)
        each = zip(scores, counts, scopes, active, strict=True)
        rows = [keep_mask(score, n // m, candidates=a) for score, n, m, a in each]
    together = []
    for s, score, row, budget in zip(slots, scores, rows, keep, strict=True):
        candidates = row.reshape(s.shape)
        limit = torch.minimum(candidates.sum(1), budget.to(row.device))  # budgets may be scheduled
        together.append(_stored(s, keep_mask(score, limit, candidates=candidates)))
    return together


def _redistribute(
    slots: Sequence[Slots], keep: Sequence[Tensor], counts: Sequence[Tensor], budgets: Budgets, criterion: Criterion
) -> list[Tensor]:
    """Return the budgets after the pruned blocks are distributed among the groups that share a budget.

    Groups grow in proportion to their shares by the criterion; `counts` are the slots left in each scope. If one more
    block per scope costs the same in all groups, the largest remainders are rounded up, else groups exchange units.
    """
    shared = budgets.shared
    units, capacity = [budgets.units[k] for k in shared], [budgets.capacities[k] for k in shared]
    requirement = f"criterion {criterion.name!r} must return one number for redistribution"
    weights = [_number(criterion.share_of(slots[k]), f"{slots[k].name}: {requirement}") for k in shared]
    remaining = [int(counts[k].sum()) * budgets.sizes[k] for k in shared]
    now = [int(keep[k].sum()) * budgets.sizes[k] for k in shared]
    if not any(math.isfinite(w) and w > 0 for w in weights):
        weights = [float(b - n) for b, n in zip(now, remaining, strict=True)]
    free = [c - n for c, n in zip(capacity, remaining, strict=True)]
    growth = shares(weights, sum(now) - sum(remaining), free)
    ideals = [n + g for n, g in zip(remaining, growth, strict=True)]
    low = [int(counts[k].max()) * unit for k, unit in zip(shared, units, strict=True)]
    bounds = low, capacity, units
    is_even = len(set(units)) == 1
    nnz = allocate(ideals, sum(now), *bounds) if is_even else exchange(now, ideals, *bounds)
    return _with_budgets(keep, {k: n // unit for k, n, unit in zip(shared, nnz, units, strict=True)})


def _grow(slots: Slots, kept: Tensors, keep: Tensor, criterion: Criterion) -> Tensors:
    """Return masks of the kept slots of a pruning group and its highest inactive slots, up to its budget."""
    rows = slots.rows_of(kept)
    grown = keep_mask(_scores(criterion, slots), keep.to(rows.device) - rows.sum(1), candidates=slots.real & ~rows)
    return slots.masks_of(rows | grown)


def _scores(criterion: Criterion, slots: Slots) -> Tensor:
    """Return the scores that a criterion gives every slot, checked because a user may have written it."""
    scores = criterion.score(slots)
    if not isinstance(scores, Tensor) or tuple(scores.shape) != slots.shape or not scores.is_floating_point():
        kind = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise SparsityError(
            f"{slots.name}: criterion {criterion.name!r} must return float scores of shape {slots.shape}, got {kind}"
        )
    return scores


def _value_at(schedule: Schedule, iteration: int, name: str) -> float:
    return _number(schedule(iteration), f"{name}: a schedule must return a number", f" at iteration {iteration}")


def _number(value: Any, requirement: str, when: str = "") -> float:
    """Return a user's number, or tensor of one number, as float."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not is_number(value):
        raise SparsityError(f"{requirement}, got {value!r}{when}")
    return float(value)


def _apply(
    groups: Sequence[TensorGroup], masks: list[Tensor], settings: Settings, capture: GradientCapture, iteration: int
) -> dict[str, list[int]]:
    """Write new masks (bool, sharded as the weights) in place; return {tensor_fqn: [grown, grown or pruned, kept]}.

    Grown and pruned weights become zero (or `new_values`), and so does their optimizer state.
    """
    optimizers, is_grad = capture.optimizers, settings.state_init == "grad"
    for group in groups:
        refuse_closed_state(optimizers, original(group), group["tensor_fqn"])
    moments = [second_moments(optimizers, original(g), g["tensor_fqn"]) if is_grad else [] for g in groups]
    values = [_new_values(g, new, settings, iteration) for g, new in zip(groups, masks, strict=True)]
    counts = {}
    for group, new, value, squares in zip(groups, masks, values, moments, strict=True):
        weight = original(group)
        changed = new ^ (mask_of(group).mask != 0)
        grown, here = local(changed & new), local(weight)
        here.masked_fill_(local(changed), 0)
        if value is not None:
            here.copy_(torch.where(grown, local(value), here))
        reset_state(optimizers, weight, changed)
        for square in map(local, squares):
            gradient, values_now = local(capture.gradients[group["tensor_fqn"]]), dequantized(square)
            square.copy_(torch.where(grown, gradient.to(values_now.dtype).square(), values_now))
        copy_values(mask_of(group).mask, new)
        count = torch.stack([local(t).count_nonzero() for t in (changed & new, changed, new)])
        counts[group["tensor_fqn"]] = sum_over_ranks(count, weight).tolist()
    return counts


def _new_values(group: TensorGroup, new: Tensor, settings: Settings, iteration: int) -> Tensor | None:
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
        weight = local(original(group))
        weight.copy_(select(weight, local(mask_of(group).mask)))


def zero_dropped_state(groups: Sequence[TensorGroup], optimizers: Sequence[Optimizer]) -> None:
    """Zero the optimizer state of dropped weights, because it would change them for many more steps."""
    for group in groups:
        reset_state(optimizers, original(group), mask_of(group).mask == 0)
