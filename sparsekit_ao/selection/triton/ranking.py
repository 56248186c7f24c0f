"""Arithmetic on tiles in registers: addresses, integer keys ordered as scores are, exact selection in short rows."""

import triton
import triton.language as tl


@triton.jit
def offset_of(index, sizes, steps):
    """The offset of `index` in a nest of loops, innermost first."""
    rest = index
    total = index * 0
    for k in tl.static_range(len(sizes)):
        at = rest
        if k < len(sizes) - 1:
            at = rest % sizes[k]
            rest = rest // sizes[k]
        total += at * steps[k]
    return total


@triton.jit
def budget(keep, scope, valid, KEEP: tl.constexpr):
    """Blocks kept in these scopes: a number, or read from device memory, one for all or one for each scope."""
    if KEEP == "each":
        kept = tl.load(keep + scope, mask=valid, other=0)
    elif KEEP == "one":
        kept = tl.load(keep) + 0 * scope
    else:
        kept = keep + 0 * scope
    return kept


@triton.jit
def write_mask(at, chosen, exists, AMONG_KEPT: tl.constexpr):
    """Write decisions to a mask, those that exist (all if `exists` is None); a later stage only removes."""
    if AMONG_KEPT:
        tl.store(at, tl.where(chosen, read(at, exists), 0), mask=exists)
    else:
        if at.dtype.element_ty == tl.bfloat16:
            chosen = chosen.to(tl.float32)  # the interpreter converts no integer to bfloat16
        tl.store(at, chosen.to(at.dtype.element_ty), mask=exists)


@triton.jit
def read(at, exists):
    """What is stored at these addresses; 0 where nothing exists, unless `exists` is None, so that all of it does."""
    return tl.load(at) if exists is None else tl.load(at, mask=exists, other=0)


@triton.jit
def magnitude_bits(x):
    """|x| as int32 of the same order; every NaN is the first integer above infinity."""
    if x.dtype.primitive_bitwidth == 32:
        magnitude = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        magnitude = tl.minimum(bits, 0x7C01 if x.dtype == tl.float16 else 0x7F81)
    return magnitude


@triton.jit
def order_key(x, SIGNED: tl.constexpr):
    """uint32 keys ordered as x is, or as |x| is without SIGNED; 0 is reserved for slots that must not be kept."""
    size = magnitude_bits(x)
    if not SIGNED:
        key = (size + 1).to(tl.uint32)
    elif x.dtype.primitive_bitwidth == 32:
        negative = (x.to(tl.int32, bitcast=True) < 0) & (size < 0x7F800001)
        key = tl.where(negative, -size, size).to(tl.uint32, bitcast=True) ^ 0x80000000
    else:
        top = 0x7C01 if x.dtype == tl.float16 else 0x7F81
        negative = (x.to(tl.int16, bitcast=True).to(tl.int32) < 0) & (size < top)
        key = (tl.where(negative, -size, size) + 0x8000).to(tl.uint32)
    return key


@triton.jit
def unique_keys(x, slot, COUNT: tl.constexpr, SIGNED: tl.constexpr):
    """uint32 keys of 16-bit values as of `order_key`, with the slot's number below, so that no two of a row are equal.

    Among equal values the lower of COUNT slots, 16 at most, has the higher key; no key is 0.
    """
    if SIGNED:
        key = (order_key(x, True) * 32768 + (COUNT - slot)).to(tl.uint32)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        top = 0x7C010000 if x.dtype == tl.float16 else 0x7F810000
        key = tl.minimum((bits & 0x7FFF0000) | (COUNT - slot), top | (COUNT - slot)).to(tl.uint32)
    return key


@triton.jit
def raised(x, NORM: tl.constexpr):
    """The terms of a block's norm: squares, magnitudes, (for the maximum) ordered bits; x itself for a sum."""
    wide = x.to(tl.float32)
    if NORM == "inf":
        term = magnitude_bits(wide)
    elif NORM == "2":
        term = wide * wide
    elif NORM == "1":
        term = tl.abs(wide)
    else:
        term = wide
    return term


@triton.jit
def combine(total, more, NORM: tl.constexpr):
    """Two partial sums (or maxima) as one."""
    return tl.maximum(total, more) if NORM == "inf" else total + more


@triton.jit
def reduced(powers, NORM: tl.constexpr):
    """Sums (or maxima) over the last dimension."""
    return tl.max(powers, axis=-1) if NORM == "inf" else tl.sum(powers, axis=-1)


@triton.jit
def root(total, NORM: tl.constexpr):
    """The norm of blocks from their sums (or maxima), float32."""
    if NORM == "inf":
        norm = total.to(tl.float32, bitcast=True)
    elif NORM == "2":
        norm = tl.sqrt_rn(total)
    else:
        norm = total
    return norm


@triton.jit
def keep_sorted(keys, keep, COUNT: tl.constexpr, UNIQUE: tl.constexpr, SPARE: tl.constexpr):
    """Keep exactly `keep` of each row of keys [S, COUNT], of which with UNIQUE no two are equal, with SPARE some 0."""
    slots = sorted_slots(slots_apart(keys, COUNT), COUNT)
    least = kth_largest(slots, keep, COUNT)
    if SPARE:
        least = tl.maximum(least, 1)
    if not UNIQUE:
        following = kth_largest(slots, keep + 1, COUNT)
        if tl.max((following == least).to(tl.int32)) > 0:  # equal values on both sides of the cut: rare
            keys = tl.where(cut_ties(keys, least, keep), keys, 0).to(tl.uint32)
    return keys >= least[:, None]


@triton.jit
def keep_slots(keys, keep, COUNT: tl.constexpr, UNIQUE: tl.constexpr):
    """As `keep_sorted`, of COUNT vectors of keys, one for each slot of a row; returns a vector for each."""
    least = tl.maximum(kth_largest(sorted_slots(keys, COUNT), keep, COUNT), 1)
    chosen = ()
    if UNIQUE:
        for i in tl.static_range(COUNT):
            chosen += (keys[i] >= least,)
    else:
        need = keep
        for i in tl.static_range(COUNT):
            need -= (keys[i] > least).to(tl.int32)
        for i in tl.static_range(COUNT):
            tied = (keys[i] == least) & (need > 0)
            need -= tied.to(tl.int32)
            chosen += ((keys[i] > least) | tied,)
    return chosen


@triton.jit
def keep_bisected(keys, keep, BITS: tl.constexpr):
    """Exactly `keep` of each row of keys [S, M]: the k-th largest key bit by bit, then ties by index."""
    limit = tl.zeros([keys.shape[0]], tl.uint32)
    bit = tl.full([keys.shape[0]], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        candidate = limit | bit
        count = tl.sum((keys >= candidate[:, None]).to(tl.int32), axis=1)
        limit = tl.where(count >= keep, candidate, limit)
        bit = bit >> 1
    return cut_ties(keys, limit, keep)


@triton.jit
def cut_ties(keys, limit, keep):
    """Keep the keys above the k-th largest of each row [S, M], and the first of those equal to it; never a key of 0."""
    above = keys > limit[:, None]
    tied = (keys == limit[:, None]).to(tl.int32)
    need = keep - tl.sum(above.to(tl.int32), axis=1)
    return (above | ((tied > 0) & (tl.cumsum(tied, axis=1) <= need[:, None]))) & (keys > 0)


@triton.jit
def slots_apart(rows, COUNT: tl.constexpr):
    """The columns of rows [S, COUNT], a power of two, as COUNT vectors in order."""
    slots = (rows,)
    for _ in tl.static_range(COUNT.bit_length() - 1):
        even = ()
        odd = ()
        for i in tl.static_range(len(slots)):
            a, b = tl.split(tl.reshape(slots[i], [rows.shape[0], slots[i].shape[1] // 2, 2]))
            even += (a,)
            odd += (b,)
        slots = even + odd
    columns = ()
    for i in tl.static_range(COUNT):
        columns += (tl.reshape(slots[i], [rows.shape[0]]),)
    return columns


@triton.jit
def sorted_slots(slots, COUNT: tl.constexpr):
    """COUNT vectors, a power of two, sorted from the largest down, element by element (Batcher's merge exchange)."""
    for merge in tl.static_range(COUNT.bit_length() - 1):
        for step in tl.static_range(merge + 1):
            slots = exchanged(slots, 2 << merge, (1 << merge) >> step, COUNT)
    return slots


@triton.jit
def exchanged(slots, LENGTH: tl.constexpr, APART: tl.constexpr, COUNT: tl.constexpr):
    """One stage of the network: slots APART from each other, within lists of LENGTH, in the right order."""
    found = ()
    for i in tl.static_range(COUNT):
        found += (exchanged_slot(slots, i, i % LENGTH, LENGTH, APART),)
    return found


@triton.jit
def exchanged_slot(slots, i: tl.constexpr, PLACE: tl.constexpr, LENGTH: tl.constexpr, APART: tl.constexpr):
    """What a stage puts in slot i, at PLACE of its list: the larger or the smaller of two slots, or the slot itself."""
    TURN: tl.constexpr = (PLACE + APART + APART % (LENGTH // 2)) // APART % 2  # whether it is the upper of two
    if TURN == 0 and PLACE >= APART:
        found = tl.minimum(slots[i - APART], slots[i])
    elif TURN == 1 and PLACE + APART < LENGTH:
        found = tl.maximum(slots[i], slots[i + APART])
    else:
        found = slots[i]
    return found


@triton.jit
def kth_largest(slots, keep, COUNT: tl.constexpr):
    """The keep-th of COUNT sorted vectors; above all of them where `keep` is 0."""
    for level in tl.static_range(COUNT.bit_length() - 1):
        odd = ((keep - 1) >> level) % 2 != 0
        found = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            found += (tl.where(odd, slots[2 * i + 1], slots[2 * i]),)
        slots = found
    return tl.where(keep > 0, slots[0], 0xFFFFFFFF)
