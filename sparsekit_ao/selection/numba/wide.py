"""One scope of many blocks, over one or more tensors: selection in passes that are cut over threads.

A sample says between which two keys the last kept one lies. One pass then writes the mask of all others and records
those between, among which the choice is made. Where the sample was wrong, or many keys are equal, a radix select
follows: count the leading digit of every key, take the digit in which the last kept one lies, and go on inside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sample import DRAWN, ROOM, STRETCH, ranks
from ..threads import pieces, run_all
from .loops import bracket, choose, count_digits, emit_mask, place, sample
from .window import Window

__all__ = ["select_wide"]

BITS = 13  # of a digit: exponent and five bits of mantissa (four under a sign), in a histogram that fits into L1
TOP = 0x7FFFFFFE  # no key reaches it
MANY = 1 << 16  # blocks at scattered addresses, which threads share out
SIDE = 256  # elements side by side in each row of large blocks that a piece has at least
SAMPLED = 32  # elements of the largest block of which a sample is worth drawing
NOTHING: NDArray[Any] = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Blocks start .. stop of one scope in one window, and room for the keys of them all (or none)."""

    window: Window
    scope: int
    start: int
    stop: int
    stored: NDArray[np.int32]


def select_wide(windows: Sequence[Window], blocks: Sequence[int], scope: int, budget: int) -> None:
    """Keep `budget` blocks of one scope; its blocks are those of all windows, in their order."""
    # a stage cannot take back what it removed, should the sample have been wrong; few large blocks store their keys
    sampled = not windows[0].among_kept and windows[0].size <= SAMPLED and 0 < budget < sum(blocks)
    if not sampled or not _by_sample(_cut(windows, blocks, scope), budget):
        _by_digits(windows, blocks, scope, budget)


def _cut(windows: Sequence[Window], blocks: Sequence[int], scope: int, *, stored: bool = False) -> list[Piece]:
    work = []
    for window, count in zip(windows, blocks, strict=True):
        keys = np.empty(count, np.int32) if stored else NOTHING
        elements, own = window.size, window.blocks
        most = max(1, SIDE // own.run) if own and elements > SAMPLED else 1  # blocks that a piece is a multiple of
        parts = [(a * most, min(b * most, count)) for a, b in pieces(-(-count // most), elements * most)]
        work += [Piece(window=window, scope=scope, start=a, stop=b, stored=keys) for a, b in parts]
    return work


def _by_sample(work: Sequence[Piece], budget: int) -> bool:
    """Whether the sample was right, and so the mask is written."""
    sizes = [p.stop - p.start for p in work]
    least, most = _bracket(work, sizes, budget)
    if least >= most:
        return False
    slots = [np.empty(size // ROOM + 1, np.int32) for size in sizes]
    waiting = [np.empty(size // ROOM + 1, np.int32) for size in sizes]
    counts = _emit(work, least, most, [0] * len(work), slots, waiting, tied=False, again=False)
    above, found = counts.sum(0)
    if not above <= budget <= above + found or any(n > s.size for n, s in zip(counts[:, 1], slots, strict=True)):
        return False
    slots = [s[:n] for s, n in zip(slots, counts[:, 1], strict=True)]
    waiting = [w[:n] for w, n in zip(waiting, counts[:, 1], strict=True)]
    _finish(work, slots, np.concatenate(waiting), int(budget - above), _key_range(work[0].window)[0])
    return True


def _bracket(work: Sequence[Piece], sizes: Sequence[int], budget: int) -> tuple[int, int]:
    """Two keys between which the budget-th largest one probably lies."""
    stretch = max(STRETCH, sum(sizes) // DRAWN)
    keys = [np.empty(max(1, size // stretch), np.int32) for size in sizes]
    _run(
        [partial(sample, p.window, p.scope, p.start, p.stop, own) for p, own in zip(work, keys, strict=True)],
        sum(k.size for k in keys),
    )
    drawn = sum(k.size for k in keys)
    upper, lower = ranks(drawn, budget, sum(sizes))
    most, least = bracket(np.concatenate(keys), max(upper, 1), min(lower, drawn))
    base, _ = _key_range(work[0].window)
    return (least if lower <= drawn else base), (most if upper >= 1 else TOP)


def _by_digits(windows: Sequence[Window], blocks: Sequence[int], scope: int, budget: int) -> None:
    first = windows[0]
    elements, itemsize = first.size, first.bits.itemsize
    # keys at half the weight's bytes at most; else read again
    work = _cut(windows, blocks, scope, stored=elements > 1 and elements * itemsize >= 8)
    # what waits is recorded in a quarter of the weight's bytes; a stage cannot take back what it removed from a block
    room = 0 if first.among_kept and elements > 1 else sum(blocks) * elements * itemsize // 32
    base, shift = _key_range(first)
    need, prefix, passes = budget, 0, 0
    waits = np.full(len(work), sum(blocks))
    while need and shift and (not passes or waits.sum() > room):
        low = max(shift - BITS, 0)
        counts = _count(work, base, shift, low, prefix, again=passes > 0)
        from_top = counts.sum(0, dtype=np.int64)[::-1].cumsum()
        nth = int(np.searchsorted(from_top, need))
        digit = counts.shape[1] - 1 - nth
        need -= int(from_top[nth - 1]) if nth else 0
        prefix = (prefix << (shift - low)) + digit
        waits = counts[:, digit].astype(np.int64)
        shift, passes = low, passes + 1
    if not need:
        shift, prefix, waits = 0, TOP - base, np.zeros_like(waits)
    least, most = base + (prefix << shift), base + ((prefix + 1) << shift) - 1
    tied = shift == 0
    slots = [np.zeros(0 if tied else n, np.int32) for n in waits]
    waiting = [np.full(len(s), base, np.int32) for s in slots]  # a slot never filled, should a weight change, is absent
    quotas = np.clip(need - (waits.cumsum() - waits), 0, waits)
    _emit(work, least, most, quotas.tolist(), slots, waiting, tied=tied, again=passes > 0)
    if not tied:
        _finish(work, slots, np.concatenate(waiting), need, base)


def _key_range(window: Window) -> tuple[int, int]:
    """The smallest key (an absent block's) and the bits that count up from it."""
    half = window.kind != 0 and window.size == 1
    if window.signed:
        return (-(1 << 15), 16) if half else (-(1 << 31), 32)
    return (-1, 15) if half else (-1, 31)


def _count(work: Sequence[Piece], base: int, shift: int, low: int, prefix: int, *, again: bool) -> NDArray[np.int32]:
    """How many keys that begin with `prefix` have each digit (bits low .. shift - 1), one row a piece."""
    counts = np.zeros((len(work), 1 << (shift - low)), np.int32)
    run_all(
        [
            partial(count_digits, p.window, p.scope, p.start, p.stop, base, shift, low, prefix, again, p.stored, own)
            for p, own in zip(work, counts, strict=True)
        ]
    )
    return counts


def _emit(
    work: Sequence[Piece],
    least: int,
    most: int,
    quotas: Sequence[int],
    slots: Sequence[NDArray[np.int32]],
    waiting: Sequence[NDArray[np.int32]],
    *,
    tied: bool,
    again: bool,
) -> NDArray[np.int64]:
    """`emit_mask` of every piece: kept and undecided blocks, one row a piece."""
    rows = zip(work, quotas, slots, waiting, strict=True)
    found = run_all(
        [
            partial(emit_mask, p.window, p.scope, p.start, p.stop, least, most, tied, quota, again, p.stored, s, w)
            for p, quota, s, w in rows
        ]
    )
    return np.array(found, np.int64)


def _finish(
    work: Sequence[Piece], slots: Sequence[NDArray[np.int32]], keys: NDArray[np.int32], need: int, absent: int
) -> None:
    """Choose among the undecided of all pieces together, and keep those."""
    kept = np.empty(keys.size, np.uint8)
    choose(keys, need, absent, kept)
    parts = np.split(kept, np.cumsum([s.size for s in slots])[:-1])
    _run(
        [partial(place, p.window, p.scope, p.start, s, k) for p, s, k in zip(work, slots, parts, strict=True)],
        keys.size,
    )


def _run(work: Sequence[Callable[[], None]], blocks: int) -> None:
    """Single blocks here and there: few of them are not worth waking threads for."""
    if blocks < MANY:
        for piece in work:
            piece()
    else:
        run_all(work)
