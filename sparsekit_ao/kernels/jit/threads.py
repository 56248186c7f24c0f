"""Threads of our own for loops that run without the GIL.

Work is cut into more pieces than there are threads and each thread takes the next piece when it is free, so a core
that another program holds slows one piece, not all of them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache

import torch

__all__ = ["PIECE", "pieces", "run_all"]

PIECE = 1 << 16  # elements of the smallest piece of work


def pieces(count: int, weight: int) -> Iterator[tuple[int, int]]:
    """Cut 0 .. count, each of `weight` elements, into pieces: several a thread, none but the last below PIECE."""
    step = max(-(-PIECE // weight), -(-count // (8 * torch.get_num_threads())))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def run_all(work: Sequence[Callable[[], None]]) -> None:
    """Call every piece of work, on as many threads as torch uses; the first error is raised when all are done."""
    threads = torch.get_num_threads()
    if threads <= 1 or len(work) <= 1:
        for piece in work:
            piece()
        return
    running = [_pool(os.getpid(), threads).submit(piece) for piece in work]
    try:
        wait(running)
    except BaseException:  # an interrupt: nothing may write into masks after the caller has it
        for future in running:
            future.cancel()
        wait(running)
        raise
    for future in running:
        future.result()


@lru_cache(maxsize=2)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One pool a process, since threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sparsekit_ao")
