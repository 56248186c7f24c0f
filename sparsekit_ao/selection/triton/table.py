"""The table that tells a launch which tensors it works on: one row a part, one a member, all int64.

The columns are those of `device`. Knows numbers; uploads nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from ..strides import Shape
from .device import LOOPS, MEMBER_FIELDS, PART_FIELDS
from .parts import Member, Part, power_of_two

__all__ = ["Place", "first_programs", "table_of"]

NEVER = (1 << 63) - 1  # where a part that does not exist starts


@dataclass(kw_only=True, eq=False)
class Place:
    """A part, and where its scopes stand among those of all updates.

    Attributes:
        part: sizes and strides.
        starts: where values and mask of each member begin.
        update: which update it belongs to.
        width: slots of a row, over all parts of the update.
        column: its first slot in a row.
        offset: the update's first slot among stored scores.
        state: the update's first row in the selection's state.
        spans, span, row_spans, span_origin: its spans a row, the first of them in the row, those of the whole row,
            and the update's first.
        samples, sample, row_samples: likewise for samples.
    """

    part: Part
    starts: tuple[Shape, ...]
    update: int
    width: int
    column: int
    offset: int = 0
    state: int = 0
    spans: int = 0
    span: int = 0
    row_spans: int = 0
    span_origin: int = 0
    samples: int = 0
    sample: int = 0
    row_samples: int = 0
    keep: tuple[int, int] = field(default=(0, 0))

    def row(self) -> list[int]:
        """Its line in the table."""
        own = self.part
        head = [own.rows, own.width, *self.keep, self.state, self.offset, self.width, self.column]
        head += [self.spans, self.span, self.row_spans, self.span_origin, self.samples, self.sample, self.row_samples]
        line = [*head, 0, *_padded(own.scope_sizes), *_padded(own.block_sizes)]
        assert len(line) == PART_FIELDS.value
        return line

    def member_rows(self) -> list[int]:
        """The lines of its members in the table."""
        return [n for start, walks in zip(self.starts, _walks(self.part), strict=True) for n in (*start, *walks)]


def table_of(places: Sequence[Place]) -> tuple[list[int], list[int]]:
    """Part rows and member rows."""
    return [n for place in places for n in place.row()], [n for place in places for n in place.member_rows()]


def first_programs(programs: Sequence[int]) -> list[int]:
    """The first program of each part, up to a power of two of them.

    >>> first_programs([2, 3, 1])[:3]
    [0, 2, 5]
    """
    begins = list(accumulate(programs, initial=0))[:-1]
    return begins + [NEVER] * (power_of_two(len(programs)) - len(programs))


@lru_cache(maxsize=4096)
def _walks(part: Part) -> tuple[Shape, ...]:
    """What stands behind the addresses in each member's line."""
    return tuple(_member(m, part.nests[2]) for m in part.members)


def _member(m: Member, loops: int) -> Shape:
    spare = loops - len(m.elements.sizes)
    elements = [(1,) * spare + m.elements.sizes, *((0,) * spare + strides for strides in m.elements.strides)]
    walks = [*m.scope, *m.block, *elements[1:], elements[0]]
    line = (m.elements.count, *(n for walk in walks for n in _padded(walk)))
    assert len(line) == MEMBER_FIELDS.value - 2
    return line


def _padded(walk: Shape) -> Shape:
    return walk + (0,) * (LOOPS.value - len(walk))
