"""Hugging Face models and adapters: `save_pretrained` and `load_masks`, and `merge_lora`.

A masked model that transformers saves cannot be loaded: its tensors have other names, so `from_pretrained` initializes
the weights anew. And LoRA adapters are dense, so merging one into a pruned weight fills its zeros.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..masking import WeightMask, dense_state_dict, find_mask, installed, remove_mask, select
from ..sparsifiers.base import MaskSparsifier
from ..sparsifiers.names import owner_of, parameter_of
from .encoding import from_mask, to_mask
from .results import Conversion

MASKS = "masks.safetensors"

Masks = MaskSparsifier | Mapping[str, Tensor]


def save_pretrained(model: Any, sparsifier: Masks, path: str | Path, **kwargs: Any) -> Conversion:
    """Save a masked or squashed transformers model as `from_pretrained` loads it, with its masks beside it.

    Writes what `model.save_pretrained` writes, with masked values under their plain names, and `masks.safetensors`, one
    bit for each element. The model does not change.

    Args:
        model: a transformers model (or anything with `save_pretrained(path, state_dict=...)`).
        sparsifier: that masks it, before or after `squash_mask`; or {name: mask}.
        path: folder.
        kwargs: for `model.save_pretrained`.

    Returns:
        A `Conversion`: bytes of the masked tensors, which are saved dense, and of the file of masks.

    Raises:
        SparsityError: no such method; adapters are still unmerged; the model has no tensor of a mask's name and shape;
            a written file does not hold the masked values.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> class Model(torch.nn.Sequential):
    ...     def save_pretrained(self, path, state_dict):
    ...         save_file(state_dict, Path(path) / "model.safetensors")
    >>> model, sparsifier = Model(torch.nn.Linear(8, 4)), sparsekit_ao.ScopeSparsifier(0.5)
    >>> sparsifier.prepare(model)
    >>> sparsifier.step()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, sparsifier, folder).converted
    ...     int(load_masks(folder)["0.weight"].sum())
    ('0.weight',)
    16
    """
    from safetensors.torch import save_file

    if not callable(getattr(model, "save_pretrained", None)):
        raise SparsityError(f"save_pretrained: {type(model).__name__} has no method save_pretrained")
    if not _takes_state_dict(model.save_pretrained):
        raise SparsityError(
            f"save_pretrained: {type(model).__name__}.save_pretrained takes no state_dict. Squash a deep copy and save "
            "that: copied = copy.deepcopy(model); sparsifier.squash_mask(model=copied); copied.save_pretrained(path)"
        )
    if _has_adapters(model):
        raise SparsityError("save_pretrained: the model has adapters; call export.merge_lora(model, sparsifier) first")
    masks = {name: mask for name, _, _, mask in _masked_tensors(model, sparsifier, "save_pretrained")}
    values = dense_state_dict(model)
    values |= {name: select(values[name].detach(), mask.to(values[name].device)) for name, mask in masks.items()}
    folder = Path(path)
    model.save_pretrained(folder, state_dict=dict(values), **kwargs)
    shapes = {"shapes": json.dumps({name: list(mask.shape) for name, mask in masks.items()})}
    save_file({name: to_mask(mask.cpu().flatten()) for name, mask in masks.items()}, folder / MASKS, metadata=shapes)
    _check_files(folder, {name: values[name] for name in masks})
    return Conversion(
        target="save_pretrained",
        converted=tuple(masks),
        left={},
        before=sum(values[name].numel() * values[name].element_size() for name in masks),
        after=(folder / MASKS).stat().st_size,
        notes=(f"the bytes after are those of {MASKS}; the weights are saved dense, with their zeros",),
    )


def _takes_state_dict(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "state_dict" or p.kind is p.VAR_KEYWORD for p in parameters)


def load_masks(path: str | Path) -> dict[str, Tensor]:
    """The masks that `save_pretrained` wrote to a folder: {name of the tensor: bool mask, True where it is kept}.

    >>> masks = load_masks("pruned")  # doctest: +SKIP
    >>> masks["layer.weight"].dtype  # doctest: +SKIP
    torch.bool
    """
    from safetensors import safe_open

    with safe_open(Path(path) / MASKS, "pt") as file:
        shapes = json.loads(file.metadata()["shapes"])
        return {name: _unpacked(file.get_tensor(name), shape) for name, shape in shapes.items()}


def merge_lora(model: Any, sparsifier: Masks) -> tuple[nn.Module, Conversion]:
    """Merge LoRA adapters into a pruned model and apply its masks again.

    peft's `merge_and_unload` adds a dense product to each weight: all zeros are lost, or, while masks are registered,
    the adapter is lost. With this function, the merged weight is masked; the part of the adapter that a mask drops is
    reported, because the outputs change by it.

    Args:
        model: of `peft.get_peft_model`; changed in place, as `merge_and_unload` does.
        sparsifier: that masked the base model, before or after `squash_mask`; or {name: mask}, as from `load_masks`,
            with names of the base model.

    Returns:
        The base model, without adapters, and a `Conversion` whose notes and difference are the fraction of each
        adapter's norm that its mask drops, and the largest of them. Masks that were registered still are.

    Raises:
        SparsityError: no adapters, or the base model has no tensor of a mask's name and shape. Nothing is then changed.

    >>> merged, report = merge_lora(peft_model, sparsifier)  # doctest: +SKIP
    >>> merged.save_pretrained("merged")  # doctest: +SKIP
    """
    if not _has_adapters(model) or not callable(getattr(model, "merge_and_unload", None)):
        raise SparsityError(f"merge_lora: expected a model of peft.get_peft_model, got {type(model).__name__}")
    tensors = _masked_tensors(model.get_base_model(), sparsifier, "merge_lora")
    before = {name: parameter_of(module, own).detach().clone() for name, module, own, _ in tensors}
    with _masks_removed([(module, own) for _, module, own, _ in tensors]) as registered:
        merged: nn.Module = model.merge_and_unload()
        dropped = {}
        for name, module, own, mask in tensors:
            parameter, keep = parameter_of(module, own), mask.to(before[name].device)
            dropped[name] = _dropped(parameter.detach() - before[name], keep)
            if (id(module), own) not in registered:
                with torch.no_grad():
                    parameter.copy_(select(parameter.detach(), keep))
    shares = {name: share for name, share in dropped.items() if share is not None}
    size = sum(t.numel() * t.element_size() for t in before.values())
    report = Conversion(
        target="merge_lora",
        converted=tuple(shares),
        left={name: "no adapter changes it" for name in dropped if name not in shares},
        before=size,
        after=size,
        difference=max(shares.values(), default=0.0),
        notes=tuple(f"{name}: its mask drops {share:.0%} of the adapter's norm" for name, share in shares.items()),
    )
    return merged, report


def _has_adapters(model: Any) -> bool:
    """Whether some layer of the model has an adapter of peft."""
    return any(hasattr(m, "lora_A") and hasattr(m, "get_base_layer") for m in model.modules())


def _masked_tensors(model: nn.Module, sparsifier: Masks, target: str) -> list[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, tensor's name in it, bool mask) of every mask; a layer with adapters is looked through."""
    if isinstance(sparsifier, MaskSparsifier):
        masks = {name: s["mask"] for name, s in sparsifier.state.items() if s.get("mask") is not None}
    else:
        masks = dict(sparsifier)
    if not masks:
        raise SparsityError(f"{target}: there are no masks; call sparsifier.prepare and step first")
    found = []
    for name, mask in masks.items():
        try:
            module, own = owner_of(model, name)
            module = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[operator]
            shape = parameter_of(module, own).shape
        except (AttributeError, KeyError) as e:
            raise SparsityError(f"{target}: the model has no tensor {name}, for which there is a mask") from e
        if shape != mask.shape:
            raise SparsityError(f"{target}: {name} is {tuple(shape)}, but its mask is {tuple(mask.shape)}")
        found.append((name, module, own, mask.detach() != 0))
    return found


@contextmanager
def _masks_removed(tensors: Sequence[tuple[nn.Module, str]]) -> Iterator[set[tuple[int, str]]]:
    """Take registered masks off, so that weights can be written, and register them again; yields which they were."""
    masks = [(module, own, find_mask(module, own)) for module, own in tensors]
    registered: list[tuple[nn.Module, str, WeightMask]] = [(m, own, mask) for m, own, mask in masks if mask is not None]
    for module, own, _ in registered:
        remove_mask(module, own)
    try:
        yield {(id(module), own) for module, own, _ in registered}
    finally:
        with installed(registered):
            pass


def _dropped(change: Tensor, keep: Tensor) -> float | None:
    """The fraction of the norm of a change that a mask drops; None if nothing changes."""
    norm = float(change.float().norm())
    return float(select(change, ~keep).float().norm()) / norm if norm else None


def _check_files(folder: Path, values: Mapping[str, Tensor]) -> None:
    """Compare masked tensors with the files that transformers wrote, where it wrote them under the same names."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        if path.name != MASKS:
            with safe_open(path, "pt") as file:
                for name in set(file.keys()) & set(values):
                    if not torch.equal(file.get_tensor(name), values[name].cpu()):
                        raise SparsityError(f"save_pretrained: {path.name} does not hold the masked values of {name}")


def _unpacked(bits: Tensor, shape: Sequence[int]) -> Tensor:
    mask = torch.zeros(torch.Size(shape), dtype=torch.bool)
    kept = from_mask(bits, mask.numel())
    if kept is None or len(bits) != -(-mask.numel() // 8):
        raise SparsityError(f"{MASKS}: {len(bits)} bytes do not hold a mask of shape {tuple(shape)}")
    mask.view(-1)[kept] = True
    return mask
