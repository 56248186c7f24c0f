"""Large blocks: their scores as rows in memory, and masks from rows of decisions."""

import triton
import triton.language as tl

from .device import (
    BLOCK_MASK,
    BLOCK_SIZES,
    BLOCK_VALUES,
    BLOCKS,
    COLUMN,
    ELEMENT_MASK,
    ELEMENT_SIZES,
    ELEMENT_VALUES,
    ELEMENTS,
    MASK,
    MEMBER_FIELDS,
    OFFSET,
    PART_FIELDS,
    ROWS,
    SCOPE_MASK,
    SCOPE_SIZES,
    SCOPE_VALUES,
    VALUES,
    WIDTH,
    as_mask,
    field,
    fold,
    join,
    magnitude_bits,
    multiple,
    part_of,
    pointer,
    power,
    rooted,
    walk,
)

__all__ = ["fill_kernel", "score_kernel"]


@triton.jit
def score_kernel(
    starts,
    parts,
    members,
    scores,
    kept,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    NORM: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGE: tl.constexpr,
    FLAT: tl.constexpr,
    LONG: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """float32 scores of TILE slots, read CHUNK elements at a time; with STAGE also which blocks are left, in `kept`.

    A slot is a block of one row, counted row by row. FLAT means that slots lie one after another in memory.
    """
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    first = program - tl.load(starts + which)
    first = first if BIG else first.to(tl.int32)
    slot = first * TILE + tl.arange(0, TILE)
    width = multiple(field(part, BLOCKS, BIG), 16) if EVEN else field(part, BLOCKS, BIG)
    count = field(part, ROWS, BIG) * width
    real = slot < count
    scope, block = slot // width, slot % width
    total = tl.zeros([TILE, CHUNK], tl.int32 if NORM == "inf" else tl.float32)
    alive = tl.zeros([TILE], tl.int32)

    for m in range(MEMBERS):
        member = members + (which * MEMBERS + m) * MEMBER_FIELDS
        values = pointer(member, VALUES, DTYPE, ALIGNED)
        elements = multiple(field(member, ELEMENTS, BIG), CHUNK) if WHOLE else field(member, ELEMENTS, BIG)
        lies = walk(scope, part + SCOPE_SIZES, member + SCOPE_VALUES, NESTS[0], 0, UNITS[0], ALIGNED, BIG)
        lies += walk(block, part + BLOCK_SIZES, member + BLOCK_VALUES, NESTS[1], 0, UNITS[2], ALIGNED, BIG)
        for begin in range(0, elements if LONG else 1, CHUNK):
            element = begin + tl.arange(0, CHUNK)
            seen = real[:, None] & (element < elements)[None, :]
            if FLAT:
                at = first * (TILE * CHUNK) + tl.arange(0, TILE * CHUNK)
                run = at < count * CHUNK
                x = tl.reshape(tl.load(values + at, mask=run, other=0.0), [TILE, CHUNK])
            else:
                inside = walk(
                    element, member + ELEMENT_SIZES, member + ELEMENT_VALUES, NESTS[2], INNER, UNITS[4], ALIGNED, BIG
                )
                x = tl.load(values + lies[:, None] + inside[None, :], mask=seen, other=0.0)
            if STAGE:
                mask = pointer(member, MASK, MASK_DTYPE, ALIGNED)
                if FLAT:
                    left = tl.reshape(tl.load(mask + at, mask=run, other=0), [TILE, CHUNK]) != 0
                else:
                    m_at = walk(scope, part + SCOPE_SIZES, member + SCOPE_MASK, NESTS[0], 0, UNITS[1], ALIGNED, BIG)
                    m_at += walk(block, part + BLOCK_SIZES, member + BLOCK_MASK, NESTS[1], 0, UNITS[3], ALIGNED, BIG)
                    within = walk(
                        element, member + ELEMENT_SIZES, member + ELEMENT_MASK, NESTS[2], INNER, UNITS[5], ALIGNED, BIG
                    )
                    left = tl.load(mask + m_at[:, None] + within[None, :], mask=seen, other=0) != 0
                x = tl.where(left, x, 0.0).to(DTYPE)
                alive = tl.maximum(alive, tl.max(left.to(tl.int32), axis=1))
            total = join(total, power(x, "1" if SINGLE else NORM), NORM)

    if SINGLE:  # the bits of |x|, with one NaN for all
        result = magnitude_bits(tl.sum(total, axis=1)).to(tl.float32, bitcast=True)
    else:
        result = rooted(fold(total, 1, NORM), NORM)
    out = tl.load(part + OFFSET) + scope * tl.load(part + WIDTH) + tl.load(part + COLUMN) + block
    tl.store(scores + out, result, mask=real)
    if STAGE:
        tl.store(kept + out, (alive > 0).to(tl.uint8), mask=real)


@triton.jit
def fill_kernel(
    starts,
    parts,
    members,
    kept,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    STAGE: tl.constexpr,
    FLAT: tl.constexpr,
    LONG: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """Write the decisions of TILE slots to every element of their blocks, CHUNK elements at a time."""
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    first = program - tl.load(starts + which)
    first = first if BIG else first.to(tl.int32)
    slot = first * TILE + tl.arange(0, TILE)
    width = multiple(field(part, BLOCKS, BIG), 16) if EVEN else field(part, BLOCKS, BIG)
    count = field(part, ROWS, BIG) * width
    real = slot < count
    scope, block = slot // width, slot % width
    lies = tl.load(part + OFFSET) + scope * tl.load(part + WIDTH) + tl.load(part + COLUMN) + block
    chosen = tl.load(kept + lies, mask=real, other=0) != 0

    for m in range(MEMBERS):
        member = members + (which * MEMBERS + m) * MEMBER_FIELDS
        mask = pointer(member, MASK, MASK_DTYPE, ALIGNED)
        elements = multiple(field(member, ELEMENTS, BIG), CHUNK) if WHOLE else field(member, ELEMENTS, BIG)
        begins = walk(scope, part + SCOPE_SIZES, member + SCOPE_MASK, NESTS[0], 0, UNITS[1], ALIGNED, BIG)
        begins += walk(block, part + BLOCK_SIZES, member + BLOCK_MASK, NESTS[1], 0, UNITS[3], ALIGNED, BIG)
        for begin in range(0, elements if LONG else 1, CHUNK):
            element = begin + tl.arange(0, CHUNK)
            spread = tl.broadcast_to(chosen[:, None], [TILE, CHUNK])
            if FLAT:
                at = first * (TILE * CHUNK) + tl.arange(0, TILE * CHUNK)
                seen = at < count * CHUNK
                spread = tl.reshape(spread, [TILE * CHUNK])
            else:
                inside = walk(
                    element, member + ELEMENT_SIZES, member + ELEMENT_MASK, NESTS[2], INNER, UNITS[5], ALIGNED, BIG
                )
                at = begins[:, None] + inside[None, :]
                seen = real[:, None] & (element < elements)[None, :]
            if STAGE:
                old = tl.load(mask + at, mask=seen, other=0)
                tl.store(mask + at, tl.where(spread, old, 0), mask=seen)
            else:
                tl.store(mask + at, as_mask(spread, MASK_DTYPE), mask=seen)
