"""Which cores the threads of `threads.py` get: none that stays held for nothing, and not all of them the same.

Knows threads by their kernel numbers, and nothing of their work. Where the system does not know one of these calls it
is left out: threads then run where they are put.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from functools import cache

import torch

__all__ = ["around", "let_go", "place"]

SOFT = 1  # omp_pause_soft
_PROCESS = os.getpid()


def let_go() -> None:
    """Let torch's idle OpenMP threads, of this thread, go of their cores.

    They spin for some ms after every torch operation, and so any other thread gets half a core. The next operation
    wakes them again.
    """
    pause = _pause()
    if pause is not None and os.getpid() == _PROCESS:  # in a forked child they are gone, and it would wait for them
        pause(SOFT)


def around() -> tuple[set[int], set[int]] | None:
    """The cores that this thread may use besides the one it runs on, and that one; None where it cannot be told.

    Where it may use a single core, that is both: other threads do not stay where they were put before.
    """
    ask = _getcpu()
    here = -1 if ask is None else ask()
    return None if here < 0 else (os.sched_getaffinity(0) - {here} or {here}, {here})


def place(thread: int | None, wanted: set[int]) -> None:
    """Let a sleeping thread, by its kernel number, wake on one of the wanted cores, if there are any.

    Where the kernel does not know that cores share a cache (in many virtual machines), it wakes a thread on the core
    of the one that wakes it, which has to wait then, while others idle.
    """
    if thread is not None and wanted:
        with contextlib.suppress(OSError):  # cores may have been taken away since, or the call forbidden
            os.sched_setaffinity(thread, wanted)


@cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP's `omp_pause_resource_all`, from the library that torch itself runs on."""
    try:
        return ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (OSError, AttributeError):
        return None


@cache
def _getcpu() -> Callable[[], int] | None:
    """The C library's `sched_getcpu`, where threads can be placed as well."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None
