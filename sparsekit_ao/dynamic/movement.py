"""Carrying an update out: weights, optimizer state and masks of what was born and what is gone.

Knows single tensors; not how the new masks were chosen. What must be there is looked up before anything is changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import Group
from ..masking import find_mask
from .draws import generator
from .gradients import original
from .optimizer_state import reset_state, second_moments, start_second_moments
from .settings import Settings

__all__ = ["Movement", "move"]


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
    born: Mapping[str, int]
    gone: Mapping[str, int]
    kept: Mapping[str, int]


def move(
    groups: Sequence[Group],
    masks: Sequence[Tensor],
    settings: Settings,
    optimizers: Sequence[Optimizer],
    gradients: Mapping[str, Tensor],
    iteration: int,
    fraction: float,
) -> Movement:
    """Put new masks (bool, one a group) in the place of the live ones, in place.

    Born and gone weights become zero (or `new_values`), and so does what optimizers remember of them.
    """
    moments: list[list[Tensor]] = [[] for _ in groups]
    if settings.state_init == "grad":
        moments = [second_moments(optimizers, original(g), g["tensor_fqn"]) for g in groups]
    born_count, gone_count = {}, {}
    for group, new, second in zip(groups, masks, moments, strict=True):
        weight, fqn = original(group), group["tensor_fqn"]
        found = find_mask(group["module"], group["tensor_name"])
        assert found is not None
        old = found.mask != 0
        born, changed = new & ~old, new ^ old
        weight.detach().masked_fill_(changed, 0)
        if settings.new_values is not None:
            values = settings.new_values(weight.detach(), generator(settings.seed, fqn, iteration, "values"))
            weight.detach().copy_(torch.where(born, values.to(weight), weight.detach()))
        reset_state(optimizers, weight, changed)
        if second:
            start_second_moments(second, born, gradients[fqn])
        found.mask.copy_(new)
        born_count[fqn], gone_count[fqn] = born.sum(), (old & ~new).sum()
    kept = {g["tensor_fqn"]: int(m.sum()) for g, m in zip(groups, masks, strict=True)}
    return Movement(
        iteration=iteration,
        fraction=fraction,
        born={n: int(c) for n, c in born_count.items()},
        gone={n: int(c) for n, c in gone_count.items()},
        kept=kept,
    )
