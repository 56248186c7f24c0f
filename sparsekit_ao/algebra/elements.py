"""Tensors cut into tiles, and the elements of blocks as one row a block, read from windows and written back."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Blocks
from ..selection.reference import element_counts
from ..selection.strides import Shape
from ..selection.tiling import from_aligned, pad_to, split, to_aligned


def tiles_of(t: Tensor, tile: Shape, reorder: bool = True, merge: bool = False) -> Tensor:
    """A tensor cut into tiles that divide it: (*grid, *tile), or interleaved (g0, t0, g1, t1, ...) without `reorder`.

    With `merge` the dimensions of the tile become one. A view where the strides allow.
    """
    if merge and not reorder:
        raise SparsityError("merge=True needs reorder=True: interleaved dimensions cannot be merged")
    n, tiles = t.ndim, split(t, tile)
    if not reorder:
        return tiles
    ordered = tiles.permute([*range(0, 2 * n, 2), *range(1, 2 * n, 2)])
    return ordered.reshape([*ordered.shape[:n], math.prod(tile)]) if merge else ordered


def elements_of(members: Sequence[Blocks], ndim: int, fill: float) -> Tensor:
    """(*grid, elements of a block over all members) of an aligned grid of `ndim` dimensions; partial blocks padded.

    >>> elements_of([Blocks(shape=(1, 2), values=torch.arange(6.0).reshape(2, 3))], 2, -1.0)[:, 1]
    tensor([[ 2., -1.],
            [ 5., -1.]])
    """
    rows = [(tiles_of(pad_to(m.window, m.shape, fill), m.shape, merge=True), m.order) for m in members]
    return torch.cat([to_aligned(elements, order, ndim, trailing=1) for elements, order in rows], dim=-1)


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
