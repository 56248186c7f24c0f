"""`quantize` quantizes pruned models by torchao and keeps every zero.

Prune the model, call `squash_mask`, then `quantize`. For training that simulates quantization, the order is: torchao's
`QATConfig(step="prepare")`, `sparsifier.prepare`, training, `squash_mask`, `quantize` with `QATConfig(step="convert")`.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..checkpoints.conversion import Conversion
from ..errors import SparsityError
from ..models.names import owner_of
from ..models.running import Forward, call, checked_list, eval_mode, kept_generators, seeded, tensors_in
from ..removal.verify import Outputs, output_difference
from .weights import WeightToExport, checked_layers, layers_of, linear_refusals, two_four_refusals


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
        batches: Typical inputs, on which both models are compared. Dicts are passed as keyword arguments, tuples and
            lists as positional ones.
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
    batches = checked_list(batches, forward, "quantize")
    from torchao.quantization import quantize_

    try:
        converted = copy.deepcopy(model)
    except Exception as e:
        raise SparsityError(f"quantize: the model cannot be copied: {e}") from e
    try:
        quantize_(converted, config, filter_fn=None)  # all Linear layers, or those that a FqnToConfig names
    except Exception as e:
        raise SparsityError(f"quantize: torchao refuses this model with {type(config).__name__}: {e}") from e
    quantized = _checked_tensors(all_layers, {layer.fqn for layer in layers}, converted)
    difference, called = _compared(model, converted, batches, forward or call, layers)
    return converted, Conversion(
        target="quantize",
        converted=tuple(quantized),
        left={a.fqn: "torchao does not quantize it with this config" for a in all_layers if a.fqn not in quantized},
        before=sum(layer.weight.nbytes for layer in all_layers if layer.fqn in quantized),
        after=sum(map(_bytes, quantized.values())),
        difference=difference,
        notes=tuple(
            f"{a.fqn}: no batch calls its module, so it may not be compared" for a in layers if a.fqn not in called
        ),
    )


def _check_order(layers: Sequence[WeightToExport], config: Any) -> None:
    step = getattr(config, "step", None)  # of a QATConfig
    order = "sparsifier.prepare, step, squash_mask, then quantize"
    if step is not None:
        order = (
            "torchao.quantize_ with QATConfig(step='prepare'), sparsifier.prepare, training, "
            "sparsifier.squash_mask, quantize with QATConfig(step='convert')"
        )
    if masked := [layer.fqn for layer in layers if layer.masked]:
        raise SparsityError(f"quantize: {masked[0]} still has its mask. The order that works: {order}.")
    if str(getattr(step, "value", step)).lower() == "prepare":
        raise SparsityError(
            "quantize: QATConfig(step='prepare') changes layers for training, so call torchao.quantize_ itself, before "
            "sparsifier.prepare; after training call squash_mask, then quantize with step='convert'"
        )


def _sparse_kernel_refusals(layer: WeightToExport) -> list[str]:
    refusals = linear_refusals(layer, (torch.bfloat16,)) or two_four_refusals(layer)
    device = layer.weight.device.type
    return refusals + ([] if device == "cuda" else [f"needs a weight on CUDA for sparse kernels, got one on {device}"])


def _checked_tensors(layers: Sequence[WeightToExport], required: set[str], converted: nn.Module) -> dict[str, Any]:
    """Return the quantized weights by name; raise unless all required ones are, with their zeros and 2:4 patterns."""
    quantized = {}
    for layer in layers:
        tensor = getattr(*owner_of(converted, layer.fqn))
        if hasattr(tensor, "__tensor_flatten__"):
            quantized[layer.fqn] = tensor
        elif layer.fqn in required:
            raise SparsityError(
                f"quantize: torchao left {layer.fqn} of shape {tuple(layer.weight.shape)} as it is with this "
                "config; its kernel may need other multiples. Take another config, or name others (tensors=[...])."
            )
        if layer.fqn in required:
            is_lost = (layer.weight == 0) & (tensor.dequantize().to(layer.weight.device) != 0)
            if len(at := is_lost.nonzero()):
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
def _compared(
    model: nn.Module, converted: nn.Module, batches: Sequence[Any], forward: Forward, layers: Sequence[WeightToExport]
) -> tuple[float, set[str]]:
    """Return the largest difference of outputs in eval mode, batch by batch, and the layers that the model calls."""
    calls, called, differences = list[str](), set[str](), list[float]()  # calls of the model's own modules
    seeds = seeded([*model.parameters(), *model.buffers()])
    with ExitStack() as hooks, seeds, eval_mode(model), eval_mode(converted):
        for layer in layers:
            hooks.enter_context(layer.module.register_forward_pre_hook(lambda *_, fqn=layer.fqn: calls.append(fqn)))
        for batch in batches:
            with kept_generators():  # so that both draw the same random numbers
                wanted = _outputs(model, batch, forward)
            called |= {*calls}
            calls.clear()
            try:
                outputs = _outputs(converted, batch, forward)
            except Exception as e:
                raise SparsityError(f"quantize: the converted model does not run: {e}") from e
            if calls:
                raise SparsityError(
                    f"quantize: a copy of the model still calls the original module of {calls[0]}, as closures and "
                    "compiled models do. Pass the model before torch.compile, and call layers as attributes of their "
                    "module."
                )
            if nan := [place for place, tensor in wanted if bool(tensor.isnan().any())]:
                raise SparsityError(
                    f"quantize: {nan[0]} of the model contains nan on these batches, and nan equals nothing"
                )
            differences += [output_difference(wanted, outputs)] if wanted or outputs else []
    if not differences:
        raise SparsityError("quantize: the model returned no tensor, so there is nothing to compare")
    if (difference := max(differences)) == float("inf"):
        raise SparsityError(
            "quantize: the converted model returns other shapes, other integers, inf or nan. Integers computed from "
            "outputs, such as an argmax, may change with rounding; compare what they are computed from"
        )
    return difference, called


def _outputs(model: nn.Module, batch: Any, forward: Forward) -> Outputs:
    result = forward(model, _pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), batch))
    return [(place, tensor.detach().clone()) for place, tensor in tensors_in("output", result)]


def _bytes(tensor: Any) -> int:
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return sum(_bytes(getattr(tensor, name)) for name in parts) if parts else tensor.nbytes
