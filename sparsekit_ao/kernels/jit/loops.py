"""Every compiled loop of the tier, in one file: numba keeps machine code by the file it stands in and looks no further.

A key is the int32 of `kernels.keys`; one below all others stands for an absent block. Loops read and write many blocks
at once: at addresses `table[0] + i * step`, or `table[i]` where step is 0, each further on by every one of `shifts`.
Functions are few and take much at a time, because handing a `Window` over costs as much as some hundred keys.
"""

import numpy as np

from .window import compiled

__all__ = ["choose", "count_digits", "emit_mask", "place", "select_by_one", "select_elements", "select_side_by_side"]

HIGHEST = 0x7FFFFFFF  # above every key


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
    for s in range(shifts.size):
        first, row = np.int64(table[0]) + shifts[s], flags[s if flags.shape[0] > 1 else 0]
        if step == 1:
            target[first : first + count] = row[:count]
        elif step > 1:
            spread = target[first : first + (count - 1) * step + 1 : step]
            for i in range(count):
                spread[i] = row[i]
        else:
            for i in range(count):
                target[table[i] + np.uint64(shifts[s])] = row[i]


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
def select_side_by_side(window, keep, lanes, pairs, start, stop):
    """Scopes start .. stop, `lanes` at a time, a vector lane each; few blocks are ranked by comparing every pair."""
    scope_x, scope_m = np.empty(lanes, np.uint64), np.empty(lanes, np.uint64)
    members = np.prod(window.block[0])
    block_x, block_m = np.empty(members, np.int64), np.empty(members, np.int64)
    for m in range(members):
        block_x[m] = address_of(window.block, 0, m, 0)
        block_m[m] = address_of(window.block, 1, m, 0)
    keys, kept = np.empty((members, lanes), np.int32), np.empty((members, lanes), np.uint8)
    budgets = np.full(lanes, keep[0], np.int32)
    absent = absent_key(window)
    for first in range(start, stop, lanes):
        count = min(lanes, stop - first)
        step_x = fill_addresses(window.scope, 0, first, count, 0, scope_x)
        step_m = fill_addresses(window.scope, 1, first, count, 0, scope_m)
        fill_keys(window, scope_x, step_x, block_x, scope_m, step_m, block_m, count, keys)
        if keep.size > 1:
            budgets[:count] = keep[first : first + count]
        if members <= pairs:
            rank_pairs(keys, count, budgets, kept)
        else:
            bisect_lanes(keys, count, budgets, kept)
        if window.stage:
            for m in range(members):
                for i in range(count):
                    kept[m, i] &= keys[m, i] != absent
        store(window, scope_m, step_m, block_m, count, kept)


@compiled
def rank_pairs(keys, count, budgets, kept):
    """Keep a slot if fewer than the budget beat it: an earlier slot with an equal key, or any with a higher one."""
    members = keys.shape[0]
    beaten = np.zeros((members, count), np.int32)
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
def bisect_lanes(keys, count, budgets, kept):
    """Bisect each lane's key range until exactly its budget lies at or above the cut, or only ties are left."""
    members = keys.shape[0]
    low, high = keys[0, :count].astype(np.int64), keys[0, :count].astype(np.int64)
    cut, reached = np.empty(count, np.int32), np.empty(count, np.int32)
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
        reached[i] = budgets[i]
    for m in range(members):
        row = keys[m]
        for i in range(count):
            reached[i] -= row[i] > cut[i]
    for m in range(members):  # what is left of the budget goes to the first ties
        row, out = keys[m], kept[m]
        for i in range(count):
            tie = np.int32(row[i] == cut[i]) & np.int32(reached[i] > 0)
            reached[i] -= tie
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
def emit_mask(window, scope, start, stop, base, low, prefix, quota, again, stored, slots, waiting):
    """Write the mask of blocks start .. stop of one scope, as far as the bits above `low` decide it.

    Blocks whose bits above it are `prefix` are undecided: with low = 0 they tie and the first `quota` of them are
    kept, else they are dropped for now and their slots and keys are recorded.
    """
    chunk = blocks_at_once(window)
    table_x, table_m, here = np.empty(chunk, np.uint64), np.empty(chunk, np.uint64), np.zeros(1, np.int64)
    buffer, kept, undecided = np.empty(chunk, np.int32), np.empty((1, chunk), np.uint8), np.empty(chunk, np.uint8)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    absent = absent_key(window)
    least, most = np.int32(base + (prefix << low)), np.int32(base + ((prefix + 1) << low) - 1)
    found = 0
    for first in range(start, stop, chunk):
        count = min(chunk, stop - first)
        keys = stored[first : first + count] if stored.size else buffer[:count]
        if not (again and stored.size):
            read(window, first, count, at_x, at_m, table_x, table_m, here, keys)
        if low == 0:
            quota -= mark(keys, least, quota, absent, kept[0])
        else:
            mark(keys, most, 0, absent, kept[0])
            found = record(keys, first, least, most, undecided, slots, waiting, found)
        step = fill_addresses(window.block, 1, first, count, at_m, table_m)
        store(window, table_m, step, here, count, kept)


@compiled
def record(keys, first, least, most, undecided, slots, waiting, found):
    """Append slot and key of every key in least .. most; few are, so eight flags are looked at together.

    Never more than there is room for, should somebody change the weight since it was counted.
    """
    eights, whole = undecided.view(np.uint64), keys.size // 8
    for i in range(keys.size):
        undecided[i] = np.uint8(keys[i] >= least) & np.uint8(keys[i] <= most)
    for eight in range(whole + 1):
        if eight < whole and not eights[eight]:
            continue
        for i in range(eight * 8, min(eight * 8 + 8, keys.size)):
            if undecided[i] and found < slots.size:
                slots[found] = first + i
                waiting[found] = keys[i]
                found += 1
    return found


@compiled
def choose(keys, need, absent, kept):
    """Flags of the `need` highest keys (at least one), lower index first among equals; never of an absent one."""
    limit, ties = cut_of(keys, need, absent)
    mark(keys, limit, ties, absent, kept)


@compiled
def place(window, scope, slots, kept):
    """Set the mask of the blocks of one scope whose flag is set."""
    table, ones, here, count = (
        np.empty(slots.size, np.uint64),
        np.ones((1, slots.size), np.uint8),
        np.zeros(1, np.int64),
        0,
    )
    at_m = address_of(window.scope, 1, scope, 0)
    for i in range(slots.size):
        if kept[i]:
            table[count] = address_of(window.block, 1, slots[i], at_m)
            count += 1
    if count:
        store(window, table, 0, here, count, ones)


@compiled
def select_elements(bits, mask, out, start, stop):
    """out = bits where the mask is set, 0 elsewhere; all flat and alike."""
    source, kept, target = bits[start:stop], mask[start:stop], out[start:stop]
    for i in range(target.size):
        target[i] = source[i] if kept[i] else 0
