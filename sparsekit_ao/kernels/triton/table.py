"""The table that tells a launch which tensors it works on: one row a part, one a member, all int64.

The columns are those of `device`. Knows numbers; uploads nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...layout import Shape
from .device import LOOPS, MEMBER_FIELDS, PART_FIELDS
from .parts import Member, Part, power_of_two

__all__ = ["Place", "starts_of", "table_of"]

NEVER = (1 << 63) - 1  # where a part that does not exist starts


@dataclass(kw_only=True, eq=False)
class Place:
    """A part, and where its scopes stand among those of all updates.

    Attributes:
        part: sizes and strides.
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


def table_of(places: Sequence[Place]) -> tuple[list[int], list[int]]:
    """Part rows and member rows."""
    rows = [n for place in places for n in place.row()]
    return rows, [n for place in places for m in place.part.members for n in _member(m, place.part.nests[2])]


def starts_of(programs: Sequence[int]) -> list[int]:
    """The first program of each part, up to a power of two of them.

    >>> starts_of([2, 3, 1])[:3]
    [0, 2, 5]
    """
    begins = [sum(programs[:k]) for k in range(len(programs))]
    return begins + [NEVER] * (power_of_two(len(programs)) - len(programs))


def _member(m: Member, loops: int) -> list[int]:
    spare = loops - len(m.elements.sizes)
    elements = [(1,) * spare + m.elements.sizes, *((0,) * spare + strides for strides in m.elements.strides)]
    walks = [*m.scope, *m.block, *elements[1:], elements[0]]
    line = [m.values, m.mask, m.elements.count, *(n for walk in walks for n in _padded(walk))]
    assert len(line) == MEMBER_FIELDS.value
    return line


def _padded(walk: Shape) -> Shape:
    return walk + (0,) * (LOOPS.value - len(walk))
