"""The calls `one_shot` and `prune`: masks and compensated weights of a trained model, in one pass over its layers."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import GRADIENTS, Recorder, other_matrices
from ..errors import SparsityError, checked_model, warn
from ..masking.normalized import copy_of, plain_copy, redo_weight_norms, refuse_uncopyable, undo_weight_norms
from ..models.loading import Device, is_elsewhere, is_offloaded, refuse_tied, refuse_unloadable
from ..models.names import (
    Exclusion,
    by_pattern,
    exists,
    hint_of,
    named_tensors,
    names_in_place_of_modules,
    owner_of,
    parameter_of,
    weights_by_name,
)
from ..models.progress import public_call, text_of_call
from ..models.running import TokenMask, kept_states
from ..patterns import Pattern
from ..scores import Score, needs_of, parse_score
from ..sparsifiers.config import TensorGroup, make_config
from ..sparsifiers.report import check_masks
from ..sparsifiers.scope import ScopeSparsifier
from .chain import CalibrationData
from .dry import planned_run
from .prune_report import PruneReport
from .solving import Layers, Scoring
from .teacher import Teacher, check_ranks, passes_of
from .walk import check_options, checkpoint_of, walk_of


@public_call
def one_shot(
    sparsifier: ScopeSparsifier,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    compensate: str | None = "admm",
    layers: str | None = None,
    token_mask: TokenMask = None,
    recover: bool | nn.Module = False,
    device: Device = None,
    stream_memory: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> PruneReport:
    """Prune a trained model in one pass over calibration data, and adjust kept weights to make up for dropped ones.

    Block by block, masks and weights are computed for the inputs that come from the blocks already pruned. The model
    keeps its masks, with zeros for dropped weights; call `squash_mask()` to remove them. A later `step()` chooses
    masks by the score again. With the default score, the magnitude of the weights, they are the same masks.

    A model may be sharded by `fully_shard` after `prepare`. In distributed training every rank passes its own batches,
    their statistics are summed, and each rank computes some of the layers of a block. A model that accelerate offloads
    cannot have masks; use `prune` for it.

    Args:
        sparsifier: A `ScopeSparsifier` that was prepared on the model, with any config.
        batches: The calibration data, as for `sparsifier.calibrate`. All batches are kept in a list.
        forward: A function `(model, batch)` that is called instead of the model; what it returns does not matter.
        compensate: How kept weights are adjusted. `"admm"` (default) is ALPS (arXiv 2406.07831) with exact selection by
            this library, for any structure. `"obs"` is structured optimal brain surgeon (S3, arXiv 2604.11315), scope
            after scope. `"sparsegpt"` is SparseGPT (arXiv 2301.00774), for N:M along the inputs and single elements of
            a whole tensor. These three choose the masks themselves; the report notes a score that they do not use.
            `"least_squares"` takes the sparsifier's masks and computes the best weights for them, and None leaves the
            kept weights as they are.
        layers: The name of a list of repeated modules, a ModuleList or Sequential. None (default) finds all lists.
        token_mask: Which tokens count: a key of the batches, or a function that returns a batch's mask. None (default)
            takes the `attention_mask` of batches that have one, and for what a decoder computes from its inputs the
            `decoder_attention_mask`, if any; False counts all tokens. The mask applies to layers
            that read [batch, tokens, inputs]; convolutions and layers that read something else (such as a pooled token)
            count every position.
        recover: If True, each block is trained to give the dense block's outputs before the next one is pruned; see
            `recover`. The dense model is this model as it is now, unless another one is given here. False by default.
        device: Where blocks run and are solved, such as "cuda" for a model on the CPU. Each block is moved there and
            back. None (default) takes the model's device.
        stream_memory: How many bytes of the inputs of a block, for all batches, are kept in memory; the rest is kept in
            temporary files. None (default) sets no limit.
        checkpoint: A folder in which each finished block is saved. After an interruption, repeat the call on the model
            as it was before, also in a new process. It continues from there; on the same machine and with the same
            number of threads, the result is bit-identical. In distributed training, every rank must see the folder.
        progress: If True (default), show a progress bar on a terminal or in a notebook, or else a line for each block
            (at most ten lines for a model without blocks) in the logger `sparsekit_ao`.

    Tensors that are coupled or share a budget are pruned in two phases. Their masks are chosen by the score before any
    layer changes. Each layer is then compensated by least squares when the pass reaches it, on inputs that were
    recorded before the layers of its block changed. So the layer that reads dropped units makes up for them.

    Returns:
        A `PruneReport` with a row for each layer: its relative output error before and after compensation.

    Raises:
        SparsityError: An argument does not fit, there are no batches, values are not finite, a mask is on top of
            another parametrization, or ranks have different models. After an interruption or error, each block is
            either finished or as it was.

    >>> from sparsekit_ao import ScopeSparsifier, one_shot
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))  # 2:4
    >>> sparsifier.prepare(model)
    >>> report = one_shot(sparsifier, [torch.randn(64, 16) for _ in range(4)])
    >>> all(row.after < row.before for row in report), sparsifier.check()
    (True, 40)
    >>> sparsifier.squash_mask()
    """
    start = time.perf_counter()
    check_options("one_shot", device, stream_memory, checkpoint, compensate)
    if not isinstance(sparsifier, ScopeSparsifier):
        raise SparsityError(f"one_shot needs a ScopeSparsifier, got {type(sparsifier).__name__}")
    model = sparsifier.require_prepared("one_shot")
    if is_offloaded(model):
        raise SparsityError(
            "one_shot: accelerate offloads weights of this model, and masks cannot follow them; use prune(model, ..., "
            "inplace=True) on the model without masks"
        )
    if not isinstance(recover, (bool, nn.Module)):
        raise SparsityError(f"one_shot: recover must be True, False or the dense model, got {recover!r}")
    refuse_unloadable(model, "one_shot")
    data = CalibrationData.checked(model, batches, forward, token_mask, "one_shot")
    pruning_groups = sparsifier.pruning_groups()
    solving = Layers(
        sparsifier.groups, pruning_groups, sparsifier.recorder, compensate, sparsifier.live_mask, "one_shot"
    )
    solving.check(has_data=True)
    dense = recover if isinstance(recover, nn.Module) else None
    teacher = None if recover is False else Teacher(dense, data)
    options = {"blocks": layers, "device": device, "stream_memory": stream_memory}
    report = _pruned(solving, data, teacher, options, checkpoint, start)
    sparsifier.mask_levels = [group.get("sparsity_level") for group in sparsifier.groups]
    return report


@public_call
def prune(
    model: nn.Module,
    sparsity_level: float | Pattern | str | None = None,
    *,
    batches: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    token_mask: TokenMask = None,
    exclude: Sequence[Exclusion] = (),
    score: Score | None = None,
    compensate: str | None = "admm",
    keep_zeros: bool = False,
    masks: Mapping[str, Tensor] | None = None,
    recover: bool | int = False,
    inplace: bool = False,
    device: Device = None,
    stream_memory: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> tuple[nn.Module, PruneReport]:
    """Prune the weights of every Linear and convolution, and return a plain model with zeros in them.

    Recurrent layers and packed experts are pruned too and, with batches, all other parameters that matrix products use.

    Without batches, weights are dropped by their magnitude (or a `score` that needs no data), and the others stay as
    they are. With batches, kept weights are adjusted to make up for the dropped ones; see `one_shot`. For other
    configs, training and schedules use `ScopeSparsifier`.

    No masks are registered, and one block is pruned after the other. The model may thus be larger than memory, if
    accelerate offloads it to the CPU or to disk, or `fully_shard` shards it. It can then be pruned in place only, with
    `inplace=True`.

    Args:
        model: A model on any device, in any dtype. Unless `inplace`, a copy is pruned. In a copy, weights under
            weight_norm are pruned too.
        sparsity_level: The fraction of each weight that is dropped, in [0, 1], or what is dropped: one of `patterns`,
            such as `patterns.rows(0.7)`, or its text ("2:4"). None (default) drops half of the single elements.
        batches, forward, token_mask, compensate: As for `one_shot`. Batches are inputs without labels, unless the score
            needs gradients; `forward` must then return the loss of a batch.
        exclude: Tensors and modules to leave out: names, globs, regular expressions, modules or module classes.
        score: How much each weight matters; see `scores`. It chooses masks only without batches, or with
            `compensate=None` or `"least_squares"`.
        keep_zeros: If True, weights that are zero stay zero, so a scope with more zeros than would be dropped keeps
            fewer weights. By default, weights that are zero may return, and the report says how many did.
        masks: {tensor: mask}, as `export.load_masks` returns them, of bools or numbers 0 and 1 (kept). Only these
            tensors are pruned, and kept weights are fitted by least squares. A level or pattern limits the masks.
        recover: If True, the kept weights of each block are trained to give the dense block's outputs before the next
            one is pruned; see `recover`. An int is the number of passes over the batches, 4 for True; with many
            batches, 2 may do. False by default.
        inplace: If True, prune the model itself; by default a copy.
        device, stream_memory, checkpoint, progress: As for `one_shot`.
        dry_run: If True, return the model itself, unchanged, and a `oneshot.DryRun`, which says what the call would do,
            and what time and memory it would take. One block or layer is pruned on one batch for this, and put back.
            No checkpoint is read or written. False by default.

    Returns:
        The pruned model, and a `PruneReport` with the density and errors of each layer, what recovery did, and what
        was left out, such as layers that the pattern does not fit.

    Raises:
        SparsityError: An argument does not fit, or there is nothing to prune. The model is then unchanged. If a model
            that is pruned in place is interrupted in the middle, each of its blocks is either finished or as it was.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> pruned, report = prune(model, "2:4", batches=[torch.randn(64, 16) for _ in range(4)])
    >>> int((pruned[0].weight == 0).sum()), int((model[0].weight == 0).sum()), [row.density for row in report]
    (256, 0, [0.5, 0.5])
    """
    start = time.perf_counter()
    checked_model(model, "prune")
    passes = passes_of(recover, "prune")
    if batches is None and (recover or forward is not None or token_mask is not None):
        raise SparsityError("prune: recover, forward and token_mask need batches; give unlabelled inputs as batches=")
    check_options("prune", device, stream_memory, checkpoint, compensate)
    if is_elsewhere(model) and not inplace:
        raise SparsityError(
            "prune: weights of this model are offloaded by accelerate or sharded over ranks, so a copy would not have "
            "them; give inplace=True, and load the model again if you need the dense one"
        )
    refuse_unloadable(model, "prune")
    if not inplace:
        refuse_uncopyable(model, "prune")
    sparsifier = ScopeSparsifier(sparsity_level, score=score)
    _check_gradients(score, batches is not None, forward is not None, passes > 0)
    data = CalibrationData(model=model, batches=(), forward=forward, token_masks=())
    if batches is not None:
        data = CalibrationData.checked(model, batches, forward, token_mask, "prune")
    all_data, data = data, data.one_batch()[0] if dry_run and batches is not None else data
    pruned = model if inplace else plain_copy(model) if dry_run else copy_of(model)
    data = replace(data, model=pruned)
    normed = () if inplace else undo_weight_norms(pruned)
    others = {"keep_zeros": keep_zeros, "exclude": exclude, "score": score, "compensate": compensate}
    given = {} if masks is None else _checked_masks(pruned, masks, others)
    method = None if batches is None else compensate
    with kept_states(pruned) if dry_run else contextlib.nullcontext():
        layers, left_out = _layers_of(model, data, sparsifier, exclude, method, token_mask, given)
    layers.keeps_zeros = keep_zeros
    if given and sparsity_level is not None:
        check_masks(layers.pruning_groups, layers.groups, {name: (mask, False) for name, mask in given.items()})
    options = {"device": device, "stream_memory": stream_memory}
    if dry_run:
        with kept_states(pruned):
            dry = planned_run(layers, data, all_data, options, passes, not inplace, start)
        dry = replace(dry, left_out=left_out)
        _warn_of_dense(dry, bool(given))
        return model, dry
    teacher = Teacher(None, data, passes=passes) if passes else None
    report = _pruned(layers, data, teacher, options, checkpoint, start)
    redo_weight_norms(pruned, normed)
    report = replace(report, left_out=left_out, call=text_of_call())
    _warn_of_dense(report, bool(given))
    return pruned, report


def _layers_of(
    model: nn.Module,  # as it was given; `data` has the one that is pruned
    data: CalibrationData,
    sparsifier: ScopeSparsifier,
    exclude: Sequence[Exclusion],
    method: str | None,
    token_mask: TokenMask,
    given_masks: Mapping[str, Tensor] = MappingProxyType({}),  # if there are any, only these tensors are pruned
) -> tuple[Layers, Mapping[str, str]]:
    """Return the layers that are pruned, and why other tensors are not."""
    more = _other_entries(data, sparsifier.defaults.get("pattern")) if data.batches else []
    entries = {entry["tensor_fqn"]: entry for entry in more}
    config = [entries.get(name, {"tensor_fqn": name}) for name in given_masks] or None
    resolved = sparsifier.resolved(data.model, names_in_place_of_modules(model, exclude), more, config)
    refuse_tied(data.model, {group["tensor_fqn"] for group in resolved.groups}, "prune")
    recorder = Recorder(data.model, {g["tensor_fqn"]: (g["module"], g["tensor_name"]) for g in resolved.groups})
    groups = sparsifier.pruning_groups(resolved.groups)
    layers = Layers(resolved.groups, groups, recorder, method, None, "prune")
    layers.given_masks = {**given_masks}
    if needs := layers.gradients():
        recorder.run(data.batches, needs, data.forward, token_mask)
    layers.check(has_data=bool(data.batches))
    return layers, resolved.skipped


@torch.no_grad()
def _pruned(
    layers: Layers,
    data: CalibrationData,
    teacher: Teacher | None,
    options: dict[str, Any],
    checkpoint: str | os.PathLike[str] | None,
    start: float,
) -> PruneReport:
    """Prune layers in one walk with these `options`; the report counts seconds from `start`."""
    if is_elsewhere(data.model):
        check_ranks(data)
    place = {name: value for name, value in options.items() if name != "stream_memory"}  # it changes no result
    gradients = [layers.recorder.of(name).sums[need] for name, needs in layers.gradients().items() for need in needs]
    about = (*layers.described(), None if teacher is None else teacher.described(), place, gradients)
    caller = layers.caller
    saved = checkpoint_of(data, checkpoint, caller, *about)
    is_compared = caller == "prune" and bool(data.batches)  # with `one_shot`, the model may have masks before
    dense_output = data.first_output() if is_compared else None
    walk = walk_of(layers, data, options)
    if layers.shared:
        scoring = Scoring(layers, is_elsewhere(data.model))
        walk.run(caller, scoring)
        layers.given_masks = scoring.masks_of_all()
    rows, matched = walk.run(caller, layers, teacher, checkpoint=saved)
    recovery = None if teacher is None else teacher.finish(matched)
    return PruneReport(
        rows=tuple(rows),
        seconds=time.perf_counter() - start,
        blocks=len(walk.blocks) if data.batches else None,
        recovery=recovery,
        tokens=data.counted(),
        weights=weights_by_name(data.model),
        error_to_dense=data.error_to(dense_output) if is_compared else math.nan,
    )


def _other_entries(data: CalibrationData, pattern: Pattern | None) -> list[TensorGroup]:
    """Return config entries for weights that products of the first batch read, but no module class reveals."""
    of_classes = {entry["tensor_fqn"] for entry in make_config(data.model)}
    entries = list[TensorGroup]()
    for name, is_transposed in other_matrices(data.model, of_classes, lambda: data.output(0)).items():
        structure = {} if pattern is None else {"pattern": replace(pattern, is_transposed=is_transposed)}
        entries.append({"tensor_fqn": name, **structure})
    return entries


def _checked_masks(model: nn.Module, masks: object, others: Mapping[str, object]) -> dict[str, Tensor]:
    """Return masks that were given as bools; raise an error if one does not fit, or another argument has no effect."""
    if not isinstance(masks, Mapping) or not masks or not all(isinstance(m, Tensor) for m in masks.values()):
        raise SparsityError(f"prune: masks must be a dict {{name of a tensor: mask}} with an entry, got {masks!r:.80}")
    for name, value in others.items():
        if value not in (False, None, (), [], "admm", "least_squares"):
            raise SparsityError(f"prune: the masks are given, so {name}={value!r} has no effect; leave it out")
    for name, mask in masks.items():
        where = f"prune: masks[{name!r}]"
        if not isinstance(name, str) or not exists(model, name):
            hint = hint_of(model, str(name), dict(named_tensors(model)))
            raise SparsityError(f"{where}: the model has no such parameter.{hint}")
        shape = tuple(parameter_of(*owner_of(model, name)).shape)
        if tuple(mask.shape) != shape:
            raise SparsityError(f"{where} has shape {tuple(mask.shape)}, but the tensor has {shape}")
        if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
            raise SparsityError(f"{where} must hold bools, or numbers 0 and 1, and keep at least one element")
    return {name: mask != 0 for name, mask in masks.items()}


def _warn_of_dense(report: PruneReport, is_given: bool) -> None:
    """Warn if less than half of the weights that were not excluded were pruned, unless given masks say which are."""
    asked = {name: n for name, n in report.weights.items() if "exclude[" not in report.left_out.get(name, "")}
    dense = [name for name in report.dense if name in asked]
    if not is_given and 2 * sum(asked[name] for name in dense) > sum(asked.values()):
        warn(
            f"prune: only {report.coverage:.1%} of the weights were pruned, and these stayed dense: "
            f"{', '.join(by_pattern(dense))}. The report says what was left out and why; name these weights in the "
            "config of a ScopeSparsifier and call one_shot, or exclude them",
        )


def _check_gradients(score: Score | None, has_batches: bool, has_forward: bool, recover: bool) -> None:
    """Raise an error if the arguments do not provide what the score reads."""
    needs = needs_of(parse_score(score, "prune: "))
    if needs and not has_batches:
        raise SparsityError(f"prune: score={score!r} needs batches to record {', '.join(needs)}; give batches=")
    has_gradients = any(need in GRADIENTS for need in needs)
    if has_gradients and recover:
        raise SparsityError(
            f"prune: score={score!r} needs a forward that returns the loss, but recover needs one that returns "
            "outputs; call prune first, and then recover(pruned, model, batches)"
        )
    if has_gradients and not has_forward:
        raise SparsityError(
            f"prune: score={score!r} needs gradients of a loss; give forward=lambda model, batch: ... that returns it"
        )
