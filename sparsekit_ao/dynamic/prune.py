"""Pruning rules: which active blocks go. The lowest scores do; exactly as many as asked, ties by index.

A rule scores slots; counting and choosing are the update's business.
"""

from functools import partial

from torch import Tensor

from ..selection import Norm
from .rules import Rule, norm_of
from .slots import Slots

__all__ = ["PRUNE", "global_magnitude", "magnitude"]


def magnitude(criterion: str | None = None) -> Rule:
    """In every scope the smallest blocks go.

    Args:
        criterion: how |weight| is pooled over a block: "mean", "max", "L1" or "L2"; None is the tensor's own norm.

    >>> magnitude("mean").name
    'magnitude (mean)'
    """
    return Rule(name=_named("magnitude", criterion), score=partial(_size, norm_of(criterion, "prune")))


def global_magnitude(criterion: str | None = None) -> Rule:
    """All tensors compete, and the smallest blocks of the whole model go; every tensor keeps its largest one.

    Where nothing grows back, or budgets follow a target, every scope keeps its largest, and a tensor of several scopes
    loses the same number in each: the competition says how many.
    """
    return Rule(name=_named("global", criterion), score=partial(_size, norm_of(criterion, "prune")), is_global=True)


def _size(norm: Norm | str, slots: Slots) -> Tensor:
    return slots.scores(slots.weights, norm)


def _named(name: str, criterion: str | None) -> str:
    return name if criterion is None else f"{name} ({criterion})"


PRUNE = {"magnitude": magnitude(), "global": global_magnitude()}
