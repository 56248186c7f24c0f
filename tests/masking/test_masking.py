"""Exact masking: `select` equals `torch.where` in forward, in backward and under torch's transforms."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparsekit_ao.masking import select

SHAPE = (24, 64)


def weight_and_mask(dtype=torch.float32, layout="rows", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight, mask = torch.randn(SHAPE, generator=g).to(dtype), torch.rand(SHAPE, generator=g) < 0.5
    mask[0, :4], weight[0, :4] = False, torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).to(dtype)
    mask[1, :4], weight[1, :4] = True, weight[0, :4]
    if layout == "columns":
        weight, mask = weight.t().contiguous().t(), mask.t().contiguous().t()
    if layout == "mixed":
        mask = mask.t().contiguous().t()
    if layout == "window":
        weight, mask = (torch.cat([t, t], 1)[:, : SHAPE[1]] for t in (weight, mask))
    return weight, mask


def same_bits(a, b):
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("layout", ["rows", "columns", "mixed", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_select_equals_where_in_forward_and_backward(dtype, layout, mask_dtype):
    weight, mask = weight_and_mask(dtype, layout)
    weight.requires_grad_()
    out = select(weight, mask.to(mask_dtype))
    expected = torch.where(mask, weight.detach(), 0)
    assert out.dtype == dtype and same_bits(out.detach(), expected)
    assert not bool(torch.signbit(out.detach()[~mask]).any())
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad[0, :4] = torch.nan
    (found,) = torch.autograd.grad(out, weight, grad)
    assert same_bits(found, torch.where(mask, grad, 0))


@pytest.mark.filterwarnings(  # raised inside torch.func
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning",
    "ignore:.torch.jit.script. is deprecated:FutureWarning",
)
def test_second_derivatives_and_forward_mode():
    weight, mask = weight_and_mask()
    weight = weight.nan_to_num(0.0, 1.0, -1.0).requires_grad_()
    (first,) = torch.autograd.grad((select(weight, mask) ** 3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(second, torch.where(mask, 6 * weight.detach(), 0))
    tangent = torch.ones(SHAPE)
    _, found = torch.func.jvp(lambda w: select(w, mask), (weight.detach(),), (tangent,))
    assert torch.equal(found, mask.float())


def test_functional_gradients_and_batches():
    weight, mask = weight_and_mask()
    weight = weight.nan_to_num(0.0, 1.0, -1.0)
    grad = torch.func.grad(lambda w: (select(w, mask) * 2).sum())(weight)
    assert torch.equal(grad, mask * 2.0)
    weights, masks = torch.stack([weight, -weight]), torch.stack([mask, ~mask])
    for dims in itertools.product((0, None), repeat=2):
        if dims == (None, None):
            continue
        args = [batch if dim == 0 else batch[0] for batch, dim in zip((weights, masks), dims, strict=True)]
        found = torch.func.vmap(select, in_dims=dims)(*args)
        for i in range(2):
            one = [a[i] if dim == 0 else a for a, dim in zip(args, dims, strict=True)]
            assert torch.equal(found[i], torch.where(one[1], one[0], 0))
    each = torch.func.vmap(torch.func.grad(lambda w, m: select(w, m).sum()))(weights, masks)
    assert torch.equal(each, masks.float())


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_written_before_backward(mask_dtype):
    weight, mask = weight_and_mask()
    mask = mask.to(mask_dtype)
    out, want = select(weight.requires_grad_(), mask), (mask != 0).float()
    mask.fill_(1)
    assert torch.equal(torch.autograd.grad(out, weight, torch.ones(SHAPE))[0], want)


def test_compilers_and_modes():
    weight, mask = weight_and_mask()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    out = torch.compile(select, fullgraph=True, backend=backend)(weight, mask)
    assert same_bits(out, torch.where(mask, weight, 0)) and len(graphs) == 1
    with FlopCounterMode(display=False):
        assert same_bits(select(weight, mask), out)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert select(weight, mask).shape == SHAPE
    assert select(weight.to("meta"), mask.to("meta")).device.type == "meta"
    assert select(weight.int(), mask).dtype == torch.int32


def test_batched_gradients_and_functionalization_get_where():
    weight, mask = weight_and_mask()
    weight = weight.nan_to_num(0.0, 1.0, -1.0).requires_grad_()
    grads = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(2))
    (found,) = torch.autograd.grad(select(weight, mask), weight, grads, is_grads_batched=True)
    assert torch.equal(found, torch.where(mask, grads, 0))
    out = torch.func.functionalize(select)(weight.detach(), mask)
    assert torch.equal(out, torch.where(mask, weight.detach(), 0))


def test_the_weights_storage_can_still_be_resized():
    """As FSDP2 does with gathered weights."""
    weight = torch.randn(SHAPE)
    masked = select(weight, torch.ones(SHAPE, dtype=torch.bool))
    weight.untyped_storage().resize_(0)
    assert masked.untyped_storage().nbytes() > 0
