"""Masks do not depend on torch's default dtype and device, inference mode or the flushing of subnormal numbers."""

import contextlib
import sys

import pytest
import torch
from grids import grid
from kernel_cases import generator
from torch import nn

from sparsekit_ao import DynamicSparsifier, ScopeSparsifier, StraightThrough, WeightNormSparsifier, patterns
from sparsekit_ao.selection import cpu

PATTERNS = {
    "unstructured": patterns.unstructured(0.5),
    "2:4": patterns.n_m(2, 4),
    "16:32": patterns.n_m(16, 32),
    "per row": {"scope_shape": (1, -1)},
    "per column": {"scope_shape": (-1, 1)},
    "1x4": {"block_shape": (1, 4)},
    "1x4 pairs": {"block_shape": (1, 4), "scope_shape": (1, 2)},
    "8x8": patterns.blocks(8, 8, 0.5),
    "rows": patterns.rows(0.5),
    "columns": patterns.columns(0.5),
    "heads": patterns.heads(4, 0.5),
    "32:2:8": patterns.v_n_m(32, 2, 8),
    "partial scope": {"scope_shape": (1, 10), "edge": "partial"},
    "partial": {"block_shape": (3, 5), "edge": "partial"},
    "view": {"view": ((64, 2, 8, 4), (64, 32, 1, 8)), "block_shape": (1, 1, 1, 2), "scope_shape": (1, 1, 4, 1)},
    "global": {"scope_coupling": "all", "norm": 1},
    "limited": {"scope_coupling": "all", "max_sparsity": 0.5},
    "coupled": {"block_coupling": "both", "block_shape": (1, -1)},
    "score": {"score": lambda w, name: w - 1, "block_shape": (1, 2)},
    "nearly all": {"nnz": 1},
}
OTHERS = {
    "weight norm": lambda: WeightNormSparsifier(0.5, (1, 4), zeros_per_block=2),
    "dynamic": lambda: DynamicSparsifier(0.5, update_every=1, grow="random"),
    "straight through": lambda: StraightThrough(0.5),
}

DTYPES = [torch.float32, torch.bfloat16]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def flushed():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


SETTINGS = {
    "none": contextlib.nullcontext,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "cpu": lambda: default_device("cpu"),
    "meta": lambda: default_device("meta"),
    "inference": torch.inference_mode,
    "flush": flushed,
}


def forget():
    """Empty every cache of the library, in which an earlier result would hide an error."""
    for name, module in list(sys.modules.items()):
        for function in vars(module).values() if name.startswith("sparsekit_ao") else ():
            if hasattr(function, "cache_clear") and function.__name__ != "_all_helpers":
                function.cache_clear()


def masks_of(name, dtype, setting):
    """The masks after a step, and what check and report say, with everything done under a setting."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    for layer in model:
        layer.weight = nn.Parameter(torch.randn(64, 64, generator=generator()).mul_(8).round_().to(dtype))
    forget()
    with SETTINGS[setting]():
        if setting == "inference":  # weights of outside cannot get masks inside
            for layer in model:
                layer.weight = nn.Parameter(layer.weight.detach().clone())
        sparsifier = OTHERS[name]() if name in OTHERS else ScopeSparsifier()
        if name == "dynamic":
            sparsifier.attach(torch.optim.SGD(model.parameters()))
        sparsifier.prepare(model, [{"tensor_fqn": "*", **PATTERNS.get(name, {})}])
        sparsifier.step()
        said = [(row.kept, row.blocks, row.sparsity) for row in sparsifier.report()]
        if name != "weight norm":
            said.append(sparsifier.check())
        masks = [sparsifier.mask(g["tensor_fqn"]).clone() for g in sparsifier.groups]
        sparsifier.squash_mask()
    assert all(layer.weight.dtype == dtype and layer.weight.device.type == "cpu" for layer in model)
    return masks, said, [layer.weight == 0 for layer in model]


@pytest.mark.parametrize(
    ("name", "dtype", "setting"), grid(PATTERNS, DTYPES, list(SETTINGS)[1:]) + grid(OTHERS, DTYPES, SETTINGS)
)
def test_masks_are_the_same_under_every_default(name, dtype, setting, monkeypatch):
    monkeypatch.setattr(cpu, "LONG", 1024)  # small scopes too are taken in parts
    expected, found = (masks_of(name, dtype, s) for s in ("none", setting))
    assert expected[1] == found[1]
    assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected[2], found[2], strict=True))
