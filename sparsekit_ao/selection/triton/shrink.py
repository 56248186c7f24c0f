"""Kernels that threshold blocks in place: a block's norm is taken, and the block is written back shrunk or zeroed.

A block of one tensor that fits a tile is read once; longer and coupled ones are read a second time, usually from cache.
"""

import triton
import triton.language as tl

from .device import MEMBER_FIELDS, block_offsets, block_tile, elements_of, mask_of, part_of_program, slots_of, values_of
from .ranking import block_sums, power


@triton.jit
def block_thresholds(thresholds, value, factor, scope, real, FORM: tl.constexpr):
    """The thresholds [TILE] of slots: `value` where there is no tensor, else its only element or that of the scope."""
    if thresholds is None:
        t = tl.full([FORM.tile], 0.0, tl.float32) + value
    elif FORM.per_scope:
        t = tl.load(thresholds + scope, mask=real, other=0.0)
    else:
        t = tl.full([FORM.tile], 0.0, tl.float32) + tl.load(thresholds)
    return t * factor


@triton.jit
def threshold_kernel(
    starts, parts, members, thresholds, value, factor, SOFT: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """TILE blocks times `max(0, 1 - t / norm)` (SOFT), or zeroed where the norm is below t; t is threshold * factor."""
    index, part, first = part_of_program(starts, parts, PARTS, FORM.big)
    scope, block, real = slots_of(part, first, FORM)
    total = tl.full([FORM.tile], 0, tl.float32)
    x = tl.full([FORM.tile, FORM.chunk], 0, tl.float32)
    for m in range(FORM.members):
        member = members + (index * FORM.members + m) * MEMBER_FIELDS
        base = block_offsets(part, member, scope, block, False, FORM)
        powers = tl.full([FORM.tile, FORM.chunk], 0, tl.float32)
        for begin in range(0, elements_of(member, FORM) if FORM.chunked else 1, FORM.chunk):
            at, exists = block_tile(part, member, first, begin, base, real, False, FORM)
            x = tl.load(values_of(member, FORM) + at, mask=exists, other=0.0).to(tl.float32)
            powers += power(x, "1" if FORM.single else "2")
        total += block_sums(powers, FORM.tile, FORM.chunk, "2")
    size = total if FORM.single else tl.sqrt_rn(total)
    t = block_thresholds(thresholds, value, factor, scope, real, FORM)
    scale = scale_of(size, t, SOFT)[:, None]
    for m in range(FORM.members):
        member = members + (index * FORM.members + m) * MEMBER_FIELDS
        base = block_offsets(part, member, scope, block, False, FORM)
        for begin in range(0, elements_of(member, FORM) if FORM.chunked else 1, FORM.chunk):
            at, exists = block_tile(part, member, first, begin, base, real, False, FORM)
            if FORM.chunked or FORM.members > 1:
                x = tl.load(values_of(member, FORM) + at, mask=exists, other=0.0).to(tl.float32)
            # a kept block is written as it was, bit for bit: no product touches it
            y = tl.where(scale == 0, 0.0, tl.where(scale == 1, x, x * scale))
            tl.store(values_of(member, FORM) + at, y.to(FORM.dtype), mask=exists)


@triton.jit
def scale_of(size, t, SOFT: tl.constexpr):
    """What a block of this norm is multiplied by."""
    if SOFT:
        # the norm itself where it is NaN, so that a diverged block stays visible
        shrunk = tl.div_rn(size - t, tl.where(size > t, size, 1.0))
        scale = tl.where(size > t, shrunk, tl.where(size == size, 0.0, size))
        scale = tl.where((t == 0) | (size == float("inf")), 1.0, scale)  # squares that overflow: t is small beside them
    else:
        scale = tl.where(size < t, 0.0, 1.0)
    return scale


@triton.jit(do_not_specialize=["steps"])
def condition_kernel(
    starts, parts, members, thresholds, value, factor, misses, eps, atol, steps, FORM: tl.constexpr, PARTS: tl.constexpr
):
    """The prox under a positive diagonal, for blocks that fit a tile: Newton in registers, one read and one write.

    Conditioners take the place of masks. A block that misses `atol` after `steps` stays as it was; `misses` gets the
    largest miss of each program.
    """
    index, part, first = part_of_program(starts, parts, PARTS, FORM.big)
    scope, block, real = slots_of(part, first, FORM)
    member = members + index * MEMBER_FIELDS
    base = block_offsets(part, member, scope, block, False, FORM)
    h_base = block_offsets(part, member, scope, block, True, FORM)
    at, exists = block_tile(part, member, first, 0, base, real, False, FORM)
    h_at, _ = block_tile(part, member, first, 0, h_base, real, True, FORM)
    v = tl.load(values_of(member, FORM) + at, mask=exists, other=0.0).to(tl.float32)
    h = tl.load(mask_of(member, FORM) + h_at, mask=exists, other=1.0).to(tl.float32) + eps
    t = block_thresholds(thresholds, value, factor, scope, real, FORM)
    pull = h * v
    force = tl.sqrt_rn(block_sums(pull * pull, FORM.tile, FORM.chunk, "2"))
    nonzero = real & (force > t)
    largest = tl.max(tl.where(exists, h, 0.0), axis=1)
    s = tl.where(nonzero, tl.div_rn(force - t, tl.where(nonzero, largest, 1.0)), 1.0)
    slack = tl.where(nonzero, t, 1.0)[:, None]
    pull = tl.where(nonzero[:, None], pull, 0.0)
    s, missed = newton(h, pull, slack, s, nonzero, atol, steps, FORM)
    tl.store(misses + tl.program_id(0), tl.max(missed, axis=0))
    w = tl.div_rn(pull * s[:, None], h * s[:, None] + slack)
    w = tl.where(nonzero[:, None], w, tl.where(force == force, 0.0, force)[:, None])
    same = (t == 0) | (missed > 0)
    tl.store(values_of(member, FORM) + at, tl.where(same[:, None], v, w).to(FORM.dtype), mask=exists)


@triton.jit
def newton(h, pull, slack, s, nonzero, atol, steps, FORM: tl.constexpr):
    """The root of phi(s) = 1 for each block, approached from below, and how far phi is from 1 in the end."""
    missed = tl.where(nonzero, atol + 1.0, 0.0)
    for _ in range(steps + 1):
        if tl.max(missed, axis=0) > atol:
            below = h * s[:, None] + slack
            u = tl.div_rn(pull, below)
            phi = tl.sqrt_rn(block_sums(u * u, FORM.tile, FORM.chunk, "2"))
            missed = tl.where(
                nonzero & (tl.abs(phi - 1) > atol), tl.abs(phi - 1), 0.0
            )  # NaN is written, so it is no miss
            slope = block_sums(tl.div_rn(h * u * u, below), FORM.tile, FORM.chunk, "2")
            newer = s + tl.div_rn(phi * phi * (phi - 1), tl.where(slope > 0, slope, 1.0))
            missed = tl.where(newer > s, missed, 0.0)  # where rounding ends the ascent, s is the root
            s = tl.where(missed > 0, newer, s)
    return s, missed
