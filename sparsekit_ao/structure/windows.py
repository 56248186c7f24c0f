"""Windows: the tensors of block specs, cut into blocks and scopes; block scores, masks filled, and what masks keep."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .tiles import Shape, aligned_grid, crop, from_aligned, grid_of, pad_to, split, tile_volumes, tiles_of, to_aligned

Norm = float | None
LEAST = 2.0**-100  # sums of float32 squares below this are inexact
UNROLL = 16  # longest last dimension that is reduced slice by slice
SMALL = 1 << 14  # ... unless the tensor is so small that the number of operations counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """One strided window cut into blocks: what backends are given."""

    shape: Shape  # elements of a block along each dimension of the window
    values: Tensor | None = None  # the window on the values that are scored
    mask: Tensor | None = None  # the window on the mask that is filled (True = keep)
    order: Shape = ()  # aligned grid dimension k is this grid's dimension order[k]; () is the identity
    under: Tensor | None = None  # the window on the mask under which values are scored: they score 0 where it drops

    @property
    def window(self) -> Tensor:
        """The values if there are any, else the mask: for sizes and device."""
        return self.values if self.values is not None else self.mask  # type: ignore[return-value]

    @cached_property
    def grid(self) -> Shape:
        """Blocks along each dimension of the window."""
        return grid_of(self.window.shape, self.shape)

    @cached_property
    def is_partial(self) -> bool:
        """Whether some last block is smaller than the others."""
        return any(s % b for s, b in zip(self.window.shape, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ScopeWindows:
    """Windows on coupled tensors, cut into scopes: blocks at the same index of the aligned grid share one fate."""

    windows: tuple[Window, ...]
    shape: Shape  # blocks of a scope along each dimension of the aligned grid
    order: Shape = ()  # aligned scope dimension k is this scope grid's dimension order[k]; () is the identity

    @cached_property
    def grid(self) -> Shape:
        """The aligned block grid."""
        return aligned_grid(self.windows[0].grid, self.windows[0].order, len(self.shape))

    @cached_property
    def scope_grid(self) -> Shape:
        """Scopes along each aligned scope dimension."""
        counts = grid_of(self.grid, self.shape)
        return tuple(counts[k] for k in self.order) if self.order else counts

    @property
    def is_plain(self) -> bool:
        """Whether the scopes cut the grid of one window evenly, in its own order."""
        (first, *more), n = self.windows, len(self.shape)
        if more or first.order or self.order or n != len(first.shape):
            return False
        return not any(g % k for g, k in zip(first.grid, self.shape, strict=True))


def to_scopes(grid: Tensor, scopes: ScopeWindows, fill: float | bool) -> Tensor:
    """The aligned grid as rows [scopes, blocks of a scope]; slots beyond a partial scope hold `fill`."""
    n = grid.ndim
    tiles = split(pad_to(grid, scopes.shape, fill), scopes.shape)
    outer = [2 * k for k in (scopes.order or range(n))]
    rows = tiles.permute([*outer, *range(1, 2 * n, 2)])
    return rows.reshape(math.prod(tiles.shape[k] for k in outer), math.prod(scopes.shape))


def from_scopes(rows: Tensor, scopes: ScopeWindows) -> Tensor:
    """The inverse of `to_scopes`, without the padding."""
    grid, n = scopes.grid, len(scopes.shape)
    counts = grid_of(grid, scopes.shape)
    order = scopes.order or tuple(range(n))
    tiles = rows.reshape([*(counts[k] for k in order), *scopes.shape])
    interleave = [axis for k in range(n) for axis in (order.index(k), n + k)]
    whole = tiles.permute(interleave).reshape([g * b for g, b in zip(counts, scopes.shape, strict=True)])
    return crop(whole, grid)


def real_slots(scopes: Sequence[ScopeWindows], device: torch.device | None = None) -> Tensor | None:
    """Which slots of the scopes' joined rows hold a block, by default on their device; None if no scope is partial."""
    if not any(g % n for s in scopes for g, n in zip(s.grid, s.shape, strict=True)):
        return None
    device = scopes[0].windows[0].window.device if device is None else device
    return torch.cat([to_scopes(torch.ones(s.grid, dtype=torch.bool, device=device), s, False) for s in scopes], dim=1)


def block_scores(windows: Sequence[Window], norm: Norm, ndim: int, as_mean: bool | None = None) -> Tensor:
    """Return a score for each block of the aligned grid (of `ndim` dimensions): the norm of the blocks of all windows.

    A block's sum is taken in one fixed order (a halving tree along each dimension), so it does not depend on chunks,
    threads or ranks. Scores are float32, or float64 for float64 weights; single elements score exactly |x|. On a CPU,
    blocks whose float32 squares would leave the range are summed in float64; GPUs take blocks between 1e-15 and 1e19.
    With a norm of None, values are saliencies, and a score is their signed sum. With `as_mean`, by default where some
    block is partial, it is the (power) mean over the elements of a block.
    """
    as_mean = any(m.is_partial for m in windows) if as_mean is None else as_mean
    first = windows[0]
    if len(windows) == 1 and not as_mean and all(b == 1 for b in first.shape):
        values = _wide(scored(first))  # the least integer has no magnitude of its own dtype
        if norm is not None:
            values = torch.abs(values, out=None if values is first.window else values)
        return to_aligned(values, first.order, ndim)
    join = torch.maximum if norm == math.inf else torch.add
    total: Tensor | None = None
    count: Tensor | int = 0
    for m in windows:
        values = _wide(scored(m))
        if norm is not None:
            out = None if values is m.window else values  # a copy may be overwritten
            values = torch.mul(values, values, out=out) if norm == 2 else torch.abs(values, out=out)
        power = to_aligned(_fold(split(pad_to(values, m.shape, 0.0), m.shape), join), m.order, ndim)
        total = power if total is None else join(total, power)
        if as_mean and norm != math.inf:
            count = count + to_aligned(tile_volumes(m.window.shape, m.shape, m.window.device).float(), m.order, ndim)
    assert total is not None
    if norm != 2:
        return total / count if isinstance(count, Tensor) else total
    beyond = _beyond_range(windows, total, ndim)
    scores = _root(total / count if isinstance(count, Tensor) else total)
    if beyond is None:
        return scores
    wide = [replace(m, values=scored(m).double(), under=None) for m in windows]
    return torch.where(beyond, block_scores(wide, norm, ndim, as_mean).float(), scores)


def _beyond_range(windows: Sequence[Window], total: Tensor, ndim: int) -> Tensor | None:
    """Return which blocks have float32 sums of squares that under- or overflowed, on a CPU; None if none has."""
    if total.device.type != "cpu" or total.dtype != torch.float32 or not total.numel():  # a GPU would be waited for
        return None
    least, most = map(float, total.aminmax())
    if most < math.inf and (least >= LEAST or all(_least_of(m.window) ** 2 >= LEAST for m in windows)):
        return None  # small sums are those of zeros, such as masked weights
    largest = block_scores(windows, math.inf, ndim)
    beyond = ((total < LEAST) & (largest > 0)) | (total.isinf() & largest.isfinite())
    return beyond if bool(beyond.any()) else None


def _least_of(values: Tensor) -> float:
    """Return the smallest absolute value; that of float32 values is read from their bits, without a copy."""
    if values.dtype != torch.float32 or not values.numel():
        return float(_wide(values).abs().min()) if values.numel() else math.inf
    bits, magnitude = values.detach().numpy().view(np.int32), 0x7FFFFFFF
    # As int32, the negative numbers come first, and as uint32 the others do, each by their magnitude.
    least = min(int(bits.min()) & magnitude, int(bits.view(np.uint32).min()) & magnitude)
    return float(np.int32(least).view(np.float32))


def scope_scores(scopes: ScopeWindows, norm: Norm = 2, as_mean: bool | None = None) -> Tensor:
    """Return block scores as rows [scopes, blocks of a scope]; slots beyond a partial scope hold 0."""
    return to_scopes(block_scores(scopes.windows, norm, len(scopes.shape), as_mean), scopes, 0.0)


def scored(m: Window) -> Tensor:
    """The values of a window, 0 where the mask that they are scored under drops them."""
    if m.under is None or m.values is None:
        return m.window
    if m.under.dtype == m.values.dtype:  # takes a third of the time of `where`
        return torch.ops.aten.threshold_backward(m.values, m.under, 0)
    return torch.where(m.under != 0, m.values, 0)


def fill_mask(windows: Sequence[Window], keep: Tensor | Sequence[Tensor], *, within_mask: bool = False) -> None:
    """Write the aligned keep grid (True = keep), or one for each window, to the windows' masks, in place.

    With `within_mask` blocks are only removed. All memory is allocated before a mask is written.
    """
    wholes = [pad_to(m.mask, m.shape, False) for m in windows]  # type: ignore[arg-type]
    grids = [keep] * len(windows) if isinstance(keep, Tensor) else keep
    for m, whole, kept_blocks in zip(windows, wholes, grids, strict=True):
        assert m.mask is not None
        grid = from_aligned(kept_blocks, m.order, m.grid)
        interleaved = split(whole, m.shape)
        kept = grid[tuple(i for _ in range(grid.ndim) for i in (slice(None), None))]
        if within_mask:
            interleaved.mul_(kept)
        else:
            interleaved.copy_(kept.expand_as(interleaved))
        if whole is not m.mask:
            m.mask.copy_(crop(whole, m.mask.shape))


def kept_flags(m: Window, *, every: bool = False) -> Tensor:
    """Return which blocks of a window the mask keeps any element of (with `every`: all elements of), as bool."""
    tiles = split(pad_to(m.mask != 0, m.shape, every), m.shape)  # type: ignore[arg-type]
    return _fold(tiles, torch.logical_and if every else torch.logical_or)


def kept_grid(scopes: ScopeWindows) -> Tensor:
    """Return which blocks of the aligned grid the masks keep any element of, as bool."""
    grids = [to_aligned(kept_flags(m), m.order, len(scopes.shape)) for m in scopes.windows]
    return grids[0] if len(grids) == 1 else torch.stack(grids).any(0)


def elements_of(windows: Sequence[Window], ndim: int, fill: float) -> Tensor:
    """(*grid, elements of a block over all windows) of an aligned grid of `ndim` dimensions; partial blocks padded."""
    rows = [(tiles_of(pad_to(m.window, m.shape, _fill_of(m, fill)), m.shape, merge=True), m.order) for m in windows]
    return torch.cat([to_aligned(elements, order, ndim, trailing=1) for elements, order in rows], dim=-1)


def _fill_of(m: Window, fill: float) -> float:
    """A number to pad with; in place of an infinite one, the largest or least of the window's integers."""
    if m.window.is_floating_point() or math.isfinite(fill):
        return fill
    if m.window.dtype == torch.bool:
        return fill > 0
    numbers = torch.iinfo(m.window.dtype)
    return numbers.max if fill > 0 else numbers.min


def _fold(tiles: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce every second dimension of (g0, b0, g1, b1, ...) by a halving tree."""
    for k in range(tiles.ndim // 2):
        tiles = _halve(tiles, k + 1, join)
    return tiles


def _halve(t: Tensor, dim: int, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """One dimension by its halving tree: join the upper half to the lower one; of an odd size one slice stays."""
    while t.shape[dim] > 1:
        size = t.shape[dim]
        low = (size + 1) // 2
        if dim == t.ndim - 1 and size <= UNROLL and t.numel() > SMALL:  # slice by slice: quicker where short and last
            parts = list(t.unbind(dim))
            while len(parts) > 1:
                low = (len(parts) + 1) // 2
                parts = [join(a, b) for a, b in zip(parts, parts[low:], strict=False)] + parts[len(parts) - low : low]
            return parts[0]
        top = join(t.narrow(dim, 0, size - low), t.narrow(dim, low, size - low))
        t = top if size % 2 == 0 else torch.cat([top, t.narrow(dim, size - low, 1)], dim)
    return t.squeeze(dim)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _root(t: Tensor) -> Tensor:
    """The correctly rounded root; on the CPU in place, by the processor's own instruction, since torch's may be off."""
    if t.device.type != "cpu":
        return t.double().sqrt().to(t.dtype)
    array = t.detach().numpy()
    np.sqrt(array, out=array)
    return t.detach()
