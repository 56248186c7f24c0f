"""Schedules, which are functions of the step without state, and `ScheduleSL`, a scheduler that uses them.

The number is either a target sparsity (`cubic` of Zhu and Gupta) or the fraction of the active weights to replace in an
update of a `DynamicSparsifier` (`cosine` of RigL). Schedules can be pickled.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from .errors import SparsityError, is_number
from .torch_ao import BaseScheduler, BaseSparsifier

__all__ = ["Schedule", "ScheduleSL", "constant", "cosine", "cubic", "difference", "drop_fraction", "join", "linear"]

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """Return a schedule whose value is always `value`.

    >>> constant(0.5)(1000)
    0.5
    """
    _check_numbers(value=value)
    return partial(_constant, value)


def linear(start: float, end: float, steps: int, begin: int = 0) -> Schedule:
    """Return a schedule that is linear from `start` at step `begin` to `end` at step `begin + steps` and later.

    >>> [linear(1.0, 0.0, 4)(t) for t in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    return _ramp(_power, start, end, steps, begin, exponent=1)


def cosine(start: float, end: float, steps: int, begin: int = 0) -> Schedule:
    """Return a schedule that falls or rises by half a cosine (RigL, arXiv 1911.11134).

    It is `start` up to step `begin`, and `end` from step `begin + steps` on.

    >>> [round(cosine(0.3, 0.0, 10)(t), 4) for t in (1, 5, 10, 11)]
    [0.2927, 0.15, 0.0, 0.0]
    """
    return _ramp(_cosine, start, end, steps, begin)


def cubic(start: float, end: float, steps: int, begin: int = 0) -> Schedule:
    """Return the schedule of gradual magnitude pruning, a cubic (Zhu and Gupta, arXiv 1710.01878).

    At step t its value is `end + (start - end) (1 - (t - begin) / steps)^3`. It is `start` before step `begin`, and
    `end` from step `begin + steps` on.

    >>> s = cubic(0.0, 0.8, 900, begin=100)
    >>> [round(s(t) - s(t - 100), 4) for t in (200, 300, 900, 1000)]
    [0.2381, 0.1855, 0.0077, 0.0011]
    """
    return _ramp(_power, start, end, steps, begin, exponent=3)


def difference(schedule: Schedule, interval: int) -> Schedule:
    """Return the schedule of what another one adds in each interval: `schedule(t) - schedule(t - interval)`.

    >>> [round(difference(cubic(0.0, 0.8, 900, begin=100), 100)(t), 4) for t in (200, 300, 900, 1000)]
    [0.2381, 0.1855, 0.0077, 0.0011]
    """
    _check_schedules("difference: schedule", [schedule])
    check_positive("interval", interval)
    return partial(_difference, schedule, interval)


def drop_fraction(target: float, now: float) -> float:
    """Return the fraction of active weights to drop (at least 0) so that sparsity changes from `now` to `target`.

    >>> round(drop_fraction(0.9, 0.8), 4), drop_fraction(0.5, 0.8), drop_fraction(1.0, 1.0)
    (0.5, 0.0, 0.0)
    """
    for name, level in (("target", target), ("now", now)):
        if not is_number(level) or not 0 <= level <= 1:
            raise SparsityError(f"drop_fraction: {name} is a sparsity and must be in [0, 1], got {level!r}")
    return 0.0 if target <= now else (target - now) / (1 - now)


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Return a schedule that follows several ones, one after the other.

    Args:
        schedules: A sequence of at least one schedule. Each counts its steps from its own boundary.
        boundaries: The steps at which all schedules but the first begin, in increasing order.

    >>> s = join([constant(0.0), linear(1.0, 0.0, 2)], [10])
    >>> [s(t) for t in (9, 10, 11, 12)]
    [0.0, 1.0, 0.5, 0.0]
    """
    if not isinstance(schedules, (list, tuple)) or not schedules:
        raise SparsityError(f"join: schedules must be a list of at least one, got {schedules!r}")
    _check_schedules("join: schedules", schedules)
    if len(boundaries) != len(schedules) - 1 or sorted(set(boundaries)) != list(boundaries):
        raise SparsityError(
            f"join: {len(schedules)} schedules need {len(schedules) - 1} increasing boundaries, got {list(boundaries)}"
        )
    return partial(_joined, list(schedules), [0, *boundaries])


def cut_short(schedule: Schedule, step: int, level: float, name: str) -> str:
    """Return that a schedule ends with another level than `name` has at a step; "" if not, or if its end is unknown."""
    while isinstance(schedule, partial) and schedule.func is _joined:
        schedule = schedule.args[0][-1]
    is_known = isinstance(schedule, partial) and schedule.func in (_constant, _power, _cosine)
    if not is_known or (last := schedule(sys.maxsize)) == level:
        return ""
    return f"the schedule is at step {step:,} with sparsity {level:.4g} of {name}, but ends with {last:.4g}"


def _constant(value: float, step: int) -> float:
    return value


def _ramp(shape: Callable[..., float], start: float, end: float, steps: int, begin: int, **keys: int) -> Schedule:
    _check_numbers(start=start, end=end, begin=begin)
    check_positive("steps", steps)
    return partial(shape, start, end, steps, begin, **keys)


def _power(start: float, end: float, steps: int, begin: int, step: int, *, exponent: int) -> float:
    return end + (start - end) * (1 - _progress(step - begin, steps)) ** exponent


def _cosine(start: float, end: float, steps: int, begin: int, step: int) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * _progress(step - begin, steps))) / 2


def _difference(schedule: Schedule, interval: int, step: int) -> float:
    return schedule(step) - schedule(step - interval)


def _joined(schedules: Sequence[Schedule], starts: Sequence[int], step: int) -> float:
    at = max((k for k in range(1, len(starts)) if step >= starts[k]), default=0)
    return schedules[at](step - starts[at])


def _progress(step: int, steps: int) -> float:
    return min(max(step / steps, 0.0), 1.0)


def check_positive(name: str, value: object) -> None:
    """Raise unless a value is an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise SparsityError(f"{name} must be an int >= 1, got {value!r}")


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if not is_number(value) or not math.isfinite(value):
            raise SparsityError(f"{name} of a schedule must be a finite number, got {value!r}")


def is_schedule(value: object) -> bool:
    """Whether this is a function, and none that returns a schedule, such as `cubic` without its numbers."""
    return callable(value) and not isinstance(value, type) and value not in (constant, linear, cosine, cubic)


def _check_schedules(what: str, schedules: Sequence[Any]) -> None:
    for schedule in schedules:
        if not is_schedule(schedule):
            raise SparsityError(
                f"{what} must be a function (step -> number), such as schedules.cubic(0.0, 0.9, steps=1000), got "
                f"{schedule!r}"
            )


class ScheduleSL(BaseScheduler):
    """Set every group's sparsity level to `schedule(step)`, and update masks only every `interval` steps.

    The training loop calls `optimizer.step(); sparsifier.step(); scheduler.step()`. After the loop, call
    `sparsifier.step()` once more to apply the last level. Construct the scheduler after `sparsifier.prepare`;
    construction counts as step 0.

    Args:
        sparsifier: A prepared sparsifier.
        schedule: A function of the step that returns a level in [0, 1], or a list with one function for each group.
        interval: Levels and masks are updated at steps that are multiples of this; 1 by default.
        last_epoch: The number of the step before the first one; -1 (default) starts at step 0.

    Raises:
        SparsityError: The sparsifier is not prepared, the interval is below 1, or schedules and groups differ in
            number.

    >>> from sparsekit_ao import ScopeSparsifier, schedules
    >>> sparsifier = ScopeSparsifier()
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8)), None)
    >>> scheduler = ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 10), interval=5)
    >>> levels = []
    >>> for step in range(10):
    ...     sparsifier.step()
    ...     scheduler.step()
    ...     levels.append(sparsifier.groups[0]["sparsity_level"])
    >>> levels
    [0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.5]
    """

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        schedule: Schedule | Sequence[Schedule],
        interval: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(sparsifier, BaseSparsifier):
            raise SparsityError(f"ScheduleSL needs a sparsifier, got {type(sparsifier).__name__}")
        if not sparsifier.groups:
            raise SparsityError("ScheduleSL needs a prepared sparsifier; call sparsifier.prepare(model, config) first")
        check_positive("interval", interval)
        count = len(sparsifier.groups)
        schedules: list[Any] = [*schedule] if isinstance(schedule, (list, tuple)) else [schedule] * count
        _check_schedules("ScheduleSL: schedule", schedules)
        if len(schedules) != count:
            raise SparsityError(f"ScheduleSL: {len(schedules)} schedules for {count} groups; give one, or one for each")
        self.schedules, self.interval = schedules, interval
        super().__init__(sparsifier, last_epoch, verbose)
        sparsifier.last_scheduler = self  # type: ignore[attr-defined]  # which says whether the schedule has ended

    def get_sl(self) -> list[float]:
        """Return the levels of this step: new ones at a multiple of the interval, else the present ones."""
        if self.last_epoch % self.interval:
            return [group["sparsity_level"] for group in self.sparsifier.groups]
        levels = [schedule(self.last_epoch) for schedule in self.schedules]
        for level in levels:
            if not is_number(level) or not math.isfinite(level):
                raise SparsityError(
                    "ScheduleSL: a schedule must give a sparsity level, a number in [0, 1]; at step "
                    f"{self.last_epoch} it gave {level!r}"
                )
        return list(map(float, levels))

    def step(self, epoch: int | None = None) -> None:
        """Advance one step; `sparsifier.step` updates masks only if it is a multiple of the interval."""
        super().step(epoch)
        self.sparsifier.enable_mask_update = self.last_epoch % self.interval == 0

    def state_dict(self) -> dict[str, Any]:
        """Return counters and levels, without the sparsifier and the schedules, for `torch.load(weights_only=True)`."""
        return {k: v for k, v in self.__dict__.items() if k not in ("sparsifier", "schedules")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: counters, the groups' levels, and whether masks may be updated."""
        where, present = "ScheduleSL.load_state_dict: ", self.state_dict()
        if not isinstance(state_dict, Mapping) or not {"last_epoch", "_last_sl"} <= set(state_dict) <= set(present):
            raise SparsityError(f"{where}expected a dict with {', '.join(map(repr, sorted(present)))}")
        for key, value in state_dict.items():
            if not _is_like(value, present[key]) or (key == "interval" and value < 1):
                raise SparsityError(f"{where}{key!r} must be of the kind of {present[key]!r}, got {value!r}")
        levels, groups = list(state_dict["_last_sl"]), self.sparsifier.groups
        if len(levels) != len(groups):
            raise SparsityError(
                f"{where}the state was saved for {len(levels)} groups, but this scheduler has {len(groups)}"
            )
        self.__dict__.update({**state_dict, "_last_sl": levels})
        for group, level in zip(groups, levels, strict=True):
            group["sparsity_level"] = level
        self.sparsifier.enable_mask_update = self.last_epoch % self.interval == 0


def _is_like(value: object, present: object) -> bool:
    """Whether a saved value is of the kind of the present one: a bool, an int, a number or a list of numbers."""
    if isinstance(present, list):
        return isinstance(value, list) and all(_is_like(v, 0.0) for v in value)
    if isinstance(present, float):
        return isinstance(value, (int, float)) and math.isfinite(value)
    return type(value) is type(present)
