"""Compiled functions, and where numba keeps their machine code on disk.

numba looks only at the file of a function, not at the files of the functions it calls. So the folder of the cache is
named by a hash of all sources of this package folder: a change to any of them gives a new one.
"""

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

HERE = Path(__file__).parent


@cache
def sources_hash(folder: Path = HERE) -> str:
    """A hash of all Python files of a folder, with their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called, to run without Python's lock; keep the machine code on disk if that can be written."""
    made: Any = numba.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError, AttributeError):  # no folder can be written; or another version of numba
        made._cache = _Cache(function)
    return made


def _keyed(locator: Any) -> Any:
    """One of numba's ways to find a folder, which adds the hash of the sources to its path."""
    path = locator.get_cache_path
    return type("Keyed", (locator,), {"get_cache_path": lambda self: str(Path(path(self)) / sources_hash())})


class _Folders(caching.CompileResultCacheImpl):
    _locator_classes: Any = tuple(map(_keyed, caching.CompileResultCacheImpl._locator_classes))


class _Cache(caching.FunctionCache):
    _impl_class = _Folders

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save, unless the disk is full: that must not stop a training step."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
