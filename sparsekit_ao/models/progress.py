"""Progress of long work: a bar on a terminal."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

LARGE = 1 << 26  # elements from which on a bar is worth its cost
AFTER = 2.0  # seconds of work before it is shown


def progress_bar(
    items: Iterable[Any] | None,
    what: str,
    unit: str,
    *,
    progress: bool = True,
    total: int | None = None,
    elements: int | None = None,
) -> Any:
    """Return the items with a tqdm bar on standard error, if that is a terminal and `progress` is True.

    Args:
        items: Pieces of work; None to call `update()` of the bar after each piece.
        what, unit, total: The bar's title, what it counts, and how many there are.
        elements: Of work that usually is quick, the number of elements. There is no bar for fewer than `LARGE`, none in
            the first seconds, and none remains afterwards.
    """
    is_shown = progress and sys.stderr is not None and sys.stderr.isatty() and (elements is None or elements >= LARGE)
    keys = {} if elements is None else {"delay": AFTER, "leave": False}
    return tqdm(items, desc=what, unit=unit, total=total, disable=not is_shown, **keys)


def phases(what: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the names of phases, each of which is to be taken when it begins; a bar shows it."""
    bar = progress_bar(names, what, "phases", elements=LARGE)
    bar.mininterval = 0  # a phase may be short
    for name in bar:
        if not bar.disable:
            bar.set_postfix_str(name, refresh=bar.format_dict["elapsed"] >= AFTER)
        yield name
