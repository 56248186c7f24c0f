"""A pause of Python's garbage collector, for work that makes very many objects and drops none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside; afterwards as before.

    Preparing some thousand layers sets off full collections again and again, which find nothing and take half of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
