"""Kernels that select in long rows: a sample and one full pass make rows short, radix passes find the k-th largest key.

A row's keys are read from the weight itself, so scores of single elements are never stored. Programs work on spans of
consecutive tiles, so that ties by index need one count per span. Every program of a row computes the digit that the
pass before found, so that a pass is one launch. Where the sample missed, or a span has more keys inside the bracket
than its buffer holds, the passes read the whole row instead: the result never depends on the sample.
"""

import triton
import triton.language as tl

from .device import (
    BLOCK,
    BLOCKS,
    COLUMN,
    MEMBER_FIELDS,
    ROW_SAMPLES,
    SAMPLE,
    SAMPLES,
    SPAN,
    STATE,
    WIDTH,
    budget,
    offset_of,
    part_of_program,
    row_keys,
    row_pointers,
    slots_of_span,
    span_of,
    write_mask,
)
from .ranking import key_of_rank

# Columns of a row's state, int64, initially zero.
LOW = tl.constexpr(0)  # the bracket: keys from LOW to HIGH
HIGH = tl.constexpr(1)
ABOVE = tl.constexpr(2)  # keys above HIGH
AT_HIGH = tl.constexpr(3)
BETWEEN = tl.constexpr(4)  # keys strictly inside, gathered
AT_LOW = tl.constexpr(5)
OVERFLOW = tl.constexpr(6)  # spans with more keys inside than their buffers hold
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

FULL = tl.constexpr(0)  # modes of a row: read all of it,
INSIDE = tl.constexpr(1)  # read the gathered keys,
KNOWN = tl.constexpr(2)  # or read nothing: the threshold is an end of the bracket

DIGIT = tl.constexpr(8)
BINS = tl.constexpr(256)
SAMPLE_TILE = tl.constexpr(1024)  # keys that are sampled at a time


@triton.jit
def buffer_of(gathered_keys, entry, length, FORM: tl.constexpr):
    """The buffer of a span's gathered keys and its capacity, an eighth of the span's slots."""
    capacity = length * (FORM.tile // 8)
    return gathered_keys + entry * capacity, capacity


@triton.jit
def sample_kernel(
    starts, parts, members, scores, kept, samples, CAPACITY: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """Keys at scattered slots of each row of a part, one from each equal stretch; a program takes one row."""
    index, part, row = part_of_program(starts, parts, PARTS, True)
    member = members + index * MEMBER_FIELDS
    values, mask = row_pointers(part, member, row, scores, kept, FORM)
    count, blocks = tl.load(part + SAMPLES), tl.load(part + BLOCKS)
    out = samples + (tl.load(part + STATE) + row) * CAPACITY + tl.load(part + SAMPLE)
    for begin in range(0, count, SAMPLE_TILE):
        at = begin + tl.arange(0, SAMPLE_TILE).to(tl.int64)
        jitter = (at * 2654435761 % 4294967296) % tl.maximum(blocks // count, 1)  # no fixed stride over the weight
        slot = at * blocks // count + jitter
        slot = slot if FORM.big else slot.to(tl.int32)
        tl.store(out + at, row_keys(part, member, values, mask, slot, at < count, FORM), mask=at < count)


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
        line = state + row_state * STATE_FIELDS + tl.arange(0, 1)
        tl.store(line + HIGH, key_of_rank(keys, upper, BITS).to(tl.int64))
        tl.store(line + LOW, key_of_rank(keys, lower, BITS).to(tl.int64))


@triton.jit(do_not_specialize=["length"])
def narrow_kernel(
    starts, parts, members, scores, kept, state, spans, inside, length, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """One pass over the rows: count keys above and at the ends of the bracket, gather those strictly inside it."""
    part, member, values, mask, _, row_state, span, entry = span_of(starts, parts, members, scores, kept, PARTS, FORM)
    line = state + row_state * STATE_FIELDS
    high, low = tl.load(line + HIGH).to(tl.uint32), tl.load(line + LOW).to(tl.uint32)
    buffer, capacity = buffer_of(inside, entry, length, FORM)
    begin, end, blocks = slots_of_span(part, span, length, FORM)
    counts = tl.full([FORM.tile], 0, tl.int32)  # ten bits each for keys above, at HIGH and at LOW: spans < 1024 tiles
    gathered = tl.full((), 0, tl.int32)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        real = slot < blocks
        keys = row_keys(part, member, values, mask, slot, real, FORM)
        counts += (keys > high).to(tl.int32) + tl.where(real & (keys == high), 1 << 10, 0)
        counts += tl.where(real & (keys == low), 1 << 20, 0)
        between = ((keys > low) & (keys < high)).to(tl.int32)
        gather(buffer, capacity, keys, between, gathered, FORM)
        gathered += tl.sum(between)
    above, at_high = tl.sum(counts & 1023), tl.sum((counts >> 10) & 1023)
    at_low = tl.where(low < high, tl.sum(counts >> 20), 0)
    fields = spans + entry * SPAN_FIELDS
    tl.store(fields + GATHERED, tl.minimum(gathered, capacity))
    tl.store(fields + SPAN_HIGH, at_high)
    tl.store(fields + SPAN_LOW, at_low)
    tl.atomic_add(line + ABOVE, above.to(tl.int64))
    tl.atomic_add(line + AT_HIGH, at_high.to(tl.int64))
    tl.atomic_add(line + BETWEEN, gathered.to(tl.int64))
    tl.atomic_add(line + AT_LOW, at_low.to(tl.int64))
    if gathered > capacity:
        tl.atomic_add(line + OVERFLOW, 1)


@triton.jit
def gather(buffer, capacity, keys, between, before, FORM: tl.constexpr):
    """Append the keys strictly inside the bracket; what exceeds the capacity is dropped (and counted by the caller)."""
    position = (before + tl.cumsum(between, 0) - 1).to(tl.int64)
    # position and key in one integer may be reordered freely, so no data changes threads before the scattered store
    both = tl.reshape(tl.where(between > 0, (position << 32) | keys.to(tl.int64), -1), [FORM.tile], can_reorder=True)
    position = (both >> 32).to(tl.int32)
    tl.store(buffer + position, both.to(tl.uint32), mask=(both >= 0) & (position < capacity))


@triton.jit
def resolve(line, keep, NARROW: tl.constexpr):
    """Append the keys strictly inside the bracket; those beyond the capacity are dropped (the caller counts them)."""
    mode, base, need = FULL + 0 * keep, 0 * keep, keep
    if NARROW:
        first = tl.load(line + ABOVE)
        second = first + tl.load(line + AT_HIGH)
        third = second + tl.load(line + BETWEEN)
        fourth = third + tl.load(line + AT_LOW)
        is_high = (keep > first) & (keep <= second)
        is_low = (keep > third) & (keep <= fourth)
        between = (keep > second) & (keep <= third) & (tl.load(line + OVERFLOW) == 0)
        mode = tl.where(is_high | is_low, KNOWN, tl.where(between, INSIDE, FULL))
        base = tl.where(is_high, tl.load(line + HIGH), tl.where(is_low | between, tl.load(line + LOW), 0))
        need = keep - tl.where(is_high, first, tl.where(between, second, tl.where(is_low, third, 0)))
        nothing = keep <= 0
        mode, base = tl.where(nothing, KNOWN, mode), tl.where(nothing, 0xFFFFFFFF, base)  # above every key
    return mode, base, need


@triton.jit
def is_counted(line, mode, SHIFT: tl.constexpr):
    """Whether a pass has to count: the keys inside the bracket may share their upper digits."""
    spread = (tl.load(line + HIGH) - tl.load(line + LOW)) >> SHIFT
    return (mode == FULL) | ((mode == INSIDE) & (spread > 0))


@triton.jit
def prefix_after(line, counts, mode, need, PASS: tl.constexpr, COUNT: tl.constexpr):
    """Prefix and need after PASS of COUNT passes; every program of a row computes, and stores, the same."""
    prefix = 0 * need
    if PASS > 0:
        if PASS > 1:
            prefix = tl.load(line + PASSES + 2 * (PASS - 2))
            need = tl.load(line + PASSES + 2 * (PASS - 2) + 1)
        bins = tl.arange(0, BINS)
        found = tl.load(counts + (PASS - 1) * BINS + bins).to(tl.int64)
        from_top = tl.cumsum(found, 0, reverse=True)
        digit = tl.maximum(tl.sum((from_top >= need).to(tl.int64)) - 1, 0)
        above = tl.sum(tl.where(bins > digit, found, 0))
        counted = is_counted(line, mode, DIGIT * (COUNT - PASS))
        prefix = (prefix << DIGIT) | tl.where(counted, digit, 0)
        need = need - tl.where(counted, above, 0)
    return prefix, need


@triton.jit(do_not_specialize=["length"])
def histogram_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    state,
    spans,
    inside,
    counts,
    length,
    PASS: tl.constexpr,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One radix pass: the histogram of one digit of the keys that match the prefix."""
    part, member, values, mask, row, row_state, span, entry = span_of(starts, parts, members, scores, kept, PARTS, FORM)
    COUNT: tl.constexpr = (FORM.bits + 7) // DIGIT
    SHIFT: tl.constexpr = DIGIT * (COUNT - 1 - PASS)
    line, counts = state + row_state * STATE_FIELDS, counts + row_state * (COUNT * BINS)
    mode, base, need = resolve(line, budget(part, row, row >= 0, True), FORM.narrow)
    prefix, need = prefix_after(line, counts, mode, need, PASS, COUNT)
    if PASS > 0:
        tl.store(line + PASSES + 2 * (PASS - 1), prefix)
        tl.store(line + PASSES + 2 * (PASS - 1) + 1, need)
    prefix, base = prefix.to(tl.uint32), base.to(tl.uint32)
    found = tl.zeros([BINS], tl.int32)
    if mode == FULL:
        found = count_row(part, member, values, mask, span, length, prefix, SHIFT, PASS, FORM)
    elif is_counted(line, mode, SHIFT):
        gathered = tl.load(spans + entry * SPAN_FIELDS + GATHERED)
        found = count_inside(buffer_of(inside, entry, length, FORM)[0], gathered, base, prefix, SHIFT, PASS, FORM)
    tl.atomic_add(counts + PASS * BINS + tl.arange(0, BINS), found.to(counts.dtype.element_ty), mask=found > 0)


@triton.jit
def count_row(
    part, member, values, mask, span, length, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr
):
    """The histogram of a span's keys."""
    TILE: tl.constexpr = FORM.tile // 2  # the histogram itself takes registers
    found = tl.zeros([BINS], tl.int32)
    begin, end, blocks = slots_of_span(part, span, length, FORM)
    for at in range(begin, end, TILE):
        slot = at + tl.arange(0, TILE)
        keys = row_keys(part, member, values, mask, slot, slot < blocks, FORM)
        found += digit_histogram(keys, slot < blocks, prefix, SHIFT, PASS)
    return found


@triton.jit
def count_inside(buffer, gathered, base, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr):
    """The histogram of the keys that a span gathered, relative to the lower end of the bracket."""
    TILE: tl.constexpr = FORM.tile // 2
    found = tl.zeros([BINS], tl.int32)
    for begin in range(0, gathered, TILE):
        at = begin + tl.arange(0, TILE)
        keys = tl.load(buffer + at, mask=at < gathered, other=0) - base
        found += digit_histogram(keys, at < gathered, prefix, SHIFT, PASS)
    return found


@triton.jit
def digit_histogram(keys, real, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr):
    """The histogram of one digit of the keys that match the prefix."""
    if PASS > 0:
        real = real & ((keys >> (SHIFT + DIGIT)) == prefix)
    return tl.histogram(((keys >> SHIFT) & (BINS - 1)).to(tl.int32), BINS, mask=real)


@triton.jit(do_not_specialize=["length"])
def tie_kernel(
    starts, parts, members, scores, kept, state, spans, inside, counts, length, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """The threshold, and how many keys of each span equal it."""
    part, member, values, mask, row, row_state, span, entry = span_of(starts, parts, members, scores, kept, PARTS, FORM)
    COUNT: tl.constexpr = (FORM.bits + 7) // DIGIT
    line, counts = state + row_state * STATE_FIELDS, counts + row_state * (COUNT * BINS)
    mode, threshold, need = resolve(line, budget(part, row, row >= 0, True), FORM.narrow)
    if mode != KNOWN:
        prefix, need = prefix_after(line, counts, mode, need, COUNT, COUNT)
        threshold += prefix
    tl.store(line + THRESHOLD, threshold)
    tl.store(line + NEED, need)
    limit = threshold.to(tl.uint32)
    fields = spans + entry * SPAN_FIELDS
    if mode == KNOWN:
        tied = tl.load(fields + tl.where(threshold == tl.load(line + HIGH), SPAN_HIGH, SPAN_LOW))
    elif mode == INSIDE:
        tied = equal_inside(buffer_of(inside, entry, length, FORM)[0], tl.load(fields + GATHERED), limit, FORM)
    else:
        tied = equal_in_row(part, member, values, mask, span, length, limit, FORM)
    tl.store(fields + TIED, tied)


@triton.jit
def equal_inside(buffer, gathered, limit, FORM: tl.constexpr):
    """How many of the keys that a span gathered equal the threshold."""
    equal = tl.full([FORM.tile], 0, tl.int32)
    for begin in range(0, gathered, FORM.tile):
        at = begin + tl.arange(0, FORM.tile)
        equal += ((at < gathered) & (tl.load(buffer + at, mask=at < gathered, other=0) == limit)).to(tl.int32)
    return tl.sum(equal)


@triton.jit
def equal_in_row(part, member, values, mask, span, length, limit, FORM: tl.constexpr):
    """How many keys of a span equal the threshold."""
    equal = tl.full([FORM.tile], 0, tl.int32)
    begin, end, blocks = slots_of_span(part, span, length, FORM)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        keys = row_keys(part, member, values, mask, slot, slot < blocks, FORM)
        equal += ((slot < blocks) & (keys == limit)).to(tl.int32)
    return tl.sum(equal)


@triton.jit(do_not_specialize=["length"])
def mark_kernel(starts, parts, members, scores, kept, state, spans, length, FORM: tl.constexpr, PARTS: tl.constexpr):
    """The mask: keys above the threshold, and of those equal to it the first ones by index."""
    part, member, values, mask, _, row_state, span, entry = span_of(starts, parts, members, scores, kept, PARTS, FORM)
    line = state + row_state * STATE_FIELDS
    limit, need = tl.load(line + THRESHOLD).to(tl.uint32), tl.load(line + NEED)
    ahead = tl.load(part + SPAN) + span
    tied_so_far = ties_before(spans + (entry - ahead) * SPAN_FIELDS, ahead)
    keeps_all = tied_so_far < need
    # in the one span that keeps only some of its ties
    cuts = keeps_all & (tied_so_far + tl.load(spans + entry * SPAN_FIELDS + TIED) > need)
    begin, end, blocks = slots_of_span(part, span, length, FORM)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        real = slot < blocks
        keys = row_keys(part, member, values, mask, slot, real, FORM)
        tied = keys == limit
        if cuts:
            ranks = tl.cumsum(tied.to(tl.int32), 0) + tied_so_far
            chosen = (keys > limit) | (tied & (ranks <= need))
            tied_so_far += tl.sum(tied.to(tl.int32))
        else:
            chosen = (keys > limit) | (tied & keeps_all)
        write_mask(mask + offset_of(part, member, slot, BLOCK, True, FORM), chosen & (keys > 0), real, FORM)


@triton.jit
def ties_before(records, count):
    """Ties in the spans of a row before this one."""
    total = tl.zeros([1024], tl.int64)
    for begin in range(0, count, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(records + at * SPAN_FIELDS + TIED, mask=at < count, other=0).to(tl.int64)
    return tl.sum(total)
