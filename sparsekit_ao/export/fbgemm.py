"""`fbgemm`: Linear layers with 1x4 blocks of zeros run by torch's own sparse int8 kernels on x86.

The kernels are `torch.ops.sparse.qlinear_prepack` and `qlinear`, for which torch.ao's default block shape (1, 4) was
made. They leave out every block of 4 consecutive inputs of one output that holds only zeros.
"""

import copy
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparsityError
from . import rules
from .layers import Layer, checked_layers
from .ranges import Forward, Range, Steps, compare, int8_rows, record_ranges
from .results import Conversion

BITS = 7  # of activations: products of 8 bits saturate the 16-bit sums of the kernel, which are then silently wrong
LEAST_ZEROS = 0.6  # fraction of blocks that hold only zeros; with fewer, dense int8 is faster at every batch size
_ENGINE = "fbgemm"


def reasons(layer: Layer) -> list[str]:
    """Why the kernels do not take a weight; empty if they do."""
    found = rules.is_a(layer, nn.Linear) or rules.has_dtype(layer, [torch.float32])
    return found or [
        *rules.is_not_parametrized(layer),
        *rules.is_not_shared(layer),
        *_is_on_cpu(layer),
        *(rules.has_multiples(layer, 1, 4) or rules.is_finite(layer) or _has_zero_blocks(layer)),
    ]


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
    if _ENGINE not in torch.backends.quantized.supported_engines:
        raise SparsityError("fbgemm: this build of torch, or this CPU, has no fbgemm kernels; they need x86 with AVX2")
    batches = list(batches)
    ranges, outputs = record_ranges(model, layers, batches, forward, "fbgemm")
    converted = _converted(model, {a.name: SparseInt8Linear.of(a.module, ranges[a.fqn], bits) for a in layers})
    difference = compare(outputs, converted, batches, forward, "fbgemm")
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
        SparsityError: a converted layer is no Linear of the model; the model is then unchanged.
    """
    names = [name for name, _, last in (key.rpartition(".") for key in state_dict) if last == "blocks"]
    layers = {
        name: {k.rpartition(".")[2]: v for k, v in state_dict.items() if k.rpartition(".")[0] == name} for name in names
    }
    found = {name: m for name, m in model.named_modules() if name in layers}
    for name, own in layers.items():
        shape = own["shape"].tolist()
        linear = found.get(name)
        if not name or type(linear) is not nn.Linear or [linear.out_features, linear.in_features] != shape:
            wanted = f"a torch.nn.Linear of {shape[1]} inputs and {shape[0]} outputs inside the model"
            raise SparsityError(f"load_fbgemm: {name!r} must be {wanted}, got {linear}")
    rest = {k for k in state_dict if k.rpartition(".")[0] not in layers}
    expected = {k for k in model.state_dict() if k.rpartition(".")[0] not in layers}
    if rest != expected:
        raise SparsityError(
            f"load_fbgemm: the state dict is of another model: {sorted(rest ^ expected)[0]} is in one only"
        )
    for name, own in layers.items():
        model.set_submodule(name, SparseInt8Linear(**own))
    model.load_state_dict(state_dict)
    return model


class SparseInt8Linear(nn.Module):
    """`nn.Linear` in int8, whose 1x4 blocks of zeros are not stored; made by `fbgemm`.

    Buffers hold everything, so that state dicts are plain tensors; the kernel's packed weight is made from them.

    Attributes:
        blocks: int8 [n, 4], the blocks that are not zero, row by row.
        columns: int16 or int32 [n], the place of each block in its row.
        counts: int32 [out_features], the number of blocks of each row.
        scales: float32 [out_features].
        bias: float32 [out_features], or None.
        steps: float64 [6], scale, zero point and largest value of the inputs, then of the outputs.
        in_features: of the layer.
    """

    blocks: Tensor
    columns: Tensor
    counts: Tensor
    scales: Tensor
    bias: Tensor | None
    steps: Tensor
    shape: Tensor

    def __init__(
        self,
        blocks: Tensor,
        columns: Tensor,
        counts: Tensor,
        scales: Tensor,
        steps: Tensor,
        shape: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, tensor in (("blocks", blocks), ("columns", columns), ("counts", counts), ("scales", scales)):
            self.register_buffer(name, tensor)
        self.register_buffer("steps", steps)
        self.register_buffer("shape", shape)
        self.register_buffer("bias", bias)
        self._pack()

    @classmethod
    def of(cls, linear: Any, seen: Range, bits: int = BITS) -> "SparseInt8Linear":
        """The layer of an `nn.Linear` whose inputs and outputs are in a range."""
        weight, bias = linear.weight.detach(), linear.bias
        values, scales = int8_rows(weight)
        groups = values.unflatten(1, (-1, 4))
        kept = groups.ne(0).any(2)
        steps = Steps.of(*seen.inputs, bits=bits), Steps.of(*seen.outputs, bits=8)
        return cls(
            blocks=groups[kept],
            columns=kept.nonzero()[:, 1].to(torch.int16 if groups.shape[1] <= 1 << 15 else torch.int32),
            counts=kept.sum(1, dtype=torch.int32),
            scales=scales,
            steps=torch.tensor([n for s in steps for n in dataclasses.astuple(s)], dtype=torch.float64),
            shape=torch.tensor(values.shape),
            bias=None if bias is None else bias.detach().clone(),
        )

    def int8_weight(self) -> Tensor:
        """The weight as int8 [out_features, in_features], with its zeros."""
        rows, columns = (int(n) for n in self.shape)
        found = self.blocks.new_zeros(rows, columns // 4, 4)
        at = torch.arange(rows).repeat_interleave(self.counts.long()), self.columns.long()
        return found.index_put(at, self.blocks).reshape(rows, columns)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), of the input's dtype."""
        rows = input.reshape(-1, input.shape[-1])
        if not rows.shape[0]:
            return F.linear(input, input.new_zeros(len(self.counts), rows.shape[1]))
        clamped = rows.float().clamp(self._inputs.low, self._inputs.high)
        x = torch.quantize_per_tensor(clamped, self._inputs.scale, self._inputs.zero_point, torch.quint8)
        y = torch.ops.sparse.qlinear(x, self._packed, self._outputs.scale, self._outputs.zero_point)
        return y.dequantize().to(input.dtype).reshape(*input.shape[:-1], -1)

    def extra_repr(self) -> str:
        """The sizes of the layer, and how many blocks are stored."""
        rows, columns = (int(n) for n in self.shape)
        sizes = f"in_features={columns}, out_features={rows}, bias={self.bias is not None}"
        return f"{sizes}, blocks={len(self.blocks)} of {rows * columns // 4}"

    def _pack(self) -> None:
        numbers = self.steps.tolist()
        self._inputs, self._outputs = (
            Steps(scale=scale, zero_point=int(zero), largest=int(largest))
            for scale, zero, largest in (numbers[:3], numbers[3:])
        )
        zeros = torch.zeros(len(self.scales), dtype=torch.long)
        with _engine(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            weight = torch._make_per_channel_quantized_tensor(self.int8_weight(), self.scales.double(), zeros, 0)
            self._packed = torch.ops.sparse.qlinear_prepack(weight, self.bias, 1, 4)

    def _apply(self, fn: Any, recurse: bool = True) -> "SparseInt8Linear":
        moved = fn(self.scales)
        if moved.device.type != "cpu" or moved.dtype != torch.float32:
            raise SparsityError(
                f"a SparseInt8Linear runs on the CPU in float32 only, not as {moved.dtype} on {moved.device.type}"
            )
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """As any module's; another number of blocks than this layer has can be loaded."""
        counts = state_dict.get(f"{prefix}counts")
        for name in ("blocks", "columns") if isinstance(counts, Tensor) and counts.shape == self.counts.shape else ():
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, torch.empty_like(state_dict[f"{prefix}{name}"]))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._pack()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_packed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()


@contextmanager
def _engine() -> Iterator[None]:
    """Pack weights by fbgemm; the process's engine is restored."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = _ENGINE
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def _converted(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """A copy of the model with other modules in these places; their own weights are not copied."""
    old = {id(model.get_submodule(name)): new for name, new in layers.items()}
    return copy.deepcopy(model, memo=old)


def _bytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _is_on_cpu(layer: Layer) -> list[str]:
    device = layer.weight.device.type
    return [] if device == "cpu" else [f"needs a weight on the CPU, got one on {device}"]


def _has_zero_blocks(layer: Layer) -> list[str]:
    """Most blocks of 4 consecutive inputs must hold only zeros."""
    zero = layer.weight.eq(0)
    groups = zero.unflatten(1, (-1, 4))
    empty = groups.all(2)
    share = float(empty.float().mean())
    if share >= LEAST_ZEROS:
        return []
    text = f"needs at least {LEAST_ZEROS:.0%} of its 1x4 blocks (4 inputs of one output) to be zero, got {share:.0%}"
    mixed = (groups.any(2) & ~empty).nonzero()
    if len(mixed):
        row, column = (int(n) for n in mixed[0])
        text += f"; [{row}, {column * 4}:{column * 4 + 4}] is the first that holds zeros and other values"
    if len(zero) % 4 == 0 and float(zero.unflatten(0, (-1, 4)).all(1).float().mean()) >= LEAST_ZEROS:
        text += "; its blocks are 4x1, along the outputs"
    return [text]
