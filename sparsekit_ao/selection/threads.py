"""Helper threads: they run compiled loops that release Python's lock, and torch operations on one thread each.

Work is cut into more pieces than there are threads, and each thread takes the next piece when it is free, so a core
that another program occupies delays one piece and not all of them. Nothing that belongs to the process is changed:
torch's number of threads is lowered inside the helper threads only.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Generic, TypeVar

import torch

PIECE = 1 << 17  # elements of the smallest piece of work
SHARE = 8  # pieces of each thread, where they are large enough
T = TypeVar("T")


def pieces(count: int, weight: int, least: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut 0 .. count, each of `weight` elements, into ranges: several for each thread, of PIECE elements or more.

    A single thread gets larger ones, since each costs a call. No range but the last is below `least` elements.
    """
    threads = torch.get_num_threads()
    least = max(least or 0, PIECE if threads > 1 else PIECE * SHARE)
    step = max(-(-least // weight), -(-count // (SHARE * threads)))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def run_all(work: Sequence[Callable[[], T]]) -> list[T]:
    """Call every piece of work on as many threads as torch uses, the calling one included; their results in order.

    The first error is raised once no piece runs any more, so that nothing is written after the caller gets it.
    """
    others = min(torch.get_num_threads(), len(work)) - 1
    if others < 1:
        return [piece() for piece in work]
    return _Round(work).run(_helpers(others), joining=True)


def run_apart(work: Sequence[Callable[[], T]]) -> list[T]:
    """As `run_all` for torch operations, on helper threads only, each of which uses one thread; the caller waits.

    Cutting the work instead of each operation avoids torch's OpenMP threads, which spin after every operation and
    occupy the cores.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(work) < 2:
        return [piece() for piece in work]
    inference = torch.is_inference_mode_enabled()
    return _Round([partial(_without_grad, inference, piece) for piece in work]).run(_helpers(min(threads, len(work))))


def _without_grad(inference: bool, piece: Callable[[], T]) -> T:
    with torch.inference_mode(inference), torch.set_grad_enabled(False):
        return piece()


class _Round(Generic[T]):
    """Pieces of work that several threads take from, with their results and errors."""

    def __init__(self, work: Sequence[Callable[[], T]]) -> None:
        self._count = len(work)
        self._todo = deque(enumerate(work))
        self._found: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._busy, self._change = 0, Condition()

    def run(self, helpers: "Sequence[_Helper]", *, joining: bool = False) -> list[T]:
        """Hand the work to helpers, and do some of it on this thread if `joining`; the results in order."""
        try:
            for helper in helpers:
                helper.call(self._help)
            if joining:
                self._take()
            self._wait()
        except BaseException:  # such as Ctrl-C while waiting: pieces that have begun still write
            self._todo.clear()
            while self._is_interrupted():
                pass
            raise
        if self._errors:
            raise self._errors[0]
        return [self._found[at] for at in range(self._count)]

    def _wait(self) -> None:
        with self._change:  # a helper that has not begun will find nothing left to do
            self._change.wait_for(lambda: not self._todo and not self._busy)

    def _is_interrupted(self) -> bool:
        """Wait; whether Ctrl-C came once more."""
        try:
            self._wait()
        except KeyboardInterrupt:
            return True
        return False

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
    """A daemon thread that makes one call after the other; torch operations in it use no further threads."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        ready = Lock()
        ready.acquire()
        Thread(target=self._serve, args=(ready,), name="sparsekit_ao", daemon=True).start()
        ready.acquire()

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread make this call when it is free."""
        self._calls.put(function)

    def _serve(self, ready: Lock) -> None:
        for_new_threads = torch.get_num_threads()  # what torch gives to a thread that begins now
        torch.set_num_threads(1)  # in this thread, but also in every thread that begins later ...
        restorer = Thread(target=torch.set_num_threads, args=(for_new_threads,))  # ... unless it is set again
        restorer.start()
        restorer.join()
        ready.release()
        while True:
            self._calls.get()()


@lru_cache(maxsize=1)
def _all_helpers(process: int) -> tuple[Lock, list[_Helper]]:
    """The helpers of one process, since threads do not survive a fork; started when first needed."""
    return Lock(), []


def _helpers(count: int) -> list[_Helper]:
    lock, made = _all_helpers(os.getpid())
    with lock:
        while len(made) < count:
            made.append(_Helper())
        return made[:count]
