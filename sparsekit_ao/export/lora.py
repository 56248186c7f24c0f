"""`merge_lora` merges peft's adapters into masked models and keeps the zeros."""

from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.conversion import Conversion
from ..checkpoints.masks import Masks, adapted, masked_tensors
from ..errors import SparsityError
from ..masking import find_mask, installed, remove_mask, select
from ..models.names import parameter_of
from ..sparsifiers.base import MaskSparsifier


def merge_lora(model: Any, sparsifier: Masks) -> tuple[nn.Module, Conversion]:
    """Merge LoRA adapters into a pruned model and apply its masks again.

    peft's `merge_and_unload` adds a dense product to each weight, so that zeros are lost (or the adapter, while masks
    are registered). This function masks the merged weight. It reports the part of the adapter that the mask drops,
    because the outputs change by it. Other kinds of adapters that peft can merge are merged too.

    Args:
        model: The model that `peft.get_peft_model` returned. Its active adapters are merged in place.
        sparsifier: The sparsifier, prepared before or after `get_peft_model`. Call its `squash_mask` after this, or
            before adapters are added. Or a dict {name: mask}, as from `load_masks`, with the base model's names or
            `model`'s.

    Returns:
        The base model without adapters, and a `Conversion`. Its notes give the fraction of each adapter's norm that the
        mask drops. Registered masks stay registered, and their tensors
        have the names of the base model from now on.

    Raises:
        SparsityError: There are no adapters, or some are already merged, disabled or not finite; or the base model has
            no tensor with the name and shape of a mask; or a masked layer is in `modules_to_save`. Nothing is changed.

    >>> merged, report = merge_lora(peft_model, sparsifier)  # doctest: +SKIP
    >>> merged.save_pretrained("merged")  # doctest: +SKIP
    """
    _refuse_unmergeable(model)
    tensors = masked_tensors([model.get_base_model(), model], sparsifier, "merge_lora")
    registered = {name: on for name, module, key, _ in tensors if (on := find_mask(module, key)) is not None}
    idle = sorted(set(getattr(model, "peft_config", ())) - set(model.active_adapters))
    before = {name: parameter_of(module, key).detach().clone() for name, module, key, _ in tensors}
    shares: dict[str, float] = {}
    with torch.no_grad():
        for name, module, key, mask in tensors:
            if name in registered:
                remove_mask(module, key)
            # DoRA scales the product by norms of the weight, which must be those of the masked one.
            parameter_of(module, key).copy_(select(before[name], mask))
        try:
            merged: nn.Module = model.merge_and_unload()
        finally:
            for name, module, key, mask in tensors:
                parameter: Tensor = parameter_of(module, key)
                norm = float((parameter - select(before[name], mask)).float().norm())
                if norm:
                    shares[name] = float(select(parameter, ~mask).float().norm()) / norm
                dropped = parameter + before[name] if name in registered else torch.zeros_like(parameter)
                parameter.copy_(torch.where(mask, parameter, dropped))
            with installed([(module, key, registered[name]) for name, module, key, _ in tensors if name in registered]):
                pass
    if registered and isinstance(sparsifier, MaskSparsifier) and sparsifier.model is model:
        sparsifier.move_to(merged)
    nbytes = sum(values.nbytes for values in before.values())
    notes = [f"{name}: its mask drops {share:.0%} of the adapter's norm" for name, share in shares.items()]
    notes += [f"the adapter {name!r} is not active, so it is not merged but removed" for name in idle]
    return merged, Conversion(
        target="merge_lora",
        converted=tuple(shares),
        left={name: "no adapter changes it" for name in before if name not in shares},
        before=nbytes,
        after=nbytes,
        notes=tuple(notes),
    )


def _refuse_unmergeable(model: Any) -> None:
    """Raise unless a model has adapters that are active, finite and not merged yet."""
    if not adapted(model) or not callable(getattr(model, "merge_and_unload", None)):
        raise SparsityError(f"merge_lora: expected a model of peft.get_peft_model, got {type(model).__name__}")
    for layer in adapted(model):
        kind, advice = type(layer).__name__, "call model.unmerge_adapter() first"
        if getattr(layer, "merged_adapters", ()):
            raise SparsityError(f"merge_lora: an adapter is merged into a {kind} already; {advice}")
        if getattr(layer, "disable_adapters", False):
            raise SparsityError("merge_lora: adapters are disabled; call model.enable_adapter_layers() first")
        for name, tensor in layer.named_parameters():
            if not name.startswith("base_layer.") and not bool(tensor.isfinite().all()):
                raise SparsityError(f"merge_lora: {name} of a {kind} is not finite (nan or inf)")
