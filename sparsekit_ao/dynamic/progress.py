"""Where in its schedule a dynamic sparsifier is: what a checkpoint keeps of it, and what is accepted back.

Knows plain data; changes nothing. In the middle of an update window that includes the gradients taken so far.
"""

import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed import placed_like
from ..errors import SparsityError
from ..sparsifiers.config import TensorGroup
from .gradients import GradientTap
from .trained import original

__all__ = ["checked_progress", "progress_of", "warn_of_missed"]

_KINDS = {"iteration": int, "pending": bool, "level_given": Mapping, "stepped": Sequence, "gradients": Mapping}


def progress_of(
    iteration: int, pending: bool, level_given: Mapping[str, float], tap: GradientTap, *, room: bool = False
) -> dict[str, Any]:
    """A plain dict of copies.

    With `room` it holds zeros for gradients that were not taken, which do not count.
    """
    blank = {g["tensor_fqn"]: torch.zeros_like(original(g).detach()) for g in tap.groups} if room else {}
    return {
        "iteration": iteration,
        "pending": pending,
        "level_given": dict(level_given),
        "stepped": tap.progress(),
        "taken": list(tap.gradients),
        "gradients": {**blank, **{fqn: g.detach().clone() for fqn, g in tap.gradients.items()}},
    }


def checked_progress(state_dict: object, groups: Sequence[TensorGroup], tap: GradientTap) -> dict[str, Any]:
    """The saved progress with gradients copied to where their weights are, once it is known to fit.

    Raises:
        SparsityError: another sparsifier's state, a part missing or of a wrong kind, a gradient of another shape, or
            other optimizers in the middle of an iteration.
    """
    if not isinstance(state_dict, Mapping) or "dynamic" not in state_dict:
        raise SparsityError("load_state_dict: this state is not a dynamic sparsifier's; it has no 'dynamic' entry")
    saved = state_dict["dynamic"]
    for key, kind in _KINDS.items():
        found = saved.get(key) if isinstance(saved, Mapping) else None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise SparsityError(
                f"load_state_dict: 'dynamic' needs {key!r}, a {kind.__name__.lower()}, as state_dict() gives, got "
                f"{found!r}"
            )
    if not all(isinstance(s, bool) for s in saved["stepped"]):
        raise SparsityError(f"load_state_dict: 'stepped' needs a bool for each optimizer, got {saved['stepped']!r}")
    _check_levels(saved["level_given"])
    tap.check_restorable(saved["stepped"])
    counts = {n: g for n, g in saved["gradients"].items() if n in saved.get("taken", saved["gradients"])}
    return {**saved, "gradients": _gradients(counts, groups)}


def warn_of_missed(iteration: int) -> None:
    """Warn, from a method that `step` calls, that an update was given up."""
    warnings.warn(
        f"the mask update due in iteration {iteration} never happened: an optimizer took no step, or a gradient was "
        "missing or not finite, in every iteration since",
        stacklevel=4,
    )


def _check_levels(levels: Mapping[str, Any]) -> None:
    for name, level in levels.items():
        if isinstance(level, bool) or not isinstance(level, numbers.Real):
            raise SparsityError(f"load_state_dict: {name}: 'level_given' needs a number, got {level!r}")


def _gradients(saved: Mapping[str, Any], groups: Sequence[TensorGroup]) -> dict[str, Tensor]:
    out = {}
    for group in groups:
        name, weight = group["tensor_fqn"], original(group)
        if name not in saved:
            continue
        found = saved[name]
        if not isinstance(found, Tensor) or found.shape != weight.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise SparsityError(
                f"load_state_dict: {name}: the saved gradient is {shape}, the weight {tuple(weight.shape)}"
            )
        out[name] = placed_like(found.detach().clone().to(weight.device), weight)
    return out
