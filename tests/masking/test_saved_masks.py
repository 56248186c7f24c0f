"""A mask may change between forward and backward: the gradient is that of the mask used in the forward pass.

In eager mode on a CPU the mask is converted to the weight's dtype once, until it changes.
"""

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
    """What was converted for the forward pass is not copied."""
    model, _, _out = after_forward(WeightNormSparsifier(0.5))
    mask = model[0].parametrizations.weight[0]
    size = len(pickle.dumps(type(mask)(mask.mask)))
    for each in (copy.deepcopy(mask), mask):
        assert torch.equal(pickle.loads(pickle.dumps(each)).mask, mask.mask)
        assert len(pickle.dumps(each)) <= size


def converted(model: nn.Module) -> int:
    """Where the memory is that autograd saves of a mask."""
    return model[0].weight.grad_fn._saved_self.data_ptr()


@pytest.mark.parametrize("make", [ScopeSparsifier, WeightNormSparsifier, lambda level: SET(level, update_every=None)])
def test_a_mask_is_converted_once_until_it_changes(make):
    model = linear_model(8, 8)
    sparsifier = make(0.5)
    sparsifier.prepare(model, None)
    mask = model[0].parametrizations.weight[0].mask
    held = [model[0].weight for _ in range(2)]
    assert held[0].grad_fn._saved_self.data_ptr() == held[1].grad_fn._saved_self.data_ptr() == converted(model)
    with torch.no_grad():
        mask.zero_()
    assert converted(model) != held[0].grad_fn._saved_self.data_ptr()
    assert model[0].parametrizations.weight[0].mask is mask


def assign(mask, model, sparsifier):
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()}, assign=True)


def in_inference_mode(mask, model, sparsifier):
    with torch.inference_mode():
        mask.zero_()


def from_a_view(mask, model, sparsifier):
    mask.view(-1)[:].zero_()


def by_step(mask, model, sparsifier):
    """As sparsifiers written for torch.ao do, whose `.data` no version counts."""
    sparsifier.update_mask = lambda module, tensor_name, **_: module.parametrizations.weight[0].mask.data.zero_()
    sparsifier._update_all = lambda: [sparsifier.update_mask(**group) for group in sparsifier.groups]
    sparsifier.step()


def in_shared_memory(mask, model, sparsifier):
    model.share_memory()
    model(torch.ones(1, 8))
    model[0].parametrizations.weight[0].mask.data.zero_()


WRITES = {
    "in place": lambda mask, model, sparsifier: mask.zero_(),
    "through a view": from_a_view,
    "in inference mode": in_inference_mode,
    "other data": lambda mask, model, sparsifier: setattr(mask, "data", torch.zeros_like(mask)),
    "the mask that the sparsifier gives, through data": lambda *found: found[2].mask("0.weight").data.zero_(),
    "a sparsifier's step, through data": by_step,
    "through a detached alias": lambda mask, model, sparsifier: mask.data.copy_(torch.zeros_like(mask)),
    "through NumPy": lambda mask, model, sparsifier: mask.numpy().fill(0),
    "in shared memory": in_shared_memory,
    "loaded": lambda mask, model, sparsifier: model.load_state_dict(
        {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    ),
    "assigned": assign,
}


@pytest.mark.parametrize("make", [ScopeSparsifier, WeightNormSparsifier])
@pytest.mark.parametrize("write", WRITES)
def test_every_change_of_a_mask_counts_in_the_next_forward_pass(write, make):
    model = linear_model(8, 8) if write != "in place" else linear_model(3, 5)  # not a multiple of eight bytes
    sparsifier = make(0.5)
    sparsifier.prepare(model, None)
    model(torch.ones(1, model[0].in_features))
    with torch.no_grad():
        WRITES[write](model[0].parametrizations.weight[0].mask, model, sparsifier)
        model[0].parametrizations.weight.original.fill_(torch.nan)
        assert not model[0].weight.count_nonzero()
    assert not model[0].weight.count_nonzero()


def test_what_a_forward_pass_keeps_serves_every_later_one():
    """Of other modes, dtypes, transforms and masks."""
    model = linear_model(8, 8)
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, None)
    sparsifier.step()
    x, mask = torch.ones(1, 8), sparsifier.mask("0.weight").float()
    with torch.inference_mode():
        model(x)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    other = {k: ~v for k, v in model.named_buffers()}

    def loss(parameters, buffers):
        return torch.func.functional_call(model, (parameters, buffers), x).sum()

    key = "0.parametrizations.weight.original"
    for _ in range(2):
        for buffers, want in ((dict(model.named_buffers()), mask), (other, 1 - mask)):
            assert torch.equal(torch.func.grad(loss)(parameters, buffers)[key], want)
        stacked = {k: torch.stack([v, ~v]) for k, v in model.named_buffers()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, stacked)
        assert torch.equal(each[key], torch.stack([mask, 1 - mask]))
        vars(model[0].parametrizations.weight[0]).pop("_kept", None)  # the next one is made inside of a transform
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        model.zero_grad()
        model(x.to(dtype)).sum().backward()
        assert torch.equal(model[0].parametrizations.weight.original.grad, mask.to(dtype))
