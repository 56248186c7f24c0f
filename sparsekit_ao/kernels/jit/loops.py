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
ONE = np.int64(1)


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
    """Whether addresses and shifts together are consecutive numbers, in a power of two of shifts."""
    ways = shifts.size
    if ways < 2 or ways & (ways - 1) or step != ways:
        return False
    together = True
    for s in range(1, ways):
        together &= shifts[s] == shifts[0] + s
    return together


@compiled
def deinterleave(source, out):
    """out[s, i] = source[i * ways + s] for a power of two of ways, by strides that the compiler knows."""
    ways, flat = out.shape[0], out.reshape(-1)
    spare = np.empty(out.size if ways > 4 else 0, np.int32)
    streams, passes = deal_step(ways), 1
    while streams < ways:
        streams *= deal_step(ways // streams)
        passes += 1
    into, free = (flat, spare) if passes % 2 else (spare, flat)  # so that the last pass fills `out`
    deal(source, ONE, deal_step(ways), into)
    streams = deal_step(ways)
    while streams < ways:
        step = deal_step(ways // streams)
        deal(into, streams, step, free)
        into, free = free, into
        streams *= step


@compiled
def deal_step(ways):
    return 4 if ways % 4 == 0 else 2


@compiled
def deal(source, streams, step, out):
    """Every `step`-th of each stream to a stream of its own; streams lie one after the other."""
    size = source.size // streams
    part, apart = size // step, size // step * streams
    for s in range(streams):
        whole, first, second = source[s * size : (s + 1) * size], out[s * part :], out[s * part + apart :]
        if step == 2:
            for i in range(part):
                first[i], second[i] = whole[2 * i], whole[2 * i + 1]
        else:
            third, fourth = out[s * part + 2 * apart :], out[s * part + 3 * apart :]
            for i in range(part):
                at = 4 * i
                first[i], second[i], third[i], fourth[i] = whole[at], whole[at + 1], whole[at + 2], whole[at + 3]


@compiled
def interleave(rows, target):
    """target[i * ways + s] = rows[s, i], the inverse of `deinterleave`."""
    ways = rows.shape[0]
    taken, free = rows.reshape(-1), np.empty(rows.size, np.uint8)
    streams = ways
    while True:
        step = 4 if streams & 0x55555555 else 2  # a power of four is left by fours
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
        whole, first, second = out[s * size : (s + 1) * size], source[s * part :], source[s * part + apart :]
        if step == 2:
            for i in range(part):
                whole[2 * i], whole[2 * i + 1] = first[i], second[i]
        else:
            third, fourth = source[s * part + 2 * apart :], source[s * part + 3 * apart :]
            for i in range(part):
                at = 4 * i
                whole[at], whole[at + 1], whole[at + 2], whole[at + 3] = first[i], second[i], third[i], fourth[i]


@compiled
def absent_key(window):
    """Below every key: magnitudes start at 0, signed keys at minus the key of NaN."""
    if not window.signed:
        return np.int32(-1)
    return np.int32(-0x80000000 if window.kind == 0 else -0x8000)


@compiled
def fill_keys(window, table_x, step_x, shifts_x, table_m, step_m, shifts_m, count, keys):
    """keys[s, i]: the key of the block at address i, shifted by shifts[s]; an absent one's where a stage dropped it."""
    if window.elements.shape[1] == 1:
        if step_x == 1 and not window.signed:
            for s in range(shifts_x.size):
                first = np.int64(table_x[0]) + shifts_x[s]
                rank_run(window.bits[first : first + count], window.kind, keys[s])
        else:
            gather(window.bits, table_x, step_x, shifts_x, count, keys)
            for s in range(shifts_x.size):
                rank_bits(keys[s], window.kind, window.signed, count)
        if window.stage:
            held = np.empty((1, count), np.int32)
            absent = absent_key(window)
            for s in range(shifts_m.size):
                gather(window.mask, table_m, step_m, shifts_m[s : s + 1], count, held)
                for i in range(count):
                    keys[s, i] = keys[s, i] if held[0, i] else absent
        return
    for s in range(shifts_x.size):
        fill_block_keys(window, table_x, step_x, shifts_x[s], table_m, step_m, shifts_m[s], count, keys[s])


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
def fill_block_keys(window, table_x, step_x, shift_x, table_m, step_m, shift_m, count, keys):
    """Keys of blocks of several elements, one element of all blocks at a time; one that a stage dropped counts as 0."""
    elements = window.elements.shape[1]
    bits = np.empty((elements, count), np.int32)
    gather(window.bits, table_x, step_x, window.elements[0] + shift_x, count, bits)
    if window.stage:
        held, alive = np.empty((elements, count), np.int32), np.zeros(count, np.int32)
        gather(window.mask, table_m, step_m, window.elements[1] + shift_m, count, held)
        for e in range(elements):
            for i in range(count):
                bits[e, i] *= held[e, i]
                alive[i] |= held[e, i]
    score_blocks(bits.reshape(-1), window.kind, window.norm, window.tree, count, keys)
    if window.stage:
        for i in range(count):
            keys[i] = keys[i] if alive[i] else np.int32(-1)


@compiled
def score_blocks(bits, kind, norm, tree, width, keys):
    """Keys of `width` blocks whose elements lie in `bits` as [element, block], by the reference's halving tree."""
    widen(bits, kind)
    values = bits.view(np.float32)
    if norm == 2:
        for i in range(bits.size):
            values[i] *= values[i]
    rest = bits.size
    for size in tree:
        rest //= size
        while size > 1:
            low = (size + 1) // 2
            other = low * rest
            if norm == 3:
                for i in range((size - low) * rest):
                    bits[i] = max(bits[i], bits[other + i])
            else:
                for i in range((size - low) * rest):
                    values[i] += values[other + i]
            size = low
    if norm == 2:
        for i in range(width):
            values[i] = np.sqrt(values[i])
    for i in range(width):
        keys[i] = min(bits[i] & np.int32(0x7FFFFFFF), np.int32(0x7F800001))


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
def store(window, table, step, shifts, count, kept):
    """Write kept[s, i] to every element of the block at address i, shifted by shifts[s]; a stage only removes."""
    elements, run = window.elements.shape[1], window.run
    if elements == 1:
        scatter(window.mask, table, step, shifts, count, kept)
        return
    for s in range(shifts.size):
        row = kept[s]
        if window.stage:
            for i in range(count):
                start = (np.int64(table[0]) + i * step if step else np.int64(table[i])) + shifts[s]
                for e in range(elements):
                    window.mask[start + window.elements[1, e]] &= row[i]
        elif run % 4 == 0 and step > 0:
            for e in range(0, elements, 4):
                first = np.int64(table[0]) + shifts[s] + window.elements[1, e]
                fours = window.mask[first : first + (count - 1) * step + 4]
                for i in range(count):  # written out, these become one store of four bytes
                    at = i * step
                    fours[at] = row[i]
                    fours[at + 1] = row[i]
                    fours[at + 2] = row[i]
                    fours[at + 3] = row[i]
        else:
            scatter(window.mask, table, step, window.elements[1] + shifts[s], count, kept[s : s + 1])


@compiled
def select_side_by_side(window, keep, lanes, pairs, network, start, stop):
    """Scopes start .. stop, `lanes` at a time, a vector lane each.

    Up to `pairs` blocks of a scope are compared with one another, up to `network` sorted, more of them bisected.
    """
    scope_x, scope_m = np.empty(lanes, np.uint64), np.empty(lanes, np.uint64)
    members = np.prod(window.block[0])
    block_x, block_m = np.empty(members, np.int64), np.empty(members, np.int64)
    for m in range(members):
        block_x[m] = address_of(window.block, 0, m, 0)
        block_m[m] = address_of(window.block, 1, m, 0)
    room, spare = np.empty(members * lanes, np.int32), np.empty(members * lanes, np.int32)
    flags = np.empty(members * lanes, np.uint8)
    budgets, cut = np.full(lanes, keep[0], np.int32), np.empty(lanes, np.int32)
    absent = absent_key(window)
    for first in range(start, stop, lanes):
        count = min(lanes, stop - first)
        keys, other = (
            room[: members * count].reshape((members, count)),
            spare[: members * count].reshape((members, count)),
        )
        kept = flags[: members * count].reshape((members, count))
        step_x = fill_addresses(window.scope, 0, first, count, 0, scope_x)
        step_m = fill_addresses(window.scope, 1, first, count, 0, scope_m)
        fill_keys(window, scope_x, step_x, block_x, scope_m, step_m, block_m, count, keys)
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
        if window.stage:
            for m in range(members):
                for i in range(count):
                    kept[m, i] &= keys[m, i] != absent
        store(window, scope_m, step_m, block_m, count, kept)


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
def read(window, first, count, at_x, at_m, table_x, table_m, here, keys):
    """Keys of blocks first .. first + count of the scope at the given addresses."""
    step_x = fill_addresses(window.block, 0, first, count, at_x, table_x)
    step_m = fill_addresses(window.block, 1, first, count, at_m, table_m)
    fill_keys(window, table_x, step_x, here, table_m, step_m, here, count, keys.reshape((1, count)))


@compiled
def blocks_at_once(window):
    """Few enough that their elements stay in cache; a multiple of eight."""
    return max(64, 8192 // window.elements.shape[1]) // 8 * 8


@compiled
def select_by_one(window, keep, start, stop):
    """Scopes start .. stop, one after the other; the keys of a scope are held in a buffer."""
    members, chunk = np.prod(window.block[0]), blocks_at_once(window)
    table_x, table_m = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64)
    keys, kept, here = np.empty(members, np.int32), np.empty((1, chunk), np.uint8), np.zeros(1, np.int64)
    absent = absent_key(window)
    for scope in range(start, stop):
        at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
        for first in range(0, members, chunk):
            count = min(chunk, members - first)
            read(window, first, count, at_x, at_m, table_x, table_m, here, keys[first : first + count])
        limit, need = cut_of(keys, keep[scope if keep.size > 1 else 0], absent)
        for first in range(0, members, chunk):
            count = min(chunk, members - first)
            need -= mark(keys[first : first + count], limit, need, absent, kept[0])
            step = fill_addresses(window.block, 1, first, count, at_m, table_m)
            store(window, table_m, step, here, count, kept)


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
    chunk = blocks_at_once(window)
    table_x, table_m, here = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64), np.zeros(1, np.int64)
    buffer, digits = np.empty(chunk, np.int32), np.empty(chunk, np.uint32)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    down, last = np.uint32(low), np.uint32((1 << (shift - low)) - 1)
    least, most = np.int32(base + (prefix << shift)), np.int32(base + ((prefix + 1) << shift) - 1)
    for first in range(start, stop, chunk):
        count = min(chunk, stop - first)
        keys = stored[first : first + count] if stored.size else buffer[:count]
        if not (again and stored.size):
            read(window, first, count, at_x, at_m, table_x, table_m, here, keys)
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
    table, here = np.empty(keys.size, np.uint64), np.zeros(1, np.int64)
    at, stretch, state = address_of(window.scope, 0, scope, 0), (stop - start) // keys.size, np.uint32(start + 1)
    for i in range(keys.size):
        state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))  # Numerical Recipes' generator
        block = start + i * stretch + ((np.int64(state >> np.uint32(8)) * stretch) >> 24)
        table[i] = address_of(window.block, 0, block, at)
    fill_keys(window, table, NO_STEP, here, table, NO_STEP, here, keys.size, keys.reshape((1, keys.size)))


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
    chunk = blocks_at_once(window)
    table_x, table_m, here = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64), np.zeros(1, np.int64)
    buffer, kept = np.empty(chunk, np.int32), np.empty((1, chunk), np.uint8)
    scratch = np.empty(chunk + 8, np.uint8), np.empty(chunk // 8 + 2, np.int32), np.empty(chunk + 8, np.int32)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    absent = absent_key(window)
    found, above = 0, 0
    for first in range(start, stop, chunk):
        count = min(chunk, stop - first)
        keys = stored[first : first + count] if stored.size else buffer[:count]
        if not (again and stored.size):
            read(window, first, count, at_x, at_m, table_x, table_m, here, keys)
        if tied:
            quota -= mark(keys, least, quota, absent, kept[0])
        else:
            above += part(keys, least, most, kept[0], scratch[0])
            found = record(keys, first - start, scratch, slots, waiting, found)
        step = fill_addresses(window.block, 1, first, count, at_m, table_m)
        store(window, table_m, step, here, count, kept)
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
    at_m, count = address_of(window.scope, 1, scope, 0), 0
    for i in range(slots.size):
        if kept[i]:
            table[count] = address_of(window.block, 1, start + slots[i], at_m)
            count += 1
    if count:
        store(window, table, NO_STEP, here, count, ones)
