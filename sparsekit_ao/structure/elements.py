"""Tensors cut into tiles; the elements of blocks as one row or column each, read from windows and written back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .tiles import Shape, crop, cut_parts, pad_to, tile_volumes, tiles_of, to_aligned
from .windows import Blocks

_SHORT = 16  # blocks of fewer elements are read as columns, so that operations run along the blocks


class Buffers:
    """Memory that the parts of a tensor use one after the other: fresh memory costs more time than to fill it.

    >>> buffers = Buffers()
    >>> buffers("sums", (2, 3), torch.ones(1)).shape
    torch.Size([2, 3])
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Undefined values with the dtype and device of `like`; the next call with this name overwrites them."""
        size, key = math.prod(shape), (name, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < size:
            held = self._held[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(shape)


def counts_of(members: Sequence[Blocks], ndim: int) -> Tensor:
    """Elements of each block over all members (fewer at a partial edge); float32, of the aligned grid's shape."""
    return torch.stack([to_aligned(tile_volumes(m.window.shape, m.shape, m.window.device).float(), m.order, ndim) for m in members]).sum(0)


def parts_of(members: Sequence[Blocks], grid: Shape, most: int) -> Iterator[tuple[tuple[slice, ...], list[Blocks]]]:
    """Cut an aligned grid into parts of whole blocks, of `most` elements if they can be: slices of it, and members."""
    size = sum(math.prod(m.shape) for m in members)
    blocks = torch.empty((), device="meta").expand(grid)
    for place, _ in cut_parts(blocks, (1,) * len(grid), max(most // size, 1)):
        yield place, [_cut(m, place) for m in members]


def _cut(m: Blocks, place: Sequence[slice]) -> Blocks:
    """A member's blocks at a place of the aligned grid."""
    own = {axis: place[k] for k, axis in enumerate(m.order or range(len(place)))}
    cut = tuple(slice(own[k].start * b, own[k].stop * b) for k, b in enumerate(m.shape))
    return replace(m, values=m.window[cut], mask=None if m.mask is None else m.mask[cut])


def element_dim(members: Sequence[Blocks]) -> int:
    """Whether blocks are to be read as rows (-1), or as columns (-2), where that follows memory or they are short."""
    first = members[0]
    window = first.window
    fastest = min((k for k in range(window.ndim) if window.shape[k] > 1), key=window.stride, default=None)
    is_across = fastest is not None and first.shape[fastest] == 1
    return -2 if is_across or sum(math.prod(m.shape) for m in members) < _SHORT else -1


def read_blocks(
    members: Sequence[Blocks], grid: Shape, dim: int, fill: float, like: Tensor, buffers: Buffers, name: str
) -> Tensor:
    """The blocks of an aligned grid: [blocks, elements] for dim -1, [elements, blocks] for -2.

    Args:
        members, grid: windows with values, and their common grid.
        dim: see `element_dim`.
        fill: the value of the elements that blocks at partial edges lack.
        like: has the dtype and device of the result.
        buffers, name: where the result is stored, unless it is a view of the values.
    """
    size, blocks = sum(math.prod(m.shape) for m in members), math.prod(grid)
    first = members[0]
    if dim == -1 and len(members) == 1 and first.window.dtype == like.dtype and not first.is_partial:
        tiles = _tiles(first.window, first, len(grid))
        if tiles.is_contiguous():
            return tiles.view(blocks, size)
    out = buffers(name, (blocks, size) if dim == -1 else (size, blocks), like)
    for m, rows in zip(members, _rows_of_members(out, members, grid, dim), strict=True):
        rows.copy_(_tiles(pad_to(m.window, m.shape, fill), m, len(grid)))
    return out


def write_blocks(members: Sequence[Blocks], blocks: Tensor, grid: Shape, dim: int) -> None:
    """Write what `read_blocks` returned back to the members' values."""
    for m, rows in zip(members, _rows_of_members(blocks, members, grid, dim), strict=True):
        whole = m.window.new_empty([g * b for g, b in zip(m.grid, m.shape, strict=True)]) if m.is_partial else m.window
        _tiles(whole, m, len(grid)).copy_(rows)
        if m.is_partial:
            m.window.copy_(crop(whole, m.window.shape))


def _tiles(window: Tensor, m: Blocks, ndim: int) -> Tensor:
    """A window as a view (*aligned grid, *tile)."""
    return to_aligned(tiles_of(window, m.shape), m.order, ndim, trailing=len(m.shape))


def _rows_of_members(blocks: Tensor, members: Sequence[Blocks], grid: Shape, dim: int) -> Iterator[Tensor]:
    """The elements of each member as a view (*aligned grid, *tile)."""
    rows, at = (blocks if dim == -1 else blocks.t()).view(*grid, blocks.shape[dim]), 0
    for m in members:
        width = math.prod(m.shape)
        yield rows.narrow(-1, at, width).view((*grid, *m.shape))
        at += width
