"""Compiled loops between memory and keys: blocks are read and scored, and their masks written.

A key is the int32 of `selection.keys`; ABSENT, below all others, stands for a block that is never kept. Many blocks are
given by the address of the first, the step from each to the next, and the shift of each stream of such blocks.
Functions are few and take many blocks at a time, because passing a `Window` costs as much as some hundred keys.
"""

import numpy as np

from .cache import compiled
from .memory import ONE, are_packed, deinterleave, gather, gather_under, interleave, scatter

ABSENT = np.int32(-0x80000000)
LARGE, HUGE = np.int32((61 + 127) << 23), np.int32((122 + 127) << 23)  # 2^61, 2^122: sums of 32 squares, values fit
SMALL = np.int32((127 - 50) << 23)  # 2^-50: squares from here on are more than extremes.LEAST
IN_CACHE = 8192  # elements that are scored at a time
LEAST = 64  # blocks that are scored at a time, however many elements they have


@compiled
def fill_keys(window, values, mask, count, keys):
    """keys[s, i]: the key of the block at `first + i * step + shifts[s]`, or ABSENT (single elements only).

    `values` and `mask` are (first, step, shifts) in the two tensors.
    """
    first, step, shifts = values
    if window.elements.shape[1] == 1 and step == 1 and not window.masked:
        for s in range(shifts.size):
            begin = first + shifts[s]
            rank_bits(window.bits[begin : begin + count], window.kind, window.signed, keys[s])
    elif window.elements.shape[1] == 1:
        bits = np.empty(keys.shape, np.int32)  # not `keys` itself: only arrays apart become vector instructions
        if window.masked:
            gather_under(window.bits, values, window.under, mask, count, bits)
        else:
            gather(window.bits, first, step, shifts, count, bits)
        for s in range(shifts.size):
            rank_bits(bits[s], window.kind, window.signed, keys[s])
    elif are_packed(step, shifts, window.run) and (not window.masked or are_packed(mask[1], mask[2], window.run)):
        row = np.empty(shifts.size * count, np.int32)  # scored as they are stored, one after the other, then separated
        starts, steps = (first + shifts[0], mask[0] + mask[2][0]), (np.int64(window.run), np.int64(window.run))
        score_blocks(window, starts, steps, row)
        deinterleave(row, keys)
    else:
        for s in range(shifts.size):
            score_blocks(window, (first + shifts[s], mask[0] + mask[2][s]), (step, mask[1]), keys[s])
    if window.among_kept:
        first, step, shifts = mask
        held = np.empty(keys.shape, np.int32)
        gather(window.mask, first, step, shifts, count, held)
        for s in range(shifts.size):
            own, there = keys[s], held[s]
            for i in range(count):
                own[i] = own[i] if there[i] else ABSENT


@compiled
def score_blocks(window, first, step, keys):
    """The keys of blocks of several elements, some at a time; `first` and `step` are each (in values, in mask)."""
    elements, run = window.elements[0], window.run
    at_once = min(keys.size, max(LEAST, IN_CACHE // elements.size))
    buffer = np.empty(elements.size * at_once, np.int32)
    for start in range(0, keys.size, at_once):
        count = min(at_once, keys.size - start)
        bits = buffer[: elements.size * count]
        for e in range(0, elements.size, run):
            target = bits[e * count : (e + run) * count].reshape((run, count))
            values = first[0] + start * step[0], step[0], elements[e : e + run]
            if window.masked:
                mask = first[1] + start * step[1], step[1], window.elements[1, e : e + run]
                gather_under(window.bits, values, window.under, mask, count, target)
            else:
                gather(window.bits, values[0], values[1], values[2], count, target)
        score(window, bits, keys[start : start + count])


@compiled
def sampled_keys(window, addresses, under, keys):
    """Keys of the blocks at some addresses in the values and in the mask that they are scored under."""
    elements, count = window.elements[0], keys.size
    bits = np.empty(elements.size * count, np.int32)
    for e in range(elements.size):
        for i in range(count):
            bits[e * count + i] = window.bits[addresses[i] + elements[e]]
            if window.masked and window.under[under[i] + window.elements[1, e]] == 0:
                bits[e * count + i] = 0
    if elements.size == 1:
        rank_bits(bits, window.kind, window.signed, keys)
    else:
        score(window, bits, keys)


@compiled
def score(window, bits, keys):
    """The keys of blocks in the first row of [element, block], whose other rows are overwritten."""
    widen(bits, window.kind)
    values, norm = bits.view(np.float32), window.norm
    if norm != 3 and leaves_range(bits, norm == 2):
        window.extreme[0] = 1
    if norm == 2:
        for i in range(values.size):
            values[i] *= values[i]
    fold(bits, norm, window.tree)
    if norm == 2:
        for i in range(keys.size):
            values[i] = np.sqrt(values[i])
    rank_bits(bits[: keys.size], 0, False, keys)


@compiled
def leaves_range(bits, squared):
    """Whether the sum of some |values| of a block, or of their squares, may overflow or lose to underflow."""
    least, most = np.int32(0x7FFFFFFF), np.int32(0)
    for i in range(bits.size):
        most = max(most, bits[i])
        least = min(least, np.int32(bits[i] - 1) & np.int32(0x7FFFFFFF))  # zero becomes the largest
    return (most > LARGE or least < SMALL - 1) if squared else most > HUGE


@compiled
def rank_bits(bits, kind, signed, keys):
    """Float bits to keys of the float's magnitude, or of the float."""
    top = np.int32(0x7FFFFFFF if kind == 0 else 0x7FFF)
    nan = np.int32(0x7F800001 if kind == 0 else 0x7F81 if kind == 1 else 0x7C01)
    if signed:
        for i in range(keys.size):
            size = min(np.int32(bits[i]) & top, nan)
            keys[i] = -size if bits[i] < 0 and size < nan else size
    else:
        for i in range(keys.size):
            keys[i] = min(np.int32(bits[i]) & top, nan)


@compiled
def fold(bits, norm, tree):
    """Reduce [element, block] to its first row, by the reference's halving tree."""
    values, rest = bits.view(np.float32), bits.size
    for size in tree:
        rest //= size
        while size > 1:
            low = (size + 1) // 2
            if norm == 3:
                lower, upper = bits[: (size - low) * rest], bits[low * rest : size * rest]
                for i in range(lower.size):
                    lower[i] = max(lower[i], upper[i])
            else:
                under, above = values[: (size - low) * rest], values[low * rest : size * rest]
                for i in range(under.size):
                    under[i] += above[i]
            size = low


@compiled
def widen(bits, kind):
    """The bits of weights to those of |weight| in float32, in place."""
    if kind == 0:
        for i in range(bits.size):
            bits[i] &= np.int32(0x7FFFFFFF)
    elif kind == 1:
        for i in range(bits.size):
            bits[i] = (bits[i] & np.int32(0x7FFF)) << 16
    else:
        values = bits.view(np.float32)
        for i in range(bits.size):
            half = bits[i] & np.int32(0x7FFF)
            bits[i] = (half << 13) + (0x38000000 if half < 0x7C00 else 0x70000000)  # infinity and NaN: all exponent
        for i in range(bits.size):
            if bits[i] < 0x38800000:  # subnormal in float16, an ordinary number in float32
                values[i] = np.float32((bits[i] - 0x38000000) >> 13) * np.float32(2.0**-24)


@compiled
def store(window, mask, count, kept):
    """Write kept[s, i] to every element of the block at `first + i * step + shifts[s]`, (first, step, shifts) = mask.

    May overwrite `kept`.
    """
    first, step, shifts = mask
    elements, run, streams = window.elements[1], window.run, shifts.size
    if elements.size == 1:
        scatter(window.mask, first, step, shifts, count, kept)
        return
    together, rows = np.empty(streams * run, np.int64), np.empty((streams * run, count), np.uint8)
    for s in range(streams):
        for r in range(run):
            row, own = rows[s * run + r], kept[s]
            for i in range(count):
                row[i] = own[i]
            together[s * run + r] = shifts[s] + elements[r]
    if are_packed(step, together, 1):  # interleaved once, for all further runs of the blocks
        flags = np.empty((1, rows.size), np.uint8)
        interleave(rows, flags[0])
        together, step, count, rows = together[:1], ONE, flags.size, flags
    for e in range(0, elements.size, run):
        scatter(window.mask, first + elements[e] - elements[0], step, together, count, rows)
