"""The backend "cpu" runs numpy on chunks of whole scopes that fit the cache. Threads take these chunks in turn.

A slot is the place of one block in a scope. Slots are compared by integer keys, in the same order as their scores. Up
to `PAIRS` slots are ranked by comparing every pair, more by `numpy.partition`. A scope of `LONG` slots or more is read
in chunks. A sample gives two keys that enclose the last kept key, and only the keys between them are collected.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..structure import BlockSpec, ScopeCoupling, ScopeSpec, windows
from ..structure.rule import INF, INTS
from ..structure.tiles import cut_parts, to_aligned
from ..structure.windows import SMALL, Norm, Window, fill_mask
from . import reference
from .request import Request

Array = np.ndarray[Any, Any]

name = "cpu"
CHUNK = 1 << 19  # elements of float32 that one thread takes at a time
SCORES = 1 << 20  # elements whose block scores are computed together
PAIRS = 8  # widest scope that is ranked by comparing every pair
NETWORK = 512  # widest scope that numpy sorts by a sorting network, whose time does not depend on the keys
LONG = 1 << 17  # a scope with this many slots or more is cut
SAMPLED = 1 << 16  # about the largest size of a sample; it takes one key of 64, and fewer in longer scopes
TRANSPOSED = 128  # slots that are copied together where they are not adjacent
DEVIATIONS = 4  # distance of the two sampled keys from the expected rank, in standard deviations
_iinfo = cache(np.iinfo)  # which takes 5 us
_INTS = INTS | {torch.bool: torch.uint8, torch.uint8: torch.uint8}
_ONE = {torch.float16: 0x3C00, torch.bfloat16: 0x3F80, torch.float32: 0x3F800000, torch.float64: 0x3FF0000000000000}
_ONE |= {torch.bool: 1, torch.uint8: 1}


def refusals(work: Request | Tensor) -> list[str]:
    """Return why this backend cannot take a request, or rows of scores."""
    if work.device.type != "cpu":
        return [f"it works on CPU tensors, got {work.device}"]
    if isinstance(work, Request):
        for spec, mask in work.masks.items():
            dtype = work.value_of(spec).dtype
            if mask.dtype not in _ONE or dtype not in INF:
                return [f"it takes float values, and bool, uint8 or float masks, got {dtype} and {mask.dtype}"]
    return []


def run(requests: Sequence[Request]) -> None:
    """Fill the masks of requests."""
    chunks: list[Callable[[], None]] = []
    for request in requests:
        scope = request.scope
        if isinstance(scope, ScopeSpec) and scope.has_single_elements and scope.numblk_per_scope() < LONG:
            parts = _chunks(request)
            if len(parts) == 1:  # filled here, since a thread would take longer to start
                parts[0]()
            else:
                chunks += parts
        elif all(s.is_plain for s in request.scope_windows) and request.windows[0].window.numel():
            _fill_plain(request)
        else:
            reference.fill(request, _block_scores, keep_rows)
    _on_threads(chunks)
    for request in requests:
        for mask in request.masks.values():  # numpy's writes are not seen by autograd, which may hold the mask
            if not mask.is_inference():
                torch.autograd.graph.increment_version(mask)


def keep_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """Keep exactly `keep` slots of each row of scores [rows, slots], among the `candidates` if given."""
    out = torch.empty(scores.shape, dtype=torch.bool, device="cpu")
    rows, width = scores.shape
    if out.numel() == 0:
        return out
    within_mask = candidates is not None
    if candidates is not None:
        out.copy_(candidates)  # from which slots are then removed
    if width >= LONG:
        budgets = keep.tolist() if isinstance(keep, Tensor) else [keep] * rows
        for row, budget in enumerate(budgets):
            _keep_long([_LongPart(scores[row], out[row], False, within_mask=within_mask)], budget)
        return out
    step = max(1, CHUNK // width)
    parts = [slice(at, at + step) for at in range(0, rows, step)]
    _on_threads([partial(_keep_row_chunk, scores, out, keep, within_mask, part) for part in parts])
    return out


def _keep_row_chunk(scores: Tensor, out: Tensor, keep: int | Tensor, within_mask: bool, part: slice) -> None:
    mask = _ints(out[part])
    keys = _keys(_ints(scores[part]), scores.dtype, False, within=mask if within_mask else None)
    budget = _ints(keep[part])[:, None] if isinstance(keep, Tensor) else keep
    _write(mask, _kept(keys, budget, is_16_bit=scores.dtype.itemsize == 2), out.dtype, within_mask)


def _block_scores(members: Sequence[Window], norm: Norm, ndim: int, as_mean: bool | None = None) -> Tensor:
    """Compute `windows.block_scores` in parts; the results are bit-identical, since no block is divided."""
    first = members[0]
    if len(members) > 1 or first.window.numel() <= SCORES:
        return windows.block_scores(members, norm, ndim, as_mean)
    as_mean = first.is_partial if as_mean is None else as_mean
    grid = torch.empty(first.grid, dtype=torch.promote_types(first.window.dtype, torch.float32), device="cpu")
    for place in _places(first):
        part = replace(_at(first, place), order=())
        grid[place].copy_(windows.block_scores((part,), norm, len(first.grid), as_mean))
    return to_aligned(grid, first.order, ndim)


def _chunks(request: Request) -> list[Callable[[], None]]:
    """Return a function for each chunk of a request of short scopes of single elements, which fills this chunk."""
    (m,), shape, keep = request.windows, request.scope_windows[0].shape, request.budget
    assert m.values is not None
    is_short = math.prod(shape) <= PAIRS
    fill = partial(_fill_pairs if is_short else _fill_rows, request)
    chunk = 4 * CHUNK // m.values.element_size() if is_short else CHUNK  # keys of short scopes are as wide as values
    if m.values.numel() <= chunk:
        return [partial(fill, m, keep)]
    chunks = list[Callable[[], None]]()
    for place, _ in cut_parts(m.window, shape, chunk):
        cut = tuple(slice(p.start * n, p.stop * n) for p, n in zip(place, shape, strict=True))
        chunks.append(partial(fill, _at(m, cut), keep[place] if isinstance(keep, Tensor) else keep))
    return chunks


def _fill_plain(request: Request) -> None:
    """Fill the masks of a request whose scopes each cut the grid of one window evenly."""
    scopes, members = request.scope_windows, request.windows
    is_joint, has_blocks = len(scopes) > 1, any(math.prod(m.shape) != 1 for m in members)
    is_mixed = any(math.prod(s.scope_grid) != 1 for s in scopes) or len({m.window.dtype for m in members}) > 1
    if (is_joint and is_mixed) or (has_blocks and request.within_mask):
        reference.fill(request, _block_scores, keep_rows)
    elif has_blocks:
        _fill_blocks(request)
    elif is_joint:
        _keep_long([part for m in members for part in _long_parts(m, request)], int(request.budget))
    else:
        keep = request.budget
        for place in np.ndindex(*scopes[0].scope_grid):
            cut = tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, scopes[0].shape, strict=True))
            parts = list(_long_parts(_at(members[0], cut), request))
            _keep_long(parts, int(keep[place]) if isinstance(keep, Tensor) else keep)


def _fill_pairs(request: Request, m: Window, keep: int | Tensor) -> None:
    """Select among the single elements of short scopes: slot i beats a later slot j unless j is strictly higher."""
    assert m.values is not None and m.mask is not None
    shape, magnitude, within_mask = request.scope_windows[0].shape, request.norm is not None, request.within_mask
    # For 2:4 along the rows of a matrix [R, C], arrays are split into [R, 1, C / 4, 4] and transposed to
    # [1, 4, R, C / 4], so that `lanes` is [4, scopes].
    order = (*range(1, 2 * len(shape), 2), *range(0, 2 * len(shape), 2))
    split = [n for size, tile in zip(m.values.shape, shape, strict=True) for n in (size // tile, tile)]
    values, mask, dtype = _ints(m.values), _ints(m.mask), m.values.dtype
    if request.masked or within_mask:  # the mask would be transposed too, which takes longer
        under, within = mask if request.masked else None, mask if within_mask else None
        keys = _keys(values, dtype, magnitude, under=under, within=within, narrow=True).reshape(split).transpose(order)
    else:
        keys = _keys(values.reshape(split).transpose(order), dtype, magnitude, narrow=True)
    lanes = np.ascontiguousarray(keys).reshape(math.prod(shape), -1)
    # At first every later slot is taken to beat a slot; each comparison that is won corrects both.
    beaten = np.repeat(np.arange(len(lanes) - 1, -1, -1, dtype=np.int8)[:, None], lanes.shape[1], axis=1)
    wins = np.empty(lanes.shape[1:], np.bool_)
    for i in range(len(lanes)):
        for j in range(i + 1, len(lanes)):
            np.greater_equal(lanes[i], lanes[j], out=wins)
            beaten[j] += wins.view(np.int8)
            beaten[i] -= wins.view(np.int8)
    kept = (beaten < (keep if isinstance(keep, int) else _ints(keep).reshape(-1))).reshape(keys.shape)
    is_converted = mask.itemsize > 1 and not within_mask  # bytes are written and then converted, in half the time
    written, dtype = (np.empty(mask.shape, np.uint8), torch.uint8) if is_converted else (mask, m.mask.dtype)
    targets = written.reshape(split).transpose(order)
    for at in np.ndindex(*shape):  # one slot of all scopes at a time, which is faster than one strided copy
        _write(targets[(*at, ...)], kept[(*at, ...)], dtype, within_mask)
    if is_converted:
        _write(mask, written.view(np.bool_), m.mask.dtype, within_mask)


def _fill_rows(request: Request, m: Window, keep: int | Tensor) -> None:
    """Select among the single elements of scopes that are longer, but not `LONG`, as among rows of keys."""
    assert m.values is not None and m.mask is not None
    shape, magnitude, within_mask = request.scope_windows[0].shape, request.norm is not None, request.within_mask
    order = (*range(0, 2 * len(shape), 2), *range(1, 2 * len(shape), 2))
    split = [n for size, tile in zip(m.values.shape, shape, strict=True) for n in (size // tile, tile)]
    mask, dtype = _ints(m.mask), m.values.dtype
    under, within = mask if request.masked else None, mask if within_mask else None
    source = _keys(_ints(m.values), dtype, magnitude, under=under, within=within).reshape(split).transpose(order)
    keys = np.empty(source.shape, source.dtype)
    for part in _parts_to_copy(source):
        keys[part] = source[part]
    budget = keep if isinstance(keep, int) else _ints(keep).reshape(-1, 1)
    kept = _kept(keys.reshape(-1, math.prod(shape)), budget, is_16_bit=dtype.itemsize == 2).reshape(keys.shape)
    targets = mask.reshape(split).transpose(order)
    for part in _parts_to_copy(targets):
        _write(targets[part], np.asarray(kept[part], order="C"), m.mask.dtype, within_mask)


def _parts_to_copy(array: Array) -> Iterator[Any]:
    """Yield indices of parts that stay in the cache while they are transposed; one part if slots are adjacent."""
    last = max((k for k, size in enumerate(array.shape) if size > 1), default=None)
    if last is None or array.strides[last] == array.itemsize:
        return iter([...])
    return ((*[slice(None)] * last, slice(at, at + TRANSPOSED)) for at in range(0, array.shape[last], TRANSPOSED))


def _write(mask: Array, kept: Array, dtype: torch.dtype, within_mask: bool) -> None:
    """Write a bool array to a mask, which is an array of integers with the bits of its `dtype`."""
    if within_mask:
        np.multiply(mask, kept.view(np.uint8), out=mask, casting="unsafe")
    elif _ONE[dtype] == 1:
        np.copyto(mask, kept.view(np.uint8))
    elif dtype in (torch.float32, torch.float64) and mask.strides[-1:] == (mask.itemsize,):
        np.copyto(mask.view(f"f{mask.itemsize}"), kept)  # vectorized, but slow where the mask is strided
    else:
        np.multiply(kept.view(np.uint8), mask.dtype.type(_ONE[dtype]), out=mask, casting="unsafe")


def _fill_blocks(request: Request) -> None:
    """Select among the scores of whole blocks as among single elements, then fill the blocks."""
    scopes, kept, values = [], {}, {}
    for s, m in zip(request.scope_windows, request.windows, strict=True):
        part = replace(m, under=m.mask) if request.masked else m
        scores = _block_scores((part,), request.norm, m.window.ndim, request.scope.as_mean)
        spec = BlockSpec(scores)
        scopes.append(ScopeSpec(spec, s.shape))
        kept[spec] = torch.empty_strided(scores.shape, scores.stride(), dtype=torch.bool, device="cpu")
        values[scores] = scores
    scope = scopes[0] if len(scopes) == 1 else ScopeCoupling(scopes)
    norm = None if request.norm is None else 1  # norms of blocks are magnitudes
    run([Request(scope=scope, masks=kept, keep=request.budget, values=values, norm=norm)])
    masks = list(kept.values())
    del scope, scopes, spec, kept, values, scores  # scores take memory that masks need now
    for m, mask in zip(request.windows, masks, strict=True):
        _expand(m, mask)


# keys and selection of rows


def _ints(t: Tensor) -> Array:
    """Return the bits of a tensor as a numpy array, without a copy."""
    t = t.detach()
    return (t.view(_INTS[t.dtype]) if t.dtype in _INTS else t).numpy()


def _keys(
    bits: Array,
    dtype: torch.dtype,
    magnitude: bool,
    *,
    under: Array | None = None,
    within: Array | None = None,
    narrow: bool = False,
) -> Array:
    """Return keys ordered as scores, in 32 bits or more unless `narrow`: 0 if `under` is 0, lowest if `within` is 0."""
    wide = bits.dtype.type if narrow or bits.dtype == np.int64 else np.int32
    top, nan = _iinfo(bits.dtype).max, INF[dtype] + 1
    if magnitude:  # which any norm of a single element is
        keys = np.bitwise_and(bits, bits.dtype.type(top), order="C").astype(wide, copy=False)
        if keys.size and keys.max() > nan:
            keys = np.minimum(keys, wide(nan))
    else:
        low = np.bitwise_and(bits, bits.dtype.type(top)).astype(wide, copy=False)
        keys = np.where(low >= nan, wide(nan), np.where(bits < 0, -low, low))
    if under is not None:
        keys *= under > 0  # the bits of -0.0 are a negative integer
    if within is not None:
        keys = np.where(within > 0, keys, wide(_iinfo(bits.dtype).min))
    return keys


def _kept(keys: Array, keep: int | Array, *, is_16_bit: bool = False) -> Array:
    """Keep exactly `keep` (an int, or [rows, 1]) of each row of keys; bool of the same shape."""
    rows, width = keys.shape
    if isinstance(keep, int) and keep in (0, width):
        return np.full(keys.shape, keep > 0)
    total = keep * rows if isinstance(keep, int) else int(keep.sum())
    least = keys.min(initial=_iinfo(keys.dtype).max)
    least_is_common = least in (0, _iinfo(keys.dtype).min)  # that of zeros, or of slots that may not be kept
    if least_is_common and np.count_nonzero(above := keys > least) <= total:
        room = keep - np.count_nonzero(above, axis=1, keepdims=True)
        if (room >= 0).all():
            return _with_ties(above, keys == least, room)
    if is_16_bit and width <= 1 << 16:  # the place of the slot in the lower half breaks their many ties
        keys = (keys << 16) | np.arange(width - 1, -1, -1, dtype=np.int32)
    elif least_is_common and width > NETWORK:
        keys = _with_distinct_least(keys, least)
    if isinstance(keep, int):
        limit = np.partition(keys, width - keep, axis=1)[:, width - keep, None]
    else:
        place = np.minimum(width - keep, width - 1)
        different = np.unique(place)
        ordered = np.sort(keys, axis=1) if len(different) > 8 else np.partition(keys, different, axis=1)
        limit = np.take_along_axis(ordered, place, axis=1)
    kept = keys >= limit
    if np.count_nonzero(kept) > total:
        excess = np.flatnonzero(np.count_nonzero(kept, axis=1) != np.broadcast_to(keep, (rows, 1))[:, 0])
        tied_keys, tied_limit = keys[excess], limit[excess]
        above, ties = tied_keys > tied_limit, tied_keys == tied_limit
        budget = keep if isinstance(keep, int) else keep[excess]
        kept[excess] = _with_ties(above, ties, budget - np.count_nonzero(above, axis=1, keepdims=True))
    return kept


def _with_ties(kept: Array, ties: Array, room: Array) -> Array:
    """Keep the first `room` [rows, 1] of the ties of each row too."""
    rows = np.flatnonzero(room)
    if len(rows):
        ties = ties[rows]
        kept[rows] |= ties & (np.cumsum(ties, axis=1, dtype=np.int32) <= room[rows])
    return kept


def _with_distinct_least(keys: Array, least: Any) -> Array:
    """Replace equal least keys, which make `numpy.partition` slow, by different ones in the order of ties."""
    width = keys.shape[1]
    first = -1 if least == 0 else least + width
    return np.where(keys == least, np.arange(first, first - width, -1, dtype=keys.dtype), keys)


# one long scope


class _LongPart:
    """Consecutive slots of one long scope, whose keys are computed when they are needed."""

    def __init__(
        self, values: Tensor, mask: Tensor, magnitude: bool, *, masked: bool = False, within_mask: bool = False
    ) -> None:
        self.size = values.numel()
        self._values, self._mask, self._dtype, self._magnitude = _ints(values), _ints(mask), values.dtype, magnitude
        self._mask_dtype, self._within_mask = mask.dtype, within_mask
        self._under, self._within = self._mask if masked else None, self._mask if within_mask else None

    def keys(self, at: tuple[Array, ...] | None = None) -> Array:
        """Return all keys in the order of the slots, or those at some places; one-dimensional."""
        tensors = (self._values, self._under, self._within)
        bits, under, within = (None if t is None else t if at is None else t[at] for t in tensors)
        assert bits is not None
        return _keys(bits, self._dtype, self._magnitude, under=under, within=within).reshape(-1)

    def sample(self, generator: Any, stretch: int) -> Array:
        """Return one random key from each stretch."""
        places = np.arange(0, self.size - stretch + 1, stretch)
        places += generator.integers(stretch, size=len(places))
        shape = self._values.shape
        return self.keys(np.unravel_index(places, shape) if shape else None)  # a single number has no indices

    def decide(self, low: int, high: int) -> None:
        """Keep keys above `high`, and collect those above `low` among the others."""
        keys = self.keys()
        self._kept = keys > high
        self.above = int(np.count_nonzero(self._kept))
        self.places = np.flatnonzero((keys > low) ^ self._kept)
        self.undecided = keys[self.places]

    def tied(self, key: int) -> Array:
        """Return the places of the slots with this key."""
        return np.flatnonzero(self.keys() == key)

    def write(self, more: Array) -> None:
        """Write the mask: it keeps what `decide` keeps, and the places `more`."""
        self._kept[more] = True
        _write(self._mask, self._kept.reshape(self._mask.shape), self._mask_dtype, self._within_mask)


def _long_parts(m: Window, request: Request) -> Iterator[_LongPart]:
    """Yield the chunks of consecutive slots of a window of single elements."""
    assert m.values is not None and m.mask is not None
    for place, values in cut_parts(m.values, (1,) * m.values.ndim, CHUNK // 2):  # a chunk needs several arrays
        magnitude, masked, within_mask = request.norm is not None, request.masked, request.within_mask
        yield _LongPart(values, m.mask[place], magnitude, masked=masked, within_mask=within_mask)


def _keep_long(parts: Sequence[_LongPart], keep: int) -> None:
    """Keep exactly `keep` slots of one scope, given as consecutive parts."""
    low, high, tied = _bracket(parts, keep)
    if not _keep_between(parts, keep, low, high) and not (tied and _keep_between(parts, keep, high + 1, high + 1)):
        keys = np.concatenate([part.keys() for part in parts])  # the sample misled
        kept, start = _kept(keys[None], keep)[0], 0
        for part in parts:
            part.decide(_iinfo(keys.dtype).max, _iinfo(keys.dtype).max)
            part.write(np.flatnonzero(kept[start : start + part.size]))
            start += part.size


def _bracket(parts: Sequence[_LongPart], keep: int) -> tuple[int, int, bool]:
    """Return (low, high, tied): probably low <= last kept key <= high, or if `tied` it is the frequent key high + 1."""
    slots = sum(part.size for part in parts)
    stretch = min(max(64, slots // SAMPLED), max(part.size for part in parts))
    generator = np.random.default_rng(0)
    sampled = np.concatenate([part.sample(generator, stretch) for part in parts if part.size >= stretch])
    limits, drawn = _iinfo(sampled.dtype), len(sampled)
    share = keep / slots
    spread = DEVIATIONS * math.sqrt(drawn * share * (1 - share)) + 1
    least, most = math.floor(drawn * (1 - share) - spread), math.ceil(drawn * (1 - share) + spread)
    sampled.partition(np.clip((least, most), 0, drawn - 1))
    low = int(sampled[least]) if 0 <= least < drawn else int(limits.min)
    high = int(sampled[most]) if 0 <= most < drawn else int(limits.max)
    if low < high and np.count_nonzero(sampled == high) > drawn // 64:
        return low, high - 1, True
    return low, high, False


def _keep_between(parts: Sequence[_LongPart], keep: int, low: int, high: int) -> bool:
    """Keep the slots if the last kept key is between these two or equals the lower one; return whether it is."""
    _on_threads([partial(part.decide, low, high) for part in parts])
    room = keep - sum(part.above for part in parts)
    if room < 0:
        return False
    counts = [len(part.places) for part in parts]
    if room <= sum(counts):
        undecided = np.concatenate([part.undecided for part in parts])
        chosen = np.split(_kept(undecided[None], room)[0] if len(undecided) else undecided != 0, np.cumsum(counts)[:-1])
        _on_threads([partial(part.write, part.places[k]) for part, k in zip(parts, chosen, strict=True)])
        return True
    room -= sum(counts)
    more: list[Array] = []
    for part in parts:
        tied = part.tied(low)[:room] if room else part.places[:0]
        room -= len(tied)
        more.append(np.concatenate((part.places, tied)))
    if room:
        return False
    _on_threads([partial(part.write, places) for part, places in zip(parts, more, strict=True)])
    return True


# parts and threads


def _places(whole: Window) -> Iterator[tuple[slice, ...]]:
    """Yield parts of a window's grid of up to SCORES elements; smaller last blocks are parts of their own."""
    counts = [s // b for s, b in zip(whole.window.shape, whole.shape, strict=True)]
    inner = whole.window[tuple(slice(0, c * b) for c, b in zip(counts, whole.shape, strict=True))]
    if inner.numel():
        yield from (place for place, _ in cut_parts(inner, whole.shape, SCORES))
    for k, count in enumerate(counts):
        if whole.window.shape[k] % whole.shape[k]:
            before, after = counts[:k], whole.grid[k + 1 :]
            yield (*(slice(0, c) for c in before), slice(count, count + 1), *(slice(0, c) for c in after))


def _at(whole: Window, place: tuple[slice, ...]) -> Window:
    """Return the blocks of a part of the grid."""
    inside = tuple(slice(p.start * b, p.stop * b) for p, b in zip(place, whole.shape, strict=True))
    values, mask, under = (None if t is None else t[inside] for t in (whole.values, whole.mask, whole.under))
    return replace(whole, values=values, mask=mask, under=under)


def _expand(m: Window, kept: Tensor) -> None:
    """Write to the mask which blocks are kept, in whole words if the last dimension of blocks consists of words."""
    mask, word = m.mask, math.gcd(*m.shape[-1:], 8)
    assert mask is not None
    if not m.shape:  # a single number
        mask.copy_(kept)
        return
    if mask.dtype not in (torch.bool, torch.uint8) and mask.numel() > SMALL:
        # Bytes are written and then converted, in a third of the time.
        for place in _places(m):
            part = _at(m, place)
            assert part.mask is not None
            as_bytes = torch.empty(part.mask.shape, dtype=torch.uint8, device="cpu")
            _expand(replace(part, values=None, mask=as_bytes), kept[place])
            part.mask.copy_(as_bytes)
        return
    is_bytes = mask.element_size() == 1 and mask.stride(-1) == 1 and mask.shape[-1] % m.shape[-1] == 0
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    is_words = is_bytes and word > 1 and not any(n % word for n in (*mask.stride()[:-1], mask.storage_offset()))
    if is_words:
        m = replace(m, shape=(*m.shape[:-1], m.shape[-1] // word), mask=mask.view(dtype), values=None)
    for place in _places(m):
        flags = kept[place].to(dtype).mul_(int.from_bytes(b"\1" * word)) if is_words else kept[place]
        fill_mask((_at(m, place),), flags)


def _on_threads(work: Sequence[Callable[[], None]]) -> None:
    """Call every function, on as many threads as torch uses."""
    threads = min(torch.get_num_threads(), len(work))
    if threads < 2:
        for function in work:
            function()
        return
    with ThreadPoolExecutor(threads) as executor:
        for _ in executor.map(lambda function: function(), work):
            pass
