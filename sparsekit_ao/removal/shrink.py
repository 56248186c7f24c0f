"""shrink: discover, choose, squash, compact and report in one call."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..coupling import BoundCoupling, Coupling, Discovery, joint_entries
from ..errors import SparsityError
from ..scores import Score, needs_of, parse_score
from ..selection import keep_mask
from ..sparsifiers import ScopeSparsifier
from ..sparsifiers.names import named_tensors, owner_of, parameter_of
from ..structure import checked_level
from .compact import Compaction, check_comparable, check_names, find_removals, verified
from .levels import Cost, connected, cost_function, counts_at_levels, counts_within, multiple_for
from .removable import Trials, removable, with_own_names
from .remove import Removal, masked_copy, plain_tensors, zero_units

T = TypeVar("T")
_Place = tuple[str, int, tuple[int, int] | None]  # a tensor, its dimension, and the part of it in a concatenation


def shrink(
    model: nn.Module,
    example_inputs: Any,
    ratio: float | Mapping[str, float] = 0.5,
    score: Score | str | None = None,
    exclude: Sequence[str | type] = (),
    *,
    cost: str | Cost = "units",
    couplings: Sequence[Coupling] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    max_sparsity: float | Mapping[str, float] = 0.9,
    multiple_of: int | Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, Compaction]:
    """Make a model smaller: drop units that can be removed, a fraction of each kind or down to a cost, and remove them.

    Couplings from which `compact` cannot remove units are left out (see `removable`). Of several that divide one
    dimension of a tensor (key heads, query heads in each, numbers of a head) those are pruned that remove most
    parameters, or the first. The report lists what is left out, with the reason.

    With a cost, units are dropped by importance and cost until the model costs `1 - ratio` of what it did, exactly to
    one step (a unit, or `multiple_of` units, in every scope). Each layer then keeps a number of its own; where the
    model has a `config`, layers of one coupling that have equal numbers keep equal ones, so that the config can hold
    them.

    Args:
        model: not changed.
        example_inputs, tolerance: as for `compact`.
        ratio: fraction of the units of every coupling that is dropped in each scope; or {name of a coupling: fraction},
            and nothing of others; or the fraction of the cost that is saved.
        score: one of `scores`, by name or object; None is the norm of a unit. Statistics that it needs are recorded
            on the example inputs; where they are of layers' inputs, units are scored by the layers that read them.
        exclude: as for `removable`.
        cost: what `ratio` is a fraction of: "units", "flops" of a forward on the example inputs, "parameters", or a
            function of a model that returns its cost (a measured time, say).
        couplings: those to be considered; None takes what `discover` finds.
        forward: `(model, example_inputs) -> loss`, for scores that need gradients.
        max_sparsity: with a cost, the largest fraction of its units that a coupling loses; or one by name.
        multiple_of: as for `compact`; by default dimensions of 16-bit weights stay multiples of 8.

    Returns:
        The smaller model, and a `Compaction`. Where nothing can be removed it is a copy.

    Raises:
        SparsityError: as `discover`, `compact` and `calibrate`; a wrong name or number; the cost cannot be reached. No
            coupling that cannot be removed raises one.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> small, report = shrink(model, torch.randn(3, 8), ratio=0.75, exclude=["4"])
    >>> small[0], small[2]
    (Linear(in_features=8, out_features=4, bias=True), Linear(in_features=4, out_features=16, bias=True))
    >>> report.left_out
    ("2.weight: left out by exclude[0] ('4')",)
    >>> small, report = shrink(model, torch.randn(3, 8), 0.5, cost="flops")
    >>> report.after.flops / report.before.flops <= 0.5
    True
    """
    check_comparable("shrink: ", model, tolerance)
    cost_of = None if cost == "units" else cost_function(cost, example_inputs)
    if isinstance(ratio, Mapping) and (cost_of is not None or not ratio):
        raise SparsityError(f"shrink: a ratio by names needs cost='units' and at least one name, got {ratio!r}")
    ratios = ratio.values() if isinstance(ratio, Mapping) else [ratio]
    trial_ratio = max(checked_level(level, "shrink: ratio: ") for level in ratios)
    discovery = removable(
        model,
        example_inputs,
        couplings,
        ratio=trial_ratio,
        exclude=exclude,
        multiple_of=1 if multiple_of is None else multiple_of,
        tolerance=tolerance,
    )
    known = [*(coupling.name for coupling in discovery.couplings), *(name for name, _ in discovery.left_out)]
    check_names("shrink: ", known, ratio=ratio, multiple_of=multiple_of, max_sparsity=max_sparsity)
    multiples = {c.name: _number(multiple_of, c.name, 1) or multiple_for(model, c) for c in discovery.couplings}
    chosen, left_out = _chosen(model, discovery, ratio, multiples)
    always = cost_of is not None and not hasattr(model, "config")
    layers: list[tuple[Coupling, str]] = []  # a coupling for each layer, where layers keep numbers of their own
    for coupling in chosen:
        differ = len({bound.grid for bound in coupling.bind(model)}) > 1
        layers += [(c, coupling.name) for c in (coupling.of_layers(model) if differ or always else [coupling])]
    chosen = with_own_names([layer for layer, _ in layers])
    names = {layer.name: name for layer, (_, name) in zip(chosen, layers, strict=True)}
    levels = {layer: _number(ratio, name, 0.0) for layer, name in names.items()}
    multiples = {layer: multiples[name] for layer, name in names.items()}
    limits = {layer: _number(max_sparsity, name, 1.0) for layer, name in names.items()}
    while True:  # until what was pruned is what can be removed
        scores = _scored(model, chosen, example_inputs, score, forward)
        rated = [c for c in chosen if any(bool(rows.any()) for rows in scores[c.name])]
        left_out += [(c.name, "the score rates all of its units 0") for c in chosen if c not in rated]
        if cost_of is None:
            counts = counts_at_levels(model, rated, levels, multiples)
        else:
            power = 2 if score is None else 1  # squares of norms add up, and saliencies do
            importances = {c.name: [rows**power for rows in scores[c.name]] for c in rated}
            counts = counts_within(model, rated, importances, cost_of, trial_ratio, multiples=multiples, limits=limits)
        masked = masked_copy(model, [bound for coupling in rated for bound in coupling.bind(model)])
        for coupling in rated:
            for bound, rows in zip(coupling.bind(masked), scores[coupling.name], strict=True):
                keep = keep_mask(rows.reshape(-1, bound.grid[-1]), counts[coupling.name]).cpu()
                zero_units(masked, Removal(coupling=bound, keep=keep.reshape(bound.grid)))
        trials, chosen = Trials(masked, example_inputs, multiples, tolerance), rated
        for is_sorted in (False, True):
            try:
                removals = find_removals(masked, chosen, {c.name: multiples[c.name] for c in chosen}, trials.known)
                small, report = verified(masked, removals, trials.reference, tolerance, with_config=True)
                left_out += _unreached([(chosen[r.source].name, r) for r in removals], levels, multiples)
                texts = tuple(f"{name}: {why}" for name, why in left_out)
                inside = [(a, *a.places[0]) for a, _ in discovery.frozen if not a.why.startswith(("input", "output"))]
                frozen = tuple(f"{a.size} in {name}[{d}]: {a.why}" for a, name, d in inside)
                return small, replace(report, left_out=texts, frozen=frozen)
            except SparsityError:
                if is_sorted:
                    raise
            chosen, failing = trials.sort(rated)
            left_out += [(coupling.name, why) for coupling, why in failing.items()]
            if failing:
                break


def _unreached(
    removals: Iterable[tuple[str, Removal]], levels: Mapping[str, float], multiples: Mapping[str, int]
) -> list[tuple[str, str]]:
    """(name, reason) of couplings that keep more than was asked for: all of their units, or the last one."""
    reasons = {}
    for name, removal in removals:
        units = removal.scope_units
        if removal.is_empty and multiples[name] > 1:
            reasons[name] = f"a multiple of {multiples[name]} keeps all of its {units} units"
        elif removal.kept == min(multiples[name], units) and levels[name] == 1:
            reasons[name] = f"a layer needs a unit, so {removal.kept} of {units} are kept in each scope"
    return list(reasons.items())


def _scored(
    model: nn.Module,
    couplings: Sequence[Coupling],
    inputs: Any,
    score: Score | str | None,
    forward: Callable[[nn.Module, Any], Any] | None,
) -> dict[str, list[Tensor]]:
    """The scores of the units of each layer of couplings, by the coupling's name."""
    needs = needs_of(parse_score(score, "shrink: "))
    if not couplings:
        return {}
    if any(need.startswith("input") for need in needs):
        couplings = [replace(coupling, scores="consumers") for coupling in couplings]
    is_built_in = not needs and not callable(score)  # so weights are only read, and need not be copied
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters() if is_built_in}
    copied, sparsifier = copy.deepcopy(model, shared), ScopeSparsifier(score=score)  # type: ignore[arg-type]
    sparsifier.prepare(copied, joint_entries(couplings, copied))
    if needs:
        sparsifier.calibrate([inputs], forward)

    def ids(names: Iterable[str]) -> frozenset[int]:
        return frozenset(id(parameter_of(*owner_of(copied, name))) for name in names)

    scores: dict[tuple[frozenset[int], int], list[Tensor]] = {}
    for names, rows in sparsifier.block_scores():  # couplings of the same tensors are in the order of their stages
        scores.setdefault((ids(names), rows.shape[-1]), []).append(rows)

    def rows_of(bound: BoundCoupling) -> Tensor:
        names = [member.fqn for member in bound.members if member.is_parameter]
        return scores[ids(names), bound.grid[-1]].pop(0)

    rated = {coupling.name: [rows_of(bound) for bound in coupling.bind(copied)] for coupling in couplings}
    for coupling in couplings if score is None else ():
        rated[coupling.name] = [
            _whole(*pair, model) for pair in zip(coupling.bind(model), rated[coupling.name], strict=True)
        ]
    for module in copied.modules():
        module._buffers.clear()  # the masks, whose modules refer to each other, so that they would be freed much later
    return rated


def _whole(bound: BoundCoupling, rows: Tensor, model: nn.Module) -> Tensor:
    """The norms of units with their further dimensions of one tensor, as recurrent weights have them."""
    numbers = torch.arange(bound.units, device="cpu").reshape(bound.grid)
    for member in bound.members:
        first = next(other for other in bound.members if other.fqn == member.fqn)
        if not first.is_parameter or first is member:
            continue
        weight = plain_tensors(model, [member.fqn])[member.fqn].detach()
        owners = [torch.empty(weight.shape, dtype=torch.long, device="cpu") for _ in range(2)]
        for view in (m.pattern(owner) for owner, m in zip(owners, (first, member), strict=True)):
            view.copy_(numbers.reshape(*bound.grid, *[1] * (view.ndim - numbers.ndim)).expand_as(view))
        others = weight.float().masked_fill((owners[0] == owners[1]).to(weight.device), 0)  # not in the first dimension
        squares = member.pattern(others).square().unsqueeze(-1).flatten(numbers.ndim).sum(-1)
        rows = (rows.square() + squares.reshape(rows.shape).to(rows)).sqrt()
    return rows


def _number(numbers: T | Mapping[str, T], name: str, default: T) -> T:
    """The number of a coupling: one for all, or by name."""
    return numbers.get(name, default) if isinstance(numbers, Mapping) else numbers


def _chosen(
    model: nn.Module, discovery: Discovery, ratio: float | Mapping[str, float], multiples: Mapping[str, int]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """The couplings to be pruned, no two of which divide one dimension of a tensor; and (name, reason) of others."""
    levels = {coupling.name: _number(ratio, coupling.name, 0.0) for coupling in discovery.couplings}
    left_out = list(discovery.left_out)
    left_out += [(name, "the ratio of it is 0, or does not name it") for name, level in levels.items() if not level]
    places = {coupling: _places(model, coupling) for coupling in discovery.couplings if levels[coupling.name]}
    kept = counts_at_levels(model, list(places), levels, multiples)
    dropped = {coupling: 1 - kept[coupling.name] / coupling.bind(model)[0].grid[-1] for coupling in places}
    chosen: list[Coupling] = []
    for rivals in connected(places):
        sets = []
        for first in rivals:
            compatible = dict.fromkeys(places[first], first)  # {place: the coupling that divides it}
            for coupling in rivals:
                if compatible.keys().isdisjoint(places[coupling]):
                    compatible |= dict.fromkeys(places[coupling], coupling)
            sets.append(list(dict.fromkeys(compatible.values())))
        # Of a grouped convolution, fewer inputs and outputs in each group remove more than fewer groups.
        chosen += max(sets, key=lambda some: round(_removed_parameters(model, some, places, dropped)))
    owners = {place: coupling.name for coupling in chosen for place in places[coupling]}
    for coupling in places:
        if coupling not in chosen:
            shared = next(place for place in places[coupling] if place in owners)
            left_out.append((coupling.name, f"it divides {shared[0]}[{shared[1]}] as {owners[shared]!r} does"))
    return [coupling for coupling in places if coupling in chosen], left_out


def _places(model: nn.Module, coupling: Coupling) -> list[_Place]:
    """The tensor dimensions that a coupling divides."""
    members = [member for bound in coupling.bind(model) for member in bound.members]
    divided = [(member, member.pattern.dimension_of(coupling.unit)) for member in members]
    return [(member.fqn, d, member.pattern.outside.get(d)) for member, d in divided]


def _removed_parameters(
    model: nn.Module,
    couplings: Iterable[Coupling],
    places: Mapping[Coupling, Sequence[_Place]],
    dropped: Mapping[Coupling, float],
) -> float:
    """How many parameters couplings remove together, each a fraction of its units."""
    tensors, removed = dict(named_tensors(model)), dict[str, dict[int, float]]()  # {tensor: {dimension: fraction}}
    for coupling in couplings:
        for name, d, outside in places[coupling]:
            if name in tensors:
                inside = 1 - sum(outside or ()) / tensors[name].shape[d]
                fractions = removed.setdefault(name, {})
                fractions[d] = fractions.get(d, 0.0) + inside * dropped[coupling]
    kept = {name: math.prod(1 - fraction for fraction in by.values()) for name, by in removed.items()}
    return sum(tensors[name].numel() * (1 - fraction) for name, fraction in kept.items())
