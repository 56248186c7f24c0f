"""A progress bar for work on large models that takes seconds, on a terminal."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

LARGE = 1 << 26  # elements from which on a bar is worth its cost
AFTER = 2.0  # seconds of work before it is shown
T = TypeVar("T")


def shown(items: Sequence[T], what: str, elements: int) -> Iterable[T]:
    """The items, with a bar on standard error while they are worked on, if that is a terminal and takes long.

    Args:
        items: pieces of work.
        what: the bar's title.
        elements: of all items.
    """
    if elements < LARGE or not (sys.stderr is not None and sys.stderr.isatty()):
        return items
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(items, desc=what, unit="tensors", delay=AFTER, leave=False)
