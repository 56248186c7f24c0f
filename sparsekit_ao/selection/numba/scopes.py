"""Compiled selection for long scopes: one after the other, or in passes over a part of one scope."""

import numpy as np

from .cache import compiled
from .keys import ABSENT, IN_CACHE, fill_keys, sampled_keys, store
from .memory import address_of, step_of, straight

HIGHEST = 0x7FFFFFFF  # above every key


@compiled
def read(window, first, count, at_x, at_m, keys):
    """Keys of blocks first .. first + count of the scope at the given addresses."""
    none, done = np.zeros(1, np.int64), 0
    while done < count:
        some = straight(window.block, first + done, count - done)
        values = address_of(window.block, 0, first + done, at_x), step_of(window.block, 0), none
        mask = address_of(window.block, 1, first + done, at_m), step_of(window.block, 1), none
        fill_keys(window, values, mask, some, keys[done : done + some].reshape((1, some)))
        done += some


@compiled
def write(window, first, count, at_m, kept):
    """The mask of blocks first .. first + count of the scope at the given address = kept."""
    none, done = np.zeros(1, np.int64), 0
    while done < count:
        some = straight(window.block, first + done, count - done)
        mask = address_of(window.block, 1, first + done, at_m), step_of(window.block, 1), none
        store(window, mask, some, kept[done : done + some].reshape((1, some)))
        done += some


@compiled
def blocks_at_once(window):
    """Few enough that their elements stay in cache; a multiple of eight."""
    return max(256, IN_CACHE // window.elements.shape[1]) // 8 * 8


@compiled
def select_by_one(window, keep, start, stop):
    """Scopes start .. stop, one after the other; the keys of a scope are held in a buffer."""
    members, chunk = np.prod(window.block[0]), blocks_at_once(window)
    keys, kept = np.empty(members, np.int32), np.empty(chunk, np.uint8)
    for scope in range(start, stop):
        at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
        for first in range(0, members, chunk):
            count = min(chunk, members - first)
            read(window, first, count, at_x, at_m, keys[first : first + count])
        limit, need = cut_of(keys, keep[min(scope, keep.size - 1)])
        for first in range(0, members, chunk):
            count = min(chunk, members - first)
            need -= mark(keys[first : first + count], limit, need, kept)
            write(window, first, count, at_m, kept)


@compiled
def cut_of(keys, budget):
    """(limit, need): keys above the limit are kept, and the first `need` of those equal to it."""
    if budget == 0:
        return np.int32(HIGHEST), np.int64(0)
    limit = kth_key(keys, budget)
    if limit == ABSENT:  # fewer candidates than the budget
        return limit, np.int64(0)
    if count_from(keys, limit) == budget:  # no tie is cut: take a limit that none equals
        return np.int32(limit - 1), np.int64(0)
    return limit, np.int64(budget - count_from(keys, np.int32(limit + 1)))


@compiled
def count_from(keys, limit):
    """How many keys are at least the limit."""
    reached = np.int32(0)  # in 32 bits, or the loop takes twice as long
    for i in range(keys.size):
        reached = np.int32(reached + np.int32(keys[i] >= limit))
    return reached


@compiled
def kth_key(keys, budget):
    """A key that exactly `budget` keys reach, else the budget-th largest; by bisection, since counting is fast."""
    low, high = keys[0], keys[0]
    for i in range(keys.size):
        low = min(low, keys[i])
        high = max(high, keys[i])
    lower, upper = np.int64(low), np.int64(high)
    while lower < upper:
        middle = (lower + upper + 1) >> 1
        reached = count_from(keys, np.int32(middle))
        if reached >= budget:
            lower = middle
        else:
            upper = middle - 1
        if reached == budget:
            break
    return np.int32(lower)


@compiled
def mark(keys, limit, need, kept):
    """Flags of the keys above the limit and of the first `need` of those equal to it; how many of those there were."""
    for i in range(keys.size):
        kept[i] = keys[i] > limit
    used = 0
    if need > 0:
        for i in range(keys.size):
            if keys[i] == limit and used < need:
                kept[i] = 1
                used += 1
    return used


@compiled
def sample(window, scope, slots, keys):
    """Keys of some blocks of one scope."""
    addresses, under = np.empty(slots.size, np.uint64), np.empty(slots.size, np.uint64)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    for i in range(slots.size):
        addresses[i] = address_of(window.block, 0, slots[i], at_x)
        under[i] = address_of(window.block, 1, slots[i], at_m)
    sampled_keys(window, addresses, under, keys)


@compiled
def emit_mask(window, scope, start, stop, least, most, slots, waiting):
    """Write the mask of blocks start .. stop of one scope, as far as two keys decide it: (kept, undecided).

    Keys above `most` are kept, those below `least` dropped. Those between are dropped for now, and their slots,
    counted from `start`, and keys are recorded as far as the arrays have capacity; all are counted.
    """
    chunk = blocks_at_once(window)
    buffer, kept = np.empty(chunk, np.int32), np.empty(chunk, np.uint8)
    scratch = np.empty(chunk + 8, np.uint8), np.empty(chunk // 8 + 2, np.int32), np.empty(chunk + 8, np.int32)
    at_x, at_m = address_of(window.scope, 0, scope, 0), address_of(window.scope, 1, scope, 0)
    found, above = 0, 0
    for first in range(start, stop, chunk):
        count = min(chunk, stop - first)
        keys = buffer[:count]
        read(window, first, count, at_x, at_m, keys)
        above += split(keys, np.int32(least), np.int32(most), kept, scratch[0])
        found = record(keys, first - start, scratch, slots, waiting, found)
        write(window, first, count, at_m, kept)
    return above, found


@compiled
def split(keys, least, most, kept, undecided):
    """Flags of the keys above `most`, and of those from `least` to it; how many are above."""
    above = np.int32(0)
    for i in range(keys.size):
        kept[i] = keys[i] > most
        undecided[i] = np.uint8(keys[i] >= least) & np.uint8(keys[i] <= most)
        above = np.int32(above + np.int32(keys[i] > most))
    return above


@compiled
def record(keys, first, scratch, slots, waiting, found):
    """Append slot and key of every flagged key, up to the capacity of the arrays, and count them all.

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
def choose(keys, budget, kept):
    """Flags of the highest keys, lower index first among equals."""
    limit, need = cut_of(keys, budget)
    mark(keys, limit, need, kept)


@compiled
def place(window, scope, start, slots, kept):
    """Set the mask of the blocks of one scope, slots counted from `start`, whose flag is set."""
    at_m = address_of(window.scope, 1, scope, 0)
    for i in range(slots.size):
        if kept[i]:
            begin = address_of(window.block, 1, start + slots[i], at_m)
            for e in range(window.elements.shape[1]):
                window.mask[begin + window.elements[1, e]] = 1
