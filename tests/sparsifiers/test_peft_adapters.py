"""Adapters that are added to masked layers, as peft does: what is lost is said, with the order that works."""

import warnings
from collections import OrderedDict

import pytest
import torch
from stock import stepped
from torch import nn

from sparsekit_ao import SparsityError

TEXT = r"first.weight: adapters were added to its masked layer.*export.merge_lora\(peft_model, sparsifier\) and"


class LoRA(nn.Module):
    """A layer with an adapter, in the form that peft gives it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def masked():
    model = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), act=nn.ReLU(), last=nn.Linear(8, 8)))
    sparsifier = stepped(model, nnz=2, scope_shape=(1, 4))
    return model, sparsifier


def test_adapters_on_masked_layers_are_warned_of_once_and_not_squashed():
    model, sparsifier = masked()
    layer = model[0]
    model[0] = LoRA(layer)
    with pytest.warns(UserWarning, match="step: " + TEXT):
        sparsifier.step()
    sparsifier.step()
    assert [row.kept for row in sparsifier.report()] == [32, 32] and sparsifier.check() == 32
    for squashed in (None, model):
        with pytest.raises(SparsityError, match="squash_mask: " + TEXT):
            sparsifier.squash_mask(model=squashed)
    model[0] = layer
    sparsifier.squash_mask()


def test_a_layer_inside_of_an_adapted_module():
    model = nn.Sequential(nn.ModuleDict({"proj": nn.Linear(8, 8)}))
    sparsifier = stepped(model)
    model[0] = LoRA(model[0])  # the name 0.proj leads nowhere now
    with pytest.raises(SparsityError, match="squash_mask: 0.proj.weight: adapters were added to its masked layer"):
        sparsifier.squash_mask()


def test_other_wrappers_are_no_adapters():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, sparsifier = masked()
    model[0] = checkpoint_wrapper(model[0])
    sparsifier.step()
    sparsifier.squash_mask()
    assert (model[0].weight == 0).sum() == 32


def test_peft():
    peft = pytest.importorskip("peft")
    model, sparsifier = masked()
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["first"], init_lora_weights=False))
        with pytest.raises(SparsityError, match="squash_mask: " + TEXT):
            sparsifier.squash_mask()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other, squashed = masked()
        squashed.squash_mask()  # before adapters are added
        adapted = peft.get_peft_model(other, peft.LoraConfig(target_modules=["first"], init_lora_weights=False))
        expected = adapted(x)
        assert torch.allclose(adapted.merge_and_unload()(x), expected, atol=1e-5)
