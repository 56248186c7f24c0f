"""Find the plans that can be carried out together, by halves, and change those that fail by themselves."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import nn

from ..coupling.coupling import merged_couplings
from ..errors import SparsityError
from ..models.names import connected
from .arguments import ShrinkCall
from .plan import MAX_FAILURES, NOT_TRIED, Plan, active
from .removal_report import ShrinkReport, Size, size_of
from .score import choose_lowest, cost_with
from .sizes import candidate_attrs, width_attrs
from .trials import Trials
from .verify import count_flops

_NEAREST = 7  # at most this many candidates for attributes of a coupling are tried one by one, or in pairs

Move = Callable[[Plan, Trials], list[Plan]]  # a plan that fails alone -> plans that take its place, or none


def search(plans: Sequence[Plan], trials: Trials, moves: Sequence[Move] = ()) -> list[Plan]:
    """Return the plans that can be carried out together, and the others with the reason for which they are left out.

    If some fail together, each half of them is searched. A plan that fails alone is replaced by the result of the first
    move that succeeds. Plans that share a field of a config are never separated.
    """
    stopped = [replace(p, left_out=NOT_TRIED + trials.failures[_family(p)][-1]) for p in plans if _is_futile(p, trials)]
    plans = [plan for plan in plans if not _is_futile(plan, trials)]
    if not plans or not (why := trials.problem(plans)):
        return [*plans, *stopped]
    groups = connected({plan: plan.fields for plan in plans})
    if len(groups) > 1:
        first, second = groups[: len(groups) // 2], groups[len(groups) // 2 :]
        found = search([*itertools.chain(*first)], trials, moves)
        added = search([*itertools.chain(*second)], trials, moves)  # later, as failures of the first half count
        return [*_joined(found, added, trials), *stopped]
    instead = next(filter(None, (move(plans[0], trials) for move in moves)), None) if len(plans) == 1 else None
    if instead is None:
        trials.failures[_family(plans[0])].append(why)
    return [*(instead or [replace(plan, left_out=why) for plan in plans]), *stopped]


def _joined(found: list[Plan], added: Sequence[Plan], trials: Trials) -> list[Plan]:
    """Add plans to others, at once or one by one; those that contradict the others are left out."""
    if not active(found) or not trials.problem([*active(found), *active(added)]):
        return [*found, *added]
    for group in connected({plan: plan.fields for plan in added}):
        why = trials.problem([*active(found), *active(group)]) if active(group) else ""
        text = f"together with others: {why}"
        found = [*found, *(replace(p, left_out=text) if why and not p.left_out else p for p in group)]
    return found


def _family(plan: Plan) -> str:
    """Return a text that is the same for plans of which only the numbers in their members' names differ."""
    members = plan.coupling.members
    return re.sub(r"\d+|\*+", "*", " ".join(members)) + f"{[*members.values()]}"


def _is_futile(plan: Plan, trials: Trials) -> bool:
    """Return whether plans of the same family have failed so often that this one is not tried."""
    return len(trials.failures[_family(plan)]) >= MAX_FAILURES


def add_attributes(plan: Plan, trials: Trials) -> list[Plan]:
    """Return the plan with more attributes that change: as few of the candidates as its removal needs."""
    axes = {path: a for path, a in candidate_attrs(trials.masked, plan).items() if path not in plan.attrs}
    near, widths = [path for path in axes if "config" not in path.split(".")], width_attrs(trials.masked, plan)
    # In this order: all candidates, those outside of configs, these and widths, each of the nearest alone.
    sets = [list(axes), near, *([[*near, *widths]] if widths else []), *([path] for path in [*axes][:_NEAREST])]
    return _with_first(plan, trials, axes | widths, filter(None, sets))


def add_two_attributes(plan: Plan, trials: Trials) -> list[Plan]:
    """Return the plan with two of the nearest candidates, of which at least one changes the problem by itself."""
    axes = {path: a for path, a in candidate_attrs(trials.masked, plan).items() if path not in plan.attrs}
    nearest, why = [*axes][:_NEAREST], trials.problem([plan])
    idle = {path for path in nearest if trials.problem([plan.with_attrs({path: axes[path]})]) == why}
    return _with_first(plan, trials, axes, (p for p in itertools.combinations(nearest, 2) if not idle.issuperset(p)))


def _with_first(plan: Plan, trials: Trials, axes: dict[str, str], sets: Iterable[Sequence[str]]) -> list[Plan]:
    """Return the plan with the attributes of the first set that fits, less those that are not needed."""

    def fits(paths: Sequence[str]) -> bool:
        return not trials.problem([plan.with_attrs({path: axes[path] for path in paths})])

    paths = next(filter(fits, sets), ())
    for path in reversed(paths):  # the farthest are dropped first
        fewer = [other for other in paths if other != path]
        paths = fewer if fits(fewer) else paths
    return [plan.with_attrs({path: axes[path] for path in paths})] if paths else []


def divide_into_layers(plan: Plan, trials: Trials) -> list[Plan]:
    """Return plans of single layers if these differ in width, since each stage may run different code."""
    if len({bound.grid for bound in plan.bound}) == 1:
        return []
    layers = search(plan.split(), trials, [add_attributes])
    return layers if active(layers) else []


# The first is tried within the search, the others after couplings that share attributes were merged.
MOVES: tuple[Move, ...] = (add_attributes, add_two_attributes, divide_into_layers)


def find_together(plans: Sequence[Plan], make_trials: Callable[[Sequence[Plan]], Trials]) -> list[Plan]:
    """Return the plans that can be carried out together, some merged, divided or with more `attrs`, and the others."""
    trials = make_trials(plans)
    trials.reference.check_lengths()
    found = search(trials.plans, trials, MOVES[:1])
    merged = _merged_with_sharers(found, trials, make_trials)
    mended = {part: [plan] for plan, parts in merged.items() for part in parts}
    mended |= _mend([plan for plan in found if plan.left_out and plan not in mended], trials)
    if mended:
        instead = dict.fromkeys(itertools.chain(*mended.values()))
        left_out = [plan for plan in (*found, *instead) if plan.left_out and plan not in mended]
        trials = make_trials([plan for plan in active([*found, *instead]) if plan not in mended])
        found = [*left_out, *search(trials.plans, trials, MOVES[:1])]
    names = [plan.name for plan in plans]  # single layers have other names, and come last
    good = sorted(active(found), key=lambda plan: names.index(plan.name) if plan.name in names else len(names))
    del trials  # frees its masked model
    return [*_add_unread_attributes(make_trials(good)), *(plan for plan in found if plan.left_out)]


def _mend(plans: Sequence[Plan], trials: Trials) -> dict[Plan, list[Plan]]:
    """Return {plan that failed: the plans in its place}, for those for which one of the later moves succeeds."""
    mended, failures = dict[Plan, list[Plan]](), Counter[str]()
    for plan in plans:
        moves = MOVES[1:] if failures[_family(plan)] < MAX_FAILURES else ()
        if moved := next(filter(None, (move(replace(plan, left_out=""), trials) for move in moves)), None):
            mended[plan] = moved
        else:
            failures[_family(plan)] += 1
    return mended


def _merged_with_sharers(
    plans: Sequence[Plan], trials: Trials, make_trials: Callable[[Sequence[Plan]], Trials]
) -> dict[Plan, tuple[Plan, ...]]:
    """Return {merged plan: its parts} for plans that share an attribute and can only be removed together."""
    sharing = dict[str, list[Plan]]()  # {attribute: the plans that share it}
    for plan in (plan for plan in plans if plan.left_out):
        for path in candidate_attrs(trials.masked, plan):
            if "config" not in path.split("."):  # all layers share a config
                sharing.setdefault(path.replace("**", "*"), []).append(plan)
    for plan in active(plans):
        for path in sharing.keys() & {path.replace("**", "*") for path in plan.attrs}:
            sharing[path].append(plan)
    found, replaced = dict[Plan, tuple[Plan, ...]](), set[Plan]()
    for parts in dict.fromkeys(map(tuple, sharing.values())):
        coupling = parts[0].coupling if len(parts) > 1 and replaced.isdisjoint(parts) else None
        for part in parts[1:]:
            coupling = coupling and merged_couplings(coupling, part.coupling, trials.masked)
        if coupling is not None:
            multiple = next(part.multiple for part in parts if part.name == coupling.name)
            one = make_trials([Plan.of(coupling, trials.masked, multiple)])
            one.failures = trials.failures
            for plan in active(search(one.plans, one, [add_attributes])):
                found[plan] = parts
                replaced.update(parts)
    return found


def _add_unread_attributes(trials: Trials) -> list[Plan]:
    """Return all plans with attributes that seem to count units and may change too without changing outputs.

    Only a branch that the example does not take reads them (with a mask or a cache), or outputs hide them.
    """
    plans, shared = trials.plans, set[str]()
    unread = {plan: candidate_attrs(trials.masked, plan, inside=True) for plan in plans}
    # An attribute that two couplings without a common tensor list stays, as these may keep different numbers of units.
    for one, other in itertools.combinations(plans, 2):
        if one.tensors.isdisjoint(other.tensors):
            shared |= unread[one].keys() & unread[other].keys()
    paths_of = [{path: axes for path, axes in unread[p].items() if path not in {*p.attrs, *shared}} for p in plans]
    extended = [plan.with_attrs(paths) for plan, paths in zip(plans, paths_of, strict=True)]
    if not any(paths_of) or not trials.problem(extended):
        return extended
    for at, path in ((at, path) for at, paths in enumerate(paths_of) for path in paths):
        more = [*plans[:at], plans[at].with_attrs({path: paths_of[at][path]}), *plans[at + 1 :]]
        plans = plans if trials.problem(more) else more
    return plans


def remove_together(
    call: ShrinkCall, plans: Sequence[Plan], keeps_config: bool
) -> tuple[list[Plan], nn.Module, ShrinkReport]:
    """Remove the units of the lowest scores, and leave plans out until the others can be carried out together.

    A dry run leaves out the same, but copies no values, and its report has no sizes yet.
    """
    left_out, plans = [plan for plan in plans if plan.left_out], active(plans)
    reference_of = call.trial_reference_of if call.dry_run else call.reference_of
    held_by = call.fields if keeps_config else None
    while True:
        # Chosen again each time, since those that remain may have to lose more to meet one budget.
        plans = choose_lowest(plans, call.cost_of, call.ratio)
        trials = Trials(call.model, plans, reference_of, fields=held_by, in_training=True)
        try:
            removed = trials.planned(plans) if call.dry_run else trials.removed(plans, call.fields)
            return [*plans, *left_out], *removed
        except SparsityError:
            found = search(plans, trials)
            if len(active(found)) == len(plans):  # no trial reproduces the failure
                raise
            plans = active(found)
            left_out += (plan for plan in found if plan.left_out)


def plan_together(call: ShrinkCall, plans: Sequence[Plan], keeps_config: bool) -> tuple[list[Plan], ShrinkReport]:
    """Return the plans with what they would remove, and the report of a dry run, from a model that copies no values."""
    plans, _, report = remove_together(call, plans, keeps_config)
    smaller = active(plans)

    def size(model: nn.Module) -> Size:
        return size_of(model, count_flops(model, call.example_inputs))

    kept = [[plan.scope_units for plan in smaller], [plan.removals[0].kept for plan in smaller]]
    before, after = (cost_with(size, call.model, smaller, counts) for counts in kept)
    return plans, replace(report, before=before, after=after)
