"""Growth rules: which inactive blocks come. The highest scores do; exactly as many as asked, ties by index.

Candidates are all inactive slots, those dropped a moment ago included. A rule only scores; that active slots never
compete is the update's business.
"""

from functools import partial

from torch import Tensor

from ..selection import Norm
from .rules import Rule, norm_of
from .slots import Slots

__all__ = ["GROW", "gradient", "momentum", "random"]


def gradient(criterion: str | None = None) -> Rule:
    """The largest dense gradients (RigL, arXiv 1911.11134).

    Args:
        criterion: how |gradient| is pooled over a block: "mean", "max", "L1" or "L2"; None is the tensor's own norm.
    """
    return Rule(name="gradient", score=partial(_gradient, norm_of(criterion, "grow")), needs=("gradient",))


def momentum(criterion: str | None = None) -> Rule:
    """The largest momenta: SGD's buffer, Adam's m / (sqrt(v) + eps) (SNFS, arXiv 1907.04840)."""
    return Rule(name="momentum", score=partial(_momentum, norm_of(criterion, "grow")), needs=("momentum",))


def random() -> Rule:
    """Uniformly at random (SET, arXiv 1707.04780): exactly as many as asked, never an active slot."""
    return Rule(name="random", score=_random)


def _gradient(norm: Norm | str, slots: Slots) -> Tensor:
    return slots.scores(slots.gradients, norm)


def _momentum(norm: Norm | str, slots: Slots) -> Tensor:
    return slots.scores(slots.momenta, norm)


def _random(slots: Slots) -> Tensor:
    return slots.random("grow")


GROW = {"gradient": gradient(), "momentum": momentum(), "random": random(), "none": None}
