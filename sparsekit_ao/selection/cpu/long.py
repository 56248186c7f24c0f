"""Rows that are read in chunks: a sample gives two keys between which the last kept one is, one pass does the rest.

That pass writes the mask of every key above or below and collects the few between; it counts them, so a sample that
misled is noticed, and the digits of the keys are counted instead. One row may consist of several tensors.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .. import radix, sample
from ..keys import absent, key_bits, order_keys
from ..radix import CHUNK
from ..threads import run_apart
from .rows import keep_rows

__all__ = ["KeysOf", "keep_digits", "keep_row"]


class KeysOf:
    """Keys of score rows, computed on demand (see `radix.KeyRows`)."""

    def __init__(self, scores: Tensor, candidates: Tensor | None, magnitude: bool) -> None:
        self.rows, self.width = scores.shape
        self.bits = key_bits(scores.dtype)
        self._scores, self._candidates, self._magnitude = scores, candidates, magnitude

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        """Keys of slots start .. stop of one row, in a new tensor."""
        return self.block(slice(row, row + 1), slice(start, stop))[0]

    def at(self, row: int, slots: Tensor) -> Tensor:
        """Keys of single slots of one row."""
        candidates = None if self._candidates is None else self._candidates[row, slots][None]
        return KeysOf(self._scores[row, slots][None], candidates, self._magnitude).block(slice(None))[0]

    def row(self, row: int) -> "KeysOf":
        """A single row."""
        candidates = None if self._candidates is None else self._candidates[row, None]
        return KeysOf(self._scores[row, None], candidates, self._magnitude)

    def block(self, rows: slice, slots: slice = slice(None)) -> Tensor:
        """Keys of some slots of some rows, in a new tensor."""
        keys = order_keys(self._scores[rows, slots], magnitude=self._magnitude)
        if self._candidates is not None:
            keys.masked_fill_(~self._candidates[rows, slots], absent(self._scores.dtype))
        return keys


def keep_row(outs: Sequence[Tensor], sources: Sequence[KeysOf], keep: int) -> bool:
    """Keep slots of one row, if a sample tells which; whether it did.

    Args:
        outs: bool [slots of the source], one for each source; may be written even if the result is False.
        sources: a single row each, which together make up the row; ties go by their order.
        keep: slots kept of all sources together.
    """
    width = sum(source.width for source in sources)
    if keep in (0, width):
        for out in outs:
            out.fill_(keep > 0)
        return True
    bracket = _bracket(sources, keep)
    parts = [
        _Part(out[start : start + CHUNK], source, start)
        for out, source in zip(outs, sources, strict=True)
        for start in range(0, source.width, CHUNK)
    ]
    capacity = _Capacity(width // sample.ROOM if bracket[0] < bracket[1] else 0)
    run_apart([partial(part.decide, *bracket, capacity) for part in parts])
    above, undecided = sum(part.above for part in parts), torch.cat([part.undecided for part in parts])
    if capacity.full or not above <= keep <= above + undecided.numel():
        return False
    if undecided.numel():
        chosen = torch.empty(1, undecided.numel(), dtype=torch.bool, device="cpu")
        keep_rows(chosen, undecided[None], keep - above)
        for part, kept in zip(parts, chosen[0].split([part.slots.numel() for part in parts]), strict=True):
            part.out[part.slots] = kept
    return True


class _Capacity:
    """How many more keys may be collected; once they are too many it stays full, whatever threads do to the count."""

    def __init__(self, left: int) -> None:
        self.left, self.full = left, False

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            self.full = True


class _Part:
    """A chunk of a row: what the bracket decides is written to `out`, the rest is collected."""

    def __init__(self, out: Tensor, source: KeysOf, start: int) -> None:
        self.out, self._source, self._start = out, source, start
        self.above, self.slots = 0, torch.empty(0, dtype=torch.int64, device="cpu")
        self.undecided = torch.empty(0, dtype=torch.int32, device="cpu")

    def decide(self, least: int, most: int, capacity: _Capacity) -> None:
        if capacity.full:
            return
        keys = self._source.keys(0, self._start, self._start + self.out.numel())
        torch.gt(keys, most, out=self.out)
        self.above = int(self.out.count_nonzero())
        between = (keys >= least).bitwise_xor_(self.out)
        self.slots = torch.from_numpy(np.flatnonzero(between.numpy()))  # a third of torch's time
        self.undecided = keys[self.slots]
        capacity.take(self.slots.numel())


def _bracket(sources: Sequence[KeysOf], keep: int) -> tuple[int, int]:
    """Two keys between which the keep-th largest of the sources' one row probably is."""
    ends = torch.tensor([source.width for source in sources], device="cpu").cumsum(0)
    slots = sample.slots(int(ends[-1]))
    shares = slots.tensor_split(torch.searchsorted(slots, ends[:-1]))
    drawn = [source.at(0, s - end + source.width) for source, s, end in zip(sources, shares, ends, strict=True)]
    keys = torch.cat(drawn)
    upper, lower = sample.ranks(keys.numel(), keep, int(ends[-1]))
    ordered = keys.sort(descending=True).values
    limits = torch.iinfo(keys.dtype)
    most, least = int(ordered[max(upper, 1) - 1]), int(ordered[min(lower, keys.numel()) - 1])
    return (least if lower <= keys.numel() else limits.min), (most if upper >= 1 else limits.max)


def keep_digits(out: Tensor, source: KeysOf, budget: Tensor) -> None:
    """Keep `budget` slots of each row (int64 [rows]) by counting digits of their keys."""
    threshold, need, ties = radix.select_threshold(source, budget)
    for row in range(source.rows):
        limit, whole = int(threshold[row]), bool(need[row] == ties[row])
        compare = torch.ge if whole else torch.gt
        for start in range(0, source.width, CHUNK):
            stop = min(start + CHUNK, source.width)
            compare(source.keys(row, start, stop), limit, out=out[row, start:stop])

        def tied(start: int, stop: int, row: int = row, limit: int = limit) -> Tensor:
            return source.keys(row, start, stop) == limit

        if not whole:
            radix.mark_first(out[row], tied, int(need[row]))
