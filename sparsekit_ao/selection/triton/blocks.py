"""Kernels over blocks: small scopes scored, selected and masked at once; else scores, and masks from decisions."""

import triton
import triton.language as tl

from .device import (
    BLOCK,
    MEMBER_FIELDS,
    ROWS,
    SCOPE,
    block_offsets,
    block_tile,
    budget,
    count_field,
    elements_of,
    mask_of,
    offset_of,
    part_of_program,
    row_of_blocks,
    scope_tile,
    slots_of,
    stored_slots,
    values_and_mask,
    values_of,
    write_mask,
)
from .ranking import (
    block_sums,
    combine,
    keep_bisected,
    keep_pairs,
    keep_slots,
    keep_sorted,
    magnitude_bits,
    order_key,
    power,
    root,
    unique_keys,
)

NARROW = tl.constexpr(16)  # widest scope whose keys are sorted by a network, or compared in pairs


@triton.jit
def fused_kernel(starts, parts, members, scores, kept, FORM: tl.constexpr, PARTS: tl.constexpr):
    """TILE scopes of WIDTH blocks (PADDED to a power of two) of CHUNK elements: scored, selected, masks written.

    With FORM.stored rows of `scores` are selected and `kept` is written.
    """
    index, part, first = part_of_program(starts, parts, PARTS, FORM.big)
    scope = first * FORM.tile + tl.arange(0, FORM.tile)
    valid = scope < count_field(part, ROWS, FORM)
    keep = tl.full([FORM.tile], 0, tl.int32) + budget(part, scope, valid, FORM.per_scope).to(tl.int32)
    own = members + index * FORM.members * MEMBER_FIELDS
    if FORM.apart:
        select_slots(part, own, scope, valid, keep, FORM)
    else:
        select_tile(part, own, scores, kept, first, scope, valid, keep, FORM)


@triton.jit
def select_slots(part, member, scope, valid, keep, FORM: tl.constexpr):
    """Masks of scopes of single elements that are neighbours in memory: each of their slots is read as one vector."""
    UNIQUE: tl.constexpr = FORM.bits <= 16
    COUNT: tl.constexpr = FORM.padded
    WIDTH: tl.constexpr = FORM.width
    values = values_of(member, FORM) + offset_of(part, member, scope, SCOPE, False, FORM)
    mask = mask_of(member, FORM) + offset_of(part, member, scope, SCOPE, True, FORM)
    keys = ()
    for i in tl.static_range(COUNT):
        keys += (key_of_slot(part, member, values, mask, valid, i, UNIQUE, FORM),)
    chosen = keep_slots(keys, keep, COUNT, UNIQUE)
    for i in tl.static_range(WIDTH):
        write_mask(mask + slot_offset(part, member, i, True, FORM), chosen[i], valid, FORM)


@triton.jit
def key_of_slot(part, member, values, mask, valid, i: tl.constexpr, UNIQUE: tl.constexpr, FORM: tl.constexpr):
    """Keys of slot i of every scope; 0 where there is none or an earlier stage pruned it."""
    found = tl.full([FORM.tile], 0, tl.uint32)
    if i < FORM.width:
        x = tl.load(values + slot_offset(part, member, i, False, FORM), mask=valid, other=0.0)
        if FORM.among_kept or FORM.masked:
            left = tl.load(mask + slot_offset(part, member, i, True, FORM), mask=valid, other=0) != 0
            x = tl.where(left, x, 0.0).to(FORM.dtype)
        found = unique_keys(x, i, FORM.padded, FORM.signed) if UNIQUE else order_key(x, FORM.signed)
        if FORM.among_kept:
            found = tl.where(left, found, 0).to(tl.uint32)
    return found


@triton.jit
def slot_offset(part, member, i: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr):
    """How far slot i of a scope is from its first one, in values or mask."""
    slot = tl.full((), i, tl.int64 if FORM.big else tl.int32)
    return offset_of(part, member, slot, BLOCK, MASKED, FORM)


@triton.jit
def select_tile(part, own, scores, kept, first, scope, valid, keep, FORM: tl.constexpr):
    """Masks of scopes of any kind, read as one tile."""
    NORM: tl.constexpr = FORM.norm  # before triton 3.7 a string read from FORM is no constexpr
    NETWORK: tl.constexpr = FORM.single and FORM.padded <= NARROW  # with sums of blocks it takes more registers
    UNIQUE: tl.constexpr = NETWORK and FORM.bits <= 16
    SPARE: tl.constexpr = FORM.among_kept or FORM.padded > FORM.width  # slots that must not be kept
    real = valid[:, None] & (tl.arange(0, FORM.padded) < FORM.width)[None, :]
    total = tl.full([FORM.tile, FORM.padded], 0, tl.int32 if NORM == "inf" else tl.float32)
    keys = tl.full([FORM.tile, FORM.padded], 0, tl.uint32)
    remaining = tl.full([FORM.tile, FORM.padded], 0, tl.int32)
    for m in range(FORM.members):
        member = own + m * MEMBER_FIELDS
        values, mask = values_and_mask(part, member, scores, kept, FORM)
        at, exists = scope_tile(part, member, first, scope, real, False, FORM)
        x = tl.load(values + at, mask=exists, other=0.0)
        if FORM.among_kept or FORM.masked:
            mask_at, _ = scope_tile(part, member, first, scope, real, True, FORM)
            left = tl.load(mask + mask_at, mask=exists, other=0) != 0
            x = tl.where(left, x, 0.0).to(FORM.dtype)
            remaining += tl.sum(tl.reshape(left.to(tl.int32), [FORM.tile, FORM.padded, FORM.chunk]), axis=2)
        if UNIQUE:
            x = tl.reshape(x, [FORM.tile, FORM.padded])
            keys = unique_keys(x, tl.arange(0, FORM.padded)[None, :], FORM.padded, FORM.signed)
        elif FORM.single:
            keys = tl.reshape(order_key(x, FORM.signed), [FORM.tile, FORM.padded])
        else:
            sums = block_sums(power(x, NORM), FORM.tile * FORM.padded, FORM.chunk, NORM)
            total = combine(total, tl.reshape(sums, [FORM.tile, FORM.padded]), NORM)
    if not FORM.single:
        keys = order_key(root(total, NORM), False)
    if SPARE:
        keys = tl.where(real & (remaining > 0) if FORM.among_kept else real, keys, 0).to(tl.uint32)
    if NETWORK:
        chosen = keep_sorted(keys, keep, FORM.padded, UNIQUE, SPARE)
    elif FORM.padded <= NARROW:
        chosen = keep_pairs(keys, keep, FORM.width)
    else:
        chosen = keep_bisected(keys, keep, FORM.bits)
    for m in range(FORM.members):
        member = own + m * MEMBER_FIELDS
        _, mask = values_and_mask(part, member, scores, kept, FORM)
        at, exists = scope_tile(part, member, first, scope, real, True, FORM)
        spread = tl.broadcast_to(chosen[:, :, None], [FORM.tile, FORM.padded, FORM.chunk])
        write_mask(mask + at, tl.reshape(spread, at.shape), exists, FORM)


@triton.jit
def score_kernel(starts, parts, members, scores, kept, FORM: tl.constexpr, PARTS: tl.constexpr):
    """float32 scores of TILE blocks; for a later stage also which blocks were kept so far."""
    NORM: tl.constexpr = FORM.norm  # before triton 3.7 a string read from FORM is no constexpr
    COLUMNS: tl.constexpr = FORM.inner if FORM.block_rows > 1 else FORM.chunk
    index, part, first = part_of_program(starts, parts, PARTS, FORM.big)
    scope, block, real = slots_of(part, first, FORM)
    total = tl.full([FORM.tile], 0, tl.int32 if NORM == "inf" else tl.float32)
    remaining = tl.full([FORM.tile], 0, tl.int32)
    for m in range(FORM.members):
        member = members + (index * FORM.members + m) * MEMBER_FIELDS
        base = block_offsets(part, member, scope, block, False, FORM)
        mask_base = block_offsets(part, member, scope, block, True, FORM)
        if FORM.block_rows > 1:
            powers = powers_by_rows(member, base, real, FORM)
        else:
            powers, remaining = powers_by_chunks(part, member, first, base, mask_base, real, remaining, FORM)
        total = combine(total, block_sums(powers, FORM.tile, COLUMNS, NORM), NORM)
    # the score of a single element is |x|, with one bit pattern for every NaN
    result = magnitude_bits(total).to(tl.float32, bitcast=True) if FORM.single else root(total, NORM)
    out = stored_slots(part, scope, block)
    tl.store(scores + out, result, mask=real)
    if FORM.among_kept:
        tl.store(kept + out, (remaining > 0).to(tl.uint8), mask=real)


@triton.jit
def powers_by_chunks(part, member, first, base, mask_base, real, remaining, FORM: tl.constexpr):
    """Powers [TILE, CHUNK] of the elements of blocks, chunks added up; `remaining` is 1 where a mask keeps any."""
    NORM: tl.constexpr = FORM.norm
    POWER: tl.constexpr = "1" if FORM.single else NORM
    powers = tl.full([FORM.tile, FORM.chunk], 0, tl.int32 if NORM == "inf" else tl.float32)
    for begin in range(0, elements_of(member, FORM) if FORM.chunked else 1, FORM.chunk):
        at, exists = block_tile(part, member, first, begin, base, real, False, FORM)
        x = tl.load(values_of(member, FORM) + at, mask=exists, other=0.0)
        if FORM.among_kept or FORM.masked:
            mask_at, _ = block_tile(part, member, first, begin, mask_base, real, True, FORM)
            left = tl.load(mask_of(member, FORM) + mask_at, mask=exists, other=0) != 0
            x = tl.where(left, x, 0.0).to(FORM.dtype)
            kinds = tl.reshape(left.to(tl.int32), [FORM.tile, FORM.chunk])
            remaining = tl.maximum(remaining, tl.max(kinds, axis=1))
        powers = combine(powers, power(tl.reshape(x, [FORM.tile, FORM.chunk]), POWER), NORM)
    return powers, remaining


@triton.jit
def powers_by_rows(member, base, real, FORM: tl.constexpr):
    """Powers [TILE, INNER] of a row of every block at a time, added in the order of the halving tree."""
    NORM: tl.constexpr = FORM.norm
    ROWS: tl.constexpr = FORM.block_rows
    LEVELS: tl.constexpr = FORM.block_rows.bit_length() - 1
    exists = tl.broadcast_to(real[:, None], [FORM.tile, FORM.inner])
    sums = ()
    for i in tl.static_range(ROWS):
        row = tl.full((), 0, tl.int32)
        for level in tl.static_range(LEVELS):
            row = row * 2 + (i >> level) % 2  # the tree adds row 0 and row `block_rows` / 2 first, then a quarter apart
        at = row_of_blocks(member, base, row, FORM)
        x = tl.load(values_of(member, FORM) + at, mask=exists, other=0.0)
        sums = with_row(sums, power(x, NORM), i, LEVELS, NORM)
    return sums[0]  # type: ignore[misc]


@triton.jit
def with_row(sums, powers, i: tl.constexpr, LEVELS: tl.constexpr, NORM: tl.constexpr):
    """Sums of 1, 2, 4 ... rows, the fewest last, with row i of the tree's order: two of equally many are added."""
    sums += (powers,)
    for level in tl.static_range(LEVELS):
        if (i + 1) % (2 << level) == 0:
            both = (combine(sums[-2], sums[-1], NORM),)
            sums = sums[:-2] + both
    return sums


@triton.jit
def fill_kernel(starts, parts, members, kept, FORM: tl.constexpr, PARTS: tl.constexpr):
    """Write the decisions on TILE blocks to every element of them, CHUNK elements at a time."""
    index, part, first = part_of_program(starts, parts, PARTS, FORM.big)
    scope, block, real = slots_of(part, first, FORM)
    chosen = tl.load(kept + stored_slots(part, scope, block), mask=real, other=0) != 0
    for m in range(FORM.members):
        member = members + (index * FORM.members + m) * MEMBER_FIELDS
        mask = mask_of(member, FORM)
        base = block_offsets(part, member, scope, block, True, FORM)
        for begin in range(0, elements_of(member, FORM) if FORM.chunked else 1, FORM.chunk):
            at, exists = block_tile(part, member, first, begin, base, real, True, FORM)
            spread = tl.broadcast_to(chosen[:, None], [FORM.tile, FORM.chunk])
            write_mask(mask + at, tl.reshape(spread, at.shape), exists, FORM)
