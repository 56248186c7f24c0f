"""What a dynamic sparsifier was asked to do, checked: when updates happen, by which rules, and what those need.

Knows numbers and rules; no model.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from ..schedules import Schedule, constant
from .grow import GROW
from .inits import Init, as_init
from .prune import PRUNE
from .redistribute import REDISTRIBUTE
from .rules import Rule, as_rule

__all__ = ["NewValues", "Settings", "make_settings", "value_at"]

NewValues = Callable[[Tensor, torch.Generator], Tensor]


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
        """Whether an update looks at dense gradients."""
        return self.updates and (self.state_init == "grad" or "gradient" in self._needs)

    @property
    def needs_momentum(self) -> bool:
        """Whether an update looks at momentum, which must then see inactive weights in every iteration."""
        return self.updates and "momentum" in self._needs

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


def make_settings(
    *,
    init: object,
    update_every: object,
    update_fraction: object,
    until: object,
    prune: object,
    grow: object,
    redistribute: object,
    target: Any,
    seed: object,
    state_init: Any,
    new_values: Any,
) -> Settings:
    """Settings, once every argument is known to be right and to go with the others."""
    every = None if update_every is None else _integer("update_every", update_every, least=1)
    last = None if until is None else _integer("until", until, least=0)
    _check_kinds(state_init, target, new_values)
    if target is not None and every is None:
        raise SparsityError("target is followed by updates, and update_every=None makes none; give sparsity_level")
    pruning = as_rule(prune, PRUNE, "prune")
    if pruning is None:
        raise SparsityError("prune must be a rule; for masks that never change use update_every=None")
    growing = as_rule(grow, GROW, "grow")
    spreading = as_rule(redistribute, REDISTRIBUTE, "redistribute")
    if spreading is not None and growing is None:
        raise SparsityError("redistribute shares out what grows, and grow is None; give a growth rule, or leave it out")
    if growing is None and target is not None and update_fraction is not None:
        raise SparsityError(
            "update_fraction is what grows again, and with a target and grow=None nothing does; give one"
        )
    return Settings(
        init=as_init(init),
        update_every=every,
        update_fraction=_fraction(0.3 if update_fraction is None else update_fraction),
        until=last,
        prune=pruning,
        grow=growing,
        redistribute=spreading,
        target=target,
        seed=_integer("seed", seed, least=0),
        state_init=state_init,
        new_values=new_values,
    )


def _check_kinds(state_init: object, target: object, new_values: object) -> None:
    if state_init not in ("zero", "grad"):
        raise SparsityError(f"state_init must be 'zero' or 'grad', got {state_init!r}")
    if target is not None and not callable(target):
        raise SparsityError(f"target must be a schedule (iteration -> sparsity) or None, got {target!r}")
    if new_values is not None and not callable(new_values):
        raise SparsityError(f"new_values must be a function (weight, generator) -> values or None, got {new_values!r}")


def _fraction(given: object) -> Schedule:
    if isinstance(given, numbers.Real) and not isinstance(given, bool) and 0 <= float(given) < 1:
        return constant(float(given))
    if callable(given):
        return given
    raise SparsityError(f"update_fraction must be a schedule or a number in [0, 1), got {given!r}")


def _integer(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise SparsityError(f"{name} must be an int >= {least}, got {value!r}")
    return int(value)


def value_at(schedule: Schedule, iteration: int, name: str) -> float:
    """What a schedule says, which may be a user's function.

    >>> value_at(lambda t: 0.5, 7, "target")
    0.5
    """
    found: Any = schedule(iteration)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, numbers.Real):
        raise SparsityError(f"{name}: a schedule gives a number, got {found!r} at iteration {iteration}")
    return float(found)
