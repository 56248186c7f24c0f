"""Radix select: the k-th largest key of a row by histograms of its digits, then ties by index, then the mask.

Every program of a row works out the digit that the last pass found for itself, so that a pass is one launch.
"""

import triton
import triton.language as tl

from .device import BLOCK, SPAN, budget, marked, reach
from .wide import (
    ABOVE,
    AT_HIGH,
    AT_LOW,
    BETWEEN,
    BINS,
    DIGIT,
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
    room_of,
    row_of,
    span_of,
    tile_keys,
)

__all__ = ["histogram_kernel", "mark_kernel", "tie_kernel"]

FULL = tl.constexpr(0)  # read the whole row
INSIDE = tl.constexpr(1)  # read the gathered keys
KNOWN = tl.constexpr(2)  # the threshold is an end of the bracket


@triton.jit
def resolve(line, keep, NARROW: tl.constexpr):
    """Where the threshold is to be sought: mode, the key that counting starts from, and how many are still needed."""
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
    """Whether a pass has anything to tell: the keys inside the bracket may share their upper digits."""
    spread = (tl.load(line + HIGH) - tl.load(line + LOW)) >> SHIFT
    return (mode == FULL) | ((mode == INSIDE) & (spread > 0))


@triton.jit
def located(line, counts, mode, need, PASS: tl.constexpr, COUNT: tl.constexpr):
    """Prefix and need after PASS of COUNT passes; every program of a row works out, and writes, the same."""
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
        told = is_counted(line, mode, DIGIT * (COUNT - PASS))
        prefix = (prefix << DIGIT) | tl.where(told, digit, 0)
        need = need - tl.where(told, above, 0)
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
    """One radix pass: how many of the keys that match the prefix have each digit."""
    part, member, values, mask, row, place, span, own = row_of(starts, parts, members, scores, kept, PARTS, FORM)
    COUNT: tl.constexpr = (FORM.bits + 7) // DIGIT
    SHIFT: tl.constexpr = DIGIT * (COUNT - 1 - PASS)
    line, counts = state + place * STATE_FIELDS, counts + place * (COUNT * BINS)
    mode, base, need = resolve(line, budget(part, row, row >= 0, True), FORM.narrow)
    prefix, need = located(line, counts, mode, need, PASS, COUNT)
    if PASS > 0:
        tl.store(line + PASSES + 2 * (PASS - 1), prefix)
        tl.store(line + PASSES + 2 * (PASS - 1) + 1, need)
    prefix, base = prefix.to(tl.uint32), base.to(tl.uint32)
    found = tl.zeros([BINS], tl.int32)
    if mode == FULL:
        found = count_row(part, member, values, mask, span, length, prefix, SHIFT, PASS, FORM)
    elif is_counted(line, mode, SHIFT):
        gathered = tl.load(spans + own * SPAN_FIELDS + GATHERED)
        found = count_inside(room_of(inside, own, length, FORM)[0], gathered, base, prefix, SHIFT, PASS, FORM)
    tl.atomic_add(counts + PASS * BINS + tl.arange(0, BINS), found.to(counts.dtype.element_ty), mask=found > 0)


@triton.jit
def count_row(
    part, member, values, mask, span, length, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr
):
    """The histogram of a span's keys."""
    TILE: tl.constexpr = FORM.tile // 2  # a histogram takes registers of its own
    found = tl.zeros([BINS], tl.int32)
    begin, end, blocks = span_of(part, span, length, FORM)
    for at in range(begin, end, TILE):
        slot = at + tl.arange(0, TILE)
        keys = tile_keys(part, member, values, mask, slot, slot < blocks, FORM)
        found += digits_of(keys, slot < blocks, prefix, SHIFT, PASS)
    return found


@triton.jit
def count_inside(room, gathered, base, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr):
    """The histogram of the keys that a span gathered, counted from the lower end of the bracket."""
    TILE: tl.constexpr = FORM.tile // 2
    found = tl.zeros([BINS], tl.int32)
    for begin in range(0, gathered, TILE):
        at = begin + tl.arange(0, TILE)
        keys = tl.load(room + at, mask=at < gathered, other=0) - base
        found += digits_of(keys, at < gathered, prefix, SHIFT, PASS)
    return found


@triton.jit
def digits_of(keys, real, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr):
    """The histogram of one digit of the keys that match the prefix."""
    if PASS > 0:
        real = real & ((keys >> (SHIFT + DIGIT)) == prefix)
    return tl.histogram(((keys >> SHIFT) & (BINS - 1)).to(tl.int32), BINS, mask=real)


@triton.jit(do_not_specialize=["length"])
def tie_kernel(
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
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The threshold, and how many keys of each span equal it."""
    part, member, values, mask, row, place, span, own = row_of(starts, parts, members, scores, kept, PARTS, FORM)
    COUNT: tl.constexpr = (FORM.bits + 7) // DIGIT
    line, counts = state + place * STATE_FIELDS, counts + place * (COUNT * BINS)
    mode, threshold, need = resolve(line, budget(part, row, row >= 0, True), FORM.narrow)
    if mode != KNOWN:
        prefix, need = located(line, counts, mode, need, COUNT, COUNT)
        threshold += prefix
    tl.store(line + THRESHOLD, threshold)
    tl.store(line + NEED, need)
    limit = threshold.to(tl.uint32)
    record = spans + own * SPAN_FIELDS
    if mode == KNOWN:
        tied = tl.load(record + tl.where(threshold == tl.load(line + HIGH), SPAN_HIGH, SPAN_LOW))
    elif mode == INSIDE:
        tied = equal_inside(room_of(inside, own, length, FORM)[0], tl.load(record + GATHERED), limit, FORM)
    else:
        tied = equal_in_row(part, member, values, mask, span, length, limit, FORM)
    tl.store(record + TIED, tied)


@triton.jit
def equal_inside(room, gathered, limit, FORM: tl.constexpr):
    """How many of the keys that a span gathered equal the threshold."""
    equal = tl.full([FORM.tile], 0, tl.int32)
    for begin in range(0, gathered, FORM.tile):
        at = begin + tl.arange(0, FORM.tile)
        equal += ((at < gathered) & (tl.load(room + at, mask=at < gathered, other=0) == limit)).to(tl.int32)
    return tl.sum(equal)


@triton.jit
def equal_in_row(part, member, values, mask, span, length, limit, FORM: tl.constexpr):
    """How many keys of a span equal the threshold."""
    equal = tl.full([FORM.tile], 0, tl.int32)
    begin, end, blocks = span_of(part, span, length, FORM)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        keys = tile_keys(part, member, values, mask, slot, slot < blocks, FORM)
        equal += ((slot < blocks) & (keys == limit)).to(tl.int32)
    return tl.sum(equal)


@triton.jit(do_not_specialize=["length"])
def mark_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    state,
    spans,
    length,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The mask: keys above the threshold, and of those equal to it the first ones by index."""
    part, member, values, mask, _, place, span, own = row_of(starts, parts, members, scores, kept, PARTS, FORM)
    line = state + place * STATE_FIELDS
    limit, need = tl.load(line + THRESHOLD).to(tl.uint32), tl.load(line + NEED)
    ahead = tl.load(part + SPAN) + span
    seen = tied_before(spans + (own - ahead) * SPAN_FIELDS, ahead)
    every = seen < need
    cuts = every & (seen + tl.load(spans + own * SPAN_FIELDS + TIED) > need)  # the one span that keeps some of its ties
    begin, end, blocks = span_of(part, span, length, FORM)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        real = slot < blocks
        keys = tile_keys(part, member, values, mask, slot, real, FORM)
        tied = keys == limit
        if cuts:
            ranks = tl.cumsum(tied.to(tl.int32), 0) + seen
            chosen = (keys > limit) | (tied & (ranks <= need))
            seen += tl.sum(tied.to(tl.int32))
        else:
            chosen = (keys > limit) | (tied & every)
        marked(mask + reach(part, member, slot, BLOCK, True, FORM), chosen & (keys > 0), real, FORM)


@triton.jit
def tied_before(records, count):
    """Ties in the spans of a row before this one."""
    total = tl.zeros([1024], tl.int64)
    for begin in range(0, count, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(records + at * SPAN_FIELDS + TIED, mask=at < count, other=0).to(tl.int64)
    return tl.sum(total)
