"""The oracle: the three verbs in the plainest torch, on any device, with a stable sort for selection.

Every other implementation must give these bits; triton/README.md ("Sums") names the one exception, norms of long
blocks. A block's sum is taken in one fixed order (a halving tree along each dimension of the block, first dimension
first), made of elementwise operations only, so it does not depend on chunking, threads or device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .keys import absent, order_keys
from .tiling import Blocks, from_aligned, pad_to, split, tile_volumes, to_aligned

__all__ = ["Norm", "block_scores", "candidates_of", "element_counts", "fill_mask", "keep_mask", "reduce_blocks", "root"]

Norm = float | Callable[[Tensor], Tensor]
UNROLL = 16  # longest last dimension that is reduced slice by slice
SMALL = 1 << 14  # ... unless the tensor is so small that the number of operations counts


def keep_mask(scores: Tensor, keep: int | Tensor, candidates: Tensor | None) -> Tensor:
    """Exactly `keep` per row, highest first, lower index among equals; never a slot outside `candidates`."""
    keys = order_keys(scores)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, absent(scores.dtype))
    ranking = keys.sort(dim=1, descending=True, stable=True).indices
    limit = keep[:, None] if isinstance(keep, Tensor) else keep
    kept = (torch.arange(scores.shape[1], device=scores.device) < limit).expand(scores.shape)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ranking, kept)
    return mask if candidates is None else mask & candidates


def root(t: Tensor) -> Tensor:
    """The correctly rounded root: torch's own of float32 may be a bit off, depending on the machine."""
    return t.double().sqrt().to(t.dtype)


def block_scores(
    members: Sequence[Blocks],
    norm: Norm,
    ndim: int,
    as_mean: bool | None = None,
    root: Callable[[Tensor], Tensor] = root,
) -> Tensor:
    """One score a block of the aligned grid: the norm of the union of the members' blocks.

    With `as_mean` (by default: where some block is partial) a score is the mean of |x|^p before the root, so that
    blocks of fewer elements compare; a callable `norm` gives a saliency per element, of which the mean is the score.
    A quicker `root` must round as this one.
    """
    as_mean = callable(norm) or (any(m.is_partial for m in members) if as_mean is None else as_mean)
    first = members[0]
    if len(members) == 1 and not callable(norm) and not as_mean and all(b == 1 for b in first.shape):
        return to_aligned(_wide(first.window.abs()), first.order, ndim)
    total: Tensor | None = None
    count: Tensor | int = 0
    for m in members:
        power = to_aligned(reduce_blocks(_power(m.window, norm), m.shape, norm), m.order, ndim)
        total = power if total is None else _combine(total, power, norm)
        if as_mean and norm != float("inf"):
            count = count + to_aligned(element_counts(m), m.order, ndim)
    assert total is not None
    if as_mean and norm != float("inf"):
        total = total / count
    return root(total) if norm == 2 else total


def fill_mask(members: Sequence[Blocks], keep: Tensor, *, among_kept: bool = False) -> None:
    """Write the aligned keep grid to every member's mask, in place; a later `stage` only removes."""
    for m in members:
        assert m.mask is not None, "fill_mask needs masks"
        grid = from_aligned(keep, m.order, m.grid)
        whole = pad_to(m.mask, m.shape, False)
        interleaved = split(whole, m.shape)
        kept = grid[tuple(i for _ in range(grid.ndim) for i in (slice(None), None))]
        if among_kept:
            interleaved.mul_(kept)
        else:
            interleaved.copy_(kept.expand_as(interleaved))
        if whole is not m.mask:
            m.mask.copy_(whole[tuple(slice(0, s) for s in m.mask.shape)])


def candidates_of(members: Sequence[Blocks], ndim: int) -> Tensor:
    """Blocks of the aligned grid of which an earlier stage left anything: the ones that may still be kept."""
    alive: Tensor | None = None
    for m in members:
        assert m.mask is not None, "a later stage needs masks"
        tiles = split(pad_to(m.mask != 0, m.shape, False), m.shape)
        grid = to_aligned(_fold(tiles, torch.logical_or), m.order, ndim)
        alive = grid if alive is None else alive | grid
    assert alive is not None
    return alive


def reduce_blocks(elements: Tensor, block: Sequence[int], norm: Norm) -> Tensor:
    """Sum (for an infinite norm: maximum) over the elements of each block, in the fixed order."""
    tiles = split(pad_to(elements, block, 0.0), block)
    return _fold(tiles, torch.maximum if norm == float("inf") else torch.add)


def _fold(tiles: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce every second dimension of (g0, b0, g1, b1, ...) by a halving tree."""
    for k in range(tiles.ndim // 2):
        tiles = _halve(tiles, k + 1, join)
    return tiles


def _halve(t: Tensor, dim: int, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """One dimension by its halving tree: upper half onto lower half, an odd last one carried along."""
    while t.shape[dim] > 1:
        size = t.shape[dim]
        if dim == t.ndim - 1 and size <= UNROLL and t.numel() > SMALL:
            return _halve_slices(list(t.unbind(dim)), join)
        low = (size + 1) // 2
        top = join(t.narrow(dim, 0, size - low), t.narrow(dim, low, size - low))
        t = top if size % 2 == 0 else torch.cat([top, t.narrow(dim, size - low, 1)], dim)
    return t.squeeze(dim)


def _halve_slices(parts: list[Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The same tree over separate slices: quicker where the dimension is short and last."""
    while len(parts) > 1:
        low = (len(parts) + 1) // 2
        parts = [join(a, b) for a, b in zip(parts, parts[low:], strict=False)] + parts[len(parts) - low : low]
    return parts[0]


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _power(t: Tensor, norm: Norm) -> Tensor:
    if callable(norm):
        return _wide(norm(t))
    t = _wide(t)
    return t * t if norm == 2 else t.abs()


def _combine(a: Tensor, b: Tensor, norm: Norm) -> Tensor:
    return torch.maximum(a, b) if norm == float("inf") else a + b


def element_counts(m: Blocks) -> Tensor:
    """How many elements each block of the grid really has, in the grid's shape (float32)."""
    return tile_volumes(m.window.shape, m.shape, m.window.device).float()
