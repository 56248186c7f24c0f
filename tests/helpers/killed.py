"""Runs that are killed (SIGKILL) at random moments and go on from their last checkpoint, compared bit for bit.

A run saves a checkpoint after every step, under another name that then replaces the last one. `test_faults.py` runs
this as `python -O -W error tests/helpers/killed.py [kills of each kind of run]`, in an empty folder.
"""

import os
import pathlib
import random
import shutil
import signal
import sys
import time

import torch
import torch._dynamo  # which optimizers import when they are first used, every fork anew
from forks import begin, call, end, need
from growing import OPTIMIZERS, mlp, prepared, train
from stock import same
from torch import nn

from sparsekit_ao import GMP, ProximalSparsifier, RigL, ScopeSparsifier, one_shot
from sparsekit_ao.schedules import ScheduleSL, cubic, linear

STEPS = 10


def scope():
    model = mlp()
    optimizer, sparsifier = OPTIMIZERS["momentum"](model.parameters()), ScopeSparsifier(scope_shape=(1, 4))
    sparsifier.prepare(model)
    schedule = ScheduleSL(sparsifier, cubic(0.0, 0.75, STEPS))
    return {"model": model, "optimizer": optimizer, "sparsifier": sparsifier, "schedule": schedule}


def dynamic(method, optimizer):
    found = prepared(optimizer, kind=method, until=STEPS)
    return dict(zip(("model", "optimizer", "sparsifier"), found, strict=True))


def proximal():
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    strength = linear(0.0, 0.05, STEPS)
    sparsifier = ProximalSparsifier(strength=strength, block_shape=(1, 4), optimizer=optimizer)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    return {"model": model, "optimizer": optimizer, "sparsifier": sparsifier}


class Window(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def layers():
    """2:4 in the last layers, and the hidden units of the first block as a coupling."""
    model, sparsifier = Window(), ScopeSparsifier(0.5)
    pair = {"block_coupling": "hidden", "sparsity_level": 0.25}
    sparsifier.prepare(
        model,
        [
            {"tensor_fqn": "blocks.0.0.weight", "block_shape": (1, -1), **pair},
            {"tensor_fqn": "blocks.0.2.weight", "block_shape": (-1, 1), "coupling_order": (1, 0), **pair},
            {"tensor_fqn": "blocks.[12].*.weight", "scope_shape": (1, 4)},
        ],
    )
    return {"model": model, "sparsifier": sparsifier}


def steps(parts, done, save):
    for k in range(done, STEPS):
        train(parts["model"], parts["optimizer"], parts["sparsifier"], [k])
        if "schedule" in parts:
            parts["schedule"].step()
        save(k + 1)


def layer_by_layer(parts, done, save):
    """The call saves its finished blocks itself, in a folder beside the checkpoint."""
    if done:
        return
    batches = [torch.randn(16, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    one_shot(parts["sparsifier"], batches, recover=True, checkpoint=save.folder)
    save(1)


KINDS = {  # how to make the parts that are saved, and how to run them
    "scope": (scope, steps),
    "RigL": (lambda: dynamic(RigL, "adam"), steps),
    "GMP": (lambda: dynamic(GMP, "momentum"), steps),
    "proximal": (proximal, steps),
    "one_shot": (layers, layer_by_layer),
}


def run(kind, path):
    """Begin, or go on from a checkpoint, and save the last one."""
    make, advance = KINDS[kind]
    parts, done = make(), 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["done"]

    def save(done):
        """Replace the last checkpoint."""
        partial = path.with_suffix(".partial")
        torch.save({"done": done, **{name: part.state_dict() for name, part in parts.items()}}, partial)
        os.replace(partial, path)

    save.folder = path.with_suffix(".blocks")
    advance(parts, done, save)


def kill(folder, count):
    """Kill each kind of run so many times; returns how many were in the middle of it."""
    rng, in_the_middle = random.Random(0), 0
    for kind in KINDS:
        whole, path = folder / f"{kind}_whole.pt", folder / f"{kind}.pt"
        start = time.perf_counter()
        call(run, kind, whole)
        duration, expected = time.perf_counter() - start, torch.load(whole, weights_only=True)
        for trial in range(count):
            path.unlink(missing_ok=True)
            shutil.rmtree(blocks := path.with_suffix(".blocks"), ignore_errors=True)
            process = begin(run, kind, path)
            time.sleep(rng.random() * duration)
            os.kill(process, signal.SIGKILL)
            end(process)
            is_begun = path.exists() and not same(torch.load(path, weights_only=True), expected)
            in_the_middle += is_begun or (not path.exists() and any(blocks.glob("*.pt")))
            call(run, kind, path)
            found = torch.load(path, weights_only=True)
            need(same(found, expected), f"{kind}, kill {trial}: the resumed run differs from the uninterrupted one")
    return in_the_middle


if __name__ == "__main__":
    kills = int(sys.argv[1])
    print(f"{kill(pathlib.Path(), kills)} of {kills * len(KINDS)} runs were killed in the middle; all is whole")
