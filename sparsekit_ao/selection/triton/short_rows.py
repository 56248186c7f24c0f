"""Kernels over blocks: short scopes scored, selected and masked at once; else scores of blocks, masks from decisions.

`part` is a `lowering.Operand`, `FORM` a `launches.Form`.
"""

import triton
import triton.language as tl

from .ranking import (
    budget,
    combine,
    keep_bisected,
    keep_slots,
    keep_sorted,
    offset_of,
    order_key,
    raised,
    reduced,
    root,
    unique_keys,
    write_mask,
)

SORTED = tl.constexpr(16)  # widest scope whose keys a network sorts in registers


@triton.jit(do_not_specialize=["keep"])
def fused_kernel(part, scopes, keep, KEEP: tl.constexpr, FORM: tl.constexpr):
    """TILE scopes of WIDTH blocks (PADDED to a power of two) of CHUNK elements: scored, selected, masks written."""
    first = tl.program_id(0).to(tl.int64) if FORM.big else tl.program_id(0)
    scope = first * FORM.tile + tl.arange(0, FORM.tile)
    valid = scope < scopes
    count = tl.full([FORM.tile], 0, tl.int32) + budget(keep, scope, valid, KEEP).to(tl.int32)
    if FORM.apart:
        select_slots(part, scope, valid, count, FORM)
    else:
        select_tile(part, first, scopes, scope, valid, count, FORM)


@triton.jit
def select_slots(part, scope, valid, keep, FORM: tl.constexpr):
    """Masks of scopes of single elements that are neighbours in memory: each of their slots is read as one vector."""
    UNIQUE: tl.constexpr = FORM.bits <= 16
    COUNT: tl.constexpr = FORM.padded
    WIDTH: tl.constexpr = FORM.width
    values = part[0] + offset_of(scope, part[2][0], part[2][1])
    mask = part[1] + offset_of(scope, part[2][0], part[2][2])
    keys = ()
    for i in tl.static_range(COUNT):
        keys += (key_of_slot(part, values, mask, valid, i, UNIQUE, FORM),)
    chosen = keep_slots(keys, keep, COUNT, UNIQUE)
    for i in tl.static_range(WIDTH):
        write_mask(mask + slot_offset(i, part[3][0], part[3][2], FORM), chosen[i], valid, FORM.within_mask)


@triton.jit
def key_of_slot(part, values, mask, valid, i: tl.constexpr, UNIQUE: tl.constexpr, FORM: tl.constexpr):
    """Keys of slot i of every scope; 0 where there is none or an earlier stage pruned it."""
    key = tl.full([FORM.tile], 0, tl.uint32)
    if i < FORM.width:
        x = tl.load(values + slot_offset(i, part[3][0], part[3][1], FORM), mask=valid, other=0.0)
        if FORM.masked:
            kept = tl.load(mask + slot_offset(i, part[3][0], part[3][2], FORM), mask=valid, other=0) != 0
            x = tl.where(kept, x, 0.0).to(x.dtype)
        key = unique_keys(x, i, FORM.padded, FORM.signed) if UNIQUE else order_key(x, FORM.signed)
        if FORM.within_mask:
            key = tl.where(kept, key, 0).to(tl.uint32)
    return key


@triton.jit
def slot_offset(i: tl.constexpr, sizes, steps, FORM: tl.constexpr):
    """How far slot i of a scope is from its first one."""
    return offset_of(tl.full((), i, tl.int64 if FORM.big else tl.int32), sizes, steps)


@triton.jit
def select_tile(part, first, scopes, scope, valid, keep, FORM: tl.constexpr):
    """Masks of scopes of any kind, read as one tile."""
    NORM: tl.constexpr = FORM.norm  # before triton 3.7 a string read from FORM is not a constexpr
    SLOTS: tl.constexpr = [FORM.tile, FORM.padded]
    SORTS: tl.constexpr = FORM.padded <= SORTED
    UNIQUE: tl.constexpr = SORTS and FORM.single and FORM.bits <= 16
    SPARE: tl.constexpr = FORM.within_mask or FORM.padded > FORM.width  # slots that must not be kept
    real = valid[:, None] & (tl.arange(0, FORM.padded) < FORM.width)[None, :]
    at, exists = scope_tile(first, scopes, scope, real, part, part[2][1], part[3][1], part[4][1], FORM)
    mask_at, _ = scope_tile(first, scopes, scope, real, part, part[2][2], part[3][2], part[4][2], FORM)
    x = tl.load(part[0] + at, mask=exists, other=0.0)
    if FORM.masked:
        kept = tl.load(part[1] + mask_at, mask=exists, other=0) != 0
        x = tl.where(kept, x, 0.0).to(x.dtype)
    if UNIQUE:
        keys = unique_keys(tl.reshape(x, SLOTS), tl.arange(0, FORM.padded)[None, :], FORM.padded, FORM.signed)
    elif FORM.single:
        keys = tl.reshape(order_key(x, FORM.signed), SLOTS)
    else:
        powers = tl.reshape(raised(x, NORM), [FORM.tile, FORM.padded, FORM.chunk])
        keys = order_key(root(reduced(powers, NORM), NORM), False)
    if FORM.within_mask:
        some = tl.max(tl.reshape(kept.to(tl.int32), [FORM.tile, FORM.padded, FORM.chunk]), axis=2)
        real = real & (some > 0)
    if SPARE:
        keys = tl.where(real, keys, 0).to(tl.uint32)
    chosen = keep_sorted(keys, keep, FORM.padded, UNIQUE, SPARE) if SORTS else keep_bisected(keys, keep, FORM.bits)
    spread = tl.broadcast_to(chosen[:, :, None], [FORM.tile, FORM.padded, FORM.chunk])
    write_mask(part[1] + mask_at, tl.reshape(spread, mask_at.shape), exists, FORM.within_mask)


@triton.jit
def scope_tile(first, scopes, scope, real, part, scope_steps, block_steps, element_steps, FORM: tl.constexpr):
    """Offsets [TILE, PADDED, CHUNK] in values or mask, and which exist; in one dimension where they are contiguous."""
    if FORM.contiguous:
        VOLUME: tl.constexpr = FORM.padded * FORM.chunk
        at = first * (FORM.tile * VOLUME) + tl.arange(0, FORM.tile * VOLUME)
        exists = at < scopes * VOLUME
    else:
        element = tl.arange(0, FORM.chunk)
        at = (
            offset_of(scope, part[2][0], scope_steps)[:, None, None]
            + offset_of(tl.arange(0, FORM.padded), part[3][0], block_steps)[None, :, None]
            + offset_of(element, part[4][0], element_steps)[None, None, :]
        )
        exists = real[:, :, None] & (element < FORM.elements)[None, None, :]
    return at, exists


@triton.jit
def score_kernel(part, blocks, width, scores, kept, row, FIRST: tl.constexpr, LAST: tl.constexpr, FORM: tl.constexpr):
    """float32 scores of TILE blocks into rows `row` apart; for a later stage also which blocks are kept so far.

    Sums of coupled tensors are added up, from the FIRST to the LAST of them. A block is OUTER loops of INNER elements.
    """
    NORM: tl.constexpr = FORM.norm
    scope, block, real, out = slots_of(blocks, width, row, FORM)
    values = part[0] + offset_of(scope, part[2][0], part[2][1]) + offset_of(block, part[3][0], part[3][1])
    mask = part[1] + offset_of(scope, part[2][0], part[2][2]) + offset_of(block, part[3][0], part[3][2])
    powers = tl.full([FORM.tile, FORM.chunk], 0, tl.int32 if NORM == "inf" else tl.float32)
    some = tl.full([FORM.tile, FORM.chunk], 0, tl.int32)
    for outer in tl.range(0, FORM.outer, loop_unroll_factor=FORM.unrolled):
        for begin in range(0, FORM.inner, FORM.chunk):
            inner, exists = element_indices(begin, real, FORM)
            at = offset_of(outer, part[4][0][1:], part[4][1][1:]) + inner * part[4][1][0]
            x = tl.load(values[:, None] + at[None, :], mask=exists, other=0.0)
            if FORM.masked:
                at = offset_of(outer, part[4][0][1:], part[4][2][1:]) + inner * part[4][2][0]
                kept_before = tl.load(mask[:, None] + at[None, :], mask=exists, other=0) != 0
                x = tl.where(kept_before, x, 0.0).to(x.dtype)
                some = tl.maximum(some, kept_before.to(tl.int32))
            powers = combine(powers, raised(x, NORM), NORM)
    total = reduced(powers, NORM)
    if not FIRST:
        before = tl.load(scores + out, mask=real, other=0.0)
        total = combine(before.to(tl.int32, bitcast=True) if NORM == "inf" else before, total, NORM)
    tl.store(scores + out, root(total, NORM if LAST or NORM == "inf" else "1"), mask=real)
    if FORM.within_mask:
        any_kept = tl.max(some, axis=1)
        if not FIRST:
            any_kept = tl.maximum(any_kept, tl.load(kept + out, mask=real, other=0).to(tl.int32))
        tl.store(kept + out, any_kept.to(tl.uint8), mask=real)


@triton.jit
def slots_of(blocks, width, row, FORM: tl.constexpr):
    """TILE of all blocks: their scopes, their numbers in these, which exist, and where rows `row` apart hold them."""
    first = tl.program_id(0).to(tl.int64) if FORM.big else tl.program_id(0)
    slot = first * FORM.tile + tl.arange(0, FORM.tile)
    scope, block = slot // width, slot % width
    return scope, block, slot < blocks, scope.to(tl.int64) * row + block


@triton.jit
def element_indices(begin, real, FORM: tl.constexpr):
    """CHUNK elements of an innermost loop from `begin` on, and which exist in which block."""
    inner = begin + tl.arange(0, FORM.chunk)
    return inner, real[:, None] & (inner < FORM.inner)[None, :]


@triton.jit
def fill_kernel(part, blocks, width, kept, row, FORM: tl.constexpr):
    """Write the decisions on TILE blocks to all their elements, CHUNK at a time."""
    scope, block, real, out = slots_of(blocks, width, row, FORM)
    chosen = tl.load(kept + out, mask=real, other=0) != 0
    spread = tl.broadcast_to(chosen[:, None], [FORM.tile, FORM.chunk])
    mask = part[1] + offset_of(scope, part[2][0], part[2][2]) + offset_of(block, part[3][0], part[3][2])
    for outer in tl.range(0, FORM.outer, loop_unroll_factor=FORM.unrolled):
        for begin in range(0, FORM.inner, FORM.chunk):
            inner, exists = element_indices(begin, real, FORM)
            at = offset_of(outer, part[4][0][1:], part[4][2][1:]) + inner * part[4][2][0]
            write_mask(mask[:, None] + at[None, :], spread, exists, FORM.within_mask)
