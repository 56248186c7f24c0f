"""Ranges of the values that layers read and return on a user's batches, and int8 steps for them.

Also int8 values of a weight: one scale for each row, zeros stay zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..removal.verify import Outputs
from .batches import Forward, outputs_of
from .layers import Layer


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A value x is stored as `round(x / scale) + zero_point`, a whole number from 0 to `largest`.

    >>> Steps.of(-1.0, 3.0, bits=7)
    Steps(scale=0.031496062992125984, zero_point=32, largest=127)
    """

    scale: float
    zero_point: int
    largest: int

    @classmethod
    def of(cls, low: float, high: float, bits: int) -> "Steps":
        """Steps for the values from low to high; 0 is a whole step."""
        largest, low, high = (1 << bits) - 1, min(low, 0.0), max(high, 0.0)
        scale = (high - low) / largest
        if scale < torch.finfo(torch.float32).tiny:  # only zeros, as far as float32 can tell
            return cls(scale=1.0, zero_point=0, largest=largest)
        return cls(scale=scale, zero_point=round(-low / scale), largest=largest)

    @property
    def low(self) -> float:
        """The least value that is stored."""
        return -self.zero_point * self.scale

    @property
    def high(self) -> float:
        """The largest value that is stored."""
        return (self.largest - self.zero_point) * self.scale


@dataclass(kw_only=True)
class Range:
    """The least and largest values that a layer read (`inputs`) and returned (`outputs`)."""

    inputs: tuple[float, float] = (float("inf"), -float("inf"))
    outputs: tuple[float, float] = (float("inf"), -float("inf"))


def record_ranges(
    model: nn.Module, layers: Sequence[Layer], batches: Sequence[Any], forward: Forward | None, target: str
) -> tuple[dict[str, Range], list[Outputs]]:
    """Run the model on the batches in eval mode; {name of the weight: Range} and the model's outputs.

    Args:
        model: as it is, masked or not.
        layers: Linear layers of the model.
        batches: dicts are passed as keyword arguments, tuples and lists as positional ones.
        forward: `(model, batch) -> output` instead.
        target: first word of error messages.

    Raises:
        SparsityError: a layer was not called, or a value is not finite.
    """
    found: dict[str, Range] = {}
    with ExitStack() as hooks:
        for layer in layers:
            handle = layer.module.register_forward_hook(_recorder(layer, found, target), with_kwargs=True)
            hooks.callback(handle.remove)
        outputs = outputs_of(model, batches, forward)
    missing = [layer.fqn for layer in layers if layer.fqn not in found]
    if missing:
        raise SparsityError(
            f"{target}: no batch reached the module of {', '.join(missing)}, so its range of values is unknown. Pass "
            "batches that reach it, or leave it out (tensors=[...]). A module whose parent reads its weight without "
            "calling it (nn.MultiheadAttention's out_proj, nn.TransformerEncoderLayer in eval mode) cannot be replaced."
        )
    return found, outputs


def _recorder(layer: Layer, found: dict[str, Range], target: str) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if not x.numel():
            return
        own = found.setdefault(layer.fqn, Range())
        for name, tensor in (("inputs", x), ("outputs", output)):
            low, high = (float(t) for t in tensor.detach().float().aminmax())
            if not (low > -float("inf") and high < float("inf")):  # false for nan too
                raise SparsityError(f"{target}: {layer.fqn}: the {name} of this layer are not finite (nan or inf)")
            before = getattr(own, name)
            setattr(own, name, (min(low, before[0]), max(high, before[1])))

    return record


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8 values from -127 to 127, and the float32 scale of each row; a row of zeros has scale 1.

    >>> int8_rows(torch.tensor([[0.0, 1.0, -2.0]]))
    (tensor([[   0,   64, -127]], dtype=torch.int8), tensor([0.0157]))
    """
    largest = weight.abs().amax(1).float()
    scales = torch.where(largest > 0, largest / 127, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales
