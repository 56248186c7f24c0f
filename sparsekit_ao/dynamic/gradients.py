"""Hooks on the steps of optimizers: capture dense gradients before a step, or add decay to gradients.

While masks are open, backward computes dense gradients. Before an optimizer reads `.grad`, `GradientCapture` copies
the dense gradient and masks `.grad` (except for momentum), so dropped weights do not move. `DecayHooks` adds the decay
of SR-STE.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import LocalParts, all_agree, local, placed_like, reshard
from ..errors import SparsityError, warn
from ..masking import placed_mask, select
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.optimizer_state import groups_trained_by, momentum_of, original
from .dynamic_mask import mask_of

Snapshot = tuple[Any, int, int] | None  # of a gradient; see `_snapshot`
Snapshots = dict[str, Snapshot]

ORDER = (
    "fully_shard replaces parameters by sharded ones: call prepare, then fully_shard, then make the optimizer, then "
    "sparsifier.attach(optimizer)."
)


class StepHooks(ABC):
    """Hooks on the steps of the attached optimizers, which train parameters of a prepared model."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.groups: Sequence[TensorGroup] = ()
        self.model: nn.Module | None = None
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Register the hooks on these optimizers instead of the present ones."""
        self.detach()
        self.optimizers = list(optimizers)
        self._register()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.optimizers = [], []

    def watch(self, groups: Sequence[TensorGroup], model: nn.Module | None) -> None:
        """Work on these groups of a model from now on."""
        self.groups, self.model = groups, model

    def gradients_of(self, optimizer: Optimizer | None) -> list[tuple[TensorGroup, LocalParts]]:
        """Return the groups that an optimizer trains (None: all) and that have gradients, with this rank's parts."""
        # Masks are sharded by `_trained` and gradients by `LocalParts`: a trainer may shard a model and put new
        # parameters into the old optimizer without calling `attach`, and tensor parallel layers may leave partial sums.
        pairs = [(group, original(group)) for group in self._trained(optimizer)]
        return [(g, LocalParts(p, mask_of(g).mask, has_gradient=True)) for g, p in pairs if p.grad is not None]

    def _trained(self, optimizer: Optimizer | None) -> Sequence[TensorGroup]:
        reshard(self.model)
        groups = self.groups if optimizer is None else groups_trained_by([optimizer], self.groups)
        for group in groups:
            placed_mask(group["module"], group["tensor_name"], group["tensor_fqn"])
        return groups

    def _register(self) -> None:
        self._handles = [o.register_step_pre_hook(self._before) for o in self.optimizers]

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Act on the gradients before a step or, if a closure computes them, after every call of the closure."""
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
        """Hook that runs before the closure of a step is called; it does nothing by default."""

    @abstractmethod
    def _on_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Change the gradients before a step; `scale` is the factor of gradient scaling, or None."""

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_handles"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a copy, and register hooks on its own optimizers."""
        self.__dict__.update(state)
        self._register()


class DecayHooks(StepHooks):
    """Adds `decay * weight` to gradients of dropped weights in the backward mask before a step (arXiv 2102.04010)."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def _on_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        for group, parts in self.gradients_of(optimizer):
            dropped, backward_mask = parts.mask == 0, mask_of(group).backward_mask
            if backward_mask is not None:
                dropped &= local(backward_mask)
            added = torch.where(dropped, parts.weight, 0) * self.decay
            parts.gradient.add_(added if scale is None else added * scale)  # the step divides by it


class GradientState(Enum):
    """The state of a tensor's gradient in this iteration; dynamic/README.md says what changes it."""

    CLOSED = "closed"  # the mask is closed, so `.grad` is the gradient of kept weights, which no update reads
    OPEN = "open"  # `.grad` is dense, and not captured yet
    TAKEN = "taken"  # it was captured and `.grad` was masked; a later backward adds to the captured gradient
    STEPPED = "stepped"  # the optimizer has stepped with it; another gradient in this iteration replaces it


class GradientCapture(StepHooks):
    """Captures dense gradients of open masks before the optimizers' steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}  # dense ones by tensor_fqn, captured since the last `clear`
        # whether captured gradients are kept, because the coming step precedes an update, and whether `.grad` is masked
        # before the step; if not, momentum includes inactive weights
        self.captures, self.masked = False, True
        self._states: dict[str, GradientState] = {}
        self._stepped: list[bool] = []
        self._restored = False  # a saved state says that the optimizers have stepped in this iteration
        self._old: Snapshots = {}  # of gradients from before this iteration, or before masks were opened in it
        self._before_closure: Snapshots = {}  # made when a closure was called, which may make new gradients
        self._warned_of_steps = False

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Register the hooks, and count every optimizer as not yet stepped."""
        super().attach(optimizers)
        self._stepped = [False] * len(self.optimizers)

    def _register(self) -> None:
        super()._register()
        self._handles += [o.register_step_post_hook(self._after) for o in self.optimizers]

    def watch(self, groups: Sequence[TensorGroup], model: nn.Module | None) -> None:
        """Work on these groups, whose masks are new and closed."""
        super().watch(groups, model)
        self._begin_states(is_open=False)

    @property
    def is_open(self) -> bool:
        """Whether masks are open, so that `.grad` is dense; all masks are opened and closed together."""
        return any(state is not GradientState.CLOSED for state in self._states.values())

    @property
    def has_stepped(self) -> bool:
        """Whether every optimizer has stepped since the last `clear`; skipped steps (gradient scaling) do not count."""
        return self._restored or (bool(self._stepped) and all(self._stepped))

    def restore(self, gradients: Mapping[str, Tensor], has_stepped: bool) -> None:
        """Continue in the middle of an iteration, with optimizers that are attached now or later in this iteration."""
        self.gradients, self._restored = dict(gradients), has_stepped
        self._stepped = [False] * len(self.optimizers)
        self._begin_states(self.is_open)

    def shard_like_weights(self) -> None:
        """Shard captured gradients like their weights, which may have been sharded since `restore`."""
        weights = {g["tensor_fqn"]: original(g) for g in self.groups}
        self.gradients = {name: placed_like(g, weights[name]) for name, g in self.gradients.items()}

    def set_open(self, is_open: bool, *, captures: bool, masked: bool) -> None:
        """Open or close every mask for the coming iteration; masks are written only if this changes them."""
        self.captures, self.masked = captures, masked
        if is_open == self.is_open:
            return
        self._note_old_gradients(is_open)
        for group in self.groups:
            mask_of(group).set_open(is_open)
        self._begin_states(is_open)

    def clear(self) -> None:
        """Drop what was captured; a new iteration begins."""
        self.restore({}, has_stepped=False)
        self._note_old_gradients(self.is_open)

    def _note_old_gradients(self, is_open: bool) -> None:
        """Take snapshots of gradients that the coming iteration must not use, if masks are open in it."""
        self._old = {g["tensor_fqn"]: _snapshot(original(g).grad) for g in self.groups} if is_open else {}

    def _begin_states(self, is_open: bool) -> None:
        """Set the state of every gradient from whether masks are open and the gradient is captured."""
        state, captured = GradientState.OPEN if is_open else GradientState.CLOSED, self.gradients if is_open else ()
        names = [g["tensor_fqn"] for g in self.groups]
        self._states = {name: GradientState.TAKEN if name in captured else state for name in names}

    @torch.no_grad()
    def take(self, optimizer: Optimizer | None = None) -> None:
        """Capture dense gradients and mask `.grad` before clipping; a later call adds what has accumulated since."""
        for name, parts, captured in self._open_gradients(optimizer):
            mask, grad = parts.mask, parts.gradient
            dense = grad.clone() if captured is None else torch.where(mask != 0, grad, captured + grad)
            self.gradients[name], self._states[name] = parts.put_back(dense), GradientState.TAKEN
            grad.copy_(select(grad, mask))

    @torch.no_grad()
    def _on_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Keep the dense gradients (divided by `scale`), and leave in `.grad` what the optimizer is to step with."""
        for name, parts, captured in self._open_gradients(optimizer):
            mask, grad = parts.mask, parts.gradient
            dense = grad.clone() if scale is None else grad / scale
            if captured is not None:  # kept elements may have been clipped since
                dense = torch.where(mask != 0, captured, captured + dense)
            self._states[name] = GradientState.TAKEN
            if self.captures:
                self.gradients[name] = parts.put_back(dense)
            if self.masked:
                grad.copy_(select(grad, mask))
            else:  # one value that is not finite would stay in the momentum for good
                finite = torch.where(dense.isfinite(), dense, 0)
                grad.copy_(torch.where(mask != 0, grad, finite if scale is None else finite * scale))

    def _on_closure(self, optimizer: Optimizer) -> None:
        """Take snapshots of the gradients: captured ones stay valid unless the closure makes new ones."""
        for group in self._trained(optimizer) if self.is_open else ():
            self._before_closure[group["tensor_fqn"]] = _snapshot(original(group).grad)

    def _open_gradients(self, optimizer: Optimizer | None) -> Iterator[tuple[str, LocalParts, Tensor | None]]:
        """Yield names, parts, and what was captured (None if `.grad` is a new gradient), while masks are open."""
        for group in self._trained(optimizer) if self.is_open else ():
            name, grad = group["tensor_fqn"], original(group).grad
            if _is_unchanged(grad, self._old.get(name)) and bool(local(grad).any()):
                raise SparsityError(
                    f"{name}: its gradient was made before the last sparsifier.step(), so it may be zero for dropped "
                    "weights, but the coming update reads these. After sparsifier.step(), call backward() before "
                    "optimizer.step(), or take_gradients(optimizer) of the optimizer that steps."
                )
        for group, parts in self.gradients_of(optimizer) if self.is_open else ():
            name, snapshots = group["tensor_fqn"], self._before_closure
            is_same = name not in snapshots or _is_unchanged(parts.parameter.grad, snapshots.pop(name))
            captured = self.gradients.get(name) if is_same and self._states.get(name) is GradientState.TAKEN else None
            yield name, parts, None if captured is None else local(captured)

    def momenta(self) -> dict[str, Tensor | None]:
        """Return {tensor_fqn: the momentum of its optimizer, or None before the first step}."""
        return {g["tensor_fqn"]: momentum_of(self.optimizers, original(g)) for g in self.groups}

    def is_ready(self, needs_gradient: bool, momenta: Mapping[str, Tensor | None]) -> bool:
        """Return whether on every rank all optimizers have stepped, and what an update reads is there and is finite."""
        values = [*self.gradients.values(), *momenta.values()]
        is_ready = self.has_stepped and all(t is not None for t in values)
        is_ready = is_ready and (not needs_gradient or all(g["tensor_fqn"] in self.gradients for g in self.groups))
        is_ready = is_ready and all(bool(local(t).isfinite().all()) for t in values)
        return bool(all_agree(is_ready, map(original, self.groups)))

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._before_closure = {}
        if self.is_open:
            self._states |= dict.fromkeys((g["tensor_fqn"] for g in self._trained(optimizer)), GradientState.STEPPED)
        skipped = getattr(optimizer, "found_inf", None) if self.captures else None
        index = next(k for k, o in enumerate(self.optimizers) if o is optimizer)
        if self._stepped[index] and self.groups and not self._warned_of_steps:
            self._warned_of_steps = True
            warn(
                f"DynamicSparsifier: {type(optimizer).__name__} has taken several steps since the last "
                "sparsifier.step(), which counts iterations, so updates come later than they should; call "
                "sparsifier.step() after each optimizer.step()",
            )
        self._stepped[index] = skipped is None or not bool(skipped > 0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out snapshots too: they describe gradients, which a copy of the model does not have."""
        return {**super().__getstate__(), "_old": {}, "_before_closure": {}}


def _snapshot(grad: Tensor | None) -> Snapshot:
    """Return a weak reference to a gradient and version numbers that any change in place increases."""
    return None if grad is None else (weakref.ref(grad), grad._version, local(grad)._version)


def _is_unchanged(grad: Tensor | None, snapshot: Snapshot) -> bool:
    """Return whether a gradient exists and is the one of the snapshot, with the same values."""
    if grad is None or snapshot is None or snapshot[0]() is not grad:
        return False
    return snapshot[1:] == (grad._version, local(grad)._version)
