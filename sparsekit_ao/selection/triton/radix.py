"""Kernels that select in long rows, narrowed or whole: radix passes find the k-th largest key, then masks are written.

A row's keys are read from the weight itself, so scores of single elements are never stored. Programs work on spans of
consecutive tiles, so that ties by index need one count per span. Every program of a row computes the digit that the
pass before found, so that a pass is one launch. Where the sample missed, or a span has more keys inside the bracket
than its buffer holds, the passes read the whole row instead: the result never depends on the sample.
"""

import triton
import triton.language as tl

from .device import (
    BLOCK,
    SPAN,
    budget,
    divisible,
    offset_of,
    row_keys,
    slots_of_span,
    span_of,
    write_mask,
)
from .narrow import (
    ABOVE,
    AT_HIGH,
    AT_LOW,
    BETWEEN,
    GATHERED,
    HIGH,
    LOW,
    NEED,
    OVERFLOW,
    PASSES,
    SPAN_FIELDS,
    SPAN_HIGH,
    SPAN_LOW,
    STATE_FIELDS,
    THRESHOLD,
    TIED,
    buffer_of,
    least_gathered,
)

FULL = tl.constexpr(0)  # modes of a row: read all of it,
INSIDE = tl.constexpr(1)  # read the gathered keys,
KNOWN = tl.constexpr(2)  # or read nothing: the threshold is an end of the bracket

DIGIT = tl.constexpr(8)
BINS = tl.constexpr(256)


@triton.jit
def resolve(line, keep, NARROW: tl.constexpr):
    """What is known before the first pass: what to read, the key that counts start from, keys still to be found."""
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
        base = tl.where(is_high, tl.load(line + HIGH), tl.where(is_low, tl.load(line + LOW), 0))
        base = tl.where(between, least_gathered(line), base)
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
    mode, _, need = resolve(line, budget(part, row, row >= 0, True), FORM.narrow)
    prefix, need = prefix_after(line, counts, mode, need, PASS, COUNT)
    if PASS > 0:
        tl.store(line + PASSES + 2 * (PASS - 1), prefix)
        tl.store(line + PASSES + 2 * (PASS - 1) + 1, need)
    prefix = prefix.to(tl.uint32)
    found = tl.zeros([BINS], tl.int32)
    if mode == FULL:
        found = count_row(part, member, values, mask, span, length, prefix, SHIFT, PASS, FORM)
    elif is_counted(line, mode, SHIFT):
        gathered = tl.load(spans + entry * SPAN_FIELDS + GATHERED)
        buffer = buffer_of(inside, part, mask, row, span, length, FORM)[0]
        found = count_inside(buffer, gathered, prefix, SHIFT, PASS, FORM)
    tl.atomic_add(
        counts + PASS * BINS + tl.arange(0, BINS), found.to(counts.dtype.element_ty), mask=found > 0, sem="relaxed"
    )


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
def count_inside(buffer, gathered, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr):
    """The histogram of the keys that a span gathered, of differences from the least."""
    TILE: tl.constexpr = FORM.tile // 2
    found = tl.zeros([BINS], tl.int32)
    for begin in range(0, gathered, TILE):
        at = begin + tl.arange(0, TILE)
        keys = tl.load(buffer + at, mask=at < gathered, other=0)
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
    mode, base, need = resolve(line, budget(part, row, row >= 0, True), FORM.narrow)
    prefix = 0 * need
    if mode != KNOWN:
        prefix, need = prefix_after(line, counts, mode, need, COUNT, COUNT)
    threshold = base + prefix
    tl.store(line + THRESHOLD, threshold)
    tl.store(line + NEED, need)
    limit = prefix.to(tl.uint32)  # of what is read: keys of the whole row start from 0
    fields = spans + entry * SPAN_FIELDS
    if mode == KNOWN:
        tied = tl.load(fields + tl.where(threshold == tl.load(line + HIGH), SPAN_HIGH, SPAN_LOW))
    elif mode == INSIDE:
        buffer = buffer_of(inside, part, mask, row, span, length, FORM)[0]
        tied = equal_inside(buffer, tl.load(fields + GATHERED), limit, FORM)
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
    """The mask: keys above the threshold, and of those equal to it the first ones by index.

    Programs go backwards: the end of a weight, which was read last, may still be in the cache.
    """
    part, member, values, mask, _, row_state, span, entry = span_of(
        starts, parts, members, scores, kept, PARTS, FORM, True
    )
    line = state + row_state * STATE_FIELDS
    limit, need = tl.load(line + THRESHOLD).to(tl.uint32), tl.load(line + NEED)
    ahead = tl.load(part + SPAN) + span
    tied_so_far = ties_before(spans + (entry - ahead) * SPAN_FIELDS, ahead)
    keeps_all = tied_so_far < need
    begin, end, _ = slots_of_span(part, span, length, FORM)
    if keeps_all & (tied_so_far + tl.load(spans + entry * SPAN_FIELDS + TIED) > need):
        mark_first(part, member, values, mask, begin, end, limit, need - tied_so_far, FORM)
    else:
        dropped = tl.where(keeps_all, tl.maximum(limit, 1) - 1, limit)
        mark_above(part, member, values, mask, begin, end, dropped, FORM)


@triton.jit
def mark_above(part, member, values, mask, begin, end, dropped, FORM: tl.constexpr):
    """The mask of a span that keeps exactly the keys above `dropped`."""
    whole = begin + (end - begin) // FORM.tile * FORM.tile
    for at in range(begin, whole, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        keys = row_keys(part, member, values, mask, slot, None, FORM)
        write_mask(mask + offset_of(part, member, slot, BLOCK, True, FORM), keys > dropped, None, FORM)
    if whole < end:
        slot = whole + tl.arange(0, FORM.tile)
        real = slot < divisible(end, 16 if FORM.counts_16 else 1)
        keys = row_keys(part, member, values, mask, slot, real, FORM)
        write_mask(mask + offset_of(part, member, slot, BLOCK, True, FORM), keys > dropped, real, FORM)


@triton.jit
def mark_first(part, member, values, mask, begin, end, limit, need, FORM: tl.constexpr):
    """The mask of the one span that keeps only the first `need` of its keys equal to `limit`."""
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        real = slot < divisible(end, 16 if FORM.counts_16 else 1)
        keys = row_keys(part, member, values, mask, slot, real, FORM)
        tied = (keys == limit).to(tl.int32)
        chosen = (keys > limit) | ((tied > 0) & (tl.cumsum(tied, 0) <= need))
        need -= tl.sum(tied)
        write_mask(mask + offset_of(part, member, slot, BLOCK, True, FORM), chosen & (keys > 0), real, FORM)


@triton.jit
def ties_before(records, count):
    """Ties in the spans of a row before this one."""
    total = tl.zeros([1024], tl.int64)
    for begin in range(0, count, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(records + at * SPAN_FIELDS + TIED, mask=at < count, other=0).to(tl.int64)
    return tl.sum(total)
