"""`Settings`: the checked arguments of a dynamic sparsifier; when updates happen, and what their rules need."""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError, is_number
from ..schedules import Schedule, constant
from .inits import Init, parse_init
from .rules import NAMES, Rule, parse_rule

NewValues = Callable[[Tensor, torch.Generator], Tensor]
_FUNCTIONS = {"target": "a schedule (iteration -> sparsity)", "new_values": "a function (weight, generator) -> values"}
_LEAST = {"update_every": 1, "until": 0, "seed": 0}  # integers and their lower bounds


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked arguments of `DynamicSparsifier`, where they are described."""

    init: Init
    update_every: int | None
    update_fraction: Schedule
    until: int | None
    prune: Rule
    grow: Rule | None
    redistribute: Rule | None
    target: Schedule | None
    seed: int
    state_init: str
    new_values: NewValues | None

    @property
    def updates(self) -> bool:
        """Whether masks ever change."""
        return self.update_every is not None and self.until != 0

    @property
    def needs_gradient(self) -> bool:
        """Whether an update reads dense gradients."""
        return self.updates and (self.state_init == "grad" or "gradient" in self._needs)

    @property
    def needs_momentum(self) -> bool:
        """Whether an update reads momentum, which must then include inactive weights in every iteration."""
        return self.updates and "momentum" in self._needs

    @property
    def can_choose_first(self) -> bool:
        """Whether an update chooses before it knows that it happens, so that both are read from a device together.

        It does where budgets depend on what is pruned. Rules of the user's own only see what is finite.
        """
        is_read = self.redistribute is not None or self.prune.is_global or self.target is not None
        own = {"prune": self.prune, "grow": self.grow, "redistribute": self.redistribute}
        return is_read and all(rule in NAMES[purpose].values() for purpose, rule in own.items())

    @property
    def statistics(self) -> tuple[str, ...]:
        """What an update reads of `sparsifier.calibrate`."""
        rules = [r for r in (self.prune, self.grow, self.redistribute) if r is not None and self.updates]
        return tuple(dict.fromkeys(n for rule in rules for n in rule.statistics))

    @property
    def _needs(self) -> set[str]:
        return {n for rule in (self.prune, self.grow, self.redistribute) if rule is not None for n in rule.needs}

    def is_due(self, iteration: int) -> bool:
        """Whether an update is scheduled for this iteration (counted from 1)."""
        return self.updates and iteration % (self.update_every or 1) == 0 and self.may_update(iteration)

    def due(self, most: int = 1000) -> range:
        """Iterations with a scheduled update; the first `most` where there is no end."""
        every = self.update_every or 1
        return range(every, (every * most if self.until is None else self.until) + 1, every)

    def due_before(self, iteration: int) -> int:
        """The last iteration before this one with a scheduled update."""
        every = self.update_every or 1
        return (iteration - 1) // every * every

    def may_update(self, iteration: int) -> bool:
        """Whether an update may still happen in this iteration."""
        return self.updates and (self.until is None or iteration <= self.until)


def make_settings(**given: Any) -> Settings:
    """`DynamicSparsifier`'s arguments as Settings, once each is known to be valid by itself and with the others."""
    checked = {purpose: parse_rule(purpose, given[purpose]) for purpose in ("prune", "grow", "redistribute")}
    prune, grow, fraction = checked["prune"], checked["grow"], given["update_fraction"]
    if given["state_init"] not in ("zero", "grad"):
        raise SparsityError(f"state_init must be 'zero' or 'grad', got {given['state_init']!r}")
    for name, what in _FUNCTIONS.items():
        if given[name] is not None and not callable(given[name]):
            raise SparsityError(f"{name} must be {what} or None, got {given[name]!r}")
    if given["target"] is not None and given["update_every"] is None:
        raise SparsityError(
            "target takes effect in updates, and update_every=None means that there are none; pass sparsity_level"
        )
    if prune is None:
        raise SparsityError("prune must be a rule; for masks that never change use update_every=None")
    if grow is None and checked["redistribute"] is not None:
        raise SparsityError("redistribute distributes what grows, and grow is None; pass a growth rule or leave it out")
    if grow is None and given["target"] is not None and fraction is not None:
        raise SparsityError(
            "update_fraction is the fraction that grows again; with a target and grow=None nothing does. Leave one out."
        )
    integers = {name: _integer(name, given[name], least) for name, least in _LEAST.items()}
    fraction = _fraction(0.3 if fraction is None else fraction)
    return Settings(**{**given, **checked, **integers, "init": parse_init(given["init"]), "update_fraction": fraction})


def _fraction(given: object) -> Schedule:
    if is_number(given) and 0 <= float(given) < 1:
        return constant(float(given))
    if callable(given):
        return given
    raise SparsityError(f"update_fraction must be a schedule or a number in [0, 1), got {given!r}")


def _integer(name: str, value: object, least: int) -> int | None:
    if value is None and name != "seed":
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise SparsityError(f"{name} must be an int >= {least}, got {value!r}")
    return int(value)


def value_at(schedule: Schedule, iteration: int, name: str) -> float:
    """The value of a schedule, which may be a user's function, checked to be a number.

    >>> value_at(lambda t: 0.5, 7, "target")
    0.5
    """
    return number_of(schedule(iteration), f"{name}: a schedule must return a number", f" at iteration {iteration}")


def read_numbers(found: Sequence[Tensor | float]) -> list[float]:
    """Numbers, of which those in tensors of one element are read together: one wait for a device.

    >>> read_numbers([torch.tensor(2), 0.5, torch.tensor([3])])
    [2.0, 0.5, 3.0]
    """
    tensors = [t.detach().reshape(()).double() for t in found if isinstance(t, Tensor)]
    read = iter(torch.stack([t.to(tensors[0].device, non_blocking=True) for t in tensors]).tolist() if tensors else ())
    return [next(read) if isinstance(one, Tensor) else one for one in found]


def number_of(found: Any, required: str, when: str = "") -> float:
    """A number, or a tensor of one, that a user's function returned; else an error that starts with `required`."""
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not is_number(found):
        raise SparsityError(f"{required}, got {found!r}{when}")
    return float(found)
