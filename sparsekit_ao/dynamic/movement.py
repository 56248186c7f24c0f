"""Carrying an update out: weights, optimizer state and masks of what was born and what is gone.

Knows single tensors; not how the new masks were chosen. What must be there is looked up before anything is changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import fill, full_tensor, local, placed_like, sum_over_ranks
from ..errors import SparsityError
from ..masking import find_mask, select
from ..sparsifiers.config import TensorGroup
from .draws import generator
from .optimizer_state import reset_state, second_moments, start_second_moments
from .settings import Settings
from .trained import original, placed_gradient

__all__ = ["Movement", "forget_dropped", "move", "settle", "zero_dropped"]


@dataclass(frozen=True, kw_only=True)
class Movement:
    """What one update did.

    Attributes:
        iteration: when.
        fraction: of the active blocks that were dropped, of which some may have grown again at once.
        born, gone: {tensor_fqn: elements} that were not there before, and that are not there any more.
        kept: {tensor_fqn: elements} that the mask keeps now.
    """

    iteration: int
    fraction: float
    grown: Mapping[str, int]
    pruned: Mapping[str, int]
    kept: Mapping[str, int]


def move(
    groups: Sequence[TensorGroup],
    masks: Sequence[Tensor],
    settings: Settings,
    optimizers: Sequence[Optimizer],
    gradients: Mapping[str, Tensor],
    iteration: int,
    fraction: float,
) -> Movement:
    """Put new masks (bool, one a group, beside its weight) in the place of the live ones, in place.

    Born and gone weights become zero (or `new_values`), and so does what optimizers remember of them.
    """
    moments: list[list[Tensor]] = [[] for _ in groups]
    if settings.state_init == "grad":
        moments = [second_moments(optimizers, original(g), g["tensor_fqn"]) for g in groups]
    values = [_new_values(g, new, settings, iteration) for g, new in zip(groups, masks, strict=True)]
    counts = {}
    for group, new, value, second in zip(groups, masks, values, moments, strict=True):
        weight, fqn, mask = original(group), group["tensor_fqn"], _mask(group)
        old = mask != 0
        grown, changed = new & ~old, new ^ old
        held = local(weight)
        held.masked_fill_(local(changed), 0)
        if value is not None:
            held.copy_(torch.where(local(grown), local(value), held))
        reset_state(optimizers, weight, changed)
        if second:
            start_second_moments(second, grown, gradients[fqn])
        fill(mask, new)
        counts[fqn] = sum_over_ranks(torch.stack([local(t).count_nonzero() for t in (grown, changed, new)]), weight)
    found = {fqn: c.tolist() for fqn, c in counts.items()}
    return Movement(
        iteration=iteration,
        fraction=fraction,
        grown={fqn: came for fqn, (came, _, _) in found.items()},
        pruned={fqn: moved - came for fqn, (came, moved, _) in found.items()},
        kept={fqn: kept for fqn, (_, _, kept) in found.items()},
    )


def _new_values(group: TensorGroup, new: Tensor, settings: Settings, iteration: int) -> Tensor | None:
    """What the user's function gives for one weight; asked before anything is changed, since it may raise."""
    if settings.new_values is None:
        return None
    weight, fqn = original(group).detach(), group["tensor_fqn"]
    moved = full_tensor(weight).masked_fill(full_tensor(new) ^ (full_tensor(_mask(group)) != 0), 0)
    found = settings.new_values(moved, generator(settings.seed, fqn, iteration, "values"))
    if not isinstance(found, Tensor) or found.shape != weight.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SparsityError(
            f"{fqn}: new_values must return a tensor of the weight's shape {tuple(weight.shape)}, got {what}"
        )
    return placed_like(found.to(moved), weight)


@torch.no_grad()
def zero_dropped(groups: Sequence[TensorGroup]) -> None:
    """Make every weight zero that its mask hides, in place."""
    for group in groups:
        weight = local(original(group))
        weight.copy_(select(weight, local(_mask(group))))


def forget_dropped(groups: Sequence[TensorGroup], optimizers: Sequence[Optimizer]) -> None:
    """Zero what optimizers remember of hidden weights, which would move them for many steps yet."""
    for group in groups:
        reset_state(optimizers, original(group), _mask(group) == 0)


@torch.no_grad()
def settle(held: Sequence[tuple[Tensor, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Leave no gradient and no memory where (parameter, mask) drops: the mask is gone, and zeros are to stay."""
    for parameter, mask in held:
        gradient = placed_gradient(parameter)
        if gradient is not None:
            grad = local(gradient)
            grad.copy_(select(grad, local(mask)))
        reset_state(optimizers, parameter, mask == 0)


def _mask(group: TensorGroup) -> Tensor:
    found = find_mask(group["module"], group["tensor_name"])
    assert found is not None
    return found.mask
