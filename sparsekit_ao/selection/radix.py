"""Radix select by histograms: the k-th largest key of each row, counted rather than sorted.

Thirteen bits a pass, highest first: count the digits of the keys that match so far, find the digit that contains the
k-th largest, and continue inside it. A row is read in chunks, so no buffer of the row's size is needed. The histograms
are yielded, so that a caller may sum them over processes that hold other slots of the same rows.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import SparsityError

BITS = 13
CHUNK = 1 << 18
T = TypeVar("T")
Passes = Generator[Tensor, Tensor, T]  # yields a histogram, is sent its sum over the processes, returns a T


class KeyRows(Protocol):
    """Rows of integer keys that are made a chunk at a time."""

    rows: int
    width: int
    bits: int

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        """Signed keys of slots start .. stop of one row."""
        ...


def select_threshold(source: KeyRows, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`threshold_passes` run to its end in one process."""
    passes = threshold_passes(source, keep)
    try:
        counts = next(passes)
        while True:
            counts = passes.send(counts)
    except StopIteration as end:
        return end.value


def threshold_passes(source: KeyRows, keep: Tensor) -> Passes[tuple[Tensor, Tensor, Tensor]]:
    """The keep-th largest key of each row, a pass at a time, so that several selections may share their sums.

    Args:
        source: the keys; every process holds its own part of every row.
        keep: int64 [rows], 0 <= keep <= slots of the row over all processes.

    Yields:
        An int64 histogram [rows, bins], for its sum over the processes.

    Returns:
        (threshold, need, ties), int64 [rows]: keys above the threshold are kept; of the `ties` equal to it the first
        `need` are. keep = 0 gives need = 0 at the largest key.
    """
    need = keep.clone()
    prefix = torch.zeros_like(keep)
    ties = torch.zeros_like(keep)
    shift = source.bits
    live: list[Tensor | None] = [None] * source.rows  # survivors of a row, once they are few
    while shift > 0:
        low = max(shift - BITS, 0)
        found = [_histogram(source, row, int(prefix[row]), shift, low, live[row]) for row in range(source.rows)]
        counts = yield torch.stack(found) if found else torch.zeros(0, 1, dtype=torch.int64, device="cpu")
        if shift == source.bits and bool((keep > counts.sum(1)).any()):
            raise SparsityError(
                f"keep must be at most the members of a scope, got {keep.tolist()} of "
                f"{counts.sum(1).tolist()} over all processes"
            )
        digit, above = _locate(counts, need)
        need -= above
        ties = counts.gather(1, digit[:, None])[:, 0]
        prefix = (prefix << (shift - low)) + digit
        for row in range(source.rows):
            live[row] = _survivors(source, row, int(prefix[row]), low, live[row], int(found[row][digit[row]]))
        shift = low
    return prefix - (1 << (source.bits - 1)) if source.bits < 64 else prefix ^ torch.iinfo(torch.int64).min, need, ties


def _chunks(source: KeyRows, row: int, live: Tensor | None) -> Iterator[Tensor]:
    if live is not None:
        yield live
        return
    for start in range(0, source.width, CHUNK):
        yield source.keys(row, start, min(start + CHUNK, source.width))


def _histogram(source: KeyRows, row: int, prefix: int, shift: int, low: int, live: Tensor | None) -> Tensor:
    """Counts of the digit (shift, low] among the keys whose bits above `shift` are `prefix`."""
    bins = 1 << (shift - low)
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    for keys in _chunks(source, row, live):
        if shift < source.bits:
            keys = keys[(keys >> shift) == _signed(prefix, source.bits, shift)]
            digits = (keys >> low) & (bins - 1)
        else:
            digits = (keys >> low) + (1 << (source.bits - 1 - low))  # offset-binary: never negative
        counts += torch.bincount(digits, minlength=bins).to(counts.device)
    return counts


def _signed(prefix: int, bits: int, shift: int) -> int:
    """The value of `key >> shift` that the offset-binary `prefix` stands for."""
    return prefix - (1 << (bits - 1 - shift))


def _locate(counts: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the highest digit at which the count from the top reaches `need`, and the count above it."""
    from_top = counts.flip(1).cumsum(1)
    reached = (from_top >= need.clamp(min=1)[:, None]).to(torch.int8)
    place = reached.argmax(1)
    digit = counts.shape[1] - 1 - place
    above = from_top.gather(1, place[:, None])[:, 0] - counts.gather(1, digit[:, None])[:, 0]
    return digit, above


def _survivors(source: KeyRows, row: int, prefix: int, low: int, live: Tensor | None, count: int) -> Tensor | None:
    """The keys that still match, gathered once they are few enough to hold (an eighth of the row)."""
    if low == 0 or source.width == 0 or (live is None and count > source.width // 8):
        return live
    want = _signed(prefix, source.bits, low)
    return torch.cat([keys[(keys >> low) == want] for keys in _chunks(source, row, live)])


def mark_first(out: Tensor, ties: Callable[[int, int], Tensor], need: int) -> None:
    """Set the first `need` True slots of a row's `ties(start, stop)` in the bool row `out`, chunk by chunk."""
    for start in range(0, out.numel(), CHUNK):
        if need <= 0:
            return
        stop = min(start + CHUNK, out.numel())
        places = ties(start, stop).nonzero()[:need, 0]
        out[start:stop][places] = True
        need -= places.numel()
