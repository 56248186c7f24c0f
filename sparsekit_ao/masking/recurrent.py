"""Masked weights of `nn.RNN`, `nn.LSTM` and `nn.GRU`, which keep a list of their weights.

At each forward pass torch fills the list with the weights as they are computed then. `copy.deepcopy` of a module that
holds such tensors fails, so while a weight is masked the list is kept outside of the module.
"""

import weakref
from typing import Any

from torch import nn

_LISTS: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def keep_list_outside(module: nn.Module) -> None:
    """Keep the list of a parametrized recurrent module outside of it, so that it is not copied; else does nothing."""
    if isinstance(module, nn.RNNBase) and "_flat_weights" in vars(module):
        _LISTS[module] = vars(module).pop("_flat_weights")
        type(module)._flat_weights = property(_get, _set)  # type: ignore[assignment] # the class is its own by now


def put_list_back(module: nn.Module) -> None:
    """Give a recurrent module that is no longer parametrized the list of its parameters; else does nothing."""
    if isinstance(module, nn.RNNBase) and not hasattr(module, "_flat_weights"):
        _LISTS.pop(module, None)
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _get(module: nn.Module) -> list[Any]:
    return _LISTS.get(module, [])  # that of a copy is filled at its first forward pass


def _set(module: nn.Module, weights: list[Any]) -> None:
    _LISTS[module] = weights
