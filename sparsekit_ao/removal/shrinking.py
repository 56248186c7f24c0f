"""`shrink` finds what can be removed, scores the units, removes the lowest ones from a copy and verifies the result."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import GRADIENTS
from ..coupling import BoundCoupling, Coupling, Discovery, joint_entries
from ..errors import SparsityError, checked_model, with_hints
from ..masking import dense_weight
from ..masking.normalized import plain_copy, refuse_uncopyable, undo_weight_norms
from ..models.names import connected, named_tensors, owner_of, parameter_of, sharing_memory
from ..models.progress import phases
from ..models.running import TokenMask, check_example, eval_mode, kept_generators, token_mask_of
from ..oneshot.chain import CalibrationData
from ..oneshot.matching import Teacher, refuse_unfit
from ..oneshot.walk import Walk, checkpoint_of
from ..scores import Score, needs_of, parse_score
from ..selection import keep_mask
from ..sparsifiers import ScopeSparsifier
from ..sparsifiers.config import Exclusion, names_in_place_of_modules
from ..structure import checked_level
from .compaction import Compaction, Known, check_comparable, check_names, size_of, verified
from .compensation import compensated
from .levels import (
    Cost,
    Quota,
    Rows,
    cost_function,
    counts_within,
    divided,
    multiple_for,
    names_of_outputs,
    numbers_by_coupling,
    with_own_names,
)
from .remove import Removal, masked_copy, plain_tensors
from .sizes import fitting_engines, has_config
from .trials import NOT_TRIED, Trials, find_removable, in_config, with_couplings, without_layers
from .verify import Reference

NORM = "norm"  # the score that reads no data
_FEW = 3  # at most this many couplings that are left out for the same reason are named one by one
_LIMIT = 0.9  # the default of `max_sparsity`: the largest fraction of its units that a coupling may lose
# A tensor and a dimension of it that units divide. If they divide only a part of the dimension, as in a concatenation,
# the last entry says how many indices lie before and after this part; otherwise it is None.
_Place = tuple[str, int, tuple[int, int] | None]


@kept_generators()
@with_hints
def shrink(
    model: nn.Module,
    example_inputs: Any = None,
    ratio: float | Mapping[str, float] = 0.5,
    score: Score | str | None = None,
    exclude: Sequence[Exclusion] = (),
    *,
    batches: Iterable[Any] | None = None,
    token_mask: TokenMask = None,
    compensate: str | None = "least_squares",
    recover: bool = False,
    budget: str | Cost = "layer",
    couplings: Sequence[Coupling] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    max_sparsity: float | Mapping[str, float] | None = None,
    multiple_of: int | Mapping[str, int] | None = None,
    keep_config: bool | None = None,
) -> tuple[nn.Module, Compaction]:
    """Make a model smaller: remove a fraction of the units of each kind, or as many as a budget requires.

    Couplings from which `compact` cannot remove units are left out (see `removable`), and so is what passes from block
    to block, such as the hidden size of a transformer (the kind "width"), unless it is named. The units of several
    couplings, such as key heads, the query heads of each key head, and the elements of a head, may lie along the same
    dimension of a tensor. At most one of these couplings is pruned. Whole heads are chosen if possible, and otherwise
    the couplings that together remove most parameters. The report lists what is left out, and why.

    With a `budget` other than "layer", all layers share one budget, and may keep different numbers of units. Units are
    dropped by importance and cost until the model costs at most `1 - ratio` of what it cost before. If every dropped
    unit lowers the cost, the result costs at least 99 % of this target, unless the smallest possible step (one unit, or
    `multiple_of` units, in every scope) changes the cost by more than that. If the model has a `config`, layers of one
    coupling with equal numbers of units keep equal numbers, so that the config can hold them. They may keep different
    numbers with `keep_config=False`, and also by default if none of the possible removals can be expressed in the
    config of a transformers model.

    With batches, the layers that read dropped units get weights that make up for these units. With `recover=True`, each
    block of the smaller model is then trained to match the block of the dense model. Neither needs labels.

    By default (see `keep_config`), a transformers model loses only units that its config counts, and all layers keep
    the same number of them. `from_pretrained` and inference engines (such as vLLM) can then load the result without
    this library (see `report.fits`). Other couplings, such as parts of heads, are left out. `keep_config=False` prunes
    them too, and the result then needs `export.load_pretrained`.

    Args:
        model: The model, which is not changed.
        example_inputs: As for `compact`. If `example_inputs` is None (default), the first batch is taken.
        ratio: The fraction of the units of every coupling that is dropped in each scope, or the fraction of the cost
            that is saved. {name: fraction} drops nothing from couplings that it does not name. A name is a kind
            ("mlp"), a coupling, or a tensor or module whose outputs are the units of a layer ("layer1.0.conv1"), and
            "*" stands for all that is not named, except for the kind "width".
        score: The name of one of `scores`, or a score object. The statistics that it needs are recorded on the batches.
            If they are statistics of inputs, units are scored by the weights that read these units. None (default)
            takes `obd`, and the norm for units whose readers record no inputs. `"norm"` takes the norm of every unit,
            which reads no data; trained language models do not survive that.
        exclude: As for `removable`. "width" also keeps what else passes between repeated blocks, as `recover` needs.
        batches: Unlabelled calibration data, a list of batches or a data loader, for scores, compensation and recovery.
            None (default) records what scores need on the example inputs. All other runs of the model, to find and to
            verify what can be removed, use the example inputs.
        token_mask: Which tokens of the batches count, as for `one_shot`.
        compensate: With batches, `"least_squares"` (default) gives each layer that reads dropped units the best weights
            for the kept units. None leaves the weights as they are.
        recover: Whether to train each block of the smaller model to give the dense block's outputs, as `recover` does.
        budget: What `ratio` is a fraction of: the units of each coupling in each of its scopes (`"layer"`, the
            default), or the cost of the whole model: its "units", the "flops" of a forward on the example inputs, its
            "parameters", or what a function of a model returns, such as a measured time.
        couplings: The couplings that may be pruned; None (default) takes those that `discover` finds.
        forward: `(model, batch) -> output`, called instead of the model. If the score needs gradients, it returns the
            loss.
        max_sparsity: With one budget, the largest fraction of its units that a coupling or layer loses, 0.9 by default.
            {name: fraction} works as for `ratio`, with 0.9 for what it does not name.
        multiple_of: Each scope keeps a multiple of this number of units, or all of them. {name: number} works as for
            `ratio`, and what it does not name keeps any number. By default, dimensions of 16-bit weights, and of packed
            experts (experts, out, in) in any dtype, stay multiples of 16 bytes.
        keep_config: Whether to leave out what the config cannot hold. None (default) does so for a transformers model
            whose config can hold some of what can be removed, if neither `couplings` nor a `ratio` by names without "*"
            says what is dropped.

    Returns:
        The smaller model, and a `Compaction`. If nothing can be removed, the model is a copy.

    Raises:
        SparsityError: As for `discover`, `compact` and `calibrate`; or a name or number is wrong, or the cost cannot be
            reached. A coupling that cannot be removed is left out instead.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> small, report = shrink(model, torch.randn(3, 8), ratio=0.75, exclude=["4"])
    >>> small[0], small[2]
    (Linear(in_features=8, out_features=4, bias=True), Linear(in_features=4, out_features=16, bias=True))
    >>> report.left_out
    ("2.weight: left out by exclude[0] ('4')",)
    >>> small, report = shrink(model, torch.randn(3, 8), 0.5, budget="flops")
    >>> report.after.flops / report.before.flops <= 0.5
    True
    >>> small, report = shrink(model, ratio={"0": 0.5}, batches=[torch.randn(64, 8) for _ in range(4)], recover=True)
    >>> small[0].out_features, small[2].out_features, report.recovery[0].after < report.recovery[0].before
    (8, 16, True)
    """
    check_comparable("shrink: ", checked_model(model, "shrink"))
    refuse_uncopyable(model, "shrink")
    example_inputs, data = _checked_data(model, example_inputs, batches, forward, token_mask)
    needs = needs_of(None if score == NORM else parse_score(score, "shrink: "))
    _check_compensation(batches is not None, token_mask, compensate, recover, bool({*needs} & {*GRADIENTS}))
    # In the plain case, ratio=0.5 of a transformers model, is_shared is False, and is_open and is_uniform are True.
    is_shared = budget != "layer"
    cost_of = cost_function(budget, example_inputs) if is_shared else None
    asked = _checked_ratio(model, ratio, is_shared, max_sparsity, couplings, keep_config)
    level = max(asked, 0.5) if is_shared else asked  # to meet one budget, a coupling may lose more than the ratio
    plain = plain_copy(model)
    normed = undo_weight_norms(plain)
    reference_of = partial(Reference, inputs=example_inputs, normed=normed)
    # Find what can be removed, and what the arguments allow to remove.
    phase = phases("shrink", ("trials", "trials of the config", "scores and removal"))
    next(phase)  # begins the first phase on the progress bar; each later `next` begins another one
    excluded = names_in_place_of_modules(model, exclude)
    how: dict[str, Any] = {"exclude": excluded, "multiple_of": multiple_of}
    if couplings is None:
        how["named"] = set().union(*(by for by in (ratio, max_sparsity) if isinstance(by, Mapping)))
    discovery = find_removable(plain, example_inputs, couplings, ratio=level, **how, caller_verifies=True)
    limits = _LIMIT if max_sparsity is None else max_sparsity
    numbers = {"ratio": ratio, "max_sparsity": limits, "multiple_of": multiple_of}
    _check_named(plain, discovery, numbers)
    discovery, multiples = _divided_by_numbers(plain, discovery, numbers)
    if recover or "width" in excluded:
        quotas = _quotas(plain, discovery, level if is_shared else ratio, limits, multiples)
        layers = _layers_of(plain, (c for c in discovery.couplings if quotas[c.name].level))
        discovery = _inside_blocks(_walk(plain, data, layers), discovery, must_match=recover)
        discovery, multiples = _divided_by_numbers(plain, discovery, numbers)
    next(phase)
    # With keep_config=True, only what the config can hold is removed, even if that is nothing. With None, so it is if
    # the call leaves open what is dropped, and the config can hold some of it.
    is_open = couplings is None and has_config(plain) and (not isinstance(ratio, Mapping) or "*" in ratio)
    is_uniform = is_open if keep_config is None else keep_config
    if is_uniform:
        # With one budget, the numbers are not known yet. Half of the units is tried, which a config can often express.
        any_width, fraction = (True, 0.5) if is_shared else (False, level)
        held, raised = in_config(plain, discovery, reference_of, fraction, multiples, any_width)
        if is_uniform := bool(keep_config or held.couplings):
            discovery, multiples = held, raised
    # Choose what is pruned, and how many units it keeps.
    quotas = _quotas(plain, discovery, level if is_shared else ratio, limits, multiples)
    chosen, left_out = _chosen(plain, discovery, quotas)
    may_differ = keep_config is False or (is_open and not is_uniform)  # whether equal layers may keep different numbers
    each = is_shared and (may_differ or not hasattr(plain, "config"))
    chosen, quotas = _divided_by_size(plain, chosen, quotas, each)

    # Make the units of the lowest scores zero, and remove them. Scores read the dense model alone, so that they stay
    # the same when couplings are left out.
    next(phase)
    scores, errors = _scored(plain, chosen, score, data=data, token_mask=token_mask)

    def with_zeros(some: Sequence[Coupling]) -> Trials:
        if not is_shared:
            counts = {coupling.name: quotas[coupling.name].kept for coupling in some}
        else:
            counts = counts_within(plain, some, scores, cost_of, asked, quotas)
        return Trials(plain, _without_lowest(plain, some, scores, counts, quotas), reference_of)

    removals, small, report, failing = _removed(chosen, scores, errors, with_zeros, is_uniform)
    if batches is not None and compensate is not None and removals:
        small, report = _with_compensation(plain, [removal for _, removal in removals], data, reference_of)
    next(phase, None)  # ends the last phase
    left_out += [*failing, *_why_kept(removals, quotas, is_shared)]
    report = _with_reasons(report, model, small, discovery, left_out)
    if recover:
        checkpoint_of(replace(data, model=small), None, "recover")  # checks that ranks have the same model
        teacher = Teacher(model, replace(data, model=small))
        _, rows = _walk(small, data, layers).run("recover", None, teacher)
        report = replace(report, recovery=teacher.finish(rows))
    error = replace(data, model=small).error_to(replace(data, model=plain).first_output())
    return small, replace(report, error_to_dense=error)


def _checked_data(
    model: nn.Module,
    example_inputs: Any,
    batches: Iterable[Any] | None,
    forward: Callable[[nn.Module, Any], Any] | None,
    token_mask: TokenMask,
) -> tuple[Any, CalibrationData]:
    """Return the example inputs, or the first batch in their place, and the data that scores and compensation read."""
    if batches is None:
        mask = token_mask_of(example_inputs, None, "shrink")
        data = CalibrationData(model=model, batches=[example_inputs], forward=forward, token_masks=[mask])
    else:
        data = CalibrationData.checked(model, batches, forward, token_mask, "shrink")
    example_inputs = data.batches[0] if example_inputs is None else example_inputs
    if example_inputs is None:
        raise SparsityError("shrink: give example_inputs (one batch of inputs), or batches, whose first is taken")
    check_example(model, example_inputs, "shrink")
    return example_inputs, data


def _check_compensation(
    has_batches: bool, token_mask: TokenMask, compensate: object, recover: object, has_gradients: bool
) -> None:
    """Raise an error if `compensate` or `recover` is unknown or lacks data."""
    if compensate not in (None, "least_squares"):
        raise SparsityError(f"shrink: compensate must be 'least_squares' or None, got {compensate!r}")
    if not isinstance(recover, bool):
        raise SparsityError(
            f"shrink: recover must be True or False, got {recover!r}; it is always `model` that is matched"
        )
    if not has_batches and (recover or token_mask is not None):
        raise SparsityError("shrink: recover and token_mask need batches; give unlabelled inputs as batches=")
    if recover and has_gradients:
        raise SparsityError(
            "shrink: the score needs a forward that returns the loss, but recover needs one that returns "
            "outputs; call shrink with exclude=['width'], and then recover(small, model, batches)"
        )


def _layers_of(model: nn.Module, couplings: Iterable[Coupling]) -> list[str]:
    """Return the names of the modules whose matrices have units of these couplings, or all that have matrices."""
    members = {member.fqn for coupling in couplings for bound in coupling.bind(model) for member in bound.members}
    matrices = [name for name, p in named_tensors(model) if p.ndim > 1]
    names = [name for name in matrices if name in members] or matrices
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _walk(model: nn.Module, data: CalibrationData, layers: Iterable[str]) -> Walk:
    """Return the walk in which a model is recovered: over the list of blocks that has most of these layers."""
    return Walk(replace(data, model=model), (), layers=[model.get_submodule(name) for name in layers])


def _inside_blocks(walk: Walk, discovery: Discovery, must_match: bool) -> Discovery:
    """Leave out layers of couplings whose units pass between repeated blocks, or leave the last one."""
    # The place of a module is the number of blocks that have run when it is called. If the tensors of a coupling are in
    # modules of several places, the outputs of the blocks between them have its units.
    model, finished, places = walk.data.model, 0, defaultdict[nn.Module, set[int]](set)

    def record(module: nn.Module, *_: Any) -> None:  # called before and after the module, which may contain blocks
        places[module].add(finished)

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
    if must_match and not walk.blocks:
        refuse_unfit(output, output, "the model")
    why = "it passes between blocks, whose outputs recover=True matches" if must_match else "left out by 'width'"

    def places_of(path: str) -> set[int]:  # those of the innermost module that is called and contains this one
        return places.get(model.get_submodule(path)) or (places_of(path.rpartition(".")[0]) if path else {0, finished})

    def why_not(bound: BoundCoupling) -> str:
        return why if len({at for m in bound.members for at in places_of(m.fqn.rpartition(".")[0])}) > 1 else ""

    couplings, left_out = without_layers(model, discovery.couplings, why_not)
    return with_couplings(model, discovery, couplings, left_out)


def _divided_by_numbers(
    model: nn.Module, discovery: Discovery, numbers: Mapping[str, Any]
) -> tuple[Discovery, dict[str, int]]:
    """Divide couplings whose layers are given different numbers, and return {coupling: multiple of its kept units}."""
    parts = divided(model, discovery.couplings, numbers)
    given = numbers_by_coupling(model, parts, numbers["multiple_of"], 1, "multiple_of")
    multiples = {c.name: given[c.name] or multiple_for(model, c) for c in parts}
    return with_couplings(model, discovery, parts), multiples


def _with_compensation(
    model: nn.Module,
    removals: Sequence[Removal],
    data: CalibrationData,
    reference_of: Callable[..., Reference],
) -> tuple[nn.Module, Compaction]:
    """Return the smaller model, whose weights make up for the removed units, and its report."""
    better, rows = compensated(model, removals, data)
    reference = reference_of(masked_copy(better, removals), dense=better)
    small, report = verified(reference, removals, with_config=True)
    return small, replace(report, compensation=tuple(rows))


def _check_named(model: nn.Module, discovery: Discovery, numbers: Mapping[str, Any]) -> None:
    """Raise an error if an argument names what is not a coupling, a kind or a layer whose outputs can be removed."""
    couplings = discovery.couplings
    known = {name for c in couplings for name in (c.name, c.layer_of, c.kind, "*")} - {""}  # most have no `layer_of`
    known |= {"*", "width", *(name for name, _ in discovery.left_out)}
    given = [(what, name) for what, by in numbers.items() if isinstance(by, Mapping) for name in by]
    bounds = (bound for c in couplings for bound in c.bind(model)) if given else ()
    layers = set().union(*(names_of_outputs(model, bound) for bound in bounds))
    tensors = dict(named_tensors(model))
    for what, name in given:
        if name not in known | layers and any(f"{tensor}.".startswith(f"{name}.") for tensor in tensors):
            raise SparsityError(
                f"shrink: {what} names {name!r}, but none of its outputs can be removed; name the layer before it to "
                "remove its inputs, or call without this name and read the reasons in report.left_out"
            )
        check_names("shrink: ", [*sorted(known), *layers & {name}], **{what: {name: 0}})


def _checked_ratio(
    model: nn.Module,
    ratio: float | Mapping[str, float],
    is_shared: bool,
    max_sparsity: object,
    couplings: Sequence[Coupling] | None,
    keep_config: bool | None,
) -> float:
    """Return the largest of the ratios; raise a SparsityError if one of them or another argument is wrong."""
    by_name = ratio if isinstance(ratio, Mapping) and couplings is None else {}
    for kind in by_name.keys() & {"layers", "experts"}:
        how = f"removal.shrink_{kind}(model, [example_inputs], {by_name[kind]})"
        raise SparsityError(f"shrink: ratio names {kind!r}, but removing whole {kind} changes outputs; use {how}")
    if max_sparsity is not None and not is_shared:
        raise SparsityError(
            f"shrink: max_sparsity={max_sparsity!r} needs one budget for all layers, but here the ratio applies "
            "to each layer by itself; give budget=, or lower the ratio"
        )
    if isinstance(ratio, Mapping) and (is_shared or not ratio):
        raise SparsityError(
            f"shrink: a dict of ratios, {ratio!r}, sets a ratio for each name. It needs at least one name, and it "
            "cannot be combined with a budget= of the whole model; call shrink "
            "twice, the second time with exclude=[these names]"
        )
    if keep_config and not has_config(model):
        raise SparsityError(f"shrink: keep_config=True needs a model of transformers, got {type(model).__name__}")
    ratios = ratio.values() if isinstance(ratio, Mapping) else [ratio]
    return max(checked_level(level, "shrink: ratio: ") for level in ratios)


def _removed(
    couplings: Sequence[Coupling],
    scores: Rows,
    errors: Mapping[str, SparsityError],
    with_zeros: Callable[[Sequence[Coupling]], Trials],
    keeps_config: bool,
) -> tuple[list[tuple[str, Removal]], nn.Module, Compaction, list[tuple[str, str]]]:
    """Remove units of the lowest scores, and leave couplings out until the others can be removed together.

    Return pairs (coupling's name, removal), the smaller model, its report, and (name, reason) of what was left out.
    """
    if errors and not scores:
        raise SparsityError(f"shrink: the score fits no coupling ({[*errors.values()][-1]}); score=None takes norms")
    rated = [c for c in couplings if any(bool(rows.any()) for rows in scores.get(c.name, ()))]
    zero = [c.name for c in couplings if c.name in scores and c not in rated]
    left_out = [(name, str(error)) for name, error in errors.items()]
    left_out += [(name, "the score rates all of its units 0") for name in zero]
    while True:
        trials = with_zeros(rated)  # chosen again, since those that remain may have to lose more to meet one budget
        try:
            removals, small, report = trials.removed(rated)
        except SparsityError:
            trials.in_training = True
            rated, failing = trials.divide(rated)
            left_out += [(coupling.name, why) for coupling, why in failing.items()]
            if failing:
                continue
            removals, small, report = trials.removed(rated)  # `divide` has added the attributes that were missing
        if not (keeps_config and rated and report.not_in_config):
            return [(rated[removal.source].name, removal) for removal in removals], small, report, left_out
        # Leave out a coupling without which the config can hold the others; if there is none, leave out the first one.
        without = [[other for other in rated if other is not coupling] for coupling in rated]
        at = next((at for at, others in enumerate(without) if not trials.misfit(others)), 0)
        why = f"the config cannot hold it together with others ({report.not_in_config}); keep_config=False removes it"
        left_out.append((rated[at].name, why))
        rated = without[at]


def _with_reasons(
    report: Compaction,
    whole: nn.Module,
    small: nn.Module,
    discovery: Discovery,
    left_out: Sequence[tuple[str, str]],
) -> Compaction:
    """Return the report with what was left out, what is frozen, the reasons, and the engines that load the model."""
    uncalled = (f"{name}: never called with these example inputs" for name in discovery.uncalled)
    # Inputs and outputs keep their sizes in every model, so their axes are not listed.
    inside = [(axis, *axis.places[0]) for axis, _ in discovery.frozen if not axis.why.startswith(("input", "output"))]
    return replace(
        report,
        before=size_of(whole, report.before.flops),
        fits=fitting_engines(small) if report.not_in_config == "" else (),
        left_out=(*_as_lines(left_out), *uncalled),
        frozen=tuple(f"{axis.size} in {name}[{d}]: {axis.why}" for axis, name, d in inside),
        values=discovery.values,
    )


def _divided_by_size(
    model: nn.Module, couplings: Sequence[Coupling], quotas: Mapping[str, Quota], each: bool
) -> tuple[list[Coupling], dict[str, Quota]]:
    """Divide couplings whose layers differ in size, or all with `each`, into layers; return them and their quotas."""
    parts: list[tuple[Coupling, Quota]] = []
    for coupling in couplings:
        differ = len({bound.grid for bound in coupling.bind(model)}) > 1
        layers = coupling.of_layers(model) if differ or each else [coupling]
        parts += [(layer, quotas[coupling.name]) for layer in layers]
    renamed = with_own_names([part for part, _ in parts])
    pairs = zip(renamed, (quota for _, quota in parts), strict=True)
    return renamed, {part.name: replace(quota, units=part.bind(model)[0].grid[-1]) for part, quota in pairs}


def _without_lowest(
    model: nn.Module,
    couplings: Sequence[Coupling],
    scores: Rows,
    counts: Mapping[str, int],
    quotas: Mapping[str, Quota],
) -> Known:
    """Return removals that keep the `counts` units of the highest scores, under the keys that `Trials` looks up."""
    known = Known()
    for c in couplings:
        pairs = zip(c.bind(model), scores[c.name], strict=True)
        keeps = [(b, keep_mask(rows.reshape(-1, b.grid[-1]), counts[c.name]).cpu()) for b, rows in pairs]
        removals = [Removal(bound=b, keep=keep.reshape(b.grid)) for b, keep in keeps]
        known[replace(c, attrs={}), quotas[c.name].multiple] = removals
    return known


def _as_lines(left_out: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return (name, reason) as lines of text; names of one reason share a line if they are many, or were not tried."""
    names: dict[str, list[str]] = {}
    for name, why in left_out:
        names.setdefault(why, []).append(name)
    lines = list[str]()
    for why, alike in names.items():
        more = len(alike) - 1 if why.startswith(NOT_TRIED) or len(alike) > _FEW else 0
        lines += [f"{alike[0]} and {more} more: {why}"] if more else [f"{name}: {why}" for name in alike]
    return tuple(lines)


def _why_kept(
    removals: Iterable[tuple[str, Removal]], quotas: Mapping[str, Quota], is_shared: bool
) -> list[tuple[str, str]]:
    """Return (name, reason) of couplings that keep all units or, where all were to be dropped, the fewest possible."""
    reasons = {}
    for name, removal in removals:
        units, quota = removal.scope_units, quotas[name]
        if removal.is_empty and is_shared:
            reasons[name] = f"the budget is met although it keeps all of its {units} units, since others matter less"
        elif removal.is_empty and quota.multiple > 1:
            reasons[name] = f"a multiple of {quota.multiple} keeps all of its {units} units"
        elif removal.kept == min(quota.multiple, units) and quota.level == 1:
            reasons[name] = f"a layer needs a unit, so {removal.kept} of {units} are kept in each scope"
    return list(reasons.items())


def _scored(
    model: nn.Module, couplings: Sequence[Coupling], score: Score | str | None, **how: Any
) -> tuple[dict[str, list[Tensor]], dict[str, SparsityError]]:
    """Return the scores of `_all_scored`, and {name: error} of couplings that the score does not fit."""
    if score is None:  # norms score what `obd` does not fit, or rates 0
        scores, _ = _scored(model, couplings, "obd", **how)
        by_norm = [c for c in couplings if not any(bool(rows.any()) for rows in scores.get(c.name, ()))]
        return scores | _all_scored(model, by_norm, NORM, **how), {}
    try:
        return _all_scored(model, couplings, score, **how), {}
    except SparsityError as e:  # there is at least one coupling, since an empty list raises none
        if len(couplings) == 1:
            why = re.sub(r"^config\[\d+\]: ", "", str(e)).replace("use 'sum' or 'mean'", "score=None takes norms there")
            return {}, {couplings[0].name: SparsityError(why)}
    half = len(couplings) // 2
    parts = couplings[:half], couplings[half:]
    (scores, errors), (others, more) = (_scored(model, part, score, **how) for part in parts)
    return scores | others, errors | more


def _all_scored(
    model: nn.Module,
    couplings: Sequence[Coupling],
    score: Score | str,
    data: CalibrationData,
    token_mask: TokenMask,
) -> dict[str, list[Tensor]]:
    """Return {coupling: for each of its layers, the scores of its units [scopes, units]}, which add up."""
    if not couplings:
        return {}
    of_elements = None if score == NORM else parse_score(score, "shrink: ")
    needs = needs_of(of_elements)
    if any(need.startswith("input") for need in needs):
        couplings = [replace(coupling, member_scores="consumers") for coupling in couplings]
    # A built-in score only reads weights, so the copy may share them with the model. What shares memory is copied.
    read_only, sharing = [] if callable(score) else [*model.parameters()], sharing_memory(model)
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in read_only if id(p) not in sharing}
    shared |= {id(p): nn.Parameter(p.detach().abs()) for p in model.parameters() if score == NORM and p.is_complex()}
    copied, sparsifier = copy.deepcopy(model, shared), ScopeSparsifier(score=of_elements)
    sparsifier.mask_class = None  # scores need no masks, and torch has none for a Parameter of the name `keys`
    sparsifier.prepare(copied, joint_entries(couplings, copied))
    if needs:
        sparsifier.calibrate(data.batches, data.forward, token_mask=token_mask)

    def ids(names: Iterable[str]) -> frozenset[int]:
        return frozenset(id(parameter_of(*owner_of(copied, name))) for name in names)

    # Couplings may divide the same tensors, as heads and their elements do. The number of units tells them apart or, if
    # it is the same, the order, which is that of `couplings`.
    scores: dict[tuple[frozenset[int], int], list[Tensor]] = {}
    recorder = sparsifier.recorder
    for pruning in sparsifier.pruning_groups():
        weights = {name: dense_weight(*recorder.tensors[name]) for name in pruning.specs}
        # No batch reaches a layer that only training runs: the others rate its units, if there are any.
        unread = [name for name in weights if needs and name not in recorder.collected]
        known = {name: torch.zeros_like(weights[name]) for name in unread if len(unread) < len(weights)}
        values = pruning.values(weights.__getitem__, recorder.of, known)
        rows = pruning.scope.block_norms(values, norm=pruning.norm_of(values.values()))
        scores.setdefault((ids(pruning.specs), rows.shape[-1]), []).append(rows)

    def rows_of(bound: BoundCoupling) -> Tensor:
        names = [member.fqn for member in bound.members if member.is_parameter]
        return scores[ids(names), bound.grid[-1]].pop(0)

    rated = {coupling.name: [rows_of(bound) for bound in coupling.bind(copied)] for coupling in couplings}
    for coupling in couplings if score == NORM else ():
        pairs = zip(coupling.bind(copied), rated[coupling.name], strict=True)
        rated[coupling.name] = [_squares(bound, rows.double(), copied) for bound, rows in pairs]
    return rated


def _squares(bound: BoundCoupling, rows: Tensor, model: nn.Module) -> Tensor:
    """Square the norms of units, and add the entries along a second dimension of a weight, as recurrent ones have."""
    rows = rows.square()
    numbers = torch.arange(bound.units, device="cpu").reshape(bound.grid)
    for member in bound.members:
        first = next(other for other in bound.members if other.fqn == member.fqn)
        if not first.is_parameter or first is member:
            continue  # elements along the first dimension are in the norms already; tensors without masks do not count
        weight = plain_tensors(model, [member.fqn])[member.fqn].detach()
        # For each element, the numbers of the units to which it belongs by the first and by the second dimension.
        owners = [torch.empty(weight.shape, dtype=torch.long, device="cpu") for _ in range(2)]
        for view in (m.pattern(owner) for owner, m in zip(owners, (first, member), strict=True)):
            view.copy_(numbers.reshape(*bound.grid, *[1] * (view.ndim - numbers.ndim)).expand_as(view))
        is_counted = (owners[0] == owners[1]).to(weight.device)  # by the first dimension
        others = weight.float().masked_fill(is_counted, 0)
        squares = member.pattern(others).square().unsqueeze(-1).flatten(numbers.ndim).sum(-1)
        rows += squares.reshape(rows.shape).to(rows)
    return rows


def _quotas(
    model: nn.Module,
    discovery: Discovery,
    levels: float | Mapping[str, float],
    limits: float | Mapping[str, float],
    multiples: Mapping[str, int],
) -> dict[str, Quota]:
    """Return {name: quota} for all couplings."""
    pruned = discovery.couplings
    level = numbers_by_coupling(model, pruned, levels, 0.0, "ratio")
    limit = numbers_by_coupling(model, pruned, limits, _LIMIT, "max_sparsity")
    return {
        c.name: Quota(
            units=c.bind(model)[0].grid[-1], level=level[c.name], limit=limit[c.name], multiple=multiples[c.name]
        )
        for c in pruned
    }


def _chosen(
    model: nn.Module, discovery: Discovery, quotas: Mapping[str, Quota]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """Return couplings to prune, no two of which divide one dimension of a tensor, and (name, reason) of the others."""
    pruned = [coupling for coupling in discovery.couplings if quotas[coupling.name].level]
    others = [coupling.name for coupling in discovery.couplings if coupling not in pruned]
    left_out = [*discovery.left_out, *((name, "ratio is 0 for it, or does not name it") for name in others)]
    places = {coupling: _places(model, coupling) for coupling in pruned}
    dropped = {coupling: 1 - quotas[coupling.name].kept / quotas[coupling.name].units for coupling in places}
    chosen: list[Coupling] = []
    for rivals in connected(places):  # couplings that share places, directly or through others
        sets = []  # for each rival, a set of couplings that includes it, and of which no two share a place
        for first in rivals:
            owners = dict.fromkeys(places[first], first)  # {place: the coupling of the set that divides it}
            for coupling in rivals:
                if owners.keys().isdisjoint(places[coupling]):
                    owners |= dict.fromkeys(places[coupling], coupling)
            sets.append(list(dict.fromkeys(owners.values())))
        # Whole heads, which a config can count, come before parts of heads. In a grouped convolution, dropping inputs
        # and outputs of each group removes more parameters than dropping whole groups.
        worse = {c for c in rivals if c.kind == "head size" or not dropped[c]}
        sizes = [round(_removed_parameters(model, some, places, dropped)) for some in sets]
        chosen += max(zip(sets, sizes, strict=True), key=lambda row: (worse.isdisjoint(row[0]), row[1]))[0]
    owners = {place: coupling for coupling in chosen for place in places[coupling]}
    for coupling in places:
        if coupling not in chosen:
            shared = next(place for place in places[coupling] if place in owners)
            why = f"only one coupling may divide dimension {shared[1]} of {shared[0]}: {owners[shared].name!r}"
            left_out.append((coupling.name, why))
    return [coupling for coupling in places if coupling in chosen], left_out


def _places(model: nn.Module, coupling: Coupling) -> list[_Place]:
    """Return the dimensions of tensors, or parts of dimensions, that a coupling divides."""
    members = [member for bound in coupling.bind(model) for member in bound.members]
    divided = [(member, member.pattern.dimension_of(coupling.unit)) for member in members]
    return [(member.fqn, d, member.pattern.outside.get(d)) for member, d in divided]


def _removed_parameters(
    model: nn.Module,
    couplings: Iterable[Coupling],
    places: Mapping[Coupling, Sequence[_Place]],
    dropped: Mapping[Coupling, float],
) -> float:
    """Return how many parameters the couplings remove together; `dropped` has the fraction of units that each drops."""
    tensors = dict(named_tensors(model))
    removed = defaultdict[str, dict[int, float]](lambda: defaultdict(float))  # {tensor: {dimension: fraction}}
    for coupling in couplings:
        for name, d, outside in places[coupling]:
            if name in tensors:
                inside = 1 - sum(outside or ()) / tensors[name].shape[d]  # the share of the part that has the units
                removed[name][d] += inside * dropped[coupling]
    kept = {name: math.prod(1 - fraction for fraction in by.values()) for name, by in removed.items()}
    return sum(tensors[name].numel() * (1 - fraction) for name, fraction in kept.items())
