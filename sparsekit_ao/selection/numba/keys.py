"""Compiled loops between memory and keys: blocks are read and scored, and their masks written.

A key is the int32 of `selection.keys`; one below all others stands for an absent block, which is never kept. Functions
are few and take many blocks at a time, because passing a `Window` costs as much as some hundred keys.
"""

import numpy as np

from .cache import compiled
from .memory import ONE, are_packed, deinterleave, gather, interleave, scatter

__all__ = ["IN_CACHE", "absent_key", "fill_keys", "sampled_keys", "store"]

IN_CACHE = 8192  # elements that are scored at a time
LEAST = 64  # blocks that are scored at a time, however many elements they have


@compiled
def absent_key(window):
    """Below every key: magnitudes start at 0, signed keys at minus the key of NaN."""
    if not window.signed:
        return np.int32(-1)
    return np.int32(-0x80000000 if window.kind == 0 else -0x8000)


@compiled
def fill_keys(window, blocks, single, first_x, step_x, shifts_x, first_m, step_m, shifts_m, count, keys):
    """keys[s, i]: the key of the block at `first + i * step + shifts[s]`, or the absent key (single elements only)."""
    if blocks is None:
        if single is not None:  # numba removes what a None decides; it compiles each kind when it is first called
            fill_single_keys(window, first_x, step_x, shifts_x, first_m, step_m, shifts_m, count, keys)
        return
    if blocks.run == 1 and are_packed(step_x, shifts_x):  # columns of rows: scored as they are stored, then separated
        row = np.empty((1, shifts_x.size * count), np.int32)
        score_streams(window, blocks, first_x, ONE, shifts_x[:1], row.size, row)
        deinterleave(row[0], keys)
    else:
        score_streams(window, blocks, first_x, step_x, shifts_x, count, keys)


@compiled
def score_streams(window, blocks, first, step, shifts, count, keys):
    """The same for blocks of several elements, some at a time."""
    streams, elements = shifts.size, blocks.elements.shape[1]
    at_once = min(count, max(LEAST, IN_CACHE // (elements * streams)))
    buffer = np.empty(elements * streams * at_once, np.int32)
    dealt = np.empty(streams * blocks.run * at_once, np.int32)
    for start in range(0, count, at_once):
        some = min(at_once, count - start)
        bits = buffer[: elements * streams * some]
        load(window.bits, blocks.elements[0], blocks.run, first + start * step, step, shifts, some, bits, dealt)
        score(bits, window.kind, blocks.norm, blocks.tree, streams * some)
        for s in range(streams):
            own, found = keys[s, start : start + some], bits[s * some : (s + 1) * some]
            for i in range(some):
                own[i] = found[i]


@compiled
def load(source, elements, run, first, step, shifts, count, out, dealt):
    """out = [element, stream, block] of blocks whose elements are `run` by `run` consecutive in memory."""
    streams = shifts.size
    together, size = np.empty(streams * run, np.int64), streams * run * count
    for e in range(0, elements.size, run):
        for s in range(streams):
            for r in range(run):
                together[s * run + r] = shifts[s] + elements[e + r]
        target = out[e * streams * count : (e + run) * streams * count]
        if streams == 1 or run == 1:
            gather(source, first, step, together, count, target.reshape((streams * run, count)))
            continue
        gather(source, first, step, together, count, dealt[:size].reshape((streams * run, count)))
        for s in range(streams):
            for r in range(run):
                row, found = target[(r * streams + s) * count :], dealt[(s * run + r) * count :]
                for i in range(count):
                    row[i] = found[i]


@compiled
def score(bits, kind, norm, tree, width):
    """The keys of blocks in the first `width` of [element, block]."""
    widen(bits, kind)
    if norm == 2:
        values = bits.view(np.float32)
        for i in range(values.size):
            values[i] *= values[i]
    fold(bits, norm, tree)
    finish_keys(bits[:width], norm)


@compiled
def fill_single_keys(window, first_x, step_x, shifts_x, first_m, step_m, shifts_m, count, keys):
    """The same for single elements."""
    if step_x == 1 and not window.signed:
        for s in range(shifts_x.size):
            begin = first_x + shifts_x[s]
            rank_run(window.bits[begin : begin + count], window.kind, keys[s])
    else:
        gather(window.bits, first_x, step_x, shifts_x, count, keys)
        for s in range(shifts_x.size):
            rank_bits(keys[s], window.kind, window.signed, count)
    if window.among_kept:
        held = np.empty((shifts_m.size, count), np.int32)
        absent = absent_key(window)
        gather(window.mask, first_m, step_m, shifts_m, count, held)
        for s in range(shifts_m.size):
            own, there = keys[s], held[s]
            for i in range(count):
                own[i] = own[i] if there[i] else absent


@compiled
def sampled_keys(window, blocks, single, addresses, keys):
    """Keys of the blocks at some addresses in the values; the mask is not read."""
    if blocks is None:
        if single is not None:
            for i in range(keys.size):
                keys[i] = window.bits[addresses[i]]
            rank_bits(keys, window.kind, window.signed, keys.size)
        return
    count, elements = keys.size, blocks.elements.shape[1]
    bits = np.empty(elements * count, np.int32)
    for e in range(elements):
        for i in range(count):
            bits[e * count + i] = window.bits[addresses[i] + blocks.elements[0, e]]
    score(bits, window.kind, blocks.norm, blocks.tree, count)
    for i in range(count):
        keys[i] = bits[i]


@compiled
def rank_run(bits, kind, keys):
    """As `gather` and `rank_bits` of magnitudes that are contiguous, in one pass."""
    top = np.int32(0x7FFFFFFF if kind == 0 else 0x7FFF)
    nan = np.int32(0x7F800001 if kind == 0 else 0x7F81 if kind == 1 else 0x7C01)
    for i in range(bits.size):
        keys[i] = min(np.int32(bits[i]) & top, nan)


@compiled
def rank_bits(keys, kind, signed, count):
    """Float bits to keys of the float's magnitude, or of the float."""
    top = np.int32(0x7FFFFFFF if kind == 0 else 0x7FFF)
    nan = np.int32(0x7F800001 if kind == 0 else 0x7F81 if kind == 1 else 0x7C01)
    if signed:
        for i in range(count):
            size = min(keys[i] & top, nan)
            keys[i] = -size if keys[i] < 0 and size < nan else size
    else:
        for i in range(count):
            keys[i] = min(keys[i] & top, nan)


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
def finish_keys(keys, norm):
    """Sums, as bits, to keys: of the root for the 2-norm."""
    if norm == 2:
        values = keys.view(np.float32)
        for i in range(keys.size):
            values[i] = np.sqrt(values[i])
    for i in range(keys.size):
        keys[i] = min(keys[i] & np.int32(0x7FFFFFFF), np.int32(0x7F800001))


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
def store(window, blocks, single, first, step, shifts, count, kept):
    """Write kept[s, i] to every element of the block at `first + i * step + shifts[s]`."""
    if blocks is None:
        if single is not None:
            scatter(window.mask, first, step, shifts, count, kept)
        return
    run, streams = blocks.run, shifts.size
    together, wide = np.empty(streams * run, np.int64), np.empty((streams * run, count), np.uint8)
    for s in range(streams):
        for r in range(run):
            row, own = wide[s * run + r], kept[s]
            for i in range(count):
                row[i] = own[i]
            together[s * run + r] = shifts[s] + blocks.elements[1, r]
    packed = are_packed(step, together)
    flags = np.empty(wide.size if packed else 0, np.uint8)
    if packed:
        interleave(wide, flags)
    for e in range(0, blocks.elements.shape[1], run):
        further = blocks.elements[1, e] - blocks.elements[1, 0]
        if packed:
            begin = first + together[0] + further
            part = window.mask[begin : begin + flags.size]
            for i in range(flags.size):
                part[i] = flags[i]
        else:
            scatter(window.mask, first + further, step, together, count, wide)
