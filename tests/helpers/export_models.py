"""Small pruned models, and edited files, for the tests of export targets."""

import json
import struct

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


def masked(model, **config):
    """Prune a model by a config that fits all of it; its masks stay."""
    sparsifier = ScopeSparsifier(**config)
    sparsifier.prepare(model)
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


def rewritten(path, change):
    """The file with another header, whose `__metadata__` entry is changed as data."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    key = next(k for k in header["__metadata__"] if k.startswith("sparsekit_ao"))
    about = json.loads(header["__metadata__"][key])
    header["__metadata__"][key] = json.dumps(change(about, header) or about)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def put(*path):
    """A change of one entry: keys, then the value."""

    def change(about, header):
        for key in path[:-2]:
            about = about[key]
        about[path[-2]] = path[-1]

    return change


def rename(old, new):
    def change(about, header):
        header[new] = header.pop(old)

    return change
