"""Integers about strided windows: strides, addresses and how many tiles cut a shape.

Sizes, strides and offsets count elements.
"""

from collections.abc import Sequence

import torch

Shape = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor of this shape.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    stride = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        stride[k] = stride[k + 1] * max(shape[k + 1], 1)
    return tuple(stride)


def cosize(shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Largest address that the window reaches, plus one; 0 for an empty window."""
    if 0 in shape:
        return 0
    return offset + sum((n - 1) * d for n, d in zip(shape, stride, strict=True)) + 1


def grid_of(sizes: Sequence[int], tile: Sequence[int]) -> Shape:
    """How many tiles each dimension has; a partial last tile counts.

    >>> grid_of((4, 10), (2, 4))
    (2, 3)
    """
    return tuple(-(-s // t) for s, t in zip(sizes, tile, strict=True))


def addresses(shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Every address of the window, row-major over its indices; int64, of length prod(shape)."""
    out = torch.tensor([offset], device="cpu")
    for n, d in zip(shape, stride, strict=True):
        out = (out[:, None] + torch.arange(n, device="cpu") * d).reshape(-1)
    return out
