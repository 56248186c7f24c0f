"""How many units each coupling keeps: a fraction of its own, or as many as a cost of the whole model allows."""

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..coupling import Coupling
from ..errors import SparsityError
from ..models.names import connected, owner_of
from ..structure import sparsity_to_nnz
from .remove import Removal, plain_tensors, remove_units, rounded
from .sizes import apply_changes, find_changes
from .verify import count_flops, light_copy, plain_weights

CLOSE = 0.99  # no more units are taken back once the cost is this part of the allowed one
T = TypeVar("T")
Cost = Callable[[nn.Module], float]
Rows = Mapping[str, Sequence[Tensor]]  # {coupling: for each of its layers, numbers of units [scopes, units]}


def cost_function(cost: str | Cost, inputs: Any) -> Cost:
    """Return the cost of a model as a function: "flops" of a forward on the inputs, "parameters", or one itself."""
    costs: dict[Any, Cost] = {
        "flops": lambda model: count_flops(model, inputs),
        "parameters": lambda model: sum(p.numel() for p in model.parameters()),
    }
    if not callable(cost) and cost not in costs:
        raise SparsityError(
            f"shrink: cost must be 'units', 'flops', 'parameters' or a function of a model, got {cost!r}"
        )
    return (lambda model: cost(plain_weights(model))) if callable(cost) else costs[cost]


def multiple_for(model: nn.Module, coupling: Coupling) -> int:
    """Return the number of units whose multiples make dimensions multiples of 16 bytes, where kernels need it.

    Kernels need it for 16-bit weights, and for packed experts (experts, out, in) of any dtype.

    >>> mlp = Coupling({"0.weight": "u i", "1.weight": "o u"})
    >>> model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))
    >>> multiple_for(model, mlp), multiple_for(model.half(), mlp)
    (1, 8)
    """
    multiple = 1
    for member in (member for bound in coupling.bind(model) for member in bound.members):
        tensor, pattern = plain_tensors(model, [member.fqn])[member.fqn], member.pattern
        is_packed = tensor.ndim == 3 and len(tensor) > 1 and not isinstance(owner_of(model, member.fqn)[0], _ConvNd)
        is_aligned = is_packed and pattern.dimension_of(coupling.unit) > 0
        if tensor.ndim > 1 and tensor.is_floating_point() and (is_aligned or tensor.element_size() == 2):
            lengths = pattern.lengths(tuple(tensor.shape))
            axes = pattern.dimensions[pattern.dimension_of(coupling.unit)]
            inner = math.prod(lengths[axis] for axis in axes if axis != coupling.unit)
            length = max(16 // tensor.element_size(), 1)
            multiple = max(multiple, length // math.gcd(length, inner))
    return multiple


@dataclass(frozen=True, kw_only=True)
class Quota:
    """How many units of a scope a coupling may lose, or one of its layers.

    Attributes:
        units: The units of a scope.
        level: The fraction of them that is dropped where no cost of the whole model decides.
        limit: The largest fraction that is dropped where a cost decides.
        multiple: A multiple of it is kept, or all units.

    >>> quota = Quota(units=12, level=0.5, limit=0.9, multiple=4)
    >>> quota.kept, quota.least
    (8, 4)
    """

    units: int
    level: float
    limit: float
    multiple: int

    @property
    def kept(self) -> int:
        """The units that are kept at the level."""
        return rounded(sparsity_to_nnz(self.level, self.units, "shrink: ratio: "), self.units, self.multiple)

    @property
    def least(self) -> int:
        """The units that are always kept."""
        return rounded(sparsity_to_nnz(self.limit, self.units, "max_sparsity: "), self.units, self.multiple)


def counts_within(
    model: nn.Module,
    couplings: Sequence[Coupling],
    scores: Rows,
    cost: Cost,
    ratio: float,
    *,
    power: int,
    quotas: Mapping[str, Quota],
) -> dict[str, int]:
    """Return {coupling: kept units of a scope} with which the model costs at most 1 - ratio of what it does.

    Units are dropped one by one, or in multiples. Next is the one with the least increase of its coupling's lost
    importance, relative to the kept one, for the square root of the cost that it saves. The root keeps costly couplings
    from being cut to their limit (examples/benchmarks/compare_accuracy.py). The last step may save more than is needed,
    as that of a whole head does. It stays, and steps before it are taken back until the cost is close to what is
    allowed. Importances, scores to a power, add up.
    """
    full = {coupling.name: quotas[coupling.name].units for coupling in couplings}
    cost_at = partial(_cost_with, model, couplings, cost)
    dense, steps = cost_at({}), list[tuple[float, list[str], int]]()
    for names in connected({coupling.name: coupling.attrs.items() for coupling in couplings}):  # they share an integer
        units, multiple = full[names[0]], max(quotas[name].multiple for name in names)
        limit = min(quotas[name].limit for name in names)
        least = replace(quotas[names[0]], limit=limit, multiple=multiple).least
        if least == units or any(full[name] != units for name in names):
            continue  # one integer cannot count different numbers unless equal fractions are dropped
        half = max(least, rounded(units // 2, units - multiple, multiple))
        saved = (dense - cost_at(dict.fromkeys(names, half))) / (units - half)
        kept_share = _kept_shares([rows**power for name in names for rows in scores[name]])
        numbers, key = [units, *range((units - 1) // multiple * multiple, least, -multiple), least], 0.0
        for before, kept in itertools.pairwise(numbers):
            lost = (1 / kept_share[kept - 1] - 1 / kept_share[before - 1]) / (before - kept)
            key = max(key, lost / math.sqrt(saved) if saved > 0 else math.inf)  # sorting keeps the order of steps
            steps.append((key, names, kept))
    steps.sort(key=lambda step: step[0])  # stable, so that a coupling drops its units one after the other
    fixed: dict[str, int] = {}

    def counts(taken: int) -> dict[str, int]:
        return full | {name: kept for _, names, kept in steps[:taken] for name in names} | fixed

    def is_within(taken: int) -> bool:
        return cost_at(counts(taken)) <= target

    target = (1 - ratio) * dense
    taken = bisect.bisect_left(range(len(steps) + 1), True, key=is_within)
    if taken > len(steps):
        raise SparsityError(
            f"shrink: a ratio of {ratio} allows a cost of {target:.6g}, but without all units that may be dropped the "
            f"model still costs {cost_at(counts(len(steps))):.6g} of {dense:.6g}; lower the ratio, raise max_sparsity, "
            "or exclude less"
        )
    while taken and not (fixed and cost_at(counts(taken)) > CLOSE * target):
        _, names, kept = steps[taken - 1]
        fixed |= {name: kept for name in names if name not in fixed}
        taken = bisect.bisect_left(range(taken), True, key=is_within)
    return counts(taken)


def _cost_with(model: nn.Module, couplings: Sequence[Coupling], cost: Cost, counts: Mapping[str, int]) -> float:
    """The cost with as many units of each coupling as `counts` says: the first ones, so outputs mean nothing."""
    removals = []
    for source, coupling in enumerate(couplings):
        for bound in coupling.bind(model):
            keep = torch.arange(bound.grid[-1]) < counts.get(coupling.name, bound.grid[-1])
            removals.append(Removal(coupling=bound, keep=keep.expand(bound.grid), source=source))
    small = light_copy(model)
    remove_units(small, removals)
    apply_changes(small, find_changes(model, removals))
    try:
        return cost(small)
    except RuntimeError as e:
        kept = ", ".join(
            f"{n} of {c.bind(model)[0].grid[-1]} {c.name!r}" for c in couplings if (n := counts.get(c.name))
        )
        raise SparsityError(f"shrink: the model with {kept} does not run: {e}; give another multiple_of") from e


def _kept_shares(rows: Sequence[Tensor]) -> list[float]:
    """The share of the importance of a coupling that its k most important units have, for k = 1, 2, ..."""
    scores = torch.cat([row.double().cpu().reshape(-1, row.shape[-1]) for row in rows])
    scores = scores - scores.amin(1, keepdim=True).clamp(max=0)  # saliencies may be negative
    sums = scores.sort(1, descending=True).values.cumsum(1)
    shares: list[float] = (sums / sums[:, -1:]).nan_to_num(1.0).mean(0).clamp(min=1e-12).tolist()
    return shares
