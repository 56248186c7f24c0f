"""`quantize`: pruned models quantized by torchao, every zero kept.

Orders that work: prune, `squash_mask`, then `quantize`; or, with training that simulates quantization (QAT), torchao's
`QATConfig(step="prepare")`, then `sparsifier.prepare`, training, `squash_mask`, and `quantize` with
`QATConfig(step="convert")`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..removal.results import Conversion
from . import rules
from .batches import Forward, calls_of, check_calls, compare, copied, listed, outputs_of
from .layers import Layer, checked_layers, layers_of


def reasons(layer: Layer) -> list[str]:
    """Why torchao should not quantize a weight; empty if it may."""
    found = rules.is_a(layer, nn.Linear) or rules.has_dtype(layer, [torch.float32, torch.bfloat16, torch.float16])
    return found or [
        *rules.is_not_parametrized(layer),
        *rules.is_not_shared(layer),
        *rules.is_finite(layer),
    ]


def quantize(
    model: nn.Module,
    config: Any,
    batches: Iterable[Any],
    *,
    tensors: Sequence[str] | None = None,
    forward: Forward | None = None,
) -> tuple[nn.Module, Conversion]:
    """Quantize the Linear layers of a pruned model with `torchao.quantize_`, and check that zeros stay zeros.

    Args:
        model: squashed; it does not change.
        config: of torchao, such as `Int8WeightOnlyConfig()`. One whose `packing_format` is sparse needs 2:4 weights on
            CUDA (torchao by itself drops whatever is too much for 2:4 without a word).
        batches: typical inputs, on which both models are compared; dicts are passed as keyword arguments, tuples and
            lists as positional ones.
        tensors: names, globs or `re:` expressions of weights that must be quantized. None is every weight of which at
            least a tenth is zero. torchao quantizes the model's other Linear layers too.
        forward: `(model, batch) -> output`, if the model is called in another manner.

    Returns:
        A quantized copy, and a `Conversion`.

    Raises:
        SparsityError: a weight is masked, shared, not finite or not of a Linear; torchao refuses, leaves one of these
            weights as it is, or changes a zero; the quantized model returns nan or other shapes.

    >>> from torchao.quantization import Int8WeightOnlyConfig  # doctest: +SKIP
    >>> small, report = quantize(model, Int8WeightOnlyConfig(), batches)  # doctest: +SKIP
    """
    step = _qat_step(config)
    wanted = _is_2_4 if "sparse" in str(getattr(config, "packing_format", "")).lower() else reasons
    _refuse_masks(model, step)
    if step == "prepare":
        raise SparsityError(
            "quantize: QATConfig(step='prepare') changes layers for training, so call torchao.quantize_ itself, before "
            "sparsifier.prepare; after training call squash_mask, then quantize with step='convert'"
        )
    layers, _ = checked_layers(model, "quantize", wanted, tensors)
    from torchao.quantization import quantize_

    batches, modules = listed(batches, "quantize"), {a.fqn: a.name for a in layers}
    with calls_of(model, modules) as before:
        outputs = outputs_of(model, batches, forward)
    converted = copied(model, "quantize")
    try:
        quantize_(converted, config, filter_fn=None)  # all Linear layers, or those that a FqnToConfig names
    except Exception as e:
        raise SparsityError(f"quantize: torchao refuses this model with {type(config).__name__}: {e}") from e
    _check_zeros(layers, converted)
    done, left = _split(model, converted)
    _check_packed(model, converted, done)
    difference = compare(outputs, converted, batches, forward, "quantize")
    check_calls(converted, {name: modules[name] for name in before}, batches, forward, "quantize")
    report = Conversion(
        target="quantize",
        converted=tuple(done),
        left=dict.fromkeys(left, "torchao does not quantize it with this config"),
        before=sum(_bytes(_tensor(model, name)) for name in done),
        after=sum(_bytes(_tensor(converted, name)) for name in done),
        difference=difference,
        notes=tuple(
            f"{name}: no batch calls its module, so it may not be compared" for name in modules if name not in before
        ),
    )
    return converted, report


def _qat_step(config: Any) -> str | None:
    step = getattr(config, "step", None)
    return None if step is None else str(getattr(step, "value", step)).lower()


def _refuse_masks(model: nn.Module, step: str | None) -> None:
    masked = [layer.fqn for layer in layers_of(model) if layer.masked]
    if not masked:
        return
    order = (
        "torchao.quantize_ with QATConfig(step='prepare'), sparsifier.prepare, training, sparsifier.squash_mask, "
        "quantize with QATConfig(step='convert')"
        if step is not None
        else "sparsifier.prepare, step, squash_mask, then quantize"
    )
    raise SparsityError(f"quantize: {masked[0]} still has its mask. The order that works: {order}.")


def _is_2_4(layer: Layer) -> list[str]:
    found = reasons(layer) or rules.has_dtype(layer, [torch.bfloat16]) or rules.keeps_n_of_m(layer, 2, 4)
    device = layer.weight.device.type
    return found + ([] if device == "cuda" else [f"needs a weight on CUDA for sparse kernels, got one on {device}"])


def _tensor(model: nn.Module, fqn: str) -> Tensor:
    module, _, name = fqn.rpartition(".")
    found: Tensor = getattr(model.get_submodule(module), name)
    return found


def _split(model: nn.Module, converted: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the weights that are quantized now, and of the others."""
    done: list[str] = []
    left: list[str] = []
    for layer in layers_of(model):
        (done if _is_quantized(_tensor(converted, layer.fqn)) else left).append(layer.fqn)
    return done, left


def _is_quantized(tensor: Tensor) -> bool:
    return hasattr(tensor, "dequantize") and type(tensor) not in (Tensor, nn.Parameter)


def _check_zeros(layers: Sequence[Layer], converted: nn.Module) -> None:
    for layer in layers:
        found = _tensor(converted, layer.fqn)
        if not _is_quantized(found):
            raise SparsityError(
                f"quantize: torchao left {layer.fqn} of shape {tuple(layer.weight.shape)} as it is with this "
                "config; its kernel may need other multiples. Take another config, or name others (tensors=[...])."
            )
        changed = ((layer.weight == 0) & (found.dequantize().to(layer.weight.device) != 0)).nonzero()
        if len(changed):
            raise SparsityError(
                f"quantize: the zero of {layer.fqn} at {changed[0].tolist()} is not zero after quantization with this "
                "config; take a symmetric one"
            )


def _check_packed(model: nn.Module, converted: nn.Module, done: Sequence[str]) -> None:
    """Weights that are packed as 2:4 must have been 2:4, also those that nobody pruned."""
    for layer in layers_of(model):
        if layer.fqn in done and "sparse" in type(_tensor(converted, layer.fqn)).__name__.lower():
            why = rules.keeps_n_of_m(layer, 2, 4)
            if why:
                raise SparsityError(
                    f"quantize: this config packs {layer.fqn} as 2:4 as well, which {why[0]}. Name only 2:4 layers, by "
                    "torchao's FqnToConfig."
                )


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of all the tensors of which a subclass is made."""
    if not _is_quantized(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(_bytes(getattr(tensor, name)) for name in names)
