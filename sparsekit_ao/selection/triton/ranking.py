"""What a tile's numbers become: ordered keys, sums of blocks in one order, exact selection.

Knows registers only; what is read and where it lies is `device`'s.
"""

import triton
import triton.language as tl

__all__ = [
    "folded",
    "join",
    "keep_bisected",
    "keep_pairs",
    "magnitude_bits",
    "order_key",
    "power",
    "rooted",
]


@triton.jit
def magnitude_bits(x):
    """|x| as int32 of the same order; every NaN is the first integer above infinity."""
    if x.dtype.primitive_bitwidth == 32:
        found = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        found = tl.minimum(bits, 0x7C01 if x.dtype == tl.float16 else 0x7F81)
    return found


@triton.jit
def order_key(x, SIGNED: tl.constexpr):
    """uint32 keys of the order of x, or of |x| without SIGNED; 0 is left for slots that may never be kept."""
    size = magnitude_bits(x)
    if not SIGNED:
        found = (size + 1).to(tl.uint32)
    elif x.dtype.primitive_bitwidth == 32:
        negative = (x.to(tl.int32, bitcast=True) < 0) & (size < 0x7F800001)
        found = tl.where(negative, -size, size).to(tl.uint32, bitcast=True) ^ 0x80000000
    else:
        top = 0x7C01 if x.dtype == tl.float16 else 0x7F81
        negative = (x.to(tl.int16, bitcast=True).to(tl.int32) < 0) & (size < top)
        found = (tl.where(negative, -size, size) + 0x8000).to(tl.uint32)
    return found


@triton.jit
def power(x, NORM: tl.constexpr):
    """What a block's elements add up to: squares, magnitudes, or (for the maximum) ordered bits."""
    wide = x.to(tl.float32)
    if NORM == "inf":
        found = magnitude_bits(wide)
    elif NORM == "2":
        found = wide * wide
    else:
        found = tl.abs(wide)
    return found


@triton.jit
def join(total, more, NORM: tl.constexpr):
    """Two partial sums (or maxima) as one."""
    return tl.maximum(total, more) if NORM == "inf" else total + more


@triton.jit
def folded(powers, ROWS: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr):
    """Sums (or maxima) of each of ROWS blocks of COUNT elements, by the reference's halving tree.

    Each level adds pairs, upper half onto lower half, so the bits depend on no layout and no hardware.
    """
    found = tl.reshape(powers, [ROWS, COUNT])
    for _ in tl.static_range(COUNT.bit_length() - 1):
        pairs = tl.reshape(found, [ROWS, 2, found.shape[1] // 2])
        found = tl.max(pairs, axis=1) if NORM == "inf" else tl.sum(pairs, axis=1)
    return tl.reshape(found, [ROWS])


@triton.jit
def rooted(total, NORM: tl.constexpr):
    """The norm that the folded powers amount to, float32."""
    if NORM == "inf":
        found = total.to(tl.float32, bitcast=True)
    elif NORM == "2":
        found = tl.sqrt_rn(total)
    else:
        found = total
    return found


@triton.jit
def keep_pairs(keys, keep, MEMBERS: tl.constexpr):
    """Exactly `keep` of each row of keys [S, M], by comparing every pair: slot i beats a later j unless j is higher."""
    slot = tl.arange(0, keys.shape[1])[None, :]
    beaten = tl.zeros(keys.shape, tl.int32)
    for j in tl.static_range(MEMBERS):
        # j is known at compile time, so the sum below is one register where a thread holds the whole row
        other = tl.sum(tl.where(slot == j, keys, 0), axis=1).to(tl.uint32)[:, None]
        beaten += tl.where(slot > j, other >= keys, other > keys).to(tl.int32)
    return (beaten < keep[:, None]) & (keys > 0)


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
    above = keys > limit[:, None]
    tied = (keys == limit[:, None]).to(tl.int32)
    need = keep - tl.sum(above.to(tl.int32), axis=1)
    return (above | ((tied > 0) & (tl.cumsum(tied, axis=1) <= need[:, None]))) & (keys > 0)
