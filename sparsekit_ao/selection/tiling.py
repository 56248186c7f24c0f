"""Tiles as torch views: how a tensor is cut into blocks, and a block grid into scopes.

Scores, budgets and masks are dealt with elsewhere. A dimension that its tile does not divide is padded first, so that
everything after it is regular.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .strides import Shape, grid_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """One strided window cut into blocks: what backends are given.

    Attributes:
        shape: elements of a block, one entry a dimension of the window.
        values: the window on the values that are scored, or None.
        mask: the window on the mask that is filled (True = keep), or None.
        order: aligned grid dimension k is this grid's dimension order[k]; () is the identity.
        under: the window on the mask that an `Update` with `masked` scores the values under; None: `mask` itself, else
            another tensor of the same strides.
    """

    shape: Shape
    values: Tensor | None = None
    mask: Tensor | None = None
    order: Shape = ()
    under: Tensor | None = None

    @property
    def window(self) -> Tensor:
        """The values if there are any, else the mask: for sizes and device."""
        found = self.values if self.values is not None else self.mask
        assert found is not None, "Blocks needs values or a mask"
        return found

    @cached_property
    def grid(self) -> Shape:
        """Blocks along each dimension of the window."""
        return grid_of(self.window.shape, self.shape)

    @cached_property
    def is_partial(self) -> bool:
        """Whether some last block is smaller than the others."""
        return any(s % b for s, b in zip(self.window.shape, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scopes:
    """Blocks that are kept or dropped together (`members`, on one aligned grid), cut into scopes.

    Attributes:
        members: windows; their blocks at one aligned grid index are kept or dropped together.
        shape: blocks of a scope along each dimension of the aligned grid.
        order: aligned scope dimension k is this scope grid's dimension order[k]; () is the identity.
    """

    members: tuple[Blocks, ...]
    shape: Shape
    order: Shape = field(default=())

    @cached_property
    def grid(self) -> Shape:
        """The aligned block grid."""
        return aligned_grid(self.members[0].grid, self.members[0].order, len(self.shape))

    @cached_property
    def scope_grid(self) -> Shape:
        """Scopes along each aligned scope dimension."""
        own = grid_of(self.grid, self.shape)
        return tuple(own[k] for k in self.order) if self.order else own

    def with_members(self, members: Iterable[Blocks]) -> "Scopes":
        """The same scopes over other windows."""
        return replace(self, members=tuple(members))


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
    own = grid.ndim - trailing
    full = grid[(slice(None),) * own + (None,) * (ndim - own)]
    return full.permute([*order, *range(ndim, ndim + trailing)]) if order else full


def from_aligned(aligned: Tensor, order: Sequence[int], grid: Sequence[int], trailing: int = 0) -> Tensor:
    """The inverse of `to_aligned`: an aligned grid viewed in the member's own order."""
    n = aligned.ndim - trailing
    own = aligned.permute([*(list(order).index(k) for k in range(n)), *range(n, n + trailing)]) if order else aligned
    return own.reshape([*grid, *aligned.shape[n:]])


def to_scopes(grid: Tensor, scopes: Scopes, fill: float | bool) -> Tensor:
    """The aligned grid as rows [scopes, blocks of a scope]; slots beyond a partial scope hold `fill`."""
    n = grid.ndim
    tiles = split(pad_to(grid, scopes.shape, fill), scopes.shape)
    outer = [2 * k for k in (scopes.order or range(n))]
    rows = tiles.permute([*outer, *range(1, 2 * n, 2)])
    return rows.reshape(math.prod(tiles.shape[k] for k in outer), math.prod(scopes.shape))


def from_scopes(rows: Tensor, scopes: Scopes) -> Tensor:
    """The inverse of `to_scopes`, without the padding."""
    grid, n = scopes.grid, len(scopes.shape)
    own = grid_of(grid, scopes.shape)
    order = scopes.order or tuple(range(n))
    tiles = rows.reshape([*(own[k] for k in order), *scopes.shape])
    interleave = [axis for k in range(n) for axis in (order.index(k), n + k)]
    whole = tiles.permute(interleave).reshape([g * b for g, b in zip(own, scopes.shape, strict=True)])
    return crop(whole, grid)


def tile_volumes(sizes: Sequence[int], tile: Sequence[int], device: torch.device | None = None) -> Tensor:
    """How many entries each tile has: less than prod(tile) at a partial edge; int64, of the grid's shape.

    On the CPU by default.

    >>> tile_volumes((2, 5), (2, 4))
    tensor([[8, 2]])
    """
    device = torch.device("cpu") if device is None else device
    volume = torch.ones((), dtype=torch.int64, device=device)
    for size, n in zip(sizes, tile, strict=True):
        along = torch.full((-(-size // n),), n, device=device)
        if size % n:
            along[-1] = size % n
        volume = volume[..., None] * along
    return volume


def real_slots(scopes: Sequence[Scopes], device: torch.device | None = None) -> Tensor | None:
    """Which slots of the scopes' joined rows hold a block; None if all do, because no scope is partial.

    On the windows' own device unless another is given.
    """
    if not any(g % n for s in scopes for g, n in zip(s.grid, s.shape, strict=True)):
        return None
    device = scopes[0].members[0].window.device if device is None else device
    return torch.cat([to_scopes(torch.ones(s.grid, dtype=torch.bool, device=device), s, False) for s in scopes], dim=1)
