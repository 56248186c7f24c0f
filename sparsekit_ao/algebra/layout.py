"""Integer algebra of strided windows: bounds, injectivity, and how tiles cut a shape.

Knows shapes, strides and offsets, all counted in elements; never a tensor's values, a module or a name.
`where` in the signatures is only the opening words of an error message.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from ..errors import SparsityError
from ..selection.strides import Shape, addresses, cosize

__all__ = [
    "check_window",
    "coordinate_of",
    "is_dense",
    "is_injective",
    "resolve_tile",
]


def coordinate_of(address: int, shape: Shape, stride: Shape) -> Shape:
    """The index of the tensor's element at an address; the inverse of `sum(i_k * stride_k)`.

    >>> coordinate_of(5, (3, 4), (1, 3))
    (2, 1)
    """
    at, left = [0] * len(shape), address
    for k in sorted((k for k in range(len(shape)) if shape[k] > 1), key=lambda k: -stride[k]):
        at[k], left = divmod(left, stride[k])
    if left or any(i >= n for i, n in zip(at, shape, strict=True)):  # strides that do not nest: look it up
        flat = int((addresses(shape, stride) == address).nonzero()[0, 0])
        for k in range(len(shape) - 1, -1, -1):
            flat, at[k] = divmod(flat, shape[k])
    return tuple(at)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the addresses are exactly 0 .. numel-1, each met once (contiguous in some order of dimensions)."""
    expected = 1
    for d, n in sorted((d, n) for n, d in zip(shape, stride, strict=True) if n != 1):
        if d != expected:
            return False
        expected *= n
    return True


def resolve_tile(
    kind: str, sizes: Sequence[int], tile: Sequence[int], *, edge: str = "error", where: str = ""
) -> Shape:
    """Check the block or scope shape that a user gave, and replace `()`, missing entries and -1.

    Args:
        kind: `"block"` (`()` is all ones, else one entry a dimension) or `"scope"` (missing entries are whole).
        sizes: what is tiled: the view's shape for a block, the block grid for a scope.
        tile: the shape as given.
        edge: `"error"`, or `"partial"` to allow a smaller last tile.
        where: opening words of an error.

    Returns:
        One positive int for each dimension of `sizes`.

    Raises:
        SparsityError: a wrong length, a non-integer, a value below 1 other than -1, a non-divisor.

    >>> resolve_tile("block", (8, 6), (-1, 3))
    (8, 3)
    >>> resolve_tile("scope", (8, 6), ())
    (8, 6)
    """
    if edge not in ("error", "partial"):
        raise SparsityError(f'{where}edge must be "error" or "partial", got {edge!r}')
    noun = "dimension" if kind == "block" else "block-grid dimension"
    if isinstance(tile, (str, int)) or not isinstance(tile, Sequence):
        raise SparsityError(f"{where}{kind} shape must be a tuple of ints, got {tile!r}")
    full = tuple(tile)
    if kind == "block":
        full = full or (1,) * len(sizes)
        if len(full) != len(sizes):
            raise SparsityError(
                f"{where}block {full} has {len(full)} entries, but the view has {len(sizes)} dimensions "
                f"{tuple(sizes)}. Give one entry a dimension, or () for single elements."
            )
    elif len(full) > len(sizes):
        raise SparsityError(
            f"{where}scope {full} has {len(full)} entries, but the block grid has {len(sizes)} dimensions "
            f"{tuple(sizes)}. Missing entries mean the whole dimension."
        )
    full += (-1,) * (len(sizes) - len(full))
    return tuple(_resolve_one(kind, noun, k, size, full, edge, where) for k, size in enumerate(sizes))


def _resolve_one(kind: str, noun: str, k: int, size: int, tile: Shape, edge: str, where: str) -> int:
    entry = tile[k]
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise SparsityError(f"{where}{kind} {tile} needs an int at {noun} {k}, got {entry!r}")
    if entry == -1:
        return max(size, 1)
    if entry < 1:
        raise SparsityError(f"{where}{kind} {tile} needs a positive size (or -1 for all) at {noun} {k}, got {entry}")
    if size % entry and edge == "error":
        raise SparsityError(
            f"{where}{kind} {tile} needs {noun} {k} divisible by {entry}, got {size}. "
            'Use edge="partial", or leave the tensor out.'
        )
    return entry


def check_window(
    param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int, where: str = ""
) -> None:
    """Check that a window meets only elements of the parameter, and none of them twice.

    Addresses count from the parameter's first element. Raises SparsityError with the first thing that is wrong.
    """
    for what, numbers in (("shape", shape), ("stride", stride), ("offset", (offset,))):
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise SparsityError(f"{where}view {what} must be non-negative ints, got {numbers}")
    _check_window(param_shape, param_stride, shape, stride, offset, where)


@lru_cache(maxsize=4096)
def _check_window(
    param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int, where: str
) -> None:
    if len(shape) != len(stride):
        raise SparsityError(
            f"{where}a view needs one stride a dimension, got shape {shape} ({len(shape)}) "
            f"and stride {stride} ({len(stride)})"
        )
    if 0 in shape:
        return
    if not is_injective(param_shape, param_stride):
        raise SparsityError(
            f"{where}the parameter {param_shape}:{param_stride} is expanded: several of its elements share memory. "
            "Make it contiguous first."
        )
    _check_inside(param_shape, param_stride, shape, stride, offset, where)
    if not is_injective(shape, stride):
        raise SparsityError(
            f"{where}view {shape}:{stride} meets some element twice, so a block could not be dropped by itself. "
            "Use strides under which every index has its own address."
        )


def _check_inside(
    param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int, where: str
) -> None:
    end, last = cosize(shape, stride, offset), cosize(param_shape, param_stride)
    if end > last:
        raise SparsityError(
            f"{where}view {shape}:{stride} with offset {offset} reaches address {end - 1}, "
            f"but the parameter {param_shape} ends at {last - 1}"
        )
    if is_dense(param_shape, param_stride) or _no_carry(param_shape, param_stride, shape, stride, offset):
        return
    inside = torch.isin(addresses(shape, stride, offset), addresses(param_shape, param_stride))
    if not bool(inside.all()):
        raise SparsityError(
            f"{where}view {shape}:{stride} with offset {offset} meets storage between the elements of the "
            f"parameter {param_shape}:{param_stride}, which is a slice of a larger tensor"
        )


def _no_carry(param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int) -> bool:
    """Whether the window plainly stays inside: its steps, written in the parameter's digits, never overflow one."""
    dims = sorted(((d, n) for n, d in zip(param_shape, param_stride, strict=True) if n > 1), reverse=True)
    reach = [0] * len(dims)
    for steps, jump in ((1, offset), *((n - 1, d) for n, d in zip(shape, stride, strict=True))):
        for j, (d, _) in enumerate(dims):
            digit, jump = divmod(jump, d)
            reach[j] += steps * digit
        if jump and steps:
            return False
    return all(r < n for r, (_, n) in zip(reach, dims, strict=True))


def is_injective(shape: Shape, stride: Shape) -> bool:
    """Whether every index has an address of its own."""
    reach = 0
    for d, n in sorted((d, n) for n, d in zip(shape, stride, strict=True) if n > 1):
        if d == 0:
            return False
        if d <= reach:  # not nested: only counting decides
            return int(addresses(shape, stride).unique().numel()) == math.prod(shape)
        reach += (n - 1) * d
    return True
