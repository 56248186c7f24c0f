"""Mask and compensated weight of a single layer, from its statistics, through the sparsifier's own selection."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import INPUTS, Statistics, Target, damped_gram
from ..scores import needs_of
from ..sparsifiers.groups import PruningGroup, labels_of, update_masks
from ..sparsifiers.scope import BudgetSparsifier
from .solvers import CG_STEPS, FEW_STEPS, SOLVERS, MatrixScopes, least_squares, relative_error

METHODS = (None, "least_squares", *SOLVERS)
DAMP = 0.01  # share of mean(diag G) that is added to G before it is inverted or fitted
Values = Callable[[PruningGroup], tuple[dict[Tensor, Tensor], float | None]]  # what is scored, and its norm


@dataclass(kw_only=True, eq=False)
class Layer:
    """One tensor whose inputs were recorded.

    Attributes:
        index: of its group.
        target: where it is.
        statistics: recorded in this pass, and gradients that the user collected before; None if no batch reached it.
        weight: the dense weight in float32 (float64 if it is float64).
        pruning_groups: those of this tensor alone, stage by stage; empty where its mask is chosen before.
        mask: its mask, once that is chosen.
        compensated: its new weight, once that is computed.
        seconds: what both took.
    """

    index: int
    target: Target
    statistics: Statistics | None
    weight: Tensor
    pruning_groups: Sequence[PruningGroup]
    mask: Tensor | None = None
    compensated: Tensor | None = None
    seconds: float = 0.0

    @property
    def gram(self) -> Tensor | None:
        """G of its inputs, or None where there is none."""
        return None if self.statistics is None else self.statistics.sums.get("input_gram")

    def errors(self) -> tuple[float, float]:
        """Relative output errors of the mask alone and of the compensated weight; NaN without inputs."""
        if self.gram is None or self.mask is None or self.compensated is None:
            return float("nan"), float("nan")
        assert self.statistics is not None
        weight, masked, compensated = (
            self.statistics.matrix(t) for t in (self.weight, self.weight * self.mask, self.compensated)
        )
        gram = self.gram.to(weight.dtype)
        return relative_error(weight, gram, masked), relative_error(weight, gram, compensated)


def prune_layer(sparsifier: BudgetSparsifier, layer: Layer, method: str | None) -> None:
    """Choose the mask of a layer, unless it has one, and compute its compensated weight."""
    start, statistics, compensated = time.perf_counter(), layer.statistics, None
    if statistics is not None and layer.gram is not None and method is not None:
        weight, gram = statistics.matrix(layer.weight), damped_gram(layer.gram.to(layer.weight.dtype), DAMP)
        solution = None
        if layer.mask is None and method in SOLVERS:
            mask, solution = SOLVERS[method](weight, gram, matrix_scopes(sparsifier, layer, statistics))
            layer.mask = statistics.from_matrix(mask)
        if layer.mask is None:
            layer.mask = _mask_by_score(sparsifier, layer)
        if method != "sparsegpt":  # which has compensated already
            first, steps = (solution, FEW_STEPS) if method == "admm" and solution is not None else (None, CG_STEPS)
            solution = least_squares(weight, gram, statistics.matrix(layer.mask), steps, first)
        compensated = None if solution is None else statistics.from_matrix(solution)
    if layer.mask is None:
        layer.mask = _mask_by_score(sparsifier, layer)
    layer.compensated = layer.weight * layer.mask if compensated is None else compensated
    layer.seconds = time.perf_counter() - start


def fill_masks(
    sparsifier: BudgetSparsifier, pruning_groups: Sequence[PruningGroup], values: Values, masks: Mapping[int, Tensor]
) -> None:
    """Choose the masks of pruning_groups among values, earlier stages first; masks by the groups' indices."""
    for pruning_group in sorted(pruning_groups, key=lambda c: c.stage):
        scored, norm = values(pruning_group)
        keep = pruning_group.budget(sparsifier.groups)
        update_masks([(pruning_group, pruning_group.request(masks, keep, scored, norm))])


def _mask_by_score(sparsifier: BudgetSparsifier, layer: Layer) -> Tensor:
    """A mask by the layer's scores, or by magnitude if they need inputs and no batch reached it."""
    target = layer.target
    statistics = layer.statistics or Statistics(name=target.name, shape=target.shape, adapter=target.adapter)

    def values(pruning_group: PruningGroup) -> tuple[dict[Tensor, Tensor], float | None]:
        if any(n in INPUTS for n in statistics.missing(needs_of(pruning_group.score))):
            return {spec.view.param: layer.weight for spec, _ in pruning_group.members}, 2
        saliencies = pruning_group.values(lambda _: layer.weight, lambda _: statistics)
        return saliencies, pruning_group.norm_of(saliencies.values())

    mask = torch.ones_like(layer.weight, dtype=torch.bool)
    fill_masks(sparsifier, layer.pruning_groups, values, {layer.index: mask})
    return mask


def matrix_scopes(sparsifier: BudgetSparsifier, layer: Layer, statistics: Statistics) -> MatrixScopes:
    """The scopes of a layer's elements, as solvers take them."""

    def project(saliency: Tensor, norm: float | None) -> Tensor:
        values = statistics.from_matrix(saliency)
        mask = torch.ones_like(layer.weight, dtype=torch.bool)
        fill_masks(
            sparsifier,
            layer.pruning_groups,
            lambda c: ({spec.view.param: values for spec, _ in c.members}, norm),
            {layer.index: mask},
        )
        return statistics.matrix(mask)

    pruning_group = layer.pruning_groups[-1]
    scope, (spec, _) = pruning_group.scope, pruning_group.members[0]
    blocks = labels_of(spec)
    block_grid = [-(-s // b) for s, b in zip(spec.view.shape, spec.shape, strict=True)]
    ids = torch.arange(spec.numblk(), device="cpu")
    scope_of_block = torch.zeros_like(ids)
    for at, count, size in zip(torch.unravel_index(ids, block_grid), block_grid, scope.members()[0].shape, strict=True):
        scope_of_block = scope_of_block * -(-count // size) + at // size
    scopes = torch.where(blocks >= 0, scope_of_block[blocks.clamp(min=0)], -1)
    keep = torch.as_tensor(pruning_group.budget(sparsifier.groups), dtype=torch.int64)
    device, covers = layer.weight.device, bool((blocks >= 0).all())  # a view may leave elements out
    return MatrixScopes(
        name=layer.target.name,
        project=project,
        scopes=statistics.matrix(scopes.to(device)),
        blocks=statistics.matrix(blocks.to(device)),
        keep=keep.to(device).expand(scope.grid_shape).reshape(-1),
        blocks_per_scope=scope.numblk_per_scope(),
        is_plain=covers and not scope.is_partial and len(layer.pruning_groups) == 1,
    )
