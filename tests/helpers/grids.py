"""Selections from grids of parameters that are too large to run whole by default.

With SPARSEKIT_AO_EXHAUSTIVE=1 in the environment the whole grids run.
"""

import itertools
import os

import pytest

EXHAUSTIVE = os.environ.get("SPARSEKIT_AO_EXHAUSTIVE") == "1"


def nightly_except(values, *names):
    """The values, or rows of values, as parameters of a test; all but those named run in the nightly half."""
    values = list(values)
    assert all(name in values for name in names), names
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[] if value in names else pytest.mark.nightly for value in values]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]


def nightly_for(values, *names):
    """The values as parameters of a test; those named run in the nightly half."""
    values = list(values)
    assert all(name in values for name in names), names
    return nightly_except(values, *(value for value in values if value not in names))


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
    """Rows of the product of these axes such that each pair of values of two axes appears in one of them.

    Unlike `covering`, which looks at every row, it builds them: from the first pair that no row has, each other axis
    takes the value with the most such pairs.
    """
    axes = [list(axis) for axis in axes]
    if EXHAUSTIVE or len(axes) < 2:
        return list(itertools.product(*axes))
    places = [[(axis, at) for at in range(len(values))] for axis, values in enumerate(axes)]
    left = {pair: None for two in itertools.combinations(places, 2) for pair in itertools.product(*two)}
    rows = []
    while left:
        row = list(next(iter(left)))
        for axis in places:
            if all(axis[0][0] != other for other, _ in row):
                row.append(max(axis, key=lambda place: sum(tuple(sorted((place, at))) in left for at in row)))
        for pair in itertools.combinations(sorted(row), 2):
            left.pop(pair, None)
        rows.append(tuple(axes[axis][at] for axis, at in sorted(row)))
    return rows
