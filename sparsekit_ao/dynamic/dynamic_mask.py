"""`DynamicMask`, the parametrization of a masked weight whose gradient can be dense.

Under `mask * weight` a dropped weight gets no gradient, but growth compares the gradients of dropped weights. So a
`DynamicMask` can be opened: the forward pass stays masked, and `.grad` becomes the dense gradient, accumulated as any
other (micro-batches, `no_sync`, gradient scaling, checkpointing).
"""

from typing import Any

import torch
from torch import Tensor

from ..distributed import copy_values, placed_like
from ..errors import SparsityError
from ..masking import WeightMask, find_mask, mark_masked, select
from ..sparsifiers.config import TensorGroup


class DynamicMask(WeightMask):
    """Mask a weight in the forward pass, and let gradients reach elements that the mask drops.

    While it is closed, it is a `WeightMask`, except that with a `backward_mask` gradients reach the elements of that
    mask. While it is open, gradients reach every element. The flag is stored twice: compiled code reads a tensor, so
    that one graph serves both states; eager code reads a Python bool, which never waits for a device.

    Args:
        mask: The forward mask, in the weight's shape. It is only ever filled in place.
        with_backward_mask: Whether to have a backward mask (a bool buffer, all True at first), as straight-through and
            Top-KAST (arXiv 2106.03517) need.
        is_initialized: False while the kept elements are still unknown, because the weight is on the meta device.

    >>> mask = DynamicMask(torch.tensor([True, False]))
    >>> weight = torch.tensor([2.0, 3.0], requires_grad=True)
    >>> mask.set_open(True)
    >>> mask(weight).sum().backward()
    >>> mask(weight).tolist(), weight.grad.tolist()
    ([2.0, 0.0], [1.0, 1.0])
    """

    opened: Tensor
    backward_mask: Tensor | None
    was_loaded = False  # whether weights or masks were loaded since the last step, so that dropped ones may not be zero

    def __init__(self, mask: Tensor, *, with_backward_mask: bool = False, is_initialized: bool = True) -> None:
        super().__init__(mask)
        backward = torch.ones_like(mask, dtype=torch.bool) if with_backward_mask else None
        self.register_buffer("backward_mask", backward)
        self.register_buffer("opened", torch.zeros((), dtype=torch.bool, device=mask.device), persistent=False)
        self.is_open, self.is_initialized = False, is_initialized

    def set_open(self, is_open: bool) -> None:
        """From the next forward pass on, let gradients reach every element (True) or the kept ones alone."""
        if is_open != self.is_open:
            self.is_open = is_open
            self.opened.fill_(is_open)

    def forward(self, x: Tensor) -> Tensor:
        """The weight with dropped elements exactly zero; shape and dtype as given.

        Raises:
            SparsityError: The mask is not initialized, or has another shape than the weight.
        """
        if not self.is_initialized:
            raise SparsityError(
                f"the mask of a weight {tuple(x.shape)} was prepared on the meta device and is not initialized yet. "
                "Initialize the weights, then call sparsifier.attach(optimizer), or load a checkpoint."
            )
        if not torch.is_grad_enabled():
            return super().forward(x)
        backward = None if self.backward_mask is None or self.is_open else placed_like(self.backward_mask, x)
        if not torch.compiler.is_compiling() and backward is None and not self.is_open:
            return super().forward(x)
        mask = self.mask_for(x)
        if torch.compiler.is_compiling():  # as `_TwoMasks`, in plain operations that a compiler fuses
            reached = (self.opened if backward is None else backward) & (mask == 0) & x.isfinite()
            dropped = torch.where(reached, x, 0)
            return torch.where(mask != 0, x, 0) + (dropped - dropped.detach())  # plus zero, whose gradient is not zero
        # autograd saves a copy, so that masks may be written before the backward pass
        return mark_masked(_TwoMasks.apply(x, mask, None if backward is None else backward.clone()))

    def shard_like(self, weight: Tensor) -> None:
        """Shard both masks as the weight is; as bool (one byte), because they are gathered in every forward pass."""
        self.mask = placed_like(self.mask != 0, weight)
        if self.backward_mask is not None:
            self.backward_mask = placed_like(self.backward_mask, weight)

    def initialize(self, kept: Tensor) -> None:
        """Fill a mask that was made without values from `kept` (bool, True where kept)."""
        copy_values(self.mask, kept)
        self.is_initialized = True

    def _apply(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As `WeightMask`; buffers that leave the meta device get their values, which they could not have there."""
        before, has_no_values = self.opened, self.has_no_values
        super()._apply(*args, **kwargs)
        if has_no_values and self.opened is not before and not self.opened.is_meta:
            self.opened.fill_(self.is_open)
            if self.backward_mask is not None:
                self.backward_mask.fill_(True)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """As `WeightMask`; a loaded mask is initialized."""
        self.was_loaded, is_from_dense = True, vars(self).get("_from_dense", False)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.is_initialized |= f"{prefix}mask" in state_dict and not self.mask.is_meta and not is_from_dense
        if self.opened.is_meta and not self.mask.is_meta:  # assigned
            self.opened = torch.tensor(self.is_open, device=self.mask.device)


class _TwoMasks(torch.autograd.Function):
    """`select(x, mask)` forward; backward the gradient where `backward_mask` is True (None: everywhere)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mask: Tensor, backward_mask: Tensor | None) -> Tensor:
        return select(x, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (backward_mask,) = ctx.saved_tensors
        return grad if backward_mask is None else torch.where(backward_mask, grad, 0), None, None


def mask_of(group: TensorGroup) -> DynamicMask:
    """Return the dynamic mask of a group."""
    mask = find_mask(group["module"], group["tensor_name"])
    if not isinstance(mask, DynamicMask):
        raise SparsityError(f"{group['tensor_fqn']}: it has no dynamic mask; call prepare first")
    return mask
