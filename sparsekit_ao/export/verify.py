"""Masked against compacted: both run on the example inputs, every output tensor is compared.

Knows models as functions.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError

__all__ = ["Comparison", "Reference"]

Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compacted model against the masked one.

    Attributes:
        difference: the largest of an output tensor, relative to its largest value; inf where shapes differ or a
            number is not one.
        in_float64: the same of float64 copies, where `difference` is more than rounding should make.
        flops: of one forward.
    """

    difference: float
    in_float64: float | None
    flops: int

    @property
    def decided(self) -> float:
        """The difference that counts."""
        return self.difference if self.in_float64 is None else self.in_float64


class Reference:
    """The masked model and what it gives on the example inputs.

    Models of 16-bit floats are run as float32 copies: their rounding would hide what is to be seen. Even that of
    float32 may grow through many layers, so a difference that is too large is looked at again in float64.

    Args:
        model: the masked model.
        inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Raises:
        SparsityError: it does not run, or returns no tensor.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
        self._model, self._inputs, self._dtype = model, inputs, torch.float32 if half else None
        try:
            self._outputs, self.flops = _run(model, inputs, self._dtype)
        except Exception as e:
            raise SparsityError(f"the masked model does not run on example_inputs: {e}") from e
        if not self._outputs:
            raise SparsityError("the model returned no tensor, so there is nothing to compare")

    def compare(self, small: nn.Module, tolerance: float) -> Comparison:
        """Run the compacted model; in float64 too, where it differs by more than the tolerance."""
        outputs, flops = _run(small, self._inputs, self._dtype)
        apart = _difference(self._outputs, outputs)
        again = self._in_float64(small) if tolerance < apart < float("inf") else None
        return Comparison(difference=apart, in_float64=again, flops=flops)

    def _in_float64(self, small: nn.Module) -> float | None:
        try:
            want, found = (_run(model, self._inputs, torch.float64)[0] for model in (self._model, small))
        except Exception:  # a device or a model that has no float64: then float32 decides
            return None
        return _difference(want, found)


@torch.no_grad()
def _run(model: nn.Module, inputs: Any, dtype: torch.dtype | None) -> tuple[Outputs, int]:
    """The output tensors of one forward in eval mode, and its FLOPs; a copy is run if a dtype is given."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    if dtype is not None:
        model, inputs = copy.deepcopy(model).to(dtype), _as_dtype(inputs, dtype)
    cards = {p.device.index for p in model.parameters() if p.is_cuda}
    with _eval(model), torch.random.fork_rng(devices=cards), FlopCounterMode(display=False) as counter:
        torch.manual_seed(0)
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return list(_tensors("output", output)), counter.get_total_flops()


def _as_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {key: _as_dtype(value, dtype) for key, value in inputs.items()}
    return tuple(_as_dtype(v, dtype) for v in inputs) if isinstance(inputs, (tuple, list)) else inputs


def _difference(want: Outputs, found: Outputs) -> float:
    if [(place, t.shape) for place, t in want] != [(place, t.shape) for place, t in found]:
        return float("inf")
    return max(_relative(a, b) for (_, a), (_, b) in zip(want, found, strict=True))


def _relative(want: Tensor, found: Tensor) -> float:
    if not want.numel():
        return 0.0
    a, b = want.double(), found.double()
    away = torch.where(a == b, 0.0, (a - b).abs())
    if not bool(away.isfinite().all()):
        return float("inf")
    largest = float(torch.where(a.isfinite(), a.abs(), 0.0).max())
    return float(away.max()) / largest if largest else float(away.max())


def _tensors(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, mappings and dataclasses; other objects (a cache, say) are not looked into."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{place}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for at, item in enumerate(value):
            yield from _tensors(f"{place}[{at}]", item)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from _tensors(f"{place}.{f.name}", getattr(value, f.name))


@contextlib.contextmanager
def _eval(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
