"""Which kernels select for one update, with which sizes, and their launches in order, one tensor after the other.

Nothing waits for the device: sizes come from shapes, budgets are read by the kernels.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction, cdiv, next_power_of_2

from . import long_rows
from .long_rows import histogram_kernel, mark_kernel, tie_kernel
from .lowering import Nest, Operand, Selection
from .short_rows import fill_kernel, fused_kernel, score_kernel

INTERPRETED = not isinstance(fused_kernel, JITFunction)  # TRITON_INTERPRET=1: kernels run on CPU tensors, slowly

# Sizes at which another kernel is chosen, and how much a program takes; tests make them small.
FUSED = 1 << 14  # elements of the largest scope that one program takes, padded to powers of two
WHOLE = 1 << 10  # elements of the largest block of such a scope
TILE = 1 << 12  # elements that a program holds at a time; a power of two
CHUNK = 1 << 9  # elements of a block that are read at a time; a power of two
PROGRAMS = 1 << 11  # programs of a launch over long rows
APART = 16  # most blocks of a scope whose slots are read as one vector each
UNROLLED = 8  # rows of a block that are read in one trip of a loop
SECTOR = 32  # bytes that one memory transaction reads
REGISTERS = 128  # of a thread, so that an SM holds 16 warps; without a limit the assembler uses fewer, and spills


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a kernel is specialised on when it is compiled."""

    norm: str  # this and the next two are those of `Selection`
    within_mask: bool
    masked: bool
    signed: bool  # whether scores have signs
    bits: int  # of a key
    big: bool  # whether offsets have 64 bits
    tile: int  # scopes, blocks or slots that a program holds at a time
    single: bool = True  # whether a block is one element of one tensor, so that its score is |x| as it is
    width: int = 1  # blocks of a scope that a program takes whole
    padded: int = 1  # the power of two above
    elements: int = 1  # of a block
    chunk: int = 1  # how many of these are read at a time, a power of two
    outer: int = 1  # trips of the loops around the innermost one over the elements of a block
    inner: int = 1  # trips of that one
    contiguous: bool = False  # whether a tile is contiguous in values and mask alike
    apart: bool = False  # whether scopes are neighbours in memory, so that each of their slots is read as one vector
    row_warps: int = 8  # warps of a program that reads all of a long row; more where offsets take many registers too

    @property
    def digits(self) -> int:
        """Radix passes over a key."""
        return cdiv(self.bits, long_rows.DIGIT.value)

    @property
    def unrolled(self) -> int:
        """Rows of a block that are read in one trip of a loop."""
        return min(self.outer, UNROLLED)


class Spans(NamedTuple):
    """How rows are cut: spans of one in a tensor, their tiles, the number of the first, spans of all tensors, slots."""

    per_row: int
    length: int
    first: int
    row_spans: int
    width: int


def launch(selection: Selection) -> None:
    """Fill the masks of a selection that kernels do not refuse."""
    parts = [part for coupled in selection.parts for part in coupled]
    if any(part.values.numel() == 0 for part in parts):
        return
    device = parts[0].values.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if len(parts) == 1 and _fits_program(parts[0], selection):
            _select_whole(parts[0], selection)
        elif _are_single(selection) and not _fits_program(sum(part.block.trips for part in parts), selection):
            _select_long(parts, selection)
        else:
            _select_stored(selection)
    for part in parts:
        if not part.mask.is_inference():  # autograd cannot see kernels write: a backward that saved the mask must raise
            torch.autograd.graph.increment_version(part.mask)


def _fits_program(scope: Operand | int, selection: Selection) -> bool:
    """Return whether a program takes scopes of this tensor whole, or rows of this many scores."""
    most = FUSED // 2 if selection.masked or selection.within_mask else FUSED  # a mask that is read takes registers too
    width, elements = (scope, 1) if isinstance(scope, int) else (scope.block.trips, scope.element.trips)
    chunk = next_power_of_2(elements)
    return chunk <= WHOLE and next_power_of_2(width) * chunk <= most


def _are_single(selection: Selection) -> bool:
    """Whether blocks are single elements of one dtype, whose keys can be read from the tensors themselves."""
    parts = [part for part, *coupled in selection.parts if not coupled and part.element.trips == 1]
    return len(parts) == len(selection.parts) and len({part.values.dtype for part in parts}) == 1


def _select_whole(part: Operand, selection: Selection) -> None:
    """Score, select and fill in one kernel."""
    if _kind(selection.keep) != "each":  # budgets go by the index of a scope
        part = part.in_memory_order()
    width, elements = part.block.trips, part.element.trips
    padded, chunk = next_power_of_2(width), next_power_of_2(elements)
    contiguous = width == padded and elements == chunk and part.is_contiguous
    apart = elements == 1 and padded <= APART and part.scope.values[0] == part.scope.mask[0] == 1
    form = Form(
        **_scoring(part, selection, single=elements == 1),
        tile=max(1, TILE // (padded * chunk)),
        width=width,
        padded=padded,
        elements=elements,
        chunk=chunk,
        contiguous=contiguous,
        apart=apart and not contiguous,
    )
    taken = form.tile * padded * chunk
    of_warp = (1024 if contiguous or apart else 512 if elements == chunk else 256) // (2 if form.masked else 1)
    options = {"KEEP": _kind(selection.keep), "FORM": form, "num_warps": _warps(taken, of_warp)}
    if options["num_warps"] == 16 and taken < FUSED:  # else the assembler stops at 64 registers; others spill with it
        options["maxnreg"] = REGISTERS
    fused_kernel[(cdiv(part.scope.trips, form.tile),)](part, part.scope.trips, selection.keep, **options)


def _select_stored(selection: Selection) -> None:
    """Score blocks into rows, select among these, and fill the masks of the blocks."""
    first, widths = selection.parts[0][0], [coupled[0].block.trips for coupled in selection.parts]
    rows, row, device = first.scope.trips, sum(widths), first.values.device
    scores = torch.empty(rows, row, dtype=torch.float32, device=device)
    kept = torch.empty(rows, row, dtype=torch.uint8, device=device)
    columns = list(zip(selection.parts, widths, scores.split(widths, 1), kept.split(widths, 1), strict=True))
    for coupled, width, own_scores, own_kept in columns:
        for at, part in enumerate(coupled):
            single = len(coupled) == 1 and part.element.trips == 1
            form = _block_form(part, selection, part.values.element_size(), single)
            ends = {"FIRST": at == 0, "LAST": at == len(coupled) - 1}
            arguments = (part, rows * width, width, own_scores, own_kept, row)
            score_kernel[(cdiv(rows * width, form.tile),)](*arguments, **ends, **_block_options(form))
    element = Nest((1,), (0,), (0,))
    stored = Operand(scores, kept, Nest((rows,), (row,), (row,)), Nest((row,), (1,), (1,)), element)
    among_stored = replace(selection, parts=((stored,),), masked=False)
    if _fits_program(row, among_stored):
        _select_whole(stored, among_stored)
    else:
        _select_long([stored], among_stored)
    for coupled, width, _, own_kept in columns:
        for part in coupled:
            form = _block_form(part, selection, part.mask.element_size())
            grid = (cdiv(rows * width, form.tile),)
            fill_kernel[grid](part, rows * width, width, own_kept, row, **_block_options(form))


def _block_form(part: Operand, selection: Selection, size: int, single: bool = False) -> Form:
    """What kernels over blocks are specialised on; `size` is the bytes of an element that they read or write."""
    inner = part.element.sizes[0]
    chunk = min(next_power_of_2(inner), CHUNK)
    # Where neighbours in memory are other blocks, not other elements, a tile takes enough blocks to use whole sectors.
    across = part.block.values[0] == 1 and part.element.values[0] != 1
    # Of a row of blocks of several rows a thread reads 16 bytes at a time.
    tile_elements = TILE // 2 // size if part.element.trips > inner else TILE
    return Form(
        **_scoring(part, selection, single=single),
        tile=max(tile_elements // chunk, SECTOR // size if across else 1),
        elements=part.element.trips,
        chunk=chunk,
        outer=part.element.trips // inner,
        inner=inner,
    )


def _block_options(form: Form) -> dict[str, Any]:
    """Form, warps and registers of kernels over blocks."""
    return {"FORM": form, "num_warps": _warps(form.tile * form.chunk, 512), "maxnreg": REGISTERS}


def _select_long(parts: Sequence[Operand], selection: Selection) -> None:
    """Select in rows that no program takes whole, each of them over all parts."""
    rows, widths, keep = parts[0].scope.trips, [part.block.trips for part in parts], selection.keep
    length = min(cdiv(rows * sum(widths), TILE * PROGRAMS), cdiv(max(widths), TILE))  # tiles of a span
    ends = list(accumulate(cdiv(n, TILE * length) for n in widths))
    forms = [_row_form(part, selection) for part in parts]
    launches = [
        (part, Spans(per_row=end - begin, length=length, first=begin, row_spans=ends[-1], width=n), form)
        for part, begin, end, n, form in zip(parts, [0, *ends], ends, widths, forms, strict=False)
    ]
    device = parts[0].values.device
    counts = torch.zeros(rows, forms[0].digits, long_rows.BINS.value, dtype=torch.int64, device=device)
    ties = torch.empty(rows * ends[-1], dtype=torch.int32, device=device)
    budget, options = {"KEEP": _kind(keep)}, {"num_warps": 8, "maxnreg": REGISTERS}
    for at in range(forms[0].digits):
        for part, spans, form in launches:
            grid = (rows * spans.per_row,)
            histogram_kernel[grid](part, spans, counts, keep, **budget, PASS=at, FORM=form, **options)
    for part, spans, form in launches:
        tie_kernel[(rows * spans.per_row,)](part, spans, ties, counts, keep, **budget, FORM=form, **options)
    for part, spans, form in launches:
        grid, row_options = (rows * spans.per_row,), options | {"num_warps": form.row_warps}
        mark_kernel[grid](part, spans, ties, counts, keep, **budget, FORM=form, **row_options)


def _row_form(part: Operand, selection: Selection) -> Form:
    """What kernels over long rows are specialised on."""
    scoring, values = _scoring(part, selection, single=True), part.values
    is_run = len(part.block.sizes) == 1 and part.block.values[0] == part.block.mask[0] == 1
    is_aligned = all(step % 16 == 0 for step in (values.data_ptr(), part.mask.data_ptr(), *part.scope.values))
    is_plain = is_run and is_aligned and not scoring["big"] and not selection.masked
    return Form(**scoring, tile=TILE, row_warps=8 if is_plain else 16)


def _scoring(part: Operand, selection: Selection, *, single: bool) -> dict[str, Any]:
    """What all forms hold: how blocks are scored, and whether offsets take 64 bits."""
    signed = selection.norm == "sum"
    size = 16 if single and part.values.dtype != torch.float32 else 32
    return {
        "norm": "1" if single and not signed else selection.norm,
        "within_mask": selection.within_mask,
        "masked": selection.masked or selection.within_mask,
        "signed": signed,
        "bits": size if signed else size - 1,
        "big": part.is_big,
        "single": single,
    }


def _kind(keep: int | Tensor) -> str:
    """What kernels are given as the budget: a number, or a tensor with one for all or for each scope."""
    return "number" if not isinstance(keep, Tensor) else "one" if keep.numel() == 1 else "each"


def _warps(elements: int, of_warp: int) -> int:
    """Return the number of warps of a program that holds this many elements, `of_warp` in each warp."""
    return min(16, max(4, elements // of_warp))
