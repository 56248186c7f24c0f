"""Masked against compacted: both run on the example inputs, every output tensor is compared.

Knows models as functions.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import SparsityError

__all__ = ["Reference"]

Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """What the masked model gives on the example inputs.

    A model of 16-bit floats is run as a float32 copy, here and in `compare`: rounding would hide what is to be seen.

    Attributes:
        inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        half: whether models are run as float32 copies.
        outputs: every output tensor, with its place.
        flops: of one forward.
    """

    inputs: Any
    half: bool
    outputs: Outputs
    flops: int

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> Self:
        """Run the masked model.

        Raises:
            SparsityError: it does not run, or returns no tensor.
        """
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
        inputs = _widened(inputs) if half else inputs
        try:
            outputs, flops = _run(model, inputs, half)
        except Exception as e:
            raise SparsityError(f"the masked model does not run on example_inputs: {e}") from e
        if not outputs:
            raise SparsityError("the model returned no tensor, so there is nothing to compare")
        return cls(inputs=inputs, half=half, outputs=outputs, flops=flops)

    def compare(self, model: nn.Module) -> tuple[float, int]:
        """The largest relative difference of an output (inf: other shapes, or not a number), and the FLOPs."""
        outputs, flops = _run(model, self.inputs, self.half)
        if [(place, t.shape) for place, t in self.outputs] != [(place, t.shape) for place, t in outputs]:
            return float("inf"), flops
        pairs = zip(self.outputs, outputs, strict=True)
        return max(_relative(want, found) for (_, want), (_, found) in pairs), flops


@torch.no_grad()
def _run(model: nn.Module, inputs: Any, half: bool) -> tuple[Outputs, int]:
    """The output tensors of one forward in eval mode, and its FLOPs; the model is left as it is."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    model = copy.deepcopy(model).float() if half else model
    with _eval(model), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        torch.manual_seed(0)
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return list(_tensors("output", output)), counter.get_total_flops()


def _widened(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.float() if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {key: _widened(value) for key, value in inputs.items()}
    return tuple(_widened(v) for v in inputs) if isinstance(inputs, (tuple, list)) else inputs


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
