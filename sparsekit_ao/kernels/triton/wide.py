"""What the kernels for long rows share: the state of a select, spans, and keys read through strides.

A row's keys are read from the weight itself, so scores of single elements are never stored. Programs work on spans of
consecutive tiles, so that ties by index need one count a span.
"""

import triton
import triton.language as tl

from .device import (
    BLOCK_MASK,
    BLOCK_SIZES,
    BLOCK_VALUES,
    MASK,
    PART_FIELDS,
    SCOPE_MASK,
    SCOPE_SIZES,
    SCOPE_VALUES,
    SPANS,
    VALUES,
    order_key,
    part_of,
    pointer,
    stored,
    walk,
)

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
    "bases",
    "place_of",
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

# Columns of a span's record, int32 and zero at first.
GATHERED = tl.constexpr(0)
SPAN_HIGH = tl.constexpr(1)
SPAN_LOW = tl.constexpr(2)
TIED = tl.constexpr(3)
SPAN_FIELDS = tl.constexpr(4)

DIGIT = tl.constexpr(8)
BINS = tl.constexpr(256)


@triton.jit
def place_of(starts, parts, PARTS: tl.constexpr):
    """What a program works on: part, its row in memory, the row of the part, the span in the part."""
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    local = program - tl.load(starts + which)
    spans = tl.load(part + SPANS)
    return which, part, local // spans, local % spans


@triton.jit
def bases(
    part,
    member,
    row,
    scores,
    kept,
    NESTS: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    STORED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """Pointers to a row's first value and first mask element."""
    if STORED:
        values, mask = stored(part, scores, kept, ALIGNED)
    else:
        values, mask = pointer(member, VALUES, DTYPE, ALIGNED), pointer(member, MASK, MASK_DTYPE, ALIGNED)
    # rows are few and far apart: always counted in int64
    values += walk(row, part + SCOPE_SIZES, member + SCOPE_VALUES, NESTS[0], 0, UNITS[0], ALIGNED, True)
    mask += walk(row, part + SCOPE_SIZES, member + SCOPE_MASK, NESTS[0], 0, UNITS[1], ALIGNED, True)
    return values, mask


@triton.jit
def tile_keys(
    part,
    member,
    values,
    mask,
    slot,
    real,
    NESTS: tl.constexpr,
    UNITS: tl.constexpr,
    SIGNED: tl.constexpr,
    STAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """Keys of these slots of a row; 0 where there is none or an earlier stage dropped it."""
    at = walk(slot, part + BLOCK_SIZES, member + BLOCK_VALUES, NESTS[1], 0, UNITS[2], ALIGNED, BIG)
    keys = order_key(tl.load(values + at, mask=real, other=0.0), SIGNED)
    if STAGE:
        m_at = walk(slot, part + BLOCK_SIZES, member + BLOCK_MASK, NESTS[1], 0, UNITS[3], ALIGNED, BIG)
        real = real & (tl.load(mask + m_at, mask=real, other=0) != 0)
    return tl.where(real, keys, 0).to(tl.uint32)
