"""Criteria decide in an update which active blocks are pruned, which inactive ones grow, and which tensors grow more.

A criterion scores the blocks of one pruning group: it is a function of `Slots`, its blocks as rows [scopes, slots].
Pruning drops the lowest scores among active blocks, and growth takes the highest among inactive ones, including those
just pruned. Redistribution divides the budget among tensors in proportion to the criterion's share, a number for each
tensor.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from .. import scores
from ..calibration import Statistics
from ..distributed import full_tensor, placed_like
from ..errors import SparsityError
from ..models.running import keyed_generator
from ..scores import BuiltInScore, Score, needs_of, parse_score, saliency_of
from ..sparsifiers.groups import PruningGroup, labels_of
from ..structure import BlockSpec, scope_windows, write_back
from ..structure.windows import elements_of, fill_mask, from_scopes, kept_grid, real_slots, scope_scores, to_scopes

__all__ = ["NAMES", "NEEDS", "Criterion", "by_score", "global_magnitude", "gradient", "magnitude", "momentum"]
__all__ += ["nonzero", "parse_criterion", "random"]

Tensors = Mapping[BlockSpec, Tensor]  # one for each tensor of a pruning group, in the parameter's shape


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """What a criterion is called with: the blocks of one tensor, or of coupled tensors, in one iteration.

    Rows are tensors [scopes, slots]; a slot is one block, to which each coupled tensor contributes one block of its
    own. If weights are sharded, every access gathers whole tensors (a collective operation) and does not keep them;
    only masks that `masks_of` returns are sharded like their weights.

    Attributes:
        pruning: The scopes and how their blocks are scored.
        placed: A dict with the keys "weights", "masks", "gradients" and "momenta"; each value is {block spec: local
            tensor}.
        statistics: What `sparsifier.calibrate` recorded, by block spec.
        iteration: The training iteration.
        seed: The seed of random numbers, which also depend on name and iteration.

    A criterion of your own is a function of it:

    >>> def criterion(slots):
    ...     return slots.scores(slots.weights, 1)  # the sum of |w| of every block
    >>> sparsekit_ao.SET(0.9, prune=criterion).settings.prune.name
    'criterion'
    """

    pruning: PruningGroup
    placed: Mapping[str, Tensors]
    iteration: int = 0
    seed: int = 0
    statistics: Mapping[BlockSpec, Statistics] = field(default_factory=dict)

    weights = property(lambda self: self._whole("weights"), doc="{block spec: weight}, whole on every rank.")
    masks = property(lambda self: self._whole("masks"), doc="{block spec: mask}.")
    gradients = property(lambda self: self._whole("gradients"), doc="Dense gradients, if a criterion needs them.")
    momenta = property(lambda self: self._whole("momenta"), doc="Momenta; empty unless a criterion needs them.")

    @property
    def name(self) -> str:
        """The tensor's name, or the coupling's."""
        return self.pruning.label

    @property
    def device(self) -> torch.device:
        """The device that the masks are on."""
        return next(iter(self.placed["masks"].values())).device

    @property
    def shape(self) -> tuple[int, int]:
        """The number of scopes, and of slots in each."""
        return self.pruning.scope.numscp(), self.pruning.scope.numblk_per_scope()

    @property
    def block_size(self) -> float:
        """How many elements a block has; the mean if blocks of several sizes are chosen together."""
        members = self.pruning.scope.members()
        return sum(m.block.numel_per_block() for m in members) / len(members)

    @property
    def active(self) -> Tensor:
        """Which slots the masks keep now; bool rows."""
        return self.rows_of(self.masks)

    @property
    def real(self) -> Tensor:
        """Which slots hold a block: all but the padding of a partial scope; bool rows."""
        real = real_slots(scope_windows(self.pruning.scope), self.device)
        return torch.ones(self.shape, dtype=torch.bool, device=self.device) if real is None else real

    def scores(
        self, values: Tensors, norm: float | None = None, *, as_mean: bool | None = None, signed: bool = False
    ) -> Tensor:
        """Return the block scores of values in the parameters' shapes, as float rows; padding scores 0.

        Args:
            values: `weights`, `gradients` or `momenta`, or any dict with the same keys and shapes.
            norm: The norm over the elements of a block: 1, 2 or inf. None (default) takes the tensor's own norm.
            as_mean: Whether to divide by the number of elements; by default only if some blocks are partial.
            signed: If True, values are saliencies, which are summed as they are.
        """
        if not values:
            raise SparsityError(
                f"{self.name}: a criterion reads values that were not gathered; list them in its `needs` attribute"
            )
        windows = scope_windows(self.pruning.scope, {spec.view.param: t for spec, t in values.items()})
        mean = self.pruning.scope.as_mean if as_mean is None else as_mean
        chosen = None if signed else self.pruning.norm if norm is None else norm
        return torch.cat([scope_scores(w, chosen, mean) for w in windows], dim=1)

    def pooled(self, values: Tensors, fn: Callable[..., Tensor]) -> Tensor:
        """Return `fn(magnitudes, dim=-1)` of each block, such as `torch.amin`, as float rows; padding is 0.

        Raises:
            SparsityError: Some blocks are partial.
        """
        rows = []
        for window in scope_windows(self.pruning.scope, {spec.view.param: t for spec, t in values.items()}):
            if any(m.is_partial for m in window.windows):
                raise SparsityError(f"{self.name}: pooling by a function needs whole blocks; leave `pooling` out")
            elements = elements_of(window.windows, len(window.shape), 0.0).abs()
            grid = fn(elements if elements.dtype == torch.float64 else elements.float(), dim=-1)
            if not isinstance(grid, Tensor) or grid.shape != elements.shape[:-1]:
                raise SparsityError(f"{self.name}: pooling must reduce the last dimension, fn(magnitudes, dim=-1)")
            rows.append(to_scopes(grid, window, 0.0))
        return torch.cat(rows, dim=1)

    def random(self, purpose: str) -> Tensor:
        """Return uniform numbers in [0, 1), the same on every rank, device and after a resume; float64 rows."""
        generator = keyed_generator(self.seed, self.name, self.iteration, purpose)
        return torch.rand(self.shape, generator=generator, dtype=torch.float64, device="cpu").to(self.device)

    def mean_active(self, scores: Tensor) -> Tensor:
        """Return the mean of float rows over the active slots, float64 of no dimension."""
        active = self.active
        return torch.where(active, scores.double(), 0).sum() / active.sum().clamp(min=1)

    def rows_of(self, masks: Tensors) -> Tensor:
        """Return which slots are kept by masks in the parameters' shapes, as bool rows."""
        windows = scope_windows(self.pruning.scope, None, {spec: full_tensor(m) for spec, m in masks.items()})
        return torch.cat([to_scopes(kept_grid(w), w, False) for w in windows], dim=1)

    def masks_of(self, rows: Tensor) -> dict[BlockSpec, Tensor]:
        """Return bool masks for bool rows, sharded like the weights; elements outside a view are as in `masks`."""
        scope, masks = self.pruning.scope, {spec: mask != 0 for spec, mask in self.masks.items()}
        windows = scope_windows(scope, None, masks)
        for window, part in zip(windows, rows.split([math.prod(w.shape) for w in windows], dim=1), strict=True):
            fill_mask(window.windows, from_scopes(part, window))
        write_back(windows, scope, masks)
        return {spec: placed_like(mask, self.placed["weights"][spec]) for spec, mask in masks.items()}

    def _whole(self, name: str) -> Tensors:
        return {spec: full_tensor(t) for spec, t in self.placed.get(name, {}).items()}


NEEDS = ("gradient", "momentum")
Pooling = Callable[..., Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A score of blocks, which can be used for pruning, growth and redistribution.

    Attributes:
        name: The name in messages.
        score: A function of `Slots` that returns float rows [scopes, slots].
        needs: What the score reads besides weights, from `NEEDS`: the dense gradient, or the optimizer's momentum.
        is_global: If True, tensors compete in pruning over how many blocks each of them loses.
        statistics: What `sparsifier.calibrate` must have recorded before an update, from `calibration.NEEDS`.
        share: For redistribution, a function of `Slots` that returns a number; by default the mean score of the active
            blocks. A number that is not finite or not positive counts as 0.

    >>> noisy = Criterion(name="noisy", score=lambda slots: slots.scores(slots.weights, 1) + slots.random("noise"))
    >>> sparsekit_ao.SET(0.9, prune=noisy).settings.prune.name
    'noisy'
    """

    name: str
    score: Callable[[Slots], Any]
    needs: tuple[str, ...] = ()
    is_global: bool = False
    statistics: tuple[str, ...] = ()
    share: Callable[[Slots], Any] | None = None

    def __post_init__(self) -> None:
        if unknown := [n for n in self.needs if n not in NEEDS]:
            raise SparsityError(f"criterion {self.name!r}: needs are some of {NEEDS}, got {unknown[0]!r}")

    def share_of(self, slots: Slots) -> Any:
        """Return the number to which one tensor's part of the growth is proportional."""
        return slots.mean_active(self.score(slots)) if self.share is None else self.share(slots)


def magnitude(pooling: Pooling = None) -> Criterion:
    """Score by |weight|, so that the smallest blocks of every scope are pruned.

    Args:
        pooling: How absolute values are pooled over a block: a function `fn(magnitudes, dim=-1)` such as `torch.mean`
            or `torch.amax`. None (default) takes the tensor's own norm. In redistribution, the share is always the mean
            absolute value over active blocks.

    >>> magnitude(torch.amax).name
    'magnitude (amax)'
    """
    return _by_values("magnitude", "weights", pooling)


def global_magnitude(pooling: Pooling = None) -> Criterion:
    """Score by |weight| over all tensors, so that the smallest blocks of the whole model are pruned.

    If nothing grows back, or budgets follow a target, every scope keeps at least its largest block. All scopes of a
    tensor then lose the same number of blocks, and the comparison decides how many. `pooling` is as in `magnitude`.
    """
    return _by_values("global", "weights", pooling, is_global=True)


def gradient(pooling: Pooling = None) -> Criterion:
    """Score by |dense gradient|, so that the largest grow (RigL, arXiv 1911.11134); `pooling` is as in `magnitude`."""
    return _by_values("gradient", "gradients", pooling, needs=("gradient",))


def momentum(pooling: Pooling = None) -> Criterion:
    """Score by |momentum|, so that the largest grow (SNFS, arXiv 1907.04840); `pooling` is as in `magnitude`.

    The momentum is SGD's buffer, or Adam's m / (sqrt(v) + eps).
    """
    return _by_values("momentum", "momenta", pooling, needs=("momentum",))


def random(purpose: str = "grow") -> Criterion:
    """Score uniformly at random (SET, arXiv 1707.04780).

    The random numbers depend on `purpose`, seed, name and iteration. Give two criteria two different purposes.
    """
    return Criterion(name="random", score=methodcaller("random", purpose))


def nonzero() -> Criterion:
    """Score by the number of active elements, so that redistribution keeps the split between tensors as it is."""
    return Criterion(name="nonzero", score=_is_active, share=_active_elements)


def by_score(score: str | Score) -> Criterion:
    """Make a criterion from a score of `sparsekit_ao.scores`, a name or an object with `needs`; blocks sum its values.

    >>> by_score("wanda").statistics
    ('input_square',)
    """
    parsed = parse_score(score, "")
    assert parsed is not None
    return Criterion(name=f"score {score}", score=partial(_by_score, parsed), statistics=needs_of(parsed))


def parse_criterion(purpose: str, criterion: object) -> Criterion | None:
    """Return the criterion for "prune", "grow" or "redistribute" that a user named or gave.

    Scores are those of `sparsekit_ao.scores`, by name or object; one of your own is given as `by_score(score)`. A
    function may carry a `needs` attribute. It returns rows; for redistribution, the share.
    """
    names = NAMES[purpose]
    if criterion is None or isinstance(criterion, Criterion):
        return criterion
    if isinstance(criterion, str) and criterion in names:
        return names[criterion]
    if isinstance(criterion, BuiltInScore) or (isinstance(criterion, str) and criterion in scores.NAMES):
        return by_score(criterion)
    if callable(criterion):
        name, needs = getattr(criterion, "__name__", type(criterion).__name__), tuple(getattr(criterion, "needs", ()))
        return Criterion(name=name, score=criterion, needs=needs, share=criterion)
    raise SparsityError(
        f"{purpose} must be one of {', '.join(map(repr, names))}, a Criterion or a function, got "
        f"{criterion!r}; or a score, one of {', '.join(map(repr, scores.NAMES))}"
    )


def _by_values(name: str, values: str, pooling: Pooling, **options: Any) -> Criterion:
    if not (pooling is None or callable(pooling)):
        raise SparsityError(f"{name}: pooling must be a function such as torch.amax, or None, got {pooling!r}")
    label = name if pooling is None else f"{name} ({getattr(pooling, '__name__', pooling)})"
    score, share = partial(_pooled, values, pooling), partial(_mean_absolute, values)
    return Criterion(name=label, score=score, share=share, **options)


def _pooled(values: str, pooling: Pooling, slots: Slots) -> Tensor:
    tensors = getattr(slots, values)
    return slots.scores(tensors) if pooling is None else slots.pooled(tensors, pooling)


def _mean_absolute(values: str, slots: Slots) -> Tensor:
    return slots.mean_active(slots.scores(getattr(slots, values), 1, as_mean=True))


def _by_score(score: Score, slots: Slots) -> Tensor:
    saliencies = {}
    for spec, weight in slots.weights.items():
        statistics = slots.statistics[spec]
        saliencies[spec] = saliency_of(score, weight, statistics.name, statistics, partial(labels_of, spec))
    return slots.scores(saliencies, None, signed=True)


def _is_active(slots: Slots) -> Tensor:
    return slots.active.double()


def _active_elements(slots: Slots) -> Tensor:
    return slots.active.sum().double() * slots.block_size


#: criteria by name, for each argument of `DynamicSparsifier`
NAMES: dict[str, Mapping[str, Criterion | None]] = {
    "prune": {"magnitude": magnitude(), "global": global_magnitude(), "random": random("prune")},
    "grow": {"gradient": gradient(), "momentum": momentum(), "random": random(), "none": None},
    "redistribute": {"gradient": gradient(), "momentum": momentum(), "nonzero": nonzero(), "none": None},
}
