"""Layers that only training or another branch runs: they fit the smaller model, or what they read stays."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from networks import Net
from stock import EVERYTHING
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import shrink
from sparsekit_ao.coupling import discover


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Auxiliary(nn.Module):
    """The auxiliary classifier of GoogLeNet."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 8, 1), nn.BatchNorm2d(8)
        self.first, self.drop, self.last = nn.Linear(32, 12), nn.Dropout(0.7), nn.Linear(12, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(F.adaptive_avg_pool2d(x, 2)))).flatten(1)
        return self.last(self.drop(F.relu(self.first(x))))


def pair(m, x):
    h = m.a(x).relu()
    return (m.b(h), m.aux(h)) if m.training else m.b(h)


def googlenet(m, x):
    x = torch.cat([branch(x) for branch in m.branches], 1)
    y = m.head(F.adaptive_avg_pool2d(m.body(x), 1).flatten(1))
    return {"y": y, "aux": m.aux(x)} if m.training else {"y": y}


def deep(m, x):
    outputs = []
    for block, head in zip(m.blocks, m.aux, strict=True):
        x = block(x)
        outputs += [head(x)] if m.training else []
    return (m.fc(x), *outputs)


def next_tokens(m, x):
    h = m.body(m.embedding(x))
    if not m.training:
        return m.head(h)
    return m.head(h), m.head(m.aux(torch.cat([h[:, :-1], m.embedding(x)[:, 1:]], -1)))


def projected(m, x):
    h = m.encoder(x)
    return (m.head(h), F.normalize(m.aux(h), dim=-1)) if m.training else m.head(h)


def mlp(*widths):
    return nn.Sequential(*(layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())))


IMAGES = torch.randn(4, 3, 8, 8)
TRAINED = {  # {name: (model, inputs, a module of which units leave, a module that only training runs)}
    "two heads": (
        Net(pair, a=nn.Linear(8, 32), b=nn.Linear(32, 3), aux=nn.Linear(32, 3)),
        torch.randn(6, 8),
        "a",
        "aux",
    ),
    "GoogLeNet": (
        Net(
            googlenet,
            branches=nn.ModuleList([conv(3, 4), conv(3, 8)]),
            body=conv(12, 16),
            head=nn.Linear(16, 5),
            aux=Auxiliary(12, 5),
        ),
        IMAGES,
        "branches.1.0",
        "aux.conv",
    ),
    "deep supervision": (
        Net(
            deep,
            blocks=nn.ModuleList([conv(3, 8), conv(8, 12)]),
            fc=nn.Conv2d(12, 4, 1),
            aux=nn.ModuleList([nn.Conv2d(8, 2, 1), nn.Conv2d(12, 2, 1)]),
        ),
        IMAGES,
        "blocks.0.0",
        "aux.0",
    ),
    "a later token": (
        Net(
            next_tokens,
            embedding=nn.Embedding(20, 16),
            body=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
            head=nn.Linear(16, 20),
            aux=mlp(32, 24, 16),
        ),
        torch.randint(20, (2, 7)),
        "body.2",
        "aux.0",
    ),
    "a projection": (
        Net(
            projected,
            encoder=nn.Sequential(conv(3, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            head=nn.Linear(16, 5),
            aux=mlp(16, 12, 6),
        ),
        IMAGES,
        "encoder.0.0",
        "aux.0",
    ),
}


def outputs(model, inputs):
    torch.manual_seed(0)
    return [t.detach() for t in torch.utils._pytree.tree_leaves(model(inputs))]


@pytest.mark.parametrize("name", TRAINED)
def test_layers_that_only_training_runs_lose_the_inputs_that_are_removed(name):
    model, inputs, smaller, aux = TRAINED[name]
    model, before = copy.deepcopy(model).train(), copy.deepcopy(model.state_dict())
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    small, report = shrink(model, inputs, 0.5)
    assert torch.equal(states[0], torch.random.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    width = len(model.get_submodule(smaller).weight)
    assert len(small.get_submodule(smaller).weight) == width // 2
    inside, outside = (m.get_submodule(aux).weight.shape[1] for m in (small, model))
    assert inside < outside and not any("never called" in line for line in report.left_out)
    assert [t.shape for t in outputs(small.train(), inputs)] == [t.shape for t in outputs(model, inputs)]


@pytest.mark.parametrize("score", [None, "wanda", "obs", "obs_block"])
def test_batches_that_do_not_reach_a_layer_of_training_score_and_compensate_the_others(score):
    model, inputs, *_ = TRAINED["two heads"]
    small = shrink(model, batches=[inputs, inputs], score=score)[0]
    assert small.aux.weight.shape == small.b.weight.shape == (3, 16) and small.train()(inputs)


def test_what_a_layer_of_training_reads_stays_where_it_is_excluded():
    model, inputs, *_ = TRAINED["two heads"]
    small, report = shrink(model, inputs, 0.5, exclude=["aux"])
    assert small.a.weight.shape == (32, 8) and report.left_out == ("a.weight: left out by exclude[0] ('aux')",)


def exits(m, x):
    h = m.a(x).relu()
    y = m.first(h)
    return y if y.softmax(-1).max().item() > m.limit else m.last(m.b(h).relu())


def experts(m, x):
    h = m.a(x).relu()
    y = torch.zeros_like(h)
    for k, expert in enumerate(m.experts):
        rows = (m.router(h).argmax(-1) == k).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        y = y.index_add(0, rows, expert(h[rows]))
    return m.o(y)


def long(m, x):
    h = m.a(x).relu()
    return m.o(h + m.mix(h) if x.shape[1] > 64 else h)


def flattened(m, x, hard=False):
    h = m.a(x).relu()
    return m.o(h.mean((2, 3))) + (m.more(h.flatten(1)) if hard else 0)


def labelled(m, x, labels=None):
    h = m.a(x).relu()
    return (m.o(h), m.aux(h) + labels) if m.training else m.o(h)


def rarely_chosen(*widths):
    model = Net(
        experts,
        a=nn.Linear(8, 32),
        router=nn.Linear(32, 3),
        experts=nn.ModuleList([mlp(32, width, 32) for width in widths]),
        o=nn.Linear(32, 3),
    )
    with torch.no_grad():
        model.router.bias[2] = -1e4
    return model


def choose(model, inputs):
    with torch.no_grad():
        model.router.bias[2] = 1e4
    return model(inputs)


def run_on(model, inputs):
    model.limit = 2.0
    return model(inputs)


READ = {  # {name: (model, inputs, the layer that does not run, a function that runs it)}
    "an early exit": (
        Net(exits, a=nn.Linear(8, 32), first=nn.Linear(32, 3), b=nn.Linear(32, 24), last=nn.Linear(24, 3), limit=-1.0),
        torch.randn(6, 8),
        "b",
        run_on,
    ),
    "experts": (rarely_chosen(16, 16, 24), torch.randn(16, 8), "experts.2.0", choose),
    "long inputs": (
        Net(long, a=nn.Linear(8, 32), mix=nn.Linear(32, 32), o=nn.Linear(32, 3)),
        torch.randn(2, 5, 8),
        "mix",
        lambda m, x: m(torch.randn(2, 70, 8)),
    ),
    "a flag": (
        Net(flattened, a=nn.Conv2d(3, 8, 1), o=nn.Linear(8, 3), more=nn.Linear(512, 3)),
        IMAGES,
        "more",
        lambda m, x: m(x, hard=True),
    ),
    "labels in training": (
        Net(labelled, a=nn.Linear(8, 32), o=nn.Linear(32, 3), aux=nn.Linear(32, 3)),
        torch.randn(6, 8),
        "aux",
        lambda m, x: m.train()(x, labels=1),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_layer_that_did_not_run_could_read_stays_and_the_report_says_so(name):
    model, inputs, unused, run = READ[name]
    small, report = shrink(model.eval(), inputs, 0.5)
    kept = " ".join(line for line in report.frozen if "which did not run, may read it; " in line)
    assert unused.split(".")[0] in kept
    assert run(small, inputs) is not None and len(small.a.weight) == len(model.a.weight)


def test_experts_that_did_not_run_lose_what_experts_like_them_lose():
    inputs = torch.randn(16, 8)
    small = shrink(rarely_chosen(16, 16, 16).eval(), inputs, EVERYTHING)[0]
    assert small.a.out_features == small.experts[2][0].in_features == 16 and choose(small, inputs) is not None


def test_a_layer_that_is_taken_from_the_model_keeps_nothing():
    model, inputs, unused, _ = READ["long inputs"]
    model = copy.deepcopy(model)
    delattr(model, unused)
    assert shrink(model, inputs, 0.5)[0].a.out_features == 16


def test_statistics_of_a_batch_in_training_freeze_what_they_are_taken_over():
    def run(m, x):
        y = m.a(x)[None]
        return m.o((m.norm(y) if m.training else y)[0])

    model = Net(run, a=nn.Linear(4, 8), o=nn.Linear(8, 2), norm=nn.BatchNorm1d(3))
    found = discover(model, torch.zeros(3, 4))
    assert "native_batch_norm in norm: its mean and variance are those of the batch" in str(found)
