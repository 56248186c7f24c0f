"""Elementwise operations: axes that meet are the same, and whether zero stays zero is measured.

torch tags its elementwise operators. What one of them makes of zeros (relu(0) = 0, sigmoid(0) is not, 0 * x = 0 but
0 + x is not) is not written down here: it is run on a few numbers.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree

from .call import Call, Label
from .factors import Axis, Part, leaves, tie

__all__ = ["combined", "pointwise"]

_PROBES = (0.7, -1.3, 2.1)


def pointwise(call: Call) -> Label:
    """Any elementwise operation of tensors that broadcast."""
    known: dict[tuple[bool, ...], bool] = {}

    def stays(zeros: tuple[bool, ...]) -> bool:
        if zeros not in known:
            known[zeros] = any(zeros) and _zero_stays(call, zeros)
        return known[zeros]

    labels = [call.label_of(t) for t in call.tensors]
    width = call.outs[0].dim()
    return tuple(_combined([_axis(label, k - width) for label in labels], stays, call.why) for k in range(width))


def combined(labels: Sequence[Label], why: str, *, any_zero: bool = False) -> Label:
    """Axes of a sum of tensors that broadcast: zero where all of them are; `any_zero`, of a product."""
    width = max(map(len, labels))
    stays = any if any_zero else all
    return tuple(_combined([_axis(label, k - width) for label in labels], stays, why) for k in range(width))


def _axis(label: Label, from_right: int) -> Axis:
    return label[from_right] if -from_right <= len(label) else ()


def _combined(axes: Sequence[Axis], stays: Any, why: str) -> Axis:
    """One axis of the result; an operand of size 1 there is the same along it, hence not zero at single units."""
    there = [axis for axis in axes if axis]
    if not there:
        return ()
    tie(there, why)
    rows = [leaves(axis) if axis else None for axis in axes]
    first = next(row for row in rows if row is not None)
    if any(row is not None and len(row) != len(first) for row in rows):  # frozen: its factors do not line up
        return tuple(Part(part.factor) for part in first)
    return tuple(
        Part(part.factor, stays(tuple(row is not None and row[k].zero for row in rows))) for k, part in enumerate(first)
    )


def _zero_stays(call: Call, zeros: tuple[bool, ...]) -> bool:
    """Whether the result is 0 whenever the tensors marked in `zeros` are; masks are tried both ways."""
    masks = sum(t.dtype == torch.bool and not zero for t, zero in zip(call.tensors, zeros, strict=True))
    tries = itertools.product(_PROBES, itertools.product((True, False), repeat=masks))
    return all(_run(call, zeros, value, flags) == 0 for value, flags in tries)


def _run(call: Call, zeros: tuple[bool, ...], value: float, flags: Sequence[bool]) -> float:
    at, flag = iter(zeros), iter(flags)

    def number(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # Each tensor gets a number of its own, so that x - y or x == y is not zero by chance.
        zero, own = next(at), value * (1 + len(taken) / 8)
        taken.append(own)
        if x.dtype == torch.bool:
            return torch.tensor(not zero and next(flag))
        return torch.tensor(0.0 if zero else own).to(x.dtype)

    taken: list[float] = []
    with unset_fake_temporarily(), torch.no_grad():
        args, kwargs = _pytree.tree_map(number, (call.args, {k: v for k, v in call.kwargs.items() if k != "device"}))
        try:
            return float(call.func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError):
            return math.nan  # it takes or gives no single real numbers, so zero is not known to stay
