"""Long rows made short: a sample brackets the threshold, one full pass gathers the few keys inside the bracket.

The result never depends on luck: where the sample missed, or a span gathered more than it has room for, the radix
passes read the whole row instead.
"""

import triton
import triton.language as tl

from .device import BLOCKS, COLUMN, MEMBER_FIELDS, ROW_SAMPLES, SAMPLE, SAMPLES, STATE, WIDTH, budget, opened
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
    room_of,
    row_ends,
    row_of,
    span_of,
    tile_keys,
)

__all__ = ["bracket_kernel", "narrow_kernel", "sample_kernel"]

TAKEN = tl.constexpr(1024)  # keys that are sampled at a time


@triton.jit
def sample_kernel(
    starts, parts, members, scores, kept, samples, CAPACITY: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """Keys of slots spread over each row of a part, one from each equal stretch; a program takes one row."""
    which, part, row = opened(starts, parts, PARTS, True)
    member = members + which * MEMBER_FIELDS
    values, mask = row_ends(part, member, row, scores, kept, FORM)
    count, blocks = tl.load(part + SAMPLES), tl.load(part + BLOCKS)
    out = samples + (tl.load(part + STATE) + row) * CAPACITY + tl.load(part + SAMPLE)
    for begin in range(0, count, TAKEN):
        at = begin + tl.arange(0, TAKEN).to(tl.int64)
        jitter = (at * 2654435761 % 4294967296) % tl.maximum(blocks // count, 1)  # no stride of the weight's own
        slot = at * blocks // count + jitter
        slot = slot if FORM.big else slot.to(tl.int32)
        tl.store(out + at, tile_keys(part, member, values, mask, slot, at < count, FORM), mask=at < count)


@triton.jit
def bracket_kernel(starts, parts, state, samples, CAPACITY: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr):
    """Two keys between which the threshold almost surely lies, from the row's samples; a program takes one row."""
    _, part, row = opened(starts, parts, PARTS, True)
    if tl.load(part + COLUMN) == 0:  # one program a row, whatever the number of its parts
        place = tl.load(part + STATE) + row
        taken = tl.load(part + ROW_SAMPLES)
        at = tl.arange(0, CAPACITY)
        keys = tl.load(samples + place * CAPACITY + at, mask=at < taken, other=0)
        share = budget(part, row, row >= 0, True).to(tl.float32) / tl.load(part + WIDTH).to(tl.float32)
        rank = share * taken.to(tl.float32)
        margin = 4 * tl.sqrt(rank * tl.maximum(1 - share, 0.0)) + 8  # four standard deviations of a sample's rank
        upper, lower = tl.floor(rank - margin).to(tl.int32), tl.ceil(rank + margin).to(tl.int32)
        line = state + place * STATE_FIELDS + tl.arange(0, 1)
        tl.store(line + HIGH, ranked(keys, upper, BITS).to(tl.int64))
        tl.store(line + LOW, ranked(keys, lower, BITS).to(tl.int64))


@triton.jit
def ranked(keys, rank, BITS: tl.constexpr):
    """The largest key [1] that at least `rank` of the keys reach, bit by bit."""
    found = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        reached = tl.sum((keys >= tl.broadcast_to(found | bit, keys.shape)).to(tl.int32)) >= rank
        found = tl.where(reached, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit(do_not_specialize=["length"])
def narrow_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    state,
    spans,
    inside,
    length,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One pass over the rows: count above and at the ends of the bracket, gather what lies strictly between."""
    part, member, values, mask, _, place, span, own = row_of(starts, parts, members, scores, kept, PARTS, FORM)
    line = state + place * STATE_FIELDS
    high, low = tl.load(line + HIGH).to(tl.uint32), tl.load(line + LOW).to(tl.uint32)
    room, most = room_of(inside, own, length, FORM)
    begin, end, blocks = span_of(part, span, length, FORM)
    counts = tl.full([FORM.tile], 0, tl.int32)  # ten bits each for keys above, at HIGH and at LOW: spans < 1024 tiles
    gathered = tl.full((), 0, tl.int32)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        real = slot < blocks
        keys = tile_keys(part, member, values, mask, slot, real, FORM)
        counts += (keys > high).to(tl.int32) + tl.where(real & (keys == high), 1 << 10, 0)
        counts += tl.where(real & (keys == low), 1 << 20, 0)
        between = ((keys > low) & (keys < high)).to(tl.int32)
        gather(room, most, keys, between, gathered, FORM)
        gathered += tl.sum(between)
    above, at_high = tl.sum(counts & 1023), tl.sum((counts >> 10) & 1023)
    at_low = tl.where(low < high, tl.sum(counts >> 20), 0)
    record = spans + own * SPAN_FIELDS
    tl.store(record + GATHERED, tl.minimum(gathered, most))
    tl.store(record + SPAN_HIGH, at_high)
    tl.store(record + SPAN_LOW, at_low)
    tl.atomic_add(line + ABOVE, above.to(tl.int64))
    tl.atomic_add(line + AT_HIGH, at_high.to(tl.int64))
    tl.atomic_add(line + BETWEEN, gathered.to(tl.int64))
    tl.atomic_add(line + AT_LOW, at_low.to(tl.int64))
    if gathered > most:
        tl.atomic_add(line + OVERFLOW, 1)


@triton.jit
def gather(room, most, keys, between, before, FORM: tl.constexpr):
    """Append the keys that lie between; what does not fit is left out (and counted by the caller)."""
    place = (before + tl.cumsum(between, 0) - 1).to(tl.int64)
    # place and key as one number may be shuffled freely, so no data changes threads before the scattered store
    both = tl.reshape(tl.where(between > 0, (place << 32) | keys.to(tl.int64), -1), [FORM.tile], can_reorder=True)
    place = (both >> 32).to(tl.int32)
    tl.store(room + place, both.to(tl.uint32), mask=(both >= 0) & (place < most))
