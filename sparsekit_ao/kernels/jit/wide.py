"""One scope of many blocks, over one or more tensors: a radix select whose passes are cut over threads.

Count the leading digit of every key, take the digit in which the last kept one lies, and go on inside it until the
undecided keys are few. Then one pass writes the mask and records the undecided, and among those the choice is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .loops import choose, count_digits, emit_mask, place
from .threads import pieces, run_all
from .window import Window

__all__ = ["select_wide"]

BITS = 13  # of a digit: exponent and five bits of mantissa (four under a sign), in a histogram that fits into L1
NOTHING: NDArray[Any] = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Blocks start .. stop of one scope in one window, and room for their keys (or none)."""

    window: Window
    scope: int
    start: int
    stop: int
    stored: NDArray[np.int32]


@dataclass(kw_only=True, eq=False)
class Undecided:
    """What is known of the keys: those whose bits above `shift` are `prefix` wait, `need` of them are kept."""

    shift: int
    need: int
    prefix: int = 0
    waiting: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def select_wide(windows: Sequence[Window], blocks: Sequence[int], scope: int, budget: int) -> None:
    """Keep `budget` blocks of one scope; its blocks are those of all windows, in their order."""
    first = windows[0]
    elements, itemsize = first.elements.shape[1], first.bits.itemsize
    base, width = _key_range(first)
    stored = elements > 1 and elements * itemsize >= 8  # keys at half the weight's bytes at most; else read again
    work = []
    for window, count in zip(windows, blocks, strict=True):
        keys = np.empty(count, np.int32) if stored else NOTHING
        work += [Piece(window=window, scope=scope, start=a, stop=b, stored=keys) for a, b in pieces(count, elements)]
    # what waits is recorded in a quarter of the weight's bytes; a stage cannot take back what it removed from a block
    room = 0 if first.stage and elements > 1 else sum(blocks) * elements * itemsize // 48
    state = Undecided(shift=width, need=budget)
    passes = 0
    while state.need and state.shift and (not passes or state.waiting.sum() > room):
        _narrow(state, work, base, again=passes > 0)
        passes += 1
    if not state.need:
        state = Undecided(shift=0, need=0, prefix=(1 << width) - 1, waiting=np.zeros(len(work), np.int64))
    _emit(state, work, base, again=passes > 0)


def _key_range(window: Window) -> tuple[int, int]:
    """The smallest key (an absent block's) and the bits that count up from it."""
    half = window.kind != 0 and window.elements.shape[1] == 1
    if window.signed:
        return (-(1 << 15), 16) if half else (-(1 << 31), 32)
    return (-1, 15) if half else (-1, 31)


def _narrow(state: Undecided, work: Sequence[Piece], base: int, *, again: bool) -> None:
    """Count one more digit of the waiting keys, and keep waiting only those of the digit that decides."""
    low = max(state.shift - BITS, 0)
    counts = np.zeros((len(work), 1 << (state.shift - low)), np.int32)
    run_all(
        [
            partial(
                count_digits,
                p.window, p.scope, p.start, p.stop, base, state.shift, low, state.prefix, again, p.stored, own,
            )
            for p, own in zip(work, counts, strict=True)
        ]
    )  # fmt: skip
    from_top = counts.sum(0, dtype=np.int64)[::-1].cumsum()
    nth = int(np.searchsorted(from_top, state.need))
    digit = counts.shape[1] - 1 - nth
    state.need -= int(from_top[nth - 1]) if nth else 0
    state.prefix = (state.prefix << (state.shift - low)) + digit
    state.waiting = counts[:, digit].astype(np.int64)
    state.shift = low


def _emit(state: Undecided, work: Sequence[Piece], base: int, *, again: bool) -> None:
    """Write the mask; then choose among the keys that still wait."""
    before = state.waiting.cumsum() - state.waiting
    tied = state.shift == 0
    parts = [slice(0) if tied else slice(at, at + n) for at, n in zip(before, state.waiting, strict=True)]
    quotas = np.clip(state.need - before, 0, state.waiting) if tied else state.waiting
    total = 0 if tied else int(state.waiting.sum())
    slots, survivors = np.zeros(total, np.int64), np.full(total, base, np.int32)  # a slot never filled is absent
    run_all(
        [
            partial(
                emit_mask,
                p.window, p.scope, p.start, p.stop, base, state.shift, state.prefix, int(quota),
                again, p.stored, slots[part], survivors[part],
            )
            for p, quota, part in zip(work, quotas, parts, strict=True)
        ]
    )  # fmt: skip
    if tied:
        return
    kept = np.empty(total, np.uint8)
    choose(survivors, state.need, base, kept)
    run_all([partial(place, p.window, p.scope, slots[s], kept[s]) for p, s in zip(work, parts, strict=True)])
