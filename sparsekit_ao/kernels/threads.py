"""Threads of our own for loops that run without the GIL.

Work is cut into more pieces than there are threads and each thread takes the next piece when it is free, so a core
that another program holds slows one piece, not all of them.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from threading import Barrier
from typing import TypeVar

import torch

__all__ = ["PIECE", "pieces", "run_all", "run_apart"]

PIECE = 1 << 17  # elements of the smallest piece of work
T = TypeVar("T")


def pieces(count: int, weight: int) -> Iterator[tuple[int, int]]:
    """Cut 0 .. count, each of `weight` elements, into pieces: several a thread, none but the last below PIECE."""
    step = max(-(-PIECE // weight), -(-count // (8 * torch.get_num_threads())))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def run_all(work: Sequence[Callable[[], T]]) -> list[T]:
    """Call every piece of work, on as many threads as torch uses, this one among them; their results in order.

    The first error is raised once nothing runs any more: nothing may write into masks after the caller has it.
    """
    todo, found = deque(enumerate(work)), {}

    def take() -> None:
        try:
            for at, piece in _taken(todo):
                found[at] = piece()
        except BaseException:
            todo.clear()
            raise

    others = min(torch.get_num_threads(), len(work)) - 1
    helpers = [_pool(os.getpid(), others).submit(take) for _ in range(others)]
    try:
        take()
    finally:
        wait([helper for helper in helpers if not helper.cancel()])  # one that has not begun has nothing left to do
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return [found[at] for at in range(len(work))]


def _taken(todo: deque[T]) -> Iterator[T]:
    """What is left, one at a time; other threads take from the same."""
    while True:
        try:
            yield todo.popleft()
        except IndexError:
            return


@lru_cache(maxsize=2)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One pool a process, since threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sparsekit_ao")


def run_apart(work: Sequence[Callable[[], None]]) -> None:
    """Call every piece of work, made of torch operations, on threads that each run theirs alone.

    As many threads as torch uses, the caller waiting. Cutting the work instead of each operation keeps torch's OpenMP
    threads out of it, which spin after every operation and hold the cores.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(work) == 1:
        for piece in work:
            piece()
        return
    todo, inference = deque(work), torch.is_inference_mode_enabled()

    def take() -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(False):
                for piece in _taken(todo):
                    piece()
        except BaseException:
            todo.clear()
            raise

    helpers = [_alone(os.getpid(), threads).submit(take) for _ in range(min(threads, len(work)))]
    wait(helpers)
    for helper in helpers:
        helper.result()


@lru_cache(maxsize=2)
def _alone(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads whose torch operations use no further threads."""
    ready = Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # takes the process's number over, once a thread
        torch.set_num_threads(1)  # of this thread, and of threads that begin later
        ready.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="sparsekit_ao")
    for _ in range(threads):
        pool.submit(begin)
    ready.wait()
    torch.set_num_threads(threads)
    return pool
