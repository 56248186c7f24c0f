"""Taking dense gradients aside: hooks around an optimizer's step, for the iterations that feed an update.

Knows optimizers, parameters and dynamic masks; nothing of updates. While masks are open `.grad` is dense. Before the
optimizer looks at it, the dense gradient is copied aside and `.grad` is masked, so the step is that of closed masks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import Group
from ..errors import SparsityError
from ..masking import find_mask
from ..select import select
from .masking import find_dynamic
from .optimizer_state import holds, momentum_of

__all__ = ["GradientTap", "check_optimizers", "original", "training"]


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
        self.groups: Sequence[Group] = ()
        self.gradients: dict[str, Tensor] = {}
        self.stepped: list[bool] = []
        self.is_open = False
        self.keep = False
        self.masked = True
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Put hooks on these optimizers instead of those before."""
        self.detach()
        self.optimizers = [_plain(o) for o in optimizers]
        self.stepped = [False] * len(self.optimizers)
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.optimizers, self.stepped = [], [], []

    def watch(self, groups: Sequence[Group]) -> None:
        """Look after these groups, whose masks are new and closed."""
        self.groups, self.is_open = groups, False

    def set_gates(self, is_open: bool, *, keep: bool, masked: bool) -> None:
        """Open or close every mask for the coming iteration; costs nothing where that changes nothing."""
        self.keep, self.masked = keep, masked
        if is_open != self.is_open:
            self.is_open = is_open
            for group in self.groups:
                find_dynamic(group["module"], group["tensor_name"]).set_open(is_open)

    def clear(self) -> None:
        """Forget what was taken; a new iteration begins."""
        self.gradients = {}
        self.stepped = [False] * len(self.optimizers)

    @torch.no_grad()
    def take(self, optimizer: Optimizer | None = None, scale: Tensor | None = None) -> None:
        """Copy dense gradients aside and mask `.grad`, of one optimizer's parameters or all.

        Taking twice adds what came in between. What the optimizer's own step then finds is masked already.
        """
        trained = _trained(optimizer)
        for group in self.groups if self.is_open else ():
            parameter = original(group)
            if parameter.grad is None or (optimizer is not None and id(parameter) not in trained):
                continue
            mask = find_dynamic(group["module"], group["tensor_name"]).mask
            before = self.gradients.get(group["tensor_fqn"])
            if self.keep or optimizer is None or before is not None:
                fresh = parameter.grad.clone() if scale is None else parameter.grad / scale
                fresh = fresh if before is None else torch.where(mask != 0, before, before + fresh)
                self.gradients[group["tensor_fqn"]] = fresh
            if self.masked or optimizer is None:
                parameter.grad.copy_(select(parameter.grad, mask))
            else:  # what was masked for clipping comes back; one bad number would stay in the momentum for good
                dense = parameter.grad if before is None else fresh if scale is None else fresh * scale
                hidden = torch.where(dense.isfinite(), dense, 0)
                parameter.grad.copy_(torch.where(mask != 0, parameter.grad, hidden))

    def momenta(self) -> dict[str, Tensor | None]:
        """{tensor_fqn: what its optimizer keeps as momentum, if anything yet}."""
        return {g["tensor_fqn"]: momentum_of(self.optimizers, original(g)) for g in self.groups}

    def is_ready(self, needs_gradient: bool, momenta: Mapping[str, Tensor | None]) -> bool:
        """Whether every optimizer has stepped and all that an update looks at is there and finite."""
        names = [g["tensor_fqn"] for g in self.groups]
        if not all(self.stepped) or (needs_gradient and any(n not in self.gradients for n in names)):
            return False
        found = [*self.gradients.values(), *momenta.values()]
        return all(t is not None and all(bool(x.isfinite()) for x in t.aminmax()) for t in found)

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        closure, rest = _closure(args, kwargs)
        if not self.is_open:
            return None
        if closure is not None:  # the gradients are not there yet: take them when the closure has made them
            again = self._taking(optimizer, closure)
            return (args[0], again, *rest) if len(args) > 1 else args, _with(kwargs, again)
        self.take(optimizer, getattr(optimizer, "grad_scale", None))
        return None

    def _taking(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def taken() -> Any:
            trained = _trained(optimizer)
            mine = {g["tensor_fqn"] for g in self.groups if id(original(g)) in trained}
            self.gradients = {fqn: g for fqn, g in self.gradients.items() if fqn not in mine}
            with torch.enable_grad():
                loss = closure()
            self.take(optimizer)
            return loss

        return taken

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        skipped = getattr(optimizer, "found_inf", None)
        skipped = skipped if self.keep else None  # looking waits for the device, so look only where it matters
        at = next(k for k, o in enumerate(self.optimizers) if o is optimizer)
        self.stepped[at] = skipped is None or not bool(torch.as_tensor(skipped) > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_handles"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy: with the copied optimizers, and hooks of its own on them."""
        self.__dict__.update(state)
        self._handles = []
        stepped = list(self.stepped)
        self.attach(self.optimizers)
        self.stepped = stepped


def training(optimizers: Sequence[Optimizer], groups: Sequence[Group]) -> list[Optimizer]:
    """Those of the optimizers that train some of the groups' parameters."""
    wanted = {id(original(g)) for g in groups}
    return [o for o in optimizers if wanted & _trained(_plain(o))]


def _trained(optimizer: Optimizer | None) -> set[int]:
    return set() if optimizer is None else {id(p) for g in optimizer.param_groups for p in g["params"]}


def original(group: Group) -> Tensor:
    """The parameter under a group's mask."""
    module, name = group["module"], group["tensor_name"]
    if find_mask(module, name) is None:
        return module._parameters[name]
    return module.parametrizations[name].original


def _plain(optimizer: object) -> Optimizer:
    """The optimizer itself, out of the wrappers that trainers put around it."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise SparsityError(f"optimizer must be a torch optimizer or several, got {type(optimizer).__name__}")
    return optimizer


def _closure(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Callable[[], Any] | None, tuple]:
    if len(args) > 1:
        return args[1], args[2:]
    return kwargs.get("closure"), ()


def _with(kwargs: dict[str, Any], closure: Callable[[], Any]) -> dict[str, Any]:
    return {**kwargs, "closure": closure} if kwargs.get("closure") is not None else kwargs


def check_optimizers(optimizers: Sequence[Optimizer], groups: Sequence[Group], needs_momentum: bool) -> None:
    """Raise unless every sparsified parameter is trained by one of these, and every one of these trains some.

    Args:
        optimizers: as `GradientTap.attach` gets them.
        groups: of a prepared model; before that nothing can be said.
        needs_momentum: a rule looks at momentum, so each must keep one.
    """
    plain = [_plain(o) for o in optimizers]
    held: set[int] = set()
    for group in groups:
        parameter = original(group)
        found = [(k, holds(o, parameter)) for k, o in enumerate(plain)]
        found = [(k, g) for k, g in found if g is not None]
        if len(found) != 1:
            raise SparsityError(
                f"{group['tensor_fqn']}: one optimizer must train it, but {len(found)} of the {len(plain)} given do. "
                "Give its optimizer, or leave the tensor out of the config."
            )
        held.add(found[0][0])
        options = found[0][1] or {}
        if needs_momentum and "betas" not in options and options.get("momentum", 1) == 0:
            raise SparsityError(
                f"{group['tensor_fqn']}: its optimizer keeps no momentum. Use SGD with momentum > 0 or an Adam, or "
                "rules that need none."
            )
    if groups and len(held) < len(plain):
        raise SparsityError(
            "an optimizer was given that trains none of the sparsified parameters, so no update could wait for its "
            "step; leave it out"
        )
