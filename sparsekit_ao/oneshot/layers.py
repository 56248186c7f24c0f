"""Masks and compensated weights of single layers, from their statistics, through the sparsifier's own selection."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import INPUTS, Statistics, Target
from ..calibration.gram import damped_gram, damped_inverse, joint_saliency
from ..errors import SparsityError
from ..scores import needs_of
from ..selection import keep_mask
from ..sparsifiers.component import Component, labels_of
from ..sparsifiers.minimum import update_masks
from ..sparsifiers.planned import PlannedSparsifier
from ..structure import MaskUpdate
from .obs import column_chunks, sparsegpt, structured_obs
from .solve import CG_STEPS, FEW_STEPS, admm, least_squares, relative_error

METHODS = (None, "least_squares", "sparsegpt", "obs", "admm")
DAMP = 0.01  # share of mean(diag G) that is added to G before it is inverted or fitted
WIDEST = 256  # columns that structured OBS prunes together; wider scopes are chosen at once
Values = Callable[[Component], tuple[dict[Tensor, Tensor], float | None]]


@dataclass(kw_only=True, eq=False)
class Layer:
    """One tensor in a unit.

    Attributes:
        at: the index of its group.
        target: where it is.
        statistics: recorded in this unit, and what the user collected before; None if no batch reached it.
        weight: the dense weight in float32 (float64 if it is float64).
        components: those of this tensor alone, stage by stage; empty where its mask is given.
        mask: its mask, once that is chosen.
        found: its compensated weight, once that is computed.
        start: weights near the compensated ones, as a matrix, if a method gave them.
    """

    at: int
    target: Target
    statistics: Statistics | None
    weight: Tensor
    components: Sequence[Component]
    mask: Tensor | None = None
    found: Tensor | None = None
    start: Tensor | None = None
    seconds: float = 0.0

    @property
    def gram(self) -> Tensor | None:
        """G of its inputs, or None where there is none."""
        return None if self.statistics is None else self.statistics.sums.get("input_gram")

    @property
    def damped_gram(self) -> Tensor:
        """G + DAMP * mean(diag G) I in the weight's dtype, without which few tokens would be fitted too closely."""
        assert self.gram is not None
        return damped_gram(self.gram.to(self.weight.dtype), DAMP)

    def matrix(self, weight: Tensor) -> Tensor:
        """[groups, outputs, inputs]; see `Statistics.matrix`."""
        assert self.statistics is not None
        return self.statistics.matrix(weight)

    def errors(self) -> tuple[float, float]:
        """Relative output errors of the mask alone and of the compensated weight; NaN without inputs."""
        gram = self.gram
        if gram is None or self.mask is None or self.found is None:
            return float("nan"), float("nan")
        own, gram = self.matrix(self.weight), gram.to(self.weight.dtype)
        masked, found = (self.matrix(t) for t in (self.weight * self.mask, self.found))
        return relative_error(own, gram, masked), relative_error(own, gram, found)


def fill_masks(
    sparsifier: PlannedSparsifier, components: Sequence[Component], values: Values, masks: Mapping[int, Tensor]
) -> None:
    """Choose the masks of components, earlier stages first, among given values; masks by the groups' indices."""
    for component in sorted(components, key=lambda c: c.stage):
        scored, norm = values(component)
        keep = component.budget(sparsifier.groups, sparsifier._level_given)
        update = MaskUpdate(
            scope=component.scope,
            masks={leaf: masks[at] for leaf, at in component.leaves},
            keep=keep,
            values=scored,
            norm=norm,
            among_kept=component.stage > 0,
        )
        update_masks([(component, update)])


def scored_by(dense: Callable[[int], Tensor], statistics: Callable[[int], Statistics]) -> Values:
    """Values as a step takes them: the components' own scores."""

    def values(component: Component) -> tuple[dict[Tensor, Tensor], float | None]:
        found = component.values(dense, statistics)
        return found, component.norm_of(found.values())

    return values


def compensate(sparsifier: PlannedSparsifier, layers: Sequence[Layer], method: str | None) -> None:
    """Choose the masks that are not given, and compute compensated weights, of layers that were recorded together."""
    if method == "admm":
        _admm_together(sparsifier, [layer for layer in layers if layer.mask is None and layer.gram is not None])
    for layer in layers:
        start = time.perf_counter()
        if layer.mask is None and layer.gram is not None and method in ("obs", "sparsegpt"):
            _prune_from_left(sparsifier, layer, method)
        mask = layer.mask = _by_score(sparsifier, layer) if layer.mask is None else layer.mask
        if layer.found is None:
            layer.found = layer.weight * mask
        if method is not None and layer.gram is not None and method != "sparsegpt":
            steps = CG_STEPS if layer.start is None else FEW_STEPS
            own, kept = layer.matrix(layer.weight), layer.matrix(mask)
            solved = least_squares(own, layer.damped_gram, kept, steps, layer.start)
            assert layer.statistics is not None
            layer.found = layer.statistics.from_matrix(solved)
        layer.seconds += time.perf_counter() - start


def _by_score(sparsifier: PlannedSparsifier, layer: Layer) -> Tensor:
    """A mask by the layer's scores, or by magnitude if they need inputs and no batch reached it."""
    own = layer.statistics or Statistics(name=layer.target.name, shape=layer.target.shape, form=layer.target.form)
    mask, by_score = torch.ones_like(layer.weight, dtype=torch.bool), scored_by(lambda at: layer.weight, lambda at: own)

    def values(component: Component) -> tuple[dict[Tensor, Tensor], float | None]:
        if any(n in INPUTS for n in own.missing(needs_of(component.score))):
            return dict.fromkeys(_params(component), layer.weight), 2
        return by_score(component)

    fill_masks(sparsifier, layer.components, values, {layer.at: mask})
    return mask


def _projection(sparsifier: PlannedSparsifier, layer: Layer, norm: float | None = 2) -> Callable[[Tensor], Tensor]:
    """Saliencies [groups, outputs, inputs] to the mask that keeps the highest of every scope, in the same shape."""
    assert layer.statistics is not None
    own = layer.statistics

    def project(saliency: Tensor) -> Tensor:
        values = own.from_matrix(saliency)
        mask = torch.ones_like(layer.weight, dtype=torch.bool)
        fill_masks(sparsifier, layer.components, lambda c: (dict.fromkeys(_params(c), values), norm), {layer.at: mask})
        return own.matrix(mask)

    return project


def _params(component: Component) -> list[Tensor]:
    return [leaf.view.param for leaf, _ in component.leaves]


def _admm_together(sparsifier: PlannedSparsifier, layers: Sequence[Layer]) -> None:
    """ADMM masks; layers with one G (query, key and value, say) share its inverses."""
    left = list(layers)
    while left:
        first = left[0]
        assert first.gram is not None
        start, gram = time.perf_counter(), first.damped_gram
        together = [x for x in left if x.gram is not None and _is_same(x.gram, first.gram)]
        left = [x for x in left if x not in together]
        rows = [layer.matrix(layer.weight) for layer in together]
        projections = [_projection(sparsifier, layer) for layer in together]
        sizes = [r.shape[1] for r in rows]

        def project(z: Tensor) -> Tensor:
            return torch.cat([p(part) for p, part in zip(projections, z.split(sizes, 1), strict=True)], 1)  # noqa: B023

        masks, starts = (t.split(sizes, 1) for t in admm(torch.cat(rows, 1), gram, project))
        share = (time.perf_counter() - start) / len(together)
        for layer, mask, begin in zip(together, masks, starts, strict=True):
            assert layer.statistics is not None
            layer.mask, layer.start, layer.seconds = layer.statistics.from_matrix(mask), begin, share


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _prune_from_left(sparsifier: PlannedSparsifier, layer: Layer, method: str) -> None:
    """Structured OBS, or SparseGPT, group by group of a grouped layer."""
    own, gram = layer.statistics, layer.gram
    assert own is not None and gram is not None
    inverse = damped_inverse(gram, DAMP, layer.target.name).to(layer.weight.dtype)
    scopes, blocks = (own.matrix(t.to(layer.weight.device)) for t in scope_labels(layer))
    if method == "sparsegpt":
        budget = _sparsegpt_budget(sparsifier, layer, scopes, blocks)
        parts = [sparsegpt(w, c, *budget) for w, c in zip(own.matrix(layer.weight), inverse, strict=True)]
    else:
        parts = _obs_parts(sparsifier, layer, inverse, scopes, blocks)
    layer.mask = own.from_matrix(torch.stack([mask for mask, _ in parts]))
    layer.found = own.from_matrix(torch.stack([found for _, found in parts]))


def _obs_parts(
    sparsifier: PlannedSparsifier,
    layer: Layer,
    inverse: Tensor,
    scopes: Tensor,
    blocks: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Mask and weight of each group; scopes that are too wide to be pruned from the left are chosen at once."""
    own = layer.statistics
    assert own is not None
    rows = own.matrix(layer.weight)
    component = layer.components[0]
    covers = bool((blocks >= 0).all())  # a view may leave elements out
    chunks = column_chunks(scopes.flatten(0, 1)) if covers else []
    is_wide = max((stop - start for start, stop in chunks), default=0) > WIDEST
    if is_wide or not covers or component.scope.is_partial or len(rows) > 1 or len(layer.components) > 1:
        joint = [joint_saliency(w, c, b) for w, c, b in zip(rows, inverse, blocks, strict=True)]
        project = _projection(sparsifier, layer, None)
        return [(m, w * m) for m, w in zip(project(torch.stack(joint)), rows, strict=True)]
    keep = component.budget(sparsifier.groups, sparsifier._level_given)
    budgets = torch.as_tensor(keep, dtype=torch.int64, device=rows.device)
    budgets = budgets.expand(component.scope.grid_shape).reshape(-1)

    def choose(weight: Tensor, left: Tensor, start: int, stop: int) -> Tensor:
        labels = blocks[0, :, start:stop]
        saliency = joint_saliency(weight, left, labels)
        ids, element = labels.unique(return_inverse=True)
        scope_of = torch.empty_like(ids).scatter_(0, element.flatten(), scopes[0, :, start:stop].flatten())
        order = scope_of.argsort(stable=True)  # by scope, and in it by slot
        sums = saliency.new_zeros(ids.numel()).index_add_(0, element.flatten(), saliency.flatten())
        competing = sums[order].unflatten(0, (-1, component.scope.numblk_per_scope()))
        kept = keep_mask(competing, budgets[scope_of[order].view(competing.shape)[:, 0]])
        return torch.empty_like(kept.flatten()).scatter_(0, order, kept.flatten())[element]

    return [structured_obs(rows[0], inverse[0], chunks, choose)]


def scope_labels(layer: Layer) -> tuple[Tensor, Tensor]:
    """The scope and the block of every element, int64 in the weight's shape."""
    component = layer.components[-1]
    leaf = component.leaves[0][0]
    member = component.scope.members()[0]
    blocks = labels_of(leaf)
    grid = [-(-s // b) for s, b in zip(leaf.view.shape, leaf.shape, strict=True)]
    places = torch.arange(leaf.numblk(), device="cpu")
    index, scope = torch.unravel_index(places, grid), torch.zeros_like(places)
    for at, own, size in zip(index, grid, member.shape, strict=True):
        scope = scope * -(-own // size) + at // size
    return torch.where(blocks >= 0, scope[blocks.clamp(min=0)], -1), blocks


def _sparsegpt_budget(
    sparsifier: PlannedSparsifier, layer: Layer, scopes: Tensor, blocks: Tensor
) -> tuple[float | None, tuple[int, int] | None]:
    """(level, None) or (None, (n, m)): what SparseGPT knows."""
    component = layer.components[-1]
    keep, width = component.budget(sparsifier.groups, sparsifier._level_given), component.scope.numblk_per_scope()
    single = int((blocks == blocks.flatten()[0]).sum()) == 1 and len(layer.components) == 1
    single = single and bool((blocks >= 0).all())
    if single and component.scope.numscp() == 1 and len(scopes) == 1:
        return 1 - int(keep if isinstance(keep, int) else keep.reshape(-1)[0]) / width, None
    runs = scopes.unflatten(2, (-1, width)) if scopes.shape[2] % width == 0 else scopes[..., None]
    n = keep if isinstance(keep, int) else int(keep.reshape(-1)[0])
    if single and runs.shape[3] == width and bool((runs == runs[..., :1]).all()):
        return None, (n, width)
    raise SparsityError(
        f"{layer.target.name}: compensate='sparsegpt' knows only N:M along the inputs, and single elements over the "
        "whole tensor; use 'admm' or 'obs' for other structures"
    )
