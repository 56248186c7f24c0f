"""The calls `one_shot` and `prune`: masks and compensated weights of a trained model, in one pass over its layers."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import masking
from ..calibration import GRADIENTS, INPUTS, RowGram, Statistics, Target, damped_gram
from ..distributed import is_sharded
from ..errors import SparsityError, checked_model, with_hints
from ..masking.normalized import copy_of, redo_weight_norms, undo_weight_norms
from ..models.names import connected
from ..models.progress import progress_bar
from ..models.running import TokenMask, eval_mode
from ..patterns import Pattern
from ..scores import Score, needs_of, parse_score
from ..sparsifiers.config import Exclusion, TensorGroup
from ..sparsifiers.groups import PruningGroup, choose_masks, groups_by_name, labels_of
from ..sparsifiers.scope import ScopeSparsifier
from ..tables import Table
from .matching import RecoveryReport, Teacher, check_models, check_ranks
from .sequential import CalibrationData, SequentialPass
from .solvers import SOLVERS, MatrixScopes, least_squares, relative_error

METHODS = (None, "least_squares", *SOLVERS)
DAMP = 0.01  # share of mean(diag G) that is added to G before it is inverted or fitted
MOST_INPUTS = 32_768  # inputs of a layer whose Gram matrix is inverted
Masks = Mapping[str, Tensor]
Values = Callable[[PruningGroup], tuple[dict[Tensor, Tensor], float | None]]  # what is scored, and its norm


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer.

    Attributes:
        tensor: Its name.
        before: Relative output error with the mask alone, sqrt(tr((W-V) G (W-V)^T) / tr(W G W^T)); NaN where X^T X is
            not recorded: without inputs, or with `compensate=None`.
        after: The same with compensated weights.
        density: The fraction of elements that the mask keeps.
        seconds: Spent on this layer, its share of recording not included.
        note: What was special, or "".

    >>> LayerRow(tensor="fc.weight", before=0.3, after=0.1, density=0.5, seconds=0.2).after
    0.1
    """

    tensor: str
    before: float
    after: float
    density: float
    seconds: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class OneShotReport(Table[LayerRow]):
    """Rows as data; `str()` of it is a table, `plot` a picture.

    Attributes:
        rows: One per layer, in the order of the forward pass.
        seconds: The time of the whole pass, recording included.
        blocks: Number of repeated modules that were pruned in order; 0 where the model ran once for each layer, and
            None where it did not run, without batches.
        recovery: What `recover` did, or None.
        left_out: {tensor: why `prune` left it out}.
        tokens: How many tokens counted, or "" where all did.

    >>> rows = (LayerRow(tensor="fc.weight", before=0.3, after=0.1, density=0.5, seconds=0.2),)
    >>> print(OneShotReport(rows=rows, seconds=0.25))
    tensor     before   after  density  seconds  note
    fc.weight  0.3000  0.1000   0.5000     0.20
    1 layers in 0.2 s, no blocks: the model ran once for each layer
    """

    rows: tuple[LayerRow, ...]
    seconds: float
    blocks: int | None = 0
    recovery: RecoveryReport | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    tokens: str = ""
    bars = ("before", "after")

    def metrics(self) -> dict[str, float]:
        """{"output_error/<tensor>": ..., "seconds": ...}, for any logger."""
        return {
            **{f"output_error/{r.tensor}": r.after for r in self.rows if r.after == r.after},
            "seconds": self.seconds,
        }

    def below(self) -> list[str]:
        """The time, what was recovered, and what was left out."""
        how = f"{self.blocks} blocks" if self.blocks else "no blocks: the model ran once for each layer"
        how = "without batches" if self.blocks is None else how
        notes = [f"{len(self.rows)} layers in {self.seconds:.1f} s, {how}"]
        notes += [self.tokens] if self.tokens and self.recovery is None else []
        notes += [] if self.recovery is None else [str(self.recovery)]
        return [*notes, *(f"left out: {name}: {why}" for name, why in self.left_out.items())]


@with_hints
def one_shot(
    sparsifier: ScopeSparsifier,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    compensate: str | None = "admm",
    blocks: str | None = None,
    token_mask: TokenMask = None,
    recover: bool | nn.Module = False,
    progress: bool = True,
    resume: bool = False,
    checkpoint: Callable[[], None] | None = None,
) -> OneShotReport:
    """Prune a trained model in one pass: layer after layer, masks are chosen and the kept weights make up for the rest.

    Each layer is solved for the inputs that it gets from the layers already pruned. The model keeps its masks, and its
    dropped weights are zero; `squash_mask()` ends it. A later `step()` chooses masks by the score again. With the
    default score, the magnitude of the weights, they are the same masks.

    Args:
        sparsifier: Prepared on the model; any config.
        batches: Recording data, as for `sparsifier.calibrate`; kept in a list.
        forward: `(model, batch) -> anything`, called instead of the model.
        compensate: By `"admm"`, masks and weights are those of ALPS (arXiv 2406.07831) with this library's exact
            selection, for any structure. By `"obs"`, those of structured optimal brain surgeon (S3, arXiv 2604.11315),
            scope after scope. By `"sparsegpt"`, those of the baseline (arXiv 2301.00774), for N:M along the inputs and
            single elements of a whole tensor. By `"least_squares"`, masks are the sparsifier's, with the best weights
            for them. None leaves the kept weights as they are.
            The first three choose the masks themselves; a score that they do not use is noted in the report.
        blocks: The name of the list of repeated blocks (a ModuleList or Sequential); None finds it.
        token_mask: Which tokens count: a key of the batches, or a function of a batch. None takes the
            `attention_mask` of batches that have one, and False counts all tokens. A mask applies to layers that read
            [batch, tokens, inputs]; convolutions, and layers that read something else (a pooled token, say), count
            every position.
        recover: Then train the blocks of the model to give what the dense model's blocks give; see `recover`. True
            keeps a copy of the model as it is now; a dense model can be given instead.
        progress: Show a progress bar on a terminal.
        resume: Continue after an interruption; layers that were finished stay as they are. In a new process, load the
            state dicts of the model and of the sparsifier first; without one of a pass in progress, it starts anew.
            With `recover`, give the dense model.
        checkpoint: Called after each finished block or layer, to save the state dicts of the model and the sparsifier.
            A pass that resumes from them gives the same bits as one that was never interrupted.

    Tensors that are coupled or share a budget are pruned in two phases. Their masks are chosen by the score before any
    layer changes. Then each layer is compensated by least squares when the pass reaches it. Inputs are recorded before
    the layers of the same block change, so the inputs of a layer that lost units make up for them.

    Returns:
        A row for each layer, with its relative output error before and after.

    Raises:
        SparsityError: Bad arguments, no batches, values that are not finite, sharded weights, a mask on top of another
            parametrization. An interruption or error leaves every layer as it was or finished, but see `recover`.

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
    _check(sparsifier, compensate)
    if not isinstance(recover, (bool, nn.Module)):
        raise SparsityError(f"one_shot: recover must be True, False or the dense model, got {recover!r}")
    if checkpoint is not None and not callable(checkpoint):
        raise SparsityError(f"one_shot: checkpoint must be a function without arguments, got {checkpoint!r}")
    model = sparsifier.model
    assert model is not None
    data = CalibrationData.checked(model, batches, forward, token_mask, "one_shot")
    saved = _checked_pass(sparsifier) if resume else None
    dense = recover if isinstance(recover, nn.Module) else None
    if recover is True:
        if saved is not None:
            raise SparsityError("one_shot: resume needs the dense model; give it as recover=dense")
        dense = copy_of(model)
        for group in sparsifier.groups:
            sparsifier.live_mask(group, dense).fill_(True)
    if dense is not None:
        check_models(model, dense)
        check_ranks(data)
    with eval_mode(model), torch.no_grad():
        one_pass = _Pass(sparsifier, data, compensate, blocks, saved)
        rows, repeated = one_pass.run(progress, checkpoint)
    recovery = None
    if dense is not None:

        def finished(count: int) -> None:
            one_pass.finished["recovered"] = count
            if checkpoint is not None:
                checkpoint()

        recovery = Teacher(dense, data, repeated).match_all(None, one_pass.finished["recovered"], progress, finished)
    sparsifier.unfinished_pass = None
    seconds = time.perf_counter() - start
    return OneShotReport(rows=rows, seconds=seconds, blocks=len(repeated), recovery=recovery, tokens=data.counted())


@with_hints
def prune(
    model: nn.Module,
    sparsity_level: float | None = None,
    *,
    pattern: Pattern | str | None = None,
    batches: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    token_mask: TokenMask = None,
    exclude: Sequence[Exclusion] = (),
    score: Score | None = None,
    compensate: str | None = "admm",
    recover: bool = False,
    inplace: bool = False,
    progress: bool = True,
) -> tuple[nn.Module, OneShotReport]:
    """Prune the weights of every Linear and convolution, and return a plain model with zeros in them.

    Without batches, weights are dropped by their size (or a `score` that needs no data) and the others stay. With
    batches, kept weights make up for the dropped ones; see `one_shot`. For other configs, training and schedules use
    `ScopeSparsifier`.

    Args:
        model: Of any device and dtype; not changed unless `inplace`. In a copy, weights of weight_norm are pruned too.
        sparsity_level: Fraction dropped of each weight, in [0, 1]; 0.5 by default.
        pattern: One of `patterns`, or its text ("2:4"); None drops single elements.
        batches, forward, token_mask, compensate, progress: As for `one_shot`; inputs alone, no labels, unless the
            score needs gradients. Then `forward` returns the loss of a batch.
        exclude: Names, globs and regular expressions of tensors or modules, modules and module classes, to leave out.
        score: How much each weight matters; see `scores`. It chooses the masks with `compensate=None` or
            `"least_squares"` only.
        recover: Then train the kept weights of each block to give the dense model's outputs; see `recover`.
        inplace: Prune the model itself.

    Returns:
        The pruned model, and a report. It has a row for each layer with its density and errors, what recovery did, and
        what was left out, such as layers that the pattern does not fit.

    Raises:
        SparsityError: Bad arguments, or nothing to prune. The model is then unchanged. An error in the middle leaves a
            model that was pruned in place with masks, and partly pruned.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> pruned, report = prune(model, pattern="2:4", batches=[torch.randn(64, 16) for _ in range(4)])
    >>> int((pruned[0].weight == 0).sum()), int((model[0].weight == 0).sum()), [row.density for row in report]
    (256, 0, [0.5, 0.5])
    """
    checked_model(model, "prune")
    if batches is None and (recover or forward is not None or token_mask is not None):
        raise SparsityError("prune: recover, forward and token_mask need batches; give unlabelled inputs as batches=")
    check_method(compensate)
    sparsifier = ScopeSparsifier(sparsity_level, pattern=pattern, score=score)
    has_gradients = _needs_gradients(score, batches is not None, forward is not None, recover)
    if batches is not None:
        batches = CalibrationData.checked(model, batches, forward, token_mask, "prune").batches
    pruned = model if inplace else copy_of(model)
    twin = dict(zip(model.modules(), pruned.modules(), strict=True))
    normed = () if inplace else undo_weight_norms(pruned)
    if isinstance(exclude, (list, tuple)):
        exclude = [twin.get(e, e) if isinstance(e, nn.Module) else e for e in exclude]
    sparsifier.prepare(pruned, exclude=exclude, skip_unfit=True)
    left_out = sparsifier.report().skipped
    if batches is None:
        sparsifier.step()
        nan = float("nan")
        rows = tuple(
            LayerRow(tensor=r.tensor, before=nan, after=nan, density=1 - r.sparsity, seconds=0.0, note="no batches")
            for r in sparsifier.report()
        )
        report = OneShotReport(rows=rows, seconds=0.0, blocks=None, left_out=left_out)
    else:
        if has_gradients:
            sparsifier.calibrate(batches, forward, token_mask=token_mask, progress=progress)
        report = one_shot(
            sparsifier,
            batches,
            forward,
            compensate=compensate,
            token_mask=token_mask,
            recover=(inplace or model) if recover else False,
            progress=progress,
        )
        report = replace(report, left_out=left_out)
    sparsifier.squash_mask()
    redo_weight_norms(pruned, normed)
    return pruned, report


def _needs_gradients(score: Score | None, has_batches: bool, has_forward: bool, recover: bool) -> bool:
    """Whether a score of `prune` reads gradients; raises where the arguments do not give what it reads."""
    needs = needs_of(parse_score(score, "prune: "))
    if needs and not has_batches:
        raise SparsityError(f"prune: score={score!r} reads what batches give ({', '.join(needs)}); give batches=")
    has_gradients = any(need in GRADIENTS for need in needs)
    if has_gradients and recover:
        raise SparsityError(
            f"prune: score={score!r} needs a forward that returns the loss, and recover one that returns outputs; call "
            "prune, and then recover(pruned, model, batches)"
        )
    if has_gradients and not has_forward:
        raise SparsityError(
            f"prune: score={score!r} needs gradients of a loss; give forward=lambda model, batch: ... that returns it"
        )
    return has_gradients


def check_method(method: object) -> None:
    """Raise unless `compensate` is a method."""
    if method not in METHODS:
        raise SparsityError(f"one_shot: compensate must be one of {', '.join(map(repr, METHODS))}, got {method!r}")


def _check(sparsifier: object, method: str | None) -> None:
    if not isinstance(sparsifier, ScopeSparsifier):
        raise SparsityError(f"one_shot needs a ScopeSparsifier, got {type(sparsifier).__name__}")
    sparsifier.require_prepared("one_shot")
    check_method(method)
    for group in sparsifier.groups:
        fqn, weight = group["tensor_fqn"], masking.dense_weight(group["module"], group["tensor_name"])
        if not masking.is_on_parameter(group["module"], group["tensor_name"]):
            raise SparsityError(
                f"one_shot: {fqn} has another parametrization below its mask; remove it first "
                "(torch.nn.utils.parametrize.remove_parametrizations)"
            )
        if is_sharded(weight):
            raise SparsityError(f"one_shot: {fqn} is sharded over ranks; prune before fully_shard")
        if weight.is_meta or not bool(torch.isfinite(weight).all()):
            raise SparsityError(f"one_shot: {fqn} has weights that are not finite, or no values (meta device)")


@dataclass(kw_only=True, eq=False)
class Layer:
    """One tensor on its way through the pass.

    Attributes:
        target: Its name, module and parameter.
        statistics: Recorded in this pass, and gradients that the user collected before; None if no batch reached it.
        weight: The dense weight in float32 (float64 if it is float64).
        pruning_groups: Those of this tensor alone, stage by stage; none where its mask is chosen before.
        mask, compensated, seconds: Its mask and new weight, once they are computed, and the time that both took.
        unused_score: What the report says if the method chose the mask though there is a score.
    """

    target: Target
    statistics: Statistics | None
    weight: Tensor
    pruning_groups: Sequence[PruningGroup]
    mask: Tensor | None = None
    compensated: Tensor | None = None
    seconds: float = 0.0
    unused_score: str = ""

    @property
    def gram(self) -> Tensor | RowGram | None:
        """G of its inputs, or None where there is none."""
        return None if self.statistics is None else self.statistics.gram


class _Pass:
    """One pass: which tensors share a choice, which masks are chosen, and which layers are finished."""

    def __init__(
        self,
        sparsifier: ScopeSparsifier,
        data: CalibrationData,
        method: str | None,
        blocks: str | None,
        saved: dict[str, Any] | None,
    ) -> None:
        self.sparsifier, self.data, self.method, self.blocks = sparsifier, data, method, blocks
        self.groups, self.recorder = groups_by_name(sparsifier.groups), sparsifier.recorder
        self.pruning_groups = sparsifier.pruning_groups()
        self.shared: list[PruningGroup] = []  # of coupled tensors, or a shared budget
        self.single: dict[str, list[PruningGroup]] = {name: [] for name in self.groups}  # of one tensor, by stages
        for coupled in connected({pruning: pruning.specs for pruning in self.pruning_groups}):
            if any(len(pruning.specs) > 1 for pruning in coupled):
                self.shared += coupled
            else:
                self.single[next(iter(coupled[0].specs))] = coupled
        self.finished: dict[str, Any] = {"rows": {}, "masks": {}, "recovered": 0} if saved is None else saved
        self.rows, self.masks = self.finished["rows"], self.finished["masks"]  # of finished layers; of shared choices
        if saved is not None and self.rows and {*self.masks} != {n for p in self.shared for n in p.specs}:
            raise SparsityError(
                "one_shot: resume: the loaded pass in progress lacks masks of tensors that share a choice; load the "
                "state dict again"
            )

    def run(
        self, progress: bool, checkpoint: Callable[[], None] | None
    ) -> tuple[tuple[LayerRow, ...], list[nn.Module]]:
        """Return the rows of all layers, and the repeated blocks."""
        self._check_gradients()
        self._check_sizes()
        if self.shared and not self.masks and not self.rows:
            self.masks.update(self._shared_masks())
        self.sparsifier.unfinished_pass = self.finished
        sequence = self._sequence(self._needs)
        _warn_of_unreached(sequence.unreached)
        unreached = {t.name for t in sequence.unreached if t.adapter is not None}
        recorded = list(chain.from_iterable(sequence.groups.values()))
        names = {t.name for t in recorded}
        rest = [self.recorder.target(name, ()) for name in self.groups if name not in names]
        # a generator: each group is recorded after those before it were pruned
        layer_groups = ([self._layer(t, s.get(t.name)) for t in targets] for targets, s in sequence.record())
        with progress_bar(None, "one-shot", "layer", progress=progress, total=len(self.groups)) as bar:
            for layers in chain(layer_groups, ([self._layer(t, None)] for t in rest)):
                fresh = [layer for layer in layers if layer.target.name not in self.rows]
                with torch.autocast(layers[0].weight.device.type, enabled=False):
                    for layer in fresh:
                        prune_layer(layer, self.groups, self.method)
                    for layer in fresh:
                        note = "" if self.method is None else "no inputs recorded: not compensated"
                        note = "not reached by any batch" if layer.target.name in unreached else note
                        row = _finish(layer, self.sparsifier.live_mask(self.groups[layer.target.name]), note)
                        self.rows[layer.target.name] = asdict(row)
                bar.update(len(layers))
                if fresh and checkpoint is not None:
                    checkpoint()
        return tuple(LayerRow(**self.rows[t.name]) for t in (*recorded, *rest)), sequence.blocks

    def _check_gradients(self) -> None:
        """Raise if gradients that a score needs were not recorded before."""
        for pruning in self.pruning_groups:
            needs = [n for n in needs_of(pruning.score) if n in GRADIENTS]
            for name in pruning.scored(self.recorder.of):
                missing = self.recorder.of(name).missing(needs)
                if missing:
                    raise SparsityError(
                        f"one_shot: {name}: {pruning.score} needs {', '.join(missing)}; "
                        "run sparsifier.calibrate(batches, forward) first, with a forward that returns the loss"
                    )

    def _check_sizes(self) -> None:
        """Raise if a method would invert a matrix of more than 4 GiB."""
        for name in self.groups if self.method in ("obs", "sparsegpt") else ():
            adapter = self.recorder.adapter(name)
            inputs = 0 if adapter is None else adapter.matrix(self._dense(name)).shape[2]
            if inputs > MOST_INPUTS:
                raise SparsityError(
                    f"one_shot: {name} has {inputs:,} inputs, and compensate={self.method!r} inverts a matrix of their "
                    f"products; use 'admm' or 'least_squares' for more than {MOST_INPUTS:,}"
                )

    def _needs(self, name: str) -> Iterable[str]:
        """Return the statistics to record: G for compensation, and those that its scores need."""
        adapter = self.recorder.adapter(name)
        scores = [n for pruning in self.single[name] for n in needs_of(pruning.score) if n not in GRADIENTS]
        compensation = "input_square" if self.method is None else "input_gram"  # squares only show which layers run
        return [*scores, compensation] if adapter is not None and adapter.has_gram else scores

    def _sequence(self, needs: Callable[[str], Iterable[str]]) -> SequentialPass:
        """Return a pass over the layers that have something to record."""
        targets = [self.recorder.target(name, needs(name)) for name in self.groups]
        return SequentialPass(self.data, [t for t in targets if t.needs], self.blocks)

    def _statistics(self, name: str, recorded: Statistics | None) -> Statistics | None:
        """Return the statistics that this pass recorded, with gradients that the user collected before."""
        before = self.recorder.of(name)
        gradients = {need: total for need, total in before.sums.items() if need in GRADIENTS}
        if gradients:
            recorded = recorded or Statistics(name=name, shape=before.shape, adapter=before.adapter)
            recorded.sums.update(gradients)
            recorded.passes = before.passes
        return recorded

    def _layer(self, target: Target, recorded: Statistics | None) -> Layer:
        weight = self._dense(target.name)
        return Layer(
            target=target,
            statistics=self._statistics(target.name, recorded),
            weight=weight if weight.dtype == torch.float64 else weight.float(),
            pruning_groups=self.single[target.name],
            mask=self.masks.get(target.name),
        )

    def _shared_masks(self) -> dict[str, Tensor]:
        """Choose masks of the tensors that are coupled or share a budget, from the dense model."""
        needs: dict[str, set[str]] = {name: set() for name in self.groups}
        for pruning in self.shared:
            for name in pruning.scored(self.recorder.of):
                needs[name] |= {n for n in needs_of(pruning.score) if n not in GRADIENTS}
        saliencies: dict[PruningGroup, dict[str, Tensor]] = {pruning: {} for pruning in self.shared}
        layer_groups = self._sequence(lambda name: sorted(needs[name])).record() if any(needs.values()) else ()
        for _, recorded in layer_groups:  # statistics are freed group by group; saliencies are kept
            for pruning in self.shared:
                for name in pruning.specs.keys() & recorded.keys():
                    statistics = self._statistics(name, recorded[name])
                    if statistics and not statistics.missing(needs_of(pruning.score)):
                        saliencies[pruning][name] = pruning.value_of(name, self._dense(name), statistics)

        def values(pruning: PruningGroup) -> tuple[dict[Tensor, Tensor], float | None]:
            scored = pruning.values(self._dense, self.recorder.of, saliencies[pruning])
            return scored, pruning.norm_of(scored.values())

        names = {name: None for pruning in self.shared for name in pruning.specs}
        masks = {name: torch.ones_like(self.sparsifier.live_mask(self.groups[name])) for name in names}
        _choose_by_stage(self.shared, self.groups, values, masks)
        return masks

    def _dense(self, name: str) -> Tensor:
        return masking.dense_weight(self.groups[name]["module"], self.groups[name]["tensor_name"])


def _checked_pass(sparsifier: ScopeSparsifier) -> dict[str, Any] | None:
    """Return the unfinished pass of a sparsifier, with masks on the devices of their weights.

    Raises:
        SparsityError: It was loaded from a state dict, and is not of these tensors.
    """
    saved, where = sparsifier.unfinished_pass, "one_shot: resume: the loaded pass in progress"
    if saved is None:
        return None
    rows, masks, recovered = (saved.get(key) for key in ("rows", "masks", "recovered"))
    if not isinstance(rows, Mapping) or not isinstance(masks, Mapping) or type(recovered) is not int or recovered < 0:
        raise SparsityError(f"{where} has no rows, masks and number of recovered blocks; load the state dict again")
    groups, kinds = groups_by_name(sparsifier.groups), {f.name: f.type for f in fields(LayerRow)}
    for name, row in rows.items():
        if name not in groups or not isinstance(row, Mapping) or {k: type(v) for k, v in row.items()} != kinds:
            raise SparsityError(f"{where} has a row that is not one of its layers: {name!r}: {row!r}")
    live = {name: sparsifier.live_mask(groups[name]) for name in masks if name in groups}
    for name, mask in masks.items():
        if name not in live or not isinstance(mask, Tensor) or mask.shape != live[name].shape:
            raise SparsityError(f"{where} has a mask that does not fit: {name!r}")
    masks = {name: mask.to(live[name].device, torch.bool) for name, mask in masks.items()}
    return {"rows": dict(rows), "masks": masks, "recovered": recovered}


def _warn_of_unreached(targets: Sequence[Target]) -> None:
    how = "pruned without statistics (by magnitude where the score needs inputs)"
    if without_adapter := [t for t in targets if t.adapter is None]:
        kinds = dict.fromkeys(type(t.module).__name__.removeprefix("Parametrized") for t in without_adapter)
        names = ", ".join(t.name for t in without_adapter)
        warnings.warn(f"one_shot: inputs of {', '.join(kinds)} are not recorded, so {names} are {how}", stacklevel=4)
    if unreached := ", ".join(t.name for t in targets if t.adapter is not None):
        warnings.warn(f"one_shot: no batch reached {unreached}; they are {how}, not compensated", stacklevel=4)


def prune_layer(layer: Layer, groups: Mapping[str, TensorGroup], method: str | None) -> None:
    """Choose the mask of a layer, unless it has one, and compute its compensated weight; `groups` have the budgets."""
    start, statistics, solution = time.perf_counter(), layer.statistics, None
    if method is None or statistics is None or layer.gram is None:
        layer.mask = _mask_by_score(layer, groups) if layer.mask is None else layer.mask
    else:
        weight, gram = statistics.matrix(layer.weight), damped_gram(layer.gram.to(layer.weight.dtype), DAMP)
        if layer.mask is None and method in SOLVERS:
            mask, solution = SOLVERS[method](weight, gram, matrix_scopes(layer, groups, statistics))
            layer.mask = statistics.from_matrix(mask)
            if any(c.score is not None for c in layer.pruning_groups):
                layer.unused_score = f"{method} chose the mask, without the score; compensate='least_squares' takes it"
        else:
            layer.mask = _mask_by_score(layer, groups) if layer.mask is None else layer.mask
            solution = least_squares(weight, gram, statistics.matrix(layer.mask))
    if statistics is None or solution is None:
        layer.compensated = layer.weight * layer.mask
    else:
        layer.compensated = statistics.from_matrix(solution)
    layer.seconds = time.perf_counter() - start


def _choose_by_stage(
    pruning_groups: Sequence[PruningGroup], groups: Mapping[str, TensorGroup], values: Values, masks: Masks
) -> None:
    """Choose the masks of pruning groups, {name: mask}, by values, earlier stages first."""
    for pruning in sorted(pruning_groups, key=lambda pruning: pruning.stage):
        scored, norm = values(pruning)
        choose_masks({pruning: pruning.request(masks, pruning.budget(groups), scored, norm)})


def _mask_by_score(layer: Layer, groups: Mapping[str, TensorGroup]) -> Tensor:
    """Choose a mask by the layer's scores, or by magnitude if they need inputs and no batch reached it."""
    statistics = layer.statistics or layer.target.blank()

    def values(pruning: PruningGroup) -> tuple[dict[Tensor, Tensor], float | None]:
        if any(n in INPUTS for n in statistics.missing(needs_of(pruning.score))):
            return {spec.view.param: layer.weight for spec in pruning.specs.values()}, 2
        saliencies = pruning.values(lambda _: layer.weight, lambda _: statistics)
        return saliencies, pruning.norm_of(saliencies.values())

    return _mask_of(layer, groups, values)


def _mask_of(layer: Layer, groups: Mapping[str, TensorGroup], values: Values) -> Tensor:
    mask = torch.ones_like(layer.weight, dtype=torch.bool)
    _choose_by_stage(layer.pruning_groups, groups, values, {layer.target.name: mask})
    return mask


def matrix_scopes(layer: Layer, groups: Mapping[str, TensorGroup], statistics: Statistics) -> MatrixScopes:
    """Return the scopes of a layer's elements, as solvers take them."""

    def project(saliency: Tensor, norm: float | None) -> Tensor:
        values = statistics.from_matrix(saliency)
        return statistics.matrix(
            _mask_of(layer, groups, lambda p: ({spec.view.param: values for spec in p.specs.values()}, norm))
        )

    pruning = layer.pruning_groups[-1]
    scope, spec, device = pruning.scope, pruning.specs[layer.target.name], layer.weight.device

    def labels() -> tuple[Tensor, Tensor]:
        blocks = labels_of(spec)  # -1 for elements that a view leaves out
        block_grid = [-(-s // b) for s, b in zip(spec.view.shape, spec.shape, strict=True)]
        ids = torch.arange(spec.numblk(), device="cpu")
        scope_of_block, positions = torch.zeros_like(ids), torch.unravel_index(ids, block_grid)
        for at, count, size in zip(positions, block_grid, scope.members()[0].shape, strict=True):
            scope_of_block = scope_of_block * -(-count // size) + at // size
        scopes = torch.where(blocks >= 0, scope_of_block[blocks.clamp(min=0)], -1)
        return statistics.matrix(scopes.to(device)), statistics.matrix(blocks.to(device))

    keep = torch.as_tensor(pruning.budget(groups), dtype=torch.int64)
    return MatrixScopes(
        name=layer.target.name,
        project=project,
        labels=labels,
        keep=keep.to(device).expand(scope.grid_shape).reshape(-1),
        blocks_per_scope=scope.numblk_per_scope(),
        is_plain=not scope.is_partial and len(layer.pruning_groups) == 1,
    )


def _finish(layer: Layer, live_mask: Tensor, note: str) -> LayerRow:
    """Write mask and weight of a layer, both of which are computed before either is changed, and report on it."""
    parameter, mask, weight = layer.target.parameter, layer.mask, layer.compensated
    assert mask is not None and weight is not None
    before = after = float("nan")
    if layer.gram is not None and layer.statistics is not None:
        dense, gram = layer.statistics.matrix(layer.weight), layer.gram.to(layer.weight.dtype)
        before = relative_error(dense, gram, layer.statistics.matrix(layer.weight * mask))
        after = relative_error(dense, gram, layer.statistics.matrix(weight))
        tokens, inputs = layer.statistics.tokens, dense.shape[2]
        few = f"{tokens} tokens for {inputs} inputs" if tokens < inputs else ""
        note = "; ".join(filter(None, (few, layer.unused_score)))
    compensated = torch.where(mask, weight, 0).to(parameter.dtype)
    if not bool(torch.isfinite(compensated).all()):
        raise SparsityError(f"one_shot: {layer.target.name}: the compensated weights are not finite")
    parameter.copy_(compensated)
    live_mask.copy_(mask)
    density, name = float(mask.float().mean()), layer.target.name
    return LayerRow(tensor=name, before=before, after=after, density=density, seconds=layer.seconds, note=note)
