"""The example of groups of rows that keep the same inputs: a converted layer computes what the pruned one does."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsekit_ao import ScopeSparsifier

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gathered_linear.py"))
row_groups, to_gathered = EXAMPLE["row_groups"], EXAMPLE["to_gathered"]


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_gradients_and_weights_are_those_of_the_pruned_layer(bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=bias), nn.GELU(), nn.Linear(48, 5))
    sparsifier = ScopeSparsifier(**row_groups(8, 0.75))
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    converted = copy.deepcopy(model)
    to_gathered(converted, ["0"], 8)
    assert converted[0].weight.shape == (6, 8, 16) and torch.equal(converted[0].dense_weight(), model[0].weight)
    inputs = [torch.randn(2, 3, 64).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    outputs = [m(x) for m, x in zip((model, converted), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    with pytest.raises(ValueError, match="0: groups of 16 rows must read equally many inputs"):
        to_gathered(model, ["0"], 16)
