"""Kernels that select in rows too long for one program: the k-th largest key of each row, then the mask.

Programs work on spans of consecutive tiles, each of which counts its ties, so that these go by index; see README.md
beside this. `part` is a `lowering.Operand`, `FORM` a `launches.Form`, `spans` a `launches.Spans`.
"""

import triton
import triton.language as tl

from .ranking import budget, offset_of, order_key, read, write_mask

DIGIT = tl.constexpr(8)
BINS = tl.constexpr(256)


@triton.jit
def row_keys(part, row, slot, real, FORM: tl.constexpr):
    """Keys of these slots of a row, all real if `real` is None; 0 where there is none or an earlier stage pruned it."""
    values = part[0] + offset_of(row, part[2][0], part[2][1])
    x = read(values + offset_of(slot, part[3][0], part[3][1]), real)
    if FORM.masked:
        kept = read(mask_at(part, row, slot), real) != 0
        x = tl.where(kept, x, 0.0).to(x.dtype)
    keys = order_key(x, FORM.signed)
    if FORM.within_mask:
        keys = tl.where(kept, keys, 0).to(tl.uint32)
    return keys if real is None else tl.where(real, keys, 0).to(tl.uint32)


@triton.jit
def mask_at(part, row, slot):
    """Where the mask of these slots of a row is."""
    return part[1] + offset_of(row, part[2][0], part[2][2]) + offset_of(slot, part[3][0], part[3][2])


@triton.jit
def span_of(program, spans, FORM: tl.constexpr):
    """Row of a program, the number of its span, and the first slot of the span and the slot after the last."""
    row, span = program // spans.per_row, program % spans.per_row
    begin = (span if FORM.big else span.to(tl.int32)) * (spans.length * FORM.tile)
    end = tl.minimum(begin + spans.length * FORM.tile, spans.width)
    return row, row * spans.row_spans + spans.first + span, begin, end


@triton.jit
def digits_found(counts, need, PASSES: tl.constexpr):
    """Return the leading digits of the k-th key after some passes, and how many keys with these digits are kept."""
    prefix = 0 * need
    bins = tl.arange(0, BINS)
    for at in tl.static_range(PASSES):
        of_digit = tl.load(counts + at * BINS + bins).to(tl.int64)
        digit = tl.maximum(tl.sum((tl.cumsum(of_digit, 0, reverse=True) >= need).to(tl.int64)) - 1, 0)
        need -= tl.sum(tl.where(bins > digit, of_digit, 0))
        prefix = (prefix << DIGIT) | digit
    return prefix, need


@triton.jit(do_not_specialize=["keep"])
def histogram_kernel(part, spans, counts, keep, KEEP: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr):
    """One radix pass: the histogram of one digit of the keys that have the digits found before."""
    TILE: tl.constexpr = FORM.tile // 2  # the histogram itself takes registers
    SHIFT: tl.constexpr = DIGIT * (FORM.digits - 1 - PASS)
    row, _, begin, end = span_of(tl.program_id(0).to(tl.int64), spans, FORM)
    counts += row * (FORM.digits * BINS)
    prefix = digits_found(counts, budget(keep, row, row >= 0, KEEP).to(tl.int64), PASS)[0].to(tl.uint32)
    histogram = tl.zeros([BINS], tl.int32)
    for at in range(begin, end, TILE):
        slot = at + tl.arange(0, TILE)
        keys = row_keys(part, row, slot, slot < spans.width, FORM)
        histogram += digit_histogram(keys, slot < spans.width, prefix, SHIFT, PASS)
    bins = PASS * BINS + tl.arange(0, BINS)
    tl.atomic_add(counts + bins, histogram.to(counts.dtype.element_ty), mask=histogram > 0, sem="relaxed")


@triton.jit
def digit_histogram(keys, real, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr):
    """The histogram of one digit of the keys that match the prefix."""
    if PASS > 0:
        real = real & ((keys >> (SHIFT + DIGIT)) == prefix)
    return tl.histogram(((keys >> SHIFT) & (BINS - 1)).to(tl.int32), BINS, mask=real)


@triton.jit
def threshold_of(counts, row, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """The k-th key of a row, above every key if none is kept, and how many keys equal to it are kept."""
    needed = budget(keep, row, row >= 0, KEEP).to(tl.int64)
    return digits_found(counts + row * (FORM.digits * BINS), needed, FORM.digits)


@triton.jit(do_not_specialize=["keep"])
def tie_kernel(part, spans, ties, counts, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """How many keys of each span equal the k-th one of the row."""
    row, span, begin, end = span_of(tl.program_id(0).to(tl.int64), spans, FORM)
    limit, _ = threshold_of(counts, row, keep, KEEP, FORM)
    tied = tl.full([FORM.tile], 0, tl.int32)
    for at in range(begin, end, FORM.tile):
        slot = at + tl.arange(0, FORM.tile)
        keys = row_keys(part, row, slot, slot < spans.width, FORM)
        tied += ((slot < spans.width) & (keys == limit.to(tl.uint32))).to(tl.int32)
    tl.store(ties + span, tl.sum(tied))


@triton.jit(do_not_specialize=["keep"])
def mark_kernel(part, spans, ties, counts, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """Write the mask: keys above the k-th one, and of those equal to it the first ones by index."""
    # backwards: the end of a tensor, which was read last, may still be in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, span, begin, end = span_of(program.to(tl.int64), spans, FORM)
    limit, need = threshold_of(counts, row, keep, KEEP, FORM)
    limit = limit.to(tl.uint32)
    before = ties_before(ties, row * spans.row_spans, span)
    tied = tl.load(ties + span)
    if (before < need) & (before + tied > need):  # the one span that keeps only its first ties
        need -= before
        for at in range(begin, end, FORM.tile):
            slot = at + tl.arange(0, FORM.tile)
            real = slot < spans.width
            keys = row_keys(part, row, slot, real, FORM)
            equal = (keys == limit).to(tl.int32)
            chosen = (keys > limit) | ((equal > 0) & (tl.cumsum(equal, 0) <= need))
            need -= tl.sum(equal)
            write_mask(mask_at(part, row, slot), chosen & (keys > 0), real, FORM.within_mask)
    else:
        dropped = tl.where(before < need, tl.maximum(limit, 1) - 1, limit)
        whole = begin + (end - begin) // FORM.tile * FORM.tile
        for at in range(begin, whole, FORM.tile):
            slot = at + tl.arange(0, FORM.tile)
            keys = row_keys(part, row, slot, None, FORM)
            write_mask(mask_at(part, row, slot), keys > dropped, None, FORM.within_mask)
        if whole < end:
            slot = whole + tl.arange(0, FORM.tile)
            real = slot < spans.width
            write_mask(
                mask_at(part, row, slot), row_keys(part, row, slot, real, FORM) > dropped, real, FORM.within_mask
            )


@triton.jit
def ties_before(ties, first, span):
    """Ties in the spans of a row from the first one up to a span."""
    total = tl.zeros([1024], tl.int64)
    for begin in range(first, span, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(ties + at, mask=at < span, other=0).to(tl.int64)
    return tl.sum(total)
