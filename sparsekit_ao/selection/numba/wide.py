"""One long scope, over one or more tensors: a sample, then one pass over the weights, cut over threads.

The sample says between which two keys the last kept one probably is. The pass writes the mask of all others and records
the keys between, among which the choice is made. Every key is counted, so a sample that misled is noticed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sample import DRAWN, ROOM, STRETCH, ranks
from ..threads import pieces, run_all
from .scopes import bracket, choose, emit_mask, place, sample
from .window import Window

__all__ = ["select_wide"]

LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1  # below and above every key but an absent one
MANY = 1 << 16  # blocks at scattered addresses, from which on threads share them


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Blocks start .. stop of one scope in one window."""

    window: Window
    scope: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Blocks."""
        return self.stop - self.start


def select_wide(windows: Sequence[Window], blocks: Sequence[int], scope: int, budget: int) -> bool:
    """Keep `budget` blocks of one scope, which are those of all windows, in their order.

    Returns:
        Whether the mask is complete; False if the sample misled, or too many keys are equal.
    """
    work = [
        Piece(window=window, scope=scope, start=start, stop=stop)
        for window, count in zip(windows, blocks, strict=True)
        for start, stop in pieces(count, window.size)
    ]
    total, none = sum(blocks), budget == 0
    if none or budget == total:
        limit = HIGHEST if none else LOWEST
        _emit(work, limit, limit, [np.empty(0, np.int32)] * len(work), [np.empty(0, np.int32)] * len(work))
        return True
    least, most = _bracket(work, budget, total)
    if least >= most:
        return False
    slots = [np.empty(p.size // ROOM + 1, np.int32) for p in work]
    waiting = [np.empty(s.size, np.int32) for s in slots]
    counts = _emit(work, least, most, slots, waiting)
    above, found = counts.sum(0)
    if not above <= budget <= above + found or any(n > s.size for n, s in zip(counts[:, 1], slots, strict=True)):
        return False
    slots = [s[:n] for s, n in zip(slots, counts[:, 1], strict=True)]
    keys = np.concatenate([w[:n] for w, n in zip(waiting, counts[:, 1], strict=True)])
    _finish(work, slots, keys, int(budget - above))
    return True


def _bracket(work: Sequence[Piece], budget: int, total: int) -> tuple[int, int]:
    """Two keys between which the budget-th largest one probably is."""
    stretch = max(STRETCH, total // DRAWN)
    keys = [np.empty(max(1, p.size // stretch), np.int32) for p in work]
    drawn = sum(k.size for k in keys)
    draw = [partial(sample, p.window, p.scope, p.start, p.stop, own) for p, own in zip(work, keys, strict=True)]
    _run(draw, drawn)
    upper, lower = ranks(drawn, budget, total)
    most, least = bracket(np.concatenate(keys), max(upper, 1), min(lower, drawn))
    return (least if lower <= drawn else LOWEST), (most if upper >= 1 else HIGHEST)


def _emit(
    work: Sequence[Piece], least: int, most: int, slots: Sequence[NDArray[Any]], waiting: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """`emit_mask` of every piece: kept and undecided blocks, one row for each piece."""
    rows = zip(work, slots, waiting, strict=True)
    found = run_all([partial(emit_mask, p.window, p.scope, p.start, p.stop, least, most, s, w) for p, s, w in rows])
    return np.array(found, np.int64)


def _finish(work: Sequence[Piece], slots: Sequence[NDArray[Any]], keys: NDArray[Any], need: int) -> None:
    """Choose among the undecided keys of all pieces together, and keep their blocks."""
    kept = np.empty(keys.size, np.uint8)
    if keys.size:
        choose(keys, need, LOWEST, kept)
    parts = np.split(kept, np.cumsum([s.size for s in slots])[:-1])
    rows = [(p, p.window, s, k) for p, s, k in zip(work, slots, parts, strict=True)]
    _run([partial(place, w, w.blocks, w.single, p.scope, p.start, s, k) for p, w, s, k in rows], keys.size)


def _run(work: Sequence[Callable[[], None]], blocks: int) -> None:
    """Single blocks at scattered addresses: few of them are not worth waking threads for."""
    if blocks < MANY:
        for piece in work:
            piece()
    else:
        run_all(work)
