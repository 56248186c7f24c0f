"""Small pruned models for the tests of exports, and how a model looks, to see that it did not change."""

import copy

import torch
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns

TWO_FOUR = {"pattern": patterns.n_m(2, 4)}


class Tied(nn.Module):
    """Two layers that use one parameter."""

    def __init__(self, rows=128, columns=128):
        super().__init__()
        self.a, self.b = nn.Linear(columns, rows, bias=False), nn.Linear(columns, rows, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x) + self.b(x)


def masked(model, names=None, **config):
    """Prune all weights of a model, or some; its masks stay."""
    sparsifier = ScopeSparsifier(**config)
    sparsifier.prepare(model, names and [{"tensor_fqn": name} for name in names])
    sparsifier.step()
    return sparsifier


def squashed(model, dtype=torch.float32, **config):
    """A pruned model without masks, of a dtype (int8 by rounding)."""
    masked(model, **(config or TWO_FOUR)).squash_mask()
    if dtype != torch.int8:
        return model.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            values = (module.weight * 127 / module.weight.abs().max()).round().to(torch.int8)
            module.weight = nn.Parameter(values, requires_grad=False)
    return model


def linear(rows=32, columns=64, **options):
    """A model of one layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, rows, bias=False, **options))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 3))


def pruned(model=None, pattern=None, names=("0.weight", "2.weight"), squash=True):
    """The model with these weights pruned, and its sparsifier."""
    model = mlp() if model is None else model
    sparsifier = masked(model, names, pattern=pattern or patterns.blocks(1, 4, 0.8))
    if squash:
        sparsifier.squash_mask()
    return model, sparsifier


def batches(n=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 64, generator=generator) for _ in range(n)]


def with_value(model, value, at=(3, 5)):
    """The same model with one weight set."""
    with torch.no_grad():
        model[0].weight[at] = value
    return model


def same_bits(a, b):
    """Whether two tensors have one dtype, one shape and equal bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def looks(model):
    """Names, classes and copies of all tensors."""
    return [(n, type(m).__name__) for n, m in model.named_modules()], copy.deepcopy(model.state_dict())


def same(before, model):
    after = looks(model)
    assert before[0] == after[0] and before[1].keys() == after[1].keys()
    return all(same_bits(t, after[1][k]) for k, t in before[1].items())
