"""Several mask updates on CPU: those of medium size at the same time on helper threads, others one after the other.

The loops that fill masks write bool, and never the mask that they score values under; other masks are copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from .threads import run_apart
from .tiling import Blocks
from .work import Update

EACH = 2  # updates for each thread, from which on they are not cut over threads
APART = 1 << 17  # elements of the smallest: with less to do, threads would wait for Python's lock


def run_updates(updates: Sequence[Update], fill: Callable[[Update], None]) -> None:
    """Call `fill` for every update."""
    small = side_by_side(updates)
    run_apart([partial(_fill_buffered, update, fill) for update in small])
    done = set(small)
    for update in updates:
        if update not in done:
            _fill_buffered(update, fill)


def _fill_buffered(update: Update, fill: Callable[[Update], None]) -> None:
    """Fill masks, by way of a bool buffer where they are of another dtype or values are scored under them."""
    if not update.masked and all(m.mask is not None and m.mask.dtype == torch.bool for m in update.members):
        fill(update)
        return
    scopes = tuple(s.with_members([_buffered(m, update) for m in s.members]) for s in update.scopes)
    own = replace(update, scopes=scopes)
    fill(own)
    for m, new in zip(update.members, own.members, strict=True):
        assert m.mask is not None and new.mask is not None
        m.mask.copy_(new.mask.view(torch.uint8))  # which converts three times as fast as bool


def _buffered(m: Blocks, update: Update) -> Blocks:
    """The member with a bool buffer of its mask's strides, whose old values the scores use."""
    assert m.mask is not None
    buffer = torch.empty_strided(m.mask.shape, m.mask.stride(), dtype=torch.bool, device="cpu")
    if update.among_kept:
        buffer.copy_(m.mask)
    return replace(m, mask=buffer, under=m.mask if update.masked else None)


def side_by_side(updates: Sequence[Update]) -> list[Update]:
    """Those that are faster done whole, one for each thread, than one after the other, each cut over all threads.

    Largest first, so that threads end at about the same time.
    """
    sizes = {u: n for u in updates if (n := sum(m.window.numel() for m in u.members)) >= APART}
    small = sorted(sizes, key=lambda u: -sizes[u])
    left, threads = sum(sizes.values()), torch.get_num_threads()
    while small and sizes[small[0]] * threads * EACH > left:
        left -= sizes[small.pop(0)]
    return small
