"""What the kernels for long rows share: the state of a select, spans, and keys read through strides.

A row's keys are read from the weight itself, so scores of single elements are never stored. Programs work on spans of
consecutive tiles, so that ties by index need one count a span.
"""

import triton
import triton.language as tl

from .device import (
    BLOCK,
    BLOCKS,
    MEMBER_FIELDS,
    ROW_SPANS,
    SCOPE,
    SPAN,
    SPAN_ORIGIN,
    SPANS,
    STATE,
    ends,
    evenly,
    opened,
    reach,
)
from .ranking import order_key

__all__ = [
    "ABOVE",
    "AT_HIGH",
    "AT_LOW",
    "BETWEEN",
    "BINS",
    "DIGIT",
    "GATHERED",
    "HIGH",
    "LOW",
    "NEED",
    "OVERFLOW",
    "PASSES",
    "SPAN_FIELDS",
    "SPAN_HIGH",
    "SPAN_LOW",
    "STATE_FIELDS",
    "THRESHOLD",
    "TIED",
    "room_of",
    "row_ends",
    "row_of",
    "span_of",
    "tile_keys",
]

# Columns of a row's state, int64 and zero at first.
LOW = tl.constexpr(0)  # the bracket: keys from LOW to HIGH
HIGH = tl.constexpr(1)
ABOVE = tl.constexpr(2)  # keys above HIGH
AT_HIGH = tl.constexpr(3)
BETWEEN = tl.constexpr(4)  # keys strictly inside, gathered
AT_LOW = tl.constexpr(5)
OVERFLOW = tl.constexpr(6)  # spans that could not hold what they gathered
PASSES = tl.constexpr(8)  # then prefix and need after each pass
THRESHOLD = tl.constexpr(16)  # the k-th largest key
NEED = tl.constexpr(17)  # how many keys equal to it are kept
STATE_FIELDS = tl.constexpr(18)

# Columns of a span's record, int32; each is written before it is read.
GATHERED = tl.constexpr(0)
SPAN_HIGH = tl.constexpr(1)
SPAN_LOW = tl.constexpr(2)
TIED = tl.constexpr(3)
SPAN_FIELDS = tl.constexpr(4)

DIGIT = tl.constexpr(8)
BINS = tl.constexpr(256)


@triton.jit
def row_of(starts, parts, members, scores, kept, PARTS: tl.constexpr, FORM: tl.constexpr):
    """What a program works on: part, member, its first value and mask element, row, row of the state, span, record."""
    which, part, local = opened(starts, parts, PARTS, True)
    spans = tl.load(part + SPANS)
    row, span = local // spans, local % spans
    member = members + which * MEMBER_FIELDS
    values, mask = row_ends(part, member, row, scores, kept, FORM)
    own = tl.load(part + SPAN_ORIGIN) + row * tl.load(part + ROW_SPANS) + tl.load(part + SPAN) + span
    return part, member, values, mask, row, tl.load(part + STATE) + row, span, own


@triton.jit
def row_ends(part, member, row, scores, kept, FORM: tl.constexpr):
    """Pointers to a row's first value and first mask element; `row` is int64, because rows lie far apart."""
    values, mask = ends(part, member, scores, kept, FORM)
    return values + reach(part, member, row, SCOPE, False, FORM), mask + reach(part, member, row, SCOPE, True, FORM)


@triton.jit
def span_of(part, span, length, FORM: tl.constexpr):
    """First slot of a span of `length` tiles, the slot behind its last one, and the slots of the row."""
    blocks = evenly(part, BLOCKS, FORM)
    begin = (span if FORM.big else span.to(tl.int32)) * (length * FORM.tile)
    return begin, begin + tl.minimum(length * FORM.tile, blocks - begin), blocks


@triton.jit
def tile_keys(part, member, values, mask, slot, real, FORM: tl.constexpr):
    """Keys of these slots of a row; 0 where there is none or an earlier stage dropped it."""
    at = reach(part, member, slot, BLOCK, False, FORM)
    keys = order_key(tl.load(values + at, mask=real, other=0.0), FORM.signed)
    if FORM.among_kept:
        m_at = reach(part, member, slot, BLOCK, True, FORM)
        real = real & (tl.load(mask + m_at, mask=real, other=0) != 0)
    return tl.where(real, keys, 0).to(tl.uint32)


@triton.jit
def room_of(inside, own, length, FORM: tl.constexpr):
    """Where a span's gathered keys begin, and how many there may be: an eighth of its slots."""
    room = length * (FORM.tile // 8)
    return inside + own * room, room
