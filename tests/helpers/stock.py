"""torch.ao's own sparsifiers ("stock"), to compare with, and small helpers that several tests share."""

import io
import itertools
import re

import pytest
import torch
from torch import nn
from torch.ao.pruning import WeightNormSparsifier as StockWeightNorm

from sparsekit_ao import ScopeSparsifier, SparsityError

__all__ = [
    "EVERYTHING",
    "Holder",
    "StockWeightNorm",
    "linear_model",
    "mask_by",
    "prepared",
    "refuses",
    "reloaded",
    "same",
    "stepped",
]

EVERYTHING = {"*": 0.5, "width": 0.5}  # a ratio for `shrink`, which keeps what passes between blocks unless it is named


def refuses(text, kind=SparsityError):
    """Expects an error whose message holds this text."""
    return pytest.raises(kind, match=re.escape(text))


def reloaded(state):
    """A state after `torch.save` and a safe `torch.load`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    """Whether two nested states hold the same bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Holder(nn.Module):
    """A module with parameters by name, for shapes that no layer has."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, t in tensors.items():
            self.register_parameter(name, nn.Parameter(t))


def prepared(model=None, config=None, kind=ScopeSparsifier, **options):
    """A sparsifier of a model, by default of two small layers."""
    sparsifier = kind(**options)
    sparsifier.prepare(linear_model(8, 8, 4) if model is None else model, config)
    return sparsifier


def stepped(*args, **options):
    """The same after a step."""
    sparsifier = prepared(*args, **options)
    sparsifier.step()
    return sparsifier


def linear_model(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers of these sizes with a ReLU between, reproducibly initialised."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def mask_by(kind, weight: torch.Tensor, steps: int = 1, **kwargs) -> torch.Tensor:
    """The mask that a sparsifier of this class gives a Linear of this weight."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight = nn.Parameter(weight.clone())
    sparsifier = kind(**kwargs)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    for _ in range(steps):
        sparsifier.step()
    return model[0].parametrizations.weight[0].mask
