"""How a masked weight is computed: elements are selected, not multiplied.

A masked element is exactly zero in forward and backward, even where the weight is NaN or infinite. Compiled, and on
other devices, that is one `where`, which is fused. In eager mode on CPU `where` on a bool mask takes three times as
long as a product; there the mask is converted to the weight's dtype and `threshold_backward` selects.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .saved import is_intercepted

FROM = 1 << 15  # elements from which `where` is slower
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGE = 1 << 22  # bytes from which a system call for large pages is worth its time
PAGE = 4096
MADV_HUGEPAGE = 14


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


def marked(weight: Tensor) -> Tensor:
    """A masked weight; marked where it looks like a parameter, so that it is not taken for one (`algebra.View`)."""
    if not torch.compiler.is_compiling() and weight.is_leaf:
        weight.is_masked_weight = True  # type: ignore[attr-defined]
    return weight


def _is_plain(weight: Tensor, mask: Tensor) -> bool:
    """Whether both are large CPU tensors of no special kind, and no mode or transform intercepts the operations."""
    return (
        weight.numel() >= FROM
        and weight.device.type == mask.device.type == "cpu"
        and weight.dtype in FLOATS
        and type(weight) in (Tensor, torch.nn.Parameter)
        and type(mask) is Tensor
        and weight.shape == mask.shape
        and not torch.jit.is_tracing()
        and not any(is_intercepted(t) for t in (weight, mask))
    )


class _Select(torch.autograd.Function):
    """`where(mask, weight, 0)` at the speed of a product; its backward is `select`, which is differentiable again."""

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        """Convert a bool mask to the weight's dtype, then select in one pass."""
        if mask.dtype == torch.bool:
            held = out = _empty_in_large_pages(mask, weight.dtype).copy_(mask.view(torch.uint8))
        else:
            held, out = mask, _empty_in_large_pages(weight)
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


def _empty_in_large_pages(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.empty_like` for CPU tensors, with a hint to Linux to use large pages.

    Page faults of a fresh 64 MiB tensor take longer than what is then done with it; without the hint masking takes two
    to three times as long. torch itself asks for large pages only where THP_MEM_ALLOC_ENABLE is set.
    """
    out = torch.empty_like(t, dtype=dtype)
    advise = _madvise()
    size = out.untyped_storage().nbytes()
    if advise is not None and size >= LARGE:
        start = -(-out.data_ptr() // PAGE) * PAGE  # whole pages inside the tensor
        advise(start, (out.data_ptr() + size - start) // PAGE * PAGE, MADV_HUGEPAGE)
    return out


@cache
def _madvise() -> Callable[..., Any] | None:
    """The C library's function, or None outside Linux."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
