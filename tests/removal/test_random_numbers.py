"""Removal leaves the generators of the process alone, and compares models that draw random numbers."""

import random

import hf_models
import numpy as np
import pytest
import torch
from networks import Net
from stock import refuses
from torch import nn

from sparsekit_ao.removal import removable, shrink, shrink_layers


def noisy(draw):
    """Four residual blocks, each of which adds noise before its activation."""

    def block(m, x):
        return x + m.down((m.up(x) + draw(x)).relu())

    blocks = [Net(block, up=nn.Linear(8, 16), down=nn.Linear(16, 8)) for _ in range(4)]
    return Net(lambda m, x: m.head(nn.Sequential(*m.blocks)(x)), blocks=nn.ModuleList(blocks), head=nn.Linear(8, 3))


def of_all_three(x):
    return torch.randn_like(x[:, :1]) + random.gauss() + torch.from_numpy(np.random.randn(16)).to(x)


BATCHES = [torch.randn(32, 8) for _ in range(3)]
CALLS = {
    "shrink": lambda model: shrink(model, BATCHES[0]),
    "data": lambda model: shrink(model, batches=BATCHES, recover=True, exclude=["width"]),
    "layers": lambda model: shrink_layers(model, BATCHES),
    "removable": lambda model: removable(model, BATCHES[0]),
}


def states():
    _, key, *others = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), key.tolist(), others


@pytest.mark.parametrize("call", CALLS)
def test_generators_have_the_states_that_they_had(call):
    model = noisy(of_all_three).eval()
    before = states()
    CALLS[call](model)
    assert states() == before


def test_models_that_are_constructed_again_from_their_config_draw_nothing():
    model, inputs = hf_models.make("HuBERT")  # which has weight_norm and a config
    before = states()
    shrink(model, inputs)
    assert states() == before


NOISES = {
    "torch": lambda x: torch.rand(()),
    "numpy": lambda x: torch.from_numpy(np.random.randn(1)).to(x),
    "Python": lambda x: random.random(),
    "both": lambda x: random.choice([1.0, 2.0]) * float(np.random.rand()),
}


@pytest.mark.parametrize("name", NOISES)
def test_models_that_draw_from_generators_of_the_process_are_compared(name):
    small, report = shrink(noisy(NOISES[name]).eval(), BATCHES[0])
    assert [block.up.out_features for block in small.blocks] == [8] * 4
    assert report.difference <= 1e-5


@pytest.mark.parametrize("draw", [lambda x: np.random.default_rng().random(), lambda x: random.SystemRandom().random()])
def test_a_model_that_gives_two_answers_to_one_input_is_named_as_the_cause(draw):
    for call in (shrink, removable):
        with refuses("the model itself gives two answers to the same example_inputs (a relative difference of "):
            call(noisy(draw).eval(), BATCHES[0])
    seed_given = noisy(lambda x: np.random.default_rng(0).random()).eval()  # as the error advises
    assert shrink(seed_given, BATCHES[0])[1].difference <= 1e-5
