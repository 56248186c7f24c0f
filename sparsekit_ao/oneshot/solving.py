"""The layers of a walk: which tensors are chosen together, and how masks and kept weights are computed and written."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import masking
from ..calibration import GRADIENTS, INPUTS, Recorder, Statistics, Target
from ..calibration.gram import damped_gram, divided, is_finite, power_of_two
from ..distributed import copy_values, has_process_group, is_sharded, of_all_ranks, rank
from ..errors import SparsityError
from ..models.names import connected
from ..scores import needs_of
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.groups import PruningGroup, choose_masks, groups_by_name, labels_of
from .solvers import SOLVERS, MatrixScopes, least_squares, relative_errors

METHODS = (None, "least_squares", *SOLVERS)
DAMP = 0.01  # share of mean(diag G) that is added to G before it is inverted or fitted
MOST_INPUTS = 32_768  # inputs of a layer whose Gram matrix is inverted
UNSEEN = (
    "no inputs recorded, as no product of the forward with this weight is of a known kind (it may be one of groups): "
    "pruned by magnitude where the score needs inputs, not compensated"
)
Masks = Mapping[str, Tensor]
Values = Callable[[PruningGroup], tuple[dict[Tensor, Tensor], float | None]]  # what is scored, and its norm


def may_change(weight: Tensor) -> Tensor:
    """Return which elements of a pruned weight may be fitted or trained: all but zeros, be they of pruning or others.

    Elements that are 0 by accident, and whole weights that have been 0 since their initialization, thus stay 0 too.
    """
    return weight.detach() != 0


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A row of a `PruneReport`: what pruning did to one layer.

    Attributes:
        tensor: The name of the weight.
        before: The relative output error with the mask alone, sqrt(tr((W-V) G (W-V)^T) / tr(W G W^T)). NaN if G = X^T X
            is not recorded, because there are no inputs or `compensate` is None.
        after: The same with compensated weights.
        density: The fraction of the elements that are not zero now.
        seconds: The time spent on this layer, without its share of recording.
        note: What was special about the layer, or "".
        returned: How many elements were zero before and are not now. The printed report shows only the sum.

    >>> LayerRow(tensor="fc.weight", before=0.3, after=0.1, density=0.5, seconds=0.2).after
    0.1
    """

    tensor: str
    before: float
    after: float
    density: float
    seconds: float
    note: str = ""
    returned: int = field(default=0, repr=False)


@dataclass(kw_only=True, eq=False)
class Layer:
    """One tensor while a walk prunes it."""

    target: Target
    statistics: Statistics  # of this pass, with gradients collected before; without sums if no batch reached it
    weight: Tensor  # the dense weight in float32 (float64 if it is float64)
    pruning_groups: Sequence[PruningGroup]  # of this tensor alone, stage by stage; empty if its mask was chosen before
    mask: Tensor | None = None  # if it was chosen before
    allowed: Tensor | None = None  # the only elements that may be kept; None is all
    note: str = ""  # of its row if G, the Gram matrix of its inputs, was not recorded


class Layers:
    """The layers that a walk prunes: which are chosen together, how each is solved, and its mask (`walk.Solving`)."""

    def __init__(
        self,
        groups: Sequence[TensorGroup],
        pruning_groups: Sequence[PruningGroup],  # stage by stage
        recorder: Recorder,
        method: str | None,
        live_mask: Callable[[TensorGroup], Tensor] | None,  # None if the model has no masks
        caller: str,
    ) -> None:
        self.groups, self.pruning_groups, self.recorder = groups_by_name(groups), pruning_groups, recorder
        self.method, self._live_mask, self.caller = method, live_mask, caller
        self.chosen: dict[str, Tensor] = {}  # {name: mask} of solved tensors whose masks are to be written
        self.keeps_zeros = False  # whether an element that is zero may not be kept, and stays zero
        self.given_masks: dict[str, Tensor] = {}  # of the user, or of the tensors of `shared`, once they are chosen
        self.notes: dict[str, str] = {}  # {name: why a tensor is not compensated}
        self._single: dict[str, list[PruningGroup]] = {name: [] for name in self.groups}  # of one tensor, by stages
        self.shared: list[PruningGroup] = []  # of tensors that are coupled or share a budget
        for coupled in connected({pruning: pruning.specs for pruning in pruning_groups}):
            if any(len(pruning.specs) > 1 for pruning in coupled):
                self.shared += coupled
            else:
                self._single[next(iter(coupled[0].specs))] = coupled

    def check(self, has_data: bool) -> None:
        """Raise an error if a tensor cannot be solved: values are not finite, inputs too many, or gradients missing."""
        for name, group in self.groups.items():
            module, tensor_name = group["module"], group["tensor_name"]
            # without data, zeros are written through other parametrizations
            if has_data and not masking.is_parameter(module, tensor_name):
                raise SparsityError(
                    f"{self.caller}: {name} has another parametrization below its mask; remove it first "
                    "(torch.nn.utils.parametrize.remove_parametrizations)"
                )
            weight = self._finite(name)
            adapter = self.recorder.adapter(name) if self.method in ("obs", "sparsegpt") else None
            inputs = 0 if adapter is None else adapter.matrix(torch.empty(weight.shape, device="meta")).shape[2]
            if inputs > MOST_INPUTS:
                raise SparsityError(
                    f"{self.caller}: {name} has {inputs:,} inputs, and compensate={self.method!r} inverts a matrix "
                    f"of their products; use 'admm' or 'least_squares' for more than {MOST_INPUTS:,}"
                )
        for name, needs in self.gradients().items():
            missing = self.recorder.of(name).missing(needs)
            if missing:
                score = next(p.score for p in self.pruning_groups if name in p.specs and needs_of(p.score))
                raise SparsityError(
                    f"{self.caller}: {name}: {score} needs {', '.join(missing)}; "
                    "run sparsifier.calibrate(batches, forward) first, with a forward that returns the loss"
                )

    def gradients(self) -> dict[str, list[str]]:
        """Return {name: the statistics of gradients that its scores read}."""
        needs: dict[str, list[str]] = {}
        for pruning in self.pruning_groups:
            of_score = [need for need in needs_of(pruning.score) if need in GRADIENTS]
            for name in pruning.scored(self.recorder.of) if of_score else ():
                needs[name] = [*needs.get(name, ()), *of_score]
        return needs

    def described(self) -> Iterator[object]:
        """Yield what identifies this choice of masks."""
        yield self.method, self.keeps_zeros, self.given_masks
        for pruning in self.pruning_groups:
            yield pruning.budget(self.groups)
            yield pruning.label, pruning.stage, pruning.norm, pruning.score, pruning.member_scores, pruning.least
            yield [(name, pruning.pattern(name)) for name in pruning.specs]

    def target(self, name: str) -> Target:
        """Return a target that records G (or squares, only to see which layers run) and what its scores need."""
        adapter = self.recorder.adapter(name)
        needs = [n for pruning in self._single[name] for n in needs_of(pruning.score) if n not in GRADIENTS]
        if adapter is not None and adapter.has_gram:
            needs.append("input_square" if self.method is None else "input_gram")
        return self.recorder.target(name, needs)

    def planned(self, name: str) -> LayerRow:
        """Return a row with the density that a tensor is to have, its structure, and whether it is compensated."""
        target = self.recorder.target(name, ())
        weight, dense, mask = torch.zeros(target.shape, device="cpu"), self._dense(name), self.given_masks.get(name)
        layer = Layer(target=target, statistics=target.blank(), weight=weight, pruning_groups=self._single[name])
        if self.keeps_zeros and not dense.is_meta and not is_sharded(dense):
            layer.allowed = may_change(dense).cpu()
        if mask is None:
            mask = _mask_of(layer, self.groups, lambda p: ({spec.view.param: weight for spec in p.specs.values()}, 2))
        why = self.notes.get(name) or ("compensate is None" if self.method is None else "")
        shapes = ", then ".join(p.pattern(name) for p in layer.pruning_groups)
        note = "given mask" if name in self.given_masks else shapes
        note += f"; not compensated: {why.removesuffix(': not compensated')}" if why else "; compensated"
        nan = math.nan
        return LayerRow(tensor=name, before=nan, after=nan, density=float(mask.float().mean()), seconds=nan, note=note)

    @contextmanager
    def masks(self, names: Collection[str]) -> Iterator[None]:
        """Return a context in which these masks keep everything; on exit each is the chosen one, or restored."""
        live = {} if self._live_mask is None else {name: self._live_mask(self.groups[name]) for name in names}
        before = {name: mask.clone() for name, mask in live.items()}
        for mask in live.values():
            # until the exit, solved weights hold their zeros themselves, so a block computes the same
            mask.fill_(True)
        try:
            yield
        except BaseException:
            self.chosen.clear()
            raise
        finally:
            for name, mask in live.items():
                copy_values(mask, self.chosen.pop(name, before[name]))

    def solve(self, names: Sequence[str], statistics: dict[str, Statistics]) -> list[LayerRow]:
        """Prune tensors: all are computed, each by one rank, before any of them changes."""
        solved: dict[str, tuple[Tensor, Tensor, LayerRow]] = {}
        targets = {name: self.target(name) for name in names}
        owners = _shared_out({name: self._cost(target) for name, target in targets.items()})
        with alike():
            for name, target in targets.items():
                recorded = statistics.pop(name, None)  # popped to free its memory
                if owners[name] == rank():
                    weight = self._finite(name)
                    of_layer = self._statistics(name, recorded)
                    is_unseen = recorded is None and not of_layer.sums
                    reads_inputs = self.method is not None or any(needs_of(p.score) for p in self._single[name])
                    mask = self.given_masks.get(name)
                    layer = Layer(
                        target=target,
                        statistics=of_layer,
                        # a copy, since the CPU backend uses `Tensor.numpy`; see `_of_tensor` in identity.py
                        weight=weight.to(torch.promote_types(weight.dtype, torch.float32), copy=has_process_group()),
                        pruning_groups=self._single[name],
                        mask=None if mask is None else mask.to(weight.device),
                        allowed=may_change(weight) if self.keeps_zeros else None,
                        note=self.notes.get(name, UNSEEN if is_unseen and reads_inputs else ""),
                    )
                    with torch.autocast(weight.device.type, enabled=False):
                        compensated, mask, row = prune_layer(layer, self.groups, self.method)
                    compensated = torch.where(mask, compensated, 0).to(weight.dtype)
                    if not is_finite(compensated):
                        raise SparsityError(f"{name}: the compensated weights are not finite")
                    returned = int(((weight == 0) & (compensated != 0)).sum())
                    solved[name] = compensated, mask, replace(row, returned=returned)
        _exchange(solved, owners, {name: self._dense(name) for name in names})
        rows = []
        for name, target in targets.items():
            weight, mask, row = solved.pop(name)
            if masking.is_parameter(target.module, target.tensor_name):
                target.parameter.copy_(weight)
            else:
                masking.write_masked(target.module, target.tensor_name, mask)
            if self._live_mask is not None:
                self.chosen[name] = mask
            rows.append(row)
        return rows

    def _cost(self, target: Target) -> int:
        """Return the relative cost of solving a tensor: the cube of its number of inputs."""
        if target.adapter is None:
            return math.prod(target.shape)
        groups, _, inputs = target.adapter.matrix(torch.empty(target.shape, device="meta")).shape
        return int(groups * inputs**3)

    def _statistics(self, name: str, recorded: Statistics | None) -> Statistics:
        """Return what the walk recorded, if anything, with the gradients that the user collected before."""
        before, statistics = self.recorder.of(name), recorded or self.recorder.target(name, ()).blank()
        statistics.sums.update({need: total for need, total in before.sums.items() if need in GRADIENTS})
        statistics.passes = before.passes
        return statistics

    def _dense(self, name: str) -> Tensor:
        return masking.dense_weight(self.groups[name]["module"], self.groups[name]["tensor_name"])

    def _finite(self, name: str) -> Tensor:
        """Return a dense weight, or raise an error if it has values here, and one of them is not finite."""
        weight = self._dense(name)
        if not weight.is_meta and not is_sharded(weight) and not is_finite(weight):  # others are checked once loaded
            raise SparsityError(f"{self.caller}: {name} has weights that are not finite")
        return weight


class Scoring:
    """Scores the tensors that are coupled or share a budget, in a walk that changes nothing."""

    def __init__(self, layers: Layers, copies: bool) -> None:
        self._layers, self._shared = layers, layers.shared
        # Masks keep everything, so that scores are the dense model's, and are then restored, as none is chosen.
        self.masks, self.chosen = layers.masks, layers.chosen
        self._copies = copies  # whether weights are copied, if they are loaded only for a while
        self._values: dict[PruningGroup, dict[str, Tensor]] = {pruning: {} for pruning in layers.shared}
        self._weights: dict[str, Tensor] = {}
        for name in (name for pruning in self._shared for name in pruning.specs):
            self.target(name).check()  # a magnitude could not be compared with the scores of the others

    def target(self, name: str) -> Target:
        """Return a target that records the statistics of inputs that its scores need."""
        recorder = self._layers.recorder
        scores = [p.score for p in self._shared if name in p.specs and name in p.scored(recorder.of)]
        return recorder.target(name, [n for score in scores for n in needs_of(score) if n not in GRADIENTS])

    def solve(self, names: Sequence[str], statistics: dict[str, Statistics]) -> list[LayerRow]:
        """Score tensors. Their saliencies are kept; statistics are freed after each step."""
        for pruning in self._shared:
            for name in pruning.specs.keys() & {*names}:
                weight = self._layers._finite(name)
                recorded = self._layers._statistics(name, statistics.get(name))
                if pruning.score is None and pruning.member_scores == "sum":
                    if self._copies:
                        self._weights[name] = weight.clone()
                elif not recorded.missing(needs_of(pruning.score)):
                    self._values[pruning][name] = pruning.value_of(name, weight, recorded)
        return []

    def masks_of_all(self) -> dict[str, Tensor]:
        """Return masks of all tensors by the scores of the dense model, choosing earlier stages first."""
        layers = self._layers

        def dense(name: str) -> Tensor:
            weight = self._weights.get(name, layers._dense(name))
            return torch.zeros(weight.shape, dtype=weight.dtype, device="cpu") if weight.is_meta else weight

        def values(pruning: PruningGroup) -> tuple[dict[Tensor, Tensor], float | None]:
            return pruning.values(dense, layers.recorder.of, self._values[pruning])

        weights = {name: dense(name) for pruning in self._shared for name in pruning.specs}
        masks = {name: torch.ones(w.shape, dtype=torch.bool, device=w.device) for name, w in weights.items()}
        _choose_by_stage(self._shared, layers.groups, values, masks)
        return masks


def _shared_out(costs: Mapping[str, int]) -> dict[str, int]:
    """Return {name: the rank that solves it}: from the costliest on, each goes to the rank with the least work."""
    loads = [0] * (torch.distributed.get_world_size() if has_process_group() else 1)
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners


@contextmanager
def alike() -> Iterator[None]:
    """Return a context that raises an error of one rank on all ranks, because the others would wait for it."""
    error: Exception | None = None
    try:
        yield
    except Exception as e:
        error = e
    text = next(filter(None, of_all_ranks(error and str(error))), None)
    if error is None and text is not None:
        raise SparsityError(text)
    if error is not None:
        raise error


def _exchange(solved: dict[str, tuple[Tensor, Tensor, LayerRow]], owners: Mapping[str, int], like: Mapping) -> None:
    """Send what each rank has solved, {name: (weight, mask, row)}, to all ranks; `like` are tensors of these shapes."""
    if not has_process_group():
        return
    rows = of_all_ranks({name: row for name, (_, _, row) in solved.items()})
    for name, owner in owners.items():
        blank = torch.empty_like(like[name], memory_format=torch.contiguous_format)
        weight, mask = solved[name][:2] if name in solved else (blank, torch.empty_like(blank, dtype=torch.bool))
        weight, mask = weight.contiguous(), mask.contiguous()
        for tensor in (weight, mask.view(torch.uint8)):
            torch.distributed.broadcast(tensor, src=owner)
        solved[name] = weight, mask, rows[owner][name]


def prune_layer(layer: Layer, groups: Mapping[str, TensorGroup], method: str | None) -> tuple[Tensor, Tensor, LayerRow]:
    """Return the new weight of a layer, its mask, and a row of the report; `groups` have the budgets."""
    start, statistics, mask, unused_score = time.perf_counter(), layer.statistics, layer.mask, ""
    gram = statistics.gram
    if method is None or gram is None:
        mask = _mask_by_score(layer, groups) if mask is None else mask
        weight = layer.weight * mask
    else:
        unit = power_of_two(layer.weight)  # solvers square weights
        matrix = statistics.matrix(divided(layer.weight, unit))
        gram = damped_gram(gram.to(layer.weight.dtype), DAMP)
        if mask is None and method in SOLVERS:
            matrix_mask, solution = SOLVERS[method](matrix, gram, matrix_scopes(layer, groups))
            mask = statistics.from_matrix(matrix_mask)
            if any(c.score is not None for c in layer.pruning_groups):
                unused_score = f"{method} chose the mask without the score; compensate='least_squares' uses it"
        else:
            mask = _mask_by_score(layer, groups) if mask is None else mask
            solution = least_squares(matrix, gram, statistics.matrix(mask))
        weight = statistics.from_matrix(solution) * unit
    seconds, note, before, after = time.perf_counter() - start, layer.note, math.nan, math.nan
    gram = statistics.gram  # without damping
    if gram is not None:
        dense, gram = statistics.matrix(layer.weight), gram.to(layer.weight.dtype)
        masked, solution = (statistics.matrix(w) for w in (layer.weight * mask, weight))
        before, after = relative_errors(dense, gram, masked, solution)
        tokens, inputs, of_experts = statistics.tokens, dense.shape[2], statistics.tokens_of_groups
        few = f"{tokens} tokens for {inputs} inputs" if tokens < inputs else ""
        if of_experts is not None:
            few = f"tokens of an expert: {int(of_experts.min())} at least, {int(of_experts.median())} in the median"
        note = "; ".join(filter(None, (few, unused_score)))
    density, name = float((weight != 0).float().mean()), layer.target.name
    row = LayerRow(tensor=name, before=before, after=after, density=density, seconds=seconds, note=note)
    return weight, mask, row


def _choose_by_stage(
    pruning_groups: Sequence[PruningGroup], groups: Mapping[str, TensorGroup], values: Values, masks: Masks
) -> None:
    """Fill `masks`, {name: mask}, by the values of each pruning group, earlier stages first."""
    for pruning in sorted(pruning_groups, key=lambda pruning: pruning.stage):
        scored, norm = values(pruning)
        choose_masks({pruning: pruning.request(masks, pruning.budget(groups), scored, norm)})


def _mask_by_score(layer: Layer, groups: Mapping[str, TensorGroup]) -> Tensor:
    """Choose a mask by the layer's scores, or by magnitude if they need inputs and no batch reached it."""

    def values(pruning: PruningGroup) -> tuple[dict[Tensor, Tensor], float | None]:
        if any(n in INPUTS for n in layer.statistics.missing(needs_of(pruning.score))):
            return {spec.view.param: layer.weight for spec in pruning.specs.values()}, 2
        return pruning.values(lambda _: layer.weight, lambda _: layer.statistics)

    return _mask_of(layer, groups, values)


def _mask_of(layer: Layer, groups: Mapping[str, TensorGroup], values: Values) -> Tensor:
    mask, stages = torch.ones_like(layer.weight, dtype=torch.bool), layer.pruning_groups
    if layer.allowed is not None:  # as if an earlier stage had kept these elements
        mask, stages = layer.allowed.clone(), [replace(stage, stage=stage.stage + 1) for stage in stages]
    _choose_by_stage(stages, groups, values, {layer.target.name: mask})
    return mask


def matrix_scopes(layer: Layer, groups: Mapping[str, TensorGroup]) -> MatrixScopes:
    """Return the scopes of a layer's elements, as solvers take them."""
    statistics = layer.statistics

    def project(saliency: Tensor, norm: float | None) -> Tensor:
        values = statistics.from_matrix(saliency)
        return statistics.matrix(
            _mask_of(layer, groups, lambda p: ({spec.view.param: values for spec in p.specs.values()}, norm))
        )

    pruning = layer.pruning_groups[-1]
    scope, spec, device = pruning.scope, pruning.specs[layer.target.name], layer.weight.device

    def labels() -> tuple[Tensor, Tensor]:
        blocks = labels_of(spec)  # -1 for elements that a view leaves out
        scope_of_block = torch.arange(math.prod(scope.grid_shape), device="cpu").view(scope.grid_shape)
        for dim, (count, size) in enumerate(zip(spec.grid_shape, scope.members()[0].shape, strict=True)):
            scope_of_block = scope_of_block.repeat_interleave(size, dim).narrow(dim, 0, count)
        scopes = torch.where(blocks >= 0, scope_of_block.flatten()[blocks.clamp(min=0)], -1)
        return statistics.matrix(scopes.to(device)), statistics.matrix(blocks.to(device))

    keep = torch.as_tensor(pruning.budget(groups), dtype=torch.int64, device=device)
    return MatrixScopes(
        name=layer.target.name,
        project=project,
        labels=labels,
        keep=keep.expand(scope.grid_shape).reshape(-1),
        blocks_per_scope=scope.numblk_per_scope(),
        is_plain=not scope.is_partial and len(layer.pruning_groups) == 1,
        allowed=None if layer.allowed is None else statistics.matrix(layer.allowed),
    )
