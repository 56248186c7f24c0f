"""Which kernels an update takes, which updates share a launch, and the tables that a launch reads.

By the size of a scope: one kernel for everything; or scores stored, then selected one row per program; or a radix
select over rows of any length. Parts of the same form (dtype, loops, norm, ...) share a launch, however many tensors
they are. A table is a list of integers, with the columns of `device`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..strides import Shape
from ..work import Update
from .device import LOOPS, MEMBER_FIELDS, PART_FIELDS
from .forms import Form, Limits, block_form, fused_form, is_fused, is_per_scope, norm_name, row_form
from .parts import Part, power_of_two, starts_of, strided_part, to_part

NO_ADDRESSES = ((0, 0),)  # stored rows are not addressed by the table
PART_COUNTS = (1, 16, 512)  # parts of a launch are padded to one of these, since each count compiles kernels of its own
MOST_PARTS = PART_COUNTS[-1]  # of a launch: each of its programs reads where all of them start, 4 KiB at most
MOST_TILES = 1023  # of a span: the narrowing pass counts a span's keys in ten bits
NEVER = (1 << 63) - 1  # first program of a part that does not exist


@dataclass(kw_only=True, eq=False)
class PlacedPart:
    """A part, and where its scopes are among those of all updates.

    Attributes:
        part: sizes and strides.
        starts: addresses of values and mask of each member.
        update: index of its update.
        width: slots of a row, over all parts of the update.
        column: its first slot in a row.
        offset: the update's first slot among stored scores.
        keep: address of the budgets, and the step from one scope's budget to the next.
        state: the update's first row in the state of the radix select.
        spans, span, row_spans, span_origin: its spans in a row, the first of them in the row, those of the whole row,
            and the update's first.
        samples, sample, row_samples: likewise for samples.
        buffer: the first of its spans' buffers for gathered keys, where its mask does not hold them.
    """

    part: Part
    starts: tuple[Shape, ...]
    update: int
    width: int
    column: int
    offset: int = 0
    keep: tuple[int, int] = (0, 0)
    state: int = 0
    spans: int = 0
    span: int = 0
    row_spans: int = 0
    span_origin: int = 0
    samples: int = 0
    sample: int = 0
    row_samples: int = 0
    buffer: int = 0

    def row(self) -> list[int]:
        """Its row of the table of parts."""
        own = self.part
        row = [own.rows, own.width, *self.keep, self.state, self.offset, self.width, self.column]
        row += [self.spans, self.span, self.row_spans, self.span_origin, self.samples, self.sample, self.row_samples]
        row += [self.buffer, *_padded(own.scope_sizes), *_padded(own.block_sizes)]
        assert len(row) == PART_FIELDS.value
        return row

    def member_rows(self) -> list[int]:
        """Its rows of the table of members."""
        return [n for start, fields in zip(self.starts, _member_fields(self.part), strict=True) for n in start + fields]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parts of one launch.

    Attributes:
        form: what the kernels are specialised on.
        parts: the parts.
        unit: what a program takes: "scopes" (form.tile of them), "slots" (likewise) or a "span" of a row.
        length: tiles of a span.
    """

    form: Form
    parts: tuple[PlacedPart, ...]
    unit: str
    length: int = 0

    def programs(self, placed: PlacedPart) -> int:
        """Programs for one of the parts."""
        if self.unit == "span":
            return placed.part.rows * placed.spans
        return -(-placed.part.rows * (placed.part.width if self.unit == "slots" else 1) // self.form.tile)

    @property
    def table_sizes(self) -> tuple[int, int, int, int]:
        """Integers of each of its tables."""
        count, members = len(self.parts), sum(len(p.starts) for p in self.parts)
        starts = padded_count(count)
        return starts, starts, count * PART_FIELDS.value, members * MEMBER_FIELDS.value

    def tables(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """First program of each part (one program per row in the second list), part rows and member rows."""
        return (
            first_programs([self.programs(p) for p in self.parts]),
            first_programs([p.part.rows for p in self.parts]),
            [n for p in self.parts for n in p.row()],
            [n for p in self.parts for n in p.member_rows()],
        )


@dataclass(frozen=True, kw_only=True)
class RadixPlan:
    """Long rows that share passes and a workspace: `batches` of one launch each in every pass.

    `rows` and `spans` are of all of them together, `buffers` are those for the keys that a span gathers, where its mask
    does not hold them, `samples` is the capacity for the samples of a row, a power of two, and `wide_counts` tells
    whether a count of keys may exceed 31 bits.
    """

    batches: tuple[Batch, ...]
    rows: int
    spans: int
    buffers: int
    samples: int
    wide_counts: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All launches of a list of updates.

    Attributes:
        fused: scopes that a program takes whole.
        scored: blocks whose scores are stored (and whose masks are filled afterwards).
        rows: stored rows that a program takes whole.
        radix: long rows, of weights or of stored scores.
        slots: stored scores in total.
    """

    fused: tuple[Batch, ...] = ()
    scored: tuple[Batch, ...] = ()
    rows: tuple[Batch, ...] = ()
    radix: tuple[RadixPlan, ...] = ()
    slots: int = 0


Parts = list[tuple[Form, PlacedPart]]


def make_plan(updates: Sequence[Update], limits: Limits) -> Plan:
    """Sort the updates' parts into batches; updates without elements are left out."""
    fused: Parts = []
    scored: Parts = []
    rows: Parts = []
    long: list[Parts] = []
    slots = 0
    for at, update in enumerate(updates):
        parts, among_kept, norm = _placed_parts(update, at, limits), update.among_kept, norm_name(update)
        masked, signed = update.masked and not among_kept, update.norm is None
        more = {"masked": masked, "signed": signed}
        per_scope, first = is_per_scope(update.keep), parts[0]
        if first.width * first.part.rows * first.part.elements == 0:
            continue
        if len(parts) == 1 and is_fused(first.part, update.scores_masked, limits):
            part = first.part if per_scope else first.part.in_memory_order  # budgets go by the index of a scope
            fused.append((fused_form(part, norm, among_kept, per_scope, limits, **more), replace(first, part=part)))
        elif _is_long(parts, limits) or signed:  # stored scores are magnitudes
            long.append([(row_form(p.part, among_kept, limits, **more), p) for p in parts])
        else:
            count = first.part.rows
            scored += [
                (block_form(p.part, norm, among_kept, limits, masked=masked), replace(p, offset=slots)) for p in parts
            ]
            part = strided_part(count, first.width, (first.width, 1), dtype=torch.float32, big=limits.big)
            stored = PlacedPart(part=part, starts=NO_ADDRESSES, update=at, width=first.width, column=0, offset=slots)
            _add_stored(stored, per_scope, among_kept, limits, rows, long, False)
            slots += -(-first.width * count // 16) * 16  # so that rows of the next update are aligned
    return Plan(
        fused=_batched(fused, "scopes"),
        scored=_batched(scored, "slots"),
        rows=_batched(rows, "scopes"),
        radix=_radix_plans(long, limits),
        slots=slots,
    )


def rows_plan(part: Part, keep: int | Tensor, among_kept: bool, signed: bool, limits: Limits) -> Plan:
    """How rows of given scores are selected."""
    placed = PlacedPart(part=part, starts=NO_ADDRESSES, update=0, width=part.width, column=0)
    rows: Parts = []
    long: list[Parts] = []
    _add_stored(placed, is_per_scope(keep), among_kept, limits, rows, long, signed)
    return Plan(rows=_batched(rows, "scopes"), radix=_radix_plans(long, limits))


def score_plan(
    update: Update, limits: Limits, *, contiguous: bool = True, per_scope: bool = False, held: int = 0
) -> Plan:
    """How the blocks of an update's only `Scopes` are scored, or thresholded; see `block_form`."""
    (scopes,) = update.scopes
    part = to_part(scopes, big=limits.big)
    form = block_form(
        part, norm_name(update), update.among_kept, limits, contiguous=contiguous, per_scope=per_scope, held=held
    )
    placed = PlacedPart(part=part, starts=starts_of(scopes), update=0, width=part.width, column=0)
    return Plan(scored=_batched([(form, placed)], "slots"), slots=part.rows * part.width)


def first_programs(programs: Sequence[int]) -> list[int]:
    """The first program of each part, padded to one of `PART_COUNTS`.

    >>> first_programs([2, 3, 1])[:3]
    [0, 2, 5]
    """
    firsts = list(accumulate(programs, initial=0))[:-1]
    return firsts + [NEVER] * (padded_count(len(programs)) - len(programs))


def padded_count(parts: int) -> int:
    """The smallest of `PART_COUNTS` that is not below the number of parts.

    >>> [padded_count(n) for n in (1, 2, 16, 17)]
    [1, 16, 16, 512]
    """
    return next(n for n in PART_COUNTS if n >= parts)


def _placed_parts(update: Update, at: int, limits: Limits) -> list[PlacedPart]:
    """An update's parts, and the column of each in a row."""
    parts = [(to_part(s, big=limits.big), s) for s in update.scopes]
    parts = [(p, s) for p, s in parts if p.width] or parts[:1]  # a part without blocks gets no program and no sample
    width = sum(p.width for p, _ in parts)
    columns = accumulate((p.width for p, _ in parts[:-1]), initial=0)
    return [
        PlacedPart(part=p, starts=starts_of(s), update=at, width=width, column=c)
        for (p, s), c in zip(parts, columns, strict=True)
    ]


def _is_long(parts: Sequence[PlacedPart], limits: Limits) -> bool:
    """Whether rows are long, and of single elements of one dtype, so that their scores need not be stored."""
    dtypes = {(p.part.dtype, p.part.mask_dtype) for p in parts}
    return parts[0].width > limits.fused and len(dtypes) == 1 and all(p.part.single for p in parts)


def _add_stored(
    placed: PlacedPart, per_scope: bool, among_kept: bool, limits: Limits, rows: Parts, long: list[Parts], signed: bool
) -> None:
    """Add stored rows to those that a program takes whole, or to the long ones."""
    part, more = placed.part, {"stored": True, "signed": signed}
    if is_fused(part, among_kept, limits):
        rows.append((fused_form(part, "2", among_kept, per_scope, limits, **more), placed))
    else:
        long.append([(row_form(part, among_kept, limits, **more), placed)])


def _batched(found: Parts, unit: str, length: int = 0) -> tuple[Batch, ...]:
    by_form: dict[Form, list[PlacedPart]] = {}
    for form, placed in found:
        by_form.setdefault(form, []).append(placed)
    return tuple(
        Batch(form=form, parts=tuple(parts[at : at + MOST_PARTS]), unit=unit, length=length)
        for form, parts in by_form.items()
        for at in range(0, len(parts), MOST_PARTS)
    )


def _radix_plans(rows: Sequence[Parts], limits: Limits) -> tuple[RadixPlan, ...]:
    """Long rows by what lets them share passes: number of digits, narrowed or not, stored or not."""
    by_kind: dict[tuple, list[Parts]] = {}
    for parts in rows:
        form, placed = parts[0]
        narrow = placed.part.rows * placed.width >= limits.narrow
        found = [(replace(f, narrow=narrow), p) for f, p in parts]
        by_kind.setdefault((-(-form.bits // 8), narrow, form.stored), []).append(found)
    return tuple(_radix_plan(found, limits) for found in by_kind.values())


def _radix_plan(rows: Sequence[Parts], limits: Limits) -> RadixPlan:
    """Assign spans, samples and state to the parts."""
    every = [formed for parts in rows for formed in parts]
    tiles = [-(-p.part.width // limits.tile) for _, p in every]
    total = sum(p.part.rows * n for n, (_, p) in zip(tiles, every, strict=True))
    length = min(max(1, -(-total // limits.programs)), MOST_TILES, max(tiles))  # tiles of a span
    state = origin = buffers = 0
    for parts in rows:
        span = sample = 0
        for form, placed in parts:
            placed.spans = -(-placed.part.width // (limits.tile * length))
            placed.span, span = span, span + placed.spans
            placed.buffer = buffers
            buffers += placed.part.rows * placed.spans if form.narrow and not form.gathers_in_mask else 0
            drawn = min(limits.samples, max(1, placed.width // 4))
            placed.samples = max(1, drawn * placed.part.width // placed.width)
            placed.sample, sample = sample, sample + placed.samples
        for _, placed in parts:
            placed.row_spans, placed.row_samples, placed.state, placed.span_origin = span, sample, state, origin
        state += parts[0][1].part.rows
        origin += span * parts[0][1].part.rows
    return RadixPlan(
        batches=_batched(every, "span", length),
        rows=state,
        spans=origin,
        buffers=buffers,
        samples=power_of_two(max(p.row_samples for _, p in every)),
        wide_counts=max(p.width for _, p in every) >= 1 << 31,
    )


@lru_cache(maxsize=4096)
def _member_fields(part: Part) -> tuple[Shape, ...]:
    """What follows the addresses in each member's row."""
    found = []
    for m in part.members:
        spare = part.nests[2] - len(m.elements.sizes)
        strides = [*m.scope, *m.block, *((0,) * spare + own for own in m.elements.strides)]
        nests = [*strides, (1,) * spare + m.elements.sizes]
        found.append((m.elements.count, *(n for nest in nests for n in _padded(nest))))
        assert len(found[-1]) == MEMBER_FIELDS.value - 2
    return tuple(found)


def _padded(nest: Shape) -> Shape:
    return nest + (0,) * (LOOPS.value - len(nest))
