"""The backend "cpu": torch and numpy, a cache-sized part of a weight at a time."""

from collections.abc import Sequence

from ..parallel import run_updates
from ..work import Scores, Threshold, Update, Work
from .masks import block_scores, fill

__all__ = ["fill", "name", "reasons", "run"]

name = "cpu"


def reasons(work: Work) -> list[str]:
    """Why this backend cannot take the work; see `backend.Backend`."""
    found = [] if work.device.type == "cpu" else [f"it works on CPU tensors, got {work.device}"]
    return found + ["it does not threshold in place"] * isinstance(work, Threshold)


def run(work: Sequence[Work]) -> None:
    """Write scores and masks; small updates at the same time on helper threads."""
    for one in work:
        if isinstance(one, Scores):
            block_scores(one.members, one.norm, one.out.ndim, one.as_mean, out=one.out)
    run_updates([one for one in work if isinstance(one, Update)], fill)
