"""Shared by tests of dynamic sparse training: a small model, dense gradients, data, and a rule that records."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import DynamicSparsifier

SIZES = (12, 16, 16, 8)


def mlp(seed=0, sizes=SIZES):
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def batch(step, rows=8, sizes=SIZES):
    source = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, sizes[0], generator=source), torch.randint(sizes[-1], (rows,), generator=source)


def loss_of(model, step):
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


class Recorder:
    """The growth rule of RigL that keeps what it was shown: {step: {name: gradient}}."""

    needs = ("gradient",)

    def __init__(self):
        self.seen = {}

    def __call__(self, slots):
        (gradient,) = slots.gradients.values()
        self.seen.setdefault(slots.iteration, {})[slots.name] = gradient.clone()
        return slots.scores(slots.gradients)

    def compare(self, step, want, every=2):
        """It saw these gradients, of all three tensors, where an update was due in this step."""
        found = self.seen.get(step, {})
        assert len(found) == (3 if step % every == 0 else 0)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-6)


def dense_gradients(model, step):
    """Gradients of a plain dense model with the same masked weights."""
    dense = mlp()
    with torch.no_grad():
        for own, masked in zip(dense, model, strict=True):
            if isinstance(own, nn.Linear):
                own.weight.copy_(masked.weight)
                own.bias.copy_(masked.bias)
    loss_of(dense, step).backward()
    return {f"{k}.weight": m.weight.grad for k, m in enumerate(dense) if isinstance(m, nn.Linear)}


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "fused adam": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


def prepared(optimizer="momentum", model=None, config=None, **arguments):
    """(model, optimizer, sparsifier), ready to train."""
    model = mlp() if model is None else model
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    arguments = {"sparsity_level": 0.75, "update_every": 2, **arguments}
    sparsifier = arguments.pop("kind", DynamicSparsifier)(optimizer=optimizer, **arguments)
    sparsifier.prepare(model, config)
    return model, optimizer, sparsifier


def backward(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()


def step_by_closure(model, optimizer, step, **how):
    """The optimizer's step, which calls for gradients itself."""

    def closure():
        model.zero_grad(**how)
        loss = loss_of(model, step)
        loss.backward()
        return loss

    optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)


def train(model, optimizer, sparsifier, steps):
    for step in steps:
        backward(model, optimizer, step)
        optimizer.step()
        sparsifier.step()


def masks(sparsifier):
    """Copies of all masks as bools, by tensor."""
    return {g["tensor_fqn"]: sparsifier.mask(g["tensor_fqn"]) != 0 for g in sparsifier.groups}


def equal(one, other):
    """Whether two dicts hold the same bits under the same names."""
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}
