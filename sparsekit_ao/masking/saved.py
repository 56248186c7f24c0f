"""Masks that a forward pass saved for its backward pass, and that change before it.

Masks are written in place, while a gradient is that of the mask used in the forward pass. So autograd is given a
`_SavedMask`, which refers to the live mask; `keep_saved`, called before a mask is written, gives it a copy if the
backward pass is still to come. Where no graph is waiting, nothing is copied. Compiled code saves the mask itself.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class _SavedMask:
    """A mask as it was in a forward pass."""

    def __init__(self, mask: Tensor) -> None:
        self.mask, self.version, self.is_copy = mask, mask._version, False

    def is_current(self) -> bool:
        """Whether the mask was not written since."""
        return self.is_copy or self.mask._version == self.version

    def keep(self) -> None:
        """Copy the mask, which is about to change."""
        if self.is_current() and not self.is_copy:
            self.mask, self.is_copy = self.mask.detach().clone(), True

    def unpack(self) -> Tensor:
        """The mask for the backward pass."""
        if not self.is_current():
            raise RuntimeError(
                f"a mask {tuple(self.mask.shape)} that the backward pass needs was modified by an inplace operation "
                "since the forward pass. Change masks through their sparsifier (step, update_mask, state), which keeps "
                "what the backward pass needs, or call backward first."
            )
        return self.mask


_SAVED: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[_SavedMask]]] = weakref.WeakKeyDictionary()


def saving(module: nn.Module, masks: Sequence[Tensor | None], weight: Tensor) -> AbstractContextManager[object]:
    """A context in which autograd saves these masks of a module such that `keep_saved` can replace them."""
    needs_backward = torch.is_grad_enabled() and weight.requires_grad
    if not needs_backward or torch.compiler.is_compiling() or torch.jit.is_tracing() or is_intercepted(weight):
        return nullcontext()

    def pack(t: Tensor) -> Tensor | _SavedMask:
        if not any(t is mask for mask in masks) or t.is_inference():
            return t
        held = _SAVED.setdefault(module, [])
        held[:] = [ref for ref in held if ref() is not None]
        saved = next((s for ref in held if (s := ref()) and s.mask is t and s.is_current()), None) or _SavedMask(t)
        held.append(weakref.ref(saved))
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s.unpack() if isinstance(s, _SavedMask) else s)


def keep_saved(module: nn.Module) -> None:
    """Copy what backward passes still need of a module's masks; called before they are written."""
    for ref in _SAVED.pop(module, ()):
        saved = ref()
        if saved is not None:
            saved.keep()


def is_intercepted(t: Tensor) -> bool:
    """Whether a mode or a transform (vmap, functionalization, batched gradients) intercepts operations on a tensor.

    torch has no public function for that; where the private ones are missing, the result is True.
    """
    try:
        inside = torch._C._functorch
        hooks: Any = torch._C._autograd
        if torch._C._len_torch_dispatch_stack() or not hooks._saved_tensors_hooks_is_enabled():
            return True
        found = inside.is_functorch_wrapped_tensor(t) or inside.is_legacy_batchedtensor(t)
        return bool(found or torch._is_functional_tensor(t))
    except AttributeError:
        return True
