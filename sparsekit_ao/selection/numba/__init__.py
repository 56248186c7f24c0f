"""The backend "numba": compiled loops for single elements and small blocks on CPU.

numba is an optional extra, which only a call imports.
"""

from collections.abc import Sequence

from ..parallel import run_updates
from ..work import Update, Work
from . import compiling, launch
from .launch import fill

__all__ = ["fill", "is_preferred", "name", "reasons", "run"]

name = "numba"


def reasons(work: Work) -> list[str]:
    """Why this backend cannot take the work; see `backend.Backend`."""
    if compiling.mode() == "off":
        return [f"{compiling.SWITCH}=off"]
    broken = launch.problem()
    if broken is not None:
        return [broken]
    return launch.update_reasons(work) if isinstance(work, Update) else ["it only updates whole masks"]


def is_preferred(work: Work) -> bool:
    """Whether work that this backend can do is to be done by it; see `compiling.pays`."""
    return work.numel == 0 or (isinstance(work, Update) and compiling.pays(launch.kind_of(work), work.numel))


def run(work: Sequence[Work]) -> None:
    """Fill the masks; small updates at the same time on helper threads."""
    run_updates([one for one in work if isinstance(one, Update)], fill)
