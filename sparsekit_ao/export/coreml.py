"""Buffers by which coremltools stores pruned weights as sparse ones."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..removal.results import Conversion
from . import rules
from .batches import copied
from .layers import Layer, checked_layers

_THRESHOLD = torch.finfo(torch.float16).eps  # coremltools sets values up to this magnitude to zero, in every dtype
_PRUNING, _QUANTIZATION = 1, 3  # coremltools' numbers
_PREFIX = "_COREML_/"  # of the buffers that coremltools reads
_LARGEST = torch.finfo(torch.float16).max


def reasons(layer: Layer) -> list[str]:
    """Why coremltools would not store a weight sparse; empty if it would."""
    found = rules.is_a(layer, nn.Linear, nn.Conv1d, nn.Conv2d) or rules.has_dtype(layer, [torch.float32])
    if found:
        return found
    found = [*rules.is_not_parametrized(layer), *rules.is_not_shared(layer), *rules.is_finite(layer)]
    return found or rules.has_zeros(layer, 1 / 16) or _fits_float16(layer)


def coreml_metadata(
    model: nn.Module, tensors: Sequence[str] | None = None, *, int8: bool = False
) -> tuple[nn.Module, Conversion]:
    """A copy of a squashed model with the buffers for which coremltools stores pruned weights sparse.

    For each weight there is one buffer, and one for the model. They are part of the state dict, so they pass through
    `torch.export`, and `coremltools.convert` (a target of iOS16 or later) makes a `constexpr_sparse_to_dense` of the
    weight: its nonzeros, and a bit for each element.

    Args:
        model: squashed, float32 (coremltools converts to float16).
        tensors: names, globs or `re:` expressions of weights; None is every weight of which at least a tenth is zero.
        int8: the nonzeros are stored as int8 as well, by a scale for each output: the largest magnitude / 127. Needs a
            target of iOS18.

    Returns:
        The copy, and what was marked; bytes are those of the weights as coremltools stores them, dense in float16 and
        sparse.

    Raises:
        SparsityError: a weight does not fit, or has a mask. The model is never changed.

    >>> model = nn.Sequential(nn.Linear(64, 64, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:, 16:].zero_()
    >>> marked, report = coreml_metadata(model)
    >>> sorted(marked.state_dict())
    ['0._COREML_/weight/compression_type', '0.weight', '_COREML_/metadata_version']
    """
    chosen, left = checked_layers(model, "coreml_metadata", reasons, tensors, squashed=True)
    marked = copied(model, "coreml_metadata")
    for module in marked.modules():  # of an earlier call
        for name in [name for name in module._buffers if name.startswith(_PREFIX)]:
            delattr(module, name)
    marked.register_buffer(f"{_PREFIX}metadata_version", torch.tensor(1))
    for layer in chosen:
        for field, value in _fields(layer.weight, int8).items():
            marked.get_submodule(layer.name).register_buffer(f"{_PREFIX}weight/{field}", value)
    sizes = [(layer.weight.numel(), int(layer.weight.abs().gt(_THRESHOLD).sum())) for layer in chosen]
    return marked, Conversion(
        target="coreml_metadata",
        converted=tuple(layer.fqn for layer in chosen),
        left=left,
        before=sum(2 * n for n, _ in sizes),
        after=sum((1 if int8 else 2) * kept + math.ceil(n / 8) for n, kept in sizes),
        notes=tuple(note for layer in chosen for note in _dropped(layer)),
    )


def _fields(weight: Tensor, int8: bool) -> dict[str, Tensor]:
    if not int8:
        return {"compression_type": torch.tensor([_PRUNING])}
    largest = weight.flatten(1).abs().amax(1).clamp(min=torch.finfo(torch.float16).tiny)
    scale = (largest / 127).reshape(-1, *[1] * (weight.ndim - 1))
    kinds = torch.tensor([_PRUNING, _QUANTIZATION])
    return {"compression_type": kinds, "quantization_n_bits": torch.tensor(8), "quantization_scale": scale}


def _fits_float16(layer: Layer) -> list[str]:
    largest = max(abs(float(end)) for end in layer.weight.aminmax())
    return [] if largest <= _LARGEST else [f"needs values up to {_LARGEST:g}, those of float16, got {largest:g}"]


def _dropped(layer: Layer) -> list[str]:
    """A note on values that coremltools sets to zero although they are not."""
    size = layer.weight.abs()
    count = int(((size > 0) & (size <= _THRESHOLD)).sum())
    return [f"{layer.fqn}: coremltools sets {count:,} nonzeros of at most {_THRESHOLD:.1e} to zero"] if count else []
