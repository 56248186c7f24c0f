"""The elements of blocks as one row a block: read from windows, and written back to them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..selection import Blocks
from ..selection.reference import element_counts
from ..selection.strides import Shape
from ..selection.tiling import from_aligned, pad_to, split, to_aligned

__all__ = ["counts_of", "elements_of", "write_elements"]


def elements_of(members: Sequence[Blocks], ndim: int, fill: float) -> Tensor:
    """(*grid, elements of a block over all members) of an aligned grid of `ndim` dimensions; partial blocks padded.

    >>> elements_of([Blocks(shape=(1, 2), values=torch.arange(6.0).reshape(2, 3))], 2, -1.0)[:, 1]
    tensor([[ 2., -1.],
            [ 5., -1.]])
    """
    parts = []
    for m in members:
        n = m.window.ndim
        tiles = split(pad_to(m.window, m.shape, fill), m.shape).permute([*range(0, 2 * n, 2), *range(1, 2 * n, 2)])
        parts.append(to_aligned(tiles.reshape([*m.grid, math.prod(m.shape)]), m.order, ndim, trailing=1))
    return torch.cat(parts, dim=-1)


def write_elements(members: Sequence[Blocks], elements: Tensor, grid: Shape) -> None:
    """Write the rows [blocks, elements] of an aligned grid to the members' values; the inverse of `elements_of`."""
    widths = [math.prod(m.shape) for m in members]
    parts = elements.reshape([*grid, elements.shape[-1]]).split(widths, dim=-1)
    for m, part in zip(members, parts, strict=True):
        n = len(m.shape)
        tiles = from_aligned(part, m.order, m.grid, trailing=1).reshape([*m.grid, *m.shape])
        padded = tiles.permute([axis for k in range(n) for axis in (k, n + k)]).reshape(
            [g * b for g, b in zip(m.grid, m.shape, strict=True)]
        )
        m.window.copy_(padded[tuple(slice(0, size) for size in m.window.shape)])


def counts_of(members: Sequence[Blocks], ndim: int) -> Tensor:
    """Elements of each block over all members (fewer at a partial edge); float32, of the aligned grid's shape."""
    return torch.stack([to_aligned(element_counts(m), m.order, ndim) for m in members]).sum(0)
