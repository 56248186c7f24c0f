"""What a rule is: a score over slots with a name, and what it needs to be gathered before it can be asked.

Knows names and functions; no tensors. `prune`, `grow` and `redistribute` hold the rules themselves.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SparsityError
from ..selection import Norm
from .slots import Slots

__all__ = ["NEEDS", "Rule", "as_rule", "norm_of"]

NEEDS = ("gradient", "momentum")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of an update.

    Attributes:
        name: how messages call it.
        score: `Slots` -> rows [scopes, slots] for pruning and growth, -> a number for redistribution.
        needs: of `NEEDS`; the dense gradient, the optimizer's momentum.
        is_global: pruning alone: all tensors compete over which of them loses how many.
    """

    name: str
    score: Callable[[Slots], Any]
    needs: tuple[str, ...] = ()
    is_global: bool = False

    def __post_init__(self) -> None:
        unknown = [n for n in self.needs if n not in NEEDS]
        if unknown:
            raise SparsityError(f"rule {self.name!r}: needs are some of {NEEDS}, got {unknown[0]!r}")


def as_rule(given: object, named: Mapping[str, Rule | None], what: str) -> Rule | None:
    """A rule from a name, a `Rule`, or a function of `Slots` (which may carry `needs`).

    >>> as_rule(lambda slots: slots.random("prune"), {}, "prune").needs
    ()
    """
    if given is None or isinstance(given, Rule):
        return given
    if isinstance(given, str) and given in named:
        return named[given]
    if callable(given):
        needs = tuple(getattr(given, "needs", ()))
        return Rule(name=getattr(given, "__name__", type(given).__name__), score=given, needs=needs)
    raise SparsityError(f"{what} must be one of {', '.join(map(repr, named))}, a Rule or a function, got {given!r}")


def norm_of(criterion: str | None, what: str) -> Norm | str:
    """How a block's elements become one score: absolute values first, then the mean, the largest, L1 or L2.

    >>> norm_of("L1", "prune"), norm_of(None, "prune")
    (1, None)
    """
    norms: dict[str | None, Norm | str] = {None: None, "mean": "mean", "max": math.inf, "L1": 1, "L2": 2}
    if criterion not in norms:
        raise SparsityError(f"{what}: criterion must be 'mean', 'max', 'L1', 'L2' or None, got {criterion!r}")
    return norms[criterion]
