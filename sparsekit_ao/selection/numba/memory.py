"""Compiled loops that read and write many strided elements at once, in flat memory.

An address is `first + i * step + shifts[s]`: element i of stream s. Streams whose elements alternate in memory (the
four of a 2:4 scope) are separated by loops of a constant stride, which the compiler turns into vector instructions.
"""

import numpy as np

from .cache import compiled

__all__ = ["ONE", "address_of", "are_packed", "deinterleave", "gather", "interleave", "scatter", "step_of", "straight"]

ONE = np.int64(1)  # typed, since numba compiles anew for a literal number


@compiled
def address_of(nest, tensor, trip, offset):
    """The address of one trip of a nest."""
    for k in range(nest.shape[1] - 1, 0, -1):
        offset += (trip % nest[0, k]) * nest[1 + tensor, k]
        trip //= nest[0, k]
    return offset + trip * nest[1 + tensor, 0] if nest.shape[1] else offset


@compiled
def straight(nest, trip, count):
    """How many of `count` trips, from `trip` on, belong to the same turn of the innermost loop."""
    last = nest.shape[1] - 1
    return min(count, nest[0, last] - trip % nest[0, last]) if last >= 0 else count


@compiled
def step_of(nest, tensor):
    """The step of the innermost loop."""
    last = nest.shape[1] - 1
    return nest[1 + tensor, last] if last >= 0 else ONE


@compiled
def gather(source, first, step, shifts, count, out):
    """out[s, i] = source[first + i * step + shifts[s]]."""
    if are_packed(step, shifts):
        begin = first + shifts[0]
        deinterleave(source[begin : begin + count * step], out)
        return
    for s in range(shifts.size):
        begin, row = first + shifts[s], out[s]
        if step == 1:  # a loop of its own, which becomes vector instructions
            part = source[begin : begin + count]
            for i in range(count):
                row[i] = part[i]
        elif step == 0:  # an expanded tensor
            for i in range(count):
                row[i] = source[begin]
        else:
            spread = source[begin : begin + (count - 1) * step + 1 : step]
            for i in range(count):
                row[i] = spread[i]


@compiled
def scatter(target, first, step, shifts, count, flags):
    """target[first + i * step + shifts[s]] = flags[s, i]."""
    if are_packed(step, shifts):
        begin = first + shifts[0]
        interleave(flags, target[begin : begin + count * step])
        return
    for s in range(shifts.size):
        begin, row = first + shifts[s], flags[s]
        if step == 1:
            part = target[begin : begin + count]
            for i in range(count):
                part[i] = row[i]
        else:
            spread = target[begin : begin + (count - 1) * step + 1 : step]
            for i in range(count):
                spread[i] = row[i]


@compiled
def are_packed(step, shifts):
    """Whether the streams are dense together, and as many as `deinterleave` takes apart."""
    together = shifts.size > 1 and step == shifts.size and is_power_of_two(shifts.size)
    for s in range(1, shifts.size):
        together &= shifts[s] == shifts[0] + s
    return together


@compiled
def is_power_of_two(number):
    """Of a positive number."""
    return number & (number - 1) == 0


@compiled
def deinterleave(source, out):
    """out[s, i] = source[i * streams + s] for a power of two of streams, by strides that the compiler knows."""
    streams, flat = out.shape[0], out.reshape(-1)
    spare = np.empty(out.size if streams > 4 else 0, np.int32)
    passes, done = 0, 1
    while done < streams:
        done *= 4 if streams // done >= 4 else 2
        passes += 1
    into, free = (flat, spare) if passes % 2 else (spare, flat)  # so that the last pass fills `out`
    step = 4 if streams >= 4 else 2
    deal(source, ONE, step, into)
    done = step
    while done < streams:
        step = 4 if streams // done >= 4 else 2
        deal(into, done, step, free)
        into, free = free, into
        done *= step


@compiled
def deal(source, streams, step, out):
    """Every `step`-th element (2 or 4) of each stream becomes a stream; streams are stored one after the other."""
    size = source.size // streams
    part, apart = size // step, size // step * streams
    for s in range(streams):
        x, a, b = source[s * size : (s + 1) * size], out[s * part :], out[s * part + apart :]
        if step == 2:
            for i in range(part):
                a[i], b[i] = x[2 * i], x[2 * i + 1]
        else:
            c, d = out[2 * apart + s * part :], out[3 * apart + s * part :]
            for i in range(part):
                a[i], b[i], c[i], d[i] = x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]


@compiled
def interleave(rows, target):
    """target[i * streams + s] = rows[s, i], the inverse of `deinterleave`."""
    taken, free = rows.reshape(-1), np.empty(rows.size, np.uint8)
    streams = rows.shape[0]
    while True:
        step = 4 if streams % 4 == 0 else 2
        streams //= step
        if streams == 1:
            collect(taken, streams, step, target)
            return
        collect(taken, streams, step, free)
        taken, free = free, taken


@compiled
def collect(source, streams, step, out):
    """The inverse of `deal`."""
    size = source.size // streams
    part, apart = size // step, size // step * streams
    for s in range(streams):
        x, a, b = out[s * size : (s + 1) * size], source[s * part :], source[s * part + apart :]
        if step == 2:
            for i in range(part):
                x[2 * i], x[2 * i + 1] = a[i], b[i]
        else:
            c, d = source[2 * apart + s * part :], source[3 * apart + s * part :]
            for i in range(part):
                x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = a[i], b[i], c[i], d[i]
