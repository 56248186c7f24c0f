"""Small models, correlated inputs and structures, for tests of calibration and one-shot pruning."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from sparsekit_ao import ScopeSparsifier
from sparsekit_ao.oneshot.solving import Layer

STRUCTURES = {
    "2:4": {"nnz": 2, "scope_shape": (1, 4)},
    "unstructured": {"sparsity_level": 0.5},
    "rows": {"sparsity_level": 0.5, "scope_shape": (1, -1)},
    "pairs": {"block_shape": (1, 2), "scope_shape": (1, 2), "nnz": 1},
    "4 rows x 1 column": {"block_shape": (4, 1), "scope_shape": (1, 8), "nnz": 4},
    "columns": {"block_shape": (-1, 1), "sparsity_level": 0.25},
    "partial edge": {"block_shape": (1, 3), "edge": "partial", "sparsity_level": 0.5},
    "V:N:M": {
        "stages": [
            {"block_shape": (4, 1), "scope_shape": (1, 8), "nnz": 4},
            {"block_shape": (1, 1), "scope_shape": (1, 8), "nnz": 2},
        ]
    },
}


class Block(nn.Module):
    def __init__(self, width, *, returns=lambda x: x):
        super().__init__()
        self.up, self.down, self.returns = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), returns

    def forward(self, x, scale=1.0):
        return self.returns(x + scale * self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    def __init__(self, width=16, blocks=2, returns=lambda x: x):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width, returns=returns) for _ in range(blocks)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def correlated(count=6, tokens=32, width=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g, dtype=dtype)
    return [torch.randn(tokens, width, generator=g, dtype=dtype) @ mix for _ in range(count)]


def prepared(model=None, *, config=None, seed=0, **options):
    """A sparsifier, to 2:4 unless options say otherwise."""
    torch.manual_seed(seed)
    model = Model() if model is None else model
    sparsifier = ScopeSparsifier(**(options or STRUCTURES["2:4"]))
    sparsifier.prepare(model, config)
    return sparsifier


@contextlib.contextmanager
def interrupted(modules, at, is_training=False):
    """Expects the interruption at this call of the modules, counted from 1; with gradients, if it `is_training`."""
    calls = itertools.count(1)

    def stop(module, *_):
        if module in modules and torch.is_grad_enabled() >= is_training and next(calls) == at:
            raise KeyboardInterrupt

    modules = {*modules}
    handle = nn.modules.module.register_module_forward_pre_hook(stop)  # a hook of the modules would change the call
    with pytest.raises(KeyboardInterrupt) as error:
        yield error
    handle.remove()


def distance(dense, pruned, batches):
    """Of outputs, squared, relative to the dense ones."""
    with torch.no_grad():
        pairs = [(dense(b), pruned(b)) for b in batches]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs))


def layer_of(sparsifier, at=0):
    """A prepared tensor as `prune_layer` takes it, with the statistics of a calibration."""
    name = sparsifier.groups[at]["tensor_fqn"]
    return Layer(
        target=sparsifier.recorder.target(name, ()),
        statistics=sparsifier.recorder.of(name),
        weight=sparsifier._dense(sparsifier.groups[at]),
        pruning_groups=[pruning for pruning in sparsifier.pruning_groups() if name in pruning.specs],
    )
