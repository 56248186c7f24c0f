"""`fbgemm`: Linear layers with 1x4 blocks of zeros run by torch's own sparse int8 kernels on x86.

The kernels are `torch.ops.sparse.qlinear_prepack` and `qlinear`, for which torch.ao's default block shape (1, 4) was
made. They leave out every block of 4 consecutive inputs of one output that holds only zeros.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..removal.results import Conversion
from . import rules
from .batches import Forward, check_calls, compare, copied, listed
from .int8_linear import BITS, ENGINE, FIELDS, SparseInt8Linear, fault_of
from .layers import Layer, checked_layers, plain_name
from .ranges import record_ranges

LEAST_ZEROS = 0.6  # fraction of blocks that hold only zeros; with fewer, dense int8 is faster at every batch size
_MOST_INPUTS = (1 << 31) // (127 * 127)  # with more, the kernel's 32-bit sums may overflow


def reasons(layer: Layer) -> list[str]:
    """Why the kernels do not take a weight; empty if they do."""
    found = rules.is_a(layer, nn.Linear) or rules.has_dtype(layer, [torch.float32])
    if found:
        return found
    found = [*rules.is_not_parametrized(layer), *rules.is_not_shared(layer), *rules.computes_as(layer, nn.Linear)]
    found += [*_is_on_cpu(layer), *rules.has_multiples(layer, 1, 4)]
    return found or [*_has_few_inputs(layer), *(rules.is_finite(layer) or _has_zero_blocks(layer))]


def fbgemm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tensors: Sequence[str] | None = None,
    forward: Forward | None = None,
    bits: int = BITS,
) -> tuple[nn.Module, Conversion]:
    """Convert the pruned Linear layers to sparse int8 layers, which run on x86 CPUs.

    Weights become int8 with one scale for each output, activations 7-bit integers with one scale for each layer, whose
    range is the one seen on the batches; values outside are clamped. All other modules stay as they are. The result is
    for inference; it can be compiled, deep-copied, pickled (`torch.save`) and saved as a state dict, which
    `load_fbgemm` loads. `torch.export` does not take it, because the packed weight is no tensor. There is no dynamic
    variant: the x86 kernel needs the range of its output in advance.

    Args:
        model: squashed, float32, on the CPU; it does not change.
        batches: typical inputs, from which ranges are taken and on which both models are compared; dicts are passed as
            keyword arguments, tuples and lists as positional ones.
        tensors: names, globs or `re:` expressions of the weights to convert. None is every weight of which at least a
            tenth is zero.
        forward: `(model, batch) -> output`, if the model is called in another manner.
        bits: of activations, at most 7.

    Returns:
        A converted copy, and a `Conversion`. The difference of int8 from float32 may well be some percent; compare your
        own measure of quality too.

    Raises:
        SparsityError: a weight is not taken (see `export.check(model, "fbgemm")`), is still masked, or was not reached
            by the batches; 8 bits; a CPU without these kernels; the converted model returns nan or other shapes.

    >>> from sparsekit_ao import ScopeSparsifier, export, patterns
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    >>> sparsifier = ScopeSparsifier(pattern=patterns.blocks(1, 4, 0.75))
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> sparsifier.squash_mask()
    >>> converted, report = export.fbgemm(model, [torch.randn(8, 64)])
    >>> converted[0]
    SparseInt8Linear(in_features=64, out_features=32, bias=True, blocks=128 of 512)
    >>> report.converted, dict(report.left)
    (('0.weight',), {'2.weight': 'less than 10% of it is zero'})
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= BITS:
        raise SparsityError(
            f"fbgemm: bits must be 1 to {BITS}, got {bits!r}: with 8 bits the kernel's 16-bit sums overflow silently"
        )
    layers, left = checked_layers(model, "fbgemm", reasons, tensors, squashed=True)
    if ENGINE not in torch.backends.quantized.supported_engines:
        raise SparsityError("fbgemm: this build of torch, or this CPU, has no fbgemm kernels; they need x86 with AVX2")
    batches = listed(batches, "fbgemm")
    ranges, outputs = record_ranges(model, layers, batches, forward, "fbgemm")
    modules = {a.fqn: a.name for a in layers}
    new = {a.name: SparseInt8Linear.of(a.module, ranges[a.fqn], bits) for a in layers}
    converted = copied(model, "fbgemm", new)
    difference = compare(outputs, converted, batches, forward, "fbgemm")
    check_calls(converted, modules, batches, forward, "fbgemm")
    small = [converted.get_submodule(a.name) for a in layers]
    report = Conversion(
        target="fbgemm",
        converted=tuple(a.fqn for a in layers),
        left=left,
        before=sum(_bytes(a.module) for a in layers),
        after=sum(map(_bytes, small)),
        difference=difference,
    )
    return converted, report


def load_fbgemm(model: nn.Module, state_dict: dict[str, Tensor]) -> nn.Module:
    """Convert the layers of a dense model that a state dict of a converted one holds, and load it, in place.

    Args:
        model: constructed as the model before `fbgemm` was, with any weights.
        state_dict: of a model that `fbgemm` returned; plain tensors, which safetensors stores as well.

    Returns:
        The model.

    Raises:
        SparsityError: a converted layer is no Linear of the model, or the state dict is of another model or damaged.
            The model is then unchanged.

    >>> from sparsekit_ao import export
    >>> model, fresh = (torch.nn.Sequential(torch.nn.Linear(64, 32)) for _ in range(2))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:, 16:].zero_()
    >>> converted, _ = export.fbgemm(model, [torch.randn(8, 64)])
    >>> x = torch.randn(2, 64)
    >>> torch.equal(load_fbgemm(fresh, converted.state_dict())(x), converted(x))
    True
    """
    layers = _stored_layers(state_dict)
    found = {plain_name(name): (name, m) for name, m in model.named_modules()}
    for name, own in layers.items():
        fault, (_, linear) = fault_of(own), found.get(name, ("", None))
        if fault is not None:
            raise SparsityError(f"load_fbgemm: {name!r} in the state dict is damaged: {fault}")
        shape, bias = own["shape"].tolist(), "bias" in own
        fits = _is_linear(linear) and [linear.out_features, linear.in_features] == shape
        if not name or not fits or (linear.bias is not None) != bias:
            wanted = f"a torch.nn.Linear of {shape[1]} inputs and {shape[0]} outputs with bias={bias} inside the model"
            raise SparsityError(f"load_fbgemm: {name!r} must be {wanted}, got {linear}")
    _check_others(model.state_dict(), state_dict, layers)
    new = {found[name][0]: SparseInt8Linear(**{k: t.clone() for k, t in own.items()}) for name, own in layers.items()}
    for path, layer in new.items():
        model.set_submodule(path, layer.train(model.get_submodule(path).training))
    model.load_state_dict(state_dict)
    return model


def _stored_layers(state_dict: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{name of a SparseInt8Linear: its tensors} of a state dict."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state_dict.items():
        name, _, field = key.rpartition(".")
        if field in (*FIELDS, "bias"):
            found.setdefault(name, {})[field] = tensor
    return {name: own for name, own in found.items() if own.keys() >= FIELDS.keys()}


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _check_others(own: Mapping[str, Any], saved: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Tensors outside of converted layers must be those of the model."""
    expected, given = ({k for k in state if k.rpartition(".")[0] not in layers} for state in (own, saved))
    if given != expected:
        name = min(given ^ expected)
        raise SparsityError(f"load_fbgemm: the state dict is of another model: {name} is in one only")
    for name in sorted(expected):
        one, other = own[name], saved[name]
        if isinstance(one, Tensor) and (not isinstance(other, Tensor) or one.shape != other.shape or one.is_meta):
            got = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            hint = "; model.to_empty(device='cpu') first" if one.is_meta else ""
            place = f"{tuple(one.shape)} on {one.device.type}"
            raise SparsityError(f"load_fbgemm: {name} of the model is {place}, in the state dict {got}{hint}")


def _bytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _has_few_inputs(layer: Layer) -> list[str]:
    inputs = layer.weight.shape[1]
    return (
        []
        if inputs <= _MOST_INPUTS
        else [f"needs at most {_MOST_INPUTS:,} inputs, whose sums fit 32 bits, got {inputs:,}"]
    )


def _is_on_cpu(layer: Layer) -> list[str]:
    device = layer.weight.device.type
    return [] if device == "cpu" else [f"needs a weight on the CPU, got one on {device}"]


def _has_zero_blocks(layer: Layer) -> list[str]:
    """Most blocks of 4 consecutive inputs must hold only zeros."""
    kept = layer.kept.view(torch.uint8)
    blocks = kept.unflatten(1, (-1, 4))
    most = blocks.amax(2)
    share = _share_of_zeros(most)
    if share + 1 / most.numel() >= LEAST_ZEROS:  # budgets are whole numbers of blocks
        return []
    text = f"needs at least {LEAST_ZEROS:.0%} of its 1x4 blocks (4 inputs of one output) to be zero, got {share:.0%}"
    mixed = rules.first(most != blocks.amin(2))
    if mixed is not None:
        row, column = mixed
        text += f"; [{row}, {column * 4}:{column * 4 + 4}] is the first that holds zeros and other values"
    if len(kept) % 4 == 0 and _share_of_zeros(kept.unflatten(0, (-1, 4)).amax(1)) >= LEAST_ZEROS:
        text += "; its blocks are 4x1, along the outputs"
    return [text]


def _share_of_zeros(bytes_: Tensor) -> float:
    return 1 - int(bytes_.count_nonzero()) / bytes_.numel()
