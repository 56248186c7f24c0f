"""Compiled functions, and where numba keeps their machine code on disk.

numba looks only at the file of a function, not at the files of the functions it calls. So the folder of the cache is
named by a hash of all sources of this package folder: a change to any of them gives a new one. Files that cannot be
read, or that were changed, count as missing; files that cannot be written are left out.
"""

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import local
from typing import Any

import numba
from numba.core import caching

HERE = Path(__file__).parent
_thread = local()


class NotCompiled(Exception):
    """A function has no machine code for these arguments, in memory or on disk."""


@contextlib.contextmanager
def only_loaded() -> Iterator[None]:
    """Raise `NotCompiled` in this thread instead of compiling."""
    _thread.only_loaded = True
    try:
        yield
    finally:
        _thread.only_loaded = False


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
    made._cache = _NoCache()
    with contextlib.suppress(RuntimeError, AttributeError):  # no folder can be written; or another version of numba
        made._cache = _Cache(function)
    return made


def _keyed(locator: Any) -> Any:
    """One of numba's ways to find a folder, which adds the hash of the sources to its path."""
    path = locator.get_cache_path
    return type("Keyed", (locator,), {"get_cache_path": lambda self: str(Path(path(self)) / sources_hash())})


class _Folders(caching.CompileResultCacheImpl):
    """Machine code with a checksum: running damaged code could end the process."""

    _locator_classes: Any = tuple(map(_keyed, caching.CompileResultCacheImpl._locator_classes))

    def reduce(self, cres: Any) -> Any:
        content = caching.dumps(super().reduce(cres))
        return content, hashlib.sha256(content).digest()

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        content, digest = payload
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("damaged file")
        return super().rebuild(target_context, pickle.loads(content))


class _Asked:
    """Raises `NotCompiled` inside of `only_loaded` where a cache has nothing."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        with contextlib.suppress(Exception):  # damaged, or of another version: compiled again
            found = super().load_overload(sig, target_context)  # type: ignore[misc]
        if found is None and getattr(_thread, "only_loaded", False):
            raise NotCompiled
        return found


class _NoCache(_Asked, caching.NullCache):
    pass


class _Cache(_Asked, caching.FunctionCache):
    _impl_class = _Folders

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save, unless the disk is full: that must not stop a training step."""
        try:
            super().save_overload(sig, data)
        except Exception:
            with contextlib.suppress(Exception):  # a damaged index: begin anew
                self.flush()
                super().save_overload(sig, data)
