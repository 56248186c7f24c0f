"""Choose what is pruned, and how much of it: ratios, limits and multiples by name, rivals, and what a config holds."""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..calibration.adapters import adapter_of
from ..coupling import BoundCoupling
from ..errors import SparsityError
from ..models.names import connected, named_tensors, owner_of
from ..models.running import eval_mode
from ..oneshot.training import refuse_unfit
from ..oneshot.walk import Walk
from .arguments import ShrinkCall
from .compaction import check_names
from .plan import HALF, MAX_SPARSITY, NOT_HELD, PREFERRED_MULTIPLE, Plan, active, give_own_names, leave_out_layers
from .remove import plain_tensor
from .trials import Trials, choose_random_removals
from .twin import make_twin

# A tensor and a dimension of it that units divide. If they divide only a part of the dimension, as in a concatenation,
# the last entry says how many indices lie before and after this part; otherwise it is None.
_Place = tuple[str, int, tuple[int, int] | None]

# MLPs of at least so many units keep a multiple of `PREFERRED_MULTIPLE`, if that changes the ratio by at most so much.
_LARGE, _MAX_CHANGE = 256, 0.02


def multiple_for(model: nn.Module, plan: Plan) -> int:
    """Return the number of units whose multiples make dimensions multiples of 16 bytes, where kernels need it."""
    multiple, unit = 1, plan.coupling.unit
    for member in (member for bound in plan.bound for member in bound.members):
        tensor, pattern = plain_tensor(model, member.fqn), member.pattern
        is_packed = tensor.ndim == 3 and re.search("expert|moe", type(owner_of(model, member.fqn)[0]).__name__.lower())
        is_aligned = is_packed and pattern.dimension_of(unit) > 0
        # Kernels need it for 16-bit weights, and for packed experts (experts, out, in) of any dtype.
        if tensor.ndim > 1 and tensor.is_floating_point() and (is_aligned or tensor.element_size() == 2):
            lengths = pattern.lengths(tuple(tensor.shape))
            axes = pattern.dimensions[pattern.dimension_of(unit)]
            inner = math.prod(lengths[axis] for axis in axes if axis != unit)
            length = max(16 // tensor.element_size(), 1)
            multiple = max(multiple, length // math.gcd(length, inner))
    return multiple


def _default_multiple(model: nn.Module, plan: Plan, has_one_budget: bool) -> int:
    """Return `multiple_for`; for large MLPs a multiple of `PREFERRED_MULTIPLE`, if no layer's ratio changes much."""
    multiple = multiple_for(model, plan)
    preferred = math.lcm(multiple, PREFERRED_MULTIPLE)
    for layer in plan.split():
        change = replace(layer, multiple=preferred).kept - replace(layer, multiple=multiple).kept
        change, units = preferred - multiple if has_one_budget else change, layer.scope_units
        if plan.kind != "mlp" or units < _LARGE or change > round(_MAX_CHANGE * units):
            return multiple
    return preferred


def names_of_outputs(model: nn.Module, bound: BoundCoupling) -> set[str]:
    """Return the names of the tensors whose outputs are units of a layer, and of the modules around them."""
    names = set[str]()
    for member in bound.members:
        adapter = adapter_of(*owner_of(model, member.fqn), {})
        if adapter is None or member.pattern.dimension_of(bound.unit) not in adapter.input_dims:
            parts = member.fqn.split(".")
            names.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return names


def values_per_layer(model: nn.Module, plans: Sequence[Plan], numbers: Any, default: Any, what: str) -> list[list[Any]]:
    """Return the numbers of each plan's layers: one number for all, or numbers by the names that `shrink` takes."""
    if not isinstance(numbers, Mapping):
        return [[numbers] * len(plan.bound) for plan in plans]
    # The name of another coupling does not count as a tensor.
    reserved = {name for plan in plans for name in (plan.name, plan.coupling.layer_of)}

    def number(plan: Plan, bound: BoundCoupling) -> Any:
        names = names_of_outputs(model, bound) - (reserved - {plan.name})
        # The longest name of a module counts.
        named = sorted((name for name in numbers if name in names), key=lambda name: -name.count("."))
        for rival in named:
            if rival.count(".") == named[0].count(".") and numbers[rival] != numbers[named[0]]:
                raise SparsityError(
                    f"{what} has different numbers for {named[0]!r} and {rival!r}, whose units are removed together; "
                    "give one of them"
                )
        wholes = [name for name in (plan.name, plan.coupling.layer_of, plan.kind, "*") if name in numbers]
        return numbers[[*named, *wholes][0]] if named or wholes else default

    return [[number(plan, bound) for bound in plan.bound] for plan in plans]


def set_targets(call: ShrinkCall, plans: Sequence[Plan]) -> list[Plan]:
    """Give all plans their level, limit and multiple; those whose layers are given different ones are divided."""
    ratio = call.ratio if call.cost_of is None else HALF
    arguments = {"ratio": ratio, "max_sparsity": call.max_sparsity, "multiple_of": call.multiple_of}
    _check_named(call.model, plans, arguments)
    defaults = {"ratio": 0.0, "max_sparsity": MAX_SPARSITY, "multiple_of": None}
    columns = [values_per_layer(call.model, active(plans), n, defaults[what], what) for what, n in arguments.items()]
    parts = [plan for plan in plans if plan.left_out]
    for plan, *rows in zip(active(plans), *columns, strict=True):
        numbers = [*zip(*rows, strict=True)]  # of each layer
        layers = plan.split() if len({*numbers}) > 1 else [plan]
        for layer, (level, limit, multiple) in zip(layers, numbers, strict=False):
            layer = replace(layer, level=level, limit=limit)
            if multiple is None:
                multiple = _default_multiple(call.model, layer, call.cost_of is not None)
            parts.append(replace(layer, multiple=multiple))
    return give_own_names(parts)


def _check_named(model: nn.Module, plans: Sequence[Plan], arguments: Mapping[str, Any]) -> None:
    """Raise an error if an argument names what is not a coupling, a kind or a layer whose outputs can be removed."""
    given = [(what, name) for what, by in arguments.items() if isinstance(by, Mapping) for name in by]
    names = {name for p in active(plans) for name in (p.name, p.coupling.layer_of, p.kind)} - {""}
    names |= {"*", "width", *(plan.name for plan in plans)}
    bounds = (bound for plan in active(plans) for bound in plan.bound) if given else ()
    layers = set[str]().union(*(names_of_outputs(model, bound) for bound in bounds))
    tensors = dict(named_tensors(model))
    for what, name in given:
        if name not in names | layers and any(f"{tensor}.".startswith(f"{name}.") for tensor in tensors):
            raise SparsityError(
                f"shrink: {what} names {name!r}, but none of its outputs can be removed; name the layer before it to "
                "remove its inputs, or call without this name and read the reasons in report.left_out"
            )
        check_names(f"shrink: {what}", [name], [*sorted(names), *layers & {name}])


def names_of_layers(model: nn.Module, plans: Iterable[Plan]) -> list[str]:
    """Return the names of the modules whose matrices lose units, or of all that have matrices if none does."""
    members = set[str]().union(*(plan.tensors for plan in active(plans) if plan.level))
    matrices = [name for name, p in named_tensors(model) if p.ndim > 1]
    names = [name for name in matrices if name in members] or matrices
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def keep_inside_blocks(call: ShrinkCall, plans: Sequence[Plan], layers: Iterable[str]) -> list[Plan]:
    """Leave out layers of plans whose units are in the outputs of the blocks with most of the `layers`."""
    # The position of a module is the number of blocks that have run when it is called. If the tensors of a coupling are
    # in modules of several positions, the outputs of the blocks between them have its units.
    model, finished, positions = call.model, 0, defaultdict[nn.Module, set[int]](set)
    walk = Walk(replace(call.data, model=model), (), layers=[model.get_submodule(name) for name in layers])

    def record(module: nn.Module, *_: Any) -> None:  # called before and after the module, which may contain blocks
        positions[module].add(finished)

    def finish(*_: Any) -> None:
        nonlocal finished
        finished += 1

    with ExitStack() as stack, eval_mode(model), torch.no_grad():
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(record))
            stack.enter_context(module.register_forward_hook(record))
        for block in walk.blocks:
            stack.enter_context(block.register_forward_hook(finish))
        output = walk.data.output(0)
    if call.recover and not walk.blocks:
        refuse_unfit(output, output, "the model")  # raises an error if they are no floats
    why = "it passes between blocks, whose outputs recover=True matches" if call.recover else "left out by 'width'"

    def positions_of(path: str) -> set[int]:  # those of the innermost module that is called and contains this one
        own = positions.get(model.get_submodule(path))
        return own or (positions_of(path.rpartition(".")[0]) if path else {0, finished})

    def why_not(bound: BoundCoupling) -> str:
        return why if len({at for m in bound.members for at in positions_of(m.fqn.rpartition(".")[0])}) > 1 else ""

    return leave_out_layers(plans, why_not)


def fit_to_config(call: ShrinkCall, plans: Sequence[Plan]) -> tuple[list[Plan], bool]:
    """Leave out the plans whose removal the config cannot hold, as `keep_config` says; return whether this was done.

    The others get the fields that count their units. With one budget, a plan may later keep any multiple of its
    `multiple`, which is raised until the config can hold its largest multiple below all units, or else to all units.
    """
    fields, candidates = call.fields, active(plans)
    if fields is None or not (call.is_open if call.keep_config is None else call.keep_config):
        return [*plans], False
    trials, twin = None, make_twin(call.model, candidates, fields)
    with contextlib.suppress(SparsityError):  # the twin does not run
        if twin is not None:
            short = Trials(twin.model, choose_random_removals(twin.plans), call.trial_reference_of, fields=fields)
            trials = None if short.problem([]) else short
    trials = trials or Trials(call.model, choose_random_removals(candidates), call.trial_reference_of, fields=fields)
    held = dict[Plan, Plan]()
    reasons = dict.fromkeys(candidates, NOT_HELD.format("no field of it counts these units alone"))
    for group, covers in fields.together([plan.bound for plan in candidates]):
        for counting in covers:
            if not (why := trials.problem([replace(trials.plans[at], fields=counting) for at in group])):
                held |= {candidates[at]: replace(candidates[at], fields=counting) for at in group}
                break
            reasons |= {candidates[at]: why for at in group}
    if not call.keep_config and not held:
        return [*plans], False
    for plan in held if call.cost_of is not None else ():
        steps = [m for m in range(plan.multiple, plan.scope_units, plan.multiple) if plan.scope_units % m == 0]
        largest = {multiple: (plan.scope_units - 1) // multiple * multiple for multiple in steps or [plan.multiple]}
        fitting = (m for m, n in largest.items() if n and fields.allows(held[plan].fields, n, plan.scope_units))
        held[plan] = replace(held[plan], multiple=next(fitting, plan.scope_units))
    fitted = [held.get(plan, replace(plan, left_out=why)) for plan, why in reasons.items()]
    return [*(plan for plan in plans if plan.left_out), *fitted], True


def leave_out_rivals(model: nn.Module, plans: Sequence[Plan]) -> list[Plan]:
    """Leave out plans that drop nothing, and all but one of those that divide one dimension of a tensor."""
    why = "ratio is 0 for it, or does not name it"
    plans = [plan if plan.left_out or plan.level else replace(plan, left_out=why) for plan in plans]
    places = {plan: _places(plan) for plan in active(plans)}
    owners = dict[_Place, Plan]()  # {place: the chosen plan that divides it}
    for rivals in connected(places):  # plans that share places, directly or through others
        sets = []  # for each rival, a set of plans that includes it, and of which no two share a place
        for first in rivals:
            owner_of_place = dict.fromkeys(places[first], first)
            for plan in rivals:
                if owner_of_place.keys().isdisjoint(places[plan]):
                    owner_of_place |= dict.fromkeys(places[plan], plan)
            sets.append(list(dict.fromkeys(owner_of_place.values())))
        # Whole heads, which a config can count, come before parts of heads. In a grouped convolution, dropping inputs
        # and outputs of each group removes more parameters than dropping whole groups.
        worse = {plan for plan in rivals if plan.kind == "head size" or plan.kept == plan.scope_units}
        sizes = [round(_removed_parameters(model, chosen, places)) for chosen in sets]
        best = max(zip(sets, sizes, strict=True), key=lambda row: (worse.isdisjoint(row[0]), row[1]))[0]
        owners |= {place: plan for plan in best for place in places[plan]}
    chosen = []
    for plan in plans:
        shared = next((place for place in places.get(plan, ()) if owners.get(place, plan) is not plan), None)
        if shared is not None:
            why = f"only one coupling may divide dimension {shared[1]} of {shared[0]}: {owners[shared].name!r}"
            plan = replace(plan, left_out=why)
        chosen.append(plan)
    return chosen


def _places(plan: Plan) -> list[_Place]:
    """Return the dimensions of tensors, or parts of dimensions, that a coupling divides."""
    members = [member for bound in plan.bound for member in bound.members]
    divided = [(member, member.pattern.dimension_of(plan.coupling.unit)) for member in members]
    return [(member.fqn, d, member.pattern.outside.get(d)) for member, d in divided]


def _removed_parameters(model: nn.Module, plans: Collection[Plan], places: Mapping[Plan, Sequence[_Place]]) -> float:
    """Return how many parameters the plans remove together."""
    tensors = dict(named_tensors(model))
    removed = defaultdict[str, dict[int, float]](lambda: defaultdict(float))  # {tensor: {dimension: fraction}}
    for plan in plans:
        for name, d, outside in places[plan]:
            if name in tensors:
                inside = 1 - sum(outside or ()) / tensors[name].shape[d]  # the share of the part that has the units
                removed[name][d] += inside * (1 - plan.kept / plan.scope_units)
    kept = {name: math.prod(1 - fraction for fraction in by.values()) for name, by in removed.items()}
    return sum(tensors[name].numel() * (1 - fraction) for name, fraction in kept.items())


def divide_by_size(call: ShrinkCall, plans: Iterable[Plan], keeps_config: bool) -> list[Plan]:
    """Divide plans whose layers differ in size into layers, or all if one budget may give each layer its own number."""
    may_differ = call.keep_config is False or (call.is_open and not keeps_config)
    each = call.cost_of is not None and (may_differ or not hasattr(call.model, "config"))
    parts = list[Plan]()
    for plan in plans:
        differ = len({bound.grid for bound in plan.bound}) > 1
        parts += plan.split() if not plan.left_out and (differ or each) else [plan]
    return give_own_names(parts)
