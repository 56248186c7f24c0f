"""Small pruned models for the tests of export targets, and how a model looks, to see that it did not change."""

import copy

import torch
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 3))


BLOCKS = patterns.blocks(1, 4, 0.8)


def pruned(model=None, pattern=BLOCKS, names=("0.weight", "2.weight"), squash=True):
    """The model with these weights pruned, and its sparsifier."""
    model = mlp() if model is None else model
    sparsifier = ScopeSparsifier(pattern=pattern)
    sparsifier.prepare(model, [{"tensor_fqn": name} for name in names])
    sparsifier.step()
    if squash:
        sparsifier.squash_mask()
    return model, sparsifier


def batches(n=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 64, generator=generator) for _ in range(n)]


def looks(model):
    """Names, classes and copies of all tensors."""
    return [(n, type(m).__name__) for n, m in model.named_modules()], copy.deepcopy(model.state_dict())


def same(before, model):
    after = looks(model)
    assert before[0] == after[0] and before[1].keys() == after[1].keys()
    return all(torch.equal(t, after[1][k]) or bool(t.isnan().any()) for k, t in before[1].items())
