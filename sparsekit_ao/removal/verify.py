"""Compare a compacted model with the masked one: both run on the example inputs, every output tensor is compared."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..coupling.nested_tensors import arguments, opaque_in, tensors_in
from ..errors import SparsityError

Outputs = list[tuple[str, Tensor]]

_ROUNDINGS = 16  # a difference of up to so many times the model's own rounding error is checked in float64


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compacted model against the masked one; `flops` are those of one forward.

    `difference` is the largest of an output tensor, relative to the largest value that differs; inf where shapes or
    integers differ, or a value is nan or inf in one of the models only. `in_float64` is that of float64 copies, if any.
    """

    difference: float
    in_float64: float | None
    flops: int

    @property
    def decisive(self) -> float:
        """The difference that counts."""
        return self.difference if self.in_float64 is None else self.in_float64


class Reference:
    """The masked model and its outputs on the example inputs, with the FLOPs of one forward.

    Copies are run, so neither models nor inputs change; those of 16-bit floats in float32, since their rounding would
    hide errors. A difference above the tolerance is computed again in float64, if the masked model itself differs
    about as much from its own float64 copy. `opaque` describes objects in the output that are not inspected.

    Raises:
        SparsityError: it does not run, or returns no tensor, only zeros, or a nan.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._model, self._inputs, self._dtype = model, inputs, _run_dtype(model)
        try:
            output, self.flops = _run(model, inputs, self._dtype)
        except Exception as e:
            raise SparsityError(f"the masked model does not run on example_inputs: {e}") from e
        self._outputs, self.opaque = list(tensors_in("output", output)), opaque_in("output", output)
        if not self._outputs:
            raise SparsityError("the model returned no tensor, so there is nothing to compare")
        for place, tensor in self._outputs:
            if bool(tensor.isnan().any()):
                raise SparsityError(
                    f"the masked model's {place} contains nan on example_inputs, and nan equals nothing. Pass inputs "
                    "and masks for which every output is a number."
                )
        if not any(bool(tensor.any()) for _, tensor in self._outputs):
            raise SparsityError(
                "the masked model returns only zeros on example_inputs, so nothing is compared; pass typical inputs"
            )

    def compare(self, small: nn.Module, tolerance: float, *, discarded: bool = False) -> Comparison:
        """Run the compacted model; in float64 too, where it differs by more than the tolerance.

        With `discarded`, the model is used for nothing else afterwards, so it need not be copied.
        """
        output, flops = _run(small, self._inputs, self._dtype, copied=not discarded)
        outputs = list(tensors_in("output", output))
        difference = output_difference(self._outputs, outputs)
        exact = self._in_float64(small, outputs) if tolerance < difference < float("inf") else None
        return Comparison(difference=difference, in_float64=exact, flops=flops)

    def _in_float64(self, small: nn.Module, outputs: Outputs) -> float | None:
        """The difference of float64 copies; None if rounding does not explain what float32 found."""
        try:
            runs = [_run(model, self._inputs, torch.float64)[0] for model in (self._model, small)]
        except Exception:  # a device or a model without float64: then float32 decides
            return None
        exact, small_exact = (list(tensors_in("output", run)) for run in runs)
        triples = zip(self._outputs, outputs, exact, strict=True)
        if not all(_is_rounding(a, b, wide) for (_, a), (_, b), (_, wide) in triples):
            return None
        return output_difference(exact, small_exact)


def count_flops(model: nn.Module, inputs: Any) -> int:
    """Count the FLOPs of one forward in eval mode, which the model is in afterwards; as `Reference` counts them."""
    return _run(model, inputs, _run_dtype(model), copied=False)[1]


def _run_dtype(model: nn.Module) -> torch.dtype | None:
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    return torch.float32 if half else None


@torch.no_grad()
def _run(model: nn.Module, inputs: Any, dtype: torch.dtype | None, copied: bool = True) -> tuple[Any, int]:
    """The output of one forward in eval mode, and its FLOPs; as another dtype if one is given."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    # Only leaf tensors can be copied.
    inputs = _pytree.tree_map_only(Tensor, lambda t: t if t.is_leaf else t.detach(), arguments(inputs))
    model, inputs = (copy.deepcopy(model) if copied else model).eval(), copy.deepcopy(inputs)
    model.requires_grad_(False)  # the counter cannot hook views of parameters that were made without gradients
    if dtype is not None:
        model = model.to(dtype)
        inputs = _pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    args, kwargs = inputs
    tensors = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in tensors_in("input", inputs))]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter knows no FLOPs of its fused operations
    try:
        with seeded(tensors), FlopCounterMode(display=False) as count:
            output = model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return output, count.get_total_flops()


@contextlib.contextmanager
def seeded(tensors: list[Tensor]) -> Iterator[None]:
    """Seed the generators of the CPU and of the tensors' devices; their states are restored afterwards."""
    devices = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(0)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield


def output_difference(wanted: Outputs, outputs: Outputs) -> float:
    """Return the largest difference of an output tensor, as in `Comparison`."""
    if [(place, t.shape) for place, t in wanted] != [(place, t.shape) for place, t in outputs]:
        return float("inf")
    return max(_relative(a, b) for (_, a), (_, b) in zip(wanted, outputs, strict=True))


def _relative(wanted: Tensor, output: Tensor) -> float:
    """The largest difference over the largest value that differs, so that large equal values do not hide it."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(wanted, output) else float("inf")
    a, b = _real(wanted), _real(output)
    error = torch.where(a == b, 0.0, (a - b).abs())
    if not bool(error.isfinite().all()):
        return float("inf")
    worst, largest = (float(t.max()) if t.numel() else 0.0 for t in (error, _differing(a, b)))
    return worst / largest if largest else worst


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """The absolute values of `a` where it differs from `b`, 0 elsewhere."""
    return torch.where(a.isfinite() & (a != b), a.abs(), 0.0)


def _is_rounding(wanted: Tensor, output: Tensor, exact: Tensor) -> bool:
    """Whether two outputs differ about as much as the first one from its float64 copy, among values as large."""
    a, b, wide = _real(wanted), _real(output), _real(exact)
    if torch.equal(a, b):
        return True
    near = a.abs() <= _differing(a, b).max()
    rounding = torch.where(near, (a - wide).abs(), 0.0)
    return float(torch.where(a == b, 0.0, (a - b).abs()).max()) <= _ROUNDINGS * float(rounding.max())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
