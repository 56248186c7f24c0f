"""Which kernels an update takes, and which updates share a launch.

Three ways, by the size of a scope: all in one kernel; scores stored, then selected a row at a time; a radix select
over rows of any length. Parts of the same form (dtype, loops, norm, ...) go into one launch, however many tensors
they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..work import Update
from .forms import Form
from .parts import Part, power_of_two, starts_of, strided_part, to_part
from .specialise import Limits, asks, block_form, fused_form, is_fused, wide_form
from .table import Place

__all__ = ["Batch", "Family", "Plan", "make_plan", "rows_plan", "score_plan"]

NOWHERE = ((0, 0),)  # stored rows have no address of their own
MOST_PARTS = 512  # of a launch: each of its programs reads where all of them start, 4 KiB then
MOST_TILES = 1023  # of a span: its counts are kept in ten bits


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
        places = _places(update, at, limits)
        if places[0].width * places[0].part.rows * places[0].part.elements == 0:
            continue
        if len(places) == 1 and is_fused(places[0].part, update, limits):
            fused.append(_fused(places[0], update, limits))
        elif _is_wide(places, limits):
            wide.append([(wide_form(p.part, update.among_kept, limits), p) for p in places])
        else:
            scored += [(block_form(p.part, *asks(update)[:2], limits), replace(p, offset=slots)) for p in places]
            width, count = places[0].width, places[0].part.rows
            part = strided_part(count, width, (width, 1), dtype=torch.float32, big=limits.big)
            place = Place(part=part, starts=NOWHERE, update=at, width=width, column=0, offset=slots)
            if is_fused(part, update, limits):
                rows.append((fused_form(part, "2", *asks(update)[1:], limits, stored=True), place))
            else:
                wide.append([(wide_form(part, update.among_kept, limits, stored=True), place)])
            slots += -(-width * count // 16) * 16  # rows of the next update start aligned
    return Plan(
        fused=_batched(fused, "scopes"),
        scored=_batched(scored, "slots"),
        rows=_batched(rows, "scopes"),
        wide=_families(wide, limits),
        slots=slots,
    )


def _places(update: Update, at: int, limits: Limits) -> list[Place]:
    """An update's parts, and where each stands in a row."""
    parts = [(to_part(g, big=limits.big), g) for g in update.scopes]
    parts = [(p, g) for p, g in parts if p.width] or parts[:1]  # a part without blocks gets no program and no sample
    width = sum(p.width for p, _ in parts)
    columns = accumulate((p.width for p, _ in parts[:-1]), initial=0)
    return [
        Place(part=p, starts=starts_of(g), update=at, width=width, column=c)
        for (p, g), c in zip(parts, columns, strict=True)
    ]


def _fused(place: Place, update: Update, limits: Limits) -> tuple[Form, Place]:
    """Scopes go as they lie in memory, unless they have numbers because each has a budget of its own."""
    norm, among_kept, each = asks(update)
    part = place.part if each else place.part.in_memory_order
    return fused_form(part, norm, among_kept, each, limits), replace(place, part=part)


def _is_wide(places: Sequence[Place], limits: Limits) -> bool:
    """Whether rows are long, and of single elements of one dtype, so that their scores need not be stored."""
    kinds = {(p.part.dtype, p.part.mask_dtype) for p in places}
    return places[0].width > limits.fused and len(kinds) == 1 and all(p.part.single for p in places)


def rows_plan(part: Part, keep: int | Tensor, among_kept: bool, signed: bool, limits: Limits) -> Plan:
    """How rows of given scores are selected."""
    place = Place(part=part, starts=NOWHERE, update=0, width=part.width, column=0)
    rows: Row = []
    wide: list[Row] = []
    update = Update(scopes=(), keep=keep, among_kept=among_kept)
    if is_fused(part, update, limits):
        rows.append((fused_form(part, *asks(update), limits, stored=True, signed=signed), place))
    else:
        wide.append([(wide_form(part, among_kept, limits, stored=True, signed=signed), place)])
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
    part = to_part(update.scopes[0], big=limits.big)
    place = Place(part=part, starts=starts_of(update.scopes[0]), update=0, width=part.width, column=0)
    scored = _batched([(block_form(part, *asks(update)[:2], limits, flat=flat, each=each, held=held), place)], "slots")
    return Plan(fused=(), scored=scored, rows=(), wide=(), slots=part.rows * part.width)


def _batched(found: Row, way: str, length: int = 0) -> tuple[Batch, ...]:
    by_form: dict[Form, list[Place]] = {}
    for form, place in found:
        by_form.setdefault(form, []).append(place)
    return tuple(
        Batch(form=form, places=tuple(places[at : at + MOST_PARTS]), way=way, length=length)
        for form, places in by_form.items()
        for at in range(0, len(places), MOST_PARTS)
    )


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
