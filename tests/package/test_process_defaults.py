"""Masks do not depend on torch's default dtype and device, inference mode or the flushing of subnormal numbers."""

import contextlib
import copy
import itertools
import sys

import pytest
import torch
from grids import grid, nightly_for, turns
from hf_models import deep, make
from kernel_cases import generator
from torch import nn

from sparsekit_ao import (
    DynamicSparsifier,
    ScopeSparsifier,
    StraightThrough,
    WeightNormSparsifier,
    one_shot,
    patterns,
    prune,
    recover,
    removal,
    shrink,
)
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


IN_TURN = ["float64", "meta", "inference", "bfloat16", "meta", "flush"]  # two of them with each pattern
SETTING_OF = list(zip(itertools.cycle(DTYPES), IN_TURN)) + list(zip(itertools.cycle(DTYPES[::-1]), IN_TURN))


@pytest.mark.parametrize(
    ("name", "dtype", "setting"), turns(PATTERNS, SETTING_OF, each=2) + grid(OTHERS, DTYPES, list(SETTINGS)[1:])
)
def test_masks_are_the_same_under_every_default(name, dtype, setting, monkeypatch):
    monkeypatch.setattr(cpu, "LONG", 1024)  # small scopes too are taken in parts
    expected, found = (masks_of(name, dtype, s) for s in ("none", setting))
    assert expected[1] == found[1]
    assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected[2], found[2], strict=True))


def stack():
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(16, 8), nn.Sequential(*blocks), nn.Linear(8, 4)), [
        torch.arange(i, i + 9) for i in (0, 7)
    ]


def pictures():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4)).eval()
    return model, [torch.randn(4, 3, 8, 8, generator=generator()) for _ in range(2)]


def one_shot_copy(model, batches, recovers):
    model = copy.deepcopy(model)
    sparsifier = ScopeSparsifier(pattern="2:4")
    sparsifier.prepare(model, [{"tensor_fqn": "1.*.weight"}])
    one_shot(sparsifier, batches, recover=recovers, progress=False)
    sparsifier.squash_mask()
    return model


def recovered(model, batches):
    small, _ = prune(model, 0.5, progress=False)
    recover(small, model, batches, passes=2, outputs="mse", progress=False)
    return small


def pruned_by(**keys):
    return lambda model, batches: prune(model, batches=batches, progress=False, **keys)[0]


CALLS = {
    "admm": (stack, pruned_by()),
    "2:4 by obs": (stack, pruned_by(sparsity_level="2:4", compensate="obs")),
    "sparsegpt": (stack, pruned_by(compensate="sparsegpt")),
    "random": (stack, lambda model, _: prune(model, score="random", progress=False)[0]),
    "prune and recover": (stack, pruned_by(recover=True, device="cpu", stream_memory=0)),
    "taylor": (stack, pruned_by(score="taylor", compensate=None, forward=lambda m, x: m(x).square().mean())),
    "convolutions": (pictures, pruned_by()),
    "one_shot": (stack, lambda model, batches: one_shot_copy(model, batches, False)),
    "one_shot and recover": (stack, lambda model, batches: one_shot_copy(model, batches, True)),
    "recover": (stack, recovered),
    "shrink": (stack, lambda model, batches: shrink(model, batches[0])[0]),
    "shrink by cost": (pictures, lambda model, batches: shrink(model, batches[0], budget="parameters")[0]),
    "shrink and recover": (stack, lambda model, batches: shrink(model, batches=batches, score="obs", recover=True)[0]),
    "shrink by batches": (pictures, lambda model, batches: shrink(model, batches=batches, score="obd")[0]),
    "Llama": (lambda: deep("Llama", 1), lambda model, inputs: shrink(model, inputs, {"mlp": 0.5})[0]),
    "shrink_layers": (lambda: make("Llama"), lambda model, inputs: removal.shrink_layers(model, [inputs], 0.5)[0]),
    "Mixtral": (lambda: make("Mixtral"), lambda model, inputs: prune(model, batches=[inputs], progress=False)[0]),
    "shrink_experts": (lambda: make("Mixtral"), lambda model, inputs: removal.shrink_experts(model, [inputs])[0]),
}


@pytest.mark.parametrize("name", nightly_for(CALLS, "Llama", "Mixtral"))
def test_pruned_and_smaller_models_are_the_same_under_every_default_device(name, monkeypatch):
    monkeypatch.setattr("sparsekit_ao.oneshot.walk.SAMPLED", 2000)
    monkeypatch.setattr("sparsekit_ao.oneshot.training.ENOUGH", 4)
    torch.manual_seed(0)
    make_model, run = CALLS[name]
    model, batches = make_model()
    expected = run(model, batches).state_dict()
    forget()
    with default_device("meta"):  # any tensor that is made without a device would have no values
        found = run(model, batches).state_dict()
    assert expected.keys() == found.keys() and all(map(torch.equal, expected.values(), found.values()))
