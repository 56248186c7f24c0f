"""Between which keys the last kept key of a long row probably is, from the ranks of a sample.

Such a bracket is a guess: its user counts the keys above it and in it, and so finds out whether it was right.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

STRETCH = 64  # keys for which one is drawn ...
DRAWN = 1 << 16  # ... but no more than this
DEVIATIONS = 3  # of the sampled rank, to either side: one guess in some four hundred is wrong
ROOM = 8  # one key in so many may be in a useful bracket


def ranks(drawn: int, keep: int, members: int) -> tuple[int, int]:
    """Ranks (1 is the highest) in a sample of `drawn`, between which the keep-th of all `members` probably is.

    The first may be below 1 and the second above `drawn`: the sample sets no limit there.

    >>> ranks(10_000, keep=500_000, members=1_000_000)
    (4849, 5151)
    """
    share = keep / members
    spread = DEVIATIONS * math.sqrt(drawn * share * (1 - share)) + 1
    return math.floor(drawn * share - spread), math.ceil(drawn * share + spread)


@lru_cache(maxsize=16)
def slots(members: int, stretch: int | None = None) -> np.ndarray[Any, Any]:
    """The slots of a sample, int64, ascending: one from each stretch of the row, random but always the same."""
    stretch = min(max(STRETCH, members // DRAWN) if stretch is None else stretch, members)
    starts = torch.arange(0, members - stretch + 1, stretch, device="cpu")
    chosen = torch.randint(stretch, starts.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return (starts + chosen).numpy()
