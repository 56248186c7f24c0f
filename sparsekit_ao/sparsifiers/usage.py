"""Warnings and errors about calls in an order, or on a model, in which they have no effect."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.ao.pruning import BaseScheduler, BaseSparsifier

from .. import distributed
from ..errors import SparsityError
from ..schedules import UpdateInterval
from .config import TensorGroup

#: names that optimizers give to state of the parameter's shape
_OF_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
)


def warn_of_scheduler() -> None:
    """Warn that a scheduler was constructed before `prepare`."""
    text = "prepare: a scheduler was constructed before it; that one has no groups and changes nothing"
    warnings.warn(f"{text}. Construct schedulers after prepare.", stacklevel=4)


def warn_of_stale_masks(
    groups: Sequence[TensorGroup], masks: Sequence[Tensor], chosen_at: Sequence[Any] | None
) -> None:
    """Warn of masks that were never chosen, or chosen for other levels than the groups have now.

    Args:
        groups, masks: of all tensors.
        chosen_at: the groups' levels at the last update of all masks, or None if there was none.
    """
    if chosen_at is None:
        if not any(m.is_meta for m in masks) and all(bool(m.all()) for m in masks):
            text = "squash_mask: step was never called, so every mask keeps everything and nothing is pruned"
            warnings.warn(f"{text}; call step() first", stacklevel=3)
        return
    for group, before in zip(groups, chosen_at, strict=True):
        if group.get("sparsity_level") != before:
            warnings.warn(
                f"squash_mask: the mask of {group['tensor_fqn']} was chosen at sparsity_level {before}, and its level "
                f"is {group['sparsity_level']} now; call step() once more for the last level",
                stacklevel=3,
            )
            return


def warn_of_averaged(own: Sequence[Tensor], copied: Sequence[Tensor]) -> None:
    """Warn if the masks of a copy of the model keep more than the sparsifier's own, as averaged ones do."""
    if any(mask.is_meta for mask in (*own, *copied)):
        return
    kept, others = (sum(int(distributed.local(m).count_nonzero()) for m in masks) for masks in (own, copied))
    if others > kept:
        warnings.warn(
            f"squash_mask: the masks of the given copy keep {others:,} elements, those of the sparsifier {kept:,}: it "
            "was copied at a lower sparsity level, or an average of the weights (EMA) has averaged its masks too "
            "(use_buffers=False leaves them as they are)",
            stacklevel=3,
        )


def refuse_meta(where: str, groups: Sequence[TensorGroup], masks: Sequence[Tensor]) -> None:
    """Raise if a mask has no values, as its weight is on the meta device."""
    for group, mask in zip(groups, masks, strict=True):
        if mask.is_meta:
            raise SparsityError(
                f"{where}: {group['tensor_fqn']} is on the meta device, so its mask has no values; give the weights "
                "memory (to_empty) and initialize them first"
            )


def refuse_other_model(groups: Sequence[TensorGroup], model: nn.Module, where: str) -> None:
    """Raise if a sparsifier was prepared on another model than the one that is trained.

    Args:
        groups: of the sparsifier.
        model: what the trainer trains, wrapped or not.
        where: the first words of the error.
    """
    if not groups:
        raise SparsityError(f"{where}: the sparsifier is not prepared; call prepare(model, config) before training")
    own = {id(m) for m in model.modules()}
    other = next((g["tensor_fqn"] for g in groups if id(g["module"]) not in own), None)
    if other is not None:
        raise SparsityError(
            f"{where}: {other} belongs to another model than the one that is trained, so its masks would change "
            "nothing; prepare the sparsifier on the model that the trainer gets"
        )


def checked_schedulers(sparsifier: object, schedulers: object) -> list[BaseScheduler]:
    """The schedulers of a trainer's callback as a list.

    Raises:
        SparsityError: the sparsifier is none, or a scheduler is none or belongs to another sparsifier.
    """
    where = "SparsifierCallback: "
    if not isinstance(sparsifier, BaseSparsifier):
        raise SparsityError(f"{where}sparsifier must be a sparsifier, got {type(sparsifier).__name__}")
    for one in schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]:
        if not isinstance(one, BaseScheduler) or not isinstance(schedulers, (list, tuple)):
            raise SparsityError(
                f"{where}schedulers must be a list of torch.ao schedulers, such as [ScheduleSL(sparsifier, "
                f"schedules.cubic(0.0, 0.9, steps=1000))], got {type(one).__name__}"
            )
        if one.sparsifier is not sparsifier:
            raise SparsityError(f"{where}the {type(one).__name__} was made for another sparsifier")
    return list(schedulers)  # type: ignore[call-overload]


def update_interval_of(sparsifier: object, update_every: int, until: int | None) -> UpdateInterval:
    """When a trainer's callback calls `step`.

    Raises:
        SparsityError: the sparsifier counts steps itself, and needs every call; or one of the numbers is below 1.
    """
    if hasattr(sparsifier, "settings") and (update_every, until) != (1, None):
        raise SparsityError(
            f"SparsifierCallback: {type(sparsifier).__name__} must be called in every step; give update_every and "
            "until to the sparsifier itself"
        )
    return UpdateInterval(update_every, until)


def refuse_misaligned_state(optimizer: Any, model: nn.Module | None) -> None:
    """Raise if an optimizer's state does not fit its parameters, as after loading one that was saved before `prepare`.

    A state dict of an optimizer refers to parameters by their order, which `prepare` changes: a masked weight comes
    after the other parameters of its module. torch does not compare shapes.

    Args:
        optimizer: one, or several, wrapped by a trainer or not.
        model: for names in the error.
    """
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    for one in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        for parameter, state in getattr(one, "state", {}).items():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if key in _OF_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                    name = names.get(id(parameter), "a parameter")
                    raise SparsityError(
                        f"the optimizer's {key!r} of {name} is {tuple(value.shape)}, but the parameter is "
                        f"{tuple(parameter.shape)}: its state was saved for a model in which other tensors, or none, "
                        "were masked, and so in another order. Load it into an optimizer made before prepare "
                        "(parameters stay the same objects), or begin without it."
                    )


def _moved(model: nn.Module | None, groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """The groups whose module no longer has its name in the model."""
    return [] if model is None else [g for g in groups if not _is_in_place(model, g)]


def _adapted(model: nn.Module | None, groups: Sequence[TensorGroup]) -> list[str]:
    """Names of masked tensors whose layer is inside of an adapter (peft's LoRA and the like) by now."""
    moved = _moved(model, groups)
    if model is None or not moved:
        return []
    bases = [getattr(m, "base_layer", None) for m in model.modules()]
    inside = {id(m) for base in bases if isinstance(base, nn.Module) for m in base.modules()}
    return [g["tensor_fqn"] for g in moved if id(g["module"]) in inside]


def _replaced(model: nn.Module | None, groups: Sequence[TensorGroup]) -> list[str]:
    """Names of masked tensors whose layer is not in the model any more."""
    moved = _moved(model, groups)
    inside = {id(m) for m in model.modules()} if model is not None and moved else set()
    return [g["tensor_fqn"] for g in moved if id(g["module"]) not in inside]


def _is_in_place(model: nn.Module, group: TensorGroup) -> bool:
    try:
        return model.get_submodule(group["module_fqn"]) is group["module"]
    except AttributeError:
        return False


_ADAPTERS = (
    "adapters were added to its masked layer. peft's merge_and_unload() would add them to a temporary masked copy of "
    "the weight and lose them: merge them by export.merge_lora(peft_model, sparsifier) and call squash_mask then, or "
    "call squash_mask before adapters are added"
)
_REPLACED = (
    "its layer was replaced or removed after prepare, so its mask is of no use to the model, and a new layer has none; "
    "call squash_mask, and prepare again"
)


def check_layers(model: nn.Module | None, groups: Sequence[TensorGroup]) -> None:
    """Raise if masks cannot be squashed because adapters were added to their layers; warn of layers taken out."""
    found = _adapted(model, groups)
    if found:
        raise SparsityError(f"squash_mask: {found[0]}: {_ADAPTERS}")
    warn_of_moved(model, groups, "squash_mask")


def warn_of_moved(model: nn.Module | None, groups: Sequence[TensorGroup], where: str) -> bool:
    """Warn if adapters were added to masked layers, or masked layers were taken out of the model; whether it was so."""
    texts = [f"{name}: {_ADAPTERS}" for name in _adapted(model, groups)[:1]]
    texts += [f"{name}: {_REPLACED}" for name in _replaced(model, groups)[:1]]
    for text in texts:
        warnings.warn(f"{where}: {text}", stacklevel=4)
    return bool(texts)
