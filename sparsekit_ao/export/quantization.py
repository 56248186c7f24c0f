"""`quantize` quantizes pruned models by torchao and keeps every zero.

Prune the model, call `squash_mask`, then `quantize`. For training that simulates quantization, the order is: torchao's
`QATConfig(step="prepare")`, `sparsifier.prepare`, training, `squash_mask`, `quantize` with `QATConfig(step="convert")`.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..checkpoints.conversion import Conversion
from ..errors import SparsityError
from ..models.names import owner_of
from ..models.running import Forward, call, checked_list, eval_mode, seeded, tensors_in
from ..removal.verify import Outputs, output_difference
from .weights import WeightToExport, checked_layers, layers_of, linear_refusals, two_four_refusals

_ORDER = "sparsifier.prepare, step, squash_mask, then quantize"
_QAT_ORDER = (
    "torchao.quantize_ with QATConfig(step='prepare'), sparsifier.prepare, training, sparsifier.squash_mask, quantize "
    "with QATConfig(step='convert')"
)


def quantize(
    model: nn.Module,
    config: Any,
    batches: Iterable[Any],
    *,
    tensors: Sequence[str] | None = None,
    forward: Forward | None = None,
) -> tuple[nn.Module, Conversion]:
    """Quantize a copy of a pruned model by `torchao.quantize_`, so that zeros stay zeros.

    Args:
        model: A squashed model, which is not changed.
        config: A config of torchao, such as `Int8WeightOnlyConfig()`. A config with a sparse `packing_format` needs 2:4
            weights on CUDA (torchao itself silently drops the weights that are too many for 2:4).
        batches: Typical inputs; both models are compared on the first batch. Dicts are passed as keyword arguments,
            tuples and lists as positional ones.
        tensors: The weights that must be quantized, as for `export.check`. torchao quantizes other Linear layers too.
        forward: A function `(model, batch) -> output` that is called instead of the model.

    Returns:
        The quantized copy, and a `Conversion`.

    Raises:
        SparsityError: A weight is masked, shared, not finite or not of a Linear; or torchao refuses, leaves one of
            these weights as it is, or changes a zero; or the quantized model returns NaN or other shapes.

    >>> from torchao.quantization import Int8WeightOnlyConfig  # doctest: +SKIP
    >>> small, report = quantize(model, Int8WeightOnlyConfig(), batches)  # doctest: +SKIP
    """
    all_layers = layers_of(model)
    _check_order(all_layers, config)
    packs = "sparse" in str(getattr(config, "packing_format", "")).lower()
    layers, _ = checked_layers(model, "quantize", _sparse_kernel_refusals if packs else linear_refusals, tensors)
    batch = checked_list(batches, forward, "quantize")[0]
    from torchao.quantization import quantize_

    try:
        converted = copy.deepcopy(model)
        quantize_(converted, config, filter_fn=None)  # all Linear layers, or those that a FqnToConfig names
    except Exception as e:
        name = type(config).__name__
        raise SparsityError(f"quantize: torchao refuses this model with {name}, or it cannot be copied: {e}") from e
    quantized = _checked_tensors(all_layers, {layer.fqn for layer in layers}, converted)
    wanted, outputs = (_outputs(m, batch, forward or call) for m in (model, converted))
    difference = output_difference(wanted, outputs) if wanted else float("inf")
    if difference == float("inf"):
        raise SparsityError(
            "quantize: the outputs for the first batch cannot be compared: the model returns no tensor, one of the "
            "models returns inf or nan, or the quantized one returns other shapes or other integers. Integers computed "
            "from outputs, such as an argmax, may change with rounding; compare what they are computed from"
        )
    return converted, Conversion(
        target="quantize",
        converted=tuple(quantized),
        left={a.fqn: "torchao does not quantize it with this config" for a in all_layers if a.fqn not in quantized},
        before=sum(layer.weight.nbytes for layer in all_layers if layer.fqn in quantized),
        after=sum(map(_bytes, quantized.values())),
        difference=difference,
    )


def _check_order(layers: Sequence[WeightToExport], config: Any) -> None:
    step = getattr(config, "step", None)  # of a QATConfig
    masked = [f"{layer.fqn} still has its mask" for layer in layers if layer.masked]
    if masked or str(getattr(step, "value", step)).lower() == "prepare":
        what = masked[0] if masked else "QATConfig(step='prepare') is for training, by torchao.quantize_ itself"
        raise SparsityError(f"quantize: {what}. The order that works: {_ORDER if step is None else _QAT_ORDER}.")


def _sparse_kernel_refusals(layer: WeightToExport) -> list[str]:
    refusals = linear_refusals(layer, (torch.bfloat16,)) or two_four_refusals(layer)
    device = layer.weight.device.type
    return refusals + ([] if device == "cuda" else [f"needs a weight on CUDA for sparse kernels, got one on {device}"])


def _checked_tensors(layers: Sequence[WeightToExport], required: set[str], converted: nn.Module) -> dict[str, Any]:
    """Return the quantized weights by name; raise unless all required ones are, with their zeros and 2:4 patterns."""
    tensors = {layer.fqn: getattr(*owner_of(converted, layer.fqn)) for layer in layers}
    quantized = {fqn: tensor for fqn, tensor in tensors.items() if hasattr(tensor, "__tensor_flatten__")}
    for layer in layers:
        tensor = tensors[layer.fqn]
        if layer.fqn in required and layer.fqn not in quantized:
            raise SparsityError(
                f"quantize: torchao left {layer.fqn} of shape {tuple(layer.weight.shape)} as it is with this "
                "config; its kernel may need other multiples. Take another config, or name others (tensors=[...])."
            )
        if layer.fqn in required:
            zeros = layer.weight == 0
            if len(at := (zeros & (tensor.dequantize().to(zeros.device) != 0)).nonzero()):
                raise SparsityError(
                    f"quantize: the zero of {layer.fqn} at {at[0].tolist()} is not zero after quantization with this "
                    "config; take a symmetric one"
                )
        if "sparse" in type(tensor).__name__.lower() and (refusals := two_four_refusals(layer)):
            raise SparsityError(
                f"quantize: this config packs {layer.fqn} as 2:4 as well, which {refusals[0]}. Name only 2:4 layers, "
                "by torchao's FqnToConfig."
            )
    return quantized


@torch.no_grad()
def _outputs(model: nn.Module, batch: Any, forward: Forward) -> Outputs:
    """Return the outputs in eval mode; random numbers are the same for both models."""
    with seeded([*model.parameters(), *model.buffers()]), eval_mode(model):
        result = forward(model, _pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), batch))
    return list(tensors_in("output", result))


def _bytes(tensor: Any) -> int:
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return sum(_bytes(getattr(tensor, name)) for name in parts) if parts else tensor.nbytes
