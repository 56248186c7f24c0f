"""What users of torch.ao's sparsifiers rely on: classes derived from them, their arguments, state and schedulers."""

import pytest
import torch
from stock import StockWeightNorm, linear_model, prepared, reloaded
from torch import nn
from torch.nn.utils import parametrize

from sparsekit_ao import NearlyDiagonalSparsifier, WeightNormSparsifier
from sparsekit_ao.sparsifiers import MaskSparsifier
from sparsekit_ao.torch_ao import BaseSparsifier, FakeSparsity

BASES = {"torch.ao": BaseSparsifier, "ours": MaskSparsifier}
NORM_BASES = {"torch.ao": StockWeightNorm, "ours": WeightNormSparsifier}
ENTRY = [{"tensor_fqn": "0.weight"}]


def rows_dropped(base):
    """A sparsifier as torch.ao's documentation writes one: drops `rows` rows, and counts its steps in the state."""

    class RowSparsifier(base):
        def __init__(self, rows=1, **kwargs):
            super().__init__(defaults={"rows": rows, **kwargs})

        def update_mask(self, module, tensor_name, rows, tensor_fqn, **kwargs):
            module.parametrizations[tensor_name][0].mask[:rows] = 0
            state = self.state[tensor_fqn]
            state["steps"] = state.get("steps", 0) + 1

    return RowSparsifier


def data_replaced(base):
    """One that computes a mask from the weight and replaces the mask's data."""

    class ThresholdSparsifier(base):
        def __init__(self, threshold):
            super().__init__(defaults={"threshold": threshold})

        def update_mask(self, module, tensor_name, threshold, **kwargs):
            mask = getattr(module.parametrizations, tensor_name)[0].mask
            weight = getattr(module, tensor_name)
            mask.data = (weight.abs() * mask > threshold).to(weight.dtype)
            assert 0 < mask.mean() < 1

    return ThresholdSparsifier


def kept_first(base):
    """A WeightNormSparsifier that never drops the first row."""

    class KeepFirst(base):
        def update_mask(self, module, tensor_name, sparsity_level, sparse_block_shape, zeros_per_block, **kwargs):
            arguments = (module, tensor_name, sparsity_level, sparse_block_shape, zeros_per_block)
            super().update_mask(*arguments, **kwargs)
            module.parametrizations[tensor_name][0].mask[0] = 1

    return KeepFirst


@pytest.mark.parametrize(
    ("derived", "bases", "arguments"),
    [
        (rows_dropped, BASES, {"rows": 2}),
        (data_replaced, BASES, {"threshold": 0.1}),
        (kept_first, NORM_BASES, {"sparsity_level": 0.5}),
    ],
)
def test_a_derived_class_gives_the_same_masks_on_our_base_class(derived, bases, arguments):
    found = {}
    for name, base in bases.items():
        model = linear_model(8, 8, 4)
        sparsifier = derived(base)(**arguments)
        sparsifier.prepare(model, [*ENTRY, {"tensor_fqn": "2.weight"}])
        for _ in range(2):
            sparsifier.step()
        masks = [model[k].parametrizations.weight[0].mask.clone() for k in (0, 2)]
        sparsifier.squash_mask()
        found[name] = [*masks, model[0].weight.detach(), model(torch.ones(1, 8)).detach()]
    for want, ours in zip(found["torch.ao"], found["ours"], strict=True):
        assert torch.equal(want, ours)


def test_what_a_derived_class_stores_in_the_state_is_saved_and_loaded():
    sparsifier, other = (rows_dropped(MaskSparsifier)(rows=2) for _ in range(2))
    for one in (sparsifier, other):
        one.prepare(linear_model(8, 4), ENTRY)
    for _ in range(3):
        sparsifier.step()
    saved = reloaded(sparsifier.state_dict())
    assert saved["state"]["0.weight"]["steps"] == 3
    assert saved["groups"][0] == {"tensor_fqn": "0.weight", "rows": 2}
    other.load_state_dict(saved)
    assert other.state["0.weight"]["steps"] == 3
    assert torch.equal(other.mask("0.weight"), sparsifier.mask("0.weight"))


@pytest.mark.parametrize("kind", [WeightNormSparsifier, NearlyDiagonalSparsifier])
def test_masks_are_fake_sparsity_in_the_weights_dtype(kind):
    model = linear_model(8, 8)
    sparsifier = prepared(model, ENTRY, kind=kind)
    assert isinstance(sparsifier, BaseSparsifier)
    assert parametrize.is_parametrized(model[0], "weight")
    found = model[0].parametrizations.weight[0]
    assert isinstance(found, FakeSparsity) and found.mask.dtype == torch.float32
    assert torch.equal(found.mask, torch.ones(8, 8))
    assert {"module", "module_fqn", "tensor_name", "tensor_fqn"} <= set(sparsifier.groups[0])
    assert (sparsifier.groups[0]["module"], sparsifier.groups[0]["module_fqn"]) == (model[0], "0")
    found.mask.copy_(torch.randint(0, 2, (8, 8)))
    assert torch.equal(model[0].weight, model[0].parametrizations.weight.original * found.mask)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_a_masked_model_can_be_traced():
    model, sparsifier = linear_model(8, 8, 4), WeightNormSparsifier(0.5)
    sparsifier.prepare(model, None)
    sparsifier.step()
    x = torch.randn(3, 8)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_a_norm_function_that_is_set_later_is_used():
    sparsifier = WeightNormSparsifier(0.5, (1, 1))
    sparsifier.norm_fn = lambda weight: weight
    sparsifier.prepare(nn.Sequential(nn.Linear(2, 1, bias=False)), ENTRY)
    with torch.no_grad():
        sparsifier.model[0].parametrizations.weight.original.copy_(torch.tensor([[-3.0, 1.0]]))
    sparsifier.step()
    assert sparsifier.mask("0.weight").tolist() == [[0, 1]]


def test_what_stays_after_squash_what_convert_replaces_and_what_a_state_dict_restores():
    model, again = (nn.Sequential(linear_model(8, 4), nn.Linear(4, 2)) for _ in range(2))
    sparsifier, other = (rows_dropped(MaskSparsifier)(rows=2) for _ in range(2))
    sparsifier.prepare(model, [{"tensor_fqn": "0.0.weight"}, {"tensor_fqn": "1.weight", "rows": 1}])
    other.prepare(again, None)
    sparsifier.step()
    sparsifier.enable_mask_update = False
    sparsifier.groups[0]["rows"] = 4
    sparsifier.step()
    other.load_state_dict(sparsifier.state_dict())
    assert [g["rows"] for g in other.groups] == [4, 1]
    masks = [again[0][0].parametrizations.weight[0].mask, again[1].parametrizations.weight[0].mask]
    assert [int(mask.sum()) for mask in masks] == [16, 4]

    class Count(nn.Module):
        @classmethod
        def from_dense(cls, module):
            found = cls()
            found.zeros = int((module.weight == 0).sum())
            return found

    with pytest.raises(NotImplementedError):
        sparsifier.convert(model)
    converted = sparsifier.convert(model, {nn.Linear: Count})
    assert (converted[0][0].zeros, converted[1].zeros) == (16, 4) and type(model[1]) is not Count
    assert sparsifier.convert(again, {nn.Linear: Count}, inplace=True) is again and type(again[1]) is Count
    sparsifier.squash_mask(params_to_keep=("rows",), params_to_keep_per_layer={"1": ("tensor_fqn",)})
    assert model[0][0].sparse_params == {"rows": 4}
    assert model[1].sparse_params == {"rows": 1, "tensor_fqn": "1.weight"} and type(model[1]) is nn.Linear
