"""`removable` finds by trials which couplings `compact` can remove from a model.

A trial removes units that are zero, and compares the outputs of the smaller model with those of the larger one.
"""

import contextlib
import copy
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..coupling import BoundCoupling, Coupling, Discovery, discover
from ..coupling.bound import match_names
from ..coupling.coupling import merged_couplings
from ..errors import SparsityError
from ..masking.normalized import plain_copy, redo_weight_norms
from ..models.names import named_tensors
from ..models.progress import progress_bar
from ..models.running import keyed_generator
from ..sparsifiers.config import Exclusion, excluded_names, names_in_place_of_modules
from ..structure import sparsity_to_nnz
from .compaction import Compaction, Known, check_comparable, compared, find_removals, verified, without_units
from .levels import multiple_for, names_of_outputs, numbers_by_coupling, with_own_names
from .remove import Removal, check_multiple, masked_copy, rounded
from .sizes import candidate_attrs, fit_config, width_attrs
from .twin import Twin, discover_in_twin, make_twin
from .verify import Reference

_NEAREST = 7  # at most this many candidates for attributes of a coupling are tried one by one, or in pairs
_TINY = 0.01  # parameters of at most this absolute value get others in trials
_ENOUGH = 3  # after this many failures in a family (see `_family`), no other coupling of the family is tried
PASSES_ON = (
    "it passes from block to block, and trained models seldom survive its removal; to remove it all the same, name its "
    "kind: ratio={'width': 0.5}, or with one budget max_sparsity={'width': 0.9}"
)
NOT_TRIED = f"not tried, since {_ENOUGH} like it cannot be removed: "

_Failures = defaultdict[str, list[str]]  # {family: for each of its couplings that cannot be removed, the reason}


def removable(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None = None,
    *,
    ratio: float = 0.5,
    exclude: Sequence[Exclusion] = (),
    multiple_of: int | Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
) -> Discovery:
    """Find the couplings that `compact` can remove from a model, and the integer attributes that change with each.

    Random units are made zero in one copy of the model and removed from another copy, and the outputs of both copies
    are compared. If they differ, fewer couplings are tried together, down to single ones. If a single coupling still
    fails, integer attributes of configs and of the modules that contain its tensors (`num_heads`, `config.hidden_size`,
    entries of tuples) are changed too, if they equal the number of units or its product with other sizes. If some
    couplings fail because the forward pass uses one number for them and for others (such as one head size for queries
    and values), all of these couplings are merged. Prune the couplings of the result by `joint_entries`, and then call
    `compact`.

    Args:
        model: The model, which is not changed because copies run.
        example_inputs, tolerance: As for `compact`.
        couplings: The couplings that are tried; None (default) takes those that `discover` finds. If the model has been
            made smaller since they were found, couplings whose sizes no longer fit are replaced by what is found for
            the same tensors.
        ratio: The fraction of the units of every coupling that a trial removes.
        exclude: Names, globs and regular expressions of tensors or modules, modules, and module classes. A layer of a
            coupling is left out if it has such a tensor. The remaining layers are then couplings of their own. A kind
            of couplings ("heads", "width") leaves out all of this kind.
        multiple_of: As for `shrink`.

    Returns:
        A result as of `discover`. Its `left_out` has the couplings that cannot be removed, with the reasons. No two
        couplings have the same name.

    Raises:
        SparsityError: As for `discover`; or a coupling names a tensor that the model does not have; or the model does
            not run, or returns no tensor, only zeros, or a nan.

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
    exclude = names_in_place_of_modules(model, exclude)
    how: dict[str, Any] = {"ratio": ratio, "exclude": exclude, "multiple_of": multiple_of, "tolerance": tolerance}
    return find_removable(plain_copy(model), example_inputs, couplings, **how)


def find_removable(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None,
    *,
    ratio: float,
    exclude: Sequence[Exclusion],
    multiple_of: int | Mapping[str, int] | None,
    tolerance: float = 1e-5,
    named: Collection[str] | None = None,
    caller_verifies: bool = False,
) -> Discovery:
    """Find couplings as `removable` does, on a short twin if there is one that serves, else on the whole model.

    Couplings of the kind "width" are left out unless they are `named`; None tries all. With `caller_verifies`, the
    caller must check the result on the whole model; only what was discovered in a short model is checked here.
    """
    numbers = multiple_of.values() if isinstance(multiple_of, Mapping) else [multiple_of]
    for number in numbers if multiple_of is not None else ():
        check_multiple(number, "")  # otherwise trials would fail, and every coupling be left out for this reason
    how: dict[str, Any] = {"ratio": ratio, "exclude": exclude, "multiple_of": multiple_of, "named": named}
    reference_of = partial(Reference, inputs=example_inputs, tolerance=tolerance)
    if couplings is not None:
        search_by_trials = partial(removable, model, example_inputs, tolerance=tolerance)
        fitting, left_out = _refitted(model, couplings, [partial(discover, model, example_inputs), search_by_trials])
        given = Discovery(couplings=tuple(fitting), counts=(), frozen=(), left_out=tuple(left_out))
        return _removable_part(model, given, reference_of, **how, verify_whole=not caller_verifies)
    if caller_verifies and (short := discover_in_twin(model, example_inputs)) is not None:
        with contextlib.suppress(_TwinError):  # what was discovered in a short model is always verified
            return _removable_part(model, short, reference_of, **how, verify_whole=True, may_try_whole=False)
    found = discover(model, example_inputs)
    return _removable_part(model, found, reference_of, **how, verify_whole=not caller_verifies)


def _for_trials(model: nn.Module) -> nn.Module:
    """Return a copy that shows what is wrong with a removal; parameters are shared, except for those that change."""
    shared: dict[int, Tensor] = {id(p): p for p in model.parameters()}
    for name, p in model.named_parameters():
        is_factor = p.is_floating_point() and p.numel() > 0 and not name.endswith("bias")
        # What is removed in a branch with a factor near zero, as of LayerScale, would change nothing measurable.
        if is_factor and float(p.detach().abs().max()) < _TINY:
            values = torch.rand(p.shape, generator=keyed_generator(0, name), dtype=torch.float32, device="cpu")
            is_positive = p.ndim < 2 or bool((p > 0).all())  # such as a standard deviation
            values = values + 0.5 if is_positive else (2 * values - 1) / math.sqrt(p[0].numel())
            shared[id(p)] = nn.Parameter(values.to(p), p.requires_grad)
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict") and getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = "eager"  # reads integers that torch's attention reads only with a mask
    return copied


class _TwinError(Exception):
    """Raised if what was found in a twin does not hold for the whole model."""


def _removable_part(
    model: nn.Module,
    discovery: Discovery,
    reference_of: Callable[..., Reference],
    *,
    ratio: float,
    exclude: Sequence[Exclusion],
    multiple_of: int | Mapping[str, int] | None,
    named: Collection[str] | None,
    verify_whole: bool,
    may_try_whole: bool = True,
) -> Discovery:
    """Return a discovery with the couplings that can be removed, found by trials.

    Without `may_try_whole`, raise `_TwinError` if there is no twin, or what was found in it cannot be used.
    """
    kinds = {"width", *(coupling.kind for coupling in discovery.couplings)}
    excluded = excluded_names(model, exclude, dict(named_tensors(model)), kinds)
    tried, left_out = _tried(model, discovery, excluded, ratio, named)
    # If `multiple_of` gives the layers of one coupling different numbers, the trials take that of the first layer.
    numbers = numbers_by_coupling(model, tried, multiple_of, 1, "multiple_of")
    multiples = {c.name: multiple_for(model, c) if numbers[c.name] is None else numbers[c.name] for c in tried}
    elements = sum(p.numel() for p in model.parameters())
    with progress_bar(None, "removable", " compactions", elements=elements) as bar:

        def make_trials(running: nn.Module, some: Sequence[Coupling], failures: _Failures | None = None) -> Trials:
            known = _random_removals(running, some, ratio, multiples)
            with contextlib.suppress(SparsityError):  # a model may not run with random values, as of probabilities
                return Trials(_for_trials(running), known, reference_of, bar.update, failures)
            return Trials(running, known, reference_of, bar.update, failures)

        def found_in(twin: Twin) -> tuple[list[Coupling], dict[Coupling, str]] | None:
            try:
                good, failing = _divided(twin.model, twin.couplings, partial(make_trials, twin.model))
                good = [twin.in_whole(coupling) for coupling in good]
                problem = make_trials(model, good).problem(good) if verify_whole else ""
            except SparsityError:  # such as: the twin, or the whole model, does not run
                return None
            return None if problem else (good, failing)

        twin = make_twin(model, tried)
        found = None if twin is None else found_in(twin)
        if found is None and not may_try_whole:
            raise _TwinError
        good, failing = found or _divided(model, tried, partial(make_trials, model))
    names = [coupling.name for coupling in tried]  # single layers have other names, and come last
    good.sort(key=lambda coupling: names.index(coupling.name) if coupling.name in names else len(names))
    good, of_layers = without_layers(model, good, partial(_why_excluded, excluded=excluded))
    left_out += [*of_layers, *((coupling.name, why) for coupling, why in failing.items())]
    return with_couplings(model, replace(discovery, left_out=()), good, left_out)


def with_couplings(
    model: nn.Module, discovery: Discovery, couplings: Sequence[Coupling], left_out: Iterable[tuple[str, str]] = ()
) -> Discovery:
    """Return a discovery with these couplings in place of its own, and with more that are left out."""
    counts = tuple((len(bound), bound[0].grid[-1]) for bound in (coupling.bind(model) for coupling in couplings))
    return replace(discovery, couplings=tuple(couplings), counts=counts, left_out=(*discovery.left_out, *left_out))


def _tried(
    model: nn.Module,
    discovery: Discovery,
    excluded: Mapping[str, str],
    ratio: float,
    named: Collection[str] | None,
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """Return the couplings that are tried, with names that differ, and (name, reason) of those that are left out."""
    tried, left_out = list[Coupling](), list(discovery.left_out)
    for coupling in with_own_names(discovery.couplings):
        bindings = coupling.bind(model)
        reasons = [_why_excluded(bound, excluded) for bound in bindings]
        why = reasons[0] if all(reasons) else ""
        if not why and coupling.lists:
            why = "its units are modules of a list; prune them by its `entries`, and call compact with a tolerance"
        if not why and named is not None and coupling.kind == "width":
            names = {coupling.name, coupling.layer_of, "width"}
            names = names.union(*(names_of_outputs(model, bound) for bound in bindings))
            why = "" if names & {*named} else PASSES_ON
        if not why and all(_count_kept(bound, ratio) == bound.grid[-1] for bound in bindings):
            why = f"a ratio of {ratio} drops none of its units: {bindings[0].grid[-1]} in each scope"
        if why:
            left_out.append((coupling.name, why))
        else:
            tried.append(coupling)
    return tried, left_out


def without_layers(
    model: nn.Module, couplings: Sequence[Coupling], why_not: Callable[[BoundCoupling], str]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """Divide couplings that have layers to leave out; return the others, and (name, reason) of those layers."""
    kept, left_out = list[Coupling](), list[tuple[str, str]]()
    for coupling in couplings:
        reasons = [why_not(bound) for bound in coupling.bind(model)]
        layers = coupling.of_layers(model) if any(reasons) and not all(reasons) else [coupling]
        for layer, why in zip(layers, reasons, strict=False):  # there are more reasons, all "", if it is not divided
            if why:
                left_out.append((layer.name, why))
            else:
                kept.append(layer)
    return with_own_names(kept), left_out


def _why_excluded(bound: BoundCoupling, excluded: Mapping[str, str]) -> str:
    """Return the reason for which the kind or the first excluded member is excluded, or "" if none is."""
    return next((excluded[name] for name in (bound.kind, *(m.fqn for m in bound.members)) if name in excluded), "")


def _refitted(
    model: nn.Module, couplings: Sequence[Coupling], searches: Sequence[Callable[[], Discovery]]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """Replace couplings whose sizes do not fit the model by those that are found for the same tensors.

    The searches are called in turn while couplings wait to be replaced. Return the couplings that fit, and (name,
    reason) of those for which no replacement was found.
    """
    fitting, stale = list[Coupling](), dict[Coupling, SparsityError]()
    for coupling in couplings:
        try:
            coupling.bind(model)
            fitting.append(coupling)
        except SparsityError as e:
            if not _tensor_sets(coupling, model):
                raise
            stale[coupling] = e
    for search in searches:
        candidates = {found: _tensor_sets(found, model) for found in search().couplings} if stale else {}
        for coupling in [*stale]:
            wanted = _tensor_sets(coupling, model)
            # every layer of these is also a layer of `coupling`
            same = [found for found, sets in candidates.items() if sets <= wanted]
            fitting += [replace(same[0], name=coupling.name)] if len(same) == 1 else same
            if same:
                del stale[coupling]
    return fitting, [(coupling.name, f"it no longer fits the model: {why}") for coupling, why in stale.items()]


def _tensor_sets(coupling: Coupling, model: nn.Module) -> set[frozenset[tuple[str, str]]]:
    """Return a set of (tensor, axes) for each layer of a coupling; no sets if a member matches no tensor."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    layers: dict[tuple[str, ...], set[tuple[str, str]]] = {}
    for member, axes in coupling.members.items():
        axes = re.sub(r"\s*(\d+ *\+|\+ *\d+)\s*", "", axes)  # without the lengths of concatenated parts
        if not (matches := match_names(member, names)):
            return set()
        for captured, fqns in matches.items():
            layers.setdefault(captured, set()).update((fqn, axes) for fqn in fqns)
    return {frozenset(layer) for layer in layers.values()}


def _divided(
    model: nn.Module, couplings: Sequence[Coupling], make_trials: Callable[[Sequence[Coupling], _Failures], "Trials"]
) -> tuple[list[Coupling], dict[Coupling, str]]:
    """Divide couplings by trials into those that can be removed together, and {coupling: reason} of the others.

    Some of the first are merged, divided into layers, or have more `attrs`.
    """
    failures = _Failures(list)
    first = make_trials(couplings, failures)
    first.reference.check_lengths()
    good, failing = first.divide(couplings)
    fitted, replaced = list[Coupling](), set[Coupling]()  # couplings that replace others, and the replaced ones
    for merged, parts in _merges(model, good, failing):
        is_open = replaced.isdisjoint(parts) and not first.has_failed(merged)
        if is_open and (fit := make_trials([merged], failures).fitted(merged)):
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
        # All of these can be removed by themselves, so what else failed in their families is no reason to skip them.
        good, more = make_trials(good, _Failures(list)).divide(good)
        failing = {coupling: why for coupling, why in failing.items() if coupling not in replaced} | of_layers | more
    return make_trials(good, failures).with_unread(good), failing


class Trials:
    """Trials, each of which removes units that are zero in one masked model, and checks the smaller model.

    In the masked model, a copy, all units that `known` drops are zero, so those that a trial does not remove stay as
    zeros. Several objects may share `failures`, to which each adds.
    """

    def __init__(
        self,
        model: nn.Module,
        known: Known,
        reference_of: Callable[..., Reference],
        done: Callable[[], object] = lambda: None,
        failures: _Failures | None = None,
    ) -> None:
        self._failures = _Failures(list) if failures is None else failures
        self._fits = dict[Coupling, Coupling | None]()  # {coupling that fails: what `fitted` returned for it}
        self._problems: dict[tuple[Coupling, ...], str] = {}  # {couplings: what `problem` returned for them}
        self._known, self._multiples = known, {coupling.name: multiple for coupling, multiple in known}
        self._masked = masked_copy(model, [removal for removals in known.values() for removal in removals])
        self._done, self.reference = done, reference_of(self._masked, dense=model)
        self.in_training = False  # whether trials also run in training mode, as the final verification does

    def problem(self, couplings: Sequence[Coupling]) -> str:
        """Return what is wrong with the model without the zero units of these couplings, or "" if nothing is."""
        key = tuple(couplings)
        if key not in self._problems:
            self._problems[key] = self._problem(couplings)
            self._done()
        return self._problems[key]

    def _problem(self, couplings: Sequence[Coupling]) -> str:
        try:
            small = without_units(self._masked, self._removals(couplings), single_use=True)[0]
        except SparsityError as e:
            return str(e)
        comparison = compared(self.reference, small, single_use=True)
        if isinstance(comparison, str) and not self._problems:  # the first trial
            self.reference.check_repeats()
        if isinstance(comparison, str):
            return comparison
        return self.reference.not_trainable(small) if self.in_training else ""

    def _removals(self, couplings: Sequence[Coupling]) -> list[Removal]:
        multiples = {coupling.name: self._multiples.get(coupling.name, 1) for coupling in couplings}
        return find_removals(self._masked, couplings, multiples, self._known)

    def removed(self, couplings: Sequence[Coupling]) -> tuple[list[Removal], nn.Module, Compaction]:
        """Return the removals, the smaller model, whose config follows if it can hold the result, and its report."""
        removals = self._removals(couplings)
        small, report = verified(self.reference, removals, with_config=True)
        if why := self.reference.not_trainable(small):
            raise SparsityError(f"the smaller model {why}")
        return removals, small, report

    def misfit(self, couplings: Sequence[Coupling], kept: int = 1) -> str:
        """Return how the model without the zero units of these couplings differs from what its config describes, or "".

        At least `kept` units are kept in each scope; where fewer would be, the first zero units stay.
        """
        removals = self._removals(couplings)
        # Each scope keeps the first of its dropped units too, until it keeps `kept`.
        removals = [replace(r, keep=r.keep | (~r.keep & ((~r.keep).cumsum(-1) <= kept - r.kept))) for r in removals]
        small, _, notes, _ = without_units(self._masked, removals, single_use=True)
        redo_weight_norms(small, self.reference.normed)
        why = fit_config(self._masked, small, removals, self.reference, single_use=True)[1]
        return "; ".join([why, *(note.partition(",")[0] for note in notes)]) if why else ""

    def divide(self, couplings: Sequence[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Return the couplings that can be removed together, some with more `attrs`, and {other coupling: reason}."""
        good, failing = self._split(list(couplings))
        fits = {coupling: self._fits.get(coupling) for coupling in failing}  # `_split` has looked for them
        found = [fit for fit in fits.values() if fit is not None]  # each can be removed alone, perhaps not all together
        good, more = self._extended(good, found) if good else self._extended(found[:1], found[1:])
        return good, {coupling: why for coupling, why in failing.items() if fits[coupling] is None} | more

    def with_unread(self, couplings: Sequence[Coupling]) -> list[Coupling]:
        """Add attributes that seem to count units and may change too without changing outputs, to all couplings."""

        def extended(coupling: Coupling, paths: Mapping[str, str]) -> Coupling:
            return replace(coupling, attrs={**coupling.attrs, **paths, **coupling.attrs})

        # Only a branch that the example does not take reads them (with a mask or a cache), or outputs hide it. What may
        # count the units of couplings that share no tensor is left alone, as these may keep different numbers.
        unread = [candidate_attrs(self._masked, coupling, inside=True) for coupling in couplings]
        tensors = [{m.fqn for bound in c.bind(self._masked) for m in bound.members} for c in couplings]
        for one, other in itertools.combinations(range(len(couplings)), 2):
            for path in unread[one].keys() & unread[other].keys() if tensors[one].isdisjoint(tensors[other]) else ():
                unread[one].pop(path), unread[other].pop(path)
        found = list(map(extended, couplings, unread))
        if found == couplings or not self.problem(found):
            return found
        found = list(couplings)
        for at, paths in enumerate(unread):
            for path in (path for path in paths if path not in couplings[at].attrs):
                more = [*found[:at], extended(found[at], {path: paths[path]}), *found[at + 1 :]]
                found = found if self.problem(more) else more
        return found

    def fitted(self, coupling: Coupling, together: int = 1) -> Coupling | None:
        """Return a coupling with the further `attrs` that its removal needs, or None if none were found.

        With `together` above 1, only sets of this many of the nearest candidates are tried.
        """
        if self.has_failed(coupling, together):
            return None
        fit = self._fitted(coupling, together)
        if fit is None:
            self._failures[_family(coupling, together)].append(self.problem([coupling]))
        return fit

    def has_failed(self, coupling: Coupling, together: int = 1) -> bool:
        """Return whether couplings of the same family have failed so often that this one is not tried."""
        return len(self._failures[_family(coupling, together)]) >= _ENOUGH

    def _fitted(self, coupling: Coupling, together: int) -> Coupling | None:
        if not self.problem([coupling]):
            return coupling
        axes = {p: a for p, a in candidate_attrs(self._masked, coupling).items() if p not in coupling.attrs}

        def with_attrs(paths: Sequence[str]) -> Coupling:
            return replace(coupling, attrs={**coupling.attrs, **{path: axes[path] for path in paths}})

        near = [path for path in axes if "config" not in path.split(".")]
        nearest, widths = list(axes)[:_NEAREST], width_attrs(self._masked, coupling)
        # All candidates, those outside of configs, these and the widths that forwards read; each nearest alone.
        tries = [list(axes), near, [*near, *widths] if widths else []] if together == 1 else []
        axes |= widths  # only now, because `nearest` must not contain widths
        for paths in tries:
            if paths and not self.problem([with_attrs(paths)]):
                for path in reversed(paths):  # the farthest are dropped first
                    fewer = [other for other in paths if other != path]
                    paths = paths if self.problem([with_attrs(fewer)]) else fewer
                return with_attrs(paths)
        sets: list[tuple[str, ...]] = [(path,) for path in nearest]
        if together > 1:  # sets in which no attribute changes anything by itself are not tried
            idle = {path for path in nearest if self.problem([with_attrs([path])]) == self.problem([coupling])}
            sets = [paths for paths in itertools.combinations(nearest, together) if not idle.issuperset(paths)]
        return next((fit for fit in map(with_attrs, sets) if not self.problem([fit])), None)

    def _split(self, couplings: list[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Return the couplings that can be removed together as they are, and {other: reason}, by trials of halves."""
        if stopped := {c: NOT_TRIED + self._failures[_family(c)][-1] for c in couplings if self.has_failed(c)}:
            good, failing = self._split([coupling for coupling in couplings if coupling not in stopped])
            return good, failing | stopped
        if not (why := self.problem(couplings)):
            return couplings, {}
        if len(couplings) <= 1:  # an empty list fails if the model itself does not run
            for coupling in couplings:
                self._fits[coupling] = self.fitted(coupling)
            return [], dict.fromkeys(couplings, why)
        half = len(couplings) // 2
        # The second half is divided last, when it is known what failed in the first one.
        (good, failing), (others, more) = self._split(couplings[:half]), self._split(couplings[half:])
        good, contradicting = self._extended(good, others)
        return good, failing | more | contradicting

    def _extended(self, good: list[Coupling], others: Sequence[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Add others to couplings that can be removed together, at once or one by one.

        The others are known to be removable as long as none of `good` is removed. Also returns {other: reason} of those
        that are not added.
        """
        if not good or not others or not self.problem([*good, *others]):
            return [*good, *others], {}
        failing = {}
        for coupling in others:
            if why := self.problem([*good, coupling]):
                failing[coupling] = f"together with others: {why}"
            else:
                good = [*good, coupling]
        return good, failing


def in_config(
    model: nn.Module,
    discovery: Discovery,
    reference_of: Callable[..., Reference],
    ratio: float,
    multiples: Mapping[str, int],
    any_width: bool = False,
) -> tuple[Discovery, dict[str, int]]:
    """Leave out the couplings of a transformers model whose removal its config cannot hold, by trials of each.

    With `any_width`, couplings may later keep any multiple of their number in `multiples`. Each number is then raised
    until the config can express its largest multiple below the number of units, or else to the number of units.
    """
    twin, couplings, trials = make_twin(model, discovery.couplings), discovery.couplings, None
    with contextlib.suppress(SparsityError):  # the twin does not run
        if twin is not None:
            short = Trials(twin.model, _random_removals(twin.model, twin.couplings, ratio, multiples), reference_of)
            if not short.misfit([]):
                trials, couplings = short, twin.couplings
    trials = trials or Trials(model, _random_removals(model, couplings, ratio, multiples), reference_of)
    together = {coupling: [coupling] for coupling in couplings}  # {coupling: those that one field holds with it}
    failing = {coupling: why for coupling in couplings if (why := trials.misfit([coupling]))}
    units_of = {coupling: coupling.bind(trials.reference.model)[0].grid[-1] for coupling in couplings}
    names = {c: {m.fqn for bound in c.bind(trials.reference.model) for m in bound.members} for c in failing}
    # One field may hold the number of several couplings, so failing ones with as many units are tried together.
    for number in dict.fromkeys(units_of[coupling] for coupling in failing):
        equal = [coupling for coupling in failing if units_of[coupling] == number]
        while len(equal) > 1 and (why := trials.misfit(equal)):
            misfit = why.partition(" is ")[0]  # a tensor whose number no field holds
            fewer = [coupling for coupling in equal if misfit not in names[coupling]]
            equal = fewer if fewer != equal else []
        if len(equal) > 1:
            failing = {coupling: why for coupling, why in failing.items() if coupling not in equal}
            together |= dict.fromkeys(equal, equal)
    raised = dict(multiples)
    for coupling in (c for c in couplings if any_width and c not in failing):
        units, multiple = units_of[coupling], multiples[coupling.name]
        steps = [m for m in range(multiple, units, multiple) if units % m == 0] or [multiple]
        fitting = (m for m in steps if not trials.misfit(together[coupling], (units - 1) // m * m))
        raised[coupling.name] = next(fitting, units)
    kept = [at for at, coupling in enumerate(couplings) if coupling not in failing]
    reasons = (
        (c.name, f"the config cannot hold it ({why}); keep_config=False removes it") for c, why in failing.items()
    )
    held = replace(
        discovery,
        couplings=tuple(discovery.couplings[at] for at in kept),
        counts=tuple(discovery.counts[at] for at in kept),
        left_out=(*discovery.left_out, *reasons),
    )
    return held, raised


def _family(coupling: Coupling, together: int = 1) -> str:
    """Return a text that is the same for couplings of which only the numbers in their members' names differ."""
    return re.sub(r"\d+|\*+", "*", " ".join(coupling.members)) + f"{[*coupling.members.values()]} {together}"


def _random_removals(
    model: nn.Module, couplings: Sequence[Coupling], ratio: float, multiples: Mapping[str, int]
) -> Known:
    """Return removals of random units of all couplings, the same in every call.

    At least one unit is dropped from a scope that has more units than the coupling's number in `multiples`.
    """
    generator, known = torch.Generator().manual_seed(0), Known()
    for coupling in couplings:
        multiple = multiples.get(coupling.name, 1)
        removals = known[replace(coupling, attrs={}), multiple] = []
        for bound in coupling.bind(model):
            units, kept = bound.grid[-1], _count_kept(bound, ratio)
            kept = rounded(min(kept, units - multiple) if units > multiple else kept, units, multiple)
            keep = torch.rand(bound.grid, generator=generator, device="cpu").argsort(-1) < kept
            removals.append(Removal(bound=bound, keep=keep))
    return known


def _count_kept(bound: BoundCoupling, ratio: float) -> int:
    """Return how many units of a scope stay if a fraction of them is removed: at least one."""
    return max(1, sparsity_to_nnz(ratio, bound.grid[-1], "ratio: "))


def _merges(
    model: nn.Module, good: Sequence[Coupling], failing: Iterable[Coupling]
) -> list[tuple[Coupling, list[Coupling]]]:
    """Return (merged coupling, its parts) for couplings that share an attribute and so must be removed together."""
    sharing: dict[str, list[Coupling]] = {}  # {attribute: the couplings that share it}
    for coupling in failing:
        for path in candidate_attrs(model, coupling):
            if "config" not in path.split("."):  # all layers share a config
                sharing.setdefault(path.replace("**", "*"), []).append(coupling)
    for coupling in good:
        for path in sharing.keys() & {path.replace("**", "*") for path in coupling.attrs}:
            sharing[path].append(coupling)
    merges = []
    for parts in dict.fromkeys(map(tuple, sharing.values())):
        merged: Coupling | None = parts[0]
        for part in parts[1:]:
            merged = merged and merged_couplings(merged, part, model)
        if merged is not None and len(parts) > 1:
            merges.append((merged, list(parts)))
    return merges
