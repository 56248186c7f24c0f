"""Optimizers of sparsified parameters: which one trains what, the state that it keeps, and how often it has stepped.

State is read and zeroed as tensors of the parameter's shape, whatever the optimizer's class. The diagonal D by which
an optimizer scales its steps, `w - D^-1 g`, is the metric of a proximal step after it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..distributed import from_local, local, placed_like, refuse_gathered
from ..errors import SparsityError, is_number
from ..masking import find_mask
from ..models.names import parameter_of
from .config import TensorGroup

#: names that optimizers give to a running mean or sum of squared gradients
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
#: options that only optimizers with such a mean or sum have: Adam's, RMSprop's, Adadelta's, Adagrad's
_SQUARING = ("betas", "centered", "rho", "lr_decay")
#: their step changes an element by its own gradient, state and value alone, so zeros stay zeros; others may mix them
ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.Adagrad, optim.ASGD, optim.RMSprop, optim.Rprop),
)


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """Return the torch optimizer inside the wrappers of trainers."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise SparsityError(f"optimizer must be a torch optimizer or several, got {type(optimizer).__name__}")
    return optimizer


def unwrap_optimizers(optimizers: object) -> list[Optimizer]:
    """Return one optimizer, or a sequence of them, as a list without wrappers."""
    unwrapped = [unwrap_optimizer(o) for o in (optimizers if isinstance(optimizers, Sequence) else [optimizers])]
    if not unwrapped:
        raise SparsityError("attach: no optimizer was given; pass the optimizer that trains the model")
    return unwrapped


def options_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any] | None:
    """Return the `param_groups` entry that a parameter is in, or None."""
    return next((g for g in optimizer.param_groups if id(parameter) in map(id, g["params"])), None)


def trainer_of(
    optimizers: Sequence[Optimizer],
    parameter: Tensor,
    name: str,
    advice: str = "Give its optimizer, or leave the tensor out of the config.",
) -> int:
    """Return the index of the one optimizer that trains a parameter; raise if there is none, or several."""
    trainers = [k for k, o in enumerate(optimizers) if options_of(o, parameter) is not None]
    if len(trainers) != 1:
        raise SparsityError(
            f"{name}: exactly one optimizer must train it, but {len(trainers)} of the {len(optimizers)} given do. "
            f"{advice}"
        )
    return trainers[0]


def original(group: TensorGroup) -> Tensor:
    """Return the parameter under a group's mask; raise if a module around the model has gathered it (FSDP2)."""
    parameter = parameter_of(group["module"], group["tensor_name"])
    if (mask := find_mask(group["module"], group["tensor_name"])) is not None:
        refuse_gathered(group["tensor_fqn"], parameter, mask.mask)
    return parameter


def groups_trained_by(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """Return the groups whose parameters these optimizers train."""
    trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    return [g for g in groups if id(original(g)) in trained]


# momentum, second moments, and state of weights that are dropped or grow


def check_state(optimizer: Optimizer, parameter: Tensor, name: str, *, momentum: bool, squares: bool) -> None:
    """Raise unless an optimizer keeps, or will keep, the momentum or the second moments of its parameter."""
    kind, options = type(optimizer).__name__, options_of(optimizer, parameter) or {}
    if (momentum or squares) and _state_owner(optimizer) is not optimizer:
        raise SparsityError(
            f"{name}: its optimizer ({kind}) keeps the state of a parameter on one rank alone, and all ranks would "
            "read it. Use fully_shard, or criteria without momentum and state_init='zero'."
        )
    has_momentum = "betas" in options or options.get("momentum") or momentum_of([optimizer], parameter) is not None
    if momentum and not has_momentum:
        raise SparsityError(
            f"{name}: its optimizer ({kind}) keeps no momentum. Use SGD with momentum > 0 or Adam, or criteria "
            "that need none."
        )
    if squares and not any(k in options for k in _SQUARING):
        second_moments([optimizer], parameter, name)
    refuse_closed_state([optimizer], parameter, name)


def refuse_closed_state(optimizers: Sequence[Optimizer], parameter: Tensor, name: str) -> None:
    """Raise where an optimizer keeps state of a parameter as codes that nothing else can read."""
    for tensor in _state_of(optimizers, parameter):
        try:
            is_open = dequantized(local(tensor)).dtype not in (torch.uint8, torch.int8)
        except (NotImplementedError, RuntimeError):
            is_open = False
        if not is_open:
            raise SparsityError(
                f"{name}: its optimizer keeps state as {type(local(tensor)).__name__} of {tensor.dtype}, which cannot "
                "be set to zero for dropped weights. Use an optimizer of torch or torchao, or ScopeSparsifier."
            )


def momentum_of(optimizers: Sequence[Optimizer], parameter: Tensor) -> Tensor | None:
    """Return SGD's momentum buffer, or Adam's m / (sqrt(v) + eps), of the parameter's shape; None before a step."""
    for optimizer in optimizers:
        tensors = {k: t for k, t in optimizer.state.get(parameter, {}).items() if isinstance(t, Tensor)}
        state = {k: from_local(dequantized(local(t)), t) for k, t in tensors.items()}
        if "exp_avg" in state:
            eps = (options_of(optimizer, parameter) or {}).get("eps", 1e-8)
            return state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps) if "exp_avg_sq" in state else state["exp_avg"]
        if "momentum_buffer" in state:
            return state["momentum_buffer"]
    return None


def second_moments(optimizers: Sequence[Optimizer], parameter: Tensor, name: str) -> list[Tensor]:
    """Return the running squares of a parameter's gradient; raise if the optimizer keeps none."""
    states = [o.state.get(parameter, {}) for o in optimizers]
    moments = [s[k] for s in states for k in SECOND_MOMENTS if isinstance(s.get(k), Tensor)]
    if not moments:
        raise SparsityError(
            f"{name}: state_init='grad' sets second moments, but its optimizer keeps none "
            f"({', '.join(SECOND_MOMENTS)}). Use state_init='zero'."
        )
    return moments


def reset_state(optimizers: Sequence[Optimizer], parameter: Tensor, changed: Tensor) -> None:
    """Zero every state tensor of the parameter's shape where `changed` (bool) is True, in place; any optimizer."""
    for tensor in _state_of(optimizers, parameter):
        here = local(tensor)
        values = dequantized(here).masked_fill_(local(placed_like(changed, tensor)).to(tensor.device), 0)
        if values is not here:
            here.copy_(values)  # quantized again


def dequantized(state: Tensor) -> Tensor:
    """Return a state tensor as it is, or the values of a quantized one, as torchao's optimizers keep them."""
    return state.dequantize() if hasattr(state, "__tensor_flatten__") else state


def _state_of(optimizers: Sequence[Optimizer], parameter: Tensor) -> list[Tensor]:
    """The state tensors of a parameter that are of its shape."""
    leaves = tree_leaves([_state_owner(o).state.get(parameter, {}) for o in optimizers])
    return [t for t in leaves if isinstance(t, Tensor) and t.shape == parameter.shape]


def _state_owner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state: inside `ZeroRedundancyOptimizer` one for the parameters of this rank."""
    return getattr(optimizer, "optim", optimizer)


# the diagonal of an optimizer's step

Diagonal = Tensor | float  # of the parameter's shape, or a number where all elements have the same one
Conditioner = Callable[[Optimizer, nn.Parameter], Diagonal] | str | None


def check_optimizer(optimizer: Optimizer, conditioner: Conditioner, name: str) -> None:
    """Raise where `conditioner="auto"` knows no diagonal of this optimizer."""
    if conditioner == "auto" and not isinstance(optimizer, tuple(_DIAGONALS)):
        raise SparsityError(
            f"{name}: {type(optimizer).__name__} has no diagonal that is known here (SGD, Adam, AdamW, RMSprop and "
            "Adagrad have). Use conditioner=None for the Euclidean step, or give a function (optimizer, parameter) -> "
            "diagonal."
        )


def diagonal_of(optimizer: Optimizer, parameter: nn.Parameter, conditioner: Conditioner, name: str) -> Diagonal | None:
    """Return the diagonal of a parameter now; None where its step changes nothing (no state, a learning rate of 0)."""
    if callable(conditioner):
        return _checked_diagonal(conditioner(optimizer, parameter), parameter, name)
    options = options_of(optimizer, parameter) or {}
    if "lr" not in options:
        raise SparsityError(f"{name}: {type(optimizer).__name__} has no learning rate; give a function as conditioner")
    rate = float(options["lr"])
    if rate == 0:
        return None
    if conditioner is None:
        return 1 / rate
    check_optimizer(optimizer, conditioner, name)
    diagonal = next(function for kind, function in _DIAGONALS.items() if isinstance(optimizer, kind))
    return diagonal(optimizer.state.get(parameter, {}), options, rate)


def _checked_diagonal(diagonal: object, parameter: Tensor, name: str) -> Diagonal:
    """What a user's function returned; raises unless it is positive and finite, and a number or of the shape."""
    if is_number(diagonal) and 0 < float(diagonal) < float("inf"):
        return float(diagonal)
    if not isinstance(diagonal, Tensor) or diagonal.shape != parameter.shape or diagonal.is_complex():
        got = f"{tuple(diagonal.shape)} of {diagonal.dtype}" if isinstance(diagonal, Tensor) else repr(diagonal)
        raise SparsityError(
            f"{name}: conditioner must return a positive number, or a real tensor of the parameter's shape "
            f"{tuple(parameter.shape)}, got {got}"
        )
    if not bool(((diagonal > 0) & diagonal.isfinite()).all()):
        raise SparsityError(f"{name}: conditioner must return positive, finite values")
    return diagonal.detach()


def _adam(state: Mapping[str, Any], options: Mapping[str, Any], rate: float) -> Diagonal | None:
    """`(sqrt(v / (1 - beta2^t)) + eps) / lr`, of the largest v with amsgrad."""
    if "exp_avg_sq" not in state:
        return None
    squares = state["max_exp_avg_sq" if options.get("amsgrad") else "exp_avg_sq"]
    correction = 1 - float(options["betas"][1]) ** float(state["step"])
    return _wide(squares).div(correction).sqrt_().add_(options["eps"]).div_(rate)


def _rmsprop(state: Mapping[str, Any], options: Mapping[str, Any], rate: float) -> Diagonal | None:
    """`(sqrt(v) + eps) / lr`, of the variance where it is centered."""
    if "square_avg" not in state:
        return None
    squares = _wide(state["square_avg"])
    squares = squares - _wide(state["grad_avg"]).square() if options.get("centered") else squares
    return squares.clamp(min=0).sqrt_().add_(options["eps"]).div_(rate)


def _adagrad(state: Mapping[str, Any], options: Mapping[str, Any], rate: float) -> Diagonal | None:
    """`(sqrt(sum) + eps) / lr` with the learning rate as it has decayed."""
    if "sum" not in state or float(state["step"]) < 1:
        return None
    decayed = rate / (1 + (float(state["step"]) - 1) * options["lr_decay"])
    return _wide(state["sum"]).sqrt().add_(options["eps"]).div_(decayed)


def _wide(t: Tensor) -> Tensor:
    return t.detach() if t.dtype == torch.float64 else t.detach().float()


_DIAGONALS: dict[type[Optimizer], Callable[..., Diagonal | None]] = {
    optim.SGD: lambda state, options, rate: 1 / rate,
    optim.Adam: _adam,  # and AdamW, which is derived from it
    optim.RMSprop: _rmsprop,
    optim.Adagrad: _adagrad,
}


class MovedParameters:
    """Which parameters optimizers have moved: with a gradient, and in a step that gradient scaling did not skip."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self._moved: set[Tensor] = set()  # since they were used last
        self._restored: set[str] = set()  # names of those that had been moved when the state was saved
        self._versions: dict[str, int] = {}  # of parameters when they were used last
        self._called = False  # whether an optimizer was called since then
        self._ready: set[Tensor] = set()  # parameters that had gradients before the step
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch these optimizers instead of the present ones."""
        for handle in self._handles:
            handle.remove()
        self.optimizers, self._moved, self._versions = list(optimizers), set(), {}
        self._watch()

    def stepped(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those whose optimizer has moved them since their last `use`."""
        for name, p in parameters.items() if self.optimizers else ():
            trainer_of(self.optimizers, p, name)  # raises an error unless one of them trains it
        return [n for n, p in parameters.items() if p in self._moved or n in self._restored]

    def use(self, parameters: Mapping[str, Tensor]) -> None:
        """Note that the steps up to now have been considered for these."""
        self._moved -= {*parameters.values()}
        self._restored -= parameters.keys()
        self._versions |= {n: p._version for n, p in parameters.items()}
        self._called = False

    def changed_by_others(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those that were written since their last `use`, if no optimizer was called."""
        versions = {} if self._called else self._versions
        return [n for n, p in parameters.items() if versions.get(n, p._version) != p._version]

    def restore(self, stepped: Iterable[str]) -> None:
        """Begin with the result that `stepped` had when it was saved."""
        self._moved, self._restored, self._versions = set(), {*stepped}, {}

    def _watch(self) -> None:
        self._handles = [o.register_step_pre_hook(self._before) for o in self.optimizers]
        self._handles += [o.register_step_post_hook(self._after) for o in self.optimizers]

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """A step that frees gradients had them before; one with a closure has them after."""
        self._ready = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        ready = self._ready
        self._before(optimizer, args, kwargs)
        self._called = True
        skipped = getattr(optimizer, "found_inf", None)  # set by GradScaler where the optimizer itself skips
        if skipped is None or not bool(skipped > 0):
            self._moved |= ready | self._ready
        self._ready = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**{k: v for k, v in self.__dict__.items() if k != "_handles"}, "_versions": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Continue as a copy, with hooks of its own on the copied optimizers."""
        self.__dict__.update(state)
        self._watch()
