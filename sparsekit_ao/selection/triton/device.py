"""What every kernel shares: finding its tensors in the table, walking nests, writing masks.

Knows one tile at a time. The table is an int64 tensor of part and member rows (see `table`); the field numbers below
are its columns.
"""

import triton
import triton.language as tl

# A part is the scopes of one group: sizes, budget, and where its slots lie in what all parts share.
ROWS = tl.constexpr(0)  # scopes
BLOCKS = tl.constexpr(1)  # blocks of a scope in this part
KEEP = tl.constexpr(2)  # address of the budgets in device memory
KEEP_STEP = tl.constexpr(3)  # from one scope's budget to the next
STATE = tl.constexpr(4)  # first row of the problem in the selection's state
OFFSET = tl.constexpr(5)  # first slot of the problem among stored scores
WIDTH = tl.constexpr(6)  # slots of a row, over all parts of the problem
COLUMN = tl.constexpr(7)  # first slot of this part in a row
SPANS = tl.constexpr(8)  # spans of a row in this part
SPAN = tl.constexpr(9)  # first span of this part in a row
ROW_SPANS = tl.constexpr(10)  # spans of a row, over all parts
SPAN_ORIGIN = tl.constexpr(11)  # first span of the problem
SAMPLES = tl.constexpr(12)  # samples taken from a row of this part
SAMPLE = tl.constexpr(13)  # first sample of this part in a row
ROW_SAMPLES = tl.constexpr(14)  # samples of a row, over all parts
SIZES = tl.constexpr(16)  # loops over scopes, then loops over the blocks of a scope
PART_FIELDS = tl.constexpr(28)

# A member is one tensor's share of a part: two addresses, and its walks along scopes, blocks and elements.
VALUES = tl.constexpr(0)
MASK = tl.constexpr(1)
ELEMENTS = tl.constexpr(2)
WALKS = tl.constexpr(3)  # strides of values and of the mask: of scopes, of blocks, of elements
ELEMENT_SIZES = tl.constexpr(39)
MEMBER_FIELDS = tl.constexpr(45)
LOOPS = tl.constexpr(6)  # longest nest

SCOPE = tl.constexpr(0)
BLOCK = tl.constexpr(1)
ELEMENT = tl.constexpr(2)


@triton.jit
def opened(starts, parts, PARTS: tl.constexpr, BIG: tl.constexpr):
    """What a program works on: the number of its part, the part's line, and the program's number within the part."""
    program = tl.program_id(0)
    begins = tl.load(starts + tl.arange(0, PARTS))
    which = tl.sum((begins <= program).to(tl.int32)) - 1  # the last part that starts at it or before
    first = program - tl.load(starts + which)
    return which, parts + which * PART_FIELDS, first if BIG else first.to(tl.int32)


@triton.jit
def field(row, at: tl.constexpr, FORM: tl.constexpr):
    """One field of the table, in the width that addresses are counted in."""
    found = tl.load(row + at)
    return found if FORM.big else found.to(tl.int32)


@triton.jit
def multiple(number, of: tl.constexpr):
    """A number that is a multiple of `of`, in a form that tells the compiler so (a hint on a scalar gets lost)."""
    return number // of * of if of > 1 else number


@triton.jit
def evenly(row, at: tl.constexpr, FORM: tl.constexpr):
    """A count of the table, known to be a multiple of 16 where FORM says so, so that vectors stay whole."""
    return multiple(field(row, at, FORM), 16 if FORM.even else 1)


@triton.jit
def walk(index, sizes, strides, COUNT: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr, FORM: tl.constexpr):
    """The address of `index` in a nest of COUNT loops.

    INNER is the innermost size where it is known at compile time (else 0), UNIT says that the innermost stride is 1.
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
                    size = multiple(size, FORM.aligned)
                at = rest % size
                rest = rest // size
        if k == 0 and UNIT:
            found += at
        else:
            found += at * multiple(field(strides, COUNT - 1 - k, FORM), FORM.aligned)
    return found


@triton.jit
def reach(part, member, index, LEVEL: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Where scopes, blocks or elements (LEVEL) begin in a member's values, or with MASKED in its mask."""
    sizes = member + ELEMENT_SIZES if LEVEL == ELEMENT else part + SIZES + LEVEL * LOOPS
    strides = member + WALKS + (2 * LEVEL + MASKED) * LOOPS
    inner: tl.constexpr = FORM.inner if LEVEL == ELEMENT else 0
    return walk(index, sizes, strides, FORM.nests[LEVEL], inner, FORM.units[2 * LEVEL + MASKED], FORM)


@triton.jit
def values_of(member, FORM: tl.constexpr):
    """A member's first value."""
    return pointer(member, VALUES, FORM.dtype, FORM)


@triton.jit
def mask_of(member, FORM: tl.constexpr):
    """A member's first mask element."""
    return pointer(member, MASK, FORM.mask_dtype, FORM)


@triton.jit
def pointer(row, at: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """An address of the table as a pointer."""
    address = tl.load(row + at).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(address, 16) if FORM.aligned else address


@triton.jit
def stored(part, scores, kept, FORM: tl.constexpr):
    """Where an update's stored scores and decisions begin."""
    offset = tl.load(part + OFFSET)
    if FORM.aligned:
        offset = multiple(offset, 16)
    return scores + offset, kept + offset


@triton.jit
def ends(part, member, scores, kept, FORM: tl.constexpr):
    """Where values and mask begin: a member's, or with FORM.stored those of the stored rows."""
    if FORM.stored:
        values, mask = stored(part, scores, kept, FORM)
    else:
        values, mask = values_of(member, FORM), mask_of(member, FORM)
    return values, mask


@triton.jit
def slots_of(part, first, FORM: tl.constexpr):
    """The TILE slots of a program, counted row by row: scope, block, and which of them exist."""
    slot = first * FORM.tile + tl.arange(0, FORM.tile)
    width = evenly(part, BLOCKS, FORM)
    return slot // width, slot % width, slot < field(part, ROWS, FORM) * width


@triton.jit
def begins(part, member, scope, block, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Where the blocks of slots begin in a member's values, or in its mask."""
    return reach(part, member, scope, SCOPE, MASKED, FORM) + reach(part, member, block, BLOCK, MASKED, FORM)


@triton.jit
def block_tile(part, member, first, begin, lies, real, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Addresses of CHUNK elements of each slot's block, and which exist; one run of memory where FORM is flat.

    Args:
        part, member: lines of the table.
        first: the program's number within the part.
        begin: first element.
        lies: where the blocks begin.
        real: which slots exist.
        MASKED: in the mask, else in the values.
        FORM: what is known when compiling.
    """
    if FORM.flat:
        at = first * (FORM.tile * FORM.chunk) + tl.arange(0, FORM.tile * FORM.chunk)
        seen = at < field(part, ROWS, FORM) * evenly(part, BLOCKS, FORM) * FORM.chunk
    else:
        element, there = elements_at(member, begin, FORM)
        at = lies[:, None] + reach(part, member, element, ELEMENT, MASKED, FORM)[None, :]
        seen = real[:, None] & there[None, :]
    return at, seen


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
            index, there = place_in_tree((at // FORM.sides[k][2]) % FORM.sides[k][1], FORM.sides[k][0])
            found += index * FORM.sides[k][3]
            real = real & there
    else:
        found = at
        real = at < elements_of(member, FORM)
    return found, real


@triton.jit
def place_in_tree(position, SIDE: tl.constexpr):
    """Which of SIDE elements stands at a position of their halving tree, and whether one does."""
    found = position * 0
    real = position >= 0
    levels: tl.constexpr = (SIDE - 1).bit_length()
    for j in tl.static_range(levels):
        # after k folds of n elements ceil(n / 2^k) = ((n - 1) >> k) + 1 are left
        found += ((position >> j) & 1) * (((SIDE - 1) >> (levels - j)) + 1)
        real = real & (found <= ((SIDE - 1) >> (levels - j - 1)))
    return found, real


@triton.jit
def elements_of(member, FORM: tl.constexpr):
    """Elements of a member's block."""
    return multiple(field(member, ELEMENTS, FORM), FORM.chunk if FORM.whole else 1)


@triton.jit
def budget(part, rows, valid, EACH: tl.constexpr):
    """Blocks kept in each of `rows`, int64, read from device memory; one number without EACH."""
    first = tl.load(part + KEEP).to(tl.pointer_type(tl.int64))
    return tl.load(first + rows * tl.load(part + KEEP_STEP), mask=valid, other=0) if EACH else tl.load(first)


@triton.jit
def as_mask(chosen, DTYPE: tl.constexpr):
    """Decisions as numbers of the mask's dtype; bf16 by way of float32, which the interpreter gets right."""
    return chosen.to(tl.float32).to(DTYPE) if tl.bfloat16 == DTYPE else chosen.to(DTYPE)


@triton.jit
def marked(at, chosen, seen, FORM: tl.constexpr):
    """Write decisions to a mask; a later stage only removes."""
    if FORM.among_kept:
        tl.store(at, tl.where(chosen, tl.load(at, mask=seen, other=0), 0), mask=seen)
    else:
        tl.store(at, as_mask(chosen, FORM.mask_dtype), mask=seen)
