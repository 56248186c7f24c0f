"""Thresholding in place: blocks are read, their norm is taken, and they are written back shrunk or zeroed.

A block of one tensor that fits a tile is read once; longer and coupled ones are read again while they are still in
cache. The maps are those of `spec/threshold.py`.
"""

import triton
import triton.language as tl

from .device import (
    BLOCK_MASK,
    BLOCK_SIZES,
    BLOCK_VALUES,
    BLOCKS,
    ELEMENT_MASK,
    ELEMENT_SIZES,
    ELEMENT_VALUES,
    ELEMENTS,
    MASK,
    MEMBER_FIELDS,
    PART_FIELDS,
    VALUES,
    field,
    multiple,
    part_of,
    pointer,
    walk,
)

__all__ = ["condition_kernel", "threshold_kernel"]


@triton.jit
def block_tile(
    part,
    member,
    block,
    begin,
    real,
    OTHER: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """Addresses [blocks, CHUNK] of the values (with OTHER: of the conditioners), and which of them exist."""
    elements = multiple(field(member, ELEMENTS, BIG), CHUNK) if WHOLE else field(member, ELEMENTS, BIG)
    element = begin + tl.arange(0, CHUNK)
    walks = member + (BLOCK_MASK if OTHER else BLOCK_VALUES)
    inside = member + (ELEMENT_MASK if OTHER else ELEMENT_VALUES)
    lies = walk(block, part + BLOCK_SIZES, walks, NESTS[1], 0, UNITS[3 if OTHER else 2], ALIGNED, BIG)
    within = walk(element, member + ELEMENT_SIZES, inside, NESTS[2], INNER, UNITS[5 if OTHER else 4], ALIGNED, BIG)
    return lies[:, None] + within[None, :], real[:, None] & (element < elements)[None, :]


@triton.jit
def threshold_kernel(
    starts,
    parts,
    members,
    thresholds,
    factor,
    SOFT: tl.constexpr,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    SINGLE: tl.constexpr,
    LONG: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """TILE blocks times `max(0, 1 - t / norm)` (SOFT), or zeroed where the norm is below t; t is thresholds * factor.

    EACH means that every block has a threshold of its own.
    """
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    first = program - tl.load(starts + which)
    block = (first if BIG else first.to(tl.int32)) * TILE + tl.arange(0, TILE)
    real = block < field(part, BLOCKS, BIG)
    total = tl.zeros([TILE, CHUNK], tl.float32)
    x = tl.zeros([TILE, CHUNK], tl.float32)
    for m in range(MEMBERS):
        member = members + (which * MEMBERS + m) * MEMBER_FIELDS
        values = pointer(member, VALUES, DTYPE, ALIGNED)
        for begin in range(0, field(member, ELEMENTS, BIG) if LONG else 1, CHUNK):
            at, seen = block_tile(
                part, member, block, begin, real, False, CHUNK, NESTS, INNER, UNITS, WHOLE, ALIGNED, BIG
            )
            x = tl.load(values + at, mask=seen, other=0.0).to(tl.float32)
            total += tl.abs(x) if SINGLE else x * x
    size = tl.sum(total, axis=1) if SINGLE else tl.sqrt_rn(tl.sum(total, axis=1))
    t = (
        tl.load(thresholds + block, mask=real, other=0.0)
        if EACH
        else tl.full([TILE], 0.0, tl.float32) + tl.load(thresholds)
    )
    t = t * factor
    if SOFT:
        # the norm itself where it is NaN, so that a diverged block stays visible
        scale = tl.where(
            size > t, tl.div_rn(size - t, tl.where(size > t, size, 1.0)), tl.where(size == size, 0.0, size)
        )
        scale = tl.where(t == 0, 1.0, scale)[:, None]
    else:
        scale = tl.where(size < t, 0.0, 1.0)[:, None]
    for m in range(MEMBERS):
        member = members + (which * MEMBERS + m) * MEMBER_FIELDS
        values = pointer(member, VALUES, DTYPE, ALIGNED)
        for begin in range(0, field(member, ELEMENTS, BIG) if LONG else 1, CHUNK):
            at, seen = block_tile(
                part, member, block, begin, real, False, CHUNK, NESTS, INNER, UNITS, WHOLE, ALIGNED, BIG
            )
            if LONG or MEMBERS > 1:
                x = tl.load(values + at, mask=seen, other=0.0).to(tl.float32)
            # a kept block is written as it was, bit for bit: no product touches it
            tl.store(values + at, tl.where(scale == 0, 0.0, tl.where(scale == 1, x, x * scale)).to(DTYPE), mask=seen)


@triton.jit
def condition_kernel(
    starts,
    parts,
    members,
    thresholds,
    factor,
    misses,
    eps,
    atol,
    steps,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTS: tl.constexpr,
    INNER: tl.constexpr,
    UNITS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASK_DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIG: tl.constexpr,
):
    """The prox under a positive diagonal, for blocks that fit a tile: Newton in registers, one read and one write.

    Conditioners stand where masks do elsewhere. A program that misses `atol` after `steps` says so in `misses` and
    writes nothing.
    """
    program = tl.program_id(0)
    which = part_of(starts, program, PARTS)
    part = parts + which * PART_FIELDS
    member = members + which * MEMBERS * MEMBER_FIELDS
    first = program - tl.load(starts + which)
    block = (first if BIG else first.to(tl.int32)) * TILE + tl.arange(0, TILE)
    real = block < field(part, BLOCKS, BIG)
    values, others = pointer(member, VALUES, DTYPE, ALIGNED), pointer(member, MASK, MASK_DTYPE, ALIGNED)
    at, seen = block_tile(part, member, block, 0, real, False, CHUNK, NESTS, INNER, UNITS, WHOLE, ALIGNED, BIG)
    h_at, _ = block_tile(part, member, block, 0, real, True, CHUNK, NESTS, INNER, UNITS, WHOLE, ALIGNED, BIG)
    v = tl.load(values + at, mask=seen, other=0.0).to(tl.float32)
    h = tl.load(others + h_at, mask=seen, other=1.0).to(tl.float32) + eps
    pull = h * v
    force = tl.sqrt_rn(tl.sum(pull * pull, axis=1))
    t = (
        tl.load(thresholds + block, mask=real, other=0.0)
        if EACH
        else tl.full([TILE], 0.0, tl.float32) + tl.load(thresholds)
    )
    t = t * factor
    alive = real & (force > t)
    largest = tl.max(tl.where(seen, h, 0.0), axis=1)
    s = tl.where(alive, tl.div_rn(force - t, tl.where(alive, largest, 1.0)), 1.0)
    slack = tl.where(alive, t, 1.0)
    pull = tl.where(alive[:, None], pull, 0.0)
    worst = atol + 1.0
    taken = 0
    while (worst > atol) & (taken <= steps):
        below = h * s[:, None] + slack[:, None]
        u = tl.div_rn(pull, below)
        phi = tl.sqrt_rn(tl.sum(u * u, axis=1))
        miss = tl.where(alive, phi - 1, 0.0)
        worst = tl.max(tl.abs(miss), axis=0)
        if worst > atol:
            slope = tl.sum(tl.div_rn(h * u * u, below), axis=1)
            s = tl.where(alive, s + tl.div_rn(phi * phi * miss, tl.where(slope > 0, slope, 1.0)), s)
        taken += 1
    tl.store(misses + program, tl.where(worst > atol, worst, 0.0))
    if worst <= atol:
        w = tl.div_rn(pull * s[:, None], h * s[:, None] + slack[:, None])
        dead = tl.where(force == force, 0.0, force)[:, None]
        w = tl.where(alive[:, None], w, dead)
        tl.store(values + at, tl.where((t == 0)[:, None], v, w).to(DTYPE), mask=seen)
