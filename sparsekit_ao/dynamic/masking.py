"""The mask with two sides: what the forward pass sees, and how far gradients reach.

Knows one weight and its masks; nothing of updates. Under `mask * weight` a dropped weight gets no gradient, which is
what growth needs to know. So a `DynamicMask` can be opened: the forward pass stays masked, and `.grad` becomes the
dense gradient, through the ordinary accumulation path (micro-batches, `no_sync`, gradient scaling, checkpointing).
"""

from typing import Any

import torch
from torch import Tensor

from ..distributed import fill, is_sharded, placed_like
from ..errors import SparsityError
from ..masking import WeightMask, find_mask, select

__all__ = ["DynamicMask", "find_dynamic", "starting_mask"]


class DynamicMask(WeightMask):
    """A masked weight whose gradient can reach further than its forward mask.

    Closed, it is a `WeightMask`, or with a `backward_mask` gradients reach that set. Open, they reach every element.
    The flag is a tensor too, so a compiled graph serves both states; eager code reads the Python one, which costs no
    wait for a device.

    Args:
        mask: of the weight's shape; the forward mask, only ever filled in place.
        reach: also keep a backward mask, all True to begin with: straight-through and Top-KAST (arXiv 2106.03517).
        is_drawn: False where its places are still to be drawn, since the weight has no memory yet (meta device).
    """

    opened: Tensor
    backward_mask: Tensor | None

    def __init__(self, mask: Tensor, *, reach: bool = False, is_drawn: bool = True) -> None:
        super().__init__(mask)
        self.register_buffer("backward_mask", torch.ones_like(mask, dtype=torch.bool) if reach else None)
        self.register_buffer("opened", torch.zeros((), dtype=torch.bool, device=mask.device), persistent=False)
        self.is_open = False
        self.is_drawn = is_drawn

    def set_open(self, is_open: bool) -> None:
        """Let gradients reach every element from the next forward pass on, or the kept ones alone."""
        if is_open != self.is_open:
            self.is_open = is_open
            self.opened.fill_(is_open)

    def forward(self, x: Tensor) -> Tensor:
        """The weight with dropped elements exactly zero; shape and dtype as given.

        Raises:
            SparsityError: its places are still to be drawn.
        """
        if not self.is_drawn:
            raise SparsityError(
                f"the mask of a weight {tuple(x.shape)} was prepared on the meta device and is still to be drawn. "
                "Initialise the weights, then call sparsifier.attach(optimizer), or load a checkpoint."
            )
        if self.mask.shape != x.shape:
            raise SparsityError(f"mask {tuple(self.mask.shape)} does not fit the weight {tuple(x.shape)}")
        mask = placed_like(self.mask, x)
        if not torch.is_grad_enabled():
            return select(x, mask)
        reach = None if self.backward_mask is None or self.is_open else placed_like(self.backward_mask, x)
        if torch.compiler.is_compiling():
            return _fused(x, mask != 0, self.opened if reach is None else reach)
        return select(x, mask) if reach is None and not self.is_open else _TwoSided.apply(x, mask, reach)

    def shard_like(self, weight: Tensor) -> None:
        """Cut both masks over the ranks as the weight is; one byte a weight, as they are gathered in every forward."""
        self.mask = placed_like(self.mask != 0, weight)
        if self.backward_mask is not None:
            self.backward_mask = placed_like(self.backward_mask, weight)

    def draw(self, kept: Tensor) -> None:
        """Fill the mask (bool, True where kept) that could not be drawn when it was made."""
        fill(self.mask, kept)
        self.is_drawn = True

    def _apply(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As any mask's; what was on the meta device had no values there."""
        was_meta = self.opened.is_meta
        super()._apply(*args, **kwargs)
        if was_meta and not self.opened.is_meta:
            self.opened.fill_(self.is_open)
            if self.backward_mask is not None:
                self.backward_mask.fill_(True)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """As any mask's; a loaded mask needs no drawing."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.is_drawn |= f"{prefix}mask" in state_dict and not self.mask.is_meta


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
    is_float = weight.device.type == "cpu" and not is_sharded(weight)
    mask = torch.ones_like(weight, dtype=weight.dtype if is_float else torch.bool)
    if kept is not None:
        fill(mask, kept)
    return mask
