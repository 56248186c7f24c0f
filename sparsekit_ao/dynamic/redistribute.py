"""Redistribution rules: how large a share of what grows each tensor gets.

A rule gives a number a tensor; shares are in proportion, up to the room there is, and sum exactly. A number that is
not finite counts as 0.
"""

from .rules import Rule
from .slots import Slots

__all__ = ["REDISTRIBUTE", "gradient", "momentum", "nonzero"]


def gradient() -> Rule:
    """By the mean |gradient| of active weights."""
    return Rule(name="gradient", score=_gradient, needs=("gradient",))


def momentum() -> Rule:
    """By the mean |momentum| of active weights (SNFS, arXiv 1907.04840)."""
    return Rule(name="momentum", score=_momentum, needs=("momentum",))


def nonzero() -> Rule:
    """By the number of active elements: keeps the split as it is."""
    return Rule(name="nonzero", score=_count)


def _gradient(slots: Slots) -> float:
    return slots.mean_active(slots.gradients)


def _momentum(slots: Slots) -> float:
    return slots.mean_active(slots.momenta)


def _count(slots: Slots) -> float:
    members = slots.component.scope.members()  # of equal blocks, or of blocks that are chosen together
    size = sum(m.block.numel_per_block() for m in members) / len(members)
    return float(slots.active.sum()) * size


REDISTRIBUTE = {"gradient": gradient(), "momentum": momentum(), "nonzero": nonzero(), "none": None}
