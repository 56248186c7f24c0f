"""The diagonal D by which an optimizer scales its steps, `w - D^-1 g`: the metric of a proximal step after it.

A diagonal is a tensor of the parameter's shape, or a number where all elements have the same one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import SparsityError, is_number

Diagonal = Tensor | float
Conditioner = Callable[[Optimizer, nn.Parameter], Diagonal] | str | None


def check_conditioner(given: object, where: str = "") -> None:
    """Raise unless a conditioner is "auto", a function or None."""
    if given not in ("auto", None) and not callable(given):
        raise SparsityError(
            f"{where}conditioner must be 'auto', None or a function (optimizer, parameter) -> diagonal, got {given!r}"
        )


def check_optimizer(optimizer: Optimizer, conditioner: Conditioner, name: str) -> None:
    """Raise where `conditioner="auto"` knows no diagonal of this optimizer."""
    if conditioner == "auto" and _rule_of(optimizer) is None:
        raise SparsityError(
            f"{name}: {type(optimizer).__name__} has no diagonal that is known here (SGD, Adam, AdamW, RMSprop and "
            "Adagrad have). Use conditioner=None for the Euclidean step, or give a function (optimizer, parameter) -> "
            "diagonal."
        )


def diagonal_of(
    optimizer: Optimizer, parameter: nn.Parameter, options: Mapping[str, Any], conditioner: Conditioner, name: str
) -> Diagonal | None:
    """The diagonal of a parameter now; None where its step changes nothing: no state yet, or a learning rate of 0.

    Args:
        optimizer, options: what trains the parameter, and its `param_groups` entry.
        parameter: of any floating dtype.
        conditioner: "auto", a function, or None for `1 / lr`.
        name: opening words of error messages.
    """
    if callable(conditioner):
        return _checked(conditioner(optimizer, parameter), parameter, name)
    if "lr" not in options:
        raise SparsityError(f"{name}: {type(optimizer).__name__} has no learning rate; give a function as conditioner")
    rate = float(options["lr"])
    if rate == 0:
        return None
    if conditioner is None:
        return 1 / rate
    check_optimizer(optimizer, conditioner, name)
    rule = _rule_of(optimizer)
    assert rule is not None
    return rule(optimizer.state.get(parameter, {}), options, rate)


def _rule_of(optimizer: Optimizer) -> Callable[..., Diagonal | None] | None:
    return next((rule for kind, rule in _RULES.items() if isinstance(optimizer, kind)), None)


def _checked(found: object, parameter: Tensor, name: str) -> Diagonal:
    """What a user's function returned; raises unless it is positive and finite, and a number or of the shape."""
    if is_number(found) and 0 < float(found) < float("inf"):
        return float(found)
    if not isinstance(found, Tensor) or found.shape != parameter.shape or found.is_complex():
        got = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise SparsityError(
            f"{name}: conditioner must return a positive number, or a real tensor of the parameter's shape "
            f"{tuple(parameter.shape)}, got {got}"
        )
    if not bool(((found > 0) & found.isfinite()).all()):
        raise SparsityError(f"{name}: conditioner must return positive, finite values")
    return found.detach()


def _sgd(state: Mapping[str, Any], options: Mapping[str, Any], rate: float) -> Diagonal:
    return 1 / rate


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


_o = torch.optim
_RULES: dict[type[Optimizer], Callable[..., Diagonal | None]] = {
    _o.SGD: _sgd,
    _o.Adam: _adam,
    _o.AdamW: _adam,
    _o.RMSprop: _rmsprop,
    _o.Adagrad: _adagrad,
}
