"""A mask may change between forward and backward: the gradient is that of the mask used in the forward pass."""

import copy
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


def kept(model: nn.Module) -> torch.Tensor:
    parametrization = model[0].parametrizations.weight[0]
    backward = getattr(parametrization, "backward_mask", None)
    return (parametrization.mask if backward is None else backward).detach().float().clone()


def after_forward(sparsifier):
    """A model after its forward pass, the gradient that the backward pass must give, and the output."""
    model = linear_model(8, 8)
    sparsifier.prepare(model, None)
    if not isinstance(sparsifier, DynamicSparsifier):
        sparsifier.step()
    x = torch.randn(4, 8)
    out = model(x)
    return model, x.sum(0).expand(8, 8) * kept(model), out


def prune_more(sparsifier, model):
    sparsifier.groups[0]["sparsity_level"] = 0.9
    with torch.no_grad():
        model[0].parametrizations.weight.original.copy_(torch.randn(8, 8))
    sparsifier.step()
    sparsifier.step()


def widen(sparsifier, model):
    sparsifier.groups[0]["nearliness"] = 5
    sparsifier.step()


def train(sparsifier, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        sparsifier.step()
    optimizer.zero_grad()


def write_directly(sparsifier, model):
    model[0].parametrizations.weight[0].mask.fill_(1)


CHANGES = {  # (sparsifier, what changes its mask)
    "scopes": (lambda: ScopeSparsifier(0.5), prune_more),
    "weight norm": (lambda: WeightNormSparsifier(0.5), prune_more),
    "straight through": (lambda: StraightThrough(0.5, backward_level=0.25), prune_more),
    "diagonal": (lambda: NearlyDiagonalSparsifier(1), widen),
    "dynamic": (lambda: SET(0.5, update_every=1, update_fraction=0.5), train),
    "bool mask, written directly": (lambda: ScopeSparsifier(0.5), write_directly),
    "float mask, written directly": (lambda: WeightNormSparsifier(0.5), write_directly),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_between_forward_and_backward_leaves_the_gradient_as_it_is(case):
    make, change = CHANGES[case]
    sparsifier = make()
    model, want, out = after_forward(sparsifier)
    before = kept(model)
    change(sparsifier, model)
    assert not torch.equal(kept(model), before)
    out.sum().backward()
    torch.testing.assert_close(model[0].parametrizations.weight.original.grad, want)


def test_two_graphs_keep_the_masks_of_their_own_forward_pass():
    sparsifier = WeightNormSparsifier(0.5)
    model, first, out = after_forward(sparsifier)
    sparsifier.groups[0]["sparsity_level"] = 0.9
    sparsifier.step()
    other = model(torch.ones(1, 8))
    second = kept(model)
    sparsifier.groups[0]["sparsity_level"] = 1.0
    sparsifier.step()
    weight = model[0].parametrizations.weight.original
    torch.testing.assert_close(torch.autograd.grad(other.sum(), weight)[0], second)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight)[0], first)


def test_second_derivatives_are_those_of_the_same_mask():
    sparsifier = WeightNormSparsifier(0.5)
    model, _, _ = after_forward(sparsifier)
    x, weight = torch.randn(1, 8), model[0].parametrizations.weight.original
    out, mask = model(x).square().sum(), kept(model)
    sparsifier.groups[0]["sparsity_level"] = 1.0
    sparsifier.step()
    (grad,) = torch.autograd.grad(out, weight, create_graph=True)
    (found,) = torch.autograd.grad(grad.sum(), weight)
    want = 2 * (x * mask).sum(1, keepdim=True) * x * mask
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_a_model_after_a_forward_pass_can_be_copied_and_pickled():
    model, _, _out = after_forward(WeightNormSparsifier(0.5))
    for mask in (copy.deepcopy(model[0].parametrizations.weight[0]), model[0].parametrizations.weight[0]):
        assert torch.equal(pickle.loads(pickle.dumps(mask)).mask, mask.mask)
