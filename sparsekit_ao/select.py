"""Exact masking: the weight where the mask is set, exactly zero elsewhere, whatever the weight holds there.

Knows two tensors and nothing else. Elements are selected, not multiplied, in forward and backward. Compiled, and on
other devices, that is one `where`, which fuses. In eager mode on CPU `where` on a bool mask is some three times slower
than a product; there the mask is widened and `threshold_backward` selects, into memory in large pages.
"""

from typing import Any

import torch
from torch import Tensor

from . import pages

__all__ = ["select"]

FROM = 1 << 15  # elements from which `where` is the slower one
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def select(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight where the mask is True (or positive), exactly 0 elsewhere; differentiable in the weight.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    floats = mask.dtype != torch.bool
    mask = mask.to(weight.dtype) if floats else mask
    if not torch.compiler.is_compiling() and _is_plain(weight, mask):
        return _Select.apply(weight, mask)
    return torch.ops.aten.threshold_backward(weight, mask, 0) if floats else torch.where(mask, weight, 0)


def _is_plain(weight: Tensor, mask: Tensor) -> bool:
    """Whether both are large CPU tensors of no special kind, and nobody records or transforms the operations."""
    return (
        weight.numel() >= FROM
        and weight.device.type == mask.device.type == "cpu"
        and weight.dtype in FLOATS
        and type(weight) in (Tensor, torch.nn.Parameter)
        and type(mask) is Tensor
        and weight.shape == mask.shape
        and not torch.jit.is_tracing()
        and not any(_is_seen(t) for t in (weight, mask))
    )


def _is_seen(t: Tensor) -> bool:
    """Whether a mode or a transform (vmap, functionalization, batched gradients) looks at what is done with a tensor.

    torch has no public word for that; where it loses its private ones, everything counts as seen, which is slower.
    """
    try:
        inside = torch._C._functorch
        seen = torch._C._len_torch_dispatch_stack() or inside.is_functorch_wrapped_tensor(t)
        return bool(seen or inside.is_legacy_batchedtensor(t) or torch._is_functional_tensor(t))
    except AttributeError:
        return True


class _Select(torch.autograd.Function):
    """`where(mask, weight, 0)` at the speed of a product; its backward is itself, so it may be differentiated again."""

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        """The mask widened, unless it is a float, and one pass."""
        if mask.dtype == torch.bool:
            held = out = pages.empty_like(mask, weight.dtype).copy_(mask.view(torch.uint8))
        else:
            held, out = mask, pages.empty_like(weight)
        torch.ops.aten.threshold_backward.grad_input(weight, held, 0, grad_input=out)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Both derivatives need the mask alone."""
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient where the mask is set."""
        return select(grad, ctx.saved_tensors[0]), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """The tangent where the mask is set."""
        return select(tangent, ctx.saved_tensors[0])
