"""`shrink`: find what can be removed, choose and score units, remove the lowest ones from a copy, and verify it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..coupling import Coupling, Discovery
from ..errors import SparsityError
from ..models.names import Exclusion
from ..models.progress import phases, public_call, text_of_call
from ..models.running import TokenMask, kept_generators
from ..scores import Score
from .arguments import ShrinkCall
from .choose import divide_by_size, fit_to_config, keep_inside_blocks, leave_out_rivals, names_of_layers, set_targets
from .compensation import compensate_weights, estimate_call, recover_blocks
from .find import find_plans
from .plan import Plan, active
from .removal_report import ShrinkReport, add_reasons
from .score import Cost, score_units
from .together import plan_together, remove_together
from .trials import Trials, choose_random_removals


@kept_generators()
@public_call
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
    recover: bool | int = False,
    budget: str | Cost = "layer",
    couplings: Sequence[Coupling] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    max_sparsity: float | Mapping[str, float] | None = None,
    multiple_of: int | Mapping[str, int] | None = None,
    keep_config: bool | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> tuple[nn.Module, ShrinkReport]:
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
    this library. Other couplings, such as parts of heads, are left out. `keep_config=False` prunes
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
        exclude: As for `removable`. "width" also keeps all other units that pass between blocks, as `recover` does.
        batches: Unlabelled calibration data, a list of batches or a data loader, for scores, compensation and recovery.
            None (default) records what scores need on the example inputs. All other runs of the model, to find and to
            verify what can be removed, use the example inputs.
        token_mask: Which tokens of the batches count, as for `one_shot`.
        compensate: With batches, `"least_squares"` (default) gives each layer that reads dropped units the best weights
            for the kept units. None leaves the weights as they are. Zeros, such as those of a pruned model, stay zero.
        recover: If True, each block of the smaller model is trained to give the dense block's outputs; see `recover`.
            An int is the number of passes over the batches, 4 for True. False by default.
        budget: What `ratio` is a fraction of: the units of each coupling in each of its scopes (`"layer"`, the
            default), or the cost of the whole model: its "units", the "flops" of a forward on the example inputs, its
            "parameters", or what a function of a model returns, such as a measured time.
        couplings: The couplings that may be pruned; None (default) takes those that `discover` finds.
        forward: `(model, batch) -> output`, called instead of the model. If the score needs gradients, it returns the
            loss.
        max_sparsity: With one budget, the largest fraction of its units that a coupling or layer loses, 0.9 by default.
            {name: fraction} works as for `ratio`, with 0.9 for what it does not name.
        multiple_of: Each scope keeps a multiple of this number of units, or all of them. {name: number} works as for
            `ratio`, and what it does not name has the default. By default, dimensions of 16-bit weights, and of
            packed experts (experts, out, in) in any dtype, stay multiples of 16 bytes. Couplings of the kind "mlp" with
            256 or more units keep a multiple of 32 if this moves the ratio by at most 0.02, and the report says so:
            kernels like such sizes, and llama.cpp quantizes no rows of other lengths. `multiple_of=1` keeps any number.
        keep_config: Whether to leave out what the config cannot hold. None (default) does so for a transformers model
            whose config can hold some of what can be removed, if neither `couplings` nor a `ratio` by names without "*"
            says what is dropped.
        progress: If True (default), show progress, as `one_shot` does. Bars of quick work appear for large models only.
        dry_run: If True, return the model itself, unchanged, and a `ShrinkReport` of what is planned: the units that
            would be left, sizes, what would be left out, and the time and memory that the call would take, estimated
            from one block. Scores are recorded on one batch alone, and trials run on a few rows and tokens. Nothing is
            compensated or trained, and there is nothing to save. False by default.

    Returns:
        The smaller model, and a `ShrinkReport`. If nothing can be removed, the model is a copy.

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
    >>> same, plan = shrink(model, torch.randn(3, 8), ratio=0.5, dry_run=True)
    >>> same is model, plan.before.parameters, plan.after.parameters
    (True, 450, 162)
    """
    start = time.perf_counter()
    call = ShrinkCall(
        model=model,
        example_inputs=example_inputs,
        ratio=ratio,
        score=score,
        exclude=exclude,
        batches=batches,
        token_mask=token_mask,
        compensate=compensate,
        recover=recover,
        budget=budget,
        couplings=couplings,
        forward=forward,
        max_sparsity=max_sparsity,
        multiple_of=multiple_of,
        keep_config=keep_config,
        dry_run=dry_run,
    )
    phase = phases("shrink", ("trials", "trials of the config", "scores and removal"))
    next(phase)  # begins the first phase on the progress bar; each later `next` begins another one
    plans, discovery = _find_plans(call)
    plans = set_targets(call, plans)
    layers = names_of_layers(call.model, plans)
    if recover or "width" in call.exclude:
        plans = keep_inside_blocks(call, plans, layers)
    next(phase)
    plans, keeps_config = fit_to_config(call, plans)
    plans = divide_by_size(call, leave_out_rivals(call.model, plans), keeps_config)
    next(phase)
    scoring = time.perf_counter()
    plans = score_units(call.model, plans, score, call.data, token_mask)
    if dry_run:
        next(phase, None)
        scoring = time.perf_counter() - scoring
        plans, report = plan_together(call, plans, keeps_config)
        seconds, memory = estimate_call(call, plans, report, time.perf_counter() - start - scoring, scoring)
        report = add_reasons(report, model, discovery, plans, call.cost_of is not None)
        return model, replace(report, seconds=seconds, memory=memory)
    plans, small, report = remove_together(call, plans, keeps_config)
    if batches is not None and compensate is not None and active(plans):
        small, report = compensate_weights(call, active(plans))
    next(phase, None)  # ends the last phase
    report = add_reasons(report, model, discovery, plans, call.cost_of is not None)
    report = recover_blocks(call, small, report, layers)
    return small, replace(report, call=text_of_call())


def _find_plans(call: ShrinkCall) -> tuple[list[Plan], Discovery]:
    """Return plans by trials on the trial inputs or, if a check on the example inputs fails, by trials on these."""
    given: dict[str, Any] = {"exclude": call.exclude, "multiple_of": call.multiple_of, "named": call.names}
    find = partial(find_plans, call.model, call.example_inputs, call.couplings, fields=call.fields, **given)
    if call.trial_inputs is not call.example_inputs:
        with suppress(SparsityError):  # such as: a masked model gives only zeros for few tokens
            plans, discovery = find(caller_verifies=True, trial_inputs=call.trial_inputs)
            trials = Trials(call.model, choose_random_removals(active(plans)), call.reference_of)
            if not trials.problem(trials.plans):
                return plans, discovery
    return find(caller_verifies=True)
