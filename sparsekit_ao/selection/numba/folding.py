"""In which order the rows of a block are read, so that its halving tree needs few of them at hand.

Folding the upper half of 1,024 rows onto the lower one would hold them all. Read in the order of the tree's leaves, a
row joins the one before it as soon as both are there, and eleven are held at most.
"""

import math
from functools import lru_cache
from typing import Any

import torch

from ..strides import Shape, row_major

__all__ = ["folding"]


@lru_cache(maxsize=256)
def folding(block: Shape, run: int) -> tuple[int, Any, Any]:
    """(outer, order, joins) as `Window` has them, of a block whose last `run` elements lie side by side.

    >>> folding((4, 2), 2)
    (1, array([0, 4, 2, 6]), array([0, 0, 1, 0]))
    """
    outer = 0
    while math.prod(block[outer:]) > run:
        outer += 1
    leaves: list[tuple[int, int]] = []
    _walk(block[:outer], row_major(block)[:outer], 0, (0, 0), leaves)
    order, joins = torch.tensor(leaves, dtype=torch.int64, device="cpu").t().contiguous().numpy()
    return outer, order, joins


def _walk(sizes: Shape, steps: Shape, element: int, held: tuple[int, int], leaves: list[tuple[int, int]]) -> None:
    """Append the leaves below one element of the last dimension's tree, which is the root: it is folded last.

    `held`: rows at hand when the first leaf is read, and the row that the last one is joined down to.
    """
    if not sizes:
        leaves.append((element, held[1]))
        return
    widths = [sizes[-1]]
    while widths[-1] > 1:
        widths.append((widths[-1] + 1) // 2)

    def below(at: int, level: int, own: tuple[int, int]) -> None:
        if not level:
            _walk(sizes[:-1], steps[:-1], element + at * steps[-1], own, leaves)
        elif at + widths[level] < widths[level - 1]:
            below(at, level - 1, (own[0], own[0]))
            below(at + widths[level], level - 1, (own[0] + 1, own[1]))
        else:
            below(at, level - 1, own)

    below(0, len(widths) - 1, held)
