"""Layers that only training or another branch runs: they fit the smaller model, or what they read stays."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from discovered import fill
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


def grouped(m, x, mask=None):
    """Attention of eight query heads with one key head, which is repeated where there is a mask."""
    q, k, v = (layer(x).unflatten(-1, (-1, m.size)).transpose(1, 2) for layer in (m.q, m.k, m.v))
    if mask is None:
        return m.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
    k, v = (t.repeat_interleave(m.repeats(m), 1) for t in (k, v))
    weights = (q @ k.mT * m.size**-0.5 + mask[:, None, None]).softmax(-1)
    return m.o((weights @ v).transpose(1, 2).flatten(2))


REPEATS = {
    "a quotient": (lambda m: m.n_rep, {"n_rep": 8}),
    "two counts": (lambda m: m.n_head // m.n_kv, {"n_head": 8, "n_kv": 1}),
    "a tuple": (lambda m: m.heads[0] // m.heads[1], {"heads": (8, 1)}),
    "of a child": (lambda m: m.plan.n, {"plan": Net(None, n=8)}),
    "beside an unread width": (lambda m: m.n_rep, {"n_rep": 8, "hidden_size": 32}),
}


@pytest.mark.parametrize("name", REPEATS)
def test_integers_that_only_another_branch_reads_follow(name):
    repeats, numbers = REPEATS[name]
    layers = {"q": nn.Linear(32, 32), "k": nn.Linear(32, 4), "v": nn.Linear(32, 4), "o": nn.Linear(32, 32)}
    block = Net(grouped, repeats=repeats, size=4, **layers, **copy.deepcopy(numbers))
    model = Net(lambda m, x, mask=None: m.head(x + m.block(x, mask)), block=block, head=nn.Linear(32, 3))
    small = shrink(model, torch.randn(2, 7, 32), 0.5)[0]
    assert small.block.q.out_features == small.block.o.in_features == 16 and small.block.o.out_features == 32
    assert getattr(small.block, "hidden_size", 32) == 32
    assert small(torch.randn(2, 7, 32), torch.zeros(2, 7)).shape == (2, 7, 3)


def test_numbers_that_several_layers_may_count_or_that_are_strides_stay():
    layers = {f"{name}{k}": nn.Linear(*sizes) for k in (1, 2) for name, sizes in (("up", (4, 8)), ("down", (8, 3)))}
    model = Net(lambda m, x: m.down1(m.up1(x).relu()) + m.down2(m.up2(x).relu()), hidden=8, **layers)
    small, report = shrink(model, torch.randn(16, 4), {"up1": 0.5, "up2": 0.25})
    assert (small.up1.out_features, small.up2.out_features, small.hidden, report.left_out) == (4, 6, 8, ())
    layers = {"a": nn.Conv1d(3, 4, 1), "pool": nn.AvgPool1d(2, 4), "b": nn.Conv1d(4, 5, 1)}
    model = Net(lambda m, x: m.b(m.pool(m.a(x).relu())), **layers)
    small, report = shrink(model, torch.randn(6, 3, 3), 0.5)
    assert small.a.out_channels == 2 and small.pool.stride == (4,) and not report.changed


class Repeated(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return torch.cat([x] * self.times, 2)


@pytest.mark.parametrize(
    ("units", "last"),
    [
        (2, nn.MaxPool2d(2)),
        (4, nn.AvgPool2d(4)),
        (2, nn.AdaptiveAvgPool2d((2, 2))),
        (4, nn.LPPool2d(2, 4)),
        (2, nn.Flatten(2)),
        (2, nn.MaxPool2d(1, 2)),
        (2, Repeated(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_integer_that_stars_of_a_coupling_do_not_reach_is_no_candidate(units, last):
    # The coupling has a member `**.bias`, so integers of the last child get paths with `**`, which match no module.
    layers = [nn.Conv2d(3, units, 3, padding=1), nn.BatchNorm2d(units), nn.SiLU(), nn.Conv2d(units, 5, 1, bias=False)]
    body, x = nn.Sequential(*layers, last, nn.Flatten()), torch.randn(2, 3, 6, 6)
    model = fill(nn.Sequential(*body, nn.Linear(body(x).shape[1], 4, bias=False)))
    small, report = shrink(model, x, 0.5)
    assert report.couplings[0].of == units and report.couplings[0].kept < units and report.difference <= 1e-5
    assert all(vars(small[4])[name] == value for name, value in vars(last).items() if type(value) in (int, tuple))


def positions(m, x):
    h = m.a(x)
    return m.o(h + m.places[: h.shape[1]] if h.shape[1] > 8 else h)


def slopes(m, x, biased=False):
    q, k, v = m.qkv(x).unflatten(-1, (3, -1, 4)).movedim(-3, 0).transpose(2, 3)
    bias = m.slopes[:, None, None] if biased else None
    return m.o(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


BUFFERS = {
    "positions of long inputs": (
        positions,
        {"a": nn.Linear(8, 32), "o": nn.Linear(32, 3)},
        {"places": torch.randn(50, 32)},
        lambda m: m(torch.randn(2, 20, 8)),
    ),
    "slopes of heads": (
        slopes,
        {"qkv": nn.Linear(8, 96), "o": nn.Linear(32, 3)},
        {"slopes": torch.rand(8)},
        lambda m: m(torch.randn(2, 5, 8), biased=True),
    ),
    "a mean in training": (
        lambda m, x: m.o(m.a(x) - (m.mean.lerp_(m.a(x).mean((0, 1)), 0.1) if m.training else 0)),
        {"a": nn.Linear(8, 32), "o": nn.Linear(32, 3)},
        {"mean": torch.zeros(32)},
        lambda m: m.train()(torch.randn(2, 5, 8)),
    ),
    "a queue in training": (
        lambda m, x: m.o(m.a(x) + ((m.a(x) @ m.queue).sum() if m.training else 0)),
        {"a": nn.Linear(8, 32), "o": nn.Linear(32, 3)},
        {"queue": torch.randn(32, 20)},
        lambda m: m.train()(torch.randn(2, 5, 8)),
    ),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_what_a_buffer_of_another_branch_is_combined_with_stays_and_the_report_says_so(name):
    run, layers, buffers, other = BUFFERS[name]
    model = Net(run, **copy.deepcopy(layers))
    for buffer, values in buffers.items():
        model.register_buffer(buffer, values.clone(), persistent=False)
    small, report = shrink(model, torch.randn(2, 5, 8), 0.5)
    assert any("which did not run, may read it; " in line for line in report.frozen)
    assert other(small) is not None


IN_TRAINING = {  # {name: (what training does with the hidden values, how many stay)}
    "a width": (lambda m, h: h * torch.bernoulli(torch.full((m.width,), 0.9)), 16),
    "groups of a width": (lambda m, h: h.view(len(h), 4, m.width // 4).roll(1, 1).flatten(1), 16),
    "a shape in the code": (lambda m, h: h.view(len(h), 4, 8).roll(1, 1).flatten(1), 32),
    "noise of a shape in the code": (lambda m, h: h + torch.randn(32), 32),
    "channels in the code": (lambda m, h: h * torch.ones(1, 32), 32),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_the_smaller_model_runs_in_training_mode_too(name):
    change, kept = IN_TRAINING[name]
    layers = {"a": nn.Linear(8, 32), "b": nn.Linear(32, 24), "c": nn.Linear(24, 3)}
    model = Net(lambda m, x: m.c(m.b(change(m, m.a(x)) if m.training else m.a(x)).relu()), width=32, **layers)
    small, report = shrink(model, torch.randn(6, 8), 0.5)
    assert (small.a.out_features, small.b.out_features) == (kept, 12)
    assert small.train()(torch.randn(6, 8)).shape == (6, 3)
    assert ("does not run in training mode" in str(report)) is (kept == 32)
