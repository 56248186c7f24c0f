"""Where training starts: how many blocks each tensor gets, and which.

Knows shapes and saved masks. Counts come from `densities`, places at random from a keyed generator; a lottery ticket
or a resumed model brings both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import densities
from ..densities import Densities
from ..distributed import full_tensor
from ..errors import SparsityError
from ..selection import keep_mask
from ..sparsifiers.config import TensorGroup
from .slots import Slots

__all__ = [
    "INITS",
    "Init",
    "as_init",
    "given_mask",
    "lottery_ticket",
    "memory_of",
    "random",
    "resume",
    "start_rows",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Init:
    """How masks begin.

    Attributes:
        name: how messages call it.
        densities: (shapes, overall density, fixed densities) -> densities; see `densities`.
        masks: saved masks or a checkpoint that holds them; an empty mapping is the zeros of the model's weights; None
            where places are drawn.
        shuffle: keep the counts of the saved masks, draw the places anew.
        first_dense: the first tensor that has no budget of its own stays dense; the others make up for it.
    """

    name: str
    densities: Densities | None = None
    masks: Mapping[str, Any] | None = None
    shuffle: bool = False
    first_dense: bool = False


def random(distribution: str | Densities = "uniform", *, first_dense: bool = False) -> Init:
    """Random places, exact counts.

    Args:
        distribution: "uniform", "er", "erk" or a function such as `densities.power`.
        first_dense: leave the first tensor dense.
    """
    known: dict[str, Densities] = {
        "uniform": densities.uniform,
        "er": densities.erdos_renyi,
        "erk": densities.erdos_renyi_kernel,
    }
    if isinstance(distribution, str) and distribution not in known:
        raise SparsityError(
            f"random: distribution must be one of {', '.join(known)}, or a function, got {distribution!r}"
        )
    found = known[distribution] if isinstance(distribution, str) else distribution
    return Init(name="random", densities=found, first_dense=first_dense)


def lottery_ticket(masks: Mapping[str, Any], *, shuffle: bool = False) -> Init:
    """Start from the masks of an earlier run (arXiv 1803.03635).

    Args:
        masks: {tensor_fqn: mask, or weight whose zeros are the mask}, a sparsifier's `state_dict()`, or the
            `state_dict()` of a prepared model.
        shuffle: keep each scope's count and draw the places anew: the ticket's distribution alone.
    """
    if not isinstance(masks, Mapping) or not masks:
        raise SparsityError(f"lottery_ticket needs a mapping with masks, got {type(masks).__name__} of no tensors")
    return Init(name="lottery_ticket", masks=masks, shuffle=shuffle)


def resume(masks: Mapping[str, Any] | None = None) -> Init:
    """Go on with the zeros that the model's weights have, or with saved masks (see `lottery_ticket`)."""
    return Init(name="resume", masks={} if masks is None else masks)


INITS: dict[str, Init] = {
    "random": random(),
    "uniform": random("uniform"),
    "er": random("er"),
    "erk": random("erk"),
    "resume": resume(),
}


def as_init(given: object) -> Init:
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


def given_mask(group: TensorGroup, weight: Tensor, masks: Mapping[str, Any]) -> Tensor:
    """The saved mask of one tensor, as bool of its shape; an empty mapping means where the weight is not zero."""
    fqn = group["tensor_fqn"]
    prefix = f"{group['module_fqn']}." if group["module_fqn"] else ""
    state = masks.get("state", {})
    found = state.get(fqn, {}).get("mask") if isinstance(state, Mapping) else None
    for key in (f"{prefix}parametrizations.{group['tensor_name']}.0.mask", fqn):
        found = masks.get(key) if found is None else found
    if not masks:
        if weight.is_meta:
            raise SparsityError(
                f"{fqn}: it is on the meta device and has no zeros to go on with; give resume the saved masks, or load "
                "the weights before prepare"
            )
        found = weight
    if not isinstance(found, Tensor):
        raise SparsityError(f"{fqn}: the saved masks hold none for it; they hold {sorted(map(str, masks))[:5]}")
    if found.shape != weight.shape:
        raise SparsityError(f"{fqn}: the saved mask is {tuple(found.shape)}, the weight {tuple(weight.shape)}")
    return (full_tensor(found) != 0).to(memory_of(weight))


def memory_of(weight: Tensor) -> torch.device:
    """Where masks of a weight are made: the CPU where it has no memory yet."""
    return torch.device("cpu") if weight.is_meta else weight.device


def start_rows(slots: Slots, init: Init, budget: Callable[[], Tensor]) -> Tensor:
    """The slots that one component starts with; bool rows.

    Args:
        slots: with the saved masks as its masks, if the init has any.
        init: how to start.
        budget: int64 [scopes], asked for where places are drawn.
    """
    if init.masks is None:
        return keep_mask(slots.random("init"), budget(), candidates=slots.real)
    kept = slots.active
    whole = {spec: mask.clone() for spec, mask in slots.masks.items()}
    slots.write(kept, whole)
    broken = [spec.name for spec, mask in slots.masks.items() if not torch.equal(whole[spec], mask)]
    if broken:
        raise SparsityError(
            f"{broken[0]}: the saved mask cuts through blocks; give the block_shape that it was made with"
        )
    if init.shuffle:
        kept = keep_mask(slots.random("shuffle"), kept.sum(1), candidates=slots.real)
    return kept
