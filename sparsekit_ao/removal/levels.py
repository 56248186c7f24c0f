"""How many units each coupling keeps: so many of each, or the least important ones dropped down to a cost of the model.

Costs are numbers of a whole model without some units: FLOPs, parameters, or what a function returns.
"""

import bisect
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..coupling import BoundCoupling, Coupling
from ..errors import SparsityError
from ..selection import keep_mask
from ..structure import sparsity_to_nnz
from .remove import Removal, plain_tensors, remove_units, rounded
from .sizes import apply_changes, find_changes
from .verify import count_flops

Cost = Callable[[nn.Module], float]
Rows = Mapping[str, Sequence[Tensor]]  # {coupling: for each of its layers, numbers of units [scopes, units]}


def cost_function(cost: str | Cost, inputs: Any) -> Cost:
    """Return the cost of a model as a function: "flops" of a forward on the inputs, "parameters", or one itself."""
    if callable(cost):
        return cost
    costs: dict[str, Cost] = {
        "flops": lambda model: count_flops(model, inputs),
        "parameters": lambda model: sum(p.numel() for p in model.parameters()),
    }
    if cost not in costs:
        raise SparsityError(
            f"shrink: cost must be 'units', 'flops', 'parameters' or a function of a model, got {cost!r}"
        )
    return costs[cost]


def multiple_for(model: nn.Module, coupling: Coupling) -> int:
    """Return the number of units whose multiples make dimensions of 16-bit weights multiples of 8, for their kernels.

    >>> mlp = Coupling({"0.weight": "u i", "1.weight": "o u"})
    >>> model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))
    >>> multiple_for(model, mlp), multiple_for(model.half(), mlp)
    (1, 8)
    """
    multiple = 1
    for bound in coupling.bind(model):
        tensors = plain_tensors(model, [member.fqn for member in bound.members])
        for member in bound.members:
            tensor = tensors[member.fqn]
            if tensor.ndim > 1 and tensor.is_floating_point() and tensor.element_size() == 2:
                lengths, axes = member.pattern.lengths(tuple(tensor.shape)), member.pattern.dimensions
                inner = [axis for axis in axes[member.pattern.dimension_of(coupling.unit)] if axis != coupling.unit]
                multiple = max(multiple, 8 // math.gcd(8, math.prod(lengths[axis] for axis in inner)))
    return multiple


def counts_at_levels(
    model: nn.Module, couplings: Sequence[Coupling], levels: Mapping[str, float], multiples: Mapping[str, int]
) -> dict[str, int]:
    """Return {coupling: kept units of a scope} where each drops a fraction of its own, rounded to multiples."""
    return {
        one.name: rounded(sparsity_to_nnz(levels[one.name], units, "shrink: ratio: "), units, multiples[one.name])
        for one in couplings
        for units in (one.bind(model)[0].grid[-1],)
    }


def counts_within(
    model: nn.Module,
    couplings: Sequence[Coupling],
    importances: Rows,
    cost: Cost,
    ratio: float,
    *,
    multiples: Mapping[str, int],
    limits: Mapping[str, float],
) -> dict[str, int]:
    """Return {coupling: kept units of a scope} with which the model costs at most 1 - ratio of what it does.

    Units are dropped one by one: next is always the one by which the lost importance of its coupling, relative to the
    kept one, increases least for the square root of the cost that it saves. The root keeps costly couplings from being
    cut to their limit (examples/benchmarks/compare_accuracy.py). With one step less (a unit, or a multiple of units)
    the model would cost more.

    Args:
        model: not changed.
        couplings: of one layer, or of layers that keep equal numbers.
        importances: of their units; they add up.
        cost, ratio: function of a model, and the fraction of its value that is saved, at least.
        multiples, limits: by coupling, units that are dropped at once, and the largest fraction that is dropped.

    Raises:
        SparsityError: with all that may be dropped, the model costs more.
    """
    bounds = {one.name: one.bind(model) for one in couplings}
    full = {name: bindings[0].grid[-1] for name, bindings in bounds.items()}

    def cost_at(counts: Mapping[str, int]) -> float:
        return cost(_without(model, couplings, bounds, counts))

    dense, steps = cost_at({}), list[tuple[float, list[str], int]]()
    for names in _tied(couplings):
        units, multiple = full[names[0]], max(multiples[name] for name in names)
        least = rounded(max(sparsity_to_nnz(limits[name], units, "max_sparsity: ") for name in names), units, multiple)
        if least == units or any(full[name] != units for name in names):
            continue  # of different numbers, equal fractions would be needed
        half = max(least, rounded(units // 2, units - multiple, multiple))
        saved = (dense - cost_at(dict.fromkeys(names, half))) / (units - half)
        kept_share = _kept_shares([row for name in names for row in importances[name]])
        for kept, before in _multiples_down(units, least, multiple):
            lost = (1 / kept_share[kept - 1] - 1 / kept_share[before - 1]) / (before - kept)
            steps.append((lost / math.sqrt(saved) if saved > 0 else math.inf, names, kept))
    steps.sort(key=lambda step: step[0])  # stable, so that a coupling drops its units one after the other

    def counts(taken: int) -> dict[str, int]:
        return full | {name: kept for _, names, kept in steps[:taken] for name in names}

    target = (1 - ratio) * dense
    taken = bisect.bisect_left(range(len(steps) + 1), True, key=lambda n: cost_at(counts(n)) <= target)
    if taken > len(steps):
        raise SparsityError(
            f"shrink: a ratio of {ratio} allows a cost of {target:.6g}, but without all units that may be dropped the "
            f"model still costs {cost_at(counts(len(steps))):.6g} of {dense:.6g}; lower the ratio, raise max_sparsity, "
            "or exclude less"
        )
    return counts(taken)


def kept_units(bound: BoundCoupling, rows: Tensor, kept: int) -> Removal:
    """Return the units of a layer with the highest scores in each scope, as a removal of the others."""
    keep = keep_mask(rows.reshape(-1, bound.grid[-1]), kept).cpu()
    return Removal(coupling=bound, keep=keep.reshape(bound.grid))


def _without(
    model: nn.Module,
    couplings: Sequence[Coupling],
    bounds: Mapping[str, Sequence[BoundCoupling]],
    counts: Mapping[str, int],
) -> nn.Module:
    """A copy without the last units of each coupling, whose outputs mean nothing."""
    removals = [
        Removal(coupling=bound, keep=(torch.arange(units) < counts.get(one.name, units)).expand(bound.grid), source=k)
        for k, one in enumerate(couplings)
        for bound in bounds[one.name]
        for units in (bound.grid[-1],)
    ]
    small = copy.deepcopy(model)
    remove_units(small, removals)
    apply_changes(small, find_changes(model, removals))
    return small


def _kept_shares(rows: Sequence[Tensor]) -> list[float]:
    """The share of the importance of a coupling that its k most important units have, for k = 1, 2, ..."""
    scores = torch.cat([one.double().cpu().reshape(-1, one.shape[-1]) for one in rows])
    scores = scores - scores.amin(1, keepdim=True).clamp(max=0)  # saliencies may be negative
    sums = scores.sort(1, descending=True).values.cumsum(1)
    shares: list[float] = (sums / sums[:, -1:]).nan_to_num(1.0).mean(0).clamp(min=1e-12).tolist()
    return shares


def _multiples_down(units: int, least: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(kept units, those kept before) of every step."""
    before = units
    while before > least:
        kept = max((before - 1) // multiple * multiple, least)
        yield kept, before
        before = kept


def _tied(couplings: Sequence[Coupling]) -> list[list[str]]:
    """Names of couplings, together those that change one integer of the model, and so keep equal numbers."""
    ties: list[tuple[set[tuple[str, str]], list[str]]] = []
    for coupling in couplings:
        attrs, names = set(coupling.attrs.items()), [coupling.name]
        for other in [tie for tie in ties if tie[0] & attrs]:
            ties.remove(other)
            attrs, names = attrs | other[0], other[1] + names
        ties.append((attrs, names))
    return [names for _, names in ties]
