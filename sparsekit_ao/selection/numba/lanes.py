"""Compiled selection for short scopes and columns: many scopes side by side, one in each vector lane."""

import numpy as np

from .cache import compiled
from .keys import ABSENT, fill_keys, store
from .memory import address_of, step_of, straight

HIGHEST = 0x7FFFFFFF  # above every key


@compiled
def select_side_by_side(window, keep, lanes, pairs, network, start, stop):
    """Scopes start .. stop, `lanes` at a time.

    Up to `pairs` blocks of a scope are compared pair by pair, up to `network` sorted, more of them bisected.
    """
    members = np.prod(window.block[0])
    shifts = np.empty((2, members), np.int64)
    for m in range(members):
        shifts[0, m], shifts[1, m] = address_of(window.block, 0, m, 0), address_of(window.block, 1, m, 0)
    buffer, spare = np.empty(members * lanes, np.int32), np.empty(members * lanes, np.int32)
    flags, budgets, cut = np.empty(members * lanes, np.uint8), np.empty(lanes, np.int32), np.empty(lanes, np.int32)
    first = start
    while first < stop:
        count = straight(window.scope, first, min(lanes, stop - first))
        shape, size = (members, count), members * count
        keys, other, kept = buffer[:size].reshape(shape), spare[:size].reshape(shape), flags[:size].reshape(shape)
        values = address_of(window.scope, 0, first, 0), step_of(window.scope, 0), shifts[0]
        mask = address_of(window.scope, 1, first, 0), step_of(window.scope, 1), shifts[1]
        fill_keys(window, values, mask, count, keys)
        for i in range(count):
            budgets[i] = keep[min(first + i, keep.size - 1)]  # a single budget is that of all
        if members <= pairs:
            rank_pairs(keys, budgets, other, kept)
        else:
            if members <= network:
                for i in range(size):  # a loop, because an assignment of arrays takes seconds to compile
                    spare[i] = buffer[i]
                sort_lanes(other)
                for i in range(count):
                    cut[i] = other[budgets[i] - 1, i] if budgets[i] else np.int32(HIGHEST)
            else:
                bisect_lanes(keys, count, budgets, cut)
            mark_lanes(keys, count, budgets, cut, kept)
        if window.among_kept:
            for i in range(size):
                flags[i] &= buffer[i] != ABSENT
        store(window, mask, count, kept)
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
    """The larger key of each lane to `upper`, the smaller one to `lower`."""
    for i in range(count):
        one, other = upper[i], lower[i]
        upper[i], lower[i] = max(one, other), min(one, other)


@compiled
def bisect_lanes(keys, count, budgets, cut):
    """Bisect each lane's key range until exactly its budget is at or above the cut, or only ties are left."""
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
