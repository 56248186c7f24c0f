"""Find what can be removed from a model: couplings that are discovered and tried, and plans of them."""

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..coupling import BoundCoupling, Coupling, Discovery, discover
from ..coupling.bound import match_names
from ..errors import SparsityError
from ..masking.normalized import plain_copy
from ..models.names import Exclusion, excluded_names, named_tensors, names_in_place_of_modules
from ..models.progress import progress_bar
from ..models.running import keyed_generator
from .choose import multiple_for, names_of_outputs, values_per_layer
from .compaction import check_comparable
from .config_fields import ConfigFields
from .plan import Plan, active, give_own_names, leave_out_layers
from .remove import check_multiple
from .together import find_together
from .trials import Trials, choose_random_removals
from .twin import Twin, discover_in_twin, make_twin
from .verify import Reference

_TINY = 0.01  # parameters whose absolute values are all smaller are replaced by random ones in trials
_PASSES_ON = (
    "it passes from block to block, and trained models seldom survive its removal; to remove it all the same, name its "
    "kind: ratio={'width': 0.5}, or with one budget max_sparsity={'width': 0.9}"
)


def removable(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None = None,
    *,
    exclude: Sequence[Exclusion] = (),
    tolerance: float = 1e-5,
) -> Discovery:
    """Find the couplings that `compact` can remove from a model, and the integer attributes that change with each.

    Half of the units, chosen at random, are zero in one copy of the model and removed from another copy, and the
    outputs of both copies are compared. If they differ, fewer couplings are tried together, down to single ones. If a
    single coupling still fails, integer attributes of configs and of the modules that contain its tensors (`num_heads`,
    `config.hidden_size`, entries of tuples) are changed too, if they equal the number of units or its product with
    other sizes. If some couplings fail because the forward pass uses one number for them and for others (such as one
    head size for queries and values), all of these couplings are merged. Prune the couplings of the result by
    `joint_entries`, and then call `compact`.

    Args:
        model: The model, which is not changed because copies run.
        example_inputs, tolerance: As for `compact`.
        couplings: The couplings that are tried; None (default) takes those that `discover` finds. If the model has been
            made smaller since they were found, couplings whose sizes no longer fit are replaced by what is found for
            the same tensors.
        exclude: Names, globs and regular expressions of tensors or modules, modules, and module classes. A layer of a
            coupling is left out if it has such a tensor. The remaining layers are then couplings of their own. A kind
            of couplings ("heads", "width") leaves out all of this kind.

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
    model = plain_copy(model)
    given: dict[str, Any] = {"exclude": exclude, "tolerance": tolerance, "fields": ConfigFields.of(model)}
    plans, discovery = find_plans(model, example_inputs, couplings, **given)
    return replace(
        discovery,
        couplings=tuple(plan.coupling for plan in active(plans)),
        counts=tuple((len(plan.bound), plan.scope_units) for plan in active(plans)),
        left_out=tuple((plan.name, plan.left_out) for plan in plans if plan.left_out),
    )


def find_plans(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None,
    *,
    exclude: Sequence[Exclusion],
    multiple_of: int | Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
    named: Collection[str] | None = None,
    fields: ConfigFields | None = None,
    caller_verifies: bool = False,
    trial_inputs: Any = None,
) -> tuple[list[Plan], Discovery]:
    """Return plans as `removable` finds them, on a short twin if there is one that runs, and what was discovered.

    Trials run on the trial inputs, such as a part of the example inputs; None takes the example inputs.
    Couplings of the kind "width" are left out unless they are `named`; None tries all. With `caller_verifies`, the
    caller must check the result on the whole model; only what was discovered in a short model is checked here.
    """
    numbers = multiple_of.values() if isinstance(multiple_of, Mapping) else [multiple_of]
    for number in numbers if multiple_of is not None else ():
        check_multiple(number, "")  # otherwise trials would fail, and every coupling be left out for this reason
    inputs = example_inputs if trial_inputs is None else trial_inputs
    reference_of = partial(Reference, inputs=inputs, tolerance=tolerance)
    given: dict[str, Any] = {"exclude": exclude, "multiple_of": multiple_of, "named": named, "fields": fields}
    plans_of: Callable[..., list[Plan] | None] = partial(_find_by_trials, model, reference_of=reference_of, **given)
    if couplings is not None:
        search_by_trials = partial(removable, model, example_inputs, tolerance=tolerance)
        fitting, stale = _refitted(model, couplings, [partial(discover, model, example_inputs), search_by_trials])
        found = Discovery(couplings=tuple(fitting), counts=(), frozen=())
        return [*stale, *(plans_of(found, verify_whole=not caller_verifies) or ())], found
    if caller_verifies and (found_in_twin := discover_in_twin(model, example_inputs, fields)) is not None:
        # What was discovered in a short model is always verified.
        plans = plans_of(found_in_twin, verify_whole=True, may_try_whole=False)
        if plans is not None:
            return plans, found_in_twin
    found = discover(model, example_inputs)
    return plans_of(found, verify_whole=not caller_verifies) or [], found


def _find_by_trials(
    model: nn.Module,
    discovery: Discovery,
    *,
    reference_of: Callable[..., Reference],
    exclude: Sequence[Exclusion],
    multiple_of: int | Mapping[str, int] | None,
    named: Collection[str] | None,
    fields: ConfigFields | None,
    verify_whole: bool,
    may_try_whole: bool = True,
) -> list[Plan] | None:
    """Return plans of the discovered couplings; those that fail in trials are left out, with the reason.

    Without `may_try_whole`, return None if there is no twin, or what was found in it cannot be used.
    """
    kinds = {"width", *(coupling.kind for coupling in discovery.couplings)}
    excluded = excluded_names(model, exclude, dict(named_tensors(model)), kinds)
    plans = give_own_names([Plan.of(coupling, model) for coupling in discovery.couplings])
    plans = [replace(plan, left_out=_why_not_tried(model, plan, excluded, named)) for plan in plans]
    # If `multiple_of` gives the layers of one coupling different numbers, the trials take that of the first layer.
    multiples = [layers[0] for layers in values_per_layer(model, active(plans), multiple_of, 1, "multiple_of")]
    pairs = zip(active(plans), multiples, strict=True)
    candidates = [replace(p, multiple=multiple_for(model, p) if number is None else number) for p, number in pairs]
    elements = sum(p.numel() for p in model.parameters())
    with progress_bar(None, "removable", " compactions", elements=elements) as bar:

        def make_trials(running: nn.Module, of_plans: Sequence[Plan]) -> Trials:
            random = choose_random_removals(of_plans)
            try:
                return Trials(_sensitive_copy(running), random, reference_of, bar.update)
            except SparsityError:  # a model may not run with random values, as of probabilities
                return Trials(running, random, reference_of, bar.update)

        def find_in_twin(twin: Twin) -> list[Plan] | None:
            try:
                found = find_together(twin.plans, partial(make_trials, twin.model))
                found = [plan if plan.left_out else twin.in_whole(plan, model) for plan in found]
                trials = make_trials(model, active(found)) if verify_whole else None
            except SparsityError:  # such as: the twin, or the whole model, does not run
                return None
            return None if trials is not None and trials.problem(trials.plans) else found

        twin = make_twin(model, candidates, fields)
        found = None if twin is None else find_in_twin(twin)
        if found is None and not may_try_whole:
            return None
        if found is None:
            found = find_together(candidates, partial(make_trials, model))
    found = leave_out_layers(found, partial(_why_excluded, excluded=excluded))
    return [*(plan for plan in plans if plan.left_out), *found]


def _sensitive_copy(model: nn.Module) -> nn.Module:
    """Return a copy in which wrong removals change the outputs measurably; parameters that stay are shared."""
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


def _why_not_tried(model: nn.Module, plan: Plan, excluded: Mapping[str, str], named: Collection[str] | None) -> str:
    """Return the reason for which a coupling is left out before any trial, or "" if it is tried."""
    reasons = [_why_excluded(bound, excluded) for bound in plan.bound]
    if all(reasons):
        return reasons[0]
    if plan.coupling.lists:
        return "its units are modules of a list; prune them by its `entries`, and call compact with a tolerance"
    if named is not None and plan.kind == "width":
        names = {plan.name, plan.coupling.layer_of, "width"}
        if not names.union(*(names_of_outputs(model, bound) for bound in plan.bound)) & {*named}:
            return _PASSES_ON
    return "each of its scopes has a single unit" if all(bound.scope_units == 1 for bound in plan.bound) else ""


def _why_excluded(bound: BoundCoupling, excluded: Mapping[str, str]) -> str:
    """Return the reason for which the kind or the first excluded member is excluded, or "" if none is."""
    return next((excluded[name] for name in (bound.kind, *(m.fqn for m in bound.members)) if name in excluded), "")


def _refitted(
    model: nn.Module, couplings: Sequence[Coupling], searches: Sequence[Callable[[], Discovery]]
) -> tuple[list[Coupling], list[Plan]]:
    """Replace couplings whose sizes do not fit by those found for the same tensors, or leave them out as plans."""
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
    return fitting, [Plan(coupling=c, left_out=f"it no longer fits the model: {why}") for c, why in stale.items()]


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
