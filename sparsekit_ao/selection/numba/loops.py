"""Every compiled loop of the tier, in one file: numba keeps machine code by the file it stands in and looks no further.

A key is the int32 of `kernels.keys`; one below all others stands for an absent block. Loops read and write many blocks
at once: at addresses `table[0] + i * step`, or `table[i]` where step is 0, each further on by every one of `shifts`.
Functions are few and take much at a time, because handing a `Window` over costs as much as some hundred keys.
"""

import numpy as np

from .window import compiled

__all__ = [
    "bracket",
    "choose",
    "count_digits",
    "emit_mask",
    "place",
    "sample",
    "select_by_one",
    "select_side_by_side",
]

HIGHEST = 0x7FFFFFFF  # above every key
NO_STEP = np.int64(0)  # addresses stand in a table (typed, since numba compiles anew for a literal number)
ZERO, ONE = np.int64(0), np.int64(1)
IN_CACHE = 8192  # elements that are scored at a time
ROW = 2048  # elements of a row of blocks that are scored at a time
LONG = 64  # elements side by side from which a block's are folded alone, and not those of many blocks together


@compiled
def fill_addresses(nest, tensor, first, count, offset, table):
    """Addresses of trips first .. first + count of a nest: the step, if one positive step leads through them, else 0.

    With a step only `table[0]` is filled; a single trip has step 1.
    """
    last = nest.shape[1] - 1
    if last < 0:
        table[0] = offset
        return 1
    inner, step = nest[0, last], nest[1 + tensor, last]
    at, outer = first % inner, first // inner
    done = 0
    while done < count:
        base, left = offset, outer
        for k in range(last - 1, -1, -1):
            base += (left % nest[0, k]) * nest[1 + tensor, k]
            left //= nest[0, k]
        if done == 0 and at + count <= inner and (step > 0 or count == 1):
            table[0] = base + at * step
            return step if count > 1 else 1
        stop = min(inner - at, count - done)
        for j in range(stop):
            table[done + j] = base + (at + j) * step
        done += stop
        at = 0
        outer += 1
    return 0


@compiled
def address_of(nest, tensor, trip, offset):
    for k in range(nest.shape[1] - 1, 0, -1):
        offset += (trip % nest[0, k]) * nest[1 + tensor, k]
        trip //= nest[0, k]
    return offset + trip * nest[1 + tensor, 0] if nest.shape[1] else offset


@compiled
def gather(source, table, step, shifts, count, out):
    """out[s, i] = source at address i, shifted by shifts[s]."""
    if are_packed(step, shifts):
        first = np.int64(table[0]) + shifts[0]
        deinterleave(source[first : first + count * step], out)
        return
    for s in range(shifts.size):
        first, row = np.int64(table[0]) + shifts[s], out[s]
        if step == 1:  # a loop of its own, which becomes whole vectors
            part = source[first : first + count]
            for i in range(count):
                row[i] = part[i]
        elif step > 1:
            spread = source[first : first + (count - 1) * step + 1 : step]
            for i in range(count):
                row[i] = spread[i]
        else:
            for i in range(count):
                row[i] = source[table[i] + np.uint64(shifts[s])]


@compiled
def scatter(target, table, step, shifts, count, flags):
    """The target at address i, shifted by shifts[s], = flags[s, i]; one row of flags serves all shifts."""
    if flags.shape[0] > 1 and are_packed(step, shifts):
        first = np.int64(table[0]) + shifts[0]
        interleave(flags, target[first : first + count * step])
        return
    for s in range(shifts.size):
        first, row = np.int64(table[0]) + shifts[s], flags[s if flags.shape[0] > 1 else 0]
        if step == 1:
            part = target[first : first + count]
            for i in range(count):
                part[i] = row[i]
        elif step > 1:
            spread = target[first : first + (count - 1) * step + 1 : step]
            for i in range(count):
                spread[i] = row[i]
        else:
            for i in range(count):
                target[table[i] + np.uint64(shifts[s])] = row[i]


@compiled
def are_packed(step, shifts):
    """Whether addresses and shifts together are consecutive numbers that `deinterleave` takes apart."""
    together = shifts.size > 1 and step == shifts.size and is_dealt(shifts.size)
    for s in range(1, shifts.size):
        together &= shifts[s] == shifts[0] + s
    return together


@compiled
def is_dealt(ways):
    """Whether a number has no prime factors but 2, 3 and 5."""
    for prime in (2, 3, 5):
        while ways % prime == 0:
            ways //= prime
    return ways == 1


@compiled
def deal_step(ways):
    return 4 if ways % 4 == 0 else 2 if ways % 2 == 0 else 3 if ways % 3 == 0 else 5


@compiled
def deinterleave(source, out):
    """out[s, i] = source[i * ways + s] where `is_dealt(ways)`, by strides that the compiler knows."""
    ways, flat = out.shape[0], out.reshape(-1)
    step = deal_step(ways)
    spare = np.empty(out.size if ways > step else 0, np.int32)
    streams, passes = step, 1
    while streams < ways:
        streams *= deal_step(ways // streams)
        passes += 1
    into, free = (flat, spare) if passes % 2 else (spare, flat)  # so that the last pass fills `out`
    deal(source, ONE, step, into)
    streams = step
    while streams < ways:
        step = deal_step(ways // streams)
        deal(into, streams, step, free)
        into, free = free, into
        streams *= step


@compiled
def deal(source, streams, step, out):
    """Every `step`-th of each stream to a stream of its own; streams lie one after the other."""
    size = source.size // streams
    part, apart = size // step, size // step * streams
    for s in range(streams):
        x, a, b = source[s * size : (s + 1) * size], out[s * part :], out[s * part + apart :]
        c, d, e = (
            out[min(2, step - 1) * apart + s * part :],
            out[min(3, step - 1) * apart + s * part :],
            out[min(4, step - 1) * apart + s * part :],
        )
        if step == 2:
            for i in range(part):
                a[i], b[i] = x[2 * i], x[2 * i + 1]
        elif step == 3:
            for i in range(part):
                a[i], b[i], c[i] = x[3 * i], x[3 * i + 1], x[3 * i + 2]
        elif step == 4:
            for i in range(part):
                a[i], b[i], c[i], d[i] = x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]
        else:
            for i in range(part):
                a[i], b[i], c[i] = x[5 * i], x[5 * i + 1], x[5 * i + 2]
                d[i], e[i] = x[5 * i + 3], x[5 * i + 4]


@compiled
def interleave(rows, target):
    """target[i * ways + s] = rows[s, i], the inverse of `deinterleave`."""
    taken, free = rows.reshape(-1), np.empty(rows.size, np.uint8)
    streams = rows.shape[0]
    while True:
        step = deal_step(streams)
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
        c, d, e = (
            source[min(2, step - 1) * apart + s * part :],
            source[min(3, step - 1) * apart + s * part :],
            source[min(4, step - 1) * apart + s * part :],
        )
        if step == 2:
            for i in range(part):
                x[2 * i], x[2 * i + 1] = a[i], b[i]
        elif step == 3:
            for i in range(part):
                x[3 * i], x[3 * i + 1], x[3 * i + 2] = a[i], b[i], c[i]
        elif step == 4:
            for i in range(part):
                x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = a[i], b[i], c[i], d[i]
        else:
            for i in range(part):
                x[5 * i], x[5 * i + 1], x[5 * i + 2] = a[i], b[i], c[i]
                x[5 * i + 3], x[5 * i + 4] = d[i], e[i]


@compiled
def repeat(flags, times):
    """Each flag so many times, one after the other."""
    if not is_dealt(times):
        return np.repeat(flags, times)
    while times > 1:
        step = deal_step(times)
        wide = np.empty(step * flags.size, np.uint8)
        if step == 2:
            for i in range(flags.size):
                wide[2 * i] = wide[2 * i + 1] = flags[i]
        elif step == 3:
            for i in range(flags.size):
                wide[3 * i] = wide[3 * i + 1] = wide[3 * i + 2] = flags[i]
        elif step == 4:
            for i in range(flags.size):
                wide[4 * i] = wide[4 * i + 1] = wide[4 * i + 2] = wide[4 * i + 3] = flags[i]
        else:
            for i in range(flags.size):
                wide[5 * i] = wide[5 * i + 1] = wide[5 * i + 2] = wide[5 * i + 3] = wide[5 * i + 4] = flags[i]
        flags, times = wide, times // step
    return flags


@compiled
def absent_key(window):
    """Below every key: magnitudes start at 0, signed keys at minus the key of NaN."""
    if not window.signed:
        return np.int32(-1)
    return np.int32(-0x80000000 if window.kind == 0 else -0x8000)


@compiled
def fill_keys(window, blocks, single, table_x, step_x, shifts_x, table_m, step_m, shifts_m, edges, count, keys):
    """keys[s, i]: the key of the block at address i, shifted by shifts[s]; an absent one's where a stage dropped it.

    Blocks of shift s lie at the edges edges[s] of their tensor.
    """
    if blocks is None:
        if single is not None:  # numba leaves out what a None decides, and compiles the other kind when it is met
            fill_single_keys(window, table_x, step_x, shifts_x, table_m, step_m, shifts_m, count, keys)
        return
    ways, run, row = shifts_x.size, blocks.run, keys[0]
    together = lie_in_rows(run, step_x, shifts_x, edges) and lie_in_rows(run, step_m, shifts_m, edges)
    if together and ways > 1:
        row = np.empty(ways * count, np.int32)
    for s in range(1 if together else ways):
        own_x, own_m, own = shifts_x[s : s + 1], shifts_m[s : s + 1], edges[s : s + 1]
        if together or (lie_in_rows(run, step_x, own_x, own) and lie_in_rows(run, step_m, own_m, own)):
            first_x, first_m = np.int64(table_x[0]) + own_x[0], np.int64(table_m[0]) + own_m[0]
            score_rows(window, blocks, first_x, first_m, row.size if together else count, row if together else keys[s])
        else:
            score_apart(window, blocks, table_x, step_x, own_x[0], table_m, step_m, own_m[0], own[0], count, keys[s])
    if together and ways > 1:
        turn(row, keys)


@compiled
def fill_single_keys(window, table_x, step_x, shifts_x, table_m, step_m, shifts_m, count, keys):
    """The same of single elements, which lie at no edge."""
    if step_x == 1 and not window.signed:
        for s in range(shifts_x.size):
            first = np.int64(table_x[0]) + shifts_x[s]
            rank_run(window.bits[first : first + count], window.kind, keys[s])
    else:
        gather(window.bits, table_x, step_x, shifts_x, count, keys)
        for s in range(shifts_x.size):
            rank_bits(keys[s], window.kind, window.signed, count)
    if window.among_kept:
        held = np.empty((shifts_m.size, count), np.int32)
        absent = absent_key(window)
        gather(window.mask, table_m, step_m, shifts_m, count, held)
        for s in range(shifts_m.size):
            own, there = keys[s], held[s]
            for i in range(count):
                own[i] = own[i] if there[i] else absent


@compiled
def lie_in_rows(run, step, shifts, edges):
    """Whether blocks, shift after shift, follow one another without gaps, none of them at an edge."""
    together = step == run * shifts.size
    for s in range(shifts.size):
        together &= shifts[s] == shifts[0] + s * run and edges[s] == 0
    return together


@compiled
def score_rows(window, blocks, first_x, first_m, count, keys):
    """Keys of `count` blocks that follow one another from these addresses on, read in rows of elements of them all."""
    run, norm, inner = blocks.run, blocks.norm, blocks.tree[blocks.outer :]
    volume = blocks.volumes[0] if blocks.volumes.size else np.float32(0)
    times = min(count, max(1, (count * run + ROW // 2) // ROW))
    at_once = -(-count // times)
    width, held = run * at_once, blocks.joins.max() + 2
    room, dealt = np.empty(held * width, np.int32), np.empty(width if run > 1 else 0, np.int32)
    alive = np.empty(width if window.among_kept else 0, np.uint8)
    for start in range(0, count, at_once):
        some, own = min(at_once, count - start), keys[start : start + at_once]
        width = some * run
        powers = room[: held * width].reshape((held, width))  # so that rows are known to be dense
        bits = window.bits[first_x + start * run :]
        if window.among_kept:
            mask = window.mask[first_m + start * run :]
            fold_held_rows(bits, mask, blocks.elements, blocks.order, blocks.joins, window.kind, norm, powers, alive)
        else:
            fold_rows(bits, blocks.elements[0], blocks.order, blocks.joins, window.kind, norm, powers)
        sums = powers[0]
        if run == 1:
            for i in range(some):
                own[i] = sums[i]
        elif run > LONG:
            for i in range(some):
                part = sums[i * run : (i + 1) * run]
                fold(part, norm, inner)
                own[i] = part[0]
        else:
            turned = dealt[:width]
            turn(sums, turned.reshape((run, some)))
            fold(turned, norm, inner)
            for i in range(some):
                own[i] = turned[i]
        finish_keys(own, norm, volume)
        if window.among_kept:
            for i in range(some):
                if not alive[i * run : (i + 1) * run].any():
                    own[i] = np.int32(-1)


@compiled
def fold_rows(bits, addresses, order, joins, kind, norm, powers):
    """The first of `powers`: all rows of some blocks folded to one."""
    width, depth = powers.shape[1], ZERO
    for at in range(order.size):
        here = addresses[order[at]]
        widen_row(bits[here : here + width], kind, powers[depth])
        depth = join_row(powers, depth, norm, joins[at])


@compiled
def fold_held_rows(bits, mask, addresses, order, joins, kind, norm, powers, alive):
    """The same of what a mask holds; `alive`: where it holds any."""
    width, depth = powers.shape[1], ZERO
    alive[:width] = 0
    for at in range(order.size):
        here, there = addresses[0, order[at]], addresses[1, order[at]]
        row, held = powers[depth], mask[there : there + width]
        widen_row(bits[here : here + width], kind, row)
        for i in range(width):
            row[i] *= held[i]
            alive[i] |= held[i]
        depth = join_row(powers, depth, norm, joins[at])


@compiled
def join_row(powers, depth, norm, lower):
    """Raise the topmost row to its power and join it with those below, down to row `lower`; the next free row."""
    row = powers[depth]
    values = row.view(np.float32)
    if norm == 2 and lower < depth:
        below = powers[depth - 1].view(np.float32)
        for i in range(row.size):
            below[i] += values[i] * values[i]
        depth -= 1
    elif norm == 2:
        for i in range(row.size):
            values[i] *= values[i]
    for upper in range(depth, lower, -1):
        row, under = powers[upper], powers[upper - 1]
        if norm == 3:
            for i in range(row.size):
                under[i] = max(under[i], row[i])
        else:
            values, below = row.view(np.float32), under.view(np.float32)
            for i in range(row.size):
                below[i] += values[i]
    return lower + 1


@compiled
def turn(source, out):
    """out[s, i] = source[i * ways + s]."""
    ways, count = out.shape
    if ways > 1 and is_dealt(ways):
        deinterleave(source, out)
        return
    for s in range(ways):
        row, spread = out[s], source[s::ways]
        for i in range(count):
            row[i] = spread[i]


@compiled
def rank_run(bits, kind, keys):
    """As `gather` and `rank_bits` of magnitudes that follow one another, in one pass."""
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
def score_apart(window, blocks, table_x, step_x, shift_x, table_m, step_m, shift_m, edges, count, keys):
    """Keys of blocks that need not be neighbours, one element of many at a time; what a stage dropped counts as 0."""
    elements, norm = blocks.elements.shape[1], blocks.norm
    volume = blocks.volumes[edges] if blocks.volumes.size else np.float32(0)
    at_once = min(count, max(1, IN_CACHE // elements))
    room = np.empty(elements * at_once, np.int32)
    held = np.empty((elements if window.among_kept else 0, at_once), np.int32)
    for start in range(0, count, at_once):
        some = min(at_once, count - start)
        own, flat = keys[start : start + some], room[: elements * some]
        bits = flat.reshape((elements, some))
        gather_inside(window.bits, table_x, step_x, start, blocks.elements[0] + shift_x, blocks.inside[edges], bits)
        if window.among_kept:
            there = held[:, :some]
            gather_inside(
                window.mask, table_m, step_m, start, blocks.elements[1] + shift_m, blocks.inside[edges], there
            )
            for e in range(elements):
                for i in range(some):
                    bits[e, i] *= there[e, i]
        widen(flat, window.kind)
        values = flat.view(np.float32)
        if norm == 2:
            for i in range(flat.size):
                values[i] *= values[i]
        fold(flat, norm, blocks.tree)
        for i in range(some):
            own[i] = flat[i]
        finish_keys(own, norm, volume)
        if window.among_kept:
            for i in range(some):
                if not there[:, i].any():
                    own[i] = np.int32(-1)


@compiled
def gather_inside(source, table, step, start, shifts, inside, out):
    """out[e, i] = source at address start + i, shifted by shifts[e]; 0 for elements that are not inside."""
    count = out.shape[1]
    for e in range(shifts.size):
        row = out[e]
        if not inside[e]:
            row[:] = 0
        elif step:
            first = np.int64(table[0]) + start * step + shifts[e]
            part = source[first : first + (count - 1) * step + 1 : step]
            for i in range(count):
                row[i] = part[i]
        else:
            for i in range(count):
                row[i] = source[table[start + i] + np.uint64(shifts[e])]


@compiled
def fold(bits, norm, tree):
    """Blocks whose elements lie in `bits` as [element, block] by the reference's halving tree, to the first row."""
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
def finish_keys(keys, norm, volume):
    """Sums, as bits, to keys: of their means where a volume is given, of the root for the 2-norm."""
    values = keys.view(np.float32)
    if volume and norm != 3:
        for i in range(keys.size):
            values[i] /= volume
    if norm == 2:
        for i in range(keys.size):
            values[i] = np.sqrt(values[i])
    for i in range(keys.size):
        keys[i] = min(keys[i] & np.int32(0x7FFFFFFF), np.int32(0x7F800001))


@compiled
def widen_row(source, kind, bits):
    """The bits of |weight| in float32 of weights that follow one another."""
    if kind == 0:
        for i in range(bits.size):
            bits[i] = source[i] & np.int32(0x7FFFFFFF)
    elif kind == 1:
        for i in range(bits.size):
            bits[i] = (source[i] & np.int32(0x7FFF)) << 16
    else:
        for i in range(bits.size):
            bits[i] = source[i]
        widen(bits, kind)


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
def store(window, blocks, single, table, step, shifts, edges, count, kept):
    """Write kept[s, i] to every element of the block at address i, shifted by shifts[s]; a stage only removes."""
    if blocks is None:
        if single is not None:
            scatter(window.mask, table, step, shifts, count, kept)
        return
    run, row = blocks.run, kept[0, :count]
    together = lie_in_rows(run, step, shifts, edges)
    if together and shifts.size > 1:
        row = np.empty(shifts.size * count, np.uint8)
        turn_back(kept, row)
    for s in range(1 if together else shifts.size):
        flags = row if together else kept[s, :count]
        if not together and not lie_in_rows(run, step, shifts[s : s + 1], edges[s : s + 1]):
            inside = blocks.inside[edges[s]]
            store_apart(window.mask, table, step, blocks.elements[1] + shifts[s], inside, flags, window.among_kept)
            continue
        wide = repeat(flags, run)
        for e in range(0, blocks.elements.shape[1], run):
            at = np.int64(table[0]) + shifts[s] + blocks.elements[1, e]
            part = window.mask[at : at + wide.size]
            if window.among_kept:
                for i in range(wide.size):
                    part[i] &= wide[i]
            else:
                for i in range(wide.size):
                    part[i] = wide[i]


@compiled
def store_apart(mask, table, step, shifts, inside, row, among_kept):
    """The mask at address i, shifted by shifts[e], = row[i], as far as elements are inside."""
    for e in range(shifts.size):
        if not inside[e]:
            continue
        if among_kept:
            for i in range(row.size):
                mask[np.int64(table[0]) + i * step + shifts[e] if step else np.int64(table[i]) + shifts[e]] &= row[i]
        elif step:
            first = np.int64(table[0]) + shifts[e]
            part = mask[first : first + (row.size - 1) * step + 1 : step]
            for i in range(row.size):
                part[i] = row[i]
        else:
            for i in range(row.size):
                mask[table[i] + np.uint64(shifts[e])] = row[i]


@compiled
def turn_back(rows, out):
    """out[i * ways + s] = rows[s, i], the inverse of `turn`."""
    ways, count = rows.shape
    if ways > 1 and is_dealt(ways):
        interleave(rows, out)
        return
    for s in range(ways):
        row, spread = rows[s], out[s::ways]
        for i in range(count):
            spread[i] = row[i]


@compiled
def select_side_by_side(window, keep, lanes, pairs, network, start, stop):
    """Scopes start .. stop, `lanes` at a time, a vector lane each.

    Up to `pairs` blocks of a scope are compared with one another, up to `network` sorted, more of them bisected.
    """
    scope_x, scope_m = np.empty(lanes, np.uint64), np.empty(lanes, np.uint64)
    members = np.prod(window.block[0])
    block_x, block_m = np.empty(members, np.int64), np.empty(members, np.int64)
    edges = np.zeros(members, np.int64)
    for m in range(members):
        edges[m] = alike(window.block, window.blocks, m, ONE)[1]
        block_x[m] = address_of(window.block, 0, m, 0)
        block_m[m] = address_of(window.block, 1, m, 0)
    room, spare = np.empty(members * lanes, np.int32), np.empty(members * lanes, np.int32)
    flags = np.empty(members * lanes, np.uint8)
    budgets, cut = np.full(lanes, keep[0], np.int32), np.empty(lanes, np.int32)
    absent, first, count = absent_key(window), start, 0
    beside = window.scope[0, -1] if window.scope.shape[1] else 1
    while first < stop:
        count = min(lanes, stop - first)
        if beside >= LONG:  # not beyond a row of scopes, through which one step leads
            count = min(count, beside - first % beside)
        keys, other = (
            room[: members * count].reshape((members, count)),
            spare[: members * count].reshape((members, count)),
        )
        kept = flags[: members * count].reshape((members, count))
        step_x = fill_addresses(window.scope, 0, first, count, 0, scope_x)
        step_m = fill_addresses(window.scope, 1, first, count, 0, scope_m)
        fill_keys(
            window, window.blocks, window.single, scope_x, step_x, block_x, scope_m, step_m, block_m, edges, count, keys
        )
        if keep.size > 1:
            for i in range(count):  # a loop, because an assignment of arrays brings seconds of compiling with it
                budgets[i] = keep[first + i]
        if members <= pairs:
            rank_pairs(keys, budgets, other, kept)
        else:
            if members <= network:
                for i in range(members * count):
                    spare[i] = room[i]
                sort_lanes(other)
                for i in range(count):
                    cut[i] = other[budgets[i] - 1, i] if budgets[i] else np.int32(HIGHEST)
            else:
                bisect_lanes(keys, count, budgets, cut)
            mark_lanes(keys, count, budgets, cut, kept)
        if window.among_kept:
            for m in range(members):
                for i in range(count):
                    kept[m, i] &= keys[m, i] != absent
        store(window, window.blocks, window.single, scope_m, step_m, block_m, edges, count, kept)
        first += count


@compiled
def rank_pairs(keys, budgets, beaten, kept):
    """Keep a slot if fewer than the budget beat it: an earlier slot with an equal key, or any with a higher one."""
    members, count = keys.shape
    beaten[:] = 0
    for a in range(members):
        for b in range(a + 1, members):
            first, second, beaten_first, beaten_second = keys[a], keys[b], beaten[a], beaten[b]
            for i in range(count):
                first_wins = np.int32(first[i] >= second[i])
                beaten_second[i] += first_wins
                beaten_first[i] += 1 - first_wins
    for m in range(members):
        own, out = beaten[m], kept[m]
        for i in range(count):
            out[i] = own[i] < budgets[i]


@compiled
def sort_lanes(keys):
    """Sort each lane, highest first, by merge exchange (Batcher 1968; Knuth, TAOCP 3, algorithm 5.2.2M)."""
    (members, count), top = keys.shape, 1
    while 2 * top < members:
        top *= 2
    span = top
    while span > 0:
        reach, offset, far = top, 0, span
        while True:
            for m in range(members - far):
                if m & span == offset:
                    exchange(keys[m], keys[m + far], count)
            if reach == span:
                break
            far, reach, offset = reach - span, reach // 2, span
        span //= 2


@compiled
def exchange(upper, lower, count):
    for i in range(count):
        one, other = upper[i], lower[i]
        upper[i], lower[i] = max(one, other), min(one, other)


@compiled
def bisect_lanes(keys, count, budgets, cut):
    """Bisect each lane's key range until exactly its budget lies at or above the cut, or only ties are left."""
    members = keys.shape[0]
    low, high = keys[0, :count].astype(np.int64), keys[0, :count].astype(np.int64)
    reached = np.empty(count, np.int32)
    for m in range(members):
        row = keys[m]
        for i in range(count):
            low[i] = min(low[i], np.int64(row[i]))
            high[i] = max(high[i], np.int64(row[i]))
    for i in range(count):
        if budgets[i] == 0:
            low[i] = high[i] = HIGHEST
    busy = True
    while busy:
        for i in range(count):
            cut[i] = np.int32((low[i] + high[i] + 1) >> 1)
            reached[i] = 0
        for m in range(members):
            row = keys[m]
            for i in range(count):
                reached[i] += row[i] >= cut[i]
        busy = False
        for i in range(count):
            if low[i] < high[i]:
                low[i] = cut[i] if reached[i] >= budgets[i] else low[i]
                high[i] = cut[i] if reached[i] == budgets[i] else high[i] if reached[i] > budgets[i] else cut[i] - 1
                busy |= low[i] < high[i]
    for i in range(count):
        cut[i] = np.int32(low[i])


@compiled
def mark_lanes(keys, count, budgets, cut, kept):
    """Flags of the keys above the cut; what is left of the budget goes to the first that equal it."""
    left = budgets[:count].copy()
    for m in range(keys.shape[0]):
        row = keys[m]
        for i in range(count):
            left[i] -= row[i] > cut[i]
    for m in range(keys.shape[0]):
        row, out = keys[m], kept[m]
        for i in range(count):
            tie = np.int32(row[i] == cut[i]) & np.int32(left[i] > 0)
            left[i] -= tie
            out[i] = np.int32(row[i] > cut[i]) | tie


@compiled
def alike(block, blocks, first, count):
    """How many blocks from `first` on, of `count`, to take together; and at which edges (see `Blocks`) they all lie.

    None leaves the innermost loop, if that is long, since one step leads through them.
    """
    last = block.shape[1] - 1
    if last >= 0 and block[0, last] >= LONG:
        count = min(count, block[0, last] - first % block[0, last])
    if blocks is None:
        return count, ZERO
    cut = blocks.edges
    if not cut.size:
        return count, ZERO
    edges, length, done, span, rest = ZERO, ZERO, ZERO, ONE, first
    for k in range(last, -1, -1):
        size = block[0, k]
        at, rest = rest % size, rest // size
        if cut[k]:
            edges |= cut[k] if at == size - 1 else 0
            if not length:
                length = (size - at if at == size - 1 else size - 1 - at) * span - done
        done += at * span
        span *= size
    return min(length, count), edges


@compiled
def read(window, first, count, at_x, at_m, table_x, table_m, keys):
    """Keys of blocks first .. first + count of the scope at the given addresses."""
    here, at = np.zeros(1, np.int64), np.zeros(1, np.int64)
    done = ZERO
    while done < count:
        some, at[0] = alike(window.block, window.blocks, first + done, count - done)
        step_x = fill_addresses(window.block, 0, first + done, some, at_x, table_x)
        step_m = fill_addresses(window.block, 1, first + done, some, at_m, table_m)
        own = keys[done : done + some].reshape((1, some))
        fill_keys(window, window.blocks, window.single, table_x, step_x, here, table_m, step_m, here, at, some, own)
        done += some


@compiled
def write(window, first, count, at_m, table, kept):
    """The mask of blocks first .. first + count of the scope at the given address = kept."""
    here, at = np.zeros(1, np.int64), np.zeros(1, np.int64)
    done = ZERO
    while done < count:
        some, at[0] = alike(window.block, window.blocks, first + done, count - done)
        step = fill_addresses(window.block, 1, first + done, some, at_m, table)
        store(
            window,
            window.blocks,
            window.single,
            table,
            step,
            here,
            at,
            some,
            kept[done : done + some].reshape((1, some)),
        )
        done += some


@compiled
def blocks_at_once(blocks):
    """Few enough that their elements stay in cache; a multiple of eight."""
    if blocks is None:
        return np.int64(IN_CACHE)
    return max(64, IN_CACHE // blocks.elements.shape[1], ROW // blocks.run) // 8 * 8


@compiled
def select_by_one(window, keep, start, stop):
    """Scopes start .. stop, one after the other; the keys of a scope are held in a buffer."""
    members, chunk = np.prod(window.block[0]), blocks_at_once(window.blocks)
    table_x, table_m = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64)
    keys, kept = np.empty(members, np.int32), np.empty(chunk, np.uint8)
    absent = absent_key(window)
    for scope in range(start, stop):
        at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
        for first in range(0, members, chunk):
            count = min(chunk, members - first)
            read(window, first, count, at_x, at_m, table_x, table_m, keys[first : first + count])
        limit, need = cut_of(keys, keep[scope if keep.size > 1 else 0], absent)
        for first in range(0, members, chunk):
            count = min(chunk, members - first)
            need -= mark(keys[first : first + count], limit, need, absent, kept)
            write(window, first, count, at_m, table_m, kept)


@compiled
def cut_of(keys, budget, absent):
    """(limit, need): keys above the limit are kept, and the first `need` of those equal to it."""
    if budget == 0:
        return np.int32(HIGHEST), np.int64(0)
    limit = kth_key(keys, budget)
    if limit != absent and count_from(keys, limit) == budget:  # no tie is cut: take a limit that none equals
        return np.int32(limit - 1), np.int64(0)
    above = count_from(keys, np.int32(limit + 1))
    return limit, np.int64(budget - above)


@compiled
def count_from(keys, limit):
    reached = np.int32(0)  # kept at 32 bits, or the loop runs at half speed
    for i in range(keys.size):
        reached = np.int32(reached + np.int32(keys[i] >= limit))
    return reached


@compiled
def kth_key(keys, budget):
    """A key that exactly `budget` keys reach, else the budget-th largest; by bisection, since counting is quick."""
    low, high = keys[0], keys[0]
    for i in range(keys.size):
        low = min(low, keys[i])
        high = max(high, keys[i])
    floor, roof = np.int64(low), np.int64(high)
    while floor < roof:
        middle = (floor + roof + 1) >> 1
        reached = count_from(keys, np.int32(middle))
        if reached >= budget:
            floor = middle
        else:
            roof = middle - 1
        if reached == budget:
            break
    return np.int32(floor)


@compiled
def mark(keys, limit, need, absent, kept):
    """Flags of the keys above the limit and of the first `need` of those equal to it; how many of those there were."""
    for i in range(keys.size):
        kept[i] = keys[i] > limit
    used = 0
    if need > 0 and limit != absent:
        for i in range(keys.size):
            if keys[i] == limit and used < need:
                kept[i] = 1
                used += 1
    return used


@compiled
def count_digits(window, scope, start, stop, base, shift, low, prefix, again, stored, counts):
    """Histogram of bits low .. shift - 1 of those keys - base whose higher bits are `prefix`, blocks start .. stop.

    `again`: an earlier pass left the keys in `stored`, if that has room.
    """
    chunk = blocks_at_once(window.blocks)
    table_x, table_m = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64)
    buffer, digits = np.empty(chunk, np.int32), np.empty(chunk, np.uint32)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    down, last = np.uint32(low), np.uint32((1 << (shift - low)) - 1)
    least, most = np.int32(base + (prefix << shift)), np.int32(base + ((prefix + 1) << shift) - 1)
    for first in range(start, stop, chunk):
        count = min(chunk, stop - first)
        keys = stored[first : first + count] if stored.size else buffer[:count]
        if not (again and stored.size):
            read(window, first, count, at_x, at_m, table_x, table_m, keys)
        for i in range(count):
            digits[i] = (np.uint32(keys[i] - base) >> down) & last
        if not again:
            for i in range(count):
                counts[digits[i]] += 1
        else:
            for i in range(count):
                if keys[i] >= least and keys[i] <= most:
                    counts[digits[i]] += 1


@compiled
def sample(window, scope, start, stop, keys):
    """Keys of blocks start .. stop of one scope, spread evenly, each drawn at random from a stretch of its own.

    Not for a stage: the mask is not looked at.
    """
    table, spare, here = np.empty(keys.size, np.uint64), np.empty(1, np.uint64), np.zeros(1, np.int64)
    inside = ZERO
    at, stretch, state = address_of(window.scope, 0, scope, 0), (stop - start) // keys.size, np.uint32(start + 1)
    for i in range(keys.size):
        state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))  # Numerical Recipes' generator
        block = start + i * stretch + ((np.int64(state >> np.uint32(8)) * stretch) >> 24)
        if alike(window.block, window.blocks, block, ONE)[1]:  # keys in any order will do
            last = keys.size - 1 - (i - inside)
            read(window, block, ONE, at, at, table[last:], spare, keys[last:])
            continue
        table[inside] = address_of(window.block, 0, block, at)
        inside += 1
    if inside:
        own = keys[:inside].reshape((1, inside))
        fill_keys(window, window.blocks, window.single, table, NO_STEP, here, table, NO_STEP, here, here, inside, own)


@compiled
def bracket(keys, upper, lower):
    """The upper-th and the lower-th largest key."""
    return kth_key(keys, upper), kth_key(keys, lower)


@compiled
def emit_mask(window, scope, start, stop, least, most, tied, quota, again, stored, slots, waiting):
    """Write the mask of blocks start .. stop of one scope, as far as two keys decide it: (kept, undecided).

    Keys above `most` are kept, those below `least` dropped. Those between are undecided: if `tied` they are all equal
    and the first `quota` of them are kept, else they are dropped for now and their slots, counted from `start`, and
    keys are recorded as far as there is room; all are counted.
    """
    chunk = blocks_at_once(window.blocks)
    table_x, table_m = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64)
    buffer, kept = np.empty(chunk, np.int32), np.empty(chunk, np.uint8)
    scratch = np.empty(chunk + 8, np.uint8), np.empty(chunk // 8 + 2, np.int32), np.empty(chunk + 8, np.int32)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    absent = absent_key(window)
    found, above = 0, 0
    for first in range(start, stop, chunk):
        count = min(chunk, stop - first)
        keys = stored[first : first + count] if stored.size else buffer[:count]
        if not (again and stored.size):
            read(window, first, count, at_x, at_m, table_x, table_m, keys)
        if tied:
            quota -= mark(keys, least, quota, absent, kept)
        else:
            above += part(keys, least, most, kept, scratch[0])
            found = record(keys, first - start, scratch, slots, waiting, found)
        write(window, first, count, at_m, table_m, kept)
    return above, found


@compiled
def part(keys, least, most, kept, undecided):
    """Flags of the keys above `most`, and of those from `least` to it; how many are above."""
    above = np.int32(0)
    for i in range(keys.size):
        kept[i] = keys[i] > most
        undecided[i] = np.uint8(keys[i] >= least) & np.uint8(keys[i] <= most)
        above = np.int32(above + np.int32(keys[i] > most))
    return above


@compiled
def record(keys, first, scratch, slots, waiting, found):
    """Append slot and key of every flagged key, as far as there is room, and count them all.

    Few are, so eight flags are looked at together; nothing branches on a key.
    """
    flags, some, near = scratch
    eights, count, seen = flags.view(np.uint64), 0, 0
    whole = -(-keys.size // 8)
    flags[keys.size : 8 * whole] = 0
    for eight in range(whole):
        some[count] = eight
        count += eights[eight] != 0
    for at in range(count):
        for i in range(8 * some[at], 8 * some[at] + 8):
            near[seen] = i
            seen += flags[i]
    for i in range(min(seen, slots.size - found)):
        slots[found + i] = first + near[i]
        waiting[found + i] = keys[near[i]]
    return found + seen


@compiled
def choose(keys, need, absent, kept):
    """Flags of the `need` highest keys (at least one), lower index first among equals; never of an absent one."""
    limit, ties = cut_of(keys, need, absent)
    mark(keys, limit, ties, absent, kept)


@compiled
def place(window, scope, start, slots, kept):
    """Set the mask of the blocks of one scope, slots counted from `start`, whose flag is set."""
    table, ones, here = np.empty(slots.size, np.uint64), np.ones((1, slots.size), np.uint8), np.zeros(1, np.int64)
    at_m, count = address_of(window.scope, 1, scope, 0), ZERO
    for i in range(slots.size):
        if kept[i]:
            block = start + slots[i]
            if alike(window.block, window.blocks, block, ONE)[1]:
                write(window, block, ONE, at_m, table[count:], ones[0])
                continue
            table[count] = address_of(window.block, 1, block, at_m)
            count += 1
    if count:
        store(window, window.blocks, window.single, table, NO_STEP, here, here, count, ones)
