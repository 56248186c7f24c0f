"""What every kernel shares: the tables' columns, the address of an element, reading keys, writing masks.

A launch reads two int64 tables, built by `plan`: a row for each part (the scopes of one `Scopes`) and a row for each
member (one tensor of a part).
"""

import triton
import triton.language as tl

from .ranking import order_key

# Columns of a part's row.
ROWS = tl.constexpr(0)  # scopes
BLOCKS = tl.constexpr(1)  # blocks of a scope in this part
KEEP = tl.constexpr(2)  # address of the budgets in device memory
KEEP_STEP = tl.constexpr(3)  # from one scope's budget to the next
STATE = tl.constexpr(4)  # the update's first row in the state of the radix select
OFFSET = tl.constexpr(5)  # the update's first slot among stored scores
WIDTH = tl.constexpr(6)  # slots of a row, over all parts of the update
COLUMN = tl.constexpr(7)  # first slot of this part in a row
SPANS = tl.constexpr(8)  # spans of a row in this part
SPAN = tl.constexpr(9)  # first span of this part in a row
ROW_SPANS = tl.constexpr(10)  # spans of a row, over all parts
SPAN_ORIGIN = tl.constexpr(11)  # first span of the update
SAMPLES = tl.constexpr(12)  # samples taken from a row of this part
SAMPLE = tl.constexpr(13)  # first sample of this part in a row
ROW_SAMPLES = tl.constexpr(14)  # samples of a row, over all parts
BUFFER = tl.constexpr(15)  # first buffer of this part among those of gathered keys that no mask holds
SIZES = tl.constexpr(16)  # sizes of the loops over scopes, then of those over the blocks of a scope
PART_FIELDS = tl.constexpr(28)

# Columns of a member's row.
VALUES = tl.constexpr(0)  # address
MASK = tl.constexpr(1)  # address
ELEMENTS = tl.constexpr(2)  # of a block
STRIDES = tl.constexpr(3)  # over scopes, blocks and elements, for each of these of the values, then of the mask
ELEMENT_SIZES = tl.constexpr(39)  # sizes of the loops over elements
MEMBER_FIELDS = tl.constexpr(45)
LOOPS = tl.constexpr(6)  # most loops of a nest

SCOPE = tl.constexpr(0)
BLOCK = tl.constexpr(1)
ELEMENT = tl.constexpr(2)


@triton.jit
def part_of_program(starts, parts, PARTS: tl.constexpr, BIG: tl.constexpr, BACKWARDS: tl.constexpr = False):
    """The number of the program's part, the part's row of the table, and the program's number within the part."""
    program = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    first_programs = tl.load(starts + tl.arange(0, PARTS))
    index = tl.sum((first_programs <= program).to(tl.int32)) - 1  # the last part that starts here or before
    local = program - tl.load(starts + index)
    return index, parts + index * PART_FIELDS, local if BIG else local.to(tl.int32)


@triton.jit
def field(row, column: tl.constexpr, FORM: tl.constexpr):
    """One field of a table, as an integer of the width of offsets."""
    found = tl.load(row + column)
    return found if FORM.big else found.to(tl.int32)


@triton.jit
def divisible(number, by: tl.constexpr):
    """A multiple of `by`, written so that the compiler knows it is one (a hint on a scalar is not propagated)."""
    return number // by * by if by > 1 else number


@triton.jit
def count_field(row, column: tl.constexpr, FORM: tl.constexpr):
    """A count of the table, known to be a multiple of 16 where FORM states so, so that accesses stay vectors."""
    return divisible(field(row, column, FORM), 16 if FORM.counts_16 else 1)


@triton.jit
def nest_offset(
    index, sizes, strides, COUNT: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr, FORM: tl.constexpr
):
    """The offset of `index` in a nest of COUNT loops.

    INNER is the innermost size where it is known at compile time (else 0), UNIT states that the innermost stride is 1.
    """
    rest = index
    found = index * 0
    for k in tl.static_range(COUNT):
        at = rest
        if k < COUNT - 1:
            if k == 0 and INNER > 0:
                at = rest % INNER
                rest = rest // INNER
            else:
                size = field(sizes, COUNT - 1 - k, FORM)
                if k == 0 and UNIT:
                    size = divisible(size, FORM.alignment)
                at = rest % size
                rest = rest // size
        if k == 0 and UNIT:
            found += at
        else:
            found += at * divisible(field(strides, COUNT - 1 - k, FORM), FORM.alignment)
    return found


@triton.jit
def offset_of(part, member, index, LEVEL: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Offsets of scopes, blocks or elements (LEVEL) in a member's values, or with MASKED in its mask."""
    sizes = member + ELEMENT_SIZES if LEVEL == ELEMENT else part + SIZES + LEVEL * LOOPS
    strides = member + STRIDES + (2 * LEVEL + MASKED) * LOOPS
    inner: tl.constexpr = FORM.inner if LEVEL == ELEMENT else 0
    return nest_offset(index, sizes, strides, FORM.nests[LEVEL], inner, FORM.unit_strides[2 * LEVEL + MASKED], FORM)


@triton.jit
def values_of(member, FORM: tl.constexpr):
    """Pointer to a member's first value."""
    return pointer(member, VALUES, FORM.dtype, FORM)


@triton.jit
def mask_of(member, FORM: tl.constexpr):
    """Pointer to a member's first mask element."""
    return pointer(member, MASK, FORM.mask_dtype, FORM)


@triton.jit
def pointer(row, column: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """An address of the table as a pointer."""
    address = tl.load(row + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(address, 16) if FORM.alignment else address


@triton.jit
def values_and_mask(part, member, scores, kept, FORM: tl.constexpr):
    """Pointers to values and mask: a member's, or with FORM.stored those of stored scores and decisions."""
    if FORM.stored:
        offset = tl.load(part + OFFSET)
        if FORM.alignment:
            offset = divisible(offset, 16)
        values, mask = scores + offset, kept + offset
    else:
        values, mask = values_of(member, FORM), mask_of(member, FORM)
    return values, mask


@triton.jit
def slots_of(part, first, FORM: tl.constexpr):
    """The TILE slots of a program, counted row by row: their scopes, their blocks, and which of them exist."""
    slot = first * FORM.tile + tl.arange(0, FORM.tile)
    width = count_field(part, BLOCKS, FORM)
    return slot // width, slot % width, slot < field(part, ROWS, FORM) * width


@triton.jit
def stored_slots(part, scope, block):
    """Indices of slots among stored scores and decisions."""
    return tl.load(part + OFFSET) + scope * tl.load(part + WIDTH) + tl.load(part + COLUMN) + block


@triton.jit
def block_offsets(part, member, scope, block, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Offsets of the blocks of slots in a member's values, or in its mask."""
    return offset_of(part, member, scope, SCOPE, MASKED, FORM) + offset_of(part, member, block, BLOCK, MASKED, FORM)


@triton.jit
def block_tile(part, member, first, begin, base, real, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Offsets of CHUNK elements, from `begin` on, of blocks that start at `base`, and which of them exist.

    The tile is contiguous where FORM states so.
    """
    if FORM.contiguous:
        at = first * (FORM.tile * FORM.chunk) + tl.arange(0, FORM.tile * FORM.chunk)
        exists = at < field(part, ROWS, FORM) * count_field(part, BLOCKS, FORM) * FORM.chunk
    else:
        element, in_block = elements_at(member, begin, FORM)
        at = base[:, None] + offset_of(part, member, element, ELEMENT, MASKED, FORM)[None, :]
        exists = real[:, None] & in_block[None, :]
    return at, exists


@triton.jit
def row_of_blocks(member, base, row, FORM: tl.constexpr):
    """Offsets [TILE, INNER] in values of one row of each of the blocks that start at `base`."""
    stride = field(member + STRIDES + 2 * ELEMENT * LOOPS, 0, FORM)
    return (base + row * divisible(stride, FORM.alignment))[:, None] + tl.arange(0, FORM.inner)[None, :]


@triton.jit
def scope_tile(part, member, first, scope, real, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Offsets [TILE, PADDED, CHUNK] in values or mask, and which exist; contiguous where FORM states so."""
    if FORM.contiguous:
        volume: tl.constexpr = FORM.padded * FORM.chunk
        at = first * (FORM.tile * volume) + tl.arange(0, FORM.tile * volume)
        exists = at < count_field(part, ROWS, FORM) * volume
    else:
        block = tl.arange(0, FORM.padded)
        element, in_block = elements_at(member, 0, FORM)
        at = (
            offset_of(part, member, scope, SCOPE, MASKED, FORM)[:, None, None]
            + offset_of(part, member, block, BLOCK, MASKED, FORM)[None, :, None]
            + offset_of(part, member, element, ELEMENT, MASKED, FORM)[None, None, :]
        )
        exists = real[:, :, None] & in_block[None, None, :]
    return at, exists


@triton.jit
def elements_at(member, begin, FORM: tl.constexpr):
    """The elements at CHUNK positions of a block's halving tree from `begin` on, and which of them exist.

    A tree over sides that are no powers of two has gaps; else positions are elements.
    """
    at = begin + tl.arange(0, FORM.chunk)
    if len(FORM.sides) > 0:
        found = at * 0
        real = at >= 0
        for k in tl.static_range(len(FORM.sides)):
            index, exists = index_in_tree((at // FORM.sides[k][2]) % FORM.sides[k][1], FORM.sides[k][0])
            found += index * FORM.sides[k][3]
            real = real & exists
    else:
        found = at
        real = at < elements_of(member, FORM)
    return found, real


@triton.jit
def index_in_tree(position, SIDE: tl.constexpr):
    """Which of SIDE elements is at a position of their halving tree, and whether one is."""
    found = position * 0
    real = position >= 0
    levels: tl.constexpr = (SIDE - 1).bit_length()
    for j in tl.static_range(levels):
        # after k halvings of n elements ceil(n / 2^k) = ((n - 1) >> k) + 1 are left
        found += ((position >> j) & 1) * (((SIDE - 1) >> (levels - j)) + 1)
        real = real & (found <= ((SIDE - 1) >> (levels - j - 1)))
    return found, real


@triton.jit
def elements_of(member, FORM: tl.constexpr):
    """Elements of a member's block."""
    return divisible(field(member, ELEMENTS, FORM), FORM.chunk if FORM.whole_chunks else 1)


@triton.jit
def budget(part, rows, valid, PER_SCOPE: tl.constexpr):
    """Blocks kept in each of `rows`, int64, read from device memory; one number without PER_SCOPE."""
    first = tl.load(part + KEEP).to(tl.pointer_type(tl.int64))
    return tl.load(first + rows * tl.load(part + KEEP_STEP), mask=valid, other=0) if PER_SCOPE else tl.load(first)


@triton.jit
def read(at, exists):
    """What is stored at these addresses; 0 where nothing exists, unless `exists` is None, so that all of it does."""
    return tl.load(at) if exists is None else tl.load(at, mask=exists, other=0)


@triton.jit
def write_mask(at, chosen, exists, FORM: tl.constexpr):
    """Write decisions to a mask, those that exist, or all if `exists` is None; a later stage only removes."""
    if FORM.among_kept:
        tl.store(at, tl.where(chosen, read(at, exists), 0), mask=exists)
    elif tl.bfloat16 == FORM.mask_dtype:
        tl.store(at, chosen.to(tl.float32).to(tl.bfloat16), mask=exists)  # the interpreter converts no integer to bf16
    else:
        tl.store(at, chosen.to(FORM.mask_dtype), mask=exists)


@triton.jit
def row_pointers(part, member, row, scores, kept, FORM: tl.constexpr):
    """Pointers to a row's first value and first mask element; `row` is int64, because rows may be far apart."""
    values, mask = values_and_mask(part, member, scores, kept, FORM)
    values += offset_of(part, member, row, SCOPE, False, FORM)
    return values, mask + offset_of(part, member, row, SCOPE, True, FORM)


@triton.jit
def row_keys(part, member, values, mask, slot, real, FORM: tl.constexpr):
    """Keys of these slots of a row, all real if `real` is None; 0 where there is none or an earlier stage pruned it."""
    x = read(values + offset_of(part, member, slot, BLOCK, False, FORM), real)
    if FORM.among_kept or FORM.masked:
        left = read(mask + offset_of(part, member, slot, BLOCK, True, FORM), real) != 0
        if FORM.masked:
            x = tl.where(left, x, 0.0).to(FORM.dtype)
    keys = order_key(x, FORM.signed)
    if FORM.among_kept:
        keys = tl.where(left, keys, 0).to(tl.uint32)
    return keys if real is None else tl.where(real, keys, 0).to(tl.uint32)


@triton.jit
def span_of(
    starts, parts, members, scores, kept, PARTS: tl.constexpr, FORM: tl.constexpr, BACKWARDS: tl.constexpr = False
):
    """Part, member, pointers to the row's values and mask, row, its state, span, and the span's record."""
    index, part, local = part_of_program(starts, parts, PARTS, True, BACKWARDS)
    spans = tl.load(part + SPANS)
    row, span = local // spans, local % spans
    member = members + index * MEMBER_FIELDS
    values, mask = row_pointers(part, member, row, scores, kept, FORM)
    entry = tl.load(part + SPAN_ORIGIN) + row * tl.load(part + ROW_SPANS) + tl.load(part + SPAN) + span
    return part, member, values, mask, row, tl.load(part + STATE) + row, span, entry


@triton.jit
def slots_of_span(part, span, length, FORM: tl.constexpr):
    """First slot of a span of `length` tiles, the slot after its last one, and the slots of the row."""
    blocks = count_field(part, BLOCKS, FORM)
    begin = (span if FORM.big else span.to(tl.int32)) * (length * FORM.tile)
    return begin, begin + tl.minimum(length * FORM.tile, blocks - begin), blocks
