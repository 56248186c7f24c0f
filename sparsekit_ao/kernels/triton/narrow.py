"""Long rows made short: a sample brackets the threshold, one full pass gathers the few keys inside the bracket.

The result never depends on luck: where the sample missed, or a span gathered more than it has room for, the radix
passes read the whole row instead.
"""

import triton
import triton.language as tl

from .device import (
    BLOCKS,
    COLUMN,
    MEMBER_FIELDS,
    PART_FIELDS,
    ROW_SAMPLES,
    ROW_SPANS,
    SAMPLE,
    SAMPLES,
    SPAN,
    SPAN_ORIGIN,
    STATE,
    WIDTH,
    budget,
    field,
    multiple,
    part_of,
)
from .wide import (
    ABOVE,
    AT_HIGH,
    AT_LOW,
    BETWEEN,
    GATHERED,
    HIGH,
    LOW,
    OVERFLOW,
    SPAN_FIELDS,
    SPAN_HIGH,
    SPAN_LOW,
    STATE_FIELDS,
    bases,
    place_of,
    tile_keys,
)

__all__ = ["bracket_kernel", "narrow_kernel", "sample_kernel"]


@triton.jit
def sample_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    samples,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NESTS: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    SIGNED: tl.constexpr,
    STAGE: tl.constexpr,
    STORED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """Keys of slots spread over each row of a part, one from each equal stretch; a program takes one row."""
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    member = members + which * MEMBER_FIELDS
    row = program - tl.load(starts + which)
    values, mask = bases(part, member, row, scores, kept, NESTS, UNITS, DTYPE, MASK_DTYPE, STORED, ALIGNED, BIG)
    count = tl.load(part + SAMPLES)
    blocks = tl.load(part + BLOCKS)
    out = samples + (tl.load(part + STATE) + row) * CAPACITY + tl.load(part + SAMPLE)
    for begin in range(0, count, TILE):
        at = begin + tl.arange(0, TILE).to(tl.int64)
        jitter = (at * 2654435761 % 4294967296) % tl.maximum(blocks // count, 1)  # no stride of the weight's own
        slot = at * blocks // count + jitter
        slot = slot if BIG else slot.to(tl.int32)
        keys = tile_keys(part, member, values, mask, slot, at < count, NESTS, UNITS, SIGNED, STAGE, ALIGNED, BIG)
        tl.store(out + at, keys, mask=at < count)


@triton.jit
def bracket_kernel(starts, parts, state, samples, PARTS: tl.constexpr, CAPACITY: tl.constexpr, BITS: tl.constexpr):
    """Two keys between which the threshold almost surely lies, from the row's samples; a program takes one row."""
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    row = program - tl.load(starts + which)
    if tl.load(part + COLUMN) == 0:  # one program a row, whatever the number of its parts
        place = tl.load(part + STATE) + row
        taken = tl.load(part + ROW_SAMPLES)
        at = tl.arange(0, CAPACITY)
        keys = tl.load(samples + place * CAPACITY + at, mask=at < taken, other=0)
        share = budget(part, row, row >= 0, True).to(tl.float32) / tl.load(part + WIDTH).to(tl.float32)
        rank = share * taken.to(tl.float32)
        margin = 4 * tl.sqrt(rank * tl.maximum(1 - share, 0.0)) + 8  # four standard deviations of a sample's rank
        upper, lower = tl.floor(rank - margin).to(tl.int32), tl.ceil(rank + margin).to(tl.int32)
        high = tl.zeros([1], tl.uint32)
        low = tl.zeros([1], tl.uint32)
        bit = tl.full([1], 1 << (BITS - 1), tl.uint32)
        for _ in range(BITS):
            higher = tl.sum((keys >= tl.broadcast_to(high | bit, [CAPACITY])).to(tl.int32)) >= upper
            lowers = tl.sum((keys >= tl.broadcast_to(low | bit, [CAPACITY])).to(tl.int32)) >= lower
            high = tl.where(higher, high | bit, high)
            low = tl.where(lowers, low | bit, low)
            bit = bit >> 1
        line = state + place * STATE_FIELDS + tl.arange(0, 1)
        tl.store(line + HIGH, high.to(tl.int64))
        tl.store(line + LOW, low.to(tl.int64))


@triton.jit
def narrow_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    state,
    spans,
    inside,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    ROOM: tl.constexpr,
    NESTS: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    SIGNED: tl.constexpr,
    STAGE: tl.constexpr,
    STORED: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """One pass over the rows: count above and at the ends of the bracket, gather what lies strictly between."""
    which, part, row, span = place_of(starts, parts, PARTS)
    member = members + which * MEMBER_FIELDS
    values, mask = bases(part, member, row, scores, kept, NESTS, UNITS, DTYPE, MASK_DTYPE, STORED, ALIGNED, BIG)
    line = state + (tl.load(part + STATE) + row) * STATE_FIELDS
    high, low = tl.load(line + HIGH).to(tl.uint32), tl.load(line + LOW).to(tl.uint32)
    own = tl.load(part + SPAN_ORIGIN) + row * tl.load(part + ROW_SPANS) + tl.load(part + SPAN) + span
    room = inside + own * ROOM
    blocks = field(part, BLOCKS, BIG)
    if EVEN:
        blocks = multiple(blocks, 16)
    begin = (span if BIG else span.to(tl.int32)) * SPAN_TILES
    counts = tl.zeros([TILE], tl.int32)  # ten bits each for keys above, at HIGH and at LOW: a span has < 1024 tiles
    gathered = tl.full((), 0, tl.int32)
    for tile in range(begin, tl.minimum(begin + SPAN_TILES, tl.cdiv(blocks, TILE))):
        slot = tile * TILE + tl.arange(0, TILE)
        real = slot < blocks
        keys = tile_keys(part, member, values, mask, slot, real, NESTS, UNITS, SIGNED, STAGE, ALIGNED, BIG)
        counts += (keys > high).to(tl.int32) + tl.where(real & (keys == high), 1 << 10, 0)
        counts += tl.where(real & (keys == low), 1 << 20, 0)
        between = ((keys > low) & (keys < high)).to(tl.int32)
        place = (gathered + tl.cumsum(between, 0) - 1).to(tl.int64)
        # place and key as one number may be shuffled freely, so no data changes threads before the scattered store
        both = tl.reshape(tl.where(between > 0, (place << 32) | keys.to(tl.int64), -1), [TILE], can_reorder=True)
        place = (both >> 32).to(tl.int32)
        tl.store(room + place, both.to(tl.uint32), mask=(both >= 0) & (place < ROOM))
        gathered += tl.sum(between)
    above = tl.sum(counts & 1023)
    at_high = tl.sum((counts >> 10) & 1023)
    at_low = tl.where(low < high, tl.sum(counts >> 20), 0)
    record = spans + own * SPAN_FIELDS
    tl.store(record + GATHERED, tl.minimum(gathered, ROOM))
    tl.store(record + SPAN_HIGH, at_high)
    tl.store(record + SPAN_LOW, at_low)
    tl.atomic_add(line + ABOVE, above.to(tl.int64))
    tl.atomic_add(line + AT_HIGH, at_high.to(tl.int64))
    tl.atomic_add(line + BETWEEN, gathered.to(tl.int64))
    tl.atomic_add(line + AT_LOW, at_low.to(tl.int64))
    if gathered > ROOM:
        tl.atomic_add(line + OVERFLOW, 1)
