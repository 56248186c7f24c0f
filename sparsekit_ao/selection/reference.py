"""The reference: scoring, selection and filling in the plainest torch, on any device, with a stable sort.

Every other backend must write these bits; triton/README.md ("Sums") names the one exception, norms of long blocks. A
block's sum is taken in one fixed order (a halving tree along each dimension of the block, first dimension first) of
elementwise operations only, so it does not depend on chunking, threads or device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .extremes import rescored, suspects
from .keys import absent, order_keys
from .tiling import (
    Blocks,
    crop,
    from_aligned,
    from_scopes,
    pad_to,
    real_slots,
    split,
    tile_volumes,
    to_aligned,
    to_scopes,
)
from .work import Norm, Scores, Threshold, Update, Work

name = "reference"
UNROLL = 16  # longest last dimension that is reduced slice by slice
SMALL = 1 << 14  # ... unless the tensor is so small that the number of operations counts


def reasons(work: Work) -> list[str]:
    """Why the reference cannot take the work; see `backend.Backend`."""
    return ["it does not threshold in place"] if isinstance(work, Threshold) else []


def run(work: Sequence[Work]) -> None:
    """Do all the work, one piece after the other."""
    for one in work:
        if isinstance(one, Scores):
            one.out.copy_(block_scores(one.members, one.norm, one.out.ndim, one.as_mean))
        else:
            assert isinstance(one, Update)
            update_in_steps(one, block_scores, keep_mask)


def update_in_steps(update: Update, score: Callable[..., Tensor], select: Callable[..., Tensor]) -> None:
    """A mask update in three steps: block scores as rows, the selection, the mask.

    `score` is called as `block_scores(members, norm, ndim=..., as_mean=...)`, `select` as `keep_mask(scores, keep,
    candidates=...)`.
    """
    scopes, budget = update.scopes, update.budget
    kept = [s.with_members(map(_under_own, s.members)) for s in scopes] if update.scores_masked else scopes
    as_mean = any(m.is_partial for m in update.members)  # all competitors are scored in the same way
    rows = [to_scopes(score(s.members, update.norm, ndim=len(s.shape), as_mean=as_mean), s, 0.0) for s in kept]
    candidates = real_slots(scopes)
    if update.among_kept:
        present = [to_scopes(candidates_of(s.members, len(s.shape)), s, False) for s in scopes]
        candidates = torch.cat(present, dim=1)
    budget = budget.reshape(-1) if isinstance(budget, Tensor) else budget
    chosen = select(torch.cat(rows, dim=1), budget, candidates=candidates)
    for one, mask in zip(scopes, chosen.split([math.prod(s.shape) for s in scopes], dim=1), strict=True):
        fill_mask(one.members, from_scopes(mask, one), among_kept=update.among_kept)


def _under_own(m: Blocks) -> Blocks:
    """The member with its values under its own mask, unless they are under another already."""
    return replace(m, under=m.mask if m.under is None else m.under)


def scored(m: Blocks) -> Tensor:
    """The values of a member, in a new tensor with 0 for those that the mask drops which they are under, if any."""
    if m.under is None or m.values is None:
        return m.window
    if m.under.dtype == m.values.dtype:  # takes a third of the time of `where`
        return torch.ops.aten.threshold_backward(m.values, m.under, 0)
    return torch.where(m.under != 0, m.values, 0)


def keep_mask(scores: Tensor, keep: int | Tensor, candidates: Tensor | None) -> Tensor:
    """Exactly `keep` for each row, highest first, lower index among equals; never a slot outside `candidates`."""
    keys = order_keys(scores)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, absent(scores.dtype))
    ranking = keys.sort(dim=1, descending=True, stable=True).indices
    limit = keep[:, None] if isinstance(keep, Tensor) else keep
    kept = (torch.arange(scores.shape[1], device=scores.device) < limit).expand(scores.shape)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ranking, kept)
    return mask if candidates is None else mask & candidates


def root(t: Tensor) -> Tensor:
    """The correctly rounded root; on the CPU in place, by the processor's own instruction, since torch's may be off."""
    if t.device.type != "cpu":
        return t.double().sqrt().to(t.dtype)
    array = t.detach().numpy()
    np.sqrt(array, out=array)
    return t.detach()


def block_scores(members: Sequence[Blocks], norm: Norm, ndim: int, as_mean: bool | None = None) -> Tensor:
    """One score for each block of the aligned grid: the norm of the union of the members' blocks.

    With `as_mean` (by default: where some block is partial) a score is the mean of |x|^p before the root, so that
    blocks of fewer elements compare. For `norm=None` it is the signed sum, or the mean. Where a sum leaves the range of
    its dtype, the score is computed anew; see `extremes`.
    """
    as_mean = any(m.is_partial for m in members) if as_mean is None else as_mean
    first = members[0]
    if len(members) == 1 and not as_mean and all(b == 1 for b in first.shape):
        return to_aligned(_wide(scored(first) if norm is None else scored(first).abs()), first.order, ndim)
    join, total = torch.maximum if norm == float("inf") else torch.add, None
    count: Tensor | int = 0
    for m in members:
        powers = _power(scored(m), norm, is_new=m.under is not None)
        power = to_aligned(reduce_blocks(powers, m.shape, norm), m.order, ndim)
        total = power if total is None else join(total, power)
        if as_mean and norm != float("inf"):
            count = count + to_aligned(element_counts(m), m.order, ndim)
    assert total is not None
    if norm == float("inf"):
        return total
    anew = suspects(total, norm, lambda: any(map(_loses_squares, members)))
    total = total / count if as_mean else total
    scores = root(total) if norm == 2 else total
    if anew is None:
        return scores
    windows = [(m, scored(m)) for m in members]
    return rescored(scores, anew, windows, norm, count if as_mean else 1, partial(_halve, dim=1, join=torch.add), root)


def _loses_squares(m: Blocks) -> bool:
    """Whether the square of some value that is not zero is zero."""
    values = _wide(scored(m))
    return bool(values.count_nonzero() > (values * values).count_nonzero())


def fill_mask(members: Sequence[Blocks], keep: Tensor, *, among_kept: bool = False) -> None:
    """Write the aligned keep grid to every member's mask, in place; with `among_kept` only remove."""
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
            m.mask.copy_(crop(whole, m.mask.shape))


def candidates_of(members: Sequence[Blocks], ndim: int) -> Tensor:
    """Blocks of the aligned grid of which the masks keep any element."""
    present: Tensor | None = None
    for m in members:
        assert m.mask is not None, "candidates_of needs masks"
        tiles = split(pad_to(m.mask != 0, m.shape, False), m.shape)
        grid = to_aligned(fold(tiles, torch.logical_or), m.order, ndim)
        present = grid if present is None else present | grid
    assert present is not None
    return present


def reduce_blocks(elements: Tensor, block: Sequence[int], norm: Norm) -> Tensor:
    """Sum (for an infinite norm: maximum) over the elements of each block, in the fixed order."""
    tiles = split(pad_to(elements, block, 0.0), block)
    return fold(tiles, torch.maximum if norm == float("inf") else torch.add)


def fold(tiles: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
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


def _power(t: Tensor, norm: Norm, *, is_new: bool) -> Tensor:
    t = _wide(t)
    if norm is None:
        return t
    if is_new:  # fresh memory takes as long as the multiplication
        return t.mul_(t) if norm == 2 else t.abs_()
    return t * t if norm == 2 else t.abs()


def element_counts(m: Blocks) -> Tensor:
    """How many elements each block of the grid has, in the grid's shape (float32)."""
    return tile_volumes(m.window.shape, m.shape, m.window.device).float()
