"""Small scopes in one kernel: read the weight once, select in registers, write the mask once."""

import triton
import triton.language as tl

from .device import BLOCK, ELEMENT, MEMBER_FIELDS, ROWS, SCOPE, budget, elements_at, ends, evenly, marked, opened, reach
from .ranking import folded, join, keep_bisected, keep_pairs, order_key, power, rooted

__all__ = ["PAIRS", "fused_kernel"]

PAIRS = tl.constexpr(16)  # widest scope that is ranked by comparing every pair


@triton.jit
def fused_kernel(starts, parts, members, scores, kept, FORM: tl.constexpr, PARTS: tl.constexpr):
    """TILE scopes of WIDTH blocks (PADDED to a power of two) of CHUNK elements: scored, selected, marked.

    With FORM.stored rows of `scores` are selected and `kept` is written.
    """
    NORM: tl.constexpr = FORM.norm  # before triton 3.7 a string read from FORM is no constexpr
    which, part, first = opened(starts, parts, PARTS, FORM.big)
    scope = first * FORM.tile + tl.arange(0, FORM.tile)
    valid = scope < evenly(part, ROWS, FORM)
    real = valid[:, None] & (tl.arange(0, FORM.padded) < FORM.width)[None, :]
    total = tl.full([FORM.tile, FORM.padded], 0, tl.int32 if NORM == "inf" else tl.float32)
    keys = tl.full([FORM.tile, FORM.padded], 0, tl.uint32)
    alive = tl.full([FORM.tile, FORM.padded], 0, tl.int32)
    for m in range(FORM.members):
        member = members + (which * FORM.members + m) * MEMBER_FIELDS
        values, mask = ends(part, member, scores, kept, FORM)
        at, seen = scope_tile(part, member, first, scope, real, False, FORM)
        x = tl.load(values + at, mask=seen, other=0.0)
        if FORM.among_kept:
            m_at, _ = scope_tile(part, member, first, scope, real, True, FORM)
            left = tl.load(mask + m_at, mask=seen, other=0) != 0
            x = tl.where(left, x, 0.0).to(FORM.dtype)
            alive += tl.sum(tl.reshape(left.to(tl.int32), [FORM.tile, FORM.padded, FORM.chunk]), axis=2)
        if FORM.single:
            keys = tl.reshape(order_key(x, FORM.signed), [FORM.tile, FORM.padded])
        else:
            found = folded(power(x, NORM), FORM.tile * FORM.padded, FORM.chunk, NORM)
            total = join(total, tl.reshape(found, [FORM.tile, FORM.padded]), NORM)
    if not FORM.single:
        keys = order_key(rooted(total, NORM), False)
    keys = tl.where(real & (alive > 0) if FORM.among_kept else real, keys, 0).to(tl.uint32)
    keep = tl.full([FORM.tile], 0, tl.int32) + budget(part, scope, valid, FORM.each).to(tl.int32)
    chosen = keep_pairs(keys, keep, FORM.width) if FORM.padded <= PAIRS else keep_bisected(keys, keep, FORM.bits)
    for m in range(FORM.members):
        member = members + (which * FORM.members + m) * MEMBER_FIELDS
        _, mask = ends(part, member, scores, kept, FORM)
        at, seen = scope_tile(part, member, first, scope, real, True, FORM)
        spread = tl.broadcast_to(chosen[:, :, None], [FORM.tile, FORM.padded, FORM.chunk])
        marked(mask + at, tl.reshape(spread, at.shape), seen, FORM)


@triton.jit
def scope_tile(part, member, first, scope, real, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Addresses [TILE, PADDED, CHUNK] of values or mask, and which exist; one run of memory where FORM is flat."""
    if FORM.flat:
        volume: tl.constexpr = FORM.padded * FORM.chunk
        at = first * (FORM.tile * volume) + tl.arange(0, FORM.tile * volume)
        seen = at < evenly(part, ROWS, FORM) * volume
    else:
        block = tl.arange(0, FORM.padded)
        element, there = elements_at(member, 0, FORM)
        at = (
            reach(part, member, scope, SCOPE, MASKED, FORM)[:, None, None]
            + reach(part, member, block, BLOCK, MASKED, FORM)[None, :, None]
            + reach(part, member, element, ELEMENT, MASKED, FORM)[None, None, :]
        )
        seen = real[:, :, None] & there[None, None, :]
    return at, seen
