"""The sensitivity of a layer is the error of its outputs in the dense model if it alone is pruned."""

import copy
import re

import pytest
import torch
from pruned_models import Model, correlated
from test_dry import IMAGES, convolutions, unchanged
from torch import nn

from sparsekit_ao import SparsityError, prune, sensitivity


def error_alone(model, name, batches, pattern, **options):
    """The relative error of one layer's outputs without bias, on the inputs that it has in the dense model."""
    layer, inputs = model.get_submodule(name.rpartition(".")[0]), []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    pruned = prune(layer, pattern, batches=inputs, **options)[0]
    with torch.no_grad():
        zero = 0 if layer.bias is None else layer(torch.zeros_like(inputs[0][:1]))
        dense, changed = (torch.cat([m(x) - zero for x in inputs]) for m in (layer, pruned))
    return float((dense - changed).norm() / dense.norm())


@pytest.mark.parametrize("options", [{}, {"compensate": None, "score": "wanda"}], ids=["admm", "wanda"])
def test_it_is_the_error_of_each_layer_that_alone_is_pruned(options):
    model, batches = Model().eval(), correlated()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = sensitivity(model, batches, "2:4", **options)
    assert unchanged(model, before, state) and str(report).startswith("sensitivity: each layer was pruned alone")
    pruned = prune(model, "2:4", batches=batches, **options)[1]
    assert [row.tensor for row in report] == [row.tensor for row in pruned] and len(report) > 4
    for row in report:
        assert row.after == pytest.approx(error_alone(model, row.tensor, batches, "2:4", **options), rel=1e-3)
        assert row.after < row.before if not options else row.after == row.before
    # The first layer has the same inputs in both; a later one has those of pruned layers in `prune`.
    assert options or (report.rows[0].after == pruned.rows[0].after and report.rows[-1].after != pruned.rows[-1].after)


def test_the_layers_with_the_largest_errors_can_be_excluded(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    with torch.no_grad():
        for at, layer in enumerate(model):
            layer.weight.mul_(torch.tensor([1.0, 1.0, 0.001 if at != 2 else 1.0, 0.001 if at != 2 else 1.0]).repeat(4))
    report = sensitivity(model, [torch.randn(64, 16)], "2:4", exclude=["1"])
    assert report.worst(1) == ["2.weight"] and report.worst(9)[0] == "2.weight" and len(report.worst(9)) == 3
    assert "1.weight" in report.left_out
    pruned = prune(model, "2:4", batches=[torch.randn(64, 16)], exclude=report.worst(1))[0]
    assert (pruned[2].weight != 0).all() and not (pruned[3].weight != 0).all()
    report.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 1000


@pytest.mark.parametrize("count", [0.5, -1, 2.0, True, None, "2", [1]])
def test_a_count_of_worst_layers_is_a_whole_number(count):
    report = sensitivity(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), [torch.randn(16, 8)], "2:4")
    with pytest.raises(SparsityError, match=rf"worst: count must be a whole number .* got {re.escape(repr(count))}"):
        report.worst(count)
    assert report.worst(0) == []  # where a sweep begins


def test_a_model_without_blocks_runs_once_on_each_batch_for_all_layers():
    model, calls = convolutions(), []
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def forward(m, batch):
        calls.append(batch)
        return m(batch)

    report = sensitivity(model, IMAGES, 0.5, forward=forward)
    assert [row.tensor for row in report] == ["0.weight", "2.weight", "4.weight"] and unchanged(model, before, state)
    assert sum(batch is not None and torch.equal(batch, IMAGES[2]) for batch in calls) == 1


def test_bad_arguments_name_the_call():
    with pytest.raises(SparsityError, match="sensitivity: compensate must be one of"):
        sensitivity(Model(), correlated(), "2:4", compensate="best")
    with pytest.raises(SparsityError, match="sensitivity: score='taylor' needs gradients of a loss"):
        sensitivity(Model(), correlated(), "2:4", score="taylor")
