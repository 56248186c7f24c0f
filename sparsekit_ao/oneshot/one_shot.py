"""`one_shot`: masks and compensated weights of a trained model, in one pass over calibration data."""

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import masking
from ..calibration import GRADIENTS, Statistics, Target, checked_batches, eval_mode, progress_bar, token_mask_of
from ..distributed import is_sharded
from ..errors import SparsityError
from ..scores import needs_of
from ..sparsifiers.groups import PruningGroup, connected
from ..sparsifiers.scope import ScopeSparsifier
from .prune_layer import METHODS, Layer, fill_masks, prune_layer
from .report import LayerRow, OneShotReport
from .sequential import CalibrationData, SequentialPass


def one_shot(
    sparsifier: ScopeSparsifier,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    compensate: str | None = "admm",
    blocks: str | None = None,
    token_mask: str | Callable[[Any], Tensor] | None = None,
    progress: bool = True,
    resume: bool = False,
    checkpoint: Callable[[], None] | None = None,
) -> OneShotReport:
    """Prune a trained model in one pass: layer after layer, masks are chosen and the kept weights make up for the rest.

    Each layer is solved for the inputs that it gets from the layers already pruned. The model keeps its masks, and its
    dropped weights are zero; `squash_mask()` ends it. `step()` chooses masks anew by the score (the same ones as
    long as that is the size of the weights).

    Args:
        sparsifier: prepared on the model; any config.
        batches: calibration data, as for `sparsifier.calibrate`; kept in a list.
        forward: `(model, batch) -> anything`, called instead of the model.
        compensate: `"admm"`: masks and weights by ALPS (arXiv 2406.07831) with this library's exact selection, for any
            structure. `"obs"`: structured optimal brain surgeon (S3, arXiv 2604.11315), scope after scope.
            `"sparsegpt"`: the baseline (arXiv 2301.00774), for N:M along the inputs and single elements of a whole
            tensor. `"least_squares"`: masks by the sparsifier's score, and the best weights for them. None: masks only.
        blocks: the name of the module list of repeated blocks; None finds it. See `oneshot.sequential`.
        token_mask: which tokens count, such as an attention mask: a key of the batches, or a function of a batch. It
            applies to layers that read [batch, tokens, inputs]; convolutions, and layers that read something else
            (a pooled token, say), count every position.
        progress: show a progress bar on a terminal.
        resume: continue after an interruption; layers that were finished stay as they are. In a new process, load the
            state dicts of the model and of the sparsifier first; without one of a pass in progress, it starts anew.
        checkpoint: called after each finished block or layer, to save the state dicts of the model and the sparsifier.
            A pass that resumes from them gives the same bits as one that was never interrupted.

    Tensors that are coupled or share a budget are pruned in two phases: their masks are chosen by the score before any
    layer changes; then each layer is compensated by least squares when the pass reaches it. Inputs are recorded before
    the layers of the same block change, so the inputs of a layer that lost units make up for them.

    Returns:
        A row for each layer, with its relative output error before and after.

    Raises:
        SparsityError: bad arguments, no batches, values that are not finite, sharded weights, a mask on top of another
            parametrization. An interruption or error in the middle leaves every layer as it was or finished.

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
    model = sparsifier.model
    assert model is not None
    checked_batches(batches, token_mask, forward, "one_shot")
    data_batches = list(batches)
    if not data_batches:
        raise SparsityError("one_shot: there are no batches; an iterator that was used up before gives none")
    token_masks = [token_mask_of(batch, token_mask, "one_shot") for batch in data_batches]
    data = CalibrationData(batches=data_batches, forward=forward, token_masks=token_masks)
    with eval_mode(model), torch.no_grad():
        rows, count = _Pass(sparsifier, data, compensate, blocks, resume).run(progress, checkpoint)
    sparsifier._one_shot = None
    return OneShotReport(rows=rows, seconds=time.perf_counter() - start, blocks=count)


def _check(sparsifier: object, method: str | None) -> None:
    if not isinstance(sparsifier, ScopeSparsifier):
        raise SparsityError(f"one_shot needs a ScopeSparsifier, got {type(sparsifier).__name__}")
    sparsifier._need_prepared("one_shot")
    if method not in METHODS:
        raise SparsityError(f"one_shot: compensate must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    for group in sparsifier.groups:
        fqn, weight = group["tensor_fqn"], sparsifier._dense(group)
        if not masking.is_on_parameter(group["module"], group["tensor_name"]):
            raise SparsityError(
                f"one_shot: {fqn} has another parametrization below its mask; remove it first "
                "(torch.nn.utils.parametrize.remove_parametrizations)"
            )
        if is_sharded(weight):
            raise SparsityError(f"one_shot: {fqn} is sharded over ranks; prune before fully_shard")
        if weight.is_meta or not bool(torch.isfinite(weight).all()):
            raise SparsityError(f"one_shot: {fqn} has weights that are not finite, or no values (meta device)")


class _Pass:
    """One pass: which tensors share a choice, which masks are chosen, and which layers are finished."""

    def __init__(
        self,
        sparsifier: ScopeSparsifier,
        data: CalibrationData,
        method: str | None,
        blocks: str | None,
        resume: bool,
    ) -> None:
        self.sparsifier, self.data, self.method, self.blocks = sparsifier, data, method, blocks
        self.groups = sparsifier.groups
        self.index = {g["tensor_fqn"]: i for i, g in enumerate(self.groups)}
        pruning_groups = sparsifier._pruning_groups(self.groups)
        all_coupled = connected(pruning_groups, len(self.groups))
        shared = {id(c) for coupled in all_coupled if any(len(c.members) > 1 for c in coupled) for c in coupled}
        self.pruning_groups = pruning_groups
        self.shared = [c for c in pruning_groups if id(c) in shared]  # of coupled tensors, or with a shared budget
        self.single = [[c for c in all_coupled[i] if id(c) not in shared] for i in range(len(self.groups))]
        saved = sparsifier._one_shot if resume else None
        self.progress = {"rows": {}, "masks": {}} if saved is None else saved
        self.rows, self.masks = self.progress["rows"], self.progress["masks"]  # of finished layers; of shared choices

    def run(self, progress: bool, checkpoint: Callable[[], None] | None) -> tuple[tuple[LayerRow, ...], int]:
        """Rows of all layers, and the number of blocks."""
        self._check_gradients()
        if self.shared and not self.masks and not self.rows:
            self.masks.update(self._shared_masks())
        self.sparsifier._one_shot = self.progress
        sequence = self._sequence(self._needs)
        _warn_of_unreached(sequence.unreached)
        unreached = {t.name for t in sequence.unreached if t.adapter is not None}
        recorded = [t for group in sequence.groups for t in group.targets]
        names = {t.name for t in recorded}
        rest = [self.sparsifier._target(g, ()) for g in self.groups if g["tensor_fqn"] not in names]
        layer_groups = ([self._layer(t, s.get(t.name)) for t in group.targets] for group, s in sequence.record())
        with progress_bar(None, "one-shot", progress, unit="layer", total=len(self.groups)) as bar:
            for layers in chain(layer_groups, ([self._layer(t, None)] for t in rest)):
                fresh = [layer for layer in layers if layer.target.name not in self.rows]
                with torch.autocast(layers[0].weight.device.type, enabled=False):
                    for layer in fresh:
                        prune_layer(self.sparsifier, layer, self.method)
                    for layer in fresh:
                        row = _row(layer, layer.target.name in unreached)
                        _write(self.sparsifier, layer)
                        self.rows[layer.target.name] = asdict(row)
                bar.update(len(layers))
                if fresh and checkpoint is not None:
                    checkpoint()
        return tuple(LayerRow(**self.rows[t.name]) for t in (*recorded, *rest)), len(sequence.blocks)

    def _check_gradients(self) -> None:
        """Raise if gradients that a score needs were not recorded before."""
        for pruning_group in self.pruning_groups:
            needs = [n for n in needs_of(pruning_group.score) if n in GRADIENTS]
            for _, at in pruning_group.scored(self._collected) if needs else ():
                missing = self._collected(at).missing(needs)
                if missing:
                    raise SparsityError(
                        f"one_shot: {self.groups[at]['tensor_fqn']}: {pruning_group.score} needs {', '.join(missing)}; "
                        "run sparsifier.calibrate(batches, forward) first, with a forward that returns the loss"
                    )

    def _collected(self, at: int) -> Statistics:
        """What the user collected before."""
        return self.sparsifier._statistics_of(self.groups[at])

    def _needs(self, at: int) -> Iterable[str]:
        """What is recorded for a tensor: G, for compensation and the report, and what its own scores need."""
        adapter = self.sparsifier._adapter(self.groups[at])
        scores = [n for c in self.single[at] for n in needs_of(c.score) if n not in GRADIENTS]
        return [*scores, "input_gram"] if adapter is not None and adapter.has_gram else scores

    def _sequence(self, needs: Callable[[int], Iterable[str]]) -> SequentialPass:
        """A pass over the layers that have something to record."""
        assert self.sparsifier.model is not None
        targets = [self.sparsifier._target(g, needs(at)) for at, g in enumerate(self.groups)]
        return SequentialPass(self.sparsifier.model, self.data, [t for t in targets if t.needs], self.blocks)

    def _statistics(self, name: str, recorded: Statistics | None) -> Statistics | None:
        """What this pass recorded for a tensor, and gradients that the user collected before."""
        before = self._collected(self.index[name])
        gradients = {need: total for need, total in before.sums.items() if need in GRADIENTS}
        if not gradients:
            return recorded
        statistics = recorded or Statistics(name=name, shape=before.shape, adapter=before.adapter)
        statistics.sums.update(gradients)
        statistics.passes = before.passes
        return statistics

    def _layer(self, target: Target, recorded: Statistics | None) -> Layer:
        at = self.index[target.name]
        weight = self.sparsifier._dense(self.groups[at])
        return Layer(
            index=at,
            target=target,
            statistics=self._statistics(target.name, recorded),
            weight=weight if weight.dtype == torch.float64 else weight.float(),
            pruning_groups=self.single[at],
            mask=self.masks.get(target.name),
        )

    def _shared_masks(self) -> dict[str, Tensor]:
        """Masks of the tensors that are coupled or share a budget, from the dense model; nothing is changed."""
        needs: dict[int, set[str]] = {at: set() for at in range(len(self.groups))}
        for pruning_group in self.shared:
            for _, at in pruning_group.scored(self._collected):
                needs[at] |= {n for n in needs_of(pruning_group.score) if n not in GRADIENTS}
        saliencies: dict[PruningGroup, dict[int, Tensor]] = {c: {} for c in self.shared}
        groups = self._sequence(lambda at: sorted(needs[at])).record() if any(needs.values()) else ()
        for _, recorded in groups:  # statistics are freed group by group; saliencies are kept
            for pruning_group in self.shared:
                for spec, at in pruning_group.members:
                    name = self.groups[at]["tensor_fqn"]
                    statistics = self._statistics(name, recorded.get(name))
                    if name in recorded and statistics and not statistics.missing(needs_of(pruning_group.score)):
                        saliencies[pruning_group][at] = pruning_group.value_of(spec, self._dense(at), statistics)

        def values(pruning_group: PruningGroup) -> tuple[dict[Tensor, Tensor], float | None]:
            scored = pruning_group.values(self._dense, self._collected, saliencies[pruning_group])
            return scored, pruning_group.norm_of(scored.values())

        members = {at for c in self.shared for _, at in c.members}
        masks = {at: torch.ones_like(self.sparsifier._live_mask(self.groups[at])) for at in members}
        fill_masks(self.sparsifier, self.shared, values, masks)
        return {self.groups[at]["tensor_fqn"]: mask for at, mask in masks.items()}

    def _dense(self, at: int) -> Tensor:
        return self.sparsifier._dense(self.groups[at])


def _warn_of_unreached(targets: Iterable[Target]) -> None:
    without_adapter, unreached = [t for t in targets if t.adapter is None], [t.name for t in targets if t.adapter]
    how = "pruned without statistics (by magnitude where the score needs inputs)"
    if without_adapter:
        kinds = dict.fromkeys(type(t.module).__name__.removeprefix("Parametrized") for t in without_adapter)
        names = ", ".join(t.name for t in without_adapter)
        warnings.warn(f"one_shot: inputs of {', '.join(kinds)} are not recorded, so {names} are {how}", stacklevel=4)
    if unreached:
        text = f"one_shot: no batch reached {', '.join(unreached)}; they are {how}, not compensated"
        warnings.warn(text, stacklevel=4)


def _row(layer: Layer, is_unreached: bool) -> LayerRow:
    assert layer.mask is not None
    before, after = layer.errors()
    note = ""
    if is_unreached:
        note = "not reached by any batch"
    elif layer.gram is None:
        note = "no inputs recorded: not compensated"
    elif layer.statistics is not None and layer.statistics.tokens < layer.gram.shape[1]:
        note = f"{layer.statistics.tokens} tokens for {layer.gram.shape[1]} inputs"
    density, name = float(layer.mask.float().mean()), layer.target.name
    return LayerRow(tensor=name, before=before, after=after, density=density, seconds=layer.seconds, note=note)


def _write(sparsifier: ScopeSparsifier, layer: Layer) -> None:
    """Write mask and weight of a layer; both are computed before either is changed."""
    parameter, mask = layer.target.parameter, sparsifier._live_mask(sparsifier.groups[layer.index])
    assert layer.mask is not None and layer.compensated is not None
    weight = torch.where(layer.mask, layer.compensated, 0).to(parameter.dtype)
    if not bool(torch.isfinite(weight).all()):
        raise SparsityError(f"one_shot: {layer.target.name}: the compensated weights are not finite")
    parameter.copy_(weight)
    mask.copy_(layer.mask)
