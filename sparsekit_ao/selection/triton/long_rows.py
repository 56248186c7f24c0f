"""Kernels that select in rows too long for one program: the k-th largest key of each row, then the mask.

Programs work on spans of consecutive tiles, each with its own record, so that ties go by index; see README.md beside
this. `part` is a `lowering.Operand`, `FORM` a `launches.Form`, `spans` a `launches.Spans`.
"""

import triton
import triton.language as tl

from .ranking import budget, keys_of_ranks, offset_of, order_key, read, slots_apart, write_mask

# Columns of a row's state, int64, zero at first.
LOW = tl.constexpr(0)  # the bracket
HIGH = tl.constexpr(1)
ABOVE = tl.constexpr(2)  # keys above HIGH,
AT_HIGH = tl.constexpr(3)  # equal to it and to LOW, if these are counted APART,
INSIDE = tl.constexpr(4)  # and of the bracket, without those counted apart: these are gathered
AT_LOW = tl.constexpr(5)
OVERFLOW = tl.constexpr(6)  # spans with more keys to gather than their buffers hold
APART = tl.constexpr(7)  # whether many keys equal an end of the bracket, so that they are counted instead of gathered
STATE_FIELDS = tl.constexpr(8)

# Columns of a span's record, int32, each written before it is read.
GATHERED = tl.constexpr(0)
SPAN_HIGH = tl.constexpr(1)
SPAN_LOW = tl.constexpr(2)
TIED = tl.constexpr(3)
RECORD_FIELDS = tl.constexpr(4)

READ_ROW = tl.constexpr(0)  # what radix passes go over: the row,
READ_GATHERED = tl.constexpr(1)  # what was gathered from it,
READ_NOTHING = tl.constexpr(2)  # or nothing, since the k-th key is an end of the bracket

SAMPLE_TILE = tl.constexpr(1024)  # keys that a program samples
MANY = tl.constexpr(64)  # ends are counted apart if more than one in this many samples equals one of them
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
    """Row of a program, the number of its record, and the first slot of its span and the slot after the last."""
    row, span = program // spans.per_row, program % spans.per_row
    begin = (span if FORM.big else span.to(tl.int32)) * (spans.length * FORM.tile)
    end = tl.minimum(begin + spans.length * FORM.tile, spans.width)
    return row, row * spans.row_spans + spans.first + span, begin, end


@triton.jit
def sample_kernel(part, width, samples, taken, first, CAPACITY: tl.constexpr, FORM: tl.constexpr):
    """Keys at `taken` scattered slots of each row of a part, one from each equal stretch."""
    tiles = (taken + SAMPLE_TILE - 1) // SAMPLE_TILE
    program = tl.program_id(0).to(tl.int64)
    row, at = program // tiles, (program % tiles).to(tl.int32) * SAMPLE_TILE + tl.arange(0, SAMPLE_TILE)
    stretch, rest = width // taken, width % taken
    wide = at.to(tl.uint32)  # 32 bits are enough: a row has less than 2^15 samples
    jitter = wide * 2654435761 % tl.maximum(stretch, 1).to(tl.uint32)  # no fixed stride over the weight
    further = (wide * rest.to(tl.uint32) // taken.to(tl.uint32) + jitter).to(tl.int32)
    slot = at.to(tl.int64) * stretch + further if FORM.big else at * stretch + further
    tl.store(samples + row * CAPACITY + first + at, row_keys(part, row, slot, at < taken, FORM), mask=at < taken)


@triton.jit(do_not_specialize=["keep"])
def bracket_kernel(samples, taken, width, state, keep, KEEP: tl.constexpr, CAPACITY: tl.constexpr, BITS: tl.constexpr):
    """Two keys that very likely bracket the k-th one of a row, from the row's samples."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CAPACITY)
    keys = tl.load(samples + row * CAPACITY + at, mask=at < taken, other=0)
    share = budget(keep, row, row >= 0, KEEP).to(tl.float32) / width.to(tl.float32)
    rank = share * taken.to(tl.float32)
    margin = 4 * tl.sqrt(rank * tl.maximum(1 - share, 0.0)) + 8  # four standard deviations of a sample's rank
    upper, lower = tl.floor(rank - margin).to(tl.int32), tl.ceil(rank + margin).to(tl.int32)
    high, low = keys_of_ranks(keys, upper, lower, BITS)
    line = state + row * STATE_FIELDS + tl.arange(0, 1)
    tl.store(line + HIGH, high.to(tl.int64))
    tl.store(line + LOW, low.to(tl.int64))
    most = tl.maximum(equal_samples(keys, at < taken, high), equal_samples(keys, at < taken, low))
    tl.store(line + APART, (most * MANY > taken) & (high == high))


@triton.jit
def equal_samples(keys, real, key):
    """How many samples equal a key [1]."""
    return tl.sum((real & (keys == tl.broadcast_to(key, keys.shape))).to(tl.int32))


@triton.jit
def narrow_kernel(part, spans, state, records, gathered, FORM: tl.constexpr):
    """One pass over the rows: gather the keys of the bracket; count those above it, and apart those at its ends."""
    TILE: tl.constexpr = 2 * FORM.tile  # the scan of `gather` costs as much for two tiles as for one
    LENGTH: tl.constexpr = TILE // FORM.runs
    row, record, begin, end = span_of(tl.program_id(0).to(tl.int64), spans, FORM)
    line = state + row * STATE_FIELDS
    bracket = bracket_of(line)
    capacity = spans.length * (FORM.tile // 8)  # an eighth of the span's slots
    buffer = gathered + record * capacity
    whole = begin + (end - begin) // TILE * TILE
    below = tl.full([FORM.runs], 0, tl.int32)
    at_high, at_low, inside = below, below, tl.full((), 0, tl.int32)
    for at in range(begin, whole, TILE):
        keys = row_keys(part, row, at + tl.arange(0, TILE), None, FORM)
        below, at_high, at_low, inside = gather(
            keys, bracket, below, at_high, at_low, buffer, capacity, inside, LENGTH, FORM
        )
    if whole < end:
        slot = whole + tl.arange(0, TILE)
        keys = row_keys(part, row, slot, slot < spans.width, FORM)
        below, at_high, at_low, inside = gather(
            keys, bracket, below, at_high, at_low, buffer, capacity, inside, LENGTH, FORM
        )
    spread = tl.load(line + LOW) < tl.load(line + HIGH)
    high_count, low_count = tl.sum(at_high), tl.where(spread, tl.sum(at_low), 0)
    above = (end - begin + TILE - 1) // TILE * TILE - tl.sum(below) - inside - tl.where(spread, high_count, 0)
    fields = records + record * RECORD_FIELDS
    tl.store(fields + GATHERED, inside)
    tl.store(fields + SPAN_HIGH, high_count)
    tl.store(fields + SPAN_LOW, low_count)
    tl.atomic_add(line + ABOVE, above.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + AT_HIGH, high_count.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + INSIDE, inside.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + AT_LOW, low_count.to(tl.int64), sem="relaxed")
    if inside > capacity:
        tl.atomic_add(line + OVERFLOW, 1, sem="relaxed")


@triton.jit
def least_gathered(line):
    """The least key to gather; what is gathered are differences from it."""
    return tl.maximum(tl.load(line + LOW) + tl.load(line + APART), 1)  # key 0 marks slots that must not be kept


@triton.jit
def bracket_of(line):
    """Whether ends are counted apart; the least key to gather, how many follow it, and the ends relative to it."""
    apart, high, least = tl.load(line + APART), tl.load(line + HIGH), least_gathered(line)
    width = tl.maximum(high - apart + 1 - least, 0)
    low = tl.load(line + LOW) - least
    return apart, least.to(tl.uint32), width.to(tl.uint32), (high - least).to(tl.uint32), low.to(tl.uint32)


@triton.jit
def gather(keys, bracket, below, at_high, at_low, buffer, capacity, before, LENGTH: tl.constexpr, FORM: tl.constexpr):
    """Count a tile's keys, and append those to gather to the `before` earlier ones, unless the buffer overflows."""
    apart, least, width, high, low = bracket
    differences = keys - 1 - (least - 1)  # in this order nothing is computed for the 1 that `order_key` adds
    # The keys that a thread has read are its run. One scan over the runs says where each run goes, so that it costs an
    # element a thirty-second, and no key moves to another thread.
    turned = tl.permute(tl.reshape(differences, [LENGTH // FORM.vector, FORM.runs, FORM.vector]), 1, 0, 2)
    runs = slots_apart(tl.reshape(turned, [FORM.runs, LENGTH]), LENGTH)
    last = (0xFFFFFFFF - least).to(tl.uint32)  # differences of lower keys wrap, to more than any other
    count = tl.full([FORM.runs], 0, tl.int32)
    for i in tl.static_range(LENGTH):
        below += (runs[i] > last).to(tl.int32)
        count += (runs[i] < width).to(tl.int32)
    if apart != 0:
        for i in tl.static_range(LENGTH):
            at_high += (runs[i] == high).to(tl.int32)
            at_low += (runs[i] == low).to(tl.int32)
    after = before + tl.sum(count)
    width = tl.where(after <= capacity, width, 0).to(tl.uint32)
    address = (buffer + (before + tl.cumsum(count, 0) - count)).to(tl.int64)  # sums of pointers are computed many times
    for i in tl.static_range(LENGTH):
        chosen = runs[i] < width
        tl.store(address.to(tl.pointer_type(tl.uint32)), runs[i], mask=chosen)
        address += tl.where(chosen, 4, 0).to(tl.int64)
    return below, at_high, at_low, after


@triton.jit
def resolve(line, keep, NARROW: tl.constexpr):
    """What radix passes read; the k-th key if it is an end of the bracket; of what is read, how many keys to find."""
    source = tl.full((), READ_ROW, tl.int32)
    limit, need = 0 * keep, keep
    if NARROW:
        first = tl.load(line + ABOVE)
        second = first + tl.load(line + AT_HIGH)
        third = second + tl.load(line + INSIDE)
        is_high, is_low = (keep > first) & (keep <= second), (keep > third) & (keep <= third + tl.load(line + AT_LOW))
        is_inside = (keep > second) & (keep <= third) & (tl.load(line + OVERFLOW) == 0)
        source = tl.where(is_inside, READ_GATHERED, tl.where(is_high | is_low | (keep <= 0), READ_NOTHING, READ_ROW))
        limit = tl.where(is_high, tl.load(line + HIGH), tl.load(line + LOW))
        limit = tl.where(keep <= 0, 0xFFFFFFFF, limit)  # above every key
        need = keep - tl.where(is_high, first, tl.where(is_inside, second, tl.where(is_low, third, 0)))
    return source, limit, need


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
def histogram_kernel(
    part, spans, state, records, gathered, counts, keep, KEEP: tl.constexpr, PASS: tl.constexpr, FORM: tl.constexpr
):
    """One radix pass: the histogram of one digit of the keys that have the digits found before."""
    TILE: tl.constexpr = FORM.tile // 2  # the histogram itself takes registers
    SHIFT: tl.constexpr = DIGIT * (FORM.digits - 1 - PASS)
    row, record, begin, end = span_of(tl.program_id(0).to(tl.int64), spans, FORM)
    counts += row * (FORM.digits * BINS)
    source, _, need = resolve(state + row * STATE_FIELDS, budget(keep, row, row >= 0, KEEP).to(tl.int64), FORM.narrow)
    prefix = digits_found(counts, need, PASS)[0].to(tl.uint32)
    histogram = tl.zeros([BINS], tl.int32)
    if source == READ_ROW:
        for at in range(begin, end, TILE):
            slot = at + tl.arange(0, TILE)
            keys = row_keys(part, row, slot, slot < spans.width, FORM)
            histogram += digit_histogram(keys, slot < spans.width, prefix, SHIFT, PASS)
    elif source == READ_GATHERED:
        buffer = gathered + record * (spans.length * (FORM.tile // 8))
        least = least_gathered(state + row * STATE_FIELDS).to(tl.uint32)
        count = tl.load(records + record * RECORD_FIELDS + GATHERED)
        for at in range(0, count, TILE):
            slot = at + tl.arange(0, TILE)
            histogram += digit_histogram(
                tl.load(buffer + slot, mask=slot < count, other=0) + least, slot < count, prefix, SHIFT, PASS
            )
    bins = PASS * BINS + tl.arange(0, BINS)
    tl.atomic_add(counts + bins, histogram.to(counts.dtype.element_ty), mask=histogram > 0, sem="relaxed")


@triton.jit
def digit_histogram(keys, real, prefix, SHIFT: tl.constexpr, PASS: tl.constexpr):
    """The histogram of one digit of the keys that match the prefix."""
    if PASS > 0:
        real = real & ((keys >> (SHIFT + DIGIT)) == prefix)
    return tl.histogram(((keys >> SHIFT) & (BINS - 1)).to(tl.int32), BINS, mask=real)


@triton.jit
def threshold_of(state, counts, row, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """What was read, the k-th key of a row, and how many keys equal to it are kept."""
    line, counts = state + row * STATE_FIELDS, counts + row * (FORM.digits * BINS)
    source, limit, need = resolve(line, budget(keep, row, row >= 0, KEEP).to(tl.int64), FORM.narrow)
    if source != READ_NOTHING:
        limit, need = digits_found(counts, need, FORM.digits)
    return source, limit, need


@triton.jit(do_not_specialize=["keep"])
def tie_kernel(part, spans, state, records, gathered, counts, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """How many keys of each span equal the k-th one of the row."""
    row, record, begin, end = span_of(tl.program_id(0).to(tl.int64), spans, FORM)
    source, limit, _ = threshold_of(state, counts, row, keep, KEEP, FORM)
    fields = records + record * RECORD_FIELDS
    tied = tl.full([FORM.tile], 0, tl.int32)
    if source == READ_ROW:
        for at in range(begin, end, FORM.tile):
            slot = at + tl.arange(0, FORM.tile)
            keys = row_keys(part, row, slot, slot < spans.width, FORM)
            tied += ((slot < spans.width) & (keys == limit.to(tl.uint32))).to(tl.int32)
        total = tl.sum(tied)
    elif source == READ_GATHERED:
        buffer = gathered + record * (spans.length * (FORM.tile // 8))
        least = least_gathered(state + row * STATE_FIELDS).to(tl.uint32)
        count = tl.load(fields + GATHERED)
        for at in range(0, count, FORM.tile):
            slot = at + tl.arange(0, FORM.tile)
            keys = tl.load(buffer + slot, mask=slot < count, other=0) + least
            tied += ((slot < count) & (keys == limit.to(tl.uint32))).to(tl.int32)
        total = tl.sum(tied)
    else:
        is_high = limit == tl.load(state + row * STATE_FIELDS + HIGH)
        total = tl.load(fields + tl.where(is_high, SPAN_HIGH, SPAN_LOW))
    tl.store(fields + TIED, total)


@triton.jit(do_not_specialize=["keep"])
def mark_kernel(part, spans, state, records, counts, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """Write the mask: keys above the k-th one, and of those equal to it the first ones by index."""
    # backwards: the end of a tensor, which was read last, may still be in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, record, begin, end = span_of(program.to(tl.int64), spans, FORM)
    _, limit, need = threshold_of(state, counts, row, keep, KEEP, FORM)
    limit = limit.to(tl.uint32)
    before = ties_before(records, row * spans.row_spans, record)
    tied = tl.load(records + record * RECORD_FIELDS + TIED)
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
def ties_before(records, first, record):
    """Ties in the spans of a row from the first one up to a record."""
    total = tl.zeros([1024], tl.int64)
    for begin in range(first, record, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(records + at * RECORD_FIELDS + TIED, mask=at < record, other=0).to(tl.int64)
    return tl.sum(total)
