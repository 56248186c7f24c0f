"""removable: the couplings that `compact` can remove from a model, found by removing units and comparing outputs."""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..coupling import BoundCoupling, Coupling, Discovery, discover
from ..coupling.bound import match_names
from ..coupling.coupling import merged_couplings
from ..errors import SparsityError
from ..masking.normalized import plain_copy, redo_weight_norms
from ..models.names import named_tensors
from ..models.progress import progress_bar
from ..sparsifiers.config import excluded_names
from ..structure import sparsity_to_nnz
from .compaction import Compaction, Known, check_comparable, compared, find_removals, verified, without_units
from .levels import multiple_for, with_own_names
from .remove import Removal, check_multiple, masked_copy, rounded
from .sizes import candidate_attrs, fit_config, width_attrs
from .twin import Twin, discover_in_twin, make_twin
from .verify import Reference

_NEAREST = 7  # so many candidates for attributes of a coupling are tried by themselves
_ENOUGH = 3  # after so many failures, couplings whose names differ in numbers only are not tried
NOT_TRIED = f"not tried, since {_ENOUGH} like it cannot be removed: "


def removable(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None = None,
    *,
    ratio: float = 0.5,
    exclude: Sequence[str | type] = (),
    multiple_of: int | Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
) -> Discovery:
    """Find the couplings that `compact` can remove from a model, with the integers that this changes.

    Random units are made zero in a copy of the model, removed from another one, and the outputs of both compared. Where
    they differ, each coupling is tried by itself. Integers near its tensors that equal a removed size are then changed
    too (`num_heads`, `config.hidden_size`, entries of tuples). Two couplings that fail because the forward has one
    number for both (such as one head size for queries and values) are merged. Prune the result by `joint_entries`, then
    `compact`.

    Args:
        model: Not changed; copies run.
        example_inputs, tolerance: As for `compact`.
        multiple_of: As for `shrink`.
        couplings: To be tried; None takes what `discover` finds. If the model has been made smaller
            since, those whose sizes no longer fit are replaced by what is found for the same tensors.
        ratio: Fraction of the units of every coupling that is removed in the trial.
        exclude: Names, globs and regular expressions of tensors or modules, and module classes. Layers of a coupling
            with such a tensor are left out; the others are then couplings of their own.

    Returns:
        As `discover`; `left_out` has the couplings that cannot be removed, with the reason. All names differ.

    Raises:
        SparsityError: As `discover`; the model does not run, or returns no tensor, only zeros, or a nan.

    >>> class Heads(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv, self.out, self.heads = nn.Linear(8, 24), nn.Linear(8, 8), 4
    ...
    ...     def forward(self, x):
    ...         q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 2)).permute(2, 0, 3, 1, 4)
    ...         return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    >>> removable(Heads(), torch.randn(2, 5, 8)).couplings[0].attrs
    {'heads': 'u'}
    """
    check_comparable("", model, tolerance)
    how: dict[str, Any] = {"ratio": ratio, "exclude": exclude, "multiple_of": multiple_of, "tolerance": tolerance}
    return find_removable(plain_copy(model), example_inputs, couplings, **how)


def find_removable(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None,
    *,
    ratio: float,
    exclude: Sequence[str | type],
    multiple_of: int | Mapping[str, int] | None,
    tolerance: float,
    is_verified: bool = True,
) -> Discovery:
    """Find couplings as `removable`, by trials of a short twin where there is one.

    If the twin does not run, or its couplings cannot be removed from the whole model, the whole model is tried.
    With `is_verified=False`, discovery uses a short model, too. Where its couplings cannot be removed from the whole
    one, discovery is repeated there.
    """
    numbers = multiple_of.values() if isinstance(multiple_of, Mapping) else [multiple_of]
    for number in numbers if multiple_of is not None else ():
        check_multiple(number, "")  # else it would be the reason why each coupling is left out
    how: dict[str, Any] = {"ratio": ratio, "exclude": exclude, "multiple_of": multiple_of, "is_verified": is_verified}
    reference_of = partial(Reference, inputs=example_inputs, tolerance=tolerance)
    if couplings is not None:
        tested = partial(removable, model, example_inputs, tolerance=tolerance)
        fitting, stale = _refitted(model, couplings, [partial(discover, model, example_inputs), tested])
        given = Discovery(couplings=tuple(fitting), counts=(), frozen=(), left_out=tuple(stale))
        return _found(model, given, reference_of, **how)
    if not is_verified and (short := discover_in_twin(model, example_inputs)) is not None:
        with contextlib.suppress(_TwinError):
            return _found(model, short, reference_of, **{**how, "is_verified": True}, in_whole=False)
    return _found(model, discover(model, example_inputs), reference_of, **how)


class _TwinError(Exception):
    """What was found in a twin does not hold for the whole model."""


def _found(
    model: nn.Module,
    discovery: Discovery,
    reference_of: Callable[[nn.Module], Reference],
    *,
    ratio: float,
    exclude: Sequence[str | type],
    multiple_of: int | Mapping[str, int] | None,
    is_verified: bool,
    in_whole: bool = True,
) -> Discovery:
    """Find by trials which couplings of a discovery can be removed; arguments as of `find_removable`.

    Raises:
        _TwinError: Only without `in_whole`: there is no twin whose couplings can be used. With it, the model is tried.
    """
    excluded = excluded_names(model, exclude, dict(named_tensors(model)))
    tried, left_out = _tried(model, discovery, excluded, ratio)
    if multiple_of is None:
        multiple_of = {coupling.name: multiple_for(model, coupling) for coupling in tried}
    multiple_of = by_name(multiple_of, tried)
    elements = sum(p.numel() for p in model.parameters())
    with progress_bar(None, "removable", " compactions", elements=elements) as bar:

        def trials(running: nn.Module, failed: Counter[str], some: Sequence[Coupling]) -> Trials:
            return Trials(running, _random(running, some, ratio, multiple_of), reference_of, bar.update, failed)

        def found_in(twin: Twin) -> tuple[list[Coupling], dict[Coupling, str]] | None:
            try:
                good, failing = _divided(twin.model, twin.couplings, partial(trials, twin.model, Counter()))
                good = [twin.in_whole(coupling) for coupling in good]
                is_wrong = is_verified and trials(model, Counter(), good).problem(good)
            except SparsityError:
                return None
            return None if is_wrong else (good, failing)

        twin = make_twin(model, tried)
        found = twin and found_in(twin)
        if not found and not in_whole:
            raise _TwinError
        good, failing = found or _divided(model, tried, partial(trials, model, Counter()))
    names = [coupling.name for coupling in tried]
    good.sort(key=lambda coupling: names.index(coupling.name) if coupling.name in names else len(names))
    good, parts = _without_layers(model, good, excluded)
    left_out += parts
    return replace(
        discovery,
        couplings=tuple(good),
        counts=tuple((len(bound), bound[0].grid[-1]) for bound in (coupling.bind(model) for coupling in good)),
        left_out=(*left_out, *((coupling.name, why) for coupling, why in failing.items())),
    )


def _tried(
    model: nn.Module, discovery: Discovery, excluded: Mapping[str, str], ratio: float
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """The couplings that are tried, with names of their own, and (name, reason) of the others."""
    tried, left_out = list[Coupling](), list(discovery.left_out)
    for coupling in with_own_names(discovery.couplings):
        bindings = coupling.bind(model)
        reasons = [_why_excluded(bound, excluded) for bound in bindings]
        why = reasons[0] if all(reasons) else ""
        if not why and coupling.lists:
            why = "its units are modules of a list; give them masks by its entries, and call compact with a tolerance"
        if not why and all(_kept(bound, ratio) == bound.grid[-1] for bound in bindings):
            why = f"a ratio of {ratio} drops none of its units: {bindings[0].grid[-1]} in each scope"
        if why:
            left_out.append((coupling.name, why))
        else:
            tried.append(coupling)
    return tried, left_out


def _without_layers(
    model: nn.Module, couplings: Sequence[Coupling], excluded: Mapping[str, str]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """Divide couplings with excluded layers into the other layers; (name, reason) of the excluded ones."""
    kept, left_out = list[Coupling](), list[tuple[str, str]]()
    for coupling in couplings:
        reasons = [_why_excluded(bound, excluded) for bound in coupling.bind(model)]
        layers = coupling.of_layers(model) if any(reasons) else [coupling]
        for layer, why in zip(layers, reasons, strict=False):
            if why:
                left_out.append((layer.name, why))
            else:
                kept.append(layer)
    return with_own_names(kept), left_out


def _why_excluded(bound: BoundCoupling, excluded: Mapping[str, str]) -> str:
    return next((excluded[member.fqn] for member in bound.members if member.fqn in excluded), "")


def _refitted(
    model: nn.Module, couplings: Sequence[Coupling], searches: Sequence[Callable[[], Discovery]]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """Replace couplings whose sizes do not fit the model by those that are found; (name, reason) of the rest."""
    fitting, stale = list[Coupling](), dict[Coupling, SparsityError]()
    for coupling in couplings:
        try:
            coupling.bind(model)
            fitting.append(coupling)
        except SparsityError as e:
            stale[coupling] = e
    for search in searches:
        candidates = {other: _tensor_sets(other, model) for other in search().couplings} if stale else {}
        for coupling, why in [*stale.items()]:
            wanted = _tensor_sets(coupling, model)
            if not all(wanted):
                raise why
            same = [other for other, sets in candidates.items() if sets <= wanted]
            fitting += [replace(same[0], name=coupling.name)] if len(same) == 1 else same
            if same:
                del stale[coupling]
    return fitting, [(coupling.name, f"it no longer fits the model: {why}") for coupling, why in stale.items()]


def _tensor_sets(coupling: Coupling, model: nn.Module) -> set[frozenset[tuple[str, str]]]:
    """Return, for each layer of a coupling, its tensors' names with axes; no names if a member matches nothing."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    layers: dict[tuple[str, ...], set[tuple[str, str]]] = {}
    for member, axes in coupling.members.items():
        axes = re.sub(r"\s*(\d+ *\+|\+ *\d+)\s*", "", axes)  # without the lengths of concatenated parts
        for captured, fqns in match_names(member, names).items() or [((), [])]:
            layers.setdefault(captured, set()).update((fqn, axes) for fqn in fqns)
    return {frozenset(layer) for layer in layers.values()}


def _divided(
    model: nn.Module, couplings: Sequence[Coupling], trials: Callable[[Sequence[Coupling]], "Trials"]
) -> tuple[list[Coupling], dict[Coupling, str]]:
    """Couplings that can be removed together, some of them merged or with more `attrs`; and why the others cannot."""
    first = trials(couplings)
    first.reference.check_lengths()
    good, failing = first.divide(couplings)
    fitted, replaced = list[Coupling](), set[Coupling]()  # couplings that replace others, and the replaced ones
    for merged, parts in _merges(model, good, failing):
        if replaced.isdisjoint(parts) and not first.has_failed(merged) and (fit := trials([merged]).fitted(merged)):
            fitted.append(fit)
            replaced.update(parts)
    for coupling in failing:
        if coupling not in replaced and (fit := first.fitted(coupling, together=2)):
            fitted.append(fit)
            replaced.add(coupling)
    of_layers: dict[Coupling, str] = {}  # why layers of replaced couplings cannot be removed
    for coupling in failing:
        if coupling not in replaced and len({bound.grid for bound in coupling.bind(model)}) > 1:
            # Layers of different widths are stages (as in a ResNet), and the code of each may take another branch.
            layers, why = first.divide(coupling.of_layers(model))
            if layers:
                fitted += layers
                replaced.add(coupling)
                of_layers |= why
    del first  # frees its masked model
    if fitted:
        good = [*(coupling for coupling in good if coupling not in replaced), *fitted]
        good, more = trials(good).divide(good)
        failing = {coupling: why for coupling, why in failing.items() if coupling not in replaced} | of_layers | more
    return good, failing


class Trials:
    """Runs smaller models: all units in `known` are zero in a masked model; a trial removes those of some couplings.

    `reference_of` returns the reference of the masked model. `done` is called after each trial, and `failed` counts for
    each kind the couplings that could not be removed.
    """

    def __init__(
        self,
        model: nn.Module,
        known: Known,
        reference_of: Callable[[nn.Module], Reference],
        done: Callable[[], object] = lambda: None,
        failed: Counter[str] | None = None,
    ) -> None:
        self._failed = Counter[str]() if failed is None else failed
        self._fits, self._why = dict[Coupling, Coupling | None](), dict[str, str]()
        self._problems: dict[tuple[Coupling, ...], str] = {}
        self._known, self._multiples = known, {coupling.name: multiple for coupling, multiple in known}
        self._masked = masked_copy(model, [removal for removals in known.values() for removal in removals])
        self._done, self.reference = done, reference_of(self._masked)

    def problem(self, couplings: Sequence[Coupling]) -> str:
        """What is wrong with the model without the zero units of these couplings; empty if nothing is."""
        if (tried := self._problems.get(tuple(couplings))) is None:
            tried = self._problems[tuple(couplings)] = self._problem(couplings)
        return tried

    def _problem(self, couplings: Sequence[Coupling]) -> str:
        try:
            removals = self._removals(couplings)
            small = without_units(self._masked, removals, discarded=True)[0]
        except SparsityError as e:
            return str(e)
        finally:
            self._done()
        comparison = compared(self.reference, small, discarded=True)
        return comparison if isinstance(comparison, str) else ""

    def _removals(self, couplings: Sequence[Coupling]) -> list[Removal]:
        multiples = {coupling.name: self._multiples.get(coupling.name, 1) for coupling in couplings}
        return find_removals(self._masked, couplings, multiples, self._known)

    def removed(self, couplings: Sequence[Coupling]) -> tuple[list[Removal], nn.Module, Compaction]:
        """The removals of these couplings; the smaller model and the report as of `verified`, with its config."""
        removals = self._removals(couplings)
        return removals, *verified(self.reference, removals, with_config=True)

    def misfit(self, couplings: Sequence[Coupling], kept: int = 1) -> str:
        """How the model without the zero units of these couplings differs from one constructed from its config.

        At least so many units are kept in each scope.
        """
        removals = self._removals(couplings)
        drops = [(r, ~r.keep) for r in removals]
        removals = [replace(r, keep=r.keep | (drop & (drop.cumsum(-1) <= kept - r.kept))) for r, drop in drops]
        small, _, notes, _ = without_units(self._masked, removals, discarded=True)
        redo_weight_norms(small, self.reference.normed)
        why = fit_config(self._masked, small, removals, self.reference, discarded=True)[1]
        return "; ".join([why, *(note.partition(",")[0] for note in notes)]) if why else ""

    def divide(self, couplings: Sequence[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """The couplings that can be removed together, with the attributes that this changes; and why others cannot."""
        good, failing = self._split(list(couplings))
        fits = {coupling: self._fits.get(coupling) for coupling in failing}
        good, more = self._extended(good, [fit for fit in fits.values() if fit is not None])
        return good, {coupling: why for coupling, why in failing.items() if fits[coupling] is None} | more

    def fitted(self, coupling: Coupling, together: int = 1) -> Coupling | None:
        """The coupling with the fewest further `attrs` with which it can be removed; None if none were found.

        With `together=1`, these are tried in turn: all candidates; those outside of configs; these and the widths that
        forwards read; each of the nearest alone. With more, only sets of `together` of the nearest are tried.
        """
        if self.has_failed(coupling, together):
            return None
        fit = self._fitted(coupling, together)
        self._failed[_kind(coupling, together)] += fit is None
        return fit

    def has_failed(self, coupling: Coupling, together: int = 1) -> bool:
        """Whether enough couplings of its kind have failed."""
        return self._failed[_kind(coupling, together)] >= _ENOUGH

    def _fitted(self, coupling: Coupling, together: int) -> Coupling | None:
        if not self.problem([coupling]):
            return coupling
        axes = {p: a for p, a in candidate_attrs(self._masked, coupling).items() if p not in coupling.attrs}

        def with_attrs(paths: Sequence[str]) -> Coupling:
            return replace(coupling, attrs={**coupling.attrs, **{path: axes[path] for path in paths}})

        near = [path for path in axes if "config" not in path.split(".")]
        nearest, widths = list(axes)[:_NEAREST], width_attrs(self._masked, coupling)
        tries = [list(axes), near, [*near, *widths] if widths else []] if together == 1 else []
        axes |= widths
        for paths in tries:
            if paths and not self.problem([with_attrs(paths)]):
                for path in reversed(paths):  # the farthest are dropped first
                    fewer = [other for other in paths if other != path]
                    paths = paths if self.problem([with_attrs(fewer)]) else fewer
                return with_attrs(paths)
        sets: list[tuple[str, ...]] = [(path,) for path in nearest]
        if together > 1:  # one of each set must change something by itself
            idle = {path for path in nearest if self.problem([with_attrs([path])]) == self.problem([coupling])}
            sets = [paths for paths in itertools.combinations(nearest, together) if not idle.issuperset(paths)]
        return next((fit for fit in map(with_attrs, sets) if not self.problem([fit])), None)

    def _split(self, couplings: list[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Divide couplings by trials of halves: those that can be removed together as they are; why others cannot."""
        stopped = {c: NOT_TRIED + self._why.get(_kind(c), "") for c in couplings if self.has_failed(c)}
        if stopped:
            good, failing = self._split([coupling for coupling in couplings if coupling not in stopped])
            return good, failing | stopped
        why = self.problem(couplings)
        if why and len(couplings) == 1:
            self._why[_kind(couplings[0])] = why
            self._fits[couplings[0]] = self.fitted(couplings[0])
        if not why or len(couplings) <= 1:  # without any, the model itself may not run
            return ([], dict.fromkeys(couplings, why)) if why else (couplings, {})
        half = len(couplings) // 2
        (good, failing), (others, more) = self._split(couplings[:half]), self._split(couplings[half:])
        good, contradicting = self._extended(good, others)
        return good, failing | more | contradicting

    def _extended(self, good: list[Coupling], others: Sequence[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Extend couplings that can be removed together by those others that can join, at once or one by one."""
        if not good or not others or not self.problem([*good, *others]):
            return [*good, *others], {}
        failing = {}
        for coupling in others:
            if why := self.problem([*good, coupling]):
                failing[coupling] = f"together with others it {why}"
            else:
                good = [*good, coupling]
        return good, failing


def in_config(
    model: nn.Module,
    discovery: Discovery,
    reference_of: Callable[[nn.Module], Reference],
    ratio: float,
    multiples: Mapping[str, int],
    any_width: bool = False,
) -> tuple[Discovery, dict[str, int]]:
    """Leave out the couplings of a transformers model whose removal its config cannot hold, by trials of each.

    Couplings that fail are tried again together with others that have as many units, since one field may hold both.
    Trials are of a short twin, if its config describes that.
    Also returns `multiples`. With `any_width`, a number in it is raised if the config cannot hold every multiple of it.
    """
    twin, trials, couplings = make_twin(model, discovery.couplings), None, discovery.couplings
    with contextlib.suppress(SparsityError):
        if twin is not None:
            short = Trials(twin.model, _random(twin.model, twin.couplings, ratio, multiples), reference_of)
            trials, couplings = (None, couplings) if short.misfit([]) else (short, twin.couplings)
    trials = trials or Trials(model, _random(model, couplings, ratio, multiples), reference_of)
    together = {coupling: [coupling] for coupling in couplings}
    failing = {coupling: why for coupling in couplings if (why := trials.misfit([coupling]))}
    units = {coupling: coupling.bind(trials.reference.model)[0].grid[-1] for coupling in failing}
    for number in dict.fromkeys(units.values()):
        equal = [coupling for coupling in failing if units[coupling] == number]
        if len(equal) > 1 and not trials.misfit(equal):
            failing = {coupling: why for coupling, why in failing.items() if coupling not in equal}
            together |= dict.fromkeys(equal, equal)
    widths = dict(multiples)
    for coupling in (c for c in couplings if any_width and c not in failing):
        whole, name = coupling.bind(trials.reference.model)[0].grid[-1], coupling.name
        steps = [m for m in range(multiples[name], whole, multiples[name]) if whole % m == 0] or [multiples[name]]
        fit = (m for m in steps if not trials.misfit(together[coupling], (whole - 1) // m * m))
        widths[name] = next(fit, whole)
    kept = [at for at, coupling in enumerate(couplings) if coupling not in failing]
    reasons = ((c.name, f"the config cannot hold it ({why}); uniform=False removes it") for c, why in failing.items())
    fitting = replace(
        discovery,
        couplings=tuple(discovery.couplings[at] for at in kept),
        counts=tuple(discovery.counts[at] for at in kept),
        left_out=(*discovery.left_out, *reasons),
    )
    return fitting, widths


def _kind(coupling: Coupling, together: int = 1) -> str:
    """Name the members of a coupling without the numbers in their names, and how many attributes are tried together."""
    return re.sub(r"\d+|\*+", "*", " ".join(coupling.members)) + f"{[*coupling.members.values()]} {together}"


def _random(
    model: nn.Module, couplings: Sequence[Coupling], ratio: float, multiple_of: int | Mapping[str, int]
) -> Known:
    """Removals of random units of all couplings, the same in every call; at least one multiple, if possible."""
    generator, known = torch.Generator().manual_seed(0), Known()
    for coupling in couplings:
        multiple = multiple_of.get(coupling.name, 1) if isinstance(multiple_of, Mapping) else multiple_of
        removals = known[replace(coupling, attrs={}), multiple] = []
        for bound in coupling.bind(model):
            units, kept = bound.grid[-1], _kept(bound, ratio)
            kept = rounded(min(kept, units - multiple) if units > multiple else kept, units, multiple)
            keep = torch.rand(bound.grid, generator=generator).argsort(-1) < kept
            removals.append(Removal(coupling=bound, keep=keep))
    return known


def _kept(bound: BoundCoupling, ratio: float) -> int:
    return max(1, sparsity_to_nnz(ratio, bound.grid[-1], "ratio: "))


def by_name(numbers: Any, couplings: Iterable[Coupling]) -> Any:
    """Return {name of a coupling: number} for numbers of which some are by kinds; one number stays as it is."""
    if not isinstance(numbers, Mapping):
        return numbers
    return {coupling.name: numbers[coupling.kind] for coupling in couplings if coupling.kind in numbers} | dict(numbers)


def _merges(
    model: nn.Module, good: Sequence[Coupling], failing: Iterable[Coupling]
) -> list[tuple[Coupling, list[Coupling]]]:
    """Merged couplings that may be removed although their parts cannot, since all have one attribute as candidate."""
    sharing: dict[str, list[Coupling]] = {}  # by the attribute
    for coupling in failing:
        for path in candidate_attrs(model, coupling):
            if "config" not in path.split("."):  # shared by all layers
                sharing.setdefault(path.replace("**", "*"), []).append(coupling)
    for coupling in good:
        for path in sharing.keys() & {path.replace("**", "*") for path in coupling.attrs}:
            sharing[path].append(coupling)
    merges = []
    for parts in dict.fromkeys(map(tuple, sharing.values())):
        whole: Coupling | None = parts[0]
        for part in parts[1:]:
            whole = whole and merged_couplings(whole, part, model)
        if whole is not None and len(parts) > 1:
            merges.append((whole, list(parts)))
    return merges
