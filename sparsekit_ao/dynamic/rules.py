"""Rules: which active blocks are pruned, which inactive ones grow, and which tensors get more of what grows.

A rule scores the blocks of one component (`Slots` -> float rows). Pruning drops the lowest scores among active blocks,
growth takes the highest among inactive ones (those pruned a moment ago included); redistribution gives each tensor
budget in proportion to the rule's share, one number. Rules only score: `choose` counts and selects.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from .. import scores
from ..errors import SparsityError
from ..scores import BuiltInScore, Score, needs_of, parse_score, saliency_of
from ..sparsifiers.component import labels_of
from .slots import Slots

__all__ = [
    "NAMES",
    "NEEDS",
    "Rule",
    "by_score",
    "global_magnitude",
    "gradient",
    "magnitude",
    "momentum",
    "nonzero",
    "parse_rule",
    "random",
]

NEEDS = ("gradient", "momentum")
Criterion = str | Callable[..., Tensor] | None
_POOLING: dict[str | None, tuple[float | None, bool | None]] = {  # criterion: norm and as_mean of `Slots.scores`
    None: (None, None),
    "mean": (1, True),
    "max": (math.inf, None),
    "L1": (1, None),
    "L2": (2, None),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A score of blocks, for pruning, growth and redistribution alike.

    Attributes:
        name: used in messages.
        score: `Slots` -> float rows [scopes, slots].
        needs: of `NEEDS`: what is gathered for it, the dense gradient or the optimizer's momentum.
        is_global: for pruning: the tensors compete over which of them loses how many blocks.
        statistics: of `calibration.NEEDS`: what `sparsifier.calibrate` must have recorded before an update.
        share: for redistribution: `Slots` -> a number; by default the mean score of the active blocks. A number that
            is not finite, or not positive, counts as 0.

    >>> noisy = Rule(name="noisy", score=lambda slots: slots.scores(slots.weights, 1) + slots.random("noise"))
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
        unknown = [n for n in self.needs if n not in NEEDS]
        if unknown:
            raise SparsityError(f"rule {self.name!r}: needs are some of {NEEDS}, got {unknown[0]!r}")

    def share_of(self, slots: Slots) -> Any:
        """What one tensor's part of the growth is proportional to."""
        return slots.mean_active(self.score(slots)) if self.share is None else self.share(slots)


def magnitude(criterion: Criterion = None) -> Rule:
    """|weight|: in every scope the smallest blocks are pruned.

    Args:
        criterion: how absolute values are pooled over a block: "mean", "max", "min", "L1", "L2", or a function
            `fn(magnitudes, dim=-1)`; None is the tensor's own norm. The share of every rule by values is their mean
            absolute value over active blocks.

    >>> magnitude("mean").name
    'magnitude (mean)'
    """
    return _by_values("magnitude", "weights", criterion)


def global_magnitude(criterion: Criterion = None) -> Rule:
    """|weight|, compared over all tensors: the smallest blocks of the model go; every tensor keeps its largest one.

    Where nothing grows back, or budgets follow a target, every scope keeps its largest block, and all scopes of a
    tensor lose the same number: the comparison over tensors decides how many. `criterion` as in `magnitude`.
    """
    return _by_values("global", "weights", criterion, is_global=True)


def gradient(criterion: Criterion = None) -> Rule:
    """|dense gradient|: the largest grow (RigL, arXiv 1911.11134); `criterion` as in `magnitude`."""
    return _by_values("gradient", "gradients", criterion, needs=("gradient",))


def momentum(criterion: Criterion = None) -> Rule:
    """|momentum|: SGD's buffer, Adam's m / (sqrt(v) + eps); the largest grow (SNFS, arXiv 1907.04840).

    `criterion` as in `magnitude`.
    """
    return _by_values("momentum", "momenta", criterion, needs=("momentum",))


def random(purpose: str = "grow") -> Rule:
    """Uniformly at random (SET, arXiv 1707.04780).

    Args:
        purpose: part of the key of the random numbers, with seed, name and iteration; two rules need two purposes.
    """
    return Rule(name="random", score=methodcaller("random", purpose))


def nonzero() -> Rule:
    """The number of active elements: redistribution by it keeps the split between tensors as it is."""
    return Rule(name="nonzero", score=_is_active, share=_active_elements)


def by_score(score: str | Score) -> Rule:
    """A score of `sparsekit_ao.scores` as a rule: its name, or an object with `needs`; saliencies of a block add up.

    >>> by_score("wanda").statistics
    ('input_square',)
    """
    found = parse_score(score, "")
    assert found is not None
    return Rule(name=f"score {score}", score=partial(_by_score, found), statistics=needs_of(found))


def parse_rule(purpose: str, given: object) -> Rule | None:
    """The rule for "prune", "grow" or "redistribute" from a name, a `Rule`, a score, a function of `Slots`, or None.

    Scores are those of `sparsekit_ao.scores`, by name or object; one of your own is given as `by_score(score)`. A
    function may carry a `needs` attribute. It returns rows; for redistribution, the share.

    >>> parse_rule("prune", lambda slots: slots.random("prune")).needs
    ()
    """
    names = NAMES[purpose]
    if given is None or isinstance(given, Rule):
        return given
    if isinstance(given, str) and given in names:
        return names[given]
    if isinstance(given, BuiltInScore) or (isinstance(given, str) and given in scores.NAMES):
        return by_score(given)
    if callable(given):
        name, needs = getattr(given, "__name__", type(given).__name__), tuple(getattr(given, "needs", ()))
        return Rule(name=name, score=given, needs=needs, share=given)
    raise SparsityError(
        f"{purpose} must be one of {', '.join(map(repr, names))}, a Rule or a function, got {given!r}; or a score, "
        f"one of {', '.join(map(repr, scores.NAMES))}"
    )


def _by_values(name: str, values: str, criterion: Criterion, **options: Any) -> Rule:
    function = torch.amin if criterion == "min" else criterion if callable(criterion) else None
    if function is None and criterion not in _POOLING:
        raise SparsityError(
            f"{name}: criterion must be 'mean', 'max', 'min', 'L1', 'L2', a function or None, got {criterion!r}"
        )
    label = name if criterion is None else f"{name} ({getattr(criterion, '__name__', criterion)})"
    if function is None:
        score = partial(_pooled, values, *_POOLING[criterion])  # type: ignore[index]
    else:
        score = partial(_pooled_by, values, function)
    return Rule(name=label, score=score, share=partial(_mean_absolute, values), **options)


def _pooled(values: str, norm: float | None, as_mean: bool | None, slots: Slots) -> Tensor:
    return slots.scores(getattr(slots, values), norm, as_mean=as_mean)


def _pooled_by(values: str, function: Callable[..., Tensor], slots: Slots) -> Tensor:
    return slots.pooled(getattr(slots, values), function)


def _by_score(score: Score, slots: Slots) -> Tensor:
    found = {}
    for spec, weight in slots.weights.items():
        own = slots.statistics.get(spec)
        if own is not None:
            own.blocks = labels_of(spec).to(weight.device) if getattr(score, "uses_blocks", False) else None
        found[spec] = saliency_of(score, weight, slots.name if own is None else own.name, own)
        if own is not None:
            own.blocks = None
    return slots.scores(found, None, signed=True)


def _mean_absolute(values: str, slots: Slots) -> Tensor:
    return slots.mean_active(_pooled(values, *_POOLING["mean"], slots))


def _is_active(slots: Slots) -> Tensor:
    return slots.active.double()


def _active_elements(slots: Slots) -> Tensor:
    members = slots.component.scope.members()  # of equal blocks, or of blocks that are chosen together
    size = sum(m.block.numel_per_block() for m in members) / len(members)
    return slots.active.sum().double() * size


#: rules by name, for each argument of `DynamicSparsifier`
NAMES: dict[str, Mapping[str, Rule | None]] = {
    "prune": {"magnitude": magnitude(), "global": global_magnitude()},
    "grow": {"gradient": gradient(), "momentum": momentum(), "random": random(), "none": None},
    "redistribute": {"gradient": gradient(), "momentum": momentum(), "nonzero": nonzero(), "none": None},
}
