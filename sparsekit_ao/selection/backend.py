"""The one place where an implementation is chosen: the backends, and the order in which a device tries them.

A backend is anything (a module or an object) with a name, `reasons(work)` and `run(work)`. `BACKENDS` has all of them
by name; `ORDER` has, for each type of device, the names that `impl="auto"` tries, the first that gives no reason
against the work being used. An implementation requested by name is used, or an error lists all its reasons.
"""

from collections.abc import Sequence
from typing import Protocol

from ..errors import SparsityError
from . import cpu, gpu, reference
from .work import Work


class Backend(Protocol):
    """One implementation of the selection rule."""

    name: str

    def reasons(self, work: Work) -> list[str]:
        """Why the backend cannot take the work, in plain words for an error; empty if it can."""
        ...

    def run(self, work: Sequence[Work]) -> None:
        """Do all the work, on one device, none of which `reasons` objects to: masks and scores are written in place."""
        ...


_ALL: tuple[Backend, ...] = (reference, cpu, gpu)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}
ORDER: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
OTHER_DEVICES = ("reference",)


def check_impl(impl: str) -> None:
    """Refuse an `impl` that names no backend."""
    if impl != "auto" and impl not in BACKENDS:
        raise SparsityError(f"impl must be one of {('auto', *BACKENDS)}, got {impl!r}")


def find(work: Work, impl: str = "auto") -> Backend | None:
    """The backend for a piece of work; None if `impl="auto"` finds none.

    Raises:
        SparsityError: `impl` names no backend, or one that cannot take the work; with all its reasons.
    """
    check_impl(impl)
    if impl != "auto":
        reasons = BACKENDS[impl].reasons(work)
        if reasons:
            raise SparsityError(f'impl="{impl}" cannot take this: {"; ".join(reasons)}. Use impl="auto".')
        return BACKENDS[impl]
    names = ORDER.get(work.device.type, OTHER_DEVICES)
    return next((BACKENDS[name] for name in names if not BACKENDS[name].reasons(work)), None)


def choose(work: Work, impl: str = "auto") -> Backend:
    """As `find`, for work that the reference takes, so that some backend is always found."""
    backend = find(work, impl)
    assert backend is not None, "the reference takes every mask update and all block scores"
    return backend
