"""Dense checkpoints of masked models, and masked models that load dense checkpoints."""

import copy
import pickle

import pytest
import torch
from export_models import masked
from stock import linear_model
from torch import nn

from sparsekit_ao import SET, SparsityError, export


@pytest.mark.parametrize("make_model", [lambda: linear_model(8, 6, 4), lambda: nn.Linear(8, 4)], ids=["nested", "bare"])
def test_a_dense_state_dict_is_that_of_the_squashed_model(make_model):
    model = make_model()
    sparsifier = masked(model)
    found = export.dense_state_dict(model)
    sparsifier.squash_mask()
    expected = model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    make_model().load_state_dict(found)


def test_a_masked_model_loads_a_dense_state_dict_and_keeps_its_masks():
    model, other = linear_model(8, 6, 4), linear_model(8, 6, 4)
    sparsifier = masked(model)
    masks = {n: s["mask"].clone() for n, s in sparsifier.state.items()}
    for target in (model, copy.deepcopy(model)):
        assert str(target.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
        dense = target[0].parametrizations.weight.original
        assert torch.equal(dense, other[0].weight) and torch.equal(target[0].weight, dense * masks["0.weight"])
    assert all(torch.equal(sparsifier.mask(n), m) for n, m in masks.items())
    model.load_state_dict(model.state_dict())  # its own still loads
    missing = other.state_dict()
    del missing["0.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*0.parametrizations.weight.original"):
        model.load_state_dict(missing)
    sparsifier.squash_mask()
    assert b"sparsekit_ao" not in pickle.dumps(model)


def test_masks_of_dynamic_sparsifiers_stay_too():
    model, other = linear_model(8, 6), linear_model(8, 6)
    sparsifier = SET(0.5)
    sparsifier.prepare(model)
    before = sparsifier.mask("0.weight").clone()
    model.load_state_dict(other.state_dict())
    assert torch.equal(sparsifier.mask("0.weight"), before)


def test_another_parametrization_beside_the_mask():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    masked(model)
    with pytest.raises(SparsityError, match=r"dense_state_dict: 0.weight has another parametrization .*copy.deepcopy"):
        export.dense_state_dict(model)
