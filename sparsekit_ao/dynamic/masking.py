"""The mask with two sides: what the forward pass sees, and how far gradients reach.

Knows one weight and its masks; nothing of updates. Under `mask * weight` a dropped weight gets no gradient, which is
what growth needs to know. So a `DynamicMask` can be opened: the forward pass stays masked, and `.grad` becomes the
dense gradient, through the ordinary accumulation path (micro-batches, `no_sync`, gradient scaling, checkpointing).
"""

from typing import Any

import torch
from torch import Tensor

from ..distributed import is_managed, is_sharded
from ..errors import SparsityError
from ..masking import WeightMask, find_mask
from ..select import select

__all__ = ["DynamicMask", "find_dynamic", "starting_mask"]


class DynamicMask(WeightMask):
    """A masked weight whose gradient can reach further than its forward mask.

    Closed, it is a `WeightMask`. Open, gradients reach every element. With a `backward_mask` they reach that set
    always. The flag is a tensor too, so a compiled graph serves both states; eager code reads the Python one, which
    costs no wait for a device.

    Args:
        mask: of the weight's shape; the forward mask, only ever filled in place.
        reach: also keep a backward mask, all True to begin with: straight-through and Top-KAST (arXiv 2106.03517).
    """

    may_be_cut = False
    opened: Tensor
    backward_mask: Tensor | None

    def __init__(self, mask: Tensor, *, reach: bool = False) -> None:
        super().__init__(mask)
        self.register_buffer("backward_mask", torch.ones_like(mask, dtype=torch.bool) if reach else None)
        self.register_buffer("opened", torch.zeros((), dtype=torch.bool, device=mask.device), persistent=False)
        self.is_open = False

    def set_open(self, is_open: bool) -> None:
        """Let gradients reach every element from the next forward pass on, or the kept ones alone."""
        if is_open != self.is_open:
            self.is_open = is_open
            self.opened.fill_(is_open)

    def forward(self, x: Tensor) -> Tensor:
        """The weight with dropped elements exactly zero; shape and dtype as given.

        Raises:
            SparsityError: the weight is sharded over ranks, which it is between two forward passes at least.
        """
        if is_managed(self) or is_sharded(x):
            raise SparsityError(
                f"the weight {tuple(x.shape)} is sharded over ranks (a DTensor, as fully_shard makes), and masks that "
                "move in training are chosen among whole tensors. Use DistributedDataParallel."
            )
        if self.mask.shape != x.shape:
            raise SparsityError(f"mask {tuple(self.mask.shape)} does not fit the weight {tuple(x.shape)}")
        if not torch.is_grad_enabled():
            return select(x, self.mask)
        if torch.compiler.is_compiling():
            return _fused(x, self.mask != 0, self.opened if self.backward_mask is None else self.backward_mask)
        if self.backward_mask is None and not self.is_open:
            return select(x, self.mask)
        return _TwoSided.apply(x, self.mask, self.backward_mask)


def _fused(x: Tensor, mask: Tensor, reach: Tensor) -> Tensor:
    """As `_TwoSided` in plain operations, which a compiler fuses; a hidden weight that is not finite gets no gradient.

    The second term is zero, and its gradient is not.
    """
    hidden = torch.where(reach & ~mask & x.isfinite(), x, 0)
    return torch.where(mask, x, 0) + (hidden - hidden.detach())


class _TwoSided(torch.autograd.Function):
    """`select(x, mask)` forward; backward the gradient where `reach` is True (None: everywhere)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mask: Tensor, reach: Tensor | None) -> Tensor:
        return select(x, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (reach,) = ctx.saved_tensors
        return grad if reach is None else torch.where(reach, grad, 0), None, None


def find_dynamic(module: torch.nn.Module, tensor_name: str) -> DynamicMask:
    """The dynamic mask of a prepared tensor."""
    found = find_mask(module, tensor_name)
    if not isinstance(found, DynamicMask):
        raise SparsityError(f"{tensor_name} of this {type(module).__name__} has no dynamic mask; call prepare first")
    return found


def starting_mask(weight: Tensor, kept: Tensor | None) -> Tensor:
    """A mask for a weight from the places that are kept (bool; None is all of them).

    In eager mode on CPU a float mask costs what a product does at every size; elsewhere a bool one saves memory.
    """
    mask = torch.ones_like(weight, dtype=weight.dtype if weight.device.type == "cpu" else torch.bool)
    return mask if kept is None else mask.copy_(kept)
