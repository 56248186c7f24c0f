"""How training starts, as a value: an `Init` distributes the overall budget over tensors, or brings saved masks.

The functions here only describe a start; `start` draws or reads the masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import densities
from ..densities import Densities
from ..errors import SparsityError

__all__ = ["INITS", "Init", "lottery_ticket", "parse_init", "random", "resume"]

_DENSITIES: dict[str, Densities] = {
    "uniform": densities.uniform,
    "er": densities.erdos_renyi,
    "erk": densities.erdos_renyi_kernel,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Init:
    """How masks start.

    Attributes:
        name: used in messages.
        densities: (shapes, overall density, fixed densities) -> densities; see `densities`.
        masks: saved masks, or a checkpoint that holds them; an empty mapping stands for the zeros of the model's
            weights; None where kept blocks are drawn at random.
        shuffle: keep the counts of the saved masks, and draw which blocks are kept.
        first_dense: the first tensor without a budget of its own stays dense; the others make up for it.
    """

    name: str
    densities: Densities | None = None
    masks: Mapping[str, Any] | None = None
    shuffle: bool = False
    first_dense: bool = False


def random(distribution: str | Densities = "uniform", *, first_dense: bool = False) -> Init:
    """Random blocks, exact counts.

    Args:
        distribution: "uniform", "er", "erk" or a function such as `densities.power`.
        first_dense: leave the first tensor dense.
    """
    if isinstance(distribution, str) and distribution not in _DENSITIES:
        names = ", ".join(_DENSITIES)
        raise SparsityError(f"random: distribution must be one of {names}, or a function, got {distribution!r}")
    found = _DENSITIES[distribution] if isinstance(distribution, str) else distribution
    return Init(name="random", densities=found, first_dense=first_dense)


def lottery_ticket(masks: Mapping[str, Any], *, shuffle: bool = False) -> Init:
    """The masks of an earlier run (arXiv 1803.03635).

    Args:
        masks: {tensor_fqn: mask, or weight whose zeros are the mask}, a sparsifier's `state_dict()`, or the
            `state_dict()` of a prepared model.
        shuffle: keep the count of each scope and draw which blocks: the distribution of the ticket alone.
    """
    if not isinstance(masks, Mapping) or not masks:
        raise SparsityError(f"lottery_ticket needs a non-empty mapping of masks, got {type(masks).__name__}")
    return Init(name="lottery_ticket", masks=masks, shuffle=shuffle)


def resume(masks: Mapping[str, Any] | None = None) -> Init:
    """The zeros that the model's weights have, or saved masks (see `lottery_ticket`).

    Raises:
        SparsityError: `masks` is no mapping of names to masks.
    """
    if masks is not None and not isinstance(masks, Mapping):
        raise SparsityError(f"resume: masks must be a dict of names and masks, got {masks!r}")
    return Init(name="resume", masks={} if masks is None else masks)


#: starts by name, for the argument `init` of `DynamicSparsifier`
INITS = {"random": random(), **{name: random(name) for name in _DENSITIES}, "resume": resume()}


def parse_init(given: object) -> Init:
    """An init from a name, an `Init`, or a function that distributes densities."""
    if isinstance(given, Init):
        return given
    if isinstance(given, str) and given in INITS:
        return INITS[given]
    if callable(given):
        return random(given)
    raise SparsityError(
        f"init must be one of {', '.join(map(repr, INITS))}, an Init or a function of densities, got {given!r}"
    )
