"""Rows whose keys are all in memory: exactly `keep` of each, many rows at a time.

A few slots are compared pair by pair, short rows are sorted, longer ones counted: a sample of each is sorted, one count
gives its error, which narrows the guess to two keys; two more counts prove that the last kept key is between them, and
only the few keys between are sorted. A row for which the guess is wrong, or with too many equal keys, is sorted whole:
a guess can cost time, never a bit.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import sample
from ..threads import pieces, run_all

PAIRS = 8  # widest row that is ranked by comparing every pair
SORTED = 512  # widest row that numpy sorts by a network of whole vectors; of a longer one as many keys are sampled
PART = 1 << 20  # keys of a piece of counting, which takes many small steps besides its passes
DEVIATIONS = 3.5  # of the sampled rank; the bracket of one row in two thousand is wrong
WORD = 8  # flags that are counted at once, in the bytes of a word ...
WORDS = 128  # ... of which so many are added: no byte runs over
Array = np.ndarray[Any, Any]


def keep_rows(out: Tensor, keys: Tensor, keep: int | Tensor) -> None:
    """Write the mask of rows of keys to `out`, bool [rows, slots]: the highest keys, the lower index among equals.

    `keys` are int16, int32 or int64 [rows, slots], in memory of their own; `keep` slots are kept, an int or int64
    [rows].
    """
    if keys.shape[1] <= PAIRS:
        keep_slots(out.T, keys.T, keep)
        return
    k = torch.as_tensor(keep, dtype=torch.int64, device="cpu").reshape(-1, 1)
    if keys.shape[1] <= SORTED:
        keys = keys.contiguous()
        _cut(out, keys, _by_sort(keys, k), k)
        return
    parts = [slice(start, stop) for start, stop in pieces(len(keys), keys.shape[1], PART)]
    if len(parts) > 1 or not keys.T.is_contiguous():  # columns are counted without a copy
        keys = keys.contiguous()
    k = k.expand(len(keys), 1)
    for part, kept in zip(parts, run_all([partial(_by_counts, keys[part], k[part]) for part in parts]), strict=True):
        out[part].copy_(kept)


def keep_slots(out: Tensor, keys: Tensor, keep: int | Tensor, dims: int = 1) -> None:
    """As `keep_rows` for a few slots, side by side: slot i beats a later slot j unless j is strictly higher.

    `out` and `keys` are [*slots, *rows] in any layout, the slots in `dims` dimensions; `keep` is an int or int64
    [*rows].
    """
    rows = sorted(range(dims, keys.ndim), key=lambda k: -keys.stride()[k])  # in memory order
    turned = keys.permute([*range(dims), *rows])
    lanes = turned.numpy().copy().reshape(math.prod(keys.shape[:dims]), -1)  # each slot contiguous
    budget = keep.permute([k - dims for k in rows]).reshape(-1).numpy() if isinstance(keep, Tensor) else keep
    kept = torch.from_numpy(_ranks(lanes) < budget).view(turned.shape)
    out.permute([*range(dims), *rows]).copy_(kept)


def _ranks(lanes: Array) -> Array:
    """How many slots beat each, int8 [slots, lanes]."""
    wins = np.empty(lanes.shape[1:], np.bool_)
    beaten = np.repeat(np.arange(len(lanes) - 1, -1, -1, dtype=np.int8)[:, None], lanes.shape[1], axis=1)
    for i in range(len(lanes)):
        for j in range(i + 1, len(lanes)):
            np.greater_equal(lanes[i], lanes[j], out=wins)
            beaten[j] += wins.view(np.int8)
            beaten[i] -= wins.view(np.int8)
    return beaten


def _cut(out: Tensor, keys: Tensor, threshold: Tensor, k: Tensor) -> None:
    """Keep what reaches each row's k-th largest key, then cut the ties that exceed k."""
    torch.ge(keys, threshold, out=out)
    excess = (out.count_nonzero(1)[:, None] != k)[:, 0].nonzero()[:, 0]
    if excess.numel():
        some, limit = keys[excess], threshold[excess]
        above, ties = some > limit, some == limit
        left = (k if len(k) == 1 else k[excess]) - above.sum(1, keepdim=True)
        out[excess] = above | (ties & (ties.cumsum(1) <= left))


def _by_sort(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th largest key of each row [rows, 1], for k = 0 the largest; k is [rows, 1], or [1, 1] for all."""
    ordered = keys.clone()
    array = ordered.numpy()  # which sorts with whole vectors
    run_all([partial(array[start:stop].sort, axis=1) for start, stop in pieces(len(keys), keys.shape[1])])
    place = (keys.shape[1] - k).clamp_(max=keys.shape[1] - 1)
    return ordered[:, place[0]] if len(place) == 1 else ordered.gather(1, place)


def _by_counts(keys: Tensor, k: Tensor) -> Tensor:
    """The mask of long rows, contiguous or columns of contiguous memory, in the same layout."""
    rows, width = keys.shape
    array, budget = keys.numpy(), k.numpy()
    padded = -(-width // (WORD * WORDS)) * WORD * WORDS
    flags = np.zeros((2, rows, padded) if keys.is_contiguous() else (2, padded, rows), np.bool_)
    above, between = flags if keys.is_contiguous() else flags.transpose(0, 2, 1)
    least, most, guess = _bracket(array, budget, above)
    np.greater(array, most, out=above[:, :width])
    np.greater_equal(array, least, out=between[:, :width])
    left, reach = budget - _count(above), _count(between)
    right = (left >= 0) & (budget <= reach)
    counts = np.where(left > 0, reach - (budget - left), 0)
    few = right & (counts <= width // sample.ROOM)
    counts[~few] = 0
    np.logical_xor(between, above, out=between)
    between[counts[:, 0] == 0] = False
    slots = np.flatnonzero(torch.from_numpy(between).contiguous().numpy())
    row = np.repeat(np.arange(rows), counts[:, 0])
    memory, places = _flat(array, row, slots - row * padded)
    decided, marks = _flat(above, row, slots - row * padded)
    decided[marks] = _among(memory[places], counts, left)
    kept = torch.from_numpy(above[:, :width])
    if not few.all():
        rest = torch.from_numpy(np.flatnonzero(~few))
        kept[rest] = _whole(keys[rest], k[rest], torch.from_numpy(guess)[rest])
    return kept


def _flat(table: Array, row: Array, column: Array) -> tuple[Array, Array]:
    """A table's memory and the addresses of some entries, which are quicker than pairs."""
    if table.flags.c_contiguous:
        return table.reshape(-1), row * table.shape[1] + column
    return table.T.reshape(-1), column * len(table) + row


def _whole(keys: Tensor, k: Tensor, guess: Tensor) -> Tensor:
    """The mask of rows [rows, slots], sorted where the k-th largest key is not the `guess`, as if many are equal."""
    above, reach = ((compare(keys, guess)).sum(1, keepdim=True) for compare in (torch.gt, torch.ge))
    unknown = ((above >= k) | (reach < k))[:, 0].nonzero()[:, 0]
    guess[unknown] = _by_sort(keys[unknown], k[unknown])
    kept = torch.empty(keys.shape, dtype=torch.bool, device="cpu")
    _cut(kept, keys, guess, k)
    return kept


def _bracket(keys: Array, k: Array, flags: Array) -> tuple[Array, Array, Array]:
    """Two keys of each row between which the k-th largest probably is, and the first guess at it, each [rows, 1].

    `flags` is a buffer for counting.
    """
    rows, width = keys.shape
    stretch = -(-width // SORTED)
    slots, limits = sample.slots(width, stretch), np.iinfo(keys.dtype)
    drawn = len(slots)
    ordered = np.full((rows, drawn + 2), limits.min, keys.dtype)
    ordered[:, -1] = limits.max
    ordered[:, 1:-1] = keys.take(slots, axis=1) if keys.flags.c_contiguous else keys.T.take(slots, axis=0).T
    ordered[:, 1:-1].sort(axis=1)
    first = np.clip(drawn + 1 - k // stretch, 1, drawn)
    guess = _pick(ordered, first)
    np.greater_equal(keys, guess, out=flags[:, :width])
    off = (_count(flags) - k) / stretch  # places of the sample by which the first guess is too low
    spread = DEVIATIONS * np.sqrt(np.abs(off)) + 1
    least, most = (np.clip(first + at, 0, drawn + 1).astype(np.int64) for at in (off - spread, off + spread + 1))
    return _pick(ordered, least), _pick(ordered, most), guess


def _pick(table: Array, column: Array) -> Array:
    """Some entries of each row: table[i, column[i, j]]."""
    memory, places = _flat(table, np.arange(len(table))[:, None], column)
    return memory[places]


def _count(flags: Array) -> Array:
    """How many are set in each row [rows, 1]; a row is whole words, WORDS at a time."""
    if not flags.flags.c_contiguous:
        bytes_ = np.add.reduce(flags.T.view(np.uint8).reshape(-1, WORDS, len(flags)), axis=1, dtype=np.uint8)
        return bytes_.sum(axis=0, dtype=np.int64)[:, None]
    words = flags.view(np.uint64).reshape(len(flags), -1, WORDS).sum(axis=2)
    return words.view(np.uint8).reshape(len(flags), -1).sum(axis=1, dtype=np.int64)[:, None]


def _among(keys: Array, counts: Array, k: Array) -> Array:
    """Which of the `counts` keys of each row, row after row, are its k highest; flat."""
    most = max(int(counts.max()), 1)
    real = np.arange(most) < counts
    table = np.full(real.shape, np.iinfo(keys.dtype).min, keys.dtype)
    table[real] = keys
    budget = np.where(counts > 0, k, 0)
    threshold = _pick(np.sort(table, axis=1), np.minimum(most - budget, most - 1))
    chosen = keys >= np.repeat(threshold, counts[:, 0])
    if np.count_nonzero(chosen) > budget.sum():
        kept = torch.empty(real.shape, dtype=torch.bool, device="cpu")
        _cut(kept, *map(torch.from_numpy, (table, threshold, budget)))
        chosen = kept.numpy()[real]
    return chosen
