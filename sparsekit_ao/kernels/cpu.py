"""The CPU path: the reference's masks in a few passes over memory, a cache-sized chunk at a time.

Three ways to select, by the width of a row: comparing every pair (N:M), sorting, a sample with a radix select behind
it. Scores of single elements are never stored: their keys are made from the weight itself, chunk by chunk.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import radix, reference, sample
from .keys import KEY_DTYPES, absent, key_bits, order_keys
from .radix import CHUNK, Reduce
from .threads import pieces, run_all, run_apart
from .tiling import Blocks, Scopes, cut_parts, from_scopes, to_scopes

__all__ = ["block_scores", "keep_mask", "scope_mask"]

PAIRS = 8  # widest row that is ranked by comparing every pair
SORTED = 256  # widest row that is sorted
WIDE = 1 << 15  # from here on a row is read in chunks


class _Rows:
    """Keys of score rows, made when asked for (see `radix.KeyRows`)."""

    def __init__(self, scores: Tensor, candidates: Tensor | None, magnitude: bool) -> None:
        self.rows, self.width = scores.shape
        self.bits = key_bits(scores.dtype)
        self._scores, self._candidates, self._magnitude = scores, candidates, magnitude

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        return self.block(slice(row, row + 1), slice(start, stop))[0]

    def at(self, row: int, slots: Tensor) -> Tensor:
        """Keys of single slots of one row."""
        candidates = None if self._candidates is None else self._candidates[row, slots][None]
        return _Rows(self._scores[row, slots][None], candidates, self._magnitude).block(slice(None))[0]

    def row(self, row: int) -> "_Rows":
        """A single row."""
        candidates = None if self._candidates is None else self._candidates[row, None]
        return _Rows(self._scores[row, None], candidates, self._magnitude)

    def block(self, rows: slice, slots: slice = slice(None)) -> Tensor:
        keys = order_keys(self._scores[rows, slots], magnitude=self._magnitude)
        if self._candidates is not None:
            keys.masked_fill_(~self._candidates[rows, slots], absent(self._scores.dtype))
        return keys


def keep_mask(
    scores: Tensor,
    keep: int | Tensor,
    candidates: Tensor | None = None,
    *,
    magnitude: bool = False,
    index: Tensor | None = None,
    reduce: Reduce | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `api.keep_mask`, by the fastest of the three ways; `magnitude` ranks by |score|, `out` takes the mask."""
    out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device) if out is None else out
    if out.numel() == 0 and reduce is None:
        return out
    source = _Rows(scores, candidates, magnitude)
    if reduce is not None or source.width >= WIDE:
        _keep_wide(out, source, keep, index, reduce)
    else:
        step = max(1, CHUNK // source.width)
        for start in range(0, source.rows, step):
            part = slice(start, start + step)
            _keep_keys(out[part], source.block(part), keep[part] if isinstance(keep, Tensor) else keep)
    return out if candidates is None else out.logical_and_(candidates)


def _keep_keys(out: Tensor, keys: Tensor, keep: int | Tensor) -> None:
    """Keep slots of rows whose keys are all at hand, [rows, slots]."""
    (_keep_pairs if keys.shape[1] <= PAIRS else _keep_kth)(out, keys, keep)


def _keep_pairs(out: Tensor, keys: Tensor, keep: int | Tensor) -> None:
    """Rank by comparing every pair of slots: slot i beats a later slot j unless j is strictly higher."""
    slots = keys.unbind(1)
    beaten = [torch.full(keys.shape[:1], len(slots) - 1 - i, dtype=torch.int8) for i in range(len(slots))]
    for i in range(len(slots)):
        for j in range(i + 1, len(slots)):
            first_wins = (slots[i] >= slots[j]).view(torch.int8)
            beaten[j].add_(first_wins)
            beaten[i].sub_(first_wins)
    for i, rank in enumerate(beaten):
        torch.lt(rank, keep, out=out[:, i])


def _keep_kth(out: Tensor, keys: Tensor, keep: int | Tensor) -> None:
    """Threshold each row at its k-th largest key, then cut the ties that exceed it."""
    k = torch.as_tensor(keep, dtype=torch.int64).reshape(-1, 1)
    threshold = _kth_largest(keys, k.clamp(min=1))
    torch.ge(keys, threshold, out=out)
    excess = (out.count_nonzero(1)[:, None] != k)[:, 0].nonzero()[:, 0]
    if excess.numel():
        some, limit = keys[excess], threshold[excess]
        above, ties = some > limit, some == limit
        left = (k if k.numel() == 1 else k[excess]) - above.sum(1, keepdim=True)
        out[excess] = above | (ties & (ties.cumsum(1) <= left))


def _kth_largest(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th largest key of each row [rows, 1]; k is [rows, 1], or [1, 1] for all."""
    rows, width = keys.shape
    ordered = keys.clone(memory_format=torch.contiguous_format)
    array = ordered.numpy()  # which sorts and partitions with whole vectors
    parts = [array[start:stop] for start, stop in pieces(rows, width)]
    if k.numel() == 1 and width > SORTED:
        run_all([partial(part.partition, width - int(k), axis=1) for part in parts])
    else:
        run_all([partial(part.sort, axis=1) for part in parts])
    return ordered[:, width - int(k), None] if k.numel() == 1 else ordered.gather(1, width - k)


def _keep_wide(out: Tensor, source: _Rows, keep: int | Tensor, index: Tensor | None, reduce: Reduce | None) -> None:
    budget = torch.as_tensor(keep, dtype=torch.int64).expand(source.rows)
    if reduce is None:
        for row in range(source.rows):
            own = source.row(row)
            if not _keep_by_sample(out[row], own, int(budget[row])):
                _keep_by_digits(out[row : row + 1], own, budget[row : row + 1], None, None)
    else:
        _keep_by_digits(out, source, budget, index, reduce)


def _keep_by_sample(out: Tensor, source: _Rows, keep: int) -> bool:
    """Keep slots of a single row, if a sample tells where the last kept key lies; whether it did."""
    if not 0 < keep < source.width:
        return False
    least, most = _bracket(source, keep)
    above, slots, waiting = 0, [], []
    room = source.width // sample.ROOM if least < most else 0
    for start in range(0, source.width, CHUNK):
        stop = min(start + CHUNK, source.width)
        keys = source.keys(0, start, stop)
        torch.gt(keys, most, out=out[start:stop])
        above += int(out[start:stop].count_nonzero())
        between = (keys >= least).bitwise_xor_(out[start:stop]).nonzero()[:, 0]
        room -= between.numel()
        if room < 0:
            return False
        slots.append(between + start)
        waiting.append(keys[between])
    undecided = torch.cat(waiting)
    if not above <= keep <= above + undecided.numel():
        return False
    chosen = torch.empty(1, undecided.numel(), dtype=torch.bool)
    if undecided.numel():
        _keep_kth(chosen, undecided[None], keep - above)
    out[torch.cat(slots)] = chosen[0]
    return True


def _bracket(source: _Rows, keep: int) -> tuple[int, int]:
    """Two keys between which the keep-th largest of a single row probably lies."""
    keys = source.at(0, sample.slots(source.width))
    upper, lower = sample.ranks(keys.numel(), keep, source.width)
    ordered = keys.sort(descending=True).values
    limits = torch.iinfo(keys.dtype)
    most, least = int(ordered[max(upper, 1) - 1]), int(ordered[min(lower, keys.numel()) - 1])
    return (least if lower <= keys.numel() else limits.min), (most if upper >= 1 else limits.max)


def _keep_by_digits(out: Tensor, source: _Rows, budget: Tensor, index: Tensor | None, reduce: Reduce | None) -> None:
    threshold, need, ties = radix.select_threshold(source, budget, reduce)
    last = None if reduce is None else _last_index(source, threshold, need, index, reduce)
    for row in range(source.rows):
        limit, whole = int(threshold[row]), bool(need[row] == ties[row])
        compare = torch.ge if whole else torch.gt
        for start in range(0, source.width, CHUNK):
            stop = min(start + CHUNK, source.width)
            compare(source.keys(row, start, stop), limit, out=out[row, start:stop])
        if whole:
            continue

        def tied(start: int, stop: int, row: int = row, limit: int = limit) -> Tensor:
            found = source.keys(row, start, stop) == limit
            if last is None or index is None:
                return found
            return found & (index[row, start:stop] <= last[row])

        radix.mark_first(out[row], tied, int(need[row]) if last is None else source.width)


class _TieIndices:
    """The global indices of tied slots as keys: the lower the index, the higher the key."""

    def __init__(self, source: _Rows, threshold: Tensor, index: Tensor) -> None:
        self.rows, self.width, self.bits = source.rows, source.width, 64
        self._source, self._threshold, self._index = source, threshold, index

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        tied = self._source.keys(row, start, stop) == int(self._threshold[row])
        return torch.where(tied, -self._index[row, start:stop], torch.iinfo(torch.int64).min)


def _last_index(source: _Rows, threshold: Tensor, need: Tensor, index: Tensor | None, reduce: Reduce) -> Tensor:
    """The largest global index that is still kept among each row's ties (-1 where none is)."""
    assert index is not None, "a reduce needs the global index of every slot"
    place, _, _ = radix.select_threshold(_TieIndices(source, threshold, index), need, reduce)
    return torch.where(need > 0, -place, -1)


def block_scores(members: tuple[Blocks, ...], norm: reference.Norm, ndim: int, as_mean: bool | None = None) -> Tensor:
    """As the reference, computed a chunk of blocks at a time; the same bits, since no sum crosses a chunk."""
    first = members[0]
    # a callable need not be elementwise, so it sees the whole window at once
    if len(members) > 1 or first.is_partial or callable(norm) or first.window.numel() <= CHUNK:
        return reference.block_scores(members, norm, ndim, as_mean)
    own = replace(first, order=())
    out: Tensor | None = None
    for place, part in cut_parts(own.window, first.shape, CHUNK):
        scores = reference.block_scores((replace(own, values=part, mask=None),), norm, part.ndim, as_mean)
        out = scores.new_empty(first.grid) if out is None else out
        out[place].copy_(scores)
    assert out is not None
    return reference.to_aligned(out, first.order, ndim)


def scope_mask(scopes: Scopes, keep: int | Tensor, norm: reference.Norm, *, stage: bool = False) -> bool:
    """Score, select and fill in one go where one plain window allows it; False where the three verbs must do it.

    Args:
        scopes: one window with values and mask, nothing partial.
        keep: blocks kept in each scope: an int, or int64 of the shape of the scope grid.
        norm: 1, 2, inf or a callable, which makes the answer False.
        stage: choose only among what the mask still holds.
    """
    only = scopes.members[0]
    if len(scopes.shape) != len(only.shape):
        return False
    regular = not any(g % n for g, n in zip(only.grid, scopes.shape, strict=False))
    if callable(norm) or len(scopes.members) > 1 or only.order or scopes.order or only.is_partial or not regular:
        return False
    if only.values is None or only.mask is None or only.mask.dtype != torch.bool or only.values.numel() == 0:
        return False
    unit = tuple(b * g for b, g in zip(only.shape, scopes.shape, strict=True))
    work = []
    for place, values in cut_parts(only.values, unit, CHUNK):
        mask = only.mask[tuple(slice(p.start * u, p.stop * u) for p, u in zip(place, unit, strict=True))]
        part = replace(only, values=values, mask=mask)
        own = keep[place].reshape(-1) if isinstance(keep, Tensor) else keep
        work.append(partial(_stage_part if stage else _mask_part, scopes.with_members([part]), own, norm))
    run_apart(work)
    return True


def _stage_part(scopes: Scopes, keep: int | Tensor, norm: reference.Norm) -> None:
    """Choose among what the mask of a part still holds, scored by what it left of the values."""
    part, n = scopes.members[0], len(scopes.shape)
    assert part.values is not None and part.mask is not None
    if _single(part) and math.prod(scopes.shape) < WIDE:
        # what is gone ranks below every magnitude, and a stage only removes
        keys = order_keys(part.values, magnitude=True).bitwise_or_(part.mask.view(torch.int8) - 1)
        kept = _keep_whole(to_scopes(keys, scopes, 0), keep)
    else:
        left = replace(part, values=torch.where(part.mask, part.values, 0))
        rows = to_scopes(reference.block_scores((left,), norm, n), scopes, 0.0)
        candidates = to_scopes(reference.candidates_of((part,), n), scopes, False)
        kept = keep_mask(rows, keep, candidates, magnitude=True)
    reference.fill_mask((part,), from_scopes(kept, scopes), stage=True)


def _mask_part(scopes: Scopes, keep: int | Tensor, norm: reference.Norm) -> None:
    part = scopes.members[0]
    assert part.values is not None and part.mask is not None
    grid = part.values if _single(part) else block_scores((part,), norm, part.values.ndim)
    direct = to_scopes(part.mask, scopes, False) if _single(part) else None
    inside = direct is not None and direct.data_ptr() == part.mask.data_ptr()  # the mask's own memory: fill it there
    out = direct if inside else None
    if math.prod(scopes.shape) < WIDE:
        # keys are made where the window lies: turning it over first would miss the cache
        kept = _keep_whole(to_scopes(order_keys(grid, magnitude=True), scopes, 0), keep, out)
    else:
        kept = keep_mask(to_scopes(grid, scopes, 0.0), keep, magnitude=True, out=out)
    if not inside:
        reference.fill_mask((part,), from_scopes(kept, scopes).contiguous())


def _single(part: Blocks) -> bool:
    """Whether blocks are single elements whose own bits rank them."""
    return all(b == 1 for b in part.shape) and part.window.dtype in KEY_DTYPES


def _keep_whole(keys: Tensor, keep: int | Tensor, out: Tensor | None = None) -> Tensor:
    """The mask of rows whose keys are all at hand, in `out` if given."""
    kept = torch.empty(keys.shape, dtype=torch.bool) if out is None else out
    _keep_keys(kept, keys.contiguous(), keep)
    return kept
