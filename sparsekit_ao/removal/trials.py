"""Which plans can be carried out together: found by trials, each of which removes units that are zero.

The outputs of the smaller model are compared with those of the larger one, in which the same units are zero.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..coupling.coupling import merged_couplings
from ..errors import SparsityError
from ..masking.normalized import redo_weight_norms
from ..models.names import connected
from ..structure import sparsity_to_nnz
from .arguments import ShrinkRequest
from .compaction import compare_models, kept_units, make_smaller, verify_removal
from .config_fields import ConfigFields
from .plan import ENOUGH, NOT_HELD, NOT_TRIED, Plan, active, removals_of
from .removal_report import ShrinkReport, Size, size_of
from .remove import Removal, masked_copy, round_up
from .score import cost_with, drop_lowest
from .sizes import candidate_attrs, width_attrs
from .verify import Reference, count_flops

_NEAREST = 7  # at most this many candidates for attributes of a coupling are tried one by one, or in pairs

Failures = defaultdict[str, list[str]]  # {family: for each of its couplings that cannot be removed, the reason}


class Trials:
    """Trials of some plans, whose units are zero in one masked model.

    A trial removes the units of some of the plans; those of the others stay as zeros, which changes no output. Several
    objects may share `failures`, to which each adds.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        reference_of: Callable[..., Reference],
        done: Callable[[], object] = lambda: None,
        failures: Failures | None = None,
        fields: ConfigFields | None = None,
    ) -> None:
        self._fields = fields  # if given, a config must hold what is removed
        self.plans, self._failures = list(plans), Failures(list) if failures is None else failures
        self._problems: dict[tuple[object, ...], str] = {}  # {couplings: what `problem` returned for them}
        self._masked = masked_copy(model, removals_of(plans))
        self._done, self.reference = done, reference_of(self._masked, dense=model)
        self.in_training = False  # whether trials also run in training mode, as the final verification does

    def problem(self, plans: Sequence[Plan]) -> str:
        """Return what is wrong with the model without the zero units of these plans, or "" if nothing is."""
        key = tuple((plan.coupling, plan.fields) for plan in plans)
        if key not in self._problems:
            self._problems[key] = self._problem(plans)
            self._done()
        return self._problems[key]

    def _problem(self, plans: Sequence[Plan]) -> str:
        try:
            small = make_smaller(self._masked, removals_of(plans), single_use=True)[0]
        except SparsityError as e:
            return str(e)
        problem = compare_models(self.reference, small, single_use=True).problem
        if problem and not self._problems:  # the first trial
            self.reference.check_repeats()
        problem = problem or (self.reference.not_trainable(small) if self.in_training else "")
        if self._fields is None or problem:
            return problem
        redo_weight_norms(small, self.reference.normed)
        why = self._fields.fit(small, removals_of(plans), self.reference, single_use=True)[1]
        return NOT_HELD.format(why) if why else ""

    def removed(self, plans: Sequence[Plan], fields: ConfigFields | None) -> tuple[nn.Module, ShrinkReport]:
        """Return the smaller model, whose config follows if it can hold the result, and its report."""
        small, report = verify_removal(self.reference, removals_of(plans), fields, by_caller=True)
        if why := self.reference.not_trainable(small):
            raise SparsityError(f"the smaller model {why}")
        if self._fields is not None and report.not_in_config:
            raise SparsityError(NOT_HELD.format(report.not_in_config))
        return small, report

    def tried(self, plans: Sequence[Plan], _: ConfigFields | None) -> tuple[nn.Module, ShrinkReport]:
        """Return the masked model and a report without sizes, if removal succeeds: what a dry run says instead."""
        if why := self.problem(plans):
            raise SparsityError(why)
        none = Size(parameters=0, bytes=0, flops=0)
        couplings = kept_units(removals_of(plans))
        return self._masked, ShrinkReport(
            couplings=couplings, before=none, after=none, difference=math.nan, manifest={}
        )

    def divide(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans, some with more attributes; those that cannot be removed with the others are left out."""
        stopped = [replace(p, left_out=NOT_TRIED + self._failures[_family(p)][-1]) for p in plans if self.is_futile(p)]
        plans = [plan for plan in plans if not self.is_futile(plan)]
        if not plans or not (why := self.problem(plans)):
            return [*plans, *stopped]
        groups = connected({plan: plan.fields for plan in plans})  # one field of a config may count several plans
        if len(groups) == 1:
            fit = self.fitted(plans[0]) if len(plans) == 1 else None
            return [*([fit] if fit else [replace(plan, left_out=why) for plan in plans]), *stopped]
        half = len(groups) // 2
        first = self.divide([*itertools.chain(*groups[:half])])
        second = self.divide([*itertools.chain(*groups[half:])])  # when it is known what failed in the first half
        return [*self._joined(first, second), *stopped]

    def _joined(self, first: list[Plan], second: Sequence[Plan]) -> list[Plan]:
        """Add plans to others, at once or one by one; those that contradict the others are left out."""
        if not active(first) or not self.problem([*active(first), *active(second)]):
            return [*first, *second]
        for group in connected({plan: plan.fields for plan in second}):
            why = self.problem([*active(first), *active(group)]) if active(group) else ""
            text = f"together with others: {why}"
            first = [*first, *(replace(p, left_out=text) if why and not p.left_out else p for p in group)]
        return first

    def is_futile(self, plan: Plan, together: int = 1) -> bool:
        """Return whether couplings of the same family have failed so often that this one is not tried."""
        return len(self._failures[_family(plan, together)]) >= ENOUGH

    def fitted(self, plan: Plan, together: int = 1) -> Plan | None:
        """Return a plan with the further attributes that its removal needs, or None if none were found.

        With `together` above 1, only sets of this many of the nearest candidates are tried.
        """
        if self.is_futile(plan, together):
            return None
        if not (why := self.problem([plan])):
            return plan
        axes = {path: a for path, a in candidate_attrs(self._masked, plan).items() if path not in plan.attrs}

        def fits(paths: Sequence[str]) -> bool:
            return not self.problem([plan.with_attrs({path: axes[path] for path in paths})])

        nearest = list(axes)[:_NEAREST]
        sets: list[Sequence[str]]
        if together == 1:  # all candidates, those outside of configs, these and widths; then each of the nearest alone
            near, widths = [path for path in axes if "config" not in path.split(".")], width_attrs(self._masked, plan)
            sets = [*filter(None, (list(axes), near, [*near, *widths] if widths else [])), *((p,) for p in nearest)]
            axes |= widths
        else:  # sets in which no attribute changes anything by itself are not tried
            idle = {path for path in nearest if self.problem([plan.with_attrs({path: axes[path]})]) == why}
            sets = [paths for paths in itertools.combinations(nearest, together) if not idle.issuperset(paths)]
        paths = next(filter(fits, sets), None)
        if paths is None:
            self._failures[_family(plan, together)].append(why)
            return None
        for path in reversed(paths) if len(paths) > together else ():  # the farthest are dropped first
            fewer = [other for other in paths if other != path]
            paths = fewer if fits(fewer) else paths
        return plan.with_attrs({path: axes[path] for path in paths})

    def merges(self, plans: Sequence[Plan]) -> Iterator[tuple[Plan, tuple[Plan, ...]]]:
        """Yield (merged plan, its parts) for plans that share an attribute and so must be removed together."""
        sharing = dict[str, list[Plan]]()  # {attribute: the plans that share it}
        for plan in (plan for plan in plans if plan.left_out):
            for path in candidate_attrs(self._masked, plan):
                if "config" not in path.split("."):  # all layers share a config
                    sharing.setdefault(path.replace("**", "*"), []).append(plan)
        for plan in active(plans):
            for path in sharing.keys() & {path.replace("**", "*") for path in plan.attrs}:
                sharing[path].append(plan)
        for parts in dict.fromkeys(map(tuple, sharing.values())):
            merged = parts[0].coupling if len(parts) > 1 else None
            for part in parts[1:]:
                merged = merged and merged_couplings(merged, part.coupling, self._masked)
            if merged is not None:
                multiple = next(part.multiple for part in parts if part.name == merged.name)
                yield Plan.of(merged, self._masked, multiple), parts

    def with_unread(self) -> list[Plan]:
        """Return all plans with attributes that seem to count units and may change too without changing outputs.

        Only a branch that the example does not take reads them (with a mask or a cache), or outputs hide them.
        """
        # What may count the units of couplings that share no tensor is left alone, as these may keep different numbers.
        unread = [candidate_attrs(self._masked, plan, inside=True) for plan in self.plans]
        tensors = [plan.tensors for plan in self.plans]
        for one, other in itertools.combinations(range(len(unread)), 2):
            for path in unread[one].keys() & unread[other].keys() if tensors[one].isdisjoint(tensors[other]) else ():
                unread[one].pop(path), unread[other].pop(path)
        pairs = zip(self.plans, unread, strict=True)
        paths_of = [{p: axes for p, axes in paths.items() if p not in plan.attrs} for plan, paths in pairs]
        extended = [plan.with_attrs(paths) for plan, paths in zip(self.plans, paths_of, strict=True)]
        if not any(paths_of) or not self.problem(extended):
            return extended
        plans = self.plans
        for at, path in ((at, path) for at, paths in enumerate(paths_of) for path in paths):
            more = [*plans[:at], plans[at].with_attrs({path: paths_of[at][path]}), *plans[at + 1 :]]
            plans = plans if self.problem(more) else more
        return plans


def find_together(plans: Sequence[Plan], make_trials: Callable[[Sequence[Plan], Failures], Trials]) -> list[Plan]:
    """Return the plans that can be carried out together, some merged, divided or with more `attrs`, and the others."""
    failures = Failures(list)
    trials = make_trials(plans, failures)
    trials.reference.check_lengths()
    found = trials.divide(trials.plans)
    replaced, others = set[Plan](), list[Plan]()  # plans, and those that take their places
    for merged, parts in trials.merges(found):
        if replaced.isdisjoint(parts) and not trials.is_futile(merged):
            one = make_trials([merged], failures)
            if (fit := one.fitted(one.plans[0])) is not None:
                others.append(fit)
                replaced.update(parts)
    for plan in (plan for plan in found if plan.left_out and plan not in replaced):
        if (fit := trials.fitted(replace(plan, left_out=""), together=2)) is not None:
            others.append(fit)
            replaced.add(plan)
        elif len({bound.grid for bound in plan.bound}) > 1:
            # Layers of different widths are stages (as in a ResNet), and the code of each may take another branch.
            layers = trials.divide(replace(plan, left_out="").layers())
            if active(layers):
                others += layers
                replaced.add(plan)
    del trials  # frees its masked model
    found = [*(plan for plan in found if plan not in replaced), *others]
    if replaced:
        # Each of them can be removed by itself, so what else failed in its family is no reason to skip it.
        trials = make_trials(active(found), Failures(list))
        found = [*(plan for plan in found if plan.left_out), *trials.divide(trials.plans)]
    names = [plan.name for plan in plans]  # single layers have other names, and come last
    good = sorted(active(found), key=lambda plan: names.index(plan.name) if plan.name in names else len(names))
    return [*make_trials(good, failures).with_unread(), *(plan for plan in found if plan.left_out)]


def remove_together(
    request: ShrinkRequest, plans: Sequence[Plan], keeps_config: bool
) -> tuple[list[Plan], nn.Module, ShrinkReport]:
    """Remove the units of the lowest scores, and leave plans out until the others can be carried out together.

    A dry run leaves out the same, but copies no values, and its report has no sizes yet.
    """
    left_out, rated = [plan for plan in plans if plan.left_out], active(plans)
    while True:
        # Chosen again each time, since those that remain may have to lose more to meet one budget.
        rated = drop_lowest(rated, request.cost_of, request.highest)
        trials = Trials(request.model, rated, request.reference_of, fields=request.fields if keeps_config else None)
        trials.in_training, removed = request.dry_run, trials.tried if request.dry_run else trials.removed
        try:
            return [*rated, *left_out], *removed(rated, request.fields)
        except SparsityError:
            trials.in_training = True
            tried = trials.divide(rated)
            rated, failing = active(tried), [plan for plan in tried if plan.left_out]
            left_out += failing
            if not failing:  # `divide` has added the attributes that were missing
                return [*rated, *left_out], *removed(rated, request.fields)


def plan_together(request: ShrinkRequest, plans: Sequence[Plan], keeps_config: bool) -> tuple[list[Plan], ShrinkReport]:
    """Return the plans with what they would remove, and the report of a dry run, from a model that copies no values."""
    plans, _, report = remove_together(request, plans, keeps_config)
    lowest = active(plans)

    def size(model: nn.Module) -> Size:
        return size_of(model, count_flops(model, request.example_inputs))

    kept = [[plan.units for plan in lowest], [plan.removals[0].kept for plan in lowest]]
    before, after = (cost_with(size, request.model, lowest, counts) for counts in kept)
    return plans, replace(report, before=before, after=after)


def _family(plan: Plan, together: int = 1) -> str:
    """Return a text that is the same for plans of which only the numbers in their members' names differ."""
    members = plan.coupling.members
    return re.sub(r"\d+|\*+", "*", " ".join(members)) + f"{[*members.values()]} {together}"


def drop_random_units(plans: Sequence[Plan], ratio: float) -> list[Plan]:
    """Return the plans without a fraction of random units: at least one if `multiple` allows, and always the same."""
    generator, random = torch.Generator().manual_seed(0), list[Plan]()
    for plan in plans:
        removals = []
        for bound in plan.bound:
            units = bound.grid[-1]
            kept = sparsity_to_nnz(ratio, units, "ratio: ")
            kept = round_up(min(kept, units - plan.multiple) if units > plan.multiple else kept, units, plan.multiple)
            keep = torch.rand(bound.grid, generator=generator, device="cpu").argsort(-1) < kept
            removals.append(Removal(bound=bound, keep=keep))
        random.append(replace(plan, removals=tuple(removals)))
    return random
