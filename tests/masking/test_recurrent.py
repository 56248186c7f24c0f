"""Recurrent layers: hidden units are found and removed exactly, with the sizes that the layers hold."""

import pytest
import torch
from compact_models import rebuilt
from discovered import assert_exact, fill
from networks import Net
from torch import nn

from sparsekit_ao import Coupling, SparsityError
from sparsekit_ao.coupling import discover
from sparsekit_ao.removal import shrink


def layer(m, x):
    return m.out(m.cells(m.into(x))[0])


def learned_start(m, x):
    return m.out(m.cells(m.into(x), m.start.expand(-1, len(x), -1))[0])


def network(run, cells, width=8, **more):
    return Net(run, into=nn.Linear(3, 6), cells=cells, out=nn.Linear(width, 2), **more)


CASES = {  # (network, sizes of the cells after half of all units are removed)
    "LSTM of two layers": (network(layer, nn.LSTM(6, 8, 2, batch_first=True)), (3, 4)),
    "LSTM without biases, in two directions": (
        network(layer, nn.LSTM(6, 8, 2, bias=False, bidirectional=True, batch_first=True), 16),
        (3, 4),
    ),
    "LSTM with projections": (network(layer, nn.LSTM(6, 12, 2, proj_size=4, batch_first=True), 4), (3, 6, 2)),
    "GRU": (network(layer, nn.GRU(6, 8)), (3, 4)),
    "plain layer": (network(layer, nn.RNN(6, 8, nonlinearity="relu")), (3, 4)),
    "learned initial state": (
        network(learned_start, nn.GRU(6, 8, batch_first=True), start=nn.Parameter(torch.ones(1, 1, 8))),
        (3, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", CASES)
def test_hidden_units_of_recurrent_layers_are_removed_exactly(name):
    model, sizes = CASES[name]
    model, inputs = fill(model), torch.randn(2, 4, 3)
    couplings = discover(model, inputs).couplings
    assert len(couplings) == len(sizes)
    for coupling in couplings:
        assert_exact(model, coupling, inputs)
    small, report = shrink(model, inputs)
    assert tuple(getattr(small.cells, key) for key in ("input_size", "hidden_size", "proj_size")[: len(sizes)]) == sizes
    assert torch.equal(rebuilt(fill(CASES[name][0]), small, report)(inputs), small(inputs))


def test_a_state_that_is_given_keeps_all_units_and_so_does_one_that_is_returned():
    cells = nn.GRU(6, 8)
    model = Net(lambda m, x, h: m.out(m.cells(x, h)[0]), cells=cells, out=nn.Linear(8, 2))
    assert "8 in cells.weight_ih_l0[0] and 5 more: input[1]" in str(
        discover(model, (torch.ones(4, 2, 6), torch.ones(1, 2, 8)))
    )
    assert "8 in weight_ih_l0[0] and 4 more: output[0]" in str(discover(cells, torch.ones(4, 2, 6)))


def test_the_members_are_written_with_the_unit_in_both_dimensions():
    found = discover(network(layer, nn.LSTM(6, 8)), torch.ones(4, 2, 3)).couplings[1]
    assert found.members == {
        "cells.weight_ih_l0": "(d u) i",
        "cells.weight_hh_l0": "(d u) u",
        "cells.bias_ih_l0": "(d u)",
        "cells.bias_hh_l0": "(d u)",
        "out.weight": "o u",
    }
    bound = found.bind(network(layer, nn.LSTM(6, 8)))[0]
    assert [(m.pattern.axes, m.is_parameter) for m in bound.members[1:3]] == [("(d u) u1", True), ("(d u0) u", False)]
    assert len(found.entries(network(layer, nn.LSTM(6, 8)))) == 5
    with pytest.raises(SparsityError, match="weight '.s u. u' has the unit axis twice, so the coupling can have no"):
        Coupling({"weight": "(s u) u"}, scope="s", sizes={"s": 2})
