"""Public calls, and the progress of long ones: a bar on a terminal or in a notebook, else lines through `logging`."""

import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import did_you_mean
from ..tables import call_text

LARGE = 1 << 26  # elements from which on a bar is worth its cost
AFTER = 2.0  # seconds of work before it is shown
LINES = 10  # at most so many lines are logged of steps that are no blocks
P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger("sparsekit_ao")
_is_hidden = ContextVar("_is_hidden", default=False)
_text_of_call = ContextVar[Callable[[], str]]("_text_of_call")  # of the public call that runs now


@functools.cache
def bar_class() -> Any:
    """Return the class of bars: one for notebooks in a notebook that has ipywidgets."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # here, since it imports asyncio

    class Bar(tqdm):
        monitor_interval = 0  # no thread that would stay in the process, even without a bar

    return Bar


def public_call(function: Callable[P, R]) -> Callable[P, R]:
    """Say what an unknown argument may have meant, hide progress with `progress=False`, and note the call as text."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in signature.parameters:
                meant = "sparsity_level" if name == "pattern" and "sparsity_level" in signature.parameters else name
                hint = did_you_mean(meant, signature.parameters)
                raise TypeError(f"{function.__name__}() has no argument {name!r}.{hint}")
        token = _text_of_call.set(lambda: call_text(function, signature.bind(*args, **kwargs).arguments))
        try:
            with hidden(not kwargs.get("progress", True)):
                return function(*args, **kwargs)
        finally:
            _text_of_call.reset(token)

    return call


def text_of_call() -> str:
    """Return the public call that runs now as text, for its report."""
    return _text_of_call.get()()


@contextmanager
def hidden(is_hidden: bool = True) -> Iterator[None]:
    """Show no progress inside if `is_hidden`, or if it was hidden before."""
    token = _is_hidden.set(_is_hidden.get() or is_hidden)
    try:
        yield
    finally:
        _is_hidden.reset(token)


def progress_bar(
    items: Iterable[Any] | None,  # None to call `update()` of the bar after each piece of work
    what: str,
    unit: str,
    *,
    is_shown: bool = True,
    total: int | None = None,
    elements: int | None = None,  # of usually quick work: no bar below `LARGE`, nor at first, and none remains
) -> Any:
    """Return the items with a tqdm bar, on a terminal (standard error) or in a notebook, unless progress is hidden."""
    bar = bar_class()
    is_notebook = any(base.__module__ == "tqdm.notebook" for base in bar.__mro__)
    is_seen = is_notebook or (sys.stderr is not None and sys.stderr.isatty())
    is_shown &= not _is_hidden.get() and is_seen and (elements is None or elements >= LARGE)
    keys = {} if elements is None else {"delay": AFTER, "leave": False}
    return bar(items, desc=what, unit=unit, total=total, disable=not is_shown, miniters=1, **keys)


def phases(what: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the names of phases, each of which is to be taken when it begins; a bar or lines show them."""
    bar, start = progress_bar(names, what, "phases", elements=LARGE), time.perf_counter()
    bar.mininterval = 0  # a phase may be short
    for name in bar:
        if not bar.disable:
            bar.set_postfix_str(name, refresh=bar.format_dict["elapsed"] >= AFTER)
        yield name
        if bar.disable and (seconds := time.perf_counter() - start) >= AFTER:
            say(f"{what}: {name} finished, {seconds:.0f} s, peak {peak_memory()}")


@contextmanager
def signs_of_life(what: str, unit: str, total: int, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Show signs of life of work that may take hours: a bar, else a line for each block, or each tenth of the steps.

    Yield a function to be called after each step, with its name and its error (NaN where it has none).
    """
    start, count = time.perf_counter(), 0
    with progress_bar(None, what, unit, is_shown=is_shown, total=total) as bar:

        def done(name: str, error: float) -> None:
            nonlocal count
            count += 1
            bar.update()
            seconds = time.perf_counter() - start
            is_due = unit == "block" or count * LINES // total > (count - 1) * LINES // total
            if not (is_shown and bar.disable and is_due) or seconds < AFTER:
                return
            parts = [f"{what}: {unit} {count} of {total}, {name}"]
            parts += [f"error {error:.4f}"] if error == error else []
            parts += [f"{seconds:.0f} s", f"{seconds / count * (total - count):.0f} s left", f"peak {peak_memory()}"]
            say(", ".join(parts))

        yield done


def say(text: str) -> None:
    """Log a message of level INFO; if the program has not configured logging, print it on standard error."""
    if _is_hidden.get():
        return
    if logger.isEnabledFor(logging.INFO):
        logger.info(text)
    elif not logger.hasHandlers() and logger.level == logging.NOTSET:
        print(text, file=sys.stderr, flush=True)


def peak_memory() -> str:
    """The largest amount of memory that the process has held so far, and that of its GPU if it uses one."""
    try:
        import resource
    except ImportError:  # on Windows
        return "unknown"
    unit = 1 if sys.platform == "darwin" else 1024
    text = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.1f} GiB"
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return f"{text}, {on_gpu / 2**30:.1f} GiB on the GPU" if on_gpu else text
