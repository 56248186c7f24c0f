"""Large blocks: their scores as rows in memory, and masks from rows of decisions."""

import triton
import triton.language as tl

from .device import (
    COLUMN,
    MEMBER_FIELDS,
    OFFSET,
    WIDTH,
    begins,
    block_tile,
    elements_of,
    marked,
    mask_of,
    opened,
    slots_of,
    values_of,
)
from .ranking import folded, join, magnitude_bits, power, rooted

__all__ = ["fill_kernel", "score_kernel"]


@triton.jit
def score_kernel(starts, parts, members, scores, kept, FORM: tl.constexpr, PARTS: tl.constexpr):
    """float32 scores of TILE slots, read CHUNK elements at a time; a later stage also says which blocks are left."""
    NORM: tl.constexpr = FORM.norm  # before triton 3.7 a string read from FORM is no constexpr
    POWER: tl.constexpr = "1" if FORM.single else NORM
    which, part, first = opened(starts, parts, PARTS, FORM.big)
    scope, block, real = slots_of(part, first, FORM)
    total = tl.full([FORM.tile], 0, tl.int32 if NORM == "inf" else tl.float32)
    alive = tl.full([FORM.tile], 0, tl.int32)
    for m in range(FORM.members):
        member = members + (which * FORM.members + m) * MEMBER_FIELDS
        values, mask = values_of(member, FORM), mask_of(member, FORM)
        lies, m_lies = begins(part, member, scope, block, False, FORM), begins(part, member, scope, block, True, FORM)
        powers = tl.full([FORM.tile, FORM.chunk], 0, tl.int32 if NORM == "inf" else tl.float32)
        for begin in range(0, elements_of(member, FORM) if FORM.long else 1, FORM.chunk):
            at, seen = block_tile(part, member, first, begin, lies, real, False, FORM)
            x = tl.load(values + at, mask=seen, other=0.0)
            if FORM.among_kept:
                m_at, _ = block_tile(part, member, first, begin, m_lies, real, True, FORM)
                left = tl.load(mask + m_at, mask=seen, other=0) != 0
                x = tl.where(left, x, 0.0).to(FORM.dtype)
                kinds = tl.reshape(left.to(tl.int32), [FORM.tile, FORM.chunk])
                alive = tl.maximum(alive, tl.max(kinds, axis=1))
            more = power(tl.reshape(x, [FORM.tile, FORM.chunk]), POWER)
            powers = join(powers, more, NORM)
        total = join(total, folded(powers, FORM.tile, FORM.chunk, NORM), NORM)
    # of single elements the bits of |x|, with one NaN for all
    result = magnitude_bits(total).to(tl.float32, bitcast=True) if FORM.single else rooted(total, NORM)
    out = row_slot(part, scope, block)
    tl.store(scores + out, result, mask=real)
    if FORM.among_kept:
        tl.store(kept + out, (alive > 0).to(tl.uint8), mask=real)


@triton.jit
def fill_kernel(starts, parts, members, kept, FORM: tl.constexpr, PARTS: tl.constexpr):
    """Write the decisions of TILE slots to every element of their blocks, CHUNK elements at a time."""
    which, part, first = opened(starts, parts, PARTS, FORM.big)
    scope, block, real = slots_of(part, first, FORM)
    chosen = tl.load(kept + row_slot(part, scope, block), mask=real, other=0) != 0
    for m in range(FORM.members):
        member = members + (which * FORM.members + m) * MEMBER_FIELDS
        mask = mask_of(member, FORM)
        lies = begins(part, member, scope, block, True, FORM)
        for begin in range(0, elements_of(member, FORM) if FORM.long else 1, FORM.chunk):
            at, seen = block_tile(part, member, first, begin, lies, real, True, FORM)
            spread = tl.broadcast_to(chosen[:, None], [FORM.tile, FORM.chunk])
            marked(mask + at, tl.reshape(spread, at.shape), seen, FORM)


@triton.jit
def row_slot(part, scope, block):
    """Where slots stand among stored scores and decisions."""
    return tl.load(part + OFFSET) + scope * tl.load(part + WIDTH) + tl.load(part + COLUMN) + block
