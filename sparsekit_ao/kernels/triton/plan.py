"""Which kernels an update takes, and which updates share a launch.

Three ways, by the size of a scope: all in one kernel; scores stored, then selected a row at a time; a radix select
over rows of any length. Parts with the same traits (dtype, loops, norm, ...) go into one launch, however many tensors
they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..update import Update
from .parts import Part, power_of_two, strided_part, to_part
from .table import Place

__all__ = ["Batch", "Limits", "Plan", "key_bits", "make_plan", "rows_plan", "score_plan"]

MOST_TILES = 1023  # of a span: its counts are kept in ten bits
Traits = tuple[tuple[str, object], ...]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that decide between ways; tests make them small.

    Attributes:
        fused: elements of the largest scope that one program takes.
        tile: elements that a program holds at a time; a power of two, at least 2.
        narrow: shortest row for which a sample is drawn and the row narrowed.
        samples: keys sampled from such a row; a power of two.
        programs: programs that a long launch is cut into.
        big: count addresses in 64 bits whatever the size.
    """

    fused: int = 1 << 14
    tile: int = 1 << 12
    narrow: int = 1 << 18
    samples: int = 1 << 13
    programs: int = 1 << 11
    big: bool = False


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parts that one launch takes, with what the kernel is specialised on."""

    traits: Traits
    places: tuple[Place, ...]

    def programs(self, place: Place) -> int:
        """Programs that one of the parts takes."""
        tile = dict(self.traits).get("TILE")
        if not isinstance(tile, int):
            return place.part.rows * place.spans
        count = place.part.rows if "PADDED" in dict(self.traits) else place.part.rows * place.part.width
        return -(-count // tile)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Batches by way.

    Attributes:
        fused: scopes that a program takes whole.
        scored: blocks whose scores are stored (and whose masks are filled afterwards).
        rows: stored rows that a program takes whole.
        wide: long rows, of weights or of stored scores; batches that share a workspace stand together.
        slots: stored scores in all.
    """

    fused: tuple[Batch, ...]
    scored: tuple[Batch, ...]
    rows: tuple[Batch, ...]
    wide: tuple[tuple[Batch, ...], ...]
    slots: int


def make_plan(updates: Sequence[Update], limits: Limits) -> Plan:
    """Sort the updates' parts into batches; updates without elements are left out."""
    fused: list[tuple[Traits, Place]] = []
    scored: list[tuple[Traits, Place]] = []
    rows: list[tuple[Traits, Place]] = []
    wide: list[list[tuple[Traits, Place]]] = []
    slots = 0
    for at, update in enumerate(updates):
        parts = [to_part(g, big=limits.big) for g in update.groups]
        width, count = sum(p.width for p in parts), parts[0].rows
        if width * count == 0 or parts[0].elements == 0:
            continue
        columns = [sum(p.width for p in parts[:k]) for k in range(len(parts))]
        places = [Place(part=p, update=at, width=width, column=c) for p, c in zip(parts, columns, strict=True)]
        if len(parts) == 1 and parts[0].volume <= limits.fused:
            fused.append((_fused_traits(parts[0], update, limits, stored=False), places[0]))
        elif (
            all(p.single for p in parts) and len({(p.dtype, p.mask_dtype) for p in parts}) == 1 and width > limits.fused
        ):
            wide.append([(_wide_traits(p.part, update.stage), p) for p in places])
        else:
            scored += [(_block_traits(p.part, update, limits), replace(p, offset=slots)) for p in places]
            stored = strided_part(count, width, (width, 1), dtype=torch.float32, big=limits.big)
            place = Place(part=stored, update=at, width=width, column=0, offset=slots)
            if width <= limits.fused:
                rows.append((_fused_traits(stored, replace(update, norm=2), limits, stored=True), place))
            else:
                wide.append([(_wide_traits(stored, update.stage, stored=True), place)])
            slots += -(-width * count // 16) * 16  # rows of the next update start aligned
    return Plan(
        fused=_batched(fused), scored=_batched(scored), rows=_batched(rows), wide=_families(wide, limits), slots=slots
    )


def rows_plan(part: Part, keep: int | Tensor, stage: bool, signed: bool, limits: Limits) -> Plan:
    """How rows of given scores are selected."""
    place = Place(part=part, update=0, width=part.width, column=0)
    rows: list[tuple[Traits, Place]] = []
    wide: list[list[tuple[Traits, Place]]] = []
    if part.width <= limits.fused:
        update = Update(groups=(), keep=keep, stage=stage)
        rows.append((_fused_traits(part, update, limits, stored=True, signed=signed), place))
    else:
        wide.append([(_wide_traits(part, stage, stored=True, signed=signed), place)])
    return Plan(fused=(), scored=(), rows=_batched(rows), wide=_families(wide, limits), slots=0)


def score_plan(update: Update, limits: Limits, *, flat: bool = True, held: int = 0) -> Plan:
    """How the blocks of one group are scored (or thresholded), and nothing else.

    Args:
        update: its group is looked at, and its norm.
        limits: sizes.
        flat: whether a tile may be read as one run of memory.
        held: blocks of at most so many elements must be read in one piece.
    """
    part = to_part(update.groups[0], big=limits.big)
    place = Place(part=part, update=0, width=part.width, column=0)
    scored = _batched([(_block_traits(part, update, limits, flat=flat, held=held), place)])
    return Plan(fused=(), scored=scored, rows=(), wide=(), slots=part.rows * part.width)


def _wide_traits(part: Part, stage: bool, *, stored: bool = False, signed: bool = False) -> Traits:
    """What the kernels for long rows are specialised on."""
    return _traits(
        part,
        stage,
        False,
        SIGNED=signed,
        STORED=stored,
        EVEN=part.width % 16 == 0,
        UNITS=part.units,
        NESTS=part.nests[:2],
        DTYPE=part.dtype,
    )


def _traits(part: Part, stage: bool, flat: bool, **more: object) -> Traits:
    shared = {"MASK_DTYPE": part.mask_dtype, "STAGE": stage, "ALIGNED": part.aligned(flat), "BIG": part.big}
    return tuple(sorted({**shared, **more}.items()))


def _fused_traits(part: Part, update: Update, limits: Limits, *, stored: bool, signed: bool = False) -> Traits:
    padded, elements = power_of_two(part.width), power_of_two(part.elements)
    chunk = min(elements, max(1, limits.tile // padded))
    flat = part.flat and part.width == padded and part.elements == chunk
    return _traits(
        part,
        update.stage,
        flat,
        MEMBERS=len(part.members),
        TILE=max(1, limits.tile // (padded * chunk)),
        WIDTH=part.width,
        PADDED=padded,
        CHUNK=chunk,
        NESTS=part.nests,
        INNER=part.inner,
        UNITS=part.units,
        DTYPE=part.dtype,
        NORM=_norm(update),
        SINGLE=part.single,
        SIGNED=signed,
        BITS=key_bits(part.dtype, signed) if part.single else 31,
        STORED=stored,
        FLAT=flat,
        LONG=part.elements > chunk,
        WHOLE=all(m.elements.count % chunk == 0 for m in part.members),
        EACH=isinstance(update.keep, Tensor) and update.keep.numel() > 1,
        EVEN=part.rows % 16 == 0,
    )


def _block_traits(part: Part, update: Update, limits: Limits, *, flat: bool = True, held: int = 0) -> Traits:
    elements = power_of_two(part.elements)
    # Where neighbours in memory are other blocks, not other elements, tiles are as wide as they are long.
    across = any(m.block[0][-1:] == (1,) and m.elements.strides[0][-1:] != (1,) for m in part.members)
    chunk = elements if elements <= held else min(elements, 64 if across else 1024, limits.tile)
    flat = flat and part.flat and part.elements == chunk
    return _traits(
        part,
        update.stage,
        flat,
        MEMBERS=len(part.members),
        TILE=max(1, limits.tile // chunk),
        CHUNK=chunk,
        NESTS=part.nests,
        INNER=part.inner,
        UNITS=part.units,
        DTYPE=part.dtype,
        NORM=_norm(update),
        SINGLE=part.single,
        FLAT=flat,
        LONG=part.elements > chunk,
        WHOLE=all(m.elements.count % chunk == 0 for m in part.members),
        EVEN=part.width % 16 == 0,
    )


def key_bits(dtype: torch.dtype, signed: bool) -> int:
    """Bits of a key as the kernels make it: one less for magnitudes, whose sign is gone."""
    return (32 if dtype == torch.float32 else 16) - (not signed)


def _norm(update: Update) -> str:
    return "inf" if update.norm == math.inf else str(update.norm).removesuffix(".0")


def _batched(found: Sequence[tuple[Traits, Place]]) -> tuple[Batch, ...]:
    by_traits: dict[Traits, list[Place]] = {}
    for traits, place in found:
        by_traits.setdefault(traits, []).append(place)
    return tuple(Batch(traits=traits, places=tuple(places)) for traits, places in by_traits.items())


def _families(rows: Sequence[list[tuple[Traits, Place]]], limits: Limits) -> tuple[tuple[Batch, ...], ...]:
    """Long rows that can share passes: as many bits, narrowed or not; with spans, samples and state laid out."""
    by_kind: dict[tuple, list[list[tuple[Traits, Place]]]] = {}
    for parts in rows:
        traits, place = dict(parts[0][0]), parts[0][1]
        bits = key_bits(traits["DTYPE"], bool(traits["SIGNED"]))  # type: ignore[arg-type]
        kind = (-(-bits // 8), place.width >= limits.narrow, traits["STORED"])
        by_kind.setdefault(kind, []).append(parts)
    return tuple(_laid_out(found, limits) for found in by_kind.values())


def _laid_out(rows: Sequence[list[tuple[Traits, Place]]], limits: Limits) -> tuple[Batch, ...]:
    tiles = sum(p.part.rows * -(-p.part.width // limits.tile) for parts in rows for _, p in parts)
    length = min(max(1, -(-tiles // limits.programs)), MOST_TILES)  # tiles of a span
    out, state, origin = [], 0, 0
    for parts in rows:
        span = sample = 0
        for traits, place in parts:
            place.spans = -(-place.part.width // (limits.tile * length))
            place.span, span = span, span + place.spans
            place.samples = max(1, min(limits.samples * place.part.width // place.width, place.part.width))
            place.sample, sample = sample, sample + place.samples
            out.append((tuple(sorted({**dict(traits), "SPAN_TILES": length}.items())), place))
        for _, place in parts:
            place.row_spans, place.row_samples, place.state, place.span_origin = span, sample, state, origin
        state += parts[0][1].part.rows
        origin += span * parts[0][1].part.rows
    return _batched(out)
