"""shrink: discover, choose, squash, compact and report in one call."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from ..coupling import BoundCoupling, Coupling, Discovery, joint_entries
from ..errors import SparsityError
from ..scores import Score, needs_of, parse_score
from ..sparsifiers import ScopeSparsifier
from ..sparsifiers.names import named_tensors, owner_of, parameter_of
from ..structure.budget import checked_level
from .compact import verified
from .levels import Cost, cost_of, counts_at_levels, counts_within, kept_units, multiple_for
from .removable import Trials, removable, with_own_names
from .removal import zero_units
from .results import Compaction
from .trial import find_removals

T = TypeVar("T")
_Left = list[tuple[str, str]]  # (name of a coupling, why nothing is removed from it)
_Place = tuple[str, int, tuple[int, int] | None]  # a tensor, its dimension, and the part of it in a concatenation
_Scores = dict[str, list[Tensor]]  # {name of a coupling: scores of the units of each of its layers}


def shrink(
    model: nn.Module,
    example_inputs: Any,
    ratio: float | Mapping[str, float] = 0.5,
    score: Score | str | None = None,
    exclude: Sequence[str | type] = (),
    *,
    of: str | Cost = "units",
    couplings: Sequence[Coupling] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    max_sparsity: float | Mapping[str, float] = 0.9,
    multiple_of: int | Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, Compaction]:
    """Make a model smaller: drop units that can be removed, a fraction of each kind or down to a cost, and remove them.

    Couplings are discovered, and those from which `compact` cannot remove units are left out (see `removable`). Of
    several that divide one dimension of a tensor (key heads, query heads in each, numbers of a head) those are pruned
    that remove most parameters, or the first, so that a dimension loses `ratio` of its length once. The report lists
    what is left out, with the reason.

    With `of="flops"` or another cost, units are dropped by importance and cost until the model costs `1 - ratio` of
    what it did, exactly to one step (a unit, or `multiple_of` units, in every scope). Each layer then keeps a number of
    its own; where the model has a `config`, layers of one coupling that have equal numbers keep equal ones, so that the
    config can hold them. Importances count relative to those of their coupling.

    Args:
        model: not changed.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments; see `compact`.
        ratio: fraction of the units of every coupling that is dropped in each scope; or {name of a coupling: fraction},
            and nothing of others; or the fraction of the cost that is saved.
        score: one of `scores`, by name or object; None is the norm of a unit. Statistics that it needs are recorded
            on the example inputs; where they are of layers' inputs, units are scored by the layers that read them.
        exclude: names, globs and regular expressions of tensors or modules, and module classes; couplings with such a
            tensor are left out.
        of: what `ratio` is a fraction of: "units", "flops" of a forward on the example inputs, "parameters", or a
            function of a model that returns its cost (a measured time, say).
        couplings: those to be considered; None takes what `discover` finds.
        forward: `(model, example_inputs) -> loss`, for scores that need gradients.
        max_sparsity: with a cost, the largest fraction of its units that a coupling loses; or one by name.
        multiple_of: as for `compact`; by default dimensions of 16-bit weights stay multiples of 8.
        tolerance: as for `compact`.

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
    >>> small, report = shrink(model, torch.randn(3, 8), 0.5, of="flops")
    >>> report.after.flops / report.before.flops <= 0.5
    True
    """
    cost = None if of == "units" else cost_of(of, example_inputs)
    trial = _checked_ratio(ratio, cost)
    keys = {"multiple_of": 1 if multiple_of is None else multiple_of, "tolerance": tolerance}
    found = removable(model, example_inputs, couplings, ratio=trial, exclude=exclude, **keys)  # type: ignore[arg-type]
    _check_names(found, ratio=ratio, multiple_of=multiple_of, max_sparsity=max_sparsity)
    multiples = {one.name: _number(multiple_of, one.name, 1) or multiple_for(model, one) for one in found.couplings}
    chosen, left = _chosen(model, found, ratio, multiples)
    layers = [
        (layer, one.name)
        for one in chosen
        for layer in _layers(model, one, always=cost is not None and not hasattr(model, "config"))
    ]
    chosen = with_own_names([layer for layer, _ in layers])
    names = {layer.name: name for layer, (_, name) in zip(chosen, layers, strict=True)}
    levels = {layer: _number(ratio, name, 0.0) for layer, name in names.items()}
    multiples = {layer: multiples[name] for layer, name in names.items()}
    limits = {layer: _number(max_sparsity, name, 1.0) for layer, name in names.items()}

    def counts(some: Sequence[Coupling], scores: _Scores) -> dict[str, int]:
        if cost is None:
            return counts_at_levels(model, some, levels, multiples)
        power = 2 if score is None else 1  # squares of norms add up, and saliencies do
        importances = {one.name: [rows**power for rows in scores[one.name]] for one in some}
        return counts_within(model, some, importances, cost, trial, multiples=multiples, limits=limits)

    scored = partial(_scored, model, inputs=example_inputs, score=score, forward=forward)
    trials = partial(_trials, example_inputs, multiples, tolerance)
    masked, chosen, more = _pruned(model, chosen, scored, counts, trials)
    removals = find_removals(masked, chosen, {one.name: multiples[one.name] for one in chosen})
    small, report = verified(masked, removals, example_inputs, tolerance, with_config=True)
    return small, replace(report, left_out=tuple(f"{name}: {why}" for name, why in [*left, *more]))


def _layers(model: nn.Module, coupling: Coupling, always: bool) -> list[Coupling]:
    """A coupling for each layer, where layers have different numbers of units, or always; else the coupling itself."""
    differ = len({bound.grid for bound in coupling.bind(model)}) > 1
    return coupling.of_layers(model) if differ or always else [coupling]


def _pruned(
    model: nn.Module,
    couplings: Sequence[Coupling],
    scored: Callable[[Sequence[Coupling]], _Scores],
    counts: Callable[[Sequence[Coupling], _Scores], dict[str, int]],
    trials: Callable[[nn.Module], Trials],
) -> tuple[nn.Module, list[Coupling], _Left]:
    """A copy of the model in which the lowest units are zero, the couplings that can be removed from it, and others."""
    left: _Left = []
    while True:
        masked, scores = copy.deepcopy(model), scored(couplings)
        rated = [one for one in couplings if any(bool(rows.any()) for rows in scores[one.name])]
        left += [(one.name, "the score rates all of its units 0") for one in couplings if one not in rated]
        kept = counts(rated, scores)
        for one in rated:
            for bound, rows in zip(one.bind(masked), scores[one.name], strict=True):
                zero_units(masked, kept_units(bound, rows, kept[one.name]))
        good, bad = trials(masked).sort(rated)
        left += [(one.name, why) for one, why in bad.items()]
        if not bad:
            return masked, list(good), left  # what was pruned is what will be removed
        couplings = good


def _trials(inputs: Any, multiples: Mapping[str, int], tolerance: float, masked: nn.Module) -> Trials:
    return Trials(masked, inputs, multiples, tolerance)


def _scored(
    model: nn.Module,
    couplings: Sequence[Coupling],
    inputs: Any,
    score: Score | str | None,
    forward: Callable[[nn.Module, Any], Any] | None,
) -> _Scores:
    """The scores of the units of couplings."""
    needs = needs_of(parse_score(score, "shrink: "))
    if not couplings:
        return {}
    if any(need.startswith("input") for need in needs):
        couplings = [replace(coupling, scores="consumers") for coupling in couplings]
    copied, sparsifier = copy.deepcopy(model), ScopeSparsifier(score=score)  # type: ignore[arg-type]
    sparsifier.prepare(copied, joint_entries(couplings, copied))
    if needs:
        sparsifier.calibrate([inputs], forward)
    found: dict[tuple[frozenset[int], int], list[Tensor]] = {}
    for names, rows in sparsifier.block_scores():  # couplings of the same tensors are in the order of their stages
        found.setdefault((_ids(copied, names), rows.shape[-1]), []).append(rows)

    def rows_of(bound: BoundCoupling) -> Tensor:
        names = [member.fqn for member in bound.members if member.is_parameter]
        return found[_ids(copied, names), bound.grid[-1]].pop(0)

    return {one.name: [rows_of(bound) for bound in one.bind(copied)] for one in couplings}


def _ids(model: nn.Module, names: Iterable[str]) -> frozenset[int]:
    return frozenset(id(parameter_of(*owner_of(model, name))) for name in names)


def _checked_ratio(ratio: float | Mapping[str, float], cost: Cost | None) -> float:
    """The fraction of units that is removed in trials; with a cost, the fraction of it."""
    if isinstance(ratio, Mapping) and (cost is not None or not ratio):
        raise SparsityError(f"shrink: a ratio by names needs of='units' and at least one name, got {ratio!r}")
    levels = ratio.values() if isinstance(ratio, Mapping) else [ratio]
    return max(checked_level(level, "shrink: ratio: ") for level in levels)


def _check_names(found: Discovery, **given: Any) -> None:
    known = [*(one.name for one in found.couplings), *(name for name, _ in found.left_out)]
    for key, value in given.items():
        for name in value if isinstance(value, Mapping) else ():
            if name not in known:
                names = ", ".join(map(repr, known)) or "none"
                raise SparsityError(f"shrink: {key} names {name!r}, but the couplings are {names}")


def _number(given: T | Mapping[str, T], name: str, default: T) -> T:
    """What is given for a coupling: one number for all, or by name."""
    return given.get(name, default) if isinstance(given, Mapping) else given


def _chosen(
    model: nn.Module, found: Discovery, ratio: float | Mapping[str, float], multiples: Mapping[str, int]
) -> tuple[list[Coupling], _Left]:
    """The couplings to be pruned, no two of which divide one dimension of a tensor; and (name, reason) of others."""
    left, levels = list(found.left_out), {one.name: _number(ratio, one.name, 0.0) for one in found.couplings}
    left += [(name, "the ratio of it is 0, or does not name it") for name, level in levels.items() if not level]
    places = {one: _places(model, one) for one in found.couplings if levels[one.name]}
    kept = counts_at_levels(model, list(places), levels, multiples)
    dropped = {one: 1 - kept[one.name] / one.bind(model)[0].grid[-1] for one in places}
    chosen: list[Coupling] = []
    for rivals in _rivals(places):
        # Of a grouped convolution, fewer inputs and outputs in each group remove more than fewer groups.
        sets = [_compatible([first, *rivals], places) for first in rivals]
        chosen += max(sets, key=lambda some: round(_removed_parameters(model, some, places, dropped)))
    owner = {place: one.name for one in chosen for place in places[one]}
    for one, own in places.items():
        if one not in chosen:
            shared = next(place for place in own if place in owner)
            left.append((one.name, f"it divides {shared[0]}[{shared[1]}] as {owner[shared]!r} does"))
    return [one for one in places if one in chosen], left


def _places(model: nn.Module, coupling: Coupling) -> list[_Place]:
    """What a coupling divides."""
    members = [member for bound in coupling.bind(model) for member in bound.members]
    divided = [(member, member.pattern.dimension_of(coupling.unit)) for member in members]
    return [(member.fqn, d, member.pattern.outside.get(d)) for member, d in divided]


def _rivals(places: Mapping[Coupling, Sequence[_Place]]) -> list[list[Coupling]]:
    """The couplings, together those that divide the same dimensions, also by way of others."""
    found: list[tuple[set[_Place], list[Coupling]]] = []
    for coupling, own in places.items():
        touched = [one for one in found if not one[0].isdisjoint(own)]
        found = [one for one in found if one not in touched]
        found.append((set(own).union(*(p for p, _ in touched)), [c for _, some in touched for c in some] + [coupling]))
    return [some for _, some in found]


def _compatible(couplings: Sequence[Coupling], places: Mapping[Coupling, Sequence[_Place]]) -> list[Coupling]:
    """Each coupling that divides no dimension of one before it."""
    found, taken = list[Coupling](), set[_Place]()
    for coupling in couplings:
        if taken.isdisjoint(places[coupling]):
            found.append(coupling)
            taken.update(places[coupling])
    return found


def _removed_parameters(
    model: nn.Module,
    couplings: Iterable[Coupling],
    places: Mapping[Coupling, Sequence[_Place]],
    dropped: Mapping[Coupling, float],
) -> float:
    """How many parameters couplings remove together, each a fraction of its units."""
    tensors, lost = dict(named_tensors(model)), dict[str, dict[int, float]]()
    for coupling in couplings:
        for name, d, outside in places[coupling]:
            if name in tensors:
                inside = 1 - sum(outside or ()) / tensors[name].shape[d]
                own = lost.setdefault(name, {})
                own[d] = own.get(d, 0.0) + inside * dropped[coupling]
    kept = {name: math.prod(1 - part for part in own.values()) for name, own in lost.items()}
    return sum(tensors[name].numel() * (1 - part) for name, part in kept.items())
