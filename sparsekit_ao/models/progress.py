"""Progress of long work: a bar on a terminal, else lines through `logging`."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

LARGE = 1 << 26  # elements from which on a bar is worth its cost
AFTER = 2.0  # seconds of work before it is shown
logger = logging.getLogger("sparsekit_ao")


class _Bar(tqdm):
    monitor_interval = 0  # no thread that would stay in the process, even without a bar


def progress_bar(
    items: Iterable[Any] | None,  # None to call `update()` of the bar after each piece of work
    what: str,
    unit: str,
    *,
    progress: bool = True,
    total: int | None = None,
    elements: int | None = None,  # of usually quick work: no bar below `LARGE`, nor at first, and none remains
) -> Any:
    """Return the items with a tqdm bar on standard error, if that is a terminal and `progress` is True."""
    is_shown = progress and sys.stderr is not None and sys.stderr.isatty() and (elements is None or elements >= LARGE)
    keys = {} if elements is None else {"delay": AFTER, "leave": False}
    return _Bar(items, desc=what, unit=unit, total=total, disable=not is_shown, miniters=1, **keys)


def phases(what: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the names of phases, each of which is to be taken when it begins; a bar shows it."""
    bar = progress_bar(names, what, "phases", elements=LARGE)
    bar.mininterval = 0  # a phase may be short
    for name in bar:
        if not bar.disable:
            bar.set_postfix_str(name, refresh=bar.format_dict["elapsed"] >= AFTER)
        yield name


@contextmanager
def steps(what: str, unit: str, total: int, progress: bool) -> Iterator[Callable[[str, float], None]]:
    """Show signs of life of work that may take hours: a bar on a terminal, else a line for each step.

    Yield a function to be called after each step, with its name and its error (NaN where it has none).
    """
    start, count = time.perf_counter(), 0
    with progress_bar(None, what, unit, progress=progress, total=total) as bar:

        def done(name: str, error: float) -> None:
            nonlocal count
            count += 1
            bar.update()
            seconds = time.perf_counter() - start
            if not progress or not bar.disable or seconds < AFTER:
                return
            parts = [f"{what}: {unit} {count} of {total}, {name}"]
            parts += [f"error {error:.4f}"] if error == error else []
            parts += [f"{seconds:.0f} s", f"{seconds / count * (total - count):.0f} s left", f"peak {peak_memory()}"]
            say(", ".join(parts))

        yield done


def say(text: str) -> None:
    """Log a message of level INFO; if the program has not configured logging, print it on standard error."""
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
