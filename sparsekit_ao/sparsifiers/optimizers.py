"""Optimizers inside the wrappers of trainers, which of them trains a parameter, and how many steps each has taken."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import SparsityError


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """The torch optimizer inside of the wrappers of trainers."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise SparsityError(f"optimizer must be a torch optimizer or several, got {type(optimizer).__name__}")
    return optimizer


def unwrap_optimizers(given: object) -> list[Optimizer]:
    """One optimizer, or a sequence of them, as a list without wrappers."""
    found = [unwrap_optimizer(o) for o in (given if isinstance(given, Sequence) else [given])]
    if not found:
        raise SparsityError("attach: no optimizer given")
    return found


def options_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any] | None:
    """The `param_groups` entry that a parameter is in, or None."""
    return next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)


class StepCounts:
    """Counts the steps of optimizers by which each parameter was moved.

    A step that gradient scaling skipped does not count, nor one for which a parameter had no gradient.

    Attributes:
        optimizers: those that are counted.
        counts: steps of each since it was attached.
        moved: {parameter: the step of its optimizer that moved it last}.
        used: {name of a parameter: the last step that was considered}; -1 where a loaded state waits for one.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.counts: list[int] = []
        self.moved: dict[Tensor, int] = {}
        self.used: dict[str, int] = {}
        self._ready: list[list[Tensor]] = []  # parameters of each optimizer that had gradients before its step
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of these optimizers instead of the present ones."""
        for handle in self._handles:
            handle.remove()
        self.optimizers = list(optimizers)
        self._begin()
        self._watch()

    def trainer_of(self, parameter: Tensor, name: str) -> int:
        """The index of the one optimizer that trains a parameter; an error if there is none, or several."""
        found = [k for k, o in enumerate(self.optimizers) if options_of(o, parameter) is not None]
        if len(found) != 1:
            raise SparsityError(
                f"{name}: one optimizer must train it, but {len(found)} of the {len(self.optimizers)} given do. Give "
                "its optimizer, or leave the tensor out of the config."
            )
        return found[0]

    def stepped(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Names of those whose optimizer has moved them since their last `use`."""
        return [n for n, p in parameters.items() if self._last(p, n) > self.used.get(n, 0)]

    def use(self, parameters: Mapping[str, Tensor]) -> None:
        """Note that the steps up to now have been considered for these."""
        self.used |= {n: self._last(p, n) for n, p in parameters.items()}

    def restore(self, stepped: Iterable[str]) -> None:
        """Begin with the result that `stepped` had when it was saved."""
        self._begin()
        self.used = dict.fromkeys(stepped, -1)

    def restored(self) -> list[str]:
        """Names that were restored and not used since."""
        return [n for n, count in self.used.items() if count < 0]

    def _begin(self) -> None:
        self.counts, self.moved, self._ready = [0] * len(self.optimizers), {}, [[] for _ in self.optimizers]

    def _watch(self) -> None:
        self._handles = [o.register_step_pre_hook(self._before) for o in self.optimizers]
        self._handles += [o.register_step_post_hook(self._after) for o in self.optimizers]

    def _last(self, parameter: Tensor, name: str) -> int:
        """The step that moved a parameter last; 0 if none has."""
        if self.optimizers:
            self.trainer_of(parameter, name)  # raises unless it is one
        return self.moved.get(parameter, 0)

    def _index(self, optimizer: Optimizer) -> int:
        return next(k for k, o in enumerate(self.optimizers) if o is optimizer)

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._ready[self._index(optimizer)] = _with_gradients(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """A step that frees gradients had them before; one with a closure has them after."""
        skipped = getattr(optimizer, "found_inf", None)  # set by GradScaler where the optimizer itself skips
        if skipped is None or not bool(skipped > 0):
            at = self._index(optimizer)
            self.counts[at] += 1
            self.moved |= dict.fromkeys([*self._ready[at], *_with_gradients(optimizer)], self.counts[at])

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_handles"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy has the copied optimizers, and hooks of its own on them."""
        self.__dict__.update(state)
        self._watch()


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
