"""Score the units of plans, and choose those that leave: a fraction of each scope, or as many as a budget requires."""

import bisect
import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..coupling import BoundCoupling, joint_entries
from ..errors import SparsityError
from ..masking import dense_weight
from ..models.names import connected, owner_of, parameter_of, sharing_memory
from ..models.running import TokenMask
from ..oneshot.chain import CalibrationData
from ..scores import Score, needs_of, parse_score
from ..selection import keep_mask
from ..sparsifiers import ScopeSparsifier
from .plan import Plan, active
from .remove import Removal, plain_tensor, remove_units, round_up
from .sizes import apply_changes, find_changes
from .verify import count_flops, light_copy, plain_weights

NORM = "norm"  # the score that reads no data
_CLOSE = 0.99  # no more units are taken back once the cost is at least this part of the allowed one
Cost = Callable[[nn.Module], float]
CostOf = Callable[[Sequence[Plan], Sequence[int]], float]  # of plans, and the kept units of a scope of each
T = TypeVar("T")


def score_units(
    model: nn.Module, plans: Sequence[Plan], score: Score | str | None, data: CalibrationData, token_mask: TokenMask
) -> list[Plan]:
    """Give plans the scores of their units; those that the score does not fit, or rates 0, are left out."""
    how: dict[str, Any] = {"data": data, "token_mask": token_mask}
    rated = _score_by_halves(model, active(plans), "obd" if score is None else score, **how)
    if score is None:  # norms score what `obd` does not fit, or rates 0
        by_norm = [replace(plan, left_out="") for plan in rated if not _is_rated(plan)]
        norms = iter(_score_jointly(model, by_norm, NORM, **how))
        rated = [plan if _is_rated(plan) else next(norms) for plan in rated]
    if rated and not active(rated):
        raise SparsityError(f"shrink: the score fits no coupling ({rated[-1].left_out}); score=None takes norms")
    why = "the score rates all of its units 0"
    rated = [plan if plan.left_out or _is_rated(plan) else replace(plan, left_out=why) for plan in rated]
    return [*(plan for plan in plans if plan.left_out), *rated]


def _is_rated(plan: Plan) -> bool:
    """Return whether some units have a score other than 0."""
    return any(bool(rows.any()) for rows in plan.scores)


def _score_by_halves(model: nn.Module, plans: Sequence[Plan], score: Score | str, **how: Any) -> list[Plan]:
    """Give plans their scores; those that the score does not fit, found by halves, are left out."""
    try:
        return _score_jointly(model, plans, score, **how)
    except SparsityError as e:  # there is at least one plan, since an empty list raises none
        if len(plans) == 1:
            why = re.sub(r"^config\[\d+\]: ", "", str(e)).replace("use 'sum' or 'mean'", "score=None takes norms there")
            return [replace(plans[0], left_out=why)]
    half = len(plans) // 2
    return [*_score_by_halves(model, plans[:half], score, **how), *_score_by_halves(model, plans[half:], score, **how)]


def _score_jointly(
    model: nn.Module, plans: Sequence[Plan], score: Score | str, data: CalibrationData, token_mask: TokenMask
) -> list[Plan]:
    """Give plans, for each of their layers, the scores of its units [scopes, units], which add up."""
    if not plans:
        return []
    of_elements = None if score == NORM else parse_score(score, "shrink: ")
    needs = needs_of(of_elements)
    couplings = [plan.coupling for plan in plans]
    if any(need.startswith("input") for need in needs):
        couplings = [replace(coupling, member_scores="consumers") for coupling in couplings]
    # A built-in score only reads weights, so the copy may share them with the model. What shares memory is copied.
    read_only, sharing = [] if callable(score) else [*model.parameters()], sharing_memory(model)
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in read_only if id(p) not in sharing}
    shared |= {id(p): nn.Parameter(p.detach().abs()) for p in model.parameters() if score == NORM and p.is_complex()}
    copied, sparsifier = copy.deepcopy(model, shared), ScopeSparsifier(score=of_elements)
    sparsifier.mask_class = None  # scores need no masks, and torch has none for a Parameter of the name `keys`
    sparsifier.prepare(copied, joint_entries(couplings, copied))
    if needs:
        sparsifier.calibrate(data.batches, data.forward, token_mask=token_mask)

    def ids(names: Iterable[str]) -> frozenset[int]:
        return frozenset(id(parameter_of(*owner_of(copied, name))) for name in names)

    # Couplings may divide the same tensors, as heads and their elements do. The number of units tells them apart or, if
    # it is the same, the order, which is that of `couplings`.
    scores: dict[tuple[frozenset[int], int], list[Tensor]] = {}
    recorder = sparsifier.recorder
    for pruning in sparsifier.pruning_groups():
        weights = {name: dense_weight(*recorder.tensors[name]) for name in pruning.specs}
        # Some layers run only in training, so that no batch reaches them. The other members then rate their units.
        unread = [name for name in weights if needs and name not in recorder.collected]
        zeros = {name: torch.zeros_like(weights[name]) for name in unread if len(unread) < len(weights)}
        values, norm = pruning.values(weights.__getitem__, recorder.of, zeros)
        rows = pruning.scope.block_norms(values, norm=norm)
        scores.setdefault((ids(pruning.specs), rows.shape[-1]), []).append(rows)

    def rows_of(bound: BoundCoupling) -> Tensor:
        rows = scores[ids(m.fqn for m in bound.members if m.is_parameter), bound.scope_units].pop(0)
        return _squares(bound, rows.double(), copied) if score == NORM else rows

    return [replace(plan, scores=tuple(rows_of(bound) for bound in plan.bound)) for plan in plans]


def _squares(bound: BoundCoupling, rows: Tensor, model: nn.Module) -> Tensor:
    """Square the norms of units, and add the entries along a second dimension of a weight, as recurrent ones have."""
    rows = rows.square()
    numbers = torch.arange(bound.units, device="cpu").reshape(bound.grid)
    for member in bound.members:
        first = next(other for other in bound.members if other.fqn == member.fqn)
        if not first.is_parameter or first is member:
            continue  # elements along the first dimension are in the norms already; tensors without masks do not count
        weight = plain_tensor(model, member.fqn).detach()
        # For each element, the numbers of the units to which it belongs by the first and by the second dimension.
        owners = [torch.empty(weight.shape, dtype=torch.long, device="cpu") for _ in range(2)]
        for view in (m.pattern(owner) for owner, m in zip(owners, (first, member), strict=True)):
            view.copy_(numbers.reshape(*bound.grid, *[1] * (view.ndim - numbers.ndim)).expand_as(view))
        is_counted = (owners[0] == owners[1]).to(weight.device)  # by the first dimension
        others = weight.float().masked_fill(is_counted, 0)
        squares = member.pattern(others).square().unsqueeze(-1).flatten(numbers.ndim).sum(-1)
        rows += squares.reshape(rows.shape).to(rows)
    return rows


def choose_lowest(plans: Sequence[Plan], cost_of: CostOf | None, ratio: Any) -> list[Plan]:
    """Return the plans with removals of the units of the lowest scores, as their levels or a ratio of cost require."""
    kept = [plan.kept for plan in plans] if cost_of is None else kept_within(plans, cost_of, ratio)
    chosen = list[Plan]()
    for plan, count in zip(plans, kept, strict=True):
        pairs = zip(plan.bound, plan.scores, strict=True)
        keeps = [(bound, keep_mask(rows.reshape(-1, bound.scope_units), count).cpu()) for bound, rows in pairs]
        removals = tuple(Removal(bound=bound, keep=keep.reshape(bound.grid)) for bound, keep in keeps)
        chosen.append(replace(plan, removals=removals))
    return chosen


def cost_function(budget: str | Cost, model: nn.Module, inputs: Any) -> CostOf | None:
    """Return a function that says what the smaller model costs, or None if each layer has a budget of its own."""
    if callable(budget):
        return partial(cost_with, lambda small: budget(plain_weights(small)), model)
    if budget == "layer":
        return None
    if budget == "units":
        return lambda plans, kept: sum(
            math.prod(b.grid[:-1]) * n for plan, n in zip(plans, kept, strict=True) for b in plan.bound
        )
    if budget == "flops":
        return partial(cost_with, partial(count_flops, inputs=inputs), model)
    if budget == "parameters":
        return partial(cost_with, lambda small: sum(p.numel() for p in small.parameters()), model)
    raise SparsityError(
        f"shrink: budget must be 'layer', 'units', 'flops', 'parameters' or a function of a model, got {budget!r}"
    )


def cost_with(cost: Callable[[nn.Module], T], model: nn.Module, plans: Sequence[Plan], kept: Sequence[int]) -> T:
    """Return the cost if each scope keeps so many units. The first ones are kept, as only their number counts."""
    removals = [
        Removal(bound=bound, keep=(torch.arange(bound.scope_units, device="cpu") < n).expand(bound.grid), source=source)
        for source, (plan, n) in enumerate(zip(plans, kept, strict=True))
        for bound in plan.bound
    ]
    small = light_copy(model)
    remove_units(small, removals)
    apply_changes(small, find_changes(model, removals))
    try:
        return cost(small)
    except RuntimeError as e:
        counts = ((n, plan.scope_units, plan.name) for plan, n in zip(plans, kept, strict=True))
        text = ", ".join(f"{n} of {units} {name!r}" for n, units, name in counts if n < units)
        raise SparsityError(f"shrink: the model with {text} does not run: {e}; give another multiple_of") from e


def kept_within(plans: Sequence[Plan], cost_of: CostOf, ratio: float) -> list[int]:
    """Return how many units of a scope each plan keeps, so that the model costs at most 1 - ratio of its cost now."""
    full = [plan.scope_units for plan in plans]
    dense, steps = cost_of(plans, full), list[tuple[float, list[int], int]]()  # (order, indices of plans, kept units)
    target = (1 - ratio) * dense

    def saved(alike: list[int], kept: int) -> float:
        return dense - cost_of(plans, [kept if at in alike else units for at, units in enumerate(full)])

    for alike in connected({at: [*p.attrs.items(), *p.fields] for at, p in enumerate(plans)}):  # by integers
        steps += [(key, alike, kept) for key, kept in _steps([plans[at] for at in alike], partial(saved, alike))]
    steps.sort(key=lambda step: step[0])  # stable, so that a coupling drops its units one after the other
    fixed: dict[int, int] = {}

    def counts(taken: int) -> list[int]:
        now = dict(enumerate(full)) | {at: kept for _, alike, kept in steps[:taken] for at in alike} | fixed
        return [*now.values()]

    def is_within(taken: int) -> bool:
        return cost_of(plans, counts(taken)) <= target

    taken = bisect.bisect_left(range(len(steps) + 1), True, key=is_within)
    if taken > len(steps):
        raise SparsityError(
            f"shrink: a ratio of {ratio} allows a cost of {target:.6g}, but without all units that may be dropped the "
            f"model still costs {cost_of(plans, counts(len(steps))):.6g} of {dense:.6g}; lower the ratio, raise "
            "max_sparsity (what passes between blocks stays unless it is named: max_sparsity={'width': 0.9}), or "
            "exclude less"
        )
    # The last step, such as a whole head, may save more than is needed. It stays, and earlier steps are taken
    # back until the cost is close to the allowed one.
    while taken and not (fixed and cost_of(plans, counts(taken)) > _CLOSE * target):
        _, alike, kept = steps[taken - 1]
        fixed |= {at: kept for at in alike if at not in fixed}
        taken = bisect.bisect_left(range(taken), True, key=is_within)
    return counts(taken)


def _steps(plans: Sequence[Plan], saved_with: Callable[[int], float]) -> list[tuple[float, int]]:
    """Return (order, kept units of a scope) of the steps in which plans that share an integer drop units together.

    Steps are ordered by the lost importance per unit, divided by the square root of the cost saved per unit. The lost
    importance is the increase of 1 / (share of the importance that is kept). The root keeps costly couplings from being
    cut to their limit (examples/benchmarks/compare_accuracy.py).
    """
    units, multiple = plans[0].scope_units, math.lcm(*(plan.multiple for plan in plans))
    least = replace(plans[0], limit=min(plan.limit for plan in plans), multiple=multiple).least
    if least == units or any(plan.scope_units != units for plan in plans):
        return []  # one integer cannot count different numbers unless equal fractions are dropped
    half = max(least, round_up(units // 2, units - multiple, multiple))
    saved = saved_with(half) / (units - half)  # by a unit, on average
    scores = torch.cat([rows.double().cpu().reshape(-1, units) for plan in plans for rows in plan.scores])
    scores = scores - scores.amin(1, keepdim=True).clamp(max=0)  # saliencies may be negative
    sums = scores.sort(1, descending=True).values.cumsum(1)
    # The share of the importance that the k most important units have, for k = 1, 2, ...
    shares: list[float] = (sums / sums[:, -1:]).nan_to_num(1.0).mean(0).clamp(min=1e-12).tolist()
    steps, key = list[tuple[float, int]](), 0.0
    numbers = [units, *range((units - 1) // multiple * multiple, least, -multiple), least]
    for before, kept in itertools.pairwise(numbers):
        lost = (1 / shares[kept - 1] - 1 / shares[before - 1]) / (before - kept)
        key = max(key, lost / math.sqrt(saved) if saved > 0 else math.inf)  # sorting keeps the order of steps
        steps.append((key, kept))
    return steps
