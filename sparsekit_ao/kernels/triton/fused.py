"""Small scopes in one kernel: read the weight once, select in registers, write the mask once."""

import triton
import triton.language as tl

from .device import (
    BLOCK_MASK,
    BLOCK_SIZES,
    BLOCK_VALUES,
    ELEMENT_MASK,
    ELEMENT_SIZES,
    ELEMENT_VALUES,
    ELEMENTS,
    MASK,
    MEMBER_FIELDS,
    PART_FIELDS,
    ROWS,
    SCOPE_MASK,
    SCOPE_SIZES,
    SCOPE_VALUES,
    VALUES,
    as_mask,
    budget,
    field,
    fold,
    join,
    keep_bisected,
    keep_pairs,
    multiple,
    order_key,
    part_of,
    pointer,
    power,
    rooted,
    stored,
    walk,
)

__all__ = ["PAIRS", "fused_kernel"]

PAIRS = tl.constexpr(16)  # widest scope that is ranked by comparing every pair


@triton.jit
def fused_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    NORM: tl.constexpr,
    SINGLE: tl.constexpr,
    SIGNED: tl.constexpr,
    BITS: tl.constexpr,
    STAGE: tl.constexpr,
    STORED: tl.constexpr,
    FLAT: tl.constexpr,
    LONG: tl.constexpr,
    WHOLE: tl.constexpr,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """TILE scopes of WIDTH blocks (PADDED to a power of two), each block read CHUNK elements at a time.

    NESTS and UNITS hold, for scope, block and element: the number of loops, and which innermost strides are 1.
    SINGLE scores |x| as it is; STORED takes rows of `scores` and writes `kept`; FLAT means that the tile is one run
    of memory in values and mask alike, LONG that blocks take more than one CHUNK, WHOLE that
    they are made of whole ones, EACH that scopes have budgets of
    their own, EVEN that every part has a multiple of 16 scopes (so vectors stay whole).
    """
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    first = program - tl.load(starts + which)
    first = first if BIG else first.to(tl.int32)
    scope = first * TILE + tl.arange(0, TILE)
    block = tl.arange(0, PADDED)
    count = field(part, ROWS, BIG)
    if EVEN:
        count = multiple(count, 16)
    real = (scope < count)[:, None] & (block < WIDTH)[None, :]
    keep = budget(part, scope, scope < count, EACH).to(tl.int32)
    keep = keep if EACH else tl.full([TILE], 0, tl.int32) + keep
    total = tl.zeros([TILE, PADDED], tl.int32 if NORM == "inf" else tl.float32)
    keys = tl.zeros([TILE, PADDED], tl.uint32)
    alive = tl.zeros([TILE, PADDED], tl.int32)

    for m in range(MEMBERS):
        member = members + (which * MEMBERS + m) * MEMBER_FIELDS
        if STORED:
            values, mask = stored(part, scores, kept, ALIGNED)
        else:
            values, mask = pointer(member, VALUES, DTYPE, ALIGNED), pointer(member, MASK, MASK_DTYPE, ALIGNED)
        elements = multiple(field(member, ELEMENTS, BIG), CHUNK) if WHOLE else field(member, ELEMENTS, BIG)
        for begin in range(0, elements if LONG else 1, CHUNK):
            if FLAT:
                x_at, m_at, seen = flat_tile(first, count, TILE, PADDED, CHUNK)
            else:
                x_at, m_at, seen = strided_tile(
                    part, member, scope, block, begin, elements, real, CHUNK, NESTS, INNER, UNITS, ALIGNED, BIG
                )
            x = tl.load(values + x_at, mask=seen, other=0.0)
            if STAGE:
                left = tl.load(mask + m_at, mask=seen, other=0) != 0
                x = tl.where(left, x, 0.0).to(DTYPE)
                alive += tl.sum(tl.reshape(left.to(tl.int32), [TILE, PADDED, CHUNK]), axis=2)
            if SINGLE:
                keys = tl.reshape(order_key(x, SIGNED), [TILE, PADDED])
            else:
                total = join(total, fold(tl.reshape(power(x, NORM), [TILE, PADDED, CHUNK]), 2, NORM), NORM)

    if not SINGLE:
        keys = order_key(rooted(total, NORM), False)
    keys = tl.where(real & (alive > 0) if STAGE else real, keys, 0).to(tl.uint32)
    chosen = keep_pairs(keys, keep, WIDTH) if PADDED <= PAIRS else keep_bisected(keys, keep, BITS)

    for m in range(MEMBERS):
        member = members + (which * MEMBERS + m) * MEMBER_FIELDS
        if STORED:
            _, mask = stored(part, scores, kept, ALIGNED)
        else:
            mask = pointer(member, MASK, MASK_DTYPE, ALIGNED)
        elements = multiple(field(member, ELEMENTS, BIG), CHUNK) if WHOLE else field(member, ELEMENTS, BIG)
        for begin in range(0, elements if LONG else 1, CHUNK):
            if FLAT:
                x_at, m_at, seen = flat_tile(first, count, TILE, PADDED, CHUNK)
                spread = tl.reshape(tl.broadcast_to(chosen[:, :, None], [TILE, PADDED, CHUNK]), [TILE * PADDED * CHUNK])
            else:
                x_at, m_at, seen = strided_tile(
                    part, member, scope, block, begin, elements, real, CHUNK, NESTS, INNER, UNITS, ALIGNED, BIG
                )
                spread = tl.broadcast_to(chosen[:, :, None], [TILE, PADDED, CHUNK])
            if STAGE:
                tl.store(mask + m_at, tl.where(spread, tl.load(mask + m_at, mask=seen, other=0), 0), mask=seen)
            else:
                tl.store(mask + m_at, as_mask(spread, MASK_DTYPE), mask=seen)


@triton.jit
def flat_tile(first, count, TILE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr):
    """Addresses of a tile that is one run of memory, and which of them exist."""
    at = first * (TILE * PADDED * CHUNK) + tl.arange(0, TILE * PADDED * CHUNK)
    return at, at, at < count * (PADDED * CHUNK)


@triton.jit
def strided_tile(
    part,
    member,
    scope,
    block,
    begin,
    elements,
    real,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """Addresses [scopes, blocks, CHUNK] of values and mask, and which of them exist."""
    element = begin + tl.arange(0, CHUNK)
    x_at = (
        walk(scope, part + SCOPE_SIZES, member + SCOPE_VALUES, NESTS[0], 0, UNITS[0], ALIGNED, BIG)[:, None, None]
        + walk(block, part + BLOCK_SIZES, member + BLOCK_VALUES, NESTS[1], 0, UNITS[2], ALIGNED, BIG)[None, :, None]
        + walk(element, member + ELEMENT_SIZES, member + ELEMENT_VALUES, NESTS[2], INNER, UNITS[4], ALIGNED, BIG)[
            None, None, :
        ]
    )
    m_at = (
        walk(scope, part + SCOPE_SIZES, member + SCOPE_MASK, NESTS[0], 0, UNITS[1], ALIGNED, BIG)[:, None, None]
        + walk(block, part + BLOCK_SIZES, member + BLOCK_MASK, NESTS[1], 0, UNITS[3], ALIGNED, BIG)[None, :, None]
        + walk(element, member + ELEMENT_SIZES, member + ELEMENT_MASK, NESTS[2], INNER, UNITS[5], ALIGNED, BIG)[
            None, None, :
        ]
    )
    return x_at, m_at, real[:, :, None] & (element < elements)[None, None, :]
