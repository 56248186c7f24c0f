"""Which optimizer trains which sparsified parameter, and whether it keeps what an update looks at.

Knows groups and optimizers; no gradients and no masks' meaning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import is_placed_like, is_sharded, placed_like, refuse_gathered, reshard
from ..errors import SparsityError
from ..masking import find_mask, live_mask
from ..sparsifiers.config import TensorGroup
from .optimizer_state import holds, keeper_of, momentum_of, refuse_without_second_moments
from .settings import Settings

__all__ = [
    "check_optimizers",
    "original",
    "placed_gradient",
    "plain_optimizer",
    "plain_optimizers",
    "refuse_replaced",
    "trained_by",
    "trained_now",
    "training",
]

_ORDER = (
    "fully_shard puts a sharded parameter in its place: call prepare, then fully_shard, then make the optimizer, then "
    "sparsifier.attach(optimizer)."
)


def original(group: TensorGroup) -> Tensor:
    """The parameter under a group's mask.

    Raises:
        SparsityError: a module outside of the prepared model has it gathered, so it is not what optimizers hold.
    """
    module, name = group["module"], group["tensor_name"]
    found = find_mask(module, name)
    if found is None:
        return module._parameters[name]
    parameter = module.parametrizations[name].original
    refuse_gathered(group["tensor_fqn"], parameter, found.mask)
    return parameter


def placed_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient, which from now on lies on the ranks as its parameter does.

    Tensor parallel layers may leave it as parts that are yet to be summed.
    """
    if parameter.grad is not None and not is_placed_like(parameter.grad, parameter):
        parameter.grad = placed_like(parameter.grad, parameter)
    return parameter.grad


def plain_optimizer(optimizer: object) -> Optimizer:
    """The optimizer itself, out of the wrappers that trainers put around it."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise SparsityError(f"optimizer must be a torch optimizer or several, got {type(optimizer).__name__}")
    return optimizer


def plain_optimizers(given: object) -> list[Optimizer]:
    """One optimizer, or a sequence of them, out of their wrappers."""
    found = [plain_optimizer(o) for o in (given if isinstance(given, Sequence) else [given])]
    if not found:
        raise SparsityError("attach: no optimizer given")
    return found


def trained_by(optimizer: Optimizer, groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """Those of the groups whose parameters an optimizer holds."""
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return [g for g in groups if id(original(g)) in held]


def trained_now(
    model: nn.Module | None, groups: Sequence[TensorGroup], optimizer: Optimizer | None = None
) -> Sequence[TensorGroup]:
    """The groups of one optimizer, or all, once the model holds what optimizers do, and masks lie beside that.

    A trainer may shard the model and put the new parameters into the old optimizer, and nobody says so.
    """
    reshard(model)
    found = groups if optimizer is None else trained_by(optimizer, groups)
    for group in found:
        live_mask(group["module"], group["tensor_name"], group["tensor_fqn"])
    return found


def training(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup]) -> list[Optimizer]:
    """Those of the optimizers that train some of the groups' parameters."""
    return [o for o in optimizers if trained_by(plain_optimizer(o), groups)]


def check_optimizers(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup], settings: Settings) -> None:
    """Raise unless every sparsified parameter is trained by one of these, and every one of these trains some.

    Args:
        optimizers: out of their wrappers.
        groups: of a prepared model; before that nothing can be said.
        settings: what updates look at, which each optimizer must then keep.
    """
    held: set[int] = set()
    for group in groups:
        parameter, name = original(group), group["tensor_fqn"]
        found = [(k, holds(o, parameter)) for k, o in enumerate(optimizers)]
        found = [(k, g) for k, g in found if g is not None]
        if len(found) != 1:
            raise SparsityError(
                f"{name}: one optimizer must train it, but {len(found)} of the {len(optimizers)} given do. "
                + (_ORDER if is_sharded(parameter) else "Give its optimizer, or leave the tensor out of the config.")
            )
        at, options = found[0]
        held.add(at)
        _check_memory(optimizers[at], parameter, options or {}, name, settings)
    if groups and len(held) < len(optimizers):
        raise SparsityError(
            "an optimizer was given that trains none of the sparsified parameters, so no update could wait for its "
            "step; leave it out"
        )


def _check_memory(
    optimizer: Optimizer, parameter: Tensor, options: Mapping[str, Any], name: str, settings: Settings
) -> None:
    needed = settings.needs_momentum or (settings.updates and settings.state_init == "grad")
    if needed and keeper_of(optimizer) is not optimizer:
        raise SparsityError(
            f"{name}: its optimizer ({type(optimizer).__name__}) keeps the state of a parameter on one rank alone, and "
            "all ranks would look at it. Use fully_shard, or rules without momentum and state_init='zero'."
        )
    if settings.needs_momentum and "betas" not in options and not options.get("momentum"):
        if momentum_of([optimizer], parameter) is not None:
            return
        raise SparsityError(
            f"{name}: its optimizer ({type(optimizer).__name__}) keeps no momentum. Use SGD with momentum > 0 or an "
            "Adam, or rules that need none."
        )
    if settings.updates and settings.state_init == "grad":
        refuse_without_second_moments(optimizer, parameter, options, name)


def refuse_replaced(optimizers: Sequence[Optimizer], groups: Sequence[TensorGroup]) -> None:
    """Raise where a parameter was sharded, so that another object stands in its place than the optimizers hold."""
    held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    for group in groups:
        parameter = original(group)
        if is_sharded(parameter) and id(parameter) not in held:
            raise SparsityError(f"{group['tensor_fqn']}: none of the optimizers given trains it. {_ORDER}")
