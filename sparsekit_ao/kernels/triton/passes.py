"""Radix select: the k-th largest key of a row by histograms of its digits, then ties by index, then the mask.

Every program of a row works out the digit that the last pass found for itself, so that a pass is one launch.
"""

import triton
import triton.language as tl

from .device import (
    BLOCK_MASK,
    BLOCK_SIZES,
    BLOCKS,
    MEMBER_FIELDS,
    ROW_SPANS,
    SPAN,
    SPAN_ORIGIN,
    STATE,
    as_mask,
    budget,
    field,
    multiple,
    walk,
)
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
    bases,
    place_of,
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


@triton.jit
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
    PASS: tl.constexpr,
    COUNT: tl.constexpr,
    NARROW: tl.constexpr,
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
    """Radix pass PASS of COUNT: how many of the keys that match the prefix have each digit."""
    which, part, row, span = place_of(starts, parts, PARTS)
    member = members + which * MEMBER_FIELDS
    values, mask = bases(part, member, row, scores, kept, NESTS, UNITS, DTYPE, MASK_DTYPE, STORED, ALIGNED, BIG)
    place = tl.load(part + STATE) + row
    line, counts = state + place * STATE_FIELDS, counts + place * (COUNT * BINS)
    mode, base, need = resolve(line, budget(part, row, row >= 0, True), NARROW)
    prefix, need = located(line, counts, mode, need, PASS, COUNT)
    if PASS > 0:
        tl.store(line + PASSES + 2 * (PASS - 1), prefix)
        tl.store(line + PASSES + 2 * (PASS - 1) + 1, need)
    SHIFT: tl.constexpr = DIGIT * (COUNT - 1 - PASS)
    prefix, base = prefix.to(tl.uint32), base.to(tl.uint32)
    found = tl.zeros([BINS], tl.int32)
    if mode == FULL:
        blocks = field(part, BLOCKS, BIG)
        if EVEN:
            blocks = multiple(blocks, 16)
        begin = (span if BIG else span.to(tl.int32)) * SPAN_TILES
        for tile in range(begin, tl.minimum(begin + SPAN_TILES, tl.cdiv(blocks, TILE))):
            slot = tile * TILE + tl.arange(0, TILE)
            real = slot < blocks
            keys = tile_keys(part, member, values, mask, slot, real, NESTS, UNITS, SIGNED, STAGE, ALIGNED, BIG)
            found += digits_of(keys, real, prefix, SHIFT, PASS)
    elif is_counted(line, mode, SHIFT):
        own = tl.load(part + SPAN_ORIGIN) + row * tl.load(part + ROW_SPANS) + tl.load(part + SPAN) + span
        gathered = tl.load(spans + own * SPAN_FIELDS + GATHERED)
        for begin in range(0, gathered, TILE):
            at = begin + tl.arange(0, TILE)
            keys = tl.load(inside + own * ROOM + at, mask=at < gathered, other=0) - base
            found += digits_of(keys, at < gathered, prefix, SHIFT, PASS)
    tl.atomic_add(counts + PASS * BINS + tl.arange(0, BINS), found.to(counts.dtype.element_ty), mask=found > 0)


@triton.jit
def digits_of(keys, real, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr):
    """The histogram of one digit of the keys that match the prefix."""
    if PASS > 0:
        real = real & ((keys >> (SHIFT + DIGIT)) == prefix)
    return tl.histogram(((keys >> SHIFT) & (BINS - 1)).to(tl.int32), BINS, mask=real)


@triton.jit
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
    COUNT: tl.constexpr,
    NARROW: tl.constexpr,
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
    """The threshold, and how many keys of each span equal it."""
    which, part, row, span = place_of(starts, parts, PARTS)
    member = members + which * MEMBER_FIELDS
    values, mask = bases(part, member, row, scores, kept, NESTS, UNITS, DTYPE, MASK_DTYPE, STORED, ALIGNED, BIG)
    place = tl.load(part + STATE) + row
    line, counts = state + place * STATE_FIELDS, counts + place * (COUNT * BINS)
    mode, base, need = resolve(line, budget(part, row, row >= 0, True), NARROW)
    if mode == KNOWN:
        threshold = base
    else:
        prefix, need = located(line, counts, mode, need, COUNT, COUNT)
        threshold = base + prefix
    tl.store(line + THRESHOLD, threshold)
    tl.store(line + NEED, need)
    limit = threshold.to(tl.uint32)
    own = tl.load(part + SPAN_ORIGIN) + row * tl.load(part + ROW_SPANS) + tl.load(part + SPAN) + span
    record = spans + own * SPAN_FIELDS
    if mode == KNOWN:
        tied = tl.load(record + tl.where(threshold == tl.load(line + HIGH), SPAN_HIGH, SPAN_LOW))
        tl.store(record + TIED, tied)
    elif mode == INSIDE:
        equal = tl.zeros([TILE], tl.int32)
        gathered = tl.load(record + GATHERED)
        for from_slot in range(0, gathered, TILE):
            at = from_slot + tl.arange(0, TILE)
            found = tl.load(inside + own * ROOM + at, mask=at < gathered, other=0)
            equal += ((at < gathered) & (found == limit)).to(tl.int32)
        tl.store(record + TIED, tl.sum(equal))
    else:
        same = tl.zeros([TILE], tl.int32)
        blocks = field(part, BLOCKS, BIG)
        if EVEN:
            blocks = multiple(blocks, 16)
        begin = (span if BIG else span.to(tl.int32)) * SPAN_TILES
        for tile in range(begin, tl.minimum(begin + SPAN_TILES, tl.cdiv(blocks, TILE))):
            slot = tile * TILE + tl.arange(0, TILE)
            real = slot < blocks
            keys = tile_keys(part, member, values, mask, slot, real, NESTS, UNITS, SIGNED, STAGE, ALIGNED, BIG)
            same += (real & (keys == limit)).to(tl.int32)
        tl.store(record + TIED, tl.sum(same))


@triton.jit
def mark_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    state,
    spans,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN_TILES: tl.constexpr,
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
    """The mask: keys above the threshold, and of those equal to it the first ones by index."""
    which, part, row, span = place_of(starts, parts, PARTS)
    member = members + which * MEMBER_FIELDS
    values, mask = bases(part, member, row, scores, kept, NESTS, UNITS, DTYPE, MASK_DTYPE, STORED, ALIGNED, BIG)
    line = state + (tl.load(part + STATE) + row) * STATE_FIELDS
    limit, need = tl.load(line + THRESHOLD).to(tl.uint32), tl.load(line + NEED)
    origin = tl.load(part + SPAN_ORIGIN) + row * tl.load(part + ROW_SPANS)
    ahead = tl.load(part + SPAN) + span
    seen = tied_before(spans + origin * SPAN_FIELDS, ahead)
    own = tl.load(spans + (origin + ahead) * SPAN_FIELDS + TIED)
    cuts = (seen < need) & (seen + own > need)  # the one span of the row that keeps some of its ties
    every = seen < need
    blocks = field(part, BLOCKS, BIG)
    if EVEN:
        blocks = multiple(blocks, 16)
    begin = (span if BIG else span.to(tl.int32)) * SPAN_TILES
    for tile in range(begin, tl.minimum(begin + SPAN_TILES, tl.cdiv(blocks, TILE))):
        slot = tile * TILE + tl.arange(0, TILE)
        real = slot < blocks
        keys = tile_keys(part, member, values, mask, slot, real, NESTS, UNITS, SIGNED, STAGE, ALIGNED, BIG)
        tied = keys == limit
        if cuts:
            ranks = tl.cumsum(tied.to(tl.int32), 0) + seen
            chosen = (keys > limit) | (tied & (ranks <= need))
            seen += tl.sum(tied.to(tl.int32))
        else:
            chosen = (keys > limit) | (tied & every)
        chosen = chosen & (keys > 0)
        m_at = walk(slot, part + BLOCK_SIZES, member + BLOCK_MASK, NESTS[1], 0, UNITS[3], ALIGNED, BIG)
        if STAGE:
            old = tl.load(mask + m_at, mask=real, other=0)
            tl.store(mask + m_at, tl.where(chosen, old, 0), mask=real)
        else:
            tl.store(mask + m_at, as_mask(chosen, MASK_DTYPE), mask=real)


@triton.jit
def tied_before(records, count):
    """Ties in the spans of a row before this one."""
    total = tl.zeros([1024], tl.int64)
    for begin in range(0, count, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(records + at * SPAN_FIELDS + TIED, mask=at < count, other=0).to(tl.int64)
    return tl.sum(total)
