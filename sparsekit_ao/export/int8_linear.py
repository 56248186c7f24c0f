"""`SparseInt8Linear`: `nn.Linear` in torch's sparse int8 kernels, with plain tensors as its state."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparsityError
from .ranges import Range, Steps, int8_rows

BITS = 7  # of activations: products of 8 bits saturate the 16-bit sums of the kernel, which are then silently wrong
ENGINE = "fbgemm"
FIELDS = {  # of the state of a layer: dtypes, dimensions
    "blocks": ((torch.int8,), 2),
    "columns": ((torch.int16, torch.int32), 1),
    "counts": ((torch.int32,), 1),
    "scales": ((torch.float32,), 1),
    "steps": ((torch.float64,), 1),
    "shape": ((torch.int64,), 1),
}


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
        in_features, out_features: of the layer.
        shape: int64 [2], (out_features, in_features).
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

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return int(self.shape[1])

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return int(self.shape[0])

    def int8_weight(self) -> Tensor:
        """The weight as int8 [out_features, in_features], with its zeros."""
        rows, columns = self.out_features, self.in_features
        found = self.blocks.new_zeros(rows, columns // 4, 4)
        at = torch.arange(rows).repeat_interleave(self.counts.long()), self.columns.long()
        return found.index_put(at, self.blocks).reshape(rows, columns)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), of the input's dtype; what becomes of nan is not defined."""
        if input.shape[-1] != self.in_features:
            raise SparsityError(f"the layer has {self.in_features} inputs, got a tensor {tuple(input.shape)}")
        rows = input.reshape(-1, input.shape[-1])
        if not rows.shape[0]:
            return F.linear(input, input.new_zeros(len(self.counts), rows.shape[1]))
        clamped = rows.float().clamp(self._inputs.low, self._inputs.high)
        x = torch.quantize_per_tensor(clamped, self._inputs.scale, self._inputs.zero_point, torch.quint8)
        y = torch.ops.sparse.qlinear(x, self._packed, self._outputs.scale, self._outputs.zero_point)
        return y.dequantize().to(input.dtype).reshape(*input.shape[:-1], -1)

    def extra_repr(self) -> str:
        """The sizes of the layer, and how many blocks are stored."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, blocks={len(self.blocks)} of {self.in_features * self.out_features // 4}"

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
        own = {name: state_dict.get(f"{prefix}{name}") for name in (*FIELDS, "bias")}
        fault = None if any(own[name] is None for name in FIELDS) else fault_of(own)
        if fault is None and own["shape"] is not None and own["shape"].tolist() != self.shape.tolist():
            fault = f"it is {own['shape'].tolist()}, and the layer {self.shape.tolist()}"
        if fault is not None:
            args[-1].append(f"{prefix.removesuffix('.')} holds no SparseInt8Linear that fits: {fault}")
            return
        for name in ("blocks", "columns"):
            if own[name] is not None:
                setattr(self, name, torch.empty_like(own[name]))
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
    torch.backends.quantized.engine = ENGINE
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def fault_of(state: Mapping[str, Any]) -> str | None:
    """Why tensors are not the state of a layer (`FIELDS`, and a bias or None); None if they are."""
    for name, (dtypes, ndim) in FIELDS.items():
        tensor = state.get(name)
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or tensor.ndim != ndim:
            got = f"{tensor.dtype} of {tensor.ndim}" if isinstance(tensor, Tensor) else f"{type(tensor).__name__} of no"
            return f"{name} must be {dtypes[-1]} of {ndim} dimensions, got {got}"
    size, n = state["shape"].tolist(), len(state["columns"])
    if len(size) != 2 or min(size) < 1 or size[1] % 4:
        return f"shape must be (outputs, inputs), inputs a multiple of 4, got {size}"
    bias = state.get("bias")
    sizes = {"blocks": (n, 4), "counts": size[:1], "scales": size[:1], "steps": (6,)}
    sizes |= {} if bias is None else {"bias": size[:1]}
    for name, wanted in sizes.items():
        if tuple(state[name].shape) != tuple(wanted):
            return f"{name} must have shape {tuple(wanted)}, got {tuple(state[name].shape)}"
    if bias is not None and bias.dtype != torch.float32:
        return f"bias must be torch.float32, got {bias.dtype}"
    return _fault_of_values(state, n, size[1] // 4)


def _fault_of_values(state: Mapping[str, Tensor], n: int, places: int) -> str | None:
    counts, columns, scales, steps = (state[name] for name in ("counts", "columns", "scales", "steps"))
    if bool((counts < 0).any()) or int(counts.sum()) != n:
        return f"counts must add up to {n} blocks, got {int(counts.sum())}"
    if n and not 0 <= int(columns.min()) <= int(columns.max()) < places:
        return f"columns must be from 0 to {places - 1}, got {int(columns.min())} to {int(columns.max())}"
    if not bool((scales.isfinite() & (scales > 0)).all()):
        return "scales must be positive"
    for (scale, zero, largest), most in ((steps[:3].tolist(), (1 << BITS) - 1), (steps[3:].tolist(), 255)):
        if not (0 < scale < float("inf") and 0 <= zero <= largest <= most):
            return f"steps must be a scale, a zero point and a largest value of at most {most}, got {steps.tolist()}"
    return None
