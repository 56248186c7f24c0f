"""A mask may change between forward and backward: the gradient is that of the mask used in the forward pass."""

import copy
import gc
import pickle

import pytest
import torch
from stock import linear_model
from torch import nn

from sparsekit_ao import (
    SET,
    DynamicSparsifier,
    NearlyDiagonalSparsifier,
    ScopeSparsifier,
    StraightThrough,
    WeightNormSparsifier,
)
from sparsekit_ao.masking import FROM, saved

KINDS = {
    "scopes": lambda: ScopeSparsifier(0.5),
    "weight norm": lambda: WeightNormSparsifier(0.5),
    "straight through": lambda: StraightThrough(0.5, backward_level=0.25),
}
SIZES = [8, 256]
assert SIZES[0] ** 2 < FROM <= SIZES[1] ** 2


def kept(model: nn.Module) -> torch.Tensor:
    found = model[0].parametrizations.weight[0]
    backward = getattr(found, "backward_mask", None)
    return (found.mask if backward is None else backward).detach().float().clone()


def waiting(sparsifier, size: int):
    """A model after its forward pass, the gradient that the backward pass must give, and the output."""
    model = linear_model(size, size)
    sparsifier.prepare(model, None)
    if not isinstance(sparsifier, DynamicSparsifier):
        sparsifier.step()
    x = torch.randn(4, size)
    out = model(x)
    return model, x.sum(0).expand(size, size) * kept(model), out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_between_forward_and_backward_leaves_the_gradient_as_it_is(kind, size):
    sparsifier = KINDS[kind]()
    model, want, out = waiting(sparsifier, size)
    before = kept(model)
    sparsifier.groups[0]["sparsity_level"] = 0.9
    with torch.no_grad():
        model[0].parametrizations.weight.original.copy_(torch.randn(size, size))
    sparsifier.step()
    sparsifier.step()
    assert not torch.equal(kept(model), before)
    out.sum().backward()
    torch.testing.assert_close(model[0].parametrizations.weight.original.grad, want)


@pytest.mark.parametrize("size", SIZES)
def test_a_diagonal_that_widens_leaves_the_gradient_as_it_is(size):
    sparsifier = NearlyDiagonalSparsifier(1)
    model, want, out = waiting(sparsifier, size)
    sparsifier.groups[0]["nearliness"] = 5
    sparsifier.step()
    out.sum().backward()
    torch.testing.assert_close(model[0].parametrizations.weight.original.grad, want)


def test_an_update_of_dynamic_masks_leaves_the_gradient_as_it_is():
    sparsifier = SET(0.5, update_every=1, update_fraction=0.5)
    model, want, out = waiting(sparsifier, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    before = kept(model)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        sparsifier.step()
    optimizer.zero_grad()
    assert not torch.equal(kept(model), before)
    out.sum().backward()
    torch.testing.assert_close(model[0].parametrizations.weight.original.grad, want)


@pytest.mark.parametrize("size", SIZES)
def test_two_graphs_keep_the_masks_of_their_own_forward_pass(size):
    sparsifier = WeightNormSparsifier(0.5)
    model, first, out = waiting(sparsifier, size)
    sparsifier.groups[0]["sparsity_level"] = 0.9
    sparsifier.step()
    other = model(torch.ones(1, size))
    second = kept(model)
    sparsifier.groups[0]["sparsity_level"] = 1.0
    sparsifier.step()
    weight = model[0].parametrizations.weight.original
    torch.testing.assert_close(torch.autograd.grad(other.sum(), weight)[0], second)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight)[0], first)


@pytest.mark.parametrize("size", SIZES)
def test_second_derivatives_are_those_of_the_same_mask(size):
    sparsifier = WeightNormSparsifier(0.5)
    model, _, _ = waiting(sparsifier, size)
    x, weight = torch.randn(1, size), model[0].parametrizations.weight.original
    out, mask = model(x).square().sum(), kept(model)
    sparsifier.groups[0]["sparsity_level"] = 1.0
    sparsifier.step()
    (grad,) = torch.autograd.grad(out, weight, create_graph=True)
    (found,) = torch.autograd.grad(grad.sum(), weight)
    want = 2 * (x * mask).sum(1, keepdim=True) * x * mask
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_that_is_written_directly_is_an_error(size):
    model, _, out = waiting(WeightNormSparsifier(0.5), size)
    model[0].parametrizations.weight[0].mask.fill_(1)
    with pytest.raises(RuntimeError, match="was modified by an inplace operation since the forward pass"):
        out.sum().backward()


def test_nothing_is_copied_without_a_waiting_backward_pass(monkeypatch):
    monkeypatch.setattr(saved._SavedMask, "keep", lambda *_: pytest.fail("copied"))
    sparsifier = WeightNormSparsifier(0.5)
    model, _, out = waiting(sparsifier, 256)
    out.sum().backward()
    sparsifier.step()
    model(torch.randn(4, 256))
    gc.collect()
    sparsifier.step()
    with torch.no_grad():
        out = model(torch.randn(4, 256))
    sparsifier.step()


def test_a_model_with_a_waiting_backward_pass_can_be_copied_and_pickled():
    model, _, _out = waiting(WeightNormSparsifier(0.5), 8)
    for mask in (copy.deepcopy(model[0].parametrizations.weight[0]), model[0].parametrizations.weight[0]):
        assert torch.equal(pickle.loads(pickle.dumps(mask)).mask, mask.mask)
