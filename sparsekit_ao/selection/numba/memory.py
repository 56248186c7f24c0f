"""Compiled loops that read and write many strided elements at once, in flat memory.

An address is `first + i * step + shifts[s]`: element i of stream s. Streams whose elements alternate in memory (the
four of a 2:4 scope) are separated by loops of constant stride, which the compiler turns into vector instructions.
"""

import numpy as np

from .cache import compiled

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
    if are_packed(step, shifts, 1):
        begin = first + shifts[0]
        deinterleave(source[begin : begin + count * step], out)
        return
    for s in range(shifts.size):
        begin, row = first + shifts[s], out[s]
        if step == 1:  # a loop of its own, which becomes vector instructions
            part = source[begin : begin + count]
            for i in range(count):
                row[i] = part[i]
        else:
            for i in range(count):
                row[i] = source[begin + i * step]


@compiled
def gather_under(source, values, under, mask, count, out):
    """As `gather` from `source` at `values`, (first, step, shifts), with 0 for what is 0 in `under` at `mask`."""
    first, step, shifts = values
    begin, stride, moves = mask
    if are_packed(step, shifts, 1) and are_packed(stride, moves, 1):
        row, at, held = np.empty(count * step, np.int32), first + shifts[0], begin + moves[0]
        select(source[at : at + row.size], under[held : held + row.size], row)
        deinterleave(row, out)
        return
    for s in range(shifts.size):
        at, held, row = first + shifts[s], begin + moves[s], out[s]
        if step == 1 and stride == 1:
            select(source[at : at + count], under[held : held + count], row)
        else:
            for i in range(count):
                row[i] = source[at + i * step] if under[held + i * stride] else 0


@compiled
def select(source, under, out):
    """out[i] = source[i], or 0 where `under` is."""
    for i in range(out.size):
        out[i] = source[i] if under[i] else 0


@compiled
def scatter(target, first, step, shifts, count, flags):
    """target[first + i * step + shifts[s]] = flags[s, i]."""
    if are_packed(step, shifts, 1):
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
            for i in range(count):
                target[begin + i * step] = row[i]


@compiled
def are_packed(step, shifts, run):
    """Whether streams of `run` contiguous elements are dense together, and as many as `deinterleave` separates."""
    streams = shifts.size
    together = streams > 1 and step == streams * run and streams & (streams - 1) == 0
    for s in range(1, streams):
        together &= shifts[s] == shifts[0] + s * run
    return together


@compiled
def deinterleave(source, out):
    """out[s, i] = source[i * streams + s] for a power of two of streams, by passes of constant stride 4 or 2."""
    streams, into, free = out.shape[0], out.reshape(-1), np.empty(out.size if out.shape[0] > 4 else 0, np.int32)
    done = 4
    while done < streams:  # the last pass must fill `out`
        into, free, done = free, into, done * 4
    step = 2 if streams == 2 else 4
    deal(source, 1, step, into)
    done = step
    while done < streams:
        step = min(4, streams // done)
        deal(into, done, step, free)
        into, free, done = free, into, done * step


@compiled
def deal(source, streams, step, out):
    """Every `step`-th element (2 or 4) of each stream becomes a stream; streams are stored one after the other."""
    part, apart = source.size // streams // step, source.size // step
    for s in range(streams):
        x, a, b = source[s * part * step : (s + 1) * part * step], out[s * part :], out[s * part + apart :]
        if step == 2:
            for i in range(part):
                a[i], b[i] = x[2 * i], x[2 * i + 1]
        else:
            c, d = out[2 * apart + s * part :], out[3 * apart + s * part :]
            for i in range(part):
                a[i], b[i], c[i], d[i] = x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]


@compiled
def interleave(rows, target):
    """target[i * streams + s] = rows[s, i], the inverse of `deinterleave`; overwrites `rows`."""
    taken, free, streams = rows.reshape(-1), np.empty(rows.size, np.uint8), rows.shape[0]
    while streams > 4:
        step = min(4, streams // 4)  # the last pass takes 4
        streams //= step
        collect(taken, streams, step, free)
        taken, free = free, taken
    collect(taken, 1, streams, target)


@compiled
def collect(source, streams, step, out):
    """The inverse of `deal`."""
    part, apart = source.size // streams // step, source.size // step
    for s in range(streams):
        x, a, b = out[s * part * step : (s + 1) * part * step], source[s * part :], source[s * part + apart :]
        if step == 2:
            for i in range(part):
                x[2 * i], x[2 * i + 1] = a[i], b[i]
        else:
            c, d = source[2 * apart + s * part :], source[3 * apart + s * part :]
            for i in range(part):
                x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = a[i], b[i], c[i], d[i]
