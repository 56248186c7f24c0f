"""Fields of a transformers config that hold removed sizes, so that `from_pretrained` constructs the smaller model.

They are changed where a model constructed from the config then has the shapes and the outputs of the smaller one. If
not all shapes can follow from the config, it is left as it is.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .attributes import Change, apply_changes
from .candidates import config_sizes, products_of
from .removal import Removal
from .verify import Reference


def has_config(model: nn.Module) -> bool:
    """Whether this is a model that transformers saves with a config and constructs from one."""
    return hasattr(getattr(model, "config", None), "to_dict") and hasattr(model, "save_pretrained")


def fit_config(
    dense: nn.Module, small: nn.Module, removals: Sequence[Removal], reference: Reference, tolerance: float
) -> tuple[list[Change], str]:
    """Change the config of a smaller model, in place, so that it describes the model.

    Args:
        dense: the masked model.
        small: without the units of `removals`.
        removals: of the dense model.
        reference: of the dense model; a model constructed from the config is compared with it.
        tolerance: of this comparison.

    Returns:
        The changes; and how a model constructed from the config differs ("" if it does not).
    """
    wrong, done = misfits(small), list[Change]()
    for change in _candidates(dense, small, removals) if wrong else ():
        apply_changes(small, [change])
        fewer = misfits(small)
        if len(fewer) < len(wrong):
            wrong = fewer
            done.append(change)
        else:
            apply_changes(small, [_undone(change)])
    why = wrong[0] if wrong else _other_outputs(small, reference, tolerance)
    if why:
        apply_changes(small, [_undone(change) for change in reversed(done)])
    return [] if why else done, why


def misfits(model: nn.Module) -> list[str]:
    """The tensors of a model that have another shape in one constructed from its config, as text."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    try:
        with torch.device("meta"):
            fresh = type(model)(copy.deepcopy(model.config)).state_dict()
    except Exception as e:  # the config refuses the numbers, or the model cannot be constructed without values
        return [f"{type(model).__name__}(config) raises {e}"] * (len(shapes) + 1)
    found = {name: tuple(tensor.shape) for name, tensor in fresh.items()}
    return [
        f"{name} is {shapes.get(name)}, but the config makes it {found.get(name)}"
        for name in sorted(shapes.keys() | found.keys())
        if shapes.get(name) != found.get(name)
    ]


def _candidates(dense: nn.Module, small: nn.Module, removals: Sequence[Removal]) -> Iterator[Change]:
    """Fields of the config that hold a removed size and still have the dense model's value."""
    now, seen = dict(config_sizes(small)), set[tuple[str, int]]()
    for removal in removals:
        products = set() if removal.is_empty else products_of(removal.coupling).keys()
        for path, value in config_sizes(dense):
            kept = value // removal.of * removal.kept
            if value in products and now.get(path) == value and (path, kept) not in seen:
                seen.add((path, kept))
                yield Change(path=path, was=value, now=kept)


def _undone(change: Change) -> Change:
    return Change(path=change.path, was=change.now, now=change.was)


def _other_outputs(small: nn.Module, reference: Reference, tolerance: float) -> str:
    """What is wrong with the outputs of the model, or of one constructed from its config with its weights; or ""."""
    try:
        fresh = type(small)(copy.deepcopy(small.config))
        fresh.load_state_dict(small.state_dict())
        first = next(small.parameters())
        for model in (small, fresh.to(first.device, first.dtype)):
            if not reference.compare(model, tolerance).decisive <= tolerance:
                return "a model constructed from the config gives other outputs"
    except Exception as e:
        return f"a model constructed from the config does not run: {e}"
    return ""
