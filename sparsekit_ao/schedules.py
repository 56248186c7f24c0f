"""Schedules: plain functions from a step to a number; nothing to save, nothing to reset.

Two kinds of numbers come out of them, never mixed up: a target sparsity (`cubic` of Zhu and Gupta), and a fraction of
the active weights to replace in an update (`cosine` of RigL).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

from .errors import SparsityError

__all__ = ["Schedule", "constant", "cosine", "cubic", "difference", "drop_fraction", "join", "linear"]

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """Always `value`.

    >>> constant(0.5)(1000)
    0.5
    """
    return partial(_constant, value)


def linear(start: float, steps: int, end: float = 0.0) -> Schedule:
    """From `start` at step 0 straight to `end` at step `steps`, and `end` from then on.

    >>> [linear(1.0, 4)(t) for t in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _positive(steps)
    return partial(_power, start, end, steps, 0, 1)


def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `start` to `end` over `steps`, and `end` from then on (RigL, arXiv 1911.11134).

    >>> [round(cosine(0.3, 10)(t), 4) for t in (1, 5, 10, 11)]
    [0.2927, 0.15, 0.0, 0.0]
    """
    _positive(steps)
    return partial(_cosine, start, end, steps)


def cubic(start: float, end: float, steps: int, begin: int = 0) -> Schedule:
    """Target sparsity `end + (start - end) (1 - (t - begin) / steps)^3` (Zhu and Gupta, arXiv 1710.01878).

    `start` before `begin`, `end` from `begin + steps` on.

    >>> s = cubic(0.0, 0.8, 900, begin=100)
    >>> [round(s(t) - s(t - 100), 4) for t in (200, 300, 900, 1000)]
    [0.2381, 0.1855, 0.0077, 0.0011]
    """
    _positive(steps)
    return partial(_power, start, end, steps, begin, 3)


def difference(schedule: Schedule, interval: int) -> Schedule:
    """What a schedule adds in one interval: `schedule(t) - schedule(t - interval)`.

    >>> [round(difference(cubic(0.0, 0.8, 900, begin=100), 100)(t), 4) for t in (200, 300, 900, 1000)]
    [0.2381, 0.1855, 0.0077, 0.0011]
    """
    _positive(interval)
    return partial(_difference, schedule, interval)


def drop_fraction(target: float, now: float) -> float:
    """The fraction of the active weights to drop to come from sparsity `now` to `target`, and never below 0.

    >>> round(drop_fraction(0.9, 0.8), 4), drop_fraction(0.5, 0.8), drop_fraction(1.0, 1.0)
    (0.5, 0.0, 0.0)
    """
    for name, level in (("target", target), ("now", now)):
        if not 0 <= level <= 1:
            raise SparsityError(f"drop_fraction: {name} is a sparsity and must lie in [0, 1], got {level!r}")
    return 0.0 if target <= now else (target - now) / (1 - now)


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another; each counts its steps from its own boundary.

    Args:
        schedules: at least one.
        boundaries: the step at which each schedule but the first begins, increasing.

    >>> s = join([constant(0.0), linear(1.0, 2)], [10])
    >>> [s(t) for t in (9, 10, 11, 12)]
    [0.0, 1.0, 0.5, 0.0]
    """
    if len(boundaries) != len(schedules) - 1 or sorted(set(boundaries)) != list(boundaries):
        raise SparsityError(
            f"join: {len(schedules)} schedules need {len(schedules) - 1} increasing boundaries, got {list(boundaries)}"
        )
    return partial(_joined, list(schedules), [0, *boundaries])


# Module-level, so that what holds a schedule can be pickled.


def _constant(value: float, step: int) -> float:
    return value


def _power(start: float, end: float, steps: int, begin: int, exponent: int, step: int) -> float:
    return end + (start - end) * (1 - _progress(step - begin, steps)) ** exponent


def _cosine(start: float, end: float, steps: int, step: int) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * _progress(step, steps))) / 2


def _difference(schedule: Schedule, interval: int, step: int) -> float:
    return schedule(step) - schedule(step - interval)


def _joined(schedules: Sequence[Schedule], starts: Sequence[int], step: int) -> float:
    at = max((k for k in range(1, len(starts)) if step >= starts[k]), default=0)
    return schedules[at](step - starts[at])


def _progress(step: int, steps: int) -> float:
    return min(max(step / steps, 0.0), 1.0)


def _positive(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SparsityError(f"a schedule needs steps >= 1 (an int), got {steps!r}")
