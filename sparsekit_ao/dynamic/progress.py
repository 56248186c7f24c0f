"""What a checkpoint keeps of a dynamic sparsifier besides masks and groups, and the checks when it is loaded.

Plain data: the iteration, whether an update is pending, levels, and in the middle of an update the captured gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed import placed_like
from ..errors import SparsityError, is_number
from ..sparsifiers.config import TensorGroup
from .gradients import GradientCapture
from .optimizers import original

_KINDS = {"iteration": int, "pending": bool, "level_given": Mapping, "stepped": Sequence, "gradients": Mapping}


def progress_of(
    iteration: int, pending: bool, level_given: Mapping[str, float], capture: GradientCapture, with_gradients: bool
) -> dict[str, Any]:
    """A plain dict of copies; `with_gradients`, with zeros for gradients that were not captured, which do not count."""
    blank = {g["tensor_fqn"]: torch.zeros_like(original(g).detach()) for g in capture.groups} if with_gradients else {}
    return {
        "iteration": iteration,
        "pending": pending,
        "level_given": dict(level_given),
        "stepped": capture.restorable(),
        "taken": list(capture.gradients),
        "gradients": {**blank, **{fqn: g.detach().clone() for fqn, g in capture.gradients.items()}},
    }


def checked_progress(state_dict: object, groups: Sequence[TensorGroup], capture: GradientCapture) -> dict[str, Any]:
    """The saved progress, checked to fit, with gradients copied to the devices and ranks of their weights."""
    if not isinstance(state_dict, Mapping) or "dynamic" not in state_dict:
        raise SparsityError("load_state_dict: this state is not a dynamic sparsifier's; it has no 'dynamic' entry")
    saved = state_dict["dynamic"]
    for key, kind in _KINDS.items():
        found = saved.get(key) if isinstance(saved, Mapping) else None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise SparsityError(
                f"load_state_dict: 'dynamic' needs {key!r} of type {kind.__name__.lower()}, as state_dict() gives, got "
                f"{found!r}"
            )
    if not all(isinstance(s, bool) for s in saved["stepped"]):
        raise SparsityError(f"load_state_dict: 'stepped' needs a bool for each optimizer, got {saved['stepped']!r}")
    for name, level in saved["level_given"].items():
        if not is_number(level):
            raise SparsityError(f"load_state_dict: {name}: 'level_given' needs a number, got {level!r}")
    capture.check_restorable(saved["stepped"], capture.optimizers)
    captured = {n: g for n, g in saved["gradients"].items() if n in saved.get("taken", saved["gradients"])}
    return {**saved, "gradients": _gradients(captured, groups)}


def _gradients(saved: Mapping[str, Any], groups: Sequence[TensorGroup]) -> dict[str, Tensor]:
    out = {}
    for name, weight in ((g["tensor_fqn"], original(g)) for g in groups if g["tensor_fqn"] in saved):
        found, want = saved[name], tuple(weight.shape)
        if not isinstance(found, Tensor) or found.shape != weight.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise SparsityError(f"load_state_dict: {name}: the saved gradient is {shape}, the weight {want}")
        out[name] = placed_like(found.detach().clone().to(weight.device), weight)
    return out
