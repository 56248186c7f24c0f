"""What an optimizer remembers of weights: read as momentum, and forgotten where weights come and go.

Knows tensors of a parameter's shape in an optimizer's state, whatever the optimizer; no masks' meaning.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import local, placed_like
from ..errors import SparsityError

__all__ = [
    "SECOND_MOMENTS",
    "holds",
    "keeper_of",
    "leaves_zeros",
    "momentum_of",
    "refuse_without_second_moments",
    "reset_state",
    "second_moments",
    "start_second_moments",
]

#: what optimizers call a running mean or sum of squared gradients
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")

#: options that only optimizers with such a mean or sum have: Adam's, RMSprop's, Adadelta's, Adagrad's
_SQUARING = ("betas", "centered", "rho", "lr_decay")

_o = torch.optim
#: their step changes an element by its own gradient, state and value alone, so zeros stay zeros; others may mix them
_BY_ELEMENT = (
    *(_o.SGD, _o.Adam, _o.AdamW, _o.NAdam, _o.RAdam, _o.Adamax),
    *(_o.Adadelta, _o.Adagrad, _o.ASGD, _o.RMSprop, _o.Rprop),
)


def holds(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any] | None:
    """The parameter group that a parameter is in, or None."""
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return group
    return None


def keeper_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state.

    `ZeroRedundancyOptimizer` has one inside, with the parameters that this rank updates and no others.
    """
    inside = getattr(optimizer, "optim", None)
    return inside if isinstance(inside, Optimizer) else optimizer


def momentum_of(optimizers: Sequence[Optimizer], parameter: Tensor) -> Tensor | None:
    """SGD's momentum buffer, or Adam's m / (sqrt(v) + eps), of the parameter's shape; None where there is none yet."""
    for optimizer in optimizers:
        state, group = optimizer.state.get(parameter, {}), holds(optimizer, parameter)
        if isinstance(state.get("exp_avg"), Tensor):
            eps = (group or {}).get("eps", 1e-8)
            return state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps) if "exp_avg_sq" in state else state["exp_avg"]
        if isinstance(state.get("momentum_buffer"), Tensor):
            return state["momentum_buffer"]
    return None


def second_moments(optimizers: Sequence[Optimizer], parameter: Tensor, name: str) -> list[Tensor]:
    """The running squares of a parameter's gradient.

    Raises:
        SparsityError: the optimizer keeps none.
    """
    states = [o.state.get(parameter, {}) for o in optimizers]
    found = [s[k] for s in states for k in SECOND_MOMENTS if isinstance(s.get(k), Tensor)]
    if not found:
        raise SparsityError(_none_squared(name))
    return found


def refuse_without_second_moments(
    optimizer: Optimizer, parameter: Tensor, options: Mapping[str, Any], name: str
) -> None:
    """Raise what `second_moments` will, before the optimizer has made its state."""
    state = optimizer.state.get(parameter, {})
    if not any(k in options for k in _SQUARING) and not any(k in state for k in SECOND_MOMENTS):
        raise SparsityError(_none_squared(name))


def _none_squared(name: str) -> str:
    return (
        f"{name}: state_init='grad' sets second moments, and its optimizer keeps none "
        f"({', '.join(SECOND_MOMENTS)}). Use state_init='zero'."
    )


def leaves_zeros(optimizer: Optimizer) -> bool:
    """Whether a weight that is zero, with zero gradient and zero state, is sure to be zero after a step.

    >>> w = torch.nn.Parameter(torch.ones(2, 2))
    >>> leaves_zeros(torch.optim.AdamW([w])), leaves_zeros(torch.optim.LBFGS([w]))
    (True, False)
    """
    return type(optimizer) in _BY_ELEMENT


def reset_state(optimizers: Sequence[Optimizer], parameter: Tensor, where: Tensor) -> None:
    """Zero every state tensor of the parameter's shape where `where` (bool) is True, in place; any optimizer.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.Adam([w])
    >>> w.sum().backward(); optimizer.step()
    >>> reset_state([optimizer], w, torch.tensor([True, False]))
    >>> [round(float(m), 2) for m in optimizer.state[w]["exp_avg"]]
    [0.0, 0.1]
    """
    for optimizer in optimizers:
        for tensor in _tensors(keeper_of(optimizer).state.get(parameter, {})):
            if tensor.shape == parameter.shape:
                local(tensor).masked_fill_(local(placed_like(where, tensor)).to(tensor.device), 0)


def _tensors(found: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _tensors(value)


@torch.no_grad()
def start_second_moments(moments: Sequence[Tensor], grown: Tensor, gradient: Tensor) -> None:
    """Set running squares to the squared gradient where weights are new, in place."""
    for tensor in moments:
        held = local(tensor)
        held.copy_(torch.where(local(grown), local(gradient).to(held.dtype).square(), held))
