"""`one_shot`: masks and compensated weights of a trained model, in one pass over calibration data."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import masking
from ..calibration import GRADIENTS, Statistics, Target, checked_batches, tokens_of
from ..distributed import is_sharded
from ..errors import SparsityError
from ..scores import needs_of
from ..sparsifiers.component import Component
from ..sparsifiers.scope import ScopeSparsifier
from .layers import METHODS, Layer, compensate, fill_masks
from .report import LayerRow, OneShotReport
from .walk import Batches, Unit, Walk


def one_shot(
    sparsifier: ScopeSparsifier,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    compensate: str | None = "admm",
    blocks: str | None = None,
    where: str | Callable[[Any], Tensor] | None = None,
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
        blocks: the name of the module list of repeated blocks; None finds it. See `oneshot.walk`.
        where: which tokens count, such as an attention mask: a key of the batches, or a function of a batch. It
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
    model = _checked(sparsifier, compensate)
    data = _listed(batches, forward, where)
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            state = _Pass(sparsifier, data, compensate, blocks, resume)
            rows = _pass(state, progress, checkpoint)
    finally:
        for module, mode in modes:
            module.training = mode
    sparsifier._one_shot = None
    return OneShotReport(rows=tuple(rows), seconds=time.perf_counter() - start, blocks=state.walked)


class _Pass:
    """The state of one pass: what is independent, what is coupled, and what is finished."""

    def __init__(
        self, sparsifier: ScopeSparsifier, data: Batches, method: str | None, blocks: str | None, resume: bool
    ) -> None:
        assert sparsifier.model is not None
        self.sparsifier, self.data, self.method, self.blocks = sparsifier, data, method, blocks
        self.groups = sparsifier.groups
        self.at = {g["tensor_fqn"]: i for i, g in enumerate(self.groups)}
        plan = sparsifier._planned(self.groups)
        joint = {id(c) for own in plan.connected if any(len(c.leaves) > 1 for c in own) for c in own}
        self.joint = [c for c in plan.components if id(c) in joint]
        self.own = [[c for c in plan.connected[i] if id(c) not in joint] for i in range(len(self.groups))]
        before = sparsifier._one_shot if resume else None
        self.progress = {"rows": {}, "masks": {}} if before is None else before
        self.done, self.chosen = self.progress["rows"], self.progress["masks"]
        self.walked = 0  # blocks
        self.resumes = resume and bool(self.chosen or self.done)

    def needs(self, group: dict[str, Any]) -> tuple[str, ...]:
        """What is recorded for a tensor: G, for compensation and the report, and what its own scores need."""
        at = self.at[group["tensor_fqn"]]
        form = self.sparsifier._form(group)
        found = [n for c in self.own[at] for n in needs_of(c.score) if n not in GRADIENTS]
        if form is not None and form.has_gram:
            found.append("input_gram")
        return tuple(dict.fromkeys(found))

    def walk(self, needs: Callable[[dict[str, Any]], tuple[str, ...]]) -> Walk:
        """A walk over the layers that have something to record."""
        assert self.sparsifier.model is not None
        targets = [self.sparsifier._target(g, needs(g)) for g in self.groups if needs(g)]
        return Walk(self.sparsifier.model, self.data, targets, self.blocks)

    def statistics(self, name: str, recorded: Statistics | None) -> Statistics | None:
        """What this pass recorded for a tensor, and gradients that the user collected before."""
        before = self.sparsifier._statistics.get(name)
        gradients = {} if before is None else {k: v for k, v in before.sums.items() if k in GRADIENTS}
        if before is None or not gradients:
            return recorded
        group = self.groups[self.at[name]]
        found = recorded or Statistics(name=name, shape=before.shape, form=self.sparsifier._form(group))
        found.sums.update(gradients)
        found.passes = before.passes
        return found

    def layer(self, target: Target, recorded: Statistics | None) -> Layer:
        """A tensor as the solvers take it."""
        at = self.at[target.name]
        weight = self.sparsifier._dense(self.groups[at])
        return Layer(
            at=at,
            target=target,
            statistics=self.statistics(target.name, recorded),
            weight=weight if weight.dtype == torch.float64 else weight.float(),
            components=self.own[at],
            mask=self.chosen.get(target.name),
        )


def _pass(state: _Pass, progress: bool, checkpoint: Callable[[], None] | None) -> list[LayerRow]:
    sparsifier = state.sparsifier
    _check_gradients(state)
    if state.joint and not state.resumes:
        state.chosen.update(_joint_masks(state))
    sparsifier._one_shot = state.progress
    walk = state.walk(state.needs)
    state.walked = walk.blocks
    unreached = [t.name for t in walk.unreached if t.form is not None]
    unknown = [t for t in walk.unreached if t.form is None]
    if unknown:
        kinds = ", ".join(dict.fromkeys(type(t.module).__name__.removeprefix("Parametrized") for t in unknown))
        text = f"one_shot: inputs of {kinds} are not recorded, so {', '.join(t.name for t in unknown)} are pruned"
        warnings.warn(f"{text} without statistics (by magnitude where the score needs inputs)", stacklevel=4)
    if unreached:
        text = (
            f"one_shot: no batch reached {', '.join(unreached)}; they are pruned without statistics (by magnitude where"
        )
        warnings.warn(f"{text} the score needs inputs), not compensated", stacklevel=4)
    units = walk.units()
    recorded = {t.name for u in units for t in u.targets}
    rest = [sparsifier._target(g, ()) for g in state.groups if g["tensor_fqn"] not in recorded]
    with _bar(len(state.groups), progress) as bar:
        for layers in chain(_units(state, walk, units), ([state.layer(t, None)] for t in rest)):
            fresh = [layer for layer in layers if layer.target.name not in state.done]
            with torch.autocast(layers[0].weight.device.type, enabled=False):
                compensate(sparsifier, fresh, state.method)
                for layer in fresh:
                    row = _row(layer, layer.target.name in unreached)
                    _write(sparsifier, layer)
                    state.done[layer.target.name] = asdict(row)
            bar.update(len(layers))
            if fresh and checkpoint is not None:
                checkpoint()
    return [LayerRow(**state.done[t.name]) for t in (*(t for u in units for t in u.targets), *rest)]


def _check_gradients(state: _Pass) -> None:
    """Raise if gradients that a score needs were not recorded before."""

    def statistics(at: int) -> Statistics:
        return state.sparsifier._statistics_of(state.groups[at])

    for component in state.sparsifier._planned(state.groups).components:
        needs = [n for n in needs_of(component.score) if n in GRADIENTS]
        for _, at in component.scored(statistics) if needs else ():
            missing = statistics(at).missing(needs)
            if missing:
                raise SparsityError(
                    f"one_shot: {state.groups[at]['tensor_fqn']}: {component.score} needs {', '.join(missing)}; run "
                    "sparsifier.calibrate(batches, forward) first, with a forward that returns the loss"
                )


def _units(state: _Pass, walk: Walk, units: Sequence[Unit]) -> Iterator[list[Layer]]:
    for unit in units:
        for statistics in walk.visit(unit):
            yield [state.layer(t, statistics.get(t.name)) for t in unit.targets]


def _joint_masks(state: _Pass) -> dict[str, Tensor]:
    """Masks of the tensors that are coupled or share a budget, from the dense model; nothing is changed."""
    sparsifier = state.sparsifier
    needs = {at: set[str]() for at in range(len(state.groups))}
    for component in state.joint:
        for _, at in component.scored(lambda i: sparsifier._statistics_of(state.groups[i])):
            needs[at] |= {n for n in needs_of(component.score) if n not in GRADIENTS}
    by_name = {g["tensor_fqn"]: tuple(needs[at]) for at, g in enumerate(state.groups)}
    known: dict[Component, dict[int, Tensor]] = {c: {} for c in state.joint}
    if any(by_name.values()):
        walk = state.walk(lambda g: by_name[g["tensor_fqn"]])
        for unit in walk.units():
            for recorded in walk.visit(unit):  # statistics are freed unit by unit; saliencies are kept
                for component in state.joint:
                    for leaf, at in component.leaves:
                        name = state.groups[at]["tensor_fqn"]
                        own = state.statistics(name, recorded.get(name))
                        if name in recorded and own is not None and not own.missing(needs_of(component.score)):
                            weight = sparsifier._dense(state.groups[at])
                            known[component][at] = component.value_of(leaf, weight, own)

    def values(component: Component) -> tuple[dict[Tensor, Tensor], float | None]:
        own = component.values(
            lambda i: sparsifier._dense(state.groups[i]),
            lambda i: sparsifier._statistics_of(state.groups[i]),
            known[component],
        )
        return own, component.norm_of(own.values())

    members = {at for c in state.joint for _, at in c.leaves}
    masks = {at: torch.ones_like(sparsifier._live_mask(state.groups[at])) for at in members}
    fill_masks(sparsifier, state.joint, values, masks)
    return {state.groups[at]["tensor_fqn"]: mask for at, mask in masks.items()}


def _row(layer: Layer, unreached: bool) -> LayerRow:
    assert layer.mask is not None
    before, after = layer.errors()
    note = "not reached by any batch" if unreached else ""
    if layer.gram is None and not unreached:
        note = "no inputs recorded: not compensated"
    if layer.gram is not None and layer.statistics is not None and layer.statistics.tokens < layer.gram.shape[1]:
        note = f"{layer.statistics.tokens} tokens for {layer.gram.shape[1]} inputs"
    density = float(layer.mask.float().mean())
    return LayerRow(
        tensor=layer.target.name, before=before, after=after, density=density, seconds=layer.seconds, note=note
    )


def _write(sparsifier: ScopeSparsifier, layer: Layer) -> None:
    """Mask and weight of one layer; both are computed before either is changed."""
    group = sparsifier.groups[layer.at]
    parameter, mask = layer.target.parameter, sparsifier._live_mask(group)
    assert layer.mask is not None and layer.found is not None
    values = torch.where(layer.mask, layer.found, 0).to(parameter.dtype)
    if not bool(torch.isfinite(values).all()):
        raise SparsityError(f"one_shot: {layer.target.name}: the compensated weights are not finite")
    parameter.copy_(values)
    mask.copy_(layer.mask)


def _checked(sparsifier: object, method: str | None) -> nn.Module:
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
    assert sparsifier.model is not None
    return sparsifier.model


def _listed(
    batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None, where: str | Callable[[Any], Tensor] | None
) -> Batches:
    checked_batches(batches, where, forward, "one_shot")
    kept = list(batches)
    if not kept:
        raise SparsityError("one_shot: there are no batches; an iterator that was used up before gives none")
    counted = [tokens_of(batch, where, "one_shot") for batch in kept]
    return Batches(batches=kept, forward=forward, where=counted)


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, desc="one-shot", unit="layer", disable=None if progress else True)
