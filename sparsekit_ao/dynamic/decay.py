"""Decay of what the forward mask drops, added to gradients once a step: the regularization of SR-STE.

Knows optimizers, parameters and dynamic masks. It is added before the optimizer looks and not in the backward pass, so
micro-batches add it once and gradient scaling leaves it as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import local
from ..sparsifiers.config import TensorGroup
from .hooks import after_closure
from .masking import find_dynamic
from .trained import original, placed_gradient, plain_optimizer, trained_now

__all__ = ["DecayTap"]


class DecayTap:
    """Hooks that add `decay * weight` to the gradients of dropped weights within reach (arXiv 2102.04010).

    Attributes:
        optimizers: those attached.
        groups: of the prepared model.
        decay: the factor.
    """

    def __init__(self, decay: float) -> None:
        self.optimizers: list[Optimizer] = []
        self.groups: Sequence[TensorGroup] = ()
        self.model: nn.Module | None = None
        self.decay = decay
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Put hooks on these optimizers instead of those before."""
        self.detach()
        self.optimizers = [plain_optimizer(o) for o in optimizers]
        self._put_hooks()

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.optimizers = [], []

    def _put_hooks(self) -> None:
        self._handles = [o.register_step_pre_hook(self._before) for o in self.optimizers]

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        def add() -> None:
            self._add(optimizer, getattr(optimizer, "grad_scale", None))

        return after_closure(args, kwargs, add)

    @torch.no_grad()
    def _add(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        for group in trained_now(self.model, self.groups, optimizer):
            parameter, found = original(group), find_dynamic(group["module"], group["tensor_name"])
            grad = placed_gradient(parameter)
            if grad is None:
                continue
            dropped = local(found.mask) == 0
            if found.backward_mask is not None:
                dropped &= local(found.backward_mask)
            added = torch.where(dropped, local(parameter), 0) * self.decay
            local(grad).add_(added if scale is None else added * scale)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_handles"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy: with the copied optimizers, and hooks of its own on them."""
        self.__dict__.update(state)
        self._put_hooks()
