"""`squash_mask` removes all masks or none, and can be called again after it failed."""

import copy

import pytest
import torch
from stock import linear_model
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError, masking
from sparsekit_ao.masking import find_mask, squash


def prepared(model, config=None):
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
    sparsifier.prepare(model, config)
    sparsifier.step()
    return sparsifier


def failing(function, at, error):
    """The function, whose call of this number raises an error first."""
    calls = []

    def call(*args):
        calls.append(args)
        if len(calls) == at:
            raise error("no more")
        return function(*args)

    return call


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["remove_mask", "write_zeros"])
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_squash_that_fails_keeps_all_masks_and_can_be_repeated(error, name, is_copy, monkeypatch):
    model = linear_model(8, 8, 4)
    nn.utils.parametrizations.weight_norm(model[2])  # its mask is registered on top
    sparsifier = prepared(model)
    squashed = copy.deepcopy(model) if is_copy else model
    x, names = torch.randn(3, 8), list(model.state_dict())
    expected, before = model(x), {k: v.clone() for k, v in squashed.state_dict().items()}
    monkeypatch.setattr(squash if name == "remove_mask" else masking, name, failing(getattr(squash, name), 2, error))
    with pytest.raises(error, match="no more"):
        sparsifier.squash_mask(model=squashed)
    assert list(squashed.state_dict()) == names and torch.equal(squashed(x), expected)
    assert find_mask(squashed[0], "weight") is not None and find_mask(squashed[2], "weight") is not None
    if name == "remove_mask":
        assert all(torch.equal(v, before[k]) for k, v in squashed.state_dict().items())
    assert sparsifier.check() == 8 * 2 + 4 * 2
    monkeypatch.undo()
    sparsifier.squash_mask(model=squashed)
    assert find_mask(squashed[0], "weight") is None and (squashed[0].weight == 0).sum() == 32
    assert torch.allclose(squashed(x), expected)


def test_masks_of_one_module_are_put_back_together(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8))
    sparsifier = prepared(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "0.bias", "scope_shape": (4,)}])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    monkeypatch.setattr(squash, "remove_mask", failing(squash.remove_mask, 2, RuntimeError))
    with pytest.raises(RuntimeError, match="no more"):
        sparsifier.squash_mask()
    assert sorted(model.state_dict()) == sorted(before)
    model.load_state_dict(linear_model(8, 8).state_dict())  # a dense one still loads
    sparsifier.squash_mask()
    assert list(model.state_dict()) == ["0.weight", "0.bias"] or list(model.state_dict()) == ["0.bias", "0.weight"]


def test_values_that_cannot_be_written():
    with torch.inference_mode():
        model = linear_model(8, 8)
    with pytest.raises(SparsityError, match=r"0.weight' was made in inference mode.* or trained.*inside"):
        prepared(model)
    trained = linear_model(8, 8)  # the advice for a model that is to be trained
    trained.load_state_dict(model.state_dict())
    assert torch.equal(trained[0].weight, model[0].weight)
    prepared(trained)
    trained(torch.randn(4, 8)).sum().backward()
    torch.optim.SGD(trained.parameters(), 0.1).step()
    with torch.inference_mode():
        sparsifier = prepared(model)
    with pytest.raises(SparsityError, match=r"squash_mask: 0.weight was made in inference mode .*torch.inference_mode"):
        sparsifier.squash_mask()
    with torch.inference_mode():
        sparsifier.squash_mask()
    offloaded = linear_model(8, 8, 8)
    sparsifier = prepared(offloaded)
    offloaded[2].parametrizations.weight.original = nn.Parameter(torch.empty(8, 8, device="meta"))
    with pytest.raises(SparsityError, match=r"2.weight has no values, .*offloaded after prepare; load"):
        sparsifier.squash_mask()
    assert find_mask(offloaded[0], "weight") is not None


MODELS = {
    "Linear": lambda: nn.Linear(8, 8),
    "Conv2d": lambda: nn.Conv2d(8, 8, 3),
    "LSTM of two layers": lambda: nn.LSTM(8, 8, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "tied": lambda: tied(nn.Linear(8, 8), nn.Linear(8, 8)),
}


def tied(first, second):
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("config", [None, [{"tensor_fqn": ["*bias*", "*weight*"]}], [{"tensor_fqn": "*weight*"}]])
@pytest.mark.parametrize("name", MODELS)
def test_squash_mask_leaves_the_order_of_parameters(name, config, is_copy):
    model = MODELS[name]()
    if name == "tied" and config is None:
        model.append(nn.Linear(8, 8))
    names, parameters = [n for n, _ in model.named_parameters()], list(model.parameters())
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, config)
    sparsifier.step()
    squashed = copy.deepcopy(model) if is_copy else model
    sparsifier.squash_mask(model=squashed)
    assert [n for n, _ in squashed.named_parameters()] == names
    assert is_copy or all(p is q for p, q in zip(squashed.parameters(), parameters, strict=True))


def test_the_state_of_an_optimizer_saved_after_squash_mask_fits_the_dense_model():
    model = nn.Sequential(nn.Linear(8, 8))
    sparsifier = prepared(model)
    sparsifier.squash_mask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    dense = nn.Sequential(nn.Linear(8, 8))
    other = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[dense[0].bias]["momentum_buffer"], model[0].bias.grad)
