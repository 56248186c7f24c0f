"""The work of a call grows with the number of layers and no faster, as models of many experts need it."""

import sys

import pytest
import torch
from torch import nn

from sparsekit_ao import RigL, ScopeSparsifier, prune


def prepared(model, sparsifier=None):
    sparsifier = ScopeSparsifier(pattern="2:4") if sparsifier is None else sparsifier
    sparsifier.prepare(model)
    return sparsifier


def rigl(model):
    return RigL(0.75, torch.optim.SGD(model.parameters(), lr=0.1), until=100)


def calibrated(model):
    sparsifier = prepared(model, ScopeSparsifier(pattern="2:4", score="wanda"))
    sparsifier.calibrate([torch.ones(2, 8)], progress=False)
    return sparsifier


def stepped(model):
    sparsifier = prepared(model)
    sparsifier.step()
    return sparsifier


CALLS = {  # what is made first, and the call
    "prepare": (lambda model: model, prepared),
    "prepare of RigL": (lambda model: (model, rigl(model)), lambda pair: prepared(*pair)),
    "step": (prepared, ScopeSparsifier.step),
    "calibrate": (lambda model: model, calibrated),
    "step with statistics": (calibrated, ScopeSparsifier.step),
    "report": (stepped, ScopeSparsifier.report),
    "check": (stepped, ScopeSparsifier.check),
    "squash_mask": (stepped, ScopeSparsifier.squash_mask),
    "prune": (lambda model: model, lambda model: prune(model, "2:4", progress=False)),
    "prune with data": (
        lambda model: model,
        lambda model: prune(model, "2:4", batches=[torch.ones(2, 8)], compensate=None, progress=False),
    ),
}


def functions_called(layers, first, call):
    torch.manual_seed(0)
    made, count = first(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))), 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call(made)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", CALLS)
def test_twice_as_many_layers_take_twice_as_many_calls_of_functions(name):
    _, few, many = (functions_called(layers, *CALLS[name]) for layers in (1, 25, 50))  # the first call imports
    assert 1.5 < many / few < 2.2
