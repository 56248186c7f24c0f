"""A progress bar for work on large models that takes seconds, on a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

LARGE = 1 << 26  # elements from which on a bar is worth its cost
AFTER = 2.0  # seconds of work before it is shown
T = TypeVar("T")


def shown(items: Sequence[T], what: str, elements: int) -> Iterable[T]:
    """The items, with a bar on standard error while they are worked on, if that is a terminal and takes long.

    Args:
        items: Pieces of work.
        what: The bar's title.
        elements: Of all items.
    """
    if not _is_shown(elements):
        return items
    return tqdm(items, desc=what, unit="tensors", delay=AFTER, leave=False)


@contextmanager
def counted(what: str, unit: str, elements: int) -> Iterator[Callable[[], object]]:
    """A function to call after each piece of work of an unknown number; a bar counts the calls, as in `shown`."""
    if not _is_shown(elements):
        yield lambda: None
        return
    with tqdm(desc=what, unit=unit, delay=AFTER, leave=False) as bar:
        yield bar.update


def phases(what: str, names: Sequence[str]) -> Iterator[str]:
    """The names of phases, each to be taken when it begins; a bar has the name, and how many of all are over."""
    bar = tqdm(names, desc=what, unit="phases", mininterval=0, delay=AFTER, leave=False, disable=not _is_shown(LARGE))
    for name in bar:
        bar.set_postfix_str(name, refresh=bar.format_dict["elapsed"] >= AFTER)
        yield name


def _is_shown(elements: int) -> bool:
    return elements >= LARGE and sys.stderr is not None and sys.stderr.isatty()
