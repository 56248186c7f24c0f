"""Which kernels an update takes, and which updates share a launch.

Three ways, by the size of a scope: all in one kernel; scores stored, then selected a row at a time; a radix select
over rows of any length. Parts of the same form (dtype, loops, norm, ...) go into one launch, however many tensors
they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..update import Update
from .forms import TYPES, Form
from .parts import Part, power_of_two, starts_of, strided_part, to_part
from .table import Place

__all__ = ["Batch", "Limits", "Plan", "key_bits", "make_plan", "rows_plan", "score_plan"]

SECTOR = 32  # bytes of memory that are read together
NOWHERE = ((0, 0),)  # stored rows have no address of their own
MOST_TILES = 1023  # of a span: its counts are kept in ten bits


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that decide between ways; tests make them small.

    Attributes:
        fused: elements of the largest scope that one program takes, padded to powers of two.
        tile: elements that a program holds at a time; a power of two, for long rows at least 16.
        block: elements of a block that are added up at a time; a power of two. Sums depend on it.
        held: elements of the largest block that one program takes whole.
        narrow: fewest slots of rows, together, for which samples are drawn and the rows narrowed.
        samples: keys sampled from such a row at most, and a quarter of it at most; a power of two.
        programs: programs that a long launch is cut into.
        big: count addresses in 64 bits whatever the size.
    """

    fused: int = 1 << 14
    tile: int = 1 << 12
    block: int = 1 << 9
    held: int = 1 << 10
    narrow: int = 1 << 18
    samples: int = 1 << 13
    programs: int = 1 << 11
    big: bool = False


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parts that one launch takes.

    Attributes:
        form: what the kernels are specialised on.
        places: the parts.
        way: what a program takes: "scopes" (form.tile of them), "slots" (likewise) or a "span" of a row.
        length: tiles of a span.
    """

    form: Form
    places: tuple[Place, ...]
    way: str
    length: int = 0

    def programs(self, place: Place) -> int:
        """Programs that one of the parts takes."""
        if self.way == "span":
            return place.part.rows * place.spans
        return -(-place.part.rows * (place.part.width if self.way == "slots" else 1) // self.form.tile)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Long rows that share passes and a workspace.

    Attributes:
        batches: one launch each, in every pass.
        rows, spans: of all of them together.
        samples: places for the samples of a row, a power of two.
        deep: whether a digit may be met 2^31 times.
    """

    batches: tuple[Batch, ...]
    rows: int
    spans: int
    samples: int
    deep: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Batches by way.

    Attributes:
        fused: scopes that a program takes whole.
        scored: blocks whose scores are stored (and whose masks are filled afterwards).
        rows: stored rows that a program takes whole.
        wide: long rows, of weights or of stored scores.
        slots: stored scores in all.
    """

    fused: tuple[Batch, ...]
    scored: tuple[Batch, ...]
    rows: tuple[Batch, ...]
    wide: tuple[Family, ...]
    slots: int


Row = list[tuple[Form, Place]]  # the parts that compete for one budget


def make_plan(updates: Sequence[Update], limits: Limits) -> Plan:
    """Sort the updates' parts into batches; updates without elements are left out."""
    fused: Row = []
    scored: Row = []
    rows: Row = []
    wide: list[Row] = []
    slots = 0
    for at, update in enumerate(updates):
        parts = [to_part(g, big=limits.big) for g in update.groups]
        width, count = sum(p.width for p in parts), parts[0].rows
        if width * count == 0 or parts[0].elements == 0:
            continue
        columns = [sum(p.width for p in parts[:k]) for k in range(len(parts))]
        places = [
            Place(part=p, starts=starts_of(g), update=at, width=width, column=c)
            for p, g, c in zip(parts, update.groups, columns, strict=True)
        ]
        if len(parts) == 1 and _is_fused(parts[0], update, limits):
            part = parts[0] if _has_each(update) else parts[0].in_memory_order
            fused.append((_fused_form(part, *_asks(update), limits), replace(places[0], part=part)))
        elif (
            all(p.single for p in parts) and len({(p.dtype, p.mask_dtype) for p in parts}) == 1 and width > limits.fused
        ):
            wide.append([(_wide_form(p.part, update.stage, limits), p) for p in places])
        else:
            scored += [(_block_form(p.part, *_asks(update)[:2], limits), replace(p, offset=slots)) for p in places]
            stored = strided_part(count, width, (width, 1), dtype=torch.float32, big=limits.big)
            place = Place(part=stored, starts=NOWHERE, update=at, width=width, column=0, offset=slots)
            if _is_fused(stored, update, limits):
                rows.append((_fused_form(stored, "2", *_asks(update)[1:], limits, stored=True), place))
            else:
                wide.append([(_wide_form(stored, update.stage, limits, stored=True), place)])
            slots += -(-width * count // 16) * 16  # rows of the next update start aligned
    return Plan(
        fused=_batched(fused, "scopes"),
        scored=_batched(scored, "slots"),
        rows=_batched(rows, "scopes"),
        wide=_families(wide, limits),
        slots=slots,
    )


def rows_plan(part: Part, keep: int | Tensor, stage: bool, signed: bool, limits: Limits) -> Plan:
    """How rows of given scores are selected."""
    place = Place(part=part, starts=NOWHERE, update=0, width=part.width, column=0)
    rows: Row = []
    wide: list[Row] = []
    update = Update(groups=(), keep=keep, stage=stage)
    if _is_fused(part, update, limits):
        rows.append((_fused_form(part, *_asks(update), limits, stored=True, signed=signed), place))
    else:
        wide.append([(_wide_form(part, stage, limits, stored=True, signed=signed), place)])
    return Plan(fused=(), scored=(), rows=_batched(rows, "scopes"), wide=_families(wide, limits), slots=0)


def score_plan(update: Update, limits: Limits, *, flat: bool = True, each: bool = False, held: int = 0) -> Plan:
    """How the blocks of one group are scored (or thresholded), and nothing else.

    Args:
        update: its group is looked at, and its norm.
        limits: sizes.
        flat: whether a tile may be read as one run of memory.
        each: whether every scope has a threshold of its own.
        held: blocks of at most so many elements are read in one piece.
    """
    part = to_part(update.groups[0], big=limits.big)
    place = Place(part=part, starts=starts_of(update.groups[0]), update=0, width=part.width, column=0)
    scored = _batched(
        [(_block_form(part, *_asks(update)[:2], limits, flat=flat, each=each, held=held), place)], "slots"
    )
    return Plan(fused=(), scored=scored, rows=(), wide=(), slots=part.rows * part.width)


@lru_cache(maxsize=4096)
def _wide_form(part: Part, stage: bool, limits: Limits, *, stored: bool = False, signed: bool = False) -> Form:
    """What the kernels for long rows are specialised on."""
    return _form(
        part,
        stage,
        False,
        tile=limits.tile,
        signed=signed,
        bits=key_bits(part.dtype, signed),
        stored=stored,
        even=part.width % 16 == 0,
    )


@lru_cache(maxsize=4096)
def _fused_form(
    part: Part, norm: str, stage: bool, each: bool, limits: Limits, *, stored: bool = False, signed: bool = False
) -> Form:
    padded, chunk = power_of_two(part.width), power_of_two(part.elements)
    return _form(
        part,
        stage,
        part.flat and part.width == padded and part.elements == chunk,
        members=len(part.members),
        inner=part.inner,
        tile=max(1, limits.tile // (padded * chunk)),
        width=part.width,
        padded=padded,
        chunk=chunk,
        norm=norm,
        single=part.single,
        signed=signed,
        bits=key_bits(part.dtype, signed) if part.single else 31,
        stored=stored,
        whole=all(m.elements.count == chunk for m in part.members),
        each=each,
        even=part.rows % 16 == 0,
    )


@lru_cache(maxsize=4096)
def _block_form(
    part: Part, norm: str, stage: bool, limits: Limits, *, flat: bool = True, each: bool = False, held: int = 0
) -> Form:
    elements = power_of_two(part.elements)
    chunk = elements if elements <= held else min(elements, limits.block)
    # Where neighbours in memory are other blocks, not other elements, a tile takes enough of them side by side.
    across = any(m.block[0][-1:] == (1,) and m.elements.strides[0][-1:] != (1,) for m in part.members)
    return _form(
        part,
        stage,
        flat and part.flat and part.elements == chunk,
        members=len(part.members),
        inner=part.inner,
        tile=max(limits.tile // chunk, SECTOR // part.dtype.itemsize if across else 1),
        chunk=chunk,
        norm=norm,
        single=part.single,
        long=part.elements > chunk,
        whole=all(m.elements.count % chunk == 0 for m in part.members),
        each=each,
        even=part.width % 16 == 0,
    )


def _form(part: Part, stage: bool, flat: bool, **more: Any) -> Form:
    return Form(
        dtype=TYPES[part.dtype],
        mask_dtype=TYPES[part.mask_dtype],
        nests=part.nests,
        units=part.units,
        aligned=part.aligned(flat),
        big=part.big,
        stage=stage,
        flat=flat,
        **more,
    )


def _is_fused(part: Part, update: Update, limits: Limits) -> bool:
    crowded = part.big and update.stage  # addresses take the registers of half the tile
    return part.padded <= limits.fused // (1 + crowded) and part.elements <= limits.held


def _has_each(update: Update) -> bool:
    return isinstance(update.keep, Tensor) and update.keep.numel() > 1


def key_bits(dtype: torch.dtype, signed: bool) -> int:
    """Bits of a key as the kernels make it: one less for magnitudes, whose sign is gone."""
    return (32 if dtype == torch.float32 else 16) - (not signed)


def _asks(update: Update) -> tuple[str, bool, bool]:
    """An update's norm, whether it is a later stage, whether scopes have budgets of their own."""
    norm = "inf" if update.norm == math.inf else str(update.norm).removesuffix(".0")
    return norm, update.stage, _has_each(update)


def _batched(found: Row, way: str, length: int = 0) -> tuple[Batch, ...]:
    by_form: dict[Form, list[Place]] = {}
    for form, place in found:
        by_form.setdefault(form, []).append(place)
    return tuple(Batch(form=f, places=tuple(places), way=way, length=length) for f, places in by_form.items())


def _families(rows: Sequence[Row], limits: Limits) -> tuple[Family, ...]:
    """Long rows that can share passes: as many bits, narrowed or not; with spans, samples and state laid out."""
    by_kind: dict[tuple, list[Row]] = {}
    for parts in rows:
        form, place = parts[0]
        narrow = place.part.rows * place.width >= limits.narrow
        found = [(replace(f, narrow=narrow), p) for f, p in parts]
        by_kind.setdefault((-(-form.bits // 8), narrow, form.stored), []).append(found)
    return tuple(_laid_out(found, limits) for found in by_kind.values())


def _laid_out(rows: Sequence[Row], limits: Limits) -> Family:
    tiles = [-(-p.part.width // limits.tile) for parts in rows for _, p in parts]
    whole = sum(p.part.rows * n for n, (_, p) in zip(tiles, (x for parts in rows for x in parts), strict=True))
    length = min(max(1, -(-whole // limits.programs)), MOST_TILES, max(tiles))  # tiles of a span
    state = origin = 0
    for parts in rows:
        span = sample = 0
        for _, place in parts:
            place.spans = -(-place.part.width // (limits.tile * length))
            place.span, span = span, span + place.spans
            drawn = min(limits.samples, max(1, place.width // 4))
            place.samples = max(1, drawn * place.part.width // place.width)
            place.sample, sample = sample, sample + place.samples
        for _, place in parts:
            place.row_spans, place.row_samples, place.state, place.span_origin = span, sample, state, origin
        state += parts[0][1].part.rows
        origin += span * parts[0][1].part.rows
    every = [x for parts in rows for x in parts]
    return Family(
        batches=_batched(every, "span", length),
        rows=state,
        spans=origin,
        samples=power_of_two(max(p.row_samples for _, p in every)),
        deep=max(p.width for _, p in every) >= 1 << 31,
    )
