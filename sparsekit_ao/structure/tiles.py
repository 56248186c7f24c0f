"""Tensors cut into tiles: integers about strided windows, and tiles as torch views.

Sizes, strides and offsets count elements. A dimension that its tile does not divide is padded first, so that everything
after it is regular.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import SparsityError

Shape = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor of this shape."""
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
    """How many tiles each dimension has; a partial last tile counts."""
    return tuple(-(-s // t) for s, t in zip(sizes, tile, strict=True))


def addresses(shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Every address of the window, row-major over its indices; int64, of length prod(shape)."""
    out = torch.zeros(1, dtype=torch.int64, device="cpu")
    for n, d in zip(shape, stride, strict=True):
        out = (out[:, None] + torch.arange(n, device="cpu") * d).reshape(-1)
    return out


def split(t: Tensor, tile: Sequence[int]) -> Tensor:
    """A view (g0, t0, g1, t1, ...) of t; every dimension must be a multiple of its tile."""
    for k in range(t.ndim - 1, -1, -1):
        t = t.unflatten(k, (t.shape[k] // tile[k], tile[k]))
    return t


def pad_to(t: Tensor, tile: Sequence[int], value: float | bool) -> Tensor:
    """t itself where every tile divides, else a copy padded with `value` at the high end of each dimension."""
    sizes = [g * n for g, n in zip(grid_of(t.shape, tile), tile, strict=True)]
    if list(t.shape) == sizes:
        return t
    out = t.new_full(sizes, value)
    crop(out, t.shape).copy_(t)
    return out


def crop(t: Tensor, sizes: Sequence[int]) -> Tensor:
    """The low corner of t, as a view."""
    return t[tuple(slice(0, s) for s in sizes)]


def cut_parts(window: Tensor, unit: Shape, most: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Cut a window into parts of whole units, of `most` elements if they can be; each with its slices of the grid."""
    counts = [s // u for s, u in zip(window.shape, unit, strict=True)]
    todo = [tuple(slice(0, c) for c in counts)]
    while todo:
        place = todo.pop()
        sizes = [p.stop - p.start for p in place]
        numel = math.prod(sizes) * math.prod(unit)
        widest = next((k for k, size in enumerate(sizes) if size > 1), None)
        if numel <= most or widest is None:
            yield place, window[tuple(slice(p.start * u, p.stop * u) for p, u in zip(place, unit, strict=True))]
            continue
        step = max(1, most * sizes[widest] // numel)
        begin, end = place[widest].start, place[widest].stop
        parts = [slice(at, min(at + step, end)) for at in range(begin, end, step)]
        todo.extend((*place[:widest], part, *place[widest + 1 :]) for part in reversed(parts))


def aligned_grid(grid: Sequence[int], order: Sequence[int], ndim: int) -> Shape:
    """The shape of `grid` with trailing ones up to `ndim`, permuted by `order`."""
    full = tuple(grid) + (1,) * (ndim - len(grid))
    return tuple(full[k] for k in order) if order else full


def to_aligned(grid: Tensor, order: Sequence[int], ndim: int, trailing: int = 0) -> Tensor:
    """A member's grid (with `trailing` further dimensions) viewed in the aligned order."""
    present = grid.ndim - trailing
    full = grid[(slice(None),) * present + (None,) * (ndim - present)]
    return full.permute([*order, *range(ndim, ndim + trailing)]) if order else full


def from_aligned(aligned: Tensor, order: Sequence[int], grid: Sequence[int]) -> Tensor:
    """The inverse of `to_aligned`: an aligned grid viewed in the member's own order."""
    unordered = aligned.permute([list(order).index(k) for k in range(aligned.ndim)]) if order else aligned
    return unordered.reshape(tuple(grid))


def tile_volumes(sizes: Sequence[int], tile: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """How many entries each tile has, fewer at a partial edge; int64, of the grid's shape."""
    volume = torch.ones((), dtype=torch.int64, device=device)
    for size, n in zip(sizes, tile, strict=True):
        along = torch.full((-(-size // n),), n, device=device)
        if size % n:
            along[-1] = size % n
        volume = volume[..., None] * along
    return volume


def tiles_of(t: Tensor, tile: Shape, reorder: bool = True, merge: bool = False) -> Tensor:
    """Cut a tensor into tiles that divide it: (*grid, *tile), or interleaved (g0, t0, g1, t1, ...) without `reorder`.

    With `merge` the dimensions of the tile become one. The result is a view where the strides allow it.
    """
    if merge and not reorder:
        raise SparsityError("merge=True needs reorder=True: interleaved dimensions cannot be merged")
    n, tiles = t.ndim, split(t, tile)
    if not reorder:
        return tiles
    ordered = tiles.permute([*range(0, 2 * n, 2), *range(1, 2 * n, 2)])
    return ordered.reshape([*ordered.shape[:n], math.prod(tile)]) if merge else ordered
