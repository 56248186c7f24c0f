"""The radix select of long rows, launch by launch, and the memory that it works in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .narrow import bracket_kernel, narrow_kernel, sample_kernel
from .parts import power_of_two
from .passes import histogram_kernel, mark_kernel, tie_kernel
from .plan import Limits, key_bits
from .ready import Launch
from .wide import BINS, SPAN_FIELDS, STATE_FIELDS

__all__ = ["REGISTERS", "WARPS", "halved", "select_wide"]

WARPS = 8  # of kernels that hold keys of a tile, or of a sample, together with counts
REGISTERS = 128  # of a histogram at most; left to itself the assembler takes fewer and spills


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Workspace of one select: taken from the caching allocator at each step and given back after it.

    Attributes:
        state, counts, spans, inside, samples: see `wide`.
        bits: of a key.
        room: keys that a span can gather.
        narrow: whether rows are long enough to sample and narrow them.
    """

    state: Tensor
    counts: Tensor
    spans: Tensor
    inside: Tensor
    samples: Tensor
    bits: int
    room: int
    narrow: bool

    @property
    def passes(self) -> int:
        """Radix passes over a key."""
        return self.counts.shape[1]


def select_wide(family: Sequence[Launch], limits: Limits, scores: Tensor, kept: Tensor) -> None:
    """Sample, bracket and narrow where rows are long; then radix passes, ties and marks.

    Args:
        family: launches whose rows share the workspace, because an update may have parts in several.
        limits: sizes.
        scores, kept: stored scores and decisions, for batches that work on those.
    """
    work = _workspace(family, limits, scores.device)
    if work.narrow:
        _narrow(family, work, limits, scores, kept)
    shared = {"TILE": limits.tile, "ROOM": work.room, "COUNT": work.passes, "NARROW": work.narrow}
    memory = (scores, kept, work.state, work.spans, work.inside, work.counts)
    for at in range(work.passes):
        for launch in family:
            traits = halved({**launch.traits, **shared})
            histogram_kernel[(launch.programs,)](
                *launch.tables, *memory, PASS=at, **traits, num_warps=WARPS, maxnreg=REGISTERS
            )
    for launch in family:
        tie_kernel[(launch.programs,)](*launch.tables, *memory, **shared, **launch.traits, num_warps=WARPS)
    for launch in family:
        mark_kernel[(launch.programs,)](*launch.tables, *memory[:4], TILE=limits.tile, **launch.traits, num_warps=WARPS)


def halved(traits: dict[str, Any]) -> dict[str, Any]:
    """The same spans in tiles half as long: a histogram takes registers of its own."""
    return {**traits, "TILE": max(1, traits["TILE"] // 2), "SPAN_TILES": traits["SPAN_TILES"] * 2}


def _narrow(family: Sequence[Launch], work: _Work, limits: Limits, scores: Tensor, kept: Tensor) -> None:
    """Bracket each row's threshold from a sample, and gather the keys in between."""
    capacity = work.samples.shape[1]
    for launch in family:
        sample_kernel[(launch.rows,)](
            launch.row_starts,
            *launch.tables[1:],
            scores,
            kept,
            work.samples,
            TILE=min(1024, capacity),
            CAPACITY=capacity,
            **launch.traits_but("EVEN", "SPAN_TILES"),
        )
    for launch in family:
        bracket_kernel[(launch.rows,)](
            launch.row_starts,
            launch.parts,
            work.state,
            work.samples,
            PARTS=launch.traits["PARTS"],
            CAPACITY=capacity,
            BITS=work.bits,
            num_warps=WARPS,
        )
    memory = (scores, kept, work.state, work.spans, work.inside)
    for launch in family:
        narrow_kernel[(launch.programs,)](
            *launch.tables, *memory, TILE=limits.tile, ROOM=work.room, **launch.traits, num_warps=WARPS
        )


def _workspace(family: Sequence[Launch], limits: Limits, device: torch.device) -> _Work:
    places = [p for launch in family for p in launch.batch.places]
    traits = family[0].traits
    bits, narrow = key_bits(places[0].part.dtype, traits["SIGNED"]), places[0].width >= limits.narrow
    rows = max(p.state + p.part.rows for p in places)
    spans = max(p.span_origin + p.part.rows * p.row_spans for p in places)
    room = max(1, traits["SPAN_TILES"] * limits.tile // 8) if narrow else 1
    samples = power_of_two(max(p.row_samples for p in places)) if narrow else 1
    wide_counts = max(p.width for p in places) >= 1 << 31
    shape, kind = (rows, -(-bits // 8), BINS.value), torch.int64 if wide_counts else torch.int32
    return _Work(
        state=torch.zeros(rows, STATE_FIELDS.value, dtype=torch.int64, device=device),
        counts=torch.zeros(shape, dtype=kind, device=device),
        spans=torch.empty(spans, SPAN_FIELDS.value, dtype=torch.int32, device=device),
        inside=torch.empty(spans * room if narrow else 1, dtype=torch.uint32, device=device),
        samples=torch.empty(rows if narrow else 1, samples, dtype=torch.uint32, device=device),
        bits=bits,
        room=room,
        narrow=narrow,
    )
