"""Rows that are read in parts: a sample gives two keys between which the last kept one is, one pass does the rest.

That pass writes the mask of every key above or below and collects the few between; it counts them, so a sample that
misled is noticed, and the digits of the keys are counted instead. One row may consist of several tensors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import radix, sample
from ..keys import absent, key_bits, order_keys
from ..radix import CHUNK
from ..reference import scored
from ..threads import run_apart
from ..tiling import Blocks
from .rows import keep_rows

Array = np.ndarray[Any, Any]


class KeysOf:
    """Keys of score rows, computed on demand (see `radix.KeyRows`); of scores under a mask, 0 where it drops."""

    def __init__(self, scores: Tensor, candidates: Tensor | None, magnitude: bool, under: Tensor | None = None) -> None:
        self.rows, self.width = scores.shape
        self.bits = key_bits(scores.dtype)
        self._scores, self._candidates, self._magnitude, self._under = scores, candidates, magnitude, under

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        """Keys of slots start .. stop of one row, in a new tensor."""
        return self.block(slice(row, row + 1), slice(start, stop))[0]

    def block(self, rows: slice, slots: slice | Tensor = slice(None)) -> Tensor:
        """Keys of some slots of some rows, in a new tensor."""
        keys = order_keys(self._scored(rows, slots), magnitude=self._magnitude)
        if self._candidates is not None:
            keys.masked_fill_(~self._candidates[rows, slots], absent(self._scores.dtype))
        return keys

    @classmethod
    def joined(cls, rows: Sequence["KeysOf"]) -> "KeysOf":
        """Single rows without candidates as one row."""
        if len(rows) == 1:
            return rows[0]
        return cls(torch.cat([row._scored(slice(None), slice(None)) for row in rows], 1), None, rows[0]._magnitude)

    def _scored(self, rows: slice, slots: slice | Tensor) -> Tensor:
        scores, under = (None if t is None else t[rows, slots] for t in (self._scores, self._under))
        return scored(Blocks(shape=(1, 1), values=scores, under=under))


class Part(Protocol):
    """Consecutive slots of one long row: the part decides what a bracket of two keys decides, and records the rest.

    `decide` counts the slots `above` the bracket, which are kept, and stores the `undecided` keys inside it, int
    [slots].
    """

    size: int
    above: int
    undecided: Tensor

    def sample(self, slots: Array) -> Tensor:
        """Keys of some slots, counted from the part's first."""
        ...

    def decide(self, least: int, most: int, capacity: "Capacity") -> None:
        """Write the mask: keys above `most` are kept, keys below `least` are not; record those between."""
        ...

    def place(self, kept: Tensor) -> None:
        """Write the mask of the undecided slots, bool [slots]."""
        ...


class Capacity:
    """How many more keys may be collected; once they are too many it stays full, whatever threads do to the count."""

    def __init__(self, left: int) -> None:
        self.left, self.full = left, False

    def take(self, count: int) -> None:
        """Count keys that were collected."""
        self.left -= count
        if self.left < 0:
            self.full = True


def keep_row(outs: Sequence[Tensor], sources: Sequence[KeysOf], keep: int) -> bool:
    """Keep slots of one row, if a sample tells which; whether it did.

    Args:
        outs: bool [slots of the source], one for each source; may be written even if the result is False.
        sources: a single row each, which together make up the row; ties go by their order.
        keep: slots kept of all sources together.
    """
    parts = [
        _Chunk(out[start : start + CHUNK], source, start)
        for out, source in zip(outs, sources, strict=True)
        for start in range(0, source.width, CHUNK)
    ]
    return keep_parts(parts, keep)


def keep_parts(parts: Sequence[Part], keep: int, choose: Callable[[Tensor, Tensor, int], None] = keep_rows) -> bool:
    """As `keep_row` for parts that together make up the row; `choose` does for one row what `keep_rows` does."""
    width = sum(part.size for part in parts)
    least, most = _bracket(parts, keep, width)
    if 0 < keep < width and least >= most:
        return False
    capacity = Capacity(width // sample.ROOM)
    run_apart([partial(part.decide, least, most, capacity) for part in parts])
    above, undecided = sum(part.above for part in parts), torch.cat([part.undecided for part in parts])
    if capacity.full or not (above <= keep <= above + undecided.numel() or keep == width):
        return False
    if undecided.numel():
        chosen = torch.empty(1, undecided.numel(), dtype=torch.bool, device="cpu")
        choose(chosen, undecided[None], keep - above)
        shares = chosen[0].split([part.undecided.numel() for part in parts])
        run_apart([partial(part.place, kept) for part, kept in zip(parts, shares, strict=True)])
    return True


class _Chunk:
    """A part whose keys are computed by torch; the mask is written to `out`."""

    def __init__(self, out: Tensor, source: KeysOf, start: int) -> None:
        self.size, self.above, self._out, self._source, self._start = out.numel(), 0, out, source, start
        self.undecided = torch.empty(0, dtype=torch.int32, device="cpu")
        self._slots = torch.empty(0, dtype=torch.int64, device="cpu")

    def sample(self, slots: Array) -> Tensor:
        return self._source.block(slice(None), torch.from_numpy(self._start + slots))[0]

    def decide(self, least: int, most: int, capacity: Capacity) -> None:
        if capacity.full:
            return
        keys = self._source.keys(0, self._start, self._start + self.size)
        torch.gt(keys, most, out=self._out)
        self.above = int(self._out.count_nonzero())
        between = (keys >= least).bitwise_xor_(self._out)
        self._slots = torch.from_numpy(np.flatnonzero(between.numpy()))  # a third of torch's time
        self.undecided = keys[self._slots]
        capacity.take(self._slots.numel())

    def place(self, kept: Tensor) -> None:
        self._out[self._slots] = kept


def _bracket(parts: Sequence[Part], keep: int, width: int) -> tuple[int, int]:
    """Two keys between which the keep-th largest of the whole row probably is."""
    ends = np.cumsum([part.size for part in parts])
    slots = sample.slots(width)
    shares = np.split(slots, np.searchsorted(slots, ends[:-1]))
    draw = [partial(part.sample, s - end + part.size) for part, s, end in zip(parts, shares, ends, strict=True)]
    keys = torch.cat(run_apart(draw)).numpy()
    limits = np.iinfo(keys.dtype)
    if keep in (0, width):
        return (int(limits.max),) * 2 if keep == 0 else (int(limits.min) + 1, int(limits.min))
    upper, lower = sample.ranks(keys.size, keep, width)
    at = keys.size - max(upper, 1), keys.size - min(lower, keys.size)
    keys.partition(at)
    most, least = map(int, keys[list(at)])
    return (least if lower <= keys.size else int(limits.min)), (most if upper >= 1 else int(limits.max))


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
