"""Kernels that make long rows short: a sample brackets each row's threshold, one full pass gathers the keys between.

Their results are columns of a row's state and of a span's record, and the gathered keys; `radix` selects among these,
or reads the whole row where the sample missed or a span has more keys inside the bracket than its buffer holds.
"""

import triton
import triton.language as tl

from .device import (
    BLOCKS,
    BUFFER,
    COLUMN,
    MEMBER_FIELDS,
    ROW_SAMPLES,
    SAMPLE,
    SAMPLES,
    SPANS,
    STATE,
    WIDTH,
    budget,
    divisible,
    part_of_program,
    row_keys,
    row_pointers,
    slots_of_span,
    span_of,
)
from .ranking import keys_of_ranks, slots_apart

# Columns of a row's state, int64, initially zero.
LOW = tl.constexpr(0)  # the bracket: keys from LOW to HIGH
HIGH = tl.constexpr(1)
ABOVE = tl.constexpr(2)  # keys above HIGH
AT_HIGH = tl.constexpr(3)  # keys equal to HIGH and to LOW, if these are counted APART
BETWEEN = tl.constexpr(4)  # keys of the bracket that are gathered: all, or those strictly inside
AT_LOW = tl.constexpr(5)
OVERFLOW = tl.constexpr(6)  # spans with more keys to gather than their buffers hold
APART = tl.constexpr(7)  # whether many keys equal an end of the bracket, so that they are counted instead of gathered
PASSES = tl.constexpr(8)  # prefix and need after each pass
THRESHOLD = tl.constexpr(16)  # the k-th largest key
NEED = tl.constexpr(17)  # how many keys equal to it are kept
STATE_FIELDS = tl.constexpr(18)

# Columns of a span's record, int32, each written before it is read.
GATHERED = tl.constexpr(0)
SPAN_HIGH = tl.constexpr(1)
SPAN_LOW = tl.constexpr(2)
TIED = tl.constexpr(3)
SPAN_FIELDS = tl.constexpr(4)

SAMPLE_TILE = tl.constexpr(1024)  # keys that a program samples
MANY = tl.constexpr(64)  # an end of the bracket is counted apart if more than one in so many samples equal it
TRIP = tl.constexpr(2)  # tiles that the narrowing pass takes at a time


@triton.jit
def buffer_of(inside, part, mask, row, span, length, FORM: tl.constexpr):
    """The buffer of a span's gathered keys and its capacity: an eighth of the span's slots, or less.

    It is the span's own part of the mask where FORM states that this is free, else one of those of `inside`.
    """
    capacity = length * (FORM.tile // 8)
    if FORM.gathers_in_mask:
        begin, end, _ = slots_of_span(part, span, length, FORM)
        found = (mask + begin).to(tl.int64).to(tl.pointer_type(tl.uint32))
        capacity = tl.minimum(capacity, (end - begin) // 4).to(tl.int32)
    else:
        found = inside + (tl.load(part + BUFFER) + row * tl.load(part + SPANS) + span) * capacity
    return found, capacity


@triton.jit
def sample_kernel(
    starts, parts, members, scores, kept, samples, CAPACITY: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """Keys at scattered slots of each row of a part, one from each equal stretch; a program takes a tile of them."""
    index, part, row = part_of_program(starts, parts, PARTS, True)
    count = tl.load(part + SAMPLES).to(tl.int32)
    at = tl.program_id(1) * SAMPLE_TILE + tl.arange(0, SAMPLE_TILE)
    if tl.program_id(1) * SAMPLE_TILE < count:
        member = members + index * MEMBER_FIELDS
        values, mask = row_pointers(part, member, row, scores, kept, FORM)
        out = samples + (tl.load(part + STATE) + row) * CAPACITY + tl.load(part + SAMPLE)
        slot = sampled_slots(at, count, tl.load(part + BLOCKS), FORM)
        tl.store(out + at, row_keys(part, member, values, mask, slot, at < count, FORM), mask=at < count)


@triton.jit
def sampled_slots(at, count, blocks, FORM: tl.constexpr):
    """The slots of these samples, of `count` in a row of so many blocks: at * blocks // count and a bit further."""
    stretch = blocks // count
    rest = (blocks - stretch * count).to(tl.uint32)
    wide = at.to(tl.uint32)  # 32 bits are enough: a row has less than 2^15 samples
    jitter = wide * 2654435761 % tl.maximum(stretch, 1).to(tl.uint32)  # no fixed stride over the weight
    further = (wide * rest // count.to(tl.uint32) + jitter).to(tl.int32)
    return at.to(tl.int64) * stretch + further if FORM.big else at * stretch.to(tl.int32) + further


@triton.jit
def bracket_kernel(starts, parts, state, samples, CAPACITY: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr):
    """Two keys that very likely bracket the threshold, from the row's samples; a program takes one row."""
    _, part, row = part_of_program(starts, parts, PARTS, True)
    if tl.load(part + COLUMN) == 0:  # one program per row, whatever the number of its parts
        row_state = tl.load(part + STATE) + row
        taken = tl.load(part + ROW_SAMPLES)
        at = tl.arange(0, CAPACITY)
        keys = tl.load(samples + row_state * CAPACITY + at, mask=at < taken, other=0)
        share = budget(part, row, row >= 0, True).to(tl.float32) / tl.load(part + WIDTH).to(tl.float32)
        rank = share * taken.to(tl.float32)
        margin = 4 * tl.sqrt(rank * tl.maximum(1 - share, 0.0)) + 8  # four standard deviations of a sample's rank
        upper, lower = tl.floor(rank - margin).to(tl.int32), tl.ceil(rank + margin).to(tl.int32)
        high, low = keys_of_ranks(keys, upper, lower, BITS)
        most = tl.maximum(equal_samples(keys, at < taken, high), equal_samples(keys, at < taken, low))
        line = state + row_state * STATE_FIELDS + tl.arange(0, 1)
        tl.store(line + HIGH, high.to(tl.int64))
        tl.store(line + LOW, low.to(tl.int64))
        tl.store(line + APART, (most * MANY > taken) & (high == high))


@triton.jit
def equal_samples(keys, real, key):
    """How many samples equal a key [1]."""
    return tl.sum((real & (keys == tl.broadcast_to(key, keys.shape))).to(tl.int32))


@triton.jit(do_not_specialize=["length"])
def narrow_kernel(
    starts, parts, members, scores, kept, state, spans, inside, length, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """One pass over the rows: gather the keys of the bracket; count those above it, and apart those at its ends."""
    TILE: tl.constexpr = 2 * FORM.tile  # the scan of `gather` costs as much for two tiles as for one
    RUNS: tl.constexpr = FORM.runs
    part, member, values, mask, row, row_state, span, entry = span_of(starts, parts, members, scores, kept, PARTS, FORM)
    line = state + row_state * STATE_FIELDS
    bracket = bracket_of(line)
    buffer, capacity = buffer_of(inside, part, mask, row, span, length, FORM)
    begin, end, _ = slots_of_span(part, span, length, FORM)
    whole = begin + (end - begin) // TILE * TILE
    upto = tl.full([RUNS], 0, tl.int32)
    at_high, at_low = upto, upto
    gathered = tl.full((), 0, tl.int32)
    for at in range(begin, whole, TILE):
        keys = row_keys(part, member, values, mask, at + tl.arange(0, TILE), None, FORM)
        runs = runs_of(keys, bracket, RUNS, TILE // RUNS, FORM.vector)
        upto, at_high, at_low, count = counted(runs, bracket, upto, at_high, at_low, FORM)
        gathered = gather(runs, bracket, buffer, capacity, count, gathered)
    if whole < end:
        slot = whole + tl.arange(0, TILE)
        real = slot < divisible(end, 16 if FORM.counts_16 else 1)
        keys = row_keys(part, member, values, mask, slot, real, FORM)
        runs = runs_of(keys, bracket, RUNS, TILE // RUNS, FORM.vector)
        upto, at_high, at_low, count = counted(runs, bracket, upto, at_high, at_low, FORM)
        gathered = gather(runs, bracket, buffer, capacity, count, gathered)
    above = (end - begin + TILE - 1) // TILE * TILE - tl.sum(upto)
    write_counts(line, spans + entry * SPAN_FIELDS, above, tl.sum(at_high), tl.sum(at_low), gathered, capacity)


@triton.jit
def bracket_of(line):
    """The least key to gather, and relative to it the two ends of the bracket; how many keys may be gathered.

    The last is whether keys equal to the ends are counted apart, and not gathered.
    """
    least, apart = least_gathered(line), tl.load(line + APART)
    high, low = tl.load(line + HIGH) - least, tl.load(line + LOW) - least
    width = tl.maximum(high - apart + 1, 0)
    return least.to(tl.uint32), high.to(tl.uint32), low.to(tl.uint32), width.to(tl.uint32), apart


@triton.jit
def least_gathered(line):
    """The least key to gather; gathered keys are stored as differences from it."""
    return tl.maximum(tl.load(line + LOW) + tl.load(line + APART), 1)  # key 0 marks slots that must not be kept


@triton.jit
def runs_of(keys, bracket, RUNS: tl.constexpr, LENGTH: tl.constexpr, VECTOR: tl.constexpr):
    """A tile of keys, less the least to gather, as LENGTH vectors [RUNS]; the keys that a thread has read are a run."""
    least = bracket[0]
    differences = keys - 1 - (least - 1)  # in this order nothing is computed for the 1 that `order_key` adds
    parts = tl.reshape(differences, [LENGTH // VECTOR, RUNS, VECTOR])
    return slots_apart(tl.reshape(tl.permute(parts, 1, 0, 2), [RUNS, LENGTH]), LENGTH)


@triton.jit
def counted(runs, bracket, upto, at_high, at_low, FORM: tl.constexpr):
    """Add a tile's keys up to the bracket's end, and where these are counted apart at its ends; and keys to gather."""
    least, high, low, _, apart = bracket
    below, up = tl.zeros(upto.shape, tl.int32), tl.zeros(upto.shape, tl.int32)
    for i in tl.static_range(len(runs)):
        if FORM.bits < 32:  # the sign of a difference is a count, which takes one instruction less than a comparison
            below += (runs[i] >> 31).to(tl.int32)
            up += ((runs[i] - high - 1) >> 31).to(tl.int32)
        else:
            below += (runs[i] + least < least).to(tl.int32)
            up += (runs[i] + least <= high + least).to(tl.int32)
    count = up - below
    if apart != 0:
        for i in tl.static_range(len(runs)):
            equal = (runs[i] == high).to(tl.int32)
            count -= tl.where(high != low, equal, 0)
            at_high += equal
            at_low += (runs[i] == low).to(tl.int32)
    return upto + up, at_high, at_low, count


@triton.jit
def gather(runs, bracket, buffer, capacity, count, before):
    """Append the keys to gather, `count` of each run, to the `before` earlier ones, unless the buffer overflows."""
    after = before + tl.sum(count)
    width = tl.where(after <= capacity, bracket[3], 0).to(tl.uint32)
    address = (buffer + (before + tl.cumsum(count, 0) - count)).to(tl.int64)  # sums of pointers are computed many times
    for i in tl.static_range(len(runs)):
        chosen = runs[i] < width
        tl.store(address.to(tl.pointer_type(tl.uint32)), runs[i], mask=chosen)
        address += tl.where(chosen, 4, 0).to(tl.int64)
    return after


@triton.jit
def write_counts(line, fields, above, at_high, at_low, gathered, capacity):
    """Write a span's counts to its record, and add them to those of its row."""
    at_low = tl.where(tl.load(line + LOW) < tl.load(line + HIGH), at_low, 0)
    tl.store(fields + GATHERED, gathered)
    tl.store(fields + SPAN_HIGH, at_high)
    tl.store(fields + SPAN_LOW, at_low)
    tl.atomic_add(line + ABOVE, above.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + AT_HIGH, at_high.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + BETWEEN, gathered.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + AT_LOW, at_low.to(tl.int64), sem="relaxed")
    if gathered > capacity:
        tl.atomic_add(line + OVERFLOW, 1, sem="relaxed")
