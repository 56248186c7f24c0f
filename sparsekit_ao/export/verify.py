"""Masked against compacted: both run on the example inputs, every output tensor is compared.

Knows models as functions.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..coupling.values import opaque_in, tensors_in
from ..errors import SparsityError

__all__ = ["Comparison", "Reference"]

Outputs = list[tuple[str, Tensor]]

_ROUNDINGS = 16  # times its own rounding that a model may differ by for float64 to be asked


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compacted model against the masked one.

    Attributes:
        difference: the largest of an output tensor, relative to the largest value that differs; inf where shapes or
            whole numbers differ, or a number is not one.
        in_float64: the same of float64 copies, where `difference` is more than rounding should make, but no more than
            it does make.
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

    Every run is one of copies, so neither models nor inputs change. Models of 16-bit floats are run as float32 copies:
    their rounding would hide what is to be seen. Even that of float32 may grow through many layers, so a difference
    that is too large is looked at again in float64, if the masked model itself is about as far from its own float64
    copy.

    Args:
        model: the masked model.
        inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Attributes:
        flops: of one forward.
        opaque: objects in the output that are not looked into, in words.

    Raises:
        SparsityError: it does not run, returns no tensor, only zeros, or a nan.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
        self._model, self._inputs, self._dtype = model, inputs, torch.float32 if half else None
        try:
            output, self.flops = _run(model, inputs, self._dtype)
        except Exception as e:
            raise SparsityError(f"the masked model does not run on example_inputs: {e}") from e
        self._outputs, self.opaque = list(tensors_in("output", output)), opaque_in("output", output)
        self._check()

    def compare(self, small: nn.Module, tolerance: float) -> Comparison:
        """Run the compacted model; in float64 too, where it differs by more than the tolerance."""
        output, flops = _run(small, self._inputs, self._dtype)
        outputs = list(tensors_in("output", output))
        apart = _difference(self._outputs, outputs)
        again = self._in_float64(small, outputs) if tolerance < apart < float("inf") else None
        return Comparison(difference=apart, in_float64=again, flops=flops)

    def _check(self) -> None:
        if not self._outputs:
            raise SparsityError("the model returned no tensor, so there is nothing to compare")
        for place, tensor in self._outputs:
            if bool(tensor.isnan().any()):
                raise SparsityError(
                    f"the masked model's {place} holds nan on example_inputs, and nan equals nothing. Give inputs and "
                    "masks for which every output is a number."
                )
        if not any(bool(tensor.any()) for _, tensor in self._outputs):
            raise SparsityError(
                "the masked model gives nothing but zeros on example_inputs, so any model could pass for it. Give "
                "inputs as in use."
            )

    def _in_float64(self, small: nn.Module, found: Outputs) -> float | None:
        """The difference of float64 copies; None if rounding does not explain what float32 found."""
        try:
            exact, again = (
                list(tensors_in("output", _run(model, self._inputs, torch.float64)[0]))
                for model in (self._model, small)
            )
        except Exception:  # a device or a model that has no float64: then float32 decides
            return None
        outputs = zip(self._outputs, found, exact, strict=True)
        if not all(_is_rounding(a, b, wide) for (_, a), (_, b), (_, wide) in outputs):
            return None
        return _difference(exact, again)


@torch.no_grad()
def _run(model: nn.Module, inputs: Any, dtype: torch.dtype | None) -> tuple[Any, int]:
    """The output of one forward of a copy in eval mode, and its FLOPs; as another dtype if one is given."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    model, inputs = copy.deepcopy(model), copy.deepcopy(_pytree.tree_map_only(Tensor, _leaf, inputs))
    if dtype is not None:
        model, inputs = model.to(dtype), _as_dtype(inputs, dtype)
    with _seeded([*model.parameters(), *model.buffers(), *_inputs_of(inputs)]), FlopCounterMode(display=False) as count:
        model.eval()
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return output, count.get_total_flops()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach()  # others cannot be copied


def _inputs_of(inputs: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors_in("input", inputs)]


@contextlib.contextmanager
def _seeded(tensors: list[Tensor]) -> Iterator[None]:
    """Random numbers that start alike, on the CPU and the cards of the tensors; all other generators stay."""
    cards = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=cards):
        torch.default_generator.manual_seed(0)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(0)
        yield


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
    """The largest difference over the largest value that differs: equal numbers, however large, hide nothing."""
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(want, found) else float("inf")
    a, b = _real(want), _real(found)
    away = torch.where(a == b, 0.0, (a - b).abs())
    if not bool(away.isfinite().all()):
        return float("inf")
    apart, largest = (float(t.max()) if t.numel() else 0.0 for t in (away, _that_differ(a, b)))
    return apart / largest if largest else apart


def _that_differ(a: Tensor, b: Tensor) -> Tensor:
    """Sizes of what differs, 0 elsewhere."""
    return torch.where(a.isfinite() & (a != b), a.abs(), 0.0)


def _is_rounding(want: Tensor, found: Tensor, exact: Tensor) -> bool:
    """Whether two outputs differ about as the first one does from its float64 copy, among values as large."""
    a, b, wide = _real(want), _real(found), _real(exact)
    if torch.equal(a, b):
        return True
    near = a.abs() <= _that_differ(a, b).max()
    own = torch.where(near, (a - wide).abs(), 0.0)
    return float(torch.where(a == b, 0.0, (a - b).abs()).max()) <= _ROUNDINGS * float(own.max())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
