"""Several mask updates on CPU: those of medium size at the same time on helper threads, others one after the other."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from .threads import run_apart
from .work import Update

EACH = 2  # updates for each thread, from which on they are not cut over threads
APART = 1 << 17  # elements of the smallest: with less to do, threads would wait for Python's lock


def run_updates(updates: Sequence[Update], fill: Callable[[Update], None]) -> None:
    """Call `fill` for every update."""
    small = side_by_side(updates)
    run_apart([partial(fill, update) for update in small])
    done = set(small)
    for update in updates:
        if update not in done:
            fill(update)


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
