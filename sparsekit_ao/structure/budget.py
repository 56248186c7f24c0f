"""Budgets: how many blocks a scope keeps, from a sparsity level or a count."""

import math
import numbers
from typing import TypeGuard

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection.strides import Shape

Budget = int | Tensor


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def checked_level(level: object, where: str) -> float:
    """A sparsity level as a float; raises unless it is a number in [0, 1]."""
    if is_number(level) and 0 <= float(level) <= 1:
        return float(level)
    is_scalar = isinstance(level, (numbers.Number, str, type(None)))
    hint = (
        f"; it is a fraction, so {level} % is {float(level) / 100:g}" if is_number(level) and 2 <= level <= 100 else ""
    )
    found = repr(level) if is_scalar else f"a {type(level).__name__}, which is no number"
    raise SparsityError(f"{where}sparsity level must lie in [0, 1], got {found}{hint}")


def sparsity_to_nnz(sparsity: float, blocks: int, where: str = "") -> int:
    """Blocks kept of `blocks` when a fraction `sparsity` is dropped: `n - floor(s n + 1e-9)`.

    >>> sparsity_to_nnz(0.9, 10), sparsity_to_nnz(0.5, 5)
    (1, 3)
    """
    return blocks - math.floor(checked_level(sparsity, where) * blocks + 1e-9)


def checked_budget(nnz: Budget, grid: Shape, least: int, blocks: int, spare: int, where: str) -> Budget:
    """A budget with least <= nnz <= blocks - spare: an int, or int64 of the scope grid's shape; else an error.

    The values of a tensor on another device than the CPU are not checked: that would wait for the device.
    """
    if isinstance(nnz, bool) or not isinstance(nnz, (int, Tensor)):
        raise SparsityError(f"{where}nnz must be an int or an integer tensor, got {nnz!r}")
    low = high = nnz
    if isinstance(nnz, Tensor):
        if nnz.is_floating_point() or nnz.dtype == torch.bool or tuple(nnz.shape) not in ((), grid):
            raise SparsityError(
                f"{where}nnz must be an integer tensor of the scope grid's shape {grid}, "
                f"got {nnz.dtype} {tuple(nnz.shape)}"
            )
        readable = nnz.numel() > 0 and nnz.device.type == "cpu"
        low, high = map(int, nnz.aminmax()) if readable else (least, least)
        nnz = nnz.to(torch.int64).expand(grid)
    if not (least <= low and high <= blocks - spare):
        raise SparsityError(
            f"{where}nnz must lie in {least} .. {blocks - spare} (a scope has {blocks} blocks), got "
            + (f"{low}" if low == high else f"{low} .. {high}")
        )
    return nnz
