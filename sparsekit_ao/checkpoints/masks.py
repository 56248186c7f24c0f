"""Masks by the names of their tensors: those of a sparsifier, and those in a file with one bit for each element."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SparsityError
from ..models.names import owner_of, parameter_of, uncompiled_name
from ..sparsifiers.base import MaskSparsifier

MASKS = "masks.safetensors"
Masks = MaskSparsifier | Mapping[str, Tensor]


def adapted(model: nn.Module) -> list[nn.Module]:
    """Return the layers that have adapters of peft."""
    return [m for m in model.modules() if getattr(m, "adapter_layer_names", ())]


def masked_tensors(
    models: Sequence[nn.Module], sparsifier: Masks, target: str
) -> list[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, name in it, mask) of every masked tensor, in the first of the models that has its name."""
    if isinstance(sparsifier, MaskSparsifier):
        masks = {name: s["mask"] for name, s in sparsifier.state.items() if s.get("mask") is not None}
    elif isinstance(sparsifier, Mapping):
        masks = dict(sparsifier)
    else:
        kind = f"{type(sparsifier).__module__}.{type(sparsifier).__name__}"
        raise SparsityError(
            f"{target}: expected a sparsifier of sparsekit_ao, or {{name: mask}}, got {kind}; for a model that prune "
            "returned, give {row.tensor: model.get_parameter(row.tensor) != 0 for row in report}, made before peft "
            "wraps the model"
        )
    if not masks:
        raise SparsityError(f"{target}: there are no masks; call sparsifier.prepare and step first")
    tensors = []
    for name, mask in ((uncompiled_name(name), mask) for name, mask in masks.items()):
        module, key = next(filter(None, (_owner(model, name) for model in models)), (None, ""))
        if module is None:
            raise SparsityError(f"{target}: the model has no tensor {name}, for which there is a mask")
        if _is_copied(module):
            raise SparsityError(
                f"{target}: {name} is in modules_to_save, so peft replaces it by a copy without its mask. Pass the "
                "other masks as {name: mask}, and prune this weight again afterwards."
            )
        parameter = parameter_of(module, key)
        if not isinstance(mask, Tensor) or parameter.shape != mask.shape:
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise SparsityError(f"{target}: {name} is {tuple(parameter.shape)}, but its mask is {got}")
        mask = mask.detach() if mask.dtype == torch.bool else mask.detach() != 0
        tensors.append((name, module, key, mask if parameter.is_meta else mask.to(parameter.device)))
    return tensors


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that holds a tensor, and the tensor's name in it; adapters are looked through."""
    try:
        module, key = owner_of(model, name)
    except AttributeError:
        return None
    module = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[operator]
    is_tensor = module._parameters.get(key) is not None or parametrize.is_parametrized(module, key)
    return (module, key) if is_tensor or _is_copied(module) else None


def _is_copied(module: nn.Module) -> bool:
    """Return whether peft trains a copy of a module; the whole model has an attribute of the same name."""
    return isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)


def save_masks(masks: Mapping[str, Tensor], folder: Path) -> None:
    """Write masks to the file in a folder that `load_masks` reads."""
    from safetensors.torch import save_file  # an optional package

    shapes = {"shapes": json.dumps({name: list(mask.shape) for name, mask in masks.items()})}
    bits = {name: np.packbits(mask.cpu().flatten().numpy(), bitorder="little") for name, mask in masks.items()}
    save_file({name: torch.from_numpy(b) for name, b in bits.items()}, folder / MASKS, metadata=shapes)


def load_masks(path: str | Path) -> dict[str, Tensor]:
    """Return the masks that `save_pretrained` wrote to a folder: {name of the tensor: bool mask, True where kept}.

    Raises:
        SparsityError: The file was not written by `save_pretrained`, or it is damaged.

    >>> masks = load_masks("pruned")  # doctest: +SKIP
    >>> masks["layer.weight"].dtype  # doctest: +SKIP
    torch.bool
    """
    from safetensors import SafetensorError, safe_open

    masks = {}
    try:
        opened = safe_open(Path(path) / MASKS, framework="pt")
    except SafetensorError as e:
        raise SparsityError(f"{MASKS} cannot be read, because it is damaged or not a safetensors file: {e}") from e
    with opened as file:
        text = (file.metadata() or {}).get("shapes")
        if text is None:
            raise SparsityError(f"{MASKS} was not written by save_pretrained: its metadata has no 'shapes'")
        try:
            shapes = json.loads(text)
        except (ValueError, RecursionError) as e:  # huge integers and deep nesting raise them too
            raise SparsityError(f"{MASKS}: 'shapes' in its metadata is not JSON: {e}") from e
        if not isinstance(shapes, dict) or shapes.keys() != set(file.keys()):
            raise SparsityError(f"{MASKS}: its metadata must hold the shape of every mask and no other, got {text:.80}")
        for name, shape in shapes.items():
            packed = file.get_tensor(name)
            is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
            numel = math.prod(shape) if is_shape else -1  # -1 makes the next check fail
            is_packed = packed.dtype == torch.uint8 and tuple(packed.shape) == (-(-numel // 8),)
            bits = np.unpackbits(packed.numpy(), bitorder="little") if is_packed else None
            if bits is None or bits[numel:].any():  # bits that fill up the last byte are 0
                raise SparsityError(f"{MASKS}: {len(packed)} bytes do not hold a mask of shape {shape} for {name}")
            masks[name] = torch.from_numpy(bits[:numel]).bool().reshape(shape)
    return masks
