"""Faults in the middle of an update: masks and weights are old or new as a whole, and the next call works."""

import pathlib
import random
import subprocess
import sys

import background
import pytest
import torch
from grids import EXHAUSTIVE
from torch import nn

import sparsekit_ao
from sparsekit_ao import SNFS, ProximalSparsifier, ScopeSparsifier, WeightNormSparsifier

ROOT = str(pathlib.Path(sparsekit_ao.__file__).parent)
HERE = pathlib.Path(__file__).parent.parent / "helpers"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False))


def fill(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for layer in model:
        weight = layer.parametrizations.weight.original if hasattr(layer, "parametrizations") else layer.weight
        weight.data.normal_(generator=generator)


def coupled():
    model, sparsifier = net(), ScopeSparsifier(0.5)
    pair = {"block_coupling": "u", "score": magnitude}
    stages = [{"view": ((8, 4), (8, 1)), "block_shape": (2, 1), "sparsity_level": 0.25}, {"scope_shape": (1,)}]
    sparsifier.prepare(
        model,
        [
            {"tensor_fqn": "0.weight", "block_shape": (1, -1), **pair},
            {"tensor_fqn": "1.weight", "block_shape": (-1, 1), "coupling_order": (1, 0), **pair},
            {"tensor_fqn": "2.weight", "stages": stages},
        ],
    )
    return model, sparsifier, [(0, 1), (2,)], lambda: fill(model, 5)


def stock():
    model, sparsifier = net(), WeightNormSparsifier(0.5, (2, 2), zeros_per_block=3)
    sparsifier.prepare(model, None)
    return model, sparsifier, [(0,), (1,), (2,)], lambda: fill(model, 5)


def dynamic():
    """Masks, weights and budgets of all tensors are written together."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    sparsifier = SNFS(0.5, optimizer, until=100, update_every=1)
    sparsifier.prepare(model)

    def train():
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()

    train()
    return model, sparsifier, [(0, 1, 2)], train


def proximal():
    model, sparsifier = net(), ProximalSparsifier(sparsity_level=0.5, conditioner=None)
    pair = {"block_coupling": "u"}
    sparsifier.prepare(
        model,
        [
            {"tensor_fqn": "0.weight", "block_shape": (1, -1), **pair},
            {"tensor_fqn": "1.weight", "block_shape": (-1, 1), "coupling_order": (1, 0), **pair},
            {"tensor_fqn": "2.weight", "scope_shape": (1, 4)},
        ],
    )
    return model, sparsifier, [(0, 1), (2,)], lambda: fill(model, 5)


def magnitude(weight, name):
    return weight.abs()


class Interrupted:
    """Raise KeyboardInterrupt at one of the lines of the library that are executed inside; count them otherwise."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def state(model, sparsifier):
    """(mask, weight) of every layer."""
    weights = [next(layer.parameters()).detach().clone() for layer in model]
    return [(sparsifier.mask(f"{k}.weight").clone(), w) for k, w in enumerate(weights)]


def run(make, at=None):
    """(before, after, lines) of a step on new weights, interrupted at a line."""
    model, sparsifier, sets, advance = make()
    sparsifier.step()
    advance()
    before = state(model, sparsifier)
    with Interrupted(at) as interrupted:
        raised = False
        try:
            sparsifier.step()
        except KeyboardInterrupt:
            raised = True
    assert raised == (at is not None)
    after = state(model, sparsifier)
    if at is not None:
        sparsifier.step()  # the next call works
        fresh = state(model, sparsifier)
        assert all(mask.shape == weight.shape for mask, weight in fresh)
    return before, after, interrupted.lines, sets


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [coupled, stock, dynamic, proximal])
def test_masks_and_weights_are_whole_wherever_a_step_is_interrupted(make):
    old, new, lines, sets = run(make)
    ages, count = set(), 500 if EXHAUSTIVE else 20 if make in (coupled, stock) else 6
    for at in [*random.Random(0).sample(range(1, lines), min(count, lines - 1)), lines]:
        before, after, _, _ = run(make, at)
        assert all(map(equal, before, old))
        for members in sets:
            is_new = all(equal(after[k], new[k]) for k in members)
            assert is_new or all(equal(after[k], old[k]) for k in members), f"torn at line event {at}"
            ages.add(is_new)
    assert ages == {False, True}


class Failing:
    """A score that raises once it is `armed`."""

    armed = False

    def __call__(self, weight, name):
        if self.armed:
            raise ValueError("no score")
        return weight.abs()


def test_a_raising_score_of_a_later_stage_changes_nothing():
    model, sparsifier, score = net(), ScopeSparsifier(0.5), Failing()
    stages = [{"block_shape": (2, 1)}, {"scope_shape": (1, 2), "score": score, "nnz": 1}]
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "stages": stages}, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    masks = [sparsifier.mask(f"{k}.weight") for k in (0, 2)]
    old = [m.clone() for m in masks]
    fill([model[0], model[2]], 7)
    score.armed = True
    with pytest.raises(ValueError, match="no score"):
        sparsifier.step()
    assert equal(masks, old)
    score.armed = False
    sparsifier.step()
    sparsifier.check()
    assert not equal(masks, old)


def test_signals_at_random_moments_tear_no_mask():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "faults_child.py"), "500" if EXHAUSTIVE else "12"],
        capture_output=True,
        text=True,
        timeout=3000 if EXHAUSTIVE else 300,
    )
    assert done.returncode == 0 and done.stdout.strip() == "whole", done.stderr[-2000:]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")
def test_killed_runs_go_on_bit_for_bit_and_steps_survive_limits():
    """Killed processes, little memory, a full disk, forks, one core; as `python -O -W error`."""
    done, _ = background.result("test_killed_runs_go_on_bit_for_bit_and_steps_survive_limits")
    assert done.returncode == 0 and done.stdout.endswith("all is whole\n"), done.stderr[-3000:]
