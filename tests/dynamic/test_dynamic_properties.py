"""One update against an oracle in plain Python, on random masks, weights and gradients full of ties."""

import math

import pytest
import torch
from growing import Recorder, dense_gradients, loss_of, prepared
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import nn

from sparsekit_ao import DynamicSparsifier
from sparsekit_ao.dynamic import inits

VALUES = [0.0, 1.0, -1.0, 2.0, -3.0]


def top(scores, candidates, count):
    """The `count` highest candidates, the lower index first among equals."""
    return set(sorted(candidates, key=lambda k: (-scores[k], k))[:count])


def oracle(active, weight, gradient, fraction, budgets):
    """Rows of sets of active slots after one update of one tensor whose scopes are its rows."""
    size = [[abs(x) for x in row] for row in weight]
    kept = [top(size[r], row, len(row) - math.floor(fraction * len(row) + 1e-9)) for r, row in enumerate(active)]
    missing = sum(map(len, kept)) - (sum(map(len, active)) - math.floor(fraction * sum(map(len, active)) + 1e-9))
    if missing > 0 and len(active) > 1:
        weakest = [(r, next(iter(row - top(size[r], row, len(row) - 1)))) for r, row in enumerate(kept) if row]
        stay = sorted(weakest, key=lambda p: (-size[p[0]][p[1]], p))[: max(len(weakest) - missing, 0)]
        for r, k in set(weakest) - set(stay):
            kept[r] = kept[r] - {k}
    out = []
    for r, row in enumerate(kept):
        others = set(range(len(weight[r]))) - row
        out.append(row | top([abs(x) for x in gradient[r]], others, budgets[r] - len(row)))
    return out


@st.composite
def updates(draw):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    budget = draw(st.integers(1, width))
    active = [set(draw(st.permutations(range(width)))[:budget]) for _ in range(rows)]
    numbers = st.lists(st.lists(st.sampled_from(VALUES), min_size=width, max_size=width), min_size=rows, max_size=rows)
    return active, draw(numbers), draw(numbers), draw(st.sampled_from([0.0, 0.2, 0.3, 0.5, 0.75, 0.99])), budget


@examples(150)
@given(updates())
def test_an_update_equals_the_oracle(drawn):
    active, weight, gradient, fraction, budget = drawn
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
    model = nn.Sequential(layer)
    start = torch.tensor([[k in row for k in range(len(weight[0]))] for row in active])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    init = inits.lottery_ticket({"0.weight": start})
    sparsifier = DynamicSparsifier(
        optimizer=optimizer, init=init, update_every=1, update_fraction=fraction, scope_shape=(1, -1)
    )
    sparsifier.prepare(model, None)
    weight = layer.weight.tolist()  # dropped ones are zero now
    layer.parametrizations.weight.original.grad = torch.tensor(gradient)
    optimizer.step()
    sparsifier.step()
    want = oracle(active, weight, gradient, fraction, [budget] * len(active))
    found = [{k for k, kept in enumerate(row) if kept} for row in sparsifier.mask("0.weight").tolist()]
    assert found == want
    assert sparsifier.check() == len(active)
    for r, row in enumerate(want):  # what stayed or came back at once keeps its value, all else is zero
        for k, value in enumerate(layer.parametrizations.weight.original[r].tolist()):
            assert value == (weight[r][k] if k in row & active[r] else 0.0)


@pytest.mark.parametrize("structure", [{}, {"block_shape": (1, 1, -1, -1)}, {"scope_shape": (1, 4, 1, 1), "nnz": 2}])
def test_masks_are_the_same_in_any_memory_format(structure):
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        level = {} if "nnz" in structure else {"sparsity_level": 0.5}
        sparsifier = DynamicSparsifier(optimizer=optimizer, update_every=1, **level, **structure)
        sparsifier.prepare(model, None)
        source = torch.Generator().manual_seed(1)
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=source).to(memory_format=layout) if p.ndim == 4 else None
            optimizer.step()
            sparsifier.step()
            sparsifier.check()
        found.append([sparsifier.mask(g["tensor_fqn"]).clone() for g in sparsifier.groups])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_sees_the_gradient_of_an_autocast_dense_model():
    recorder = Recorder()
    model, optimizer, sparsifier = prepared(grow=recorder, update_every=1)
    with torch.autocast("cpu", torch.bfloat16):
        want = dense_gradients(model, 1)
        loss = loss_of(model, 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sparsifier.step()
    recorder.compare(1, want, every=1)
