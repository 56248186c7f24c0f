"""torch.ao's own sparsifiers ("stock"), to compare with, and small helpers that several tests share."""

import copy
import itertools

import torch
from torch import nn
from torch.ao.pruning import WeightNormSparsifier as StockWeightNorm

__all__ = ["StockWeightNorm", "linear_model", "masks_of", "stock_mask"]


def linear_model(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers of these sizes with a ReLU between, reproducibly initialised."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def stock_mask(weight: torch.Tensor, steps: int = 1, **kwargs) -> torch.Tensor:
    """The mask that torch.ao's WeightNormSparsifier gives a Linear of this weight."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight = nn.Parameter(weight.clone())
    sparsifier = StockWeightNorm(**kwargs)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    for _ in range(steps):
        sparsifier.step()
    return model[0].parametrizations.weight[0].mask


def masks_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all masks in a model, by their state_dict keys."""
    return {k: copy.deepcopy(v) for k, v in model.state_dict().items() if k.endswith(".mask")}
