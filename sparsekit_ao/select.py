"""Exact masking: the weight where the mask is set, exactly zero elsewhere, whatever the weight holds there.

Knows two tensors and nothing else. Elements are selected, not multiplied, in forward and backward. Compiled, and on
other devices, that is one `where`, which fuses. In eager mode on CPU `where` on a bool mask is some three times slower
than a product; there the JIT tier selects in one pass where it is installed, and `threshold_backward` does elsewhere.
"""

from typing import Any

import torch
from torch import Tensor

from .kernels import jit

__all__ = ["select"]

FROM = 1 << 15  # elements from which `where` is the slower one
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def select(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight where the mask is True (or positive), exactly 0 elsewhere; differentiable in the weight.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    if mask.dtype != torch.bool:
        mask = mask if mask.dtype == weight.dtype else mask.to(weight.dtype)
        return torch.ops.aten.threshold_backward(weight, mask, 0)
    if torch.compiler.is_compiling() or not _is_plain(weight, mask):
        return torch.where(mask, weight, 0)
    return _Select.apply(weight, mask)


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
        """One pass, or two where the JIT tier is not at hand."""
        if jit.can_select(weight, mask):
            return jit.select(weight, mask)
        out = mask.view(torch.uint8).to(weight.dtype)
        torch.ops.aten.threshold_backward.grad_input(weight, out, 0, grad_input=out)
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
