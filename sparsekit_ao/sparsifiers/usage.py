"""Warnings and errors about calls in an order, or on a model, in which they have no effect."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError
from .config import TensorGroup


def warn_of_scheduler() -> None:
    """Warn that a scheduler was constructed before `prepare`."""
    text = "prepare: a scheduler was constructed before it; that one has no groups and changes nothing"
    warnings.warn(f"{text}. Construct schedulers after prepare.", stacklevel=4)


def warn_of_stale_masks(
    groups: Sequence[TensorGroup], masks: Sequence[Tensor], chosen_at: Sequence[Any] | None
) -> None:
    """Warn of masks that were never chosen, or chosen for other levels than the groups have now.

    Args:
        groups, masks: of all tensors.
        chosen_at: the groups' levels at the last update of all masks, or None if there was none.
    """
    if chosen_at is None:
        if not any(m.is_meta for m in masks) and all(bool(m.all()) for m in masks):
            text = "squash_mask: step was never called, so every mask keeps everything and nothing is pruned"
            warnings.warn(f"{text}; call step() first", stacklevel=3)
        return
    for group, before in zip(groups, chosen_at, strict=True):
        if group.get("sparsity_level") != before:
            warnings.warn(
                f"squash_mask: the mask of {group['tensor_fqn']} was chosen at sparsity_level {before}, and its level "
                f"is {group['sparsity_level']} now; call step() once more for the last level",
                stacklevel=3,
            )
            return


def refuse_other_model(groups: Sequence[TensorGroup], model: nn.Module, where: str) -> None:
    """Raise if a sparsifier was prepared on another model than the one that is trained.

    Args:
        groups: of the sparsifier.
        model: what the trainer trains, wrapped or not.
        where: the first words of the error.
    """
    own = {id(m) for m in model.modules()}
    other = next((g["tensor_fqn"] for g in groups if id(g["module"]) not in own), None)
    if other is not None:
        raise SparsityError(
            f"{where}: {other} belongs to another model than the one that is trained, so its masks would change "
            "nothing; prepare the sparsifier on the model that the trainer gets"
        )
