"""Selections from grids of parameters that are too large to run whole by default.

With SPARSEKIT_AO_EXHAUSTIVE=1 in the environment the whole grids run.
"""

import itertools
import os

EXHAUSTIVE = os.environ.get("SPARSEKIT_AO_EXHAUSTIVE") == "1"


def covering(rows):
    """Rows of a grid such that each pair of values of two parameters that the grid has appears in one of them.

    Greedy, so always the same rows: the next is the first of those with the most pairs that no row before it has.
    """
    rows = list(rows)
    if EXHAUSTIVE:
        return rows
    bits = {}
    found = [list(itertools.combinations(enumerate(row), 2)) for row in rows]
    masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs) for pairs in found]
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        best = max(range(len(rows)), key=lambda k: (masks[k] & left).bit_count())
        chosen.append(best)
        left &= ~masks[best]
    return [rows[k] for k in sorted(chosen)]


def turns(values, rows, each=1):
    """Each of the values with the next `each` of the rows, which take turns."""
    rows = list(rows)
    left = itertools.cycle(rows)
    return [(value, *row) for value in values for row in (rows if EXHAUSTIVE else itertools.islice(left, each))]


def grid(*axes):
    """`covering` of the product of these axes."""
    return covering(itertools.product(*axes))
