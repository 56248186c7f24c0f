"""Errors for calls that could have no effect: in the wrong order, for another model, or with unknown keys."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError
from .config import TensorGroup

#: names that optimizers give to state of the parameter's shape
_OF_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
)


def refuse_other_model(groups: Sequence[TensorGroup], model: nn.Module, where: str) -> None:
    """Raise if a sparsifier was prepared on another model than the one that is trained, wrapped or not."""
    if not groups:
        raise SparsityError(f"{where}: the sparsifier is not prepared; call prepare(model, config) before training")
    modules = set(model.modules())
    other = next((g["tensor_fqn"] for g in groups if g["module"] not in modules), None)
    if other is not None:
        raise SparsityError(
            f"{where}: {other} belongs to another model than the one that is trained, so its masks would change "
            "nothing; prepare the sparsifier on the model that the trainer gets"
        )


def refuse_misaligned_state(optimizer: Any, model: nn.Module | None) -> None:
    """Raise if an optimizer's state does not fit its parameters, as after loading one saved before `prepare`."""
    # A state dict refers to parameters by their order, which `prepare` changes: a masked weight comes after the other
    # parameters of its module. Shapes are not compared by torch. Optimizers of low rank (GaLore) keep smaller states of
    # matrices; of states in another order, some are larger than their parameters, or have other dimensions.
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    for o in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        for parameter, state in getattr(o, "state", {}).items():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if key not in _OF_PARAMETER or not isinstance(value, Tensor) or value.ndim == 0:
                    continue
                is_of_low_rank = 1 < value.ndim == parameter.ndim and value.numel() < parameter.numel()
                if value.shape != parameter.shape and not is_of_low_rank:
                    name = names.get(id(parameter), "a parameter")
                    raise SparsityError(
                        f"the optimizer's {key!r} of {name} is {tuple(value.shape)}, but the parameter is "
                        f"{tuple(parameter.shape)}: its state was saved for a model in which other tensors, or none, "
                        "were masked, and so in another order, or for another model. Load it into an optimizer made "
                        "before prepare (parameters stay the same objects), or begin without it."
                    )


def refuse_unknown_keys(keys: Iterable[str], accepted: Iterable[str], config_keys: Sequence[str]) -> None:
    """Raise if `update_mask` is called with keys that are not known; the error lists the config keys."""
    for key in sorted(set(keys) - set(accepted)):
        raise SparsityError(f"update_mask: unknown key {key!r}; known keys: {', '.join(sorted(config_keys))}")
