"""The optimizers of a sparsifier: which one trains which parameter, and the state that it keeps.

Optimizer state is handled as tensors of the parameter's shape, whatever the optimizer's class.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import is_placed_like, is_sharded, local, placed_like, refuse_gathered, reshard
from ..errors import SparsityError
from ..masking import find_mask, live_mask
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.optimizers import options_of, unwrap_optimizer
from .settings import Settings

#: names that optimizers give to a running mean or sum of squared gradients
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")

#: options that only optimizers with such a mean or sum have: Adam's, RMSprop's, Adadelta's, Adagrad's
_SQUARING = ("betas", "centered", "rho", "lr_decay")

_o = torch.optim
#: their step changes an element by its own gradient, state and value alone, so zeros stay zeros; others may mix them
_ELEMENTWISE = (
    *(_o.SGD, _o.Adam, _o.AdamW, _o.NAdam, _o.RAdam, _o.Adamax),
    *(_o.Adadelta, _o.Adagrad, _o.ASGD, _o.RMSprop, _o.Rprop),
)

_ORDER = (
    "fully_shard replaces parameters by sharded ones: call prepare, then fully_shard, then make the optimizer, then "
    "sparsifier.attach(optimizer)."
)


def original(group: TensorGroup) -> Tensor:
    """The parameter under a group's mask; raises if a module around the prepared model has gathered it (FSDP2)."""
    module, name = group["module"], group["tensor_name"]
    found = find_mask(module, name)
    if found is None:
        return module._parameters[name]
    parameter = module.parametrizations[name].original
    refuse_gathered(group["tensor_fqn"], parameter, found.mask)
    return parameter


def placed_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient, from now on sharded as its parameter is; tensor parallel layers may leave partial sums."""
    if parameter.grad is not None and not is_placed_like(parameter.grad, parameter):
        parameter.grad = placed_like(parameter.grad, parameter)
    return parameter.grad


def refuse_optimizer_as_level(level: object) -> None:
    """Raise where the first positional argument, the sparsity level, is an optimizer, or several."""
    first = level[0] if isinstance(level, Sequence) and level else level
    if isinstance(getattr(first, "optimizer", first), Optimizer):
        raise SparsityError(
            f"the first argument is sparsity_level, got {type(first).__name__}; pass the optimizer as optimizer=..., "
            "or to attach"
        )


def groups_of(
    optimizer: Optimizer | None, groups: Sequence[TensorGroup], model: nn.Module | None = None
) -> Sequence[TensorGroup]:
    """Those of the groups that an optimizer trains (None: all), with parameters and masks sharded as they are now."""
    reshard(model)  # a trainer may shard it and put new parameters into the old optimizer without calling `attach`
    found = groups if optimizer is None else _trained_by(optimizer, groups)
    for group in found:
        live_mask(group["module"], group["tensor_name"], group["tensor_fqn"])
    return found


def training_optimizers(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup]) -> list[Optimizer]:
    """Those of the optimizers that train parameters of the groups."""
    return [o for o in optimizers if _trained_by(unwrap_optimizer(o), groups)]


def _trained_by(optimizer: Optimizer, groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    held = _ids([optimizer])
    return [g for g in groups if id(original(g)) in held]


def _ids(optimizers: Sequence[Optimizer]) -> set[int]:
    return {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}


def check_optimizers(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup], settings: Settings) -> None:
    """Raise unless one of these trains each sparsified parameter and stores what updates read, and all train some."""
    held: set[int] = set()
    for group in groups:
        parameter, name = original(group), group["tensor_fqn"]
        found = [(k, g) for k, o in enumerate(optimizers) if (g := options_of(o, parameter)) is not None]
        if len(found) != 1:
            raise SparsityError(
                f"{name}: one optimizer must train it, but {len(found)} of the {len(optimizers)} given do. "
                + (_ORDER if is_sharded(parameter) else "Give its optimizer, or leave the tensor out of the config.")
            )
        at, options = found[0]
        held.add(at)
        _check_state(optimizers[at], parameter, options, name, settings)
    if groups and len(held) < len(optimizers):
        raise SparsityError(
            "an optimizer was given that trains none of the sparsified parameters, so no update could wait for its "
            "step; leave it out"
        )


def refuse_replaced(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup]) -> None:
    """Raise where a parameter has been sharded since, so that the optimizers hold another object."""
    held = _ids(optimizers)
    for group in groups:
        parameter = original(group)
        if is_sharded(parameter) and id(parameter) not in held:
            raise SparsityError(f"{group['tensor_fqn']}: none of the optimizers given trains it. {_ORDER}")


def _check_state(
    optimizer: Optimizer, parameter: Tensor, options: Mapping[str, Any], name: str, settings: Settings
) -> None:
    """Raise unless an optimizer stores, or will store, what updates read of a parameter."""
    kind, needs_squares = type(optimizer).__name__, settings.updates and settings.state_init == "grad"
    if (settings.needs_momentum or needs_squares) and _state_owner(optimizer) is not optimizer:
        raise SparsityError(
            f"{name}: its optimizer ({kind}) keeps the state of a parameter on one rank alone, and all ranks would "
            "read it. Use fully_shard, or rules without momentum and state_init='zero'."
        )
    if settings.needs_momentum and "betas" not in options and not options.get("momentum"):
        if momentum_of([optimizer], parameter) is None:
            raise SparsityError(
                f"{name}: its optimizer ({kind}) keeps no momentum. Use SGD with momentum > 0 or an Adam, or rules "
                "that need none."
            )
        return
    state = optimizer.state.get(parameter, {})
    if needs_squares and not any(k in options for k in _SQUARING) and not any(k in state for k in SECOND_MOMENTS):
        raise SparsityError(_no_second_moments(name))


def _no_second_moments(name: str) -> str:
    return (
        f"{name}: state_init='grad' sets second moments, and its optimizer keeps none "
        f"({', '.join(SECOND_MOMENTS)}). Use state_init='zero'."
    )


def momentum_of(optimizers: Sequence[Optimizer], parameter: Tensor) -> Tensor | None:
    """SGD's momentum buffer, or Adam's m / (sqrt(v) + eps), of the parameter's shape; None where there is none yet."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("exp_avg"), Tensor):
            eps = (options_of(optimizer, parameter) or {}).get("eps", 1e-8)
            return state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps) if "exp_avg_sq" in state else state["exp_avg"]
        if isinstance(state.get("momentum_buffer"), Tensor):
            return state["momentum_buffer"]
    return None


def second_moments(optimizers: Sequence[Optimizer], parameter: Tensor, name: str) -> list[Tensor]:
    """The running squares of a parameter's gradient; raises if the optimizer keeps none."""
    states = [o.state.get(parameter, {}) for o in optimizers]
    found = [s[k] for s in states for k in SECOND_MOMENTS if isinstance(s.get(k), Tensor)]
    if not found:
        raise SparsityError(_no_second_moments(name))
    return found


@torch.no_grad()
def start_second_moments(moments: Sequence[Tensor], grown: Tensor, gradient: Tensor) -> None:
    """Set running squares to the squared gradient where weights have grown, in place."""
    for tensor in moments:
        held = local(tensor)
        held.copy_(torch.where(local(grown), local(gradient).to(held.dtype).square(), held))


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
        for tensor in _tensors(_state_owner(optimizer).state.get(parameter, {})):
            if tensor.shape == parameter.shape:
                local(tensor).masked_fill_(local(placed_like(where, tensor)).to(tensor.device), 0)


def keeps_zeros(optimizer: Optimizer) -> bool:
    """Whether a weight that is zero, with zero gradient and zero state, is sure to be zero after a step.

    >>> w = torch.nn.Parameter(torch.ones(2, 2))
    >>> keeps_zeros(torch.optim.AdamW([w])), keeps_zeros(torch.optim.LBFGS([w]))
    (True, False)
    """
    return type(optimizer) in _ELEMENTWISE


def _state_owner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state: inside `ZeroRedundancyOptimizer` one for the parameters of this rank."""
    inside = getattr(optimizer, "optim", None)
    return inside if isinstance(inside, Optimizer) else optimizer


def _tensors(found: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (Mapping, list, tuple)):
        for value in found.values() if isinstance(found, Mapping) else found:
            yield from _tensors(value)
