"""Hooks on the steps of optimizers: capture dense gradients before a step, or add decay to gradients.

While masks are open `.grad` is dense. Before the optimizer reads it, `GradientCapture` copies the dense gradient and
masks `.grad`, so the step is that of closed masks. `DecayHooks` adds the decay of SR-STE, once for each step.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ..distributed import all_agree, from_local, local, placed_like
from ..errors import SparsityError
from ..masking import select
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.optimizers import unwrap_optimizer
from .mask import DynamicMask, find_dynamic
from .optimizers import groups_of, momentum_of, original, placed_gradient

Version = tuple[int, int] | None


class StepHooks(ABC):
    """Base class: hooks on the steps of the attached optimizers, which train parameters of a prepared model."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.groups: Sequence[TensorGroup] = ()
        self.model: nn.Module | None = None
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Register the hooks on these optimizers instead of the present ones."""
        self.detach()
        self.optimizers = [unwrap_optimizer(o) for o in optimizers]
        self._register()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.optimizers = [], []

    def watch(self, groups: Sequence[TensorGroup], model: nn.Module | None) -> None:
        """Work on these groups of a model from now on."""
        self.groups, self.model = groups, model

    def _register(self) -> None:
        self._handles = [o.register_step_pre_hook(self._before) for o in self.optimizers]

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """The hook before a step: acts on gradients now, or after every call of the closure, which computes them."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._on_gradients(optimizer, getattr(optimizer, "grad_scale", None))
            return None

        def around() -> Any:
            self._on_closure(optimizer)
            with torch.enable_grad():
                loss = closure()
            self._on_gradients(optimizer, getattr(optimizer, "grad_scale", None))
            return loss

        return ((args[0], around, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": around})

    def _on_closure(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Called before every call of a step's closure; does nothing by default."""

    @abstractmethod
    def _on_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Called when the gradients of a step exist; `scale` is what gradient scaling has multiplied them by."""

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_handles"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy has the copied optimizers, and hooks of its own on them."""
        self.__dict__.update(state)
        self._register()


class DecayHooks(StepHooks):
    """Adds `decay * weight` to the gradients of dropped weights inside the backward mask (arXiv 2102.04010).

    It is added before the step and not in the backward pass: so it is added once for several micro-batches, and
    gradient scaling leaves it as it is.
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def _on_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        for group in groups_of(optimizer, self.groups, self.model):
            parameter, found = original(group), find_dynamic(group["module"], group["tensor_name"])
            grad = placed_gradient(parameter)
            if grad is None:
                continue
            dropped = local(found.mask) == 0
            if found.backward_mask is not None:
                dropped &= local(found.backward_mask)
            added = torch.where(dropped, local(parameter), 0) * self.decay
            local(grad).add_(added if scale is None else added * scale)


class GradientCapture(StepHooks):
    """Dense gradients of open masks, copied before the optimizers' steps.

    Attributes:
        gradients: {tensor_fqn: dense gradient} captured since the last `clear`.
        stepped: whether each optimizer has stepped since then; a step that a fused optimizer skipped does not count (a
            bool tensor on its device).
        is_open: masks are open, so `.grad` is dense.
        keep: the coming step feeds an update: keep the captured gradients.
        masked: mask `.grad` before the step; False leaves it dense, so that momentum includes inactive weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}
        self.stepped: list[bool | Tensor] = []
        self.is_open = False
        self.keep = False
        self.masked = True
        self._restored: list[bool] = []  # `stepped` as it was saved, until the next iteration
        self._used: set[str] = set()  # captured gradients that an optimizer has stepped with
        self._reset_versions()

    def _reset_versions(self) -> None:
        self._before_open: dict[str, tuple[Any, Version]] = {}  # gradients from before masks were opened
        self._before_closure: dict[str, tuple[Tensor | None, Version]] = {}  # gradients when a closure was called

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Register the hooks on these optimizers instead of the present ones."""
        self.check_restorable(self._restored, optimizers)
        super().attach(optimizers)
        self.stepped = list(self._restored) if any(self._restored) else [False] * len(self.optimizers)

    def _register(self) -> None:
        super()._register()
        self._handles += [o.register_step_post_hook(self._after) for o in self.optimizers]

    def detach(self) -> None:
        """Remove the hooks."""
        super().detach()
        self.stepped = []

    def watch(self, groups: Sequence[TensorGroup], model: nn.Module | None) -> None:
        """Work on these groups of a model, whose masks are new and closed."""
        super().watch(groups, model)
        self.is_open = False

    def restore(self, gradients: Mapping[str, Tensor], stepped: Sequence[bool]) -> None:
        """Continue in the middle of an iteration, with optimizers that are attached now or later in this iteration."""
        self.check_restorable(stepped, self.optimizers)
        if self.optimizers:
            self.stepped = list(stepped) if any(stepped) else [False] * len(self.optimizers)
        self.gradients, self._restored, self._used = dict(gradients), list(stepped), set()

    def check_restorable(self, stepped: Sequence[bool], optimizers: Sequence[Optimizer]) -> None:
        """Raise if `stepped` is from the middle of an iteration with another number of optimizers, if there are any."""
        if any(stepped) and optimizers and len(stepped) != len(optimizers):
            raise SparsityError(
                f"the loaded state was saved between the steps of {len(stepped)} optimizers and the sparsifier's step, "
                f"and {len(optimizers)} are attached; attach as many, or load a state saved after the sparsifier's step"
            )

    def restorable(self) -> list[bool]:
        """`stepped` for `restore`: of the attached optimizers, or as it was restored until there are any."""
        return [bool(s) for s in (self.stepped if self.optimizers else self._restored)]

    def shard_like_weights(self) -> None:
        """Shard captured gradients like their weights, which may have been sharded since `restore`."""
        weights = {g["tensor_fqn"]: original(g) for g in self.groups}
        self.gradients = {name: placed_like(g, weights[name]) for name, g in self.gradients.items()}

    def set_open(self, is_open: bool, *, keep: bool, masked: bool) -> None:
        """Open or close every mask for the coming iteration; free where that changes nothing."""
        self.keep, self.masked = keep, masked
        if is_open == self.is_open:
            return
        if is_open:
            found = [(g["tensor_fqn"], original(g).grad) for g in self.groups]
            self._before_open = {n: (weakref.ref(g), _version(g)) for n, g in found if g is not None}
        for group in self.groups:
            find_dynamic(group["module"], group["tensor_name"]).set_open(is_open)
        self.is_open = is_open

    def clear(self) -> None:
        """Drop what was captured; a new iteration begins."""
        self.gradients, self._restored, self._used = {}, [], set()
        self.stepped = [False] * len(self.optimizers)

    @torch.no_grad()
    def take(self, optimizer: Optimizer | None = None) -> None:
        """Capture dense gradients and mask `.grad`, of one optimizer's parameters or all; before clipping.

        Calling it again adds what was accumulated in between.
        """
        for name, parameter, mask in self._open_gradients(optimizer):
            grad, mask_here = local(parameter.grad), local(mask.mask)
            dense, before = grad.clone(), self._captured_of(name, parameter.grad)
            dense = dense if before is None else torch.where(mask_here != 0, dense, before + dense)
            self.gradients[name] = from_local(dense, parameter)
            grad.copy_(select(grad, mask_here))

    def _on_closure(self, optimizer: Optimizer) -> None:
        """What was captured of the gradients that exist now stays valid unless the closure makes new ones."""
        for group in groups_of(optimizer, self.groups, self.model) if self.is_open else ():
            grad = original(group).grad
            self._before_closure[group["tensor_fqn"]] = (grad, None if grad is None else _version(grad))

    @torch.no_grad()
    def _on_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Keep the dense gradients (divided by `scale`), and leave in `.grad` what the optimizer is to step with."""
        for name, parameter, mask in self._open_gradients(optimizer):
            grad, mask_here = local(parameter.grad), local(mask.mask)
            kept = mask_here != 0
            dense = grad.clone() if scale is None else grad / scale
            before = self._captured_of(name, parameter.grad)
            if before is not None:  # kept elements may have been clipped since
                dense = torch.where(kept, before, before + dense)
            if self.keep:
                self.gradients[name] = from_local(dense, parameter)
            if self.masked:
                grad.copy_(select(grad, mask_here))
            else:  # one value that is not finite would stay in the momentum for good
                hidden = torch.where(dense.isfinite(), dense, 0)
                grad.copy_(torch.where(kept, grad, hidden if scale is None else hidden * scale))

    def _open_gradients(self, optimizer: Optimizer | None) -> list[tuple[str, Any, DynamicMask]]:
        """(name, parameter, mask) of what has a gradient while masks are open."""
        if not self.is_open:
            return []
        found = [(g, original(g)) for g in groups_of(optimizer, self.groups, self.model)]
        for group, parameter in found:
            self._refuse_earlier(group["tensor_fqn"], parameter.grad)
        return [
            (g["tensor_fqn"], p, find_dynamic(g["module"], g["tensor_name"]))
            for g, p in found
            if placed_gradient(p) is not None
        ]

    def _refuse_earlier(self, name: str, grad: Tensor | None) -> None:
        """A gradient from before masks were opened is zero for dropped weights, so growth must not use it."""
        made, version = self._before_open.get(name, (None, None))
        if grad is not None and made is not None and made() is grad and _version(grad) == version:
            raise SparsityError(
                f"{name}: its gradient was made before the masks were opened for the coming update. Call "
                "sparsifier.step() after optimizer.step(), and backward before the next one."
            )

    def _captured_of(self, name: str, grad: Tensor) -> Tensor | None:
        """What was captured of the gradient that is there now, on this rank; None if the gradient is a new one."""
        seen = self._before_closure.pop(name, None)
        is_new = seen is not None and (seen[0] is not grad or seen[1] != _version(grad))
        if is_new or name in self._used:
            self._used.discard(name)
            return None
        return local(self.gradients[name]) if name in self.gradients else None

    def momenta(self) -> dict[str, Tensor | None]:
        """{tensor_fqn: what its optimizer keeps as momentum, if anything yet}."""
        return {g["tensor_fqn"]: momentum_of(self.optimizers, original(g)) for g in self.groups}

    def is_ready(self, needs_gradient: bool, momenta: Mapping[str, Tensor | None]) -> bool | Tensor:
        """Whether every optimizer has stepped and all that an update reads exists and is finite, on every rank.

        A tensor of one number where it depends on tensors: reading it waits for a device.
        """
        found = [*self.gradients.values(), *momenta.values()]
        exists = not needs_gradient or all(g["tensor_fqn"] in self.gradients for g in self.groups)
        is_ready: bool | Tensor = (
            exists and not any(t is None for t in found) and all(s is not False for s in self.stepped)
        )
        if is_ready:
            is_ready = _all_true([s for s in self.stepped if isinstance(s, Tensor)] + _are_finite(map(local, found)))
        return all_agree(is_ready, map(original, self.groups))

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._before_closure = {}
        if self.is_open:  # another step in this iteration has another gradient
            self._used.update(g["tensor_fqn"] for g in groups_of(optimizer, self.groups, self.model))
        skipped = getattr(optimizer, "found_inf", None) if self.keep else None
        at = next(k for k, o in enumerate(self.optimizers) if o is optimizer)
        self.stepped[at] = skipped is None or ~(skipped > 0)  # reading it would wait for the device

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_before_open", "_before_closure")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy has the copied optimizers, and hooks of its own on them."""
        super().__setstate__(state)
        self._reset_versions()


def _version(grad: Tensor) -> Version:
    """Changes when a gradient is changed in place, also through what this rank holds of it."""
    return grad._version, local(grad)._version


def _are_finite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Whether all elements are finite: a bool tensor of no dimension for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for t in tensors:
        if t.numel():
            by_device.setdefault(t.device, []).append(t)
    return [get_total_norm(found, math.inf).isfinite() for found in by_device.values()]


def _all_true(flags: Sequence[Tensor]) -> bool | Tensor:
    return torch.stack([f.reshape(()).to(flags[0].device, non_blocking=True) for f in flags]).all() if flags else True
