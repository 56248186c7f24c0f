"""Hugging Face models and adapters: `save_pretrained` and `load_masks`, and `merge_lora`.

A masked model that transformers saves cannot be loaded: its tensors have other names, so `from_pretrained` initializes
the weights anew. And LoRA adapters are dense, so merging one into a pruned weight fills its zeros.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SparsityError
from ..masking import WeightMask, dense_state_dict, find_mask, installed, remove_mask, select
from ..removal.results import Compaction, Conversion
from ..sparsifiers.base import MaskSparsifier
from ..sparsifiers.names import owner_of, parameter_of
from .compacted_files import save_compacted
from .encoding import bits_of, flat, from_mask, to_mask
from .tensor_file import open_file, read_json

MASKS = "masks.safetensors"

Masks = MaskSparsifier | Mapping[str, Tensor]


def save_pretrained(model: Any, sparsifier: Masks | Compaction, path: str | Path, **kwargs: Any) -> Conversion:
    """Save a masked, squashed or compacted transformers model as `from_pretrained` loads it.

    Of a masked or squashed one, writes what `model.save_pretrained` writes, with masked values under their plain names,
    and `masks.safetensors`, one bit for each element. Of a compacted one, what `model.save_pretrained` writes; where
    its config does not describe it, the dense model's config and `manifest.json`, which `load_pretrained` reads. The
    model does not change.

    Args:
        model: a transformers model (or anything with `save_pretrained(path, state_dict=...)`).
        sparsifier: that masks it, before or after `squash_mask`; or {name: mask}; or the report of `shrink` or
            `compact`.
        path: folder.
        kwargs: for `model.save_pretrained`.

    Returns:
        A `Conversion`: bytes of the masked tensors, which are saved dense, and of the file of masks; of a compacted
        model, bytes of the dense one and of the files, and the line that loads it (in `notes`).

    Raises:
        SparsityError: no such method; adapters are still unmerged; the model has no tensor of a mask's name and shape,
            or one that is not zero outside of its mask; a written file does not hold the masked values.

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
    if _has_adapters(model) or callable(getattr(model, "get_base_model", None)):
        raise SparsityError("save_pretrained: the model has adapters; call export.merge_lora(model, sparsifier) first")
    if isinstance(sparsifier, Compaction):
        return save_compacted(model, sparsifier, path, **kwargs)
    masks = {name: mask for name, _, _, mask in _masked_tensors([model], sparsifier, "save_pretrained")}
    values = dense_state_dict(model)
    for name, mask in masks.items():
        _check_masked(name, values, mask)
    folder = Path(path)
    model.save_pretrained(folder, state_dict=dict(values), **kwargs)
    shapes = {"shapes": json.dumps({name: list(mask.shape) for name, mask in masks.items()})}
    save_file({name: to_mask(mask.cpu().flatten()) for name, mask in masks.items()}, folder / MASKS, metadata=shapes)
    missing = masks.keys() - _check_files(folder, {name: values[name] for name in masks})
    notes = [
        f"{name} has no tensor of this name in a safetensors file, so it is not compared" for name in sorted(missing)
    ]
    return Conversion(
        target="save_pretrained",
        converted=tuple(masks),
        left={},
        before=sum(values[name].numel() * values[name].element_size() for name in masks),
        after=(folder / MASKS).stat().st_size,
        notes=(f"the bytes after are those of {MASKS}; the weights are saved dense, with their zeros", *notes),
    )


def _takes_state_dict(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "state_dict" or p.kind is p.VAR_KEYWORD for p in parameters)


def load_masks(path: str | Path) -> dict[str, Tensor]:
    """The masks that `save_pretrained` wrote to a folder: {name of the tensor: bool mask, True where it is kept}.

    Raises:
        SparsityError: the file is damaged, or was not written by `save_pretrained`.

    >>> masks = load_masks("pruned")  # doctest: +SKIP
    >>> masks["layer.weight"].dtype  # doctest: +SKIP
    torch.bool
    """
    with open_file(Path(path) / MASKS) as file:
        shapes = read_json(Path(path) / MASKS, file, "shapes", "save_pretrained")
        if not isinstance(shapes, dict) or shapes.keys() != set(file.keys()):
            raise SparsityError(
                f"{MASKS}: its metadata must hold the shape of every mask and no other, got {shapes!r:.80}"
            )
        return {name: _unpacked(name, file.get_tensor(name), shape) for name, shape in shapes.items()}


def merge_lora(model: Any, sparsifier: Masks) -> tuple[nn.Module, Conversion]:
    """Merge LoRA adapters into a pruned model and apply its masks again.

    peft's `merge_and_unload` adds a dense product to each weight: all zeros are lost, or, while masks are registered,
    the adapter is lost. With this function, the merged weight is masked; the part of the adapter that a mask drops is
    reported, because the outputs change by it. Adapters of other kinds that peft can merge are merged as well.

    Args:
        model: of `peft.get_peft_model`; changed in place, as `merge_and_unload` does. Its active adapters are merged.
        sparsifier: that masked the base model, before or after `squash_mask`; or {name: mask}, as from `load_masks`,
            with names of the base model, or of `model`.

    Returns:
        The base model, without adapters, and a `Conversion` whose notes and difference are the fraction of each
        adapter's norm that its mask drops, and the largest of them. Masks that were registered still are.

    Raises:
        SparsityError: no adapters; some are merged already, disabled, or not finite; the base model has no tensor of a
            mask's name and shape; a masked layer is in `modules_to_save`. Nothing is then changed.

    >>> merged, report = merge_lora(peft_model, sparsifier)  # doctest: +SKIP
    >>> merged.save_pretrained("merged")  # doctest: +SKIP
    """
    if not _has_adapters(model) or not callable(getattr(model, "merge_and_unload", None)):
        raise SparsityError(f"merge_lora: expected a model of peft.get_peft_model, got {type(model).__name__}")
    _check_adapters(model)
    tensors = _masked_tensors([model.get_base_model(), model], sparsifier, "merge_lora")
    ends = [n for n, module, own, _ in tensors if find_mask(module, own) and not _is_in(model.get_base_model(), n)]
    if ends:
        raise SparsityError(
            f"merge_lora: without adapters, {ends[0]} has another name; call sparsifier.squash_mask() first"
        )
    idle = sorted(set(getattr(model, "peft_config", ())) - set(model.active_adapters))
    before = {name: parameter_of(module, own).detach().clone() for name, module, own, _ in tensors}
    keeps = {name: mask.to(before[name].device) for name, _, _, mask in tensors}
    dropped = {}
    with _masks_removed(tensors, before, keeps) as registered:
        merged: nn.Module = model.merge_and_unload()
        for name, module, own, _ in tensors:
            parameter = parameter_of(module, own)
            start = select(before[name], keeps[name]) if name in registered else before[name]
            dropped[name] = _dropped(parameter.detach(), start, keeps[name])
            if name not in registered:
                with torch.no_grad():
                    parameter.copy_(select(parameter.detach(), keeps[name]))
    shares = {name: share for name, share in dropped.items() if share is not None}
    size = sum(t.numel() * t.element_size() for t in before.values())
    report = Conversion(
        target="merge_lora",
        converted=tuple(shares),
        left={name: "no adapter changes it" for name in dropped if name not in shares},
        before=size,
        after=size,
        difference=max(shares.values(), default=0.0),
        notes=(
            *(f"{name}: its mask drops {share:.0%} of the adapter's norm" for name, share in shares.items()),
            *(f"the adapter {name!r} is not active, so it is not merged but removed" for name in idle),
        ),
    )
    return merged, report


def _adapted(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that have adapters of peft; these list the attributes that hold them."""
    return [m for m in model.modules() if getattr(m, "adapter_layer_names", ())]


def _has_adapters(model: Any) -> bool:
    return bool(_adapted(model))


def _check_adapters(model: nn.Module) -> None:
    for layer in _adapted(model):
        kind = type(layer).__name__
        if getattr(layer, "merged_adapters", ()):
            raise SparsityError(
                f"merge_lora: an adapter is merged into a {kind} already; call model.unmerge_adapter() first"
            )
        if getattr(layer, "disable_adapters", False):
            raise SparsityError("merge_lora: adapters are disabled; call model.enable_adapter_layers() first")
        for name in layer.adapter_layer_names:  # type: ignore[union-attr]
            held = getattr(layer, name, None)
            parameters = held.named_parameters() if isinstance(held, nn.Module) else ()
            wrong = next((own for own, p in parameters if not bool(p.isfinite().all())), None)
            if wrong is not None:
                raise SparsityError(f"merge_lora: {name}.{wrong} of a {kind} is not finite (nan or inf)")


def _masked_tensors(
    models: Sequence[nn.Module], sparsifier: Masks, target: str
) -> list[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, tensor's name in it, bool mask) of every mask; a layer with adapters is looked through.

    Args:
        models: where the names are looked up; the first that has a name counts.
        sparsifier: that has the masks, or {name: mask}.
        target: first word of error messages.
    """
    if isinstance(sparsifier, MaskSparsifier):
        masks = {name: s["mask"] for name, s in sparsifier.state.items() if s.get("mask") is not None}
    elif isinstance(sparsifier, Mapping):
        masks = dict(sparsifier)
    else:
        kind = f"{type(sparsifier).__module__}.{type(sparsifier).__name__}"
        raise SparsityError(f"{target}: expected a sparsifier of sparsekit_ao, or {{name: mask}}, got {kind}")
    if not masks:
        raise SparsityError(f"{target}: there are no masks; call sparsifier.prepare and step first")
    found = []
    for name, mask in masks.items():
        module, own = _owner(models, name, target)
        shape = parameter_of(module, own).shape
        if not isinstance(mask, Tensor) or shape != mask.shape:
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise SparsityError(f"{target}: {name} is {tuple(shape)}, but its mask is {got}")
        found.append((name, module, own, mask.detach() != 0))
    return found


def _owner(models: Sequence[nn.Module], name: str, target: str) -> tuple[nn.Module, str]:
    for model in models:
        if not _is_in(model, name):
            continue
        module, own = owner_of(model, name)
        if hasattr(module, "modules_to_save"):
            raise SparsityError(
                f"{target}: {name} is in modules_to_save, so peft replaces it by a copy without its mask. Pass the "
                "other masks as {name: mask}, and prune this weight again afterwards."
            )
        module = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[operator]
        if module._parameters.get(own) is not None or parametrize.is_parametrized(module, own):
            return module, own
    raise SparsityError(f"{target}: the model has no tensor {name}, for which there is a mask")


def _is_in(model: nn.Module, name: str) -> bool:
    """Whether there is a module of which a tensor could have this name."""
    try:
        return isinstance(owner_of(model, name)[0], nn.Module)
    except AttributeError:
        return False


def _check_masked(name: str, values: Mapping[str, Tensor], mask: Tensor) -> None:
    """Raise a SparsityError if a value outside of the mask is not zero."""
    if name not in values:
        raise SparsityError(f"save_pretrained: the state dict of the model has no tensor {name}")
    wrong = ((values[name].detach() != 0) & ~mask.to(values[name].device)).nonzero()
    if len(wrong):
        raise SparsityError(
            f"save_pretrained: {name} is not zero at {wrong[0].tolist()}, which its mask drops ({len(wrong):,} such "
            "values): it was changed after squash_mask, or the mask is another model's. Apply the mask first."
        )


@contextmanager
def _masks_removed(
    tensors: Sequence[tuple[str, nn.Module, str, Tensor]], before: Mapping[str, Tensor], keeps: Mapping[str, Tensor]
) -> Iterator[set[str]]:
    """Take registered masks off and write masked weights; afterwards, register them, with what they hid added again.

    The norms by which some adapters (DoRA) scale a weight are those of the masked one. Yields the names of the tensors.
    """
    found = [(name, module, own, find_mask(module, own)) for name, module, own, _ in tensors]
    hidden = {name: (module, own) for name, module, own, mask in found if mask is not None}
    registered: list[tuple[nn.Module, str, WeightMask]] = [
        (m, own, mask) for _, m, own, mask in found if mask is not None
    ]
    for name, (module, own) in hidden.items():
        remove_mask(module, own)
        with torch.no_grad():
            parameter_of(module, own).copy_(select(before[name], keeps[name]))
    try:
        yield set(hidden)
    finally:
        for name, (module, own) in hidden.items():
            parameter = parameter_of(module, own)
            with torch.no_grad():
                parameter.copy_(torch.where(keeps[name], parameter, parameter + before[name]))
        with installed(registered):
            pass


def _dropped(merged: Tensor, start: Tensor, keep: Tensor) -> float | None:
    """The part that a mask drops, relative to the norm of the change; None if nothing changes."""
    norm = float((merged - start).float().norm())
    return float(select(merged, ~keep).float().norm()) / norm if norm else None


def _check_files(folder: Path, values: Mapping[str, Tensor]) -> set[str]:
    """Compare masked tensors with the files that transformers wrote; returns the names that were found there."""
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != MASKS:
            with open_file(path) as file:
                for name in set(file.keys()) & set(values):
                    found.add(name)
                    written, value = flat(file.get_tensor(name)), flat(values[name])
                    if written.dtype != value.dtype or not torch.equal(bits_of(written), bits_of(value)):
                        raise SparsityError(f"save_pretrained: {path.name} does not hold the masked values of {name}")
    return found


def _unpacked(name: str, bits: Tensor, shape: Any) -> Tensor:
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    n = math.prod(shape) if is_shape else -1
    kept = from_mask(bits, n) if bits.dtype == torch.uint8 and bits.ndim == 1 and len(bits) == -(-n // 8) else None
    if kept is None:
        raise SparsityError(f"{MASKS}: {len(bits)} bytes do not hold a mask of shape {shape} for {name}")
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.view(-1)[kept] = True
    return mask
