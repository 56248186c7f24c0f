"""Exact masking: `select` equals `torch.where` in forward, in backward and under torch's transforms."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparsekit_ao.masking import FROM, is_intercepted, select
from sparsekit_ao.masking import product as module

SHAPE = (96, 512)
assert SHAPE[0] * SHAPE[1] > FROM


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


@pytest.mark.parametrize("layout", ["rows", "columns", "mixed", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_select_equals_where_in_forward_and_backward(dtype, layout):
    weight, mask = weight_and_mask(dtype, layout)
    weight.requires_grad_()
    out = select(weight, mask)
    expected = torch.where(mask, weight.detach(), 0)
    assert out.dtype == dtype and same_bits(out.detach(), expected)
    assert not bool(torch.signbit(out.detach()[~mask]).any())
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad[0, :4] = torch.nan
    (found,) = torch.autograd.grad(out, weight, grad)
    assert same_bits(found, torch.where(mask, grad, 0))


@pytest.mark.parametrize("layout", ["rows", "columns", "mixed", "window"])
def test_select_with_a_float_mask(layout):
    weight, mask = weight_and_mask(layout=layout)
    weight.requires_grad_()
    out = select(weight, mask.float())
    assert same_bits(out.detach(), torch.where(mask, weight.detach(), 0))
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    grad[0, :4] = torch.nan
    assert same_bits(torch.autograd.grad(out, weight, grad)[0], torch.where(mask, grad, 0))
    small = slice(0, 4)
    assert same_bits(select(weight[small], mask[small].double()), torch.where(mask[small], weight[small], 0))


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


def test_a_mask_that_changes_before_backward_is_an_error():
    weight, mask = weight_and_mask()
    out = select(weight.requires_grad_(), mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_compilers_and_modes_get_where(monkeypatch):
    weight, mask = weight_and_mask()
    monkeypatch.setattr(module._Select, "apply", lambda *_: pytest.fail("the eager path was intercepted"))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    out = torch.compile(select, fullgraph=True, backend=backend)(weight, mask)
    assert same_bits(out, torch.where(mask, weight, 0)) and len(graphs) == 1
    with FlopCounterMode(display=False):
        select(weight, mask)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert select(weight, mask).shape == SHAPE
    small = slice(0, 4)
    assert same_bits(select(weight[small], mask[small]), torch.where(mask[small], weight[small], 0))
    assert select(weight.to("meta"), mask.to("meta")).device.type == "meta"


@pytest.mark.parametrize(("shape", "dtype"), [((1024, 1024), torch.float32), ((3, 700_001), torch.float16)])
def test_large_pages_are_requested_for_large_tensors_and_only_inside_them(shape, dtype, monkeypatch):
    advised = []
    monkeypatch.setattr(module, "_madvise", lambda: lambda *args: advised.append(args))
    like = torch.empty(shape, dtype=dtype).t()
    out = module._empty_in_large_pages(like)
    assert (out.shape, out.stride(), out.dtype) == (like.shape, like.stride(), dtype)
    ((start, size, advice),) = advised
    end = out.data_ptr() + out.numel() * out.element_size()
    assert out.data_ptr() <= start < out.data_ptr() + 4096 and end - 4096 < start + size <= end
    assert start % 4096 == size % 4096 == 0 and advice == 14
    module._empty_in_large_pages(like[:5, :2])
    assert len(advised) == 1


def test_without_madvise_memory_is_allocated_as_usual(monkeypatch):
    module._madvise.cache_clear()
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert module._madvise() is None
    assert module._empty_in_large_pages(torch.empty(2048, 1024)).shape == (2048, 1024)
    module._madvise.cache_clear()


def test_batched_gradients_and_functionalization_get_where():
    weight, mask = weight_and_mask()
    weight = weight.nan_to_num(0.0, 1.0, -1.0).requires_grad_()
    grads = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(2))
    (found,) = torch.autograd.grad(select(weight, mask), weight, grads, is_grads_batched=True)
    assert torch.equal(found, torch.where(mask, grads, 0))
    out = torch.func.functionalize(select)(weight.detach(), mask)
    assert torch.equal(out, torch.where(mask, weight.detach(), 0))


def test_without_torchs_private_functions_every_tensor_counts_as_intercepted(monkeypatch):
    weight, mask = weight_and_mask()
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert is_intercepted(weight)
    assert same_bits(select(weight, mask), torch.where(mask, weight, 0))


def test_the_weights_storage_can_still_be_resized():
    """As FSDP2 does with gathered weights."""
    weight = torch.randn(SHAPE)
    masked = select(weight, torch.ones(SHAPE, dtype=torch.bool))
    weight.untyped_storage().resize_(0)
    assert masked.untyped_storage().nbytes() > 0
