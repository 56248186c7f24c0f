"""How many units each coupling keeps: a fraction of its own, or as many as a cost of the whole model allows."""

import bisect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..calibration.adapters import adapter_of
from ..coupling import BoundCoupling, Coupling
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


def cost_function(cost: str | Cost, inputs: Any) -> Cost | None:
    """Return the function for a cost: "flops" of a forward on the inputs, "parameters", or `cost`; None for "units"."""
    costs: dict[Any, Cost | None] = {
        "units": None,
        "flops": lambda model: count_flops(model, inputs),
        "parameters": lambda model: sum(p.numel() for p in model.parameters()),
    }
    if not callable(cost) and not (isinstance(cost, str) and cost in costs):
        raise SparsityError(
            f"shrink: budget must be 'layer', 'units', 'flops', 'parameters' or a function of a model, got {cost!r}"
        )
    return (lambda model: cost(plain_weights(model))) if callable(cost) else costs[cost]


def multiple_for(model: nn.Module, coupling: Coupling) -> int:
    """Return the number of units whose multiples make dimensions multiples of 16 bytes, where kernels need it.

    >>> mlp = Coupling({"0.weight": "u i", "1.weight": "o u"})
    >>> model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))
    >>> multiple_for(model, mlp), multiple_for(model.half(), mlp)
    (1, 8)
    """
    multiple = 1
    for member in (member for bound in coupling.bind(model) for member in bound.members):
        tensor, pattern = plain_tensors(model, [member.fqn])[member.fqn], member.pattern
        is_packed = tensor.ndim == 3 and re.search("expert|moe", type(owner_of(model, member.fqn)[0]).__name__.lower())
        is_aligned = is_packed and pattern.dimension_of(coupling.unit) > 0
        # Kernels need it for 16-bit weights, and for packed experts (experts, out, in) of any dtype.
        if tensor.ndim > 1 and tensor.is_floating_point() and (is_aligned or tensor.element_size() == 2):
            lengths = pattern.lengths(tuple(tensor.shape))
            axes = pattern.dimensions[pattern.dimension_of(coupling.unit)]
            inner = math.prod(lengths[axis] for axis in axes if axis != coupling.unit)
            length = max(16 // tensor.element_size(), 1)
            multiple = max(multiple, length // math.gcd(length, inner))
    return multiple


@dataclass(frozen=True, kw_only=True)
class Quota:
    """How many units of a scope may be dropped: the fraction `level`, or up to `limit` if the whole model has a budget.

    >>> quota = Quota(units=12, level=0.5, limit=0.9, multiple=4)
    >>> quota.kept, quota.least
    (8, 4)
    """

    units: int
    level: float
    limit: float
    multiple: int  # of which the number of kept units is a multiple, unless all are kept

    @property
    def kept(self) -> int:
        """The units that are kept at the level."""
        return rounded(sparsity_to_nnz(self.level, self.units, "shrink: ratio: "), self.units, self.multiple)

    @property
    def least(self) -> int:
        """The units that are always kept."""
        return rounded(sparsity_to_nnz(self.limit, self.units, "max_sparsity: "), self.units, self.multiple)


def names_of_outputs(model: nn.Module, bound: BoundCoupling) -> set[str]:
    """Return the names of the tensors whose outputs are units of a layer, and of the modules around them.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    >>> sorted(names_of_outputs(model, Coupling({"0.weight": "u i", "1.weight": "o u"}).bind(model)[0]))
    ['0', '0.weight']
    """
    names = set[str]()
    for member in bound.members:
        adapter = adapter_of(*owner_of(model, member.fqn), {})
        if adapter is None or member.pattern.dimension_of(bound.unit) not in adapter.input_dims:
            parts = member.fqn.split(".")
            names.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return names


def numbers_by_coupling(
    model: nn.Module, couplings: Sequence[Coupling], numbers: Any, default: Any, what: str
) -> dict[str, Any]:
    """Return {coupling: its number}, from one number or numbers by name; `what` names the argument in errors."""
    if not isinstance(numbers, Mapping):
        return {c.name: numbers for c in couplings}
    by_layer = _numbers_of_layers(model, couplings, numbers, default, what)
    return {c.name: layers[0] for c, layers in zip(couplings, by_layer, strict=True)}


def _numbers_of_layers(
    model: nn.Module, couplings: Sequence[Coupling], numbers: Mapping[str, Any], default: Any, what: str
) -> list[list[Any]]:
    """Return the numbers of each coupling's layers, by a tensor or module of them, the coupling's name or its kind."""
    # The name of another coupling does not count as a tensor.
    reserved = {name for coupling in couplings for name in (coupling.name, coupling.layer_of)}

    def number(coupling: Coupling, bound: BoundCoupling) -> Any:
        names = names_of_outputs(model, bound) - (reserved - {coupling.name})
        # The longest name of a module counts.
        named = sorted((name for name in numbers if name in names), key=lambda name: -name.count("."))
        for rival in named:
            if rival.count(".") == named[0].count(".") and numbers[rival] != numbers[named[0]]:
                raise SparsityError(
                    f"{what} has different numbers for {named[0]!r} and {rival!r}, whose units are removed together; "
                    "give one of them"
                )
        wholes = [name for name in (coupling.name, coupling.layer_of, coupling.kind, "*") if name in numbers]
        return numbers[[*named, *wholes][0]] if named or wholes else default

    return [[number(coupling, bound) for bound in coupling.bind(model)] for coupling in couplings]


def with_own_names(couplings: Sequence[Coupling]) -> list[Coupling]:
    """Give couplings different names: equal ones get the kind, or the axes of the first member, or a number."""
    named = list(couplings)
    for name, count in Counter(coupling.name for coupling in couplings).items():
        alike = [at for at, coupling in enumerate(couplings) if coupling.name == name]
        choices = (
            [f"({couplings[at].kind})" for at in alike],
            [next(iter(couplings[at].members.values())) for at in alike],
            [f"#{at}" for at in alike],
        )
        suffixes = next(choice for choice in choices if len({*choice}) == count)
        for at, suffix in zip(alike, suffixes, strict=True) if count > 1 else ():
            named[at] = replace(couplings[at], name=f"{name} {suffix}")
    return named


def divided(model: nn.Module, couplings: Sequence[Coupling], numbers: Mapping[str, Any]) -> list[Coupling]:
    """Return the couplings, each replaced by its layers if these have different numbers.

    `numbers` is {argument: a number for all, or {name of a coupling, tensor or module, or kind: number}}.
    """
    by_name = {what: n for what, n in numbers.items() if isinstance(n, Mapping)}
    by_layer = [_numbers_of_layers(model, couplings, n, None, what) for what, n in by_name.items()]
    parts: list[Coupling] = []
    for coupling, *layers in zip(couplings, *by_layer, strict=True):
        differ = any(number != row[0] for row in layers for number in row)
        parts += coupling.of_layers(model) if differ else [coupling]
    return with_own_names(parts)


def counts_within(
    model: nn.Module,
    couplings: Sequence[Coupling],
    scores: Rows,
    cost: Cost | None,
    ratio: float,
    quotas: Mapping[str, Quota],
) -> dict[str, int]:
    """Return {coupling: kept units of a scope} with which the model costs at most 1 - ratio of what it costs now."""
    full = {coupling.name: quotas[coupling.name].units for coupling in couplings}
    cost_at = partial(_units_with, model, couplings) if cost is None else partial(_cost_with, model, couplings, cost)
    # Units are dropped in steps of one or a multiple. The next step is the one that adds least to the lost importance
    # of its coupling, relative to the kept importance, per square root of the cost that it saves. The root keeps costly
    # couplings from being cut to their limit (examples/benchmarks/compare_accuracy.py).
    dense, steps = cost_at({}), list[tuple[float, list[str], int]]()
    for names in connected({coupling.name: coupling.attrs.items() for coupling in couplings}):  # they share an integer
        units, multiple = full[names[0]], max(quotas[name].multiple for name in names)
        limit = min(quotas[name].limit for name in names)
        least = replace(quotas[names[0]], limit=limit, multiple=multiple).least
        if least == units or any(full[name] != units for name in names):
            continue  # one integer cannot count different numbers unless equal fractions are dropped
        half = max(least, rounded(units // 2, units - multiple, multiple))
        saved = (dense - cost_at(dict.fromkeys(names, half))) / (units - half)
        kept_share = _kept_shares([rows for name in names for rows in scores[name]])
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
            f"model still costs {cost_at(counts(len(steps))):.6g} of {dense:.6g}; lower the ratio, raise max_sparsity "
            "(what passes between blocks stays unless it is named: max_sparsity={'width': 0.9}), or exclude less"
        )
    # The last step, such as a whole head, may save more than is needed. It stays, and earlier steps are taken
    # back until the cost is close to the allowed one.
    while taken and not (fixed and cost_at(counts(taken)) > CLOSE * target):
        _, names, kept = steps[taken - 1]
        fixed |= {name: kept for name in names if name not in fixed}
        taken = bisect.bisect_left(range(taken), True, key=is_within)
    return counts(taken)


def _units_with(model: nn.Module, couplings: Sequence[Coupling], counts: Mapping[str, int]) -> float:
    """Return the number of units of all couplings, if each scope keeps as many as `counts` says."""
    grids = [(c.name, bound.grid) for c in couplings for bound in c.bind(model)]
    return sum(math.prod(grid[:-1]) * counts.get(name, grid[-1]) for name, grid in grids)


def _cost_with(model: nn.Module, couplings: Sequence[Coupling], cost: Cost, counts: Mapping[str, int]) -> float:
    """Return the cost if couplings keep as many units as `counts` says; these are the first ones, whatever they do."""
    removals = []
    for source, coupling in enumerate(couplings):
        for bound in coupling.bind(model):
            keep = torch.arange(bound.grid[-1], device="cpu") < counts.get(coupling.name, bound.grid[-1])
            removals.append(Removal(bound=bound, keep=keep.expand(bound.grid), source=source))
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
    """Return the share of a coupling's importance that its k most important units have, for k = 1, 2, ..."""
    scores = torch.cat([row.double().cpu().reshape(-1, row.shape[-1]) for row in rows])
    scores = scores - scores.amin(1, keepdim=True).clamp(max=0)  # saliencies may be negative
    sums = scores.sort(1, descending=True).values.cumsum(1)
    shares: list[float] = (sums / sums[:, -1:]).nan_to_num(1.0).mean(0).clamp(min=1e-12).tolist()
    return shares
