"""What `squash_mask` checks, warns of and does: zeros are written and masks removed on all tensors, or nothing is."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .. import distributed, masking
from ..errors import SparsityError
from .config import TensorGroup

_ADAPTERS = (
    "adapters were added to its masked layer. peft's merge_and_unload() would add them to a temporary masked copy of "
    "the weight and lose them: merge them by export.merge_lora(peft_model, sparsifier) and call squash_mask then, or "
    "call squash_mask before adapters are added"
)
_REPLACED = (
    "its layer was replaced or removed after prepare, so its mask is of no use to the model, and a new layer has none; "
    "call squash_mask, and prepare again"
)


def squash(
    model: nn.Module, groups: Sequence[TensorGroup], modules: Sequence[nn.Module], kept: Sequence[Mapping[str, Any]]
) -> None:
    """Write zeros into the parameters of a model and remove its masks.

    Whatever can be checked is checked before anything changes. If an operation fails after that, all masks are still
    registered, so that the model is the same and the call can be repeated; weights that are masked may be zero by then.

    Args:
        model: the prepared model, or a deep copy of it.
        groups: of all tensors.
        modules: for each group the module in the model.
        kept: for each group what its module's `sparse_params` will be; nothing is set where it is empty.

    Raises:
        SparsityError: values that cannot be written to, a mask that another parametrization cannot express, or a model
            that `fully_shard` wrapped only as a part of another one.
    """
    places = [(g["tensor_fqn"], g["module_fqn"], module) for module, g in zip(modules, groups, strict=True)]
    distributed.refuse_wrapped_outside(model, places)
    tensors = [(module, g["tensor_name"]) for module, g in zip(modules, groups, strict=True)]
    for (module, name), group in zip(tensors, groups, strict=True):
        masking.refuse_unwritable(module, name, group["tensor_fqn"])
    records = distributed.fsdp_records(model)
    masks = [masking.find_mask(*tensor) for tensor in tensors]
    parameters = [masking.parameters_under(*tensor) for tensor in tensors]
    rebuilt = [masking.rebuilt_originals(*tensor) for tensor in tensors]
    with masking.removed([*tensors, *masking.other_names(model, tensors)]):
        for own, mask, values in zip(parameters, masks, rebuilt, strict=True):
            assert mask is not None
            masking.write_zeros(own, mask.mask, values)
    for (module, name), params in zip(tensors, kept, strict=True):
        if id(module._parameters.get(name)) in records:
            distributed.move_record(records[id(module._parameters[name])], module, name)
        if params:
            module.sparse_params = params  # type: ignore[assignment]


def kept_params(
    groups: Sequence[TensorGroup], everywhere: Sequence[str] | None, per_layer: Mapping[str, Sequence[str]] | None
) -> list[dict[str, Any]]:
    """What `sparse_params` holds for each group after `squash_mask`; see there."""
    if isinstance(everywhere, nn.Module):
        raise SparsityError("squash_mask: the model to squash is given by name, squash_mask(model=...)")
    if isinstance(everywhere, str):
        raise SparsityError(f"squash_mask: params_to_keep must be a tuple of keys, got {everywhere!r}")
    layers = {g["module_fqn"] for g in groups}
    if not isinstance(per_layer, (Mapping, type(None))):
        raise SparsityError(f"squash_mask: params_to_keep_per_layer must be a dict {{module: keys}}, got {per_layer!r}")
    unknown = sorted(set(per_layer or {}) - layers)
    if unknown:
        raise SparsityError(f"squash_mask: {unknown[0]!r} is not a sparsified module; those are {sorted(layers)}")
    out = []
    for group in groups:
        wanted = [*(everywhere or ()), *(per_layer or {}).get(group["module_fqn"], ())]
        absent = [k for k in wanted if k not in group]
        if absent:
            raise SparsityError(f"squash_mask: {group['tensor_fqn']} has no {absent[0]!r}; it has {sorted(group)}")
        out.append({k: group[k] for k in wanted})
    return out


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


def check_layers(model: nn.Module, moved: Sequence[TensorGroup]) -> None:
    """Raise if masks cannot be squashed because adapters were added to their layers; warn of layers taken out."""
    adapted, _ = _adapted_and_replaced(model, moved)
    if adapted:
        raise SparsityError(f"squash_mask: {adapted[0]}: {_ADAPTERS}")
    warn_of_moved(model, moved, "squash_mask")


def warn_of_moved(model: nn.Module, moved: Sequence[TensorGroup], where: str) -> bool:
    """Warn if adapters were added to masked layers, or masked layers were taken out of the model; whether it was so.

    `moved` are the groups whose module no longer has its name in the model.
    """
    adapted, replaced = _adapted_and_replaced(model, moved)
    texts = [*(f"{n}: {_ADAPTERS}" for n in adapted[:1]), *(f"{n}: {_REPLACED}" for n in replaced[:1])]
    for text in texts:
        warnings.warn(f"{where}: {text}", stacklevel=4)
    return bool(texts)


def _adapted_and_replaced(model: nn.Module, moved: Sequence[TensorGroup]) -> tuple[list[str], list[str]]:
    """Names of masked tensors whose layer is inside of an adapter (peft's LoRA and the like), or gone, by now."""
    modules = list(model.modules())
    bases = [getattr(m, "base_layer", None) for m in modules]
    adapted = {id(m) for base in bases if isinstance(base, nn.Module) for m in base.modules()}
    present = {id(m) for m in modules}
    return (
        [g["tensor_fqn"] for g in moved if id(g["module"]) in adapted],
        [g["tensor_fqn"] for g in moved if id(g["module"]) not in present],
    )
