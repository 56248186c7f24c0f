"""Threads of our own for loops that run without the GIL, and for torch operations that are to use one thread each.

Work is cut into more pieces than there are threads and each thread takes the next piece when it is free, so a core
that another program holds slows one piece, not all of them. How the threads get cores to run on is the business of
`cores.py`.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Generic, TypeVar

import torch

from . import cores

__all__ = ["PIECE", "pieces", "run_all", "run_apart"]

PIECE = 1 << 17  # elements of the smallest piece of work
SHARE = 8  # pieces of each thread, where they are large enough
T = TypeVar("T")


def pieces(count: int, weight: int, least: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut 0 .. count, each of `weight` elements, into pieces: several a thread, none but the last below PIECE.

    One thread alone gets larger ones: each costs a call, and a turn of Python's lock. No piece is below `least`.
    """
    threads = torch.get_num_threads()
    least = max(least or 0, PIECE if threads > 1 else PIECE * SHARE)
    step = max(-(-least // weight), -(-count // (SHARE * threads)))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def run_all(work: Sequence[Callable[[], T]]) -> list[T]:
    """Call every piece of work, on as many threads as torch uses, this one among them; their results in order.

    The first error is raised once nothing runs any more: nothing may write into masks after the caller has it.
    """
    others = min(torch.get_num_threads(), len(work)) - 1
    if others < 1:
        return [piece() for piece in work]
    return _Round(work).run(_helpers(others), joining=True)


def run_apart(work: Sequence[Callable[[], None]]) -> None:
    """Call every piece of work, made of torch operations, on threads that each run theirs alone.

    As many threads as torch uses, the caller waiting. Cutting the work instead of each operation keeps torch's OpenMP
    threads out of it, which spin after every operation and hold the cores.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(work) < 2:
        for piece in work:
            piece()
        return
    as_here = torch.is_inference_mode_enabled()
    _Round([partial(_without_grad, as_here, piece) for piece in work]).run(_helpers(min(threads, len(work))))


def _without_grad(inference: bool, piece: Callable[[], None]) -> None:
    with torch.inference_mode(inference), torch.set_grad_enabled(False):
        piece()


class _Round(Generic[T]):
    """Pieces of work that several threads take from, and what became of them."""

    def __init__(self, work: Sequence[Callable[[], T]]) -> None:
        self._count = len(work)
        self._todo = deque(enumerate(work))
        self._found: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._busy, self._change = 0, Condition()

    def run(self, helpers: "Sequence[_Helper]", *, joining: bool = False) -> list[T]:
        """Hand the work to helpers, and do some of it here if `joining`; the results in order."""
        try:
            cores.let_go()
            others, here = cores.around() or (set(), set())
            for at, helper in enumerate(helpers):
                helper.wake(self._help, others if joining or at else here)
            if joining:
                self._take()
            self._wait()
        except BaseException:  # as Ctrl-C while waiting: what has begun still writes
            self._todo.clear()
            self._wait()
            raise
        if self._errors:
            raise self._errors[0]
        return [self._found[at] for at in range(self._count)]

    def _wait(self) -> None:
        with self._change:  # a helper that has not begun has nothing left to do
            self._change.wait_for(lambda: not self._todo and not self._busy)

    def _help(self) -> None:
        with self._change:
            self._busy += 1
        self._take()
        with self._change:
            self._busy -= 1
            self._change.notify()

    def _take(self) -> None:
        try:
            while True:
                try:
                    at, piece = self._todo.popleft()
                except IndexError:
                    return
                self._found[at] = piece()
        except BaseException as e:
            self._todo.clear()
            self._errors.append(e)


class _Helper:
    """A thread that waits for calls and does one after the other; torch operations in it use no further threads."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        begun, threads = Lock(), torch.get_num_threads()
        begun.acquire()
        self._thread = Thread(target=self._live, args=(begun,), name="sparsekit_ao", daemon=True)
        self._thread.start()
        begun.acquire()
        torch.set_num_threads(threads)

    def wake(self, call: Callable[[], None], wanted: set[int]) -> None:
        """Let it do a call, on one of these cores."""
        cores.place(self._thread.native_id, wanted)
        self._calls.put(call)

    def _live(self, begun: Lock) -> None:
        torch.get_num_threads()  # takes the process's number over, once a thread
        torch.set_num_threads(1)  # of this thread, and of threads that begin later
        begun.release()
        while True:
            self._calls.get()()


@lru_cache(maxsize=1)
def _all_helpers(process: int) -> tuple[Lock, list[_Helper]]:
    """Those of one process, since threads do not survive a fork; made when they are first needed."""
    return Lock(), []


def _helpers(count: int) -> list[_Helper]:
    lock, made = _all_helpers(os.getpid())
    with lock:
        while len(made) < count:
            made.append(_Helper())
        return made[:count]
