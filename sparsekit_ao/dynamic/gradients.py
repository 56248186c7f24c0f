"""Taking dense gradients aside: hooks around an optimizer's step, for the iterations that feed an update.

Knows optimizers, parameters and dynamic masks; nothing of updates. While masks are open `.grad` is dense. Before the
optimizer looks at it, the dense gradient is copied aside and `.grad` is masked, so the step is that of closed masks.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import all_agree, from_local, local, placed_like
from ..errors import SparsityError
from ..masking import select
from ..sparsifiers.config import TensorGroup
from .hooks import after_closure
from .masking import DynamicMask, find_dynamic
from .optimizer_state import momentum_of
from .trained import original, placed_gradient, plain_optimizer, trained_now

__all__ = ["GradientTap"]

_NOT_COPIED = ("_handles", "_earlier", "_held")
Version = tuple[int, int] | None


class GradientTap:
    """The hooks of a sparsifier on its optimizers, and what they took.

    Attributes:
        optimizers: those attached.
        gradients: {tensor_fqn: dense gradient} taken since the last `clear`.
        stepped: whether each optimizer has stepped since then; a step that a fused optimizer skipped is none.
        is_open: masks are open, so `.grad` is dense.
        keep: the coming step feeds an update: take gradients aside.
        masked: mask `.grad` before the step; False leaves it dense, so that momentum sees inactive weights too.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.groups: Sequence[TensorGroup] = ()
        self.model: nn.Module | None = None
        self.gradients: dict[str, Tensor] = {}
        self.stepped: list[bool] = []
        self.is_open = False
        self.keep = False
        self.masked = True
        self._restored: list[bool] = []  # `stepped` as it was saved, until the next iteration
        self._used: set[str] = set()  # taken, and stepped with
        self._forget_marks()

    def _forget_marks(self) -> None:
        self._handles: list[Any] = []
        self._earlier: dict[str, tuple[Any, Version]] = {}  # gradients made before masks opened
        self._held: dict[str, tuple[Tensor | None, Version]] = {}  # gradients as a closure found them

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Put hooks on these optimizers instead of those before."""
        plain = [plain_optimizer(o) for o in optimizers]
        self._check_restored(self._restored, len(plain))
        self.detach()
        self.optimizers = plain
        self.stepped = list(self._restored) if any(self._restored) else [False] * len(plain)
        self._put_hooks()

    def _put_hooks(self) -> None:
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.optimizers, self.stepped = [], [], []

    def watch(self, groups: Sequence[TensorGroup], model: nn.Module | None) -> None:
        """Look after these groups of a model, whose masks are new and closed."""
        self.groups, self.model, self.is_open = groups, model, False

    def restore(self, gradients: Mapping[str, Tensor], stepped: Sequence[bool]) -> None:
        """Go on in the middle of an iteration, with the optimizers that are attached, or will be in this iteration."""
        if self.optimizers:
            self._check_restored(stepped, len(self.optimizers))
            self.stepped = list(stepped) if any(stepped) else [False] * len(self.optimizers)
        self.gradients, self._restored, self._used = dict(gradients), list(stepped), set()

    def shard_like(self) -> None:
        """Cut gradients like their weights, which may have been sharded since `restore`."""
        weights = {g["tensor_fqn"]: original(g) for g in self.groups}
        self.gradients = {name: placed_like(g, weights[name]) for name, g in self.gradients.items()}

    def progress(self) -> list[bool]:
        """What `restore` wants as `stepped`: of the attached optimizers, or as it was restored until they are."""
        return list(self.stepped if self.optimizers else self._restored)

    def check_restorable(self, stepped: Sequence[bool]) -> None:
        """Raise what `restore` would."""
        if self.optimizers:
            self._check_restored(stepped, len(self.optimizers))

    @staticmethod
    def _check_restored(stepped: Sequence[bool], count: int) -> None:
        if any(stepped) and len(stepped) != count:
            raise SparsityError(
                f"the loaded state lies between the steps of {len(stepped)} optimizers and the sparsifier's, and "
                f"{count} are attached; attach as many, or take a state that was saved after the sparsifier's step"
            )

    def set_gates(self, is_open: bool, *, keep: bool, masked: bool) -> None:
        """Open or close every mask for the coming iteration; costs nothing where that changes nothing."""
        self.keep, self.masked = keep, masked
        if is_open == self.is_open:
            return
        if is_open:
            found = [(g["tensor_fqn"], original(g).grad) for g in self.groups]
            self._earlier = {n: (weakref.ref(g), _version(g)) for n, g in found if g is not None}
        self.is_open = is_open
        for group in self.groups:
            find_dynamic(group["module"], group["tensor_name"]).set_open(is_open)

    def clear(self) -> None:
        """Forget what was taken; a new iteration begins."""
        self.gradients, self._restored, self._used = {}, [], set()
        self.stepped = [False] * len(self.optimizers)

    @torch.no_grad()
    def take(self, optimizer: Optimizer | None = None) -> None:
        """Copy dense gradients aside and mask `.grad`, of one optimizer's parameters or all; for clipping.

        Taking again adds what came in between.
        """
        for name, parameter, mask in self._with_gradients(optimizer):
            grad, live = local(parameter.grad), local(mask.mask)
            dense, before = grad.clone(), self._before_now(name, parameter.grad)
            dense = dense if before is None else torch.where(live != 0, dense, before + dense)
            self.gradients[name] = from_local(dense, parameter)
            grad.copy_(select(grad, live))

    @torch.no_grad()
    def _hand_over(self, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        """Leave in `.grad` what the optimizer's own step is to see; what it hides is aside."""
        for name, parameter, mask in self._with_gradients(optimizer):
            grad, live = local(parameter.grad), local(mask.mask)
            kept = live != 0
            dense = grad.clone() if scale is None else grad / scale
            before = self._before_now(name, parameter.grad)
            if before is not None:  # kept elements may have been clipped since
                dense = torch.where(kept, before, before + dense)
            if self.keep:
                self.gradients[name] = from_local(dense, parameter)
            if self.masked:
                grad.copy_(select(grad, live))
            else:  # one bad number would stay in the momentum for good
                hidden = torch.where(dense.isfinite(), dense, 0)
                grad.copy_(torch.where(kept, grad, hidden if scale is None else hidden * scale))

    def _with_gradients(self, optimizer: Optimizer | None) -> list[tuple[str, Any, DynamicMask]]:
        """(name, parameter, mask) of what has a gradient while masks are open."""
        if not self.is_open:
            return []
        groups = trained_now(self.model, self.groups, optimizer)
        found = [(g, original(g)) for g in groups]
        for group, parameter in found:
            self._refuse_earlier(group["tensor_fqn"], parameter.grad)
        return [
            (g["tensor_fqn"], p, find_dynamic(g["module"], g["tensor_name"]))
            for g, p in found
            if placed_gradient(p) is not None
        ]

    def _refuse_earlier(self, name: str, grad: Tensor | None) -> None:
        """A gradient from before masks opened has nothing of hidden weights, and growth would take zeros for it."""
        made, version = self._earlier.get(name, (None, None))
        if grad is not None and made is not None and made() is grad and _version(grad) == version:
            raise SparsityError(
                f"{name}: its gradient was made before the masks were opened for the coming update. Call "
                "sparsifier.step() after optimizer.step(), and backward before the next one."
            )

    def _before_now(self, name: str, grad: Tensor) -> Tensor | None:
        """What was taken of the gradient that is there now, on this rank; None if it was made anew since."""
        held = self._held.pop(name, None)
        is_new = held is not None and (held[0] is not grad or held[1] != _version(grad))
        if is_new or name in self._used:
            self._used.discard(name)
            return None
        return local(self.gradients[name]) if name in self.gradients else None

    def momenta(self) -> dict[str, Tensor | None]:
        """{tensor_fqn: what its optimizer keeps as momentum, if anything yet}."""
        return {g["tensor_fqn"]: momentum_of(self.optimizers, original(g)) for g in self.groups}

    def is_ready(self, needs_gradient: bool, momenta: Mapping[str, Tensor | None]) -> bool:
        """Whether every optimizer has stepped and all that an update looks at is there and finite, on every rank."""
        found = [*self.gradients.values(), *momenta.values()]
        is_there = all(self.stepped) and (
            not needs_gradient or all(g["tensor_fqn"] in self.gradients for g in self.groups)
        )
        is_ready = is_there and all(t is not None and _is_finite(local(t)) for t in found)
        return all_agree(is_ready, map(original, self.groups))

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if not self.is_open:
            return None

        def hand_over() -> None:
            self._hand_over(optimizer, getattr(optimizer, "grad_scale", None))

        return after_closure(args, kwargs, hand_over, first=partial(self._hold, optimizer))

    def _hold(self, optimizer: Optimizer) -> None:
        """Look at gradients before a closure: what was taken of them stands, unless the closure makes new ones."""
        for group in trained_now(self.model, self.groups, optimizer):
            grad = original(group).grad
            self._held[group["tensor_fqn"]] = (grad, None if grad is None else _version(grad))

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._held = {}
        if self.is_open:  # stepping again in this iteration is with another gradient
            self._used.update(g["tensor_fqn"] for g in trained_now(self.model, self.groups, optimizer))
        skipped = getattr(optimizer, "found_inf", None)
        skipped = skipped if self.keep else None  # looking waits for the device, so look only where it matters
        at = next(k for k, o in enumerate(self.optimizers) if o is optimizer)
        self.stepped[at] = skipped is None or not bool(torch.as_tensor(skipped) > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy: with the copied optimizers, and hooks of its own on them."""
        self.__dict__.update(state)
        self._forget_marks()
        self._put_hooks()


def _version(grad: Tensor) -> Version:
    """What changes when a gradient is changed in place, be it through what this rank holds of it."""
    return grad._version, local(grad)._version


def _is_finite(t: Tensor) -> bool:
    return t.numel() == 0 or all(bool(x.isfinite()) for x in t.aminmax())
