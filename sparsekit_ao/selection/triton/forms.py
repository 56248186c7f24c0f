"""What a kernel is specialised on at compile time (`Form`), which form a part gets, and the options of a launch.

Launchers and the ahead-of-time tests both go through `run`, so that what is tested is what runs.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..work import Update
from .parts import Part, power_of_two

REGISTERS = 128  # of a thread, so that an SM holds 16 warps; without a limit the assembler uses fewer, and spills
APART = 16  # most blocks of a scope whose slots are read as one vector each
MOST_ROWS = 32  # of a block, for which code is unrolled
SECTOR = 32  # bytes that one memory transaction reads

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes at which another kernel is chosen; tests make them small.

    Attributes:
        fused: elements of the largest scope that one program takes, padded to powers of two.
        tile: elements that a program holds at a time; a power of two, for long rows at least 16.
        block: elements of a block that are added up at a time; a power of two. Sums depend on it.
        held: elements of the largest block that one program takes whole.
        narrow: fewest slots of rows, together, for which samples are drawn and the rows narrowed.
        samples: keys sampled from such a row at most, and a quarter of it at most; a power of two below 2^15.
        programs: programs of a long launch.
        workspace: bytes of scores, decisions and gathered keys that are held at once, unless a sixteenth of the number
            of elements is more.
        big: compute offsets in 64 bits whatever the size.
    """

    fused: int = 1 << 14
    tile: int = 1 << 12
    block: int = 1 << 9
    held: int = 1 << 10
    narrow: int = 1 << 18
    samples: int = 1 << 13
    programs: int = 1 << 11
    workspace: int = 1 << 25
    big: bool = False


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is known of a batch of parts when its kernels are compiled.

    Attributes:
        dtype, mask_dtype: of values and masks, as Triton names them.
        nests: number of loops over scope, block and element.
        unit_strides: whether innermost strides are 1: of scopes, blocks and elements, each of values, then of masks.
        alignment: power of two (16 at most) that divides addresses and strides; 0 if memory starts anywhere.
        big: offsets have 64 bits.
        members: block-coupled tensors.
        inner: the innermost element loop where all members share it, else 0.
        tile: scopes, slots or keys that a program holds at a time.
        width, padded: blocks of a scope that a program takes whole, and the power of two above.
        chunk: elements of a block that are read at a time, a power of two.
        block_rows: rows of a block that are scored one after the other; 1 where blocks are scored by chunks.
        sides: empty if all sides of a block are powers of two; else for each side its size, the power of two above, and
            its stride among tree positions and among elements.
        norm: "1", "2" or "inf".
        single: a block is one element of one tensor, so that its score is |x| as it is.
        signed, bits: scores have signs; bits of a key.
        among_kept: choose among what the mask still keeps.
        masked: score values under the mask, but choose among all.
        stored: rows of stored scores, not weights.
        contiguous: a tile is contiguous in values and mask alike.
        apart: scopes are neighbours in memory, so that a program reads each of their slots as one vector.
        chunked, whole_chunks: blocks take more than one chunk; block sizes are multiples of the chunk.
        per_scope: every scope has its own budget (or threshold).
        counts_16: counts are multiples of 16, so that accesses stay vectors.
        narrow: long rows are sampled and narrowed first.
    """

    dtype: Any
    mask_dtype: Any
    nests: tuple[int, ...]
    unit_strides: tuple[bool, ...]
    alignment: int
    big: bool
    members: int = 1
    inner: int = 0
    tile: int = 1
    width: int = 0
    padded: int = 1
    chunk: int = 1
    block_rows: int = 1
    sides: tuple[tuple[int, int, int, int], ...] = ()
    norm: str = "2"
    single: bool = False
    signed: bool = False
    bits: int = 31
    among_kept: bool = False
    masked: bool = False
    stored: bool = False
    contiguous: bool = False
    apart: bool = False
    chunked: bool = False
    whole_chunks: bool = False
    per_scope: bool = False
    counts_16: bool = False
    narrow: bool = False

    @property
    def gathers_in_mask(self) -> bool:
        """Whether a long row's mask, which is written last, holds the keys that are gathered until then.

        It is not read, of one byte an element, contiguous, and starts at a multiple of a key's four bytes.
        """
        is_free = self.narrow and not self.among_kept and not self.masked and tl.uint8 == self.mask_dtype
        return is_free and self.nests[1] == 1 and self.unit_strides[3] and self.alignment >= 4

    @property
    def row_warps(self) -> int:
        """Warps of a program that reads all of a long row; more where offsets take many registers too."""
        return 16 if self.big or self.among_kept or self.masked or not self.alignment or max(self.nests[1:]) > 1 else 8

    @property
    def vector(self) -> int:
        """Neighbouring slots of a long row that a thread reads at once."""
        return max(1, min(self.alignment, 128 // self.dtype.primitive_bitwidth)) if self.unit_strides[2] else 1

    @property
    def runs(self) -> int:
        """Runs of two tiles of a long row: the slots that one thread reads are a run."""
        return min(32 * self.row_warps, 2 * self.tile // self.vector)


@lru_cache(maxsize=4096)
def row_form(
    part: Part, among_kept: bool, limits: Limits, *, stored: bool = False, signed: bool = False, masked: bool = False
) -> Form:
    """What the kernels for long rows are specialised on."""
    more = {"signed": signed, "bits": key_bits(part.dtype, signed), "stored": stored, "masked": masked}
    return _form(part, among_kept, False, tile=limits.tile, counts_16=part.width % 16 == 0, **more)


@lru_cache(maxsize=4096)
def fused_form(
    part: Part,
    norm: str,
    among_kept: bool,
    per_scope: bool,
    limits: Limits,
    stored: bool = False,
    signed: bool = False,
    masked: bool = False,
) -> Form:
    """What the fused kernel is specialised on."""
    padded, (chunk, sides) = power_of_two(part.width), tree_of(part, limits)
    contiguous = part.contiguous and part.width == padded and part.elements == chunk
    return _form(
        part,
        among_kept,
        contiguous,
        apart=not contiguous and part.single and padded <= APART and all(part.unit_strides[:2]),
        tile=max(1, limits.tile // (padded * chunk)),
        width=part.width,
        padded=padded,
        chunk=chunk,
        sides=sides,
        norm=norm,
        signed=signed,
        bits=key_bits(part.dtype, signed) if part.single else 31,
        stored=stored,
        masked=masked,
        whole_chunks=all(m.elements.count == chunk for m in part.members),
        per_scope=per_scope,
        counts_16=part.rows % 16 == 0,
    )


@lru_cache(maxsize=4096)
def block_form(
    part: Part,
    norm: str,
    among_kept: bool,
    limits: Limits,
    contiguous: bool = True,
    per_scope: bool = False,
    held: int = 0,
    masked: bool = False,
) -> Form:
    """What kernels over blocks are specialised on: scores, masks, thresholds.

    `contiguous` permits contiguous tiles and scores by rows; blocks of at most `held` elements are read in one chunk.
    """
    elements, sides = tree_of(part, limits)
    chunk = elements if elements <= held else min(elements, limits.block)
    plain = contiguous and not among_kept and not masked  # masks would take the registers of the rows
    rows = rows_of_block(part, limits) if plain else 1
    tile = limits.tile // chunk
    if rows > 1:  # a thread reads 16 bytes of a row of blocks at a time
        tile = max(limits.tile // 2 // part.dtype.itemsize // part.inner, 1)
        chunk = min(elements, limits.tile // tile)
    # Where neighbours in memory are other blocks, not other elements, a tile takes enough blocks to use whole sectors.
    across = any(m.block[0][-1:] == (1,) and m.elements.strides[0][-1:] != (1,) for m in part.members)
    return _form(
        part,
        among_kept,
        contiguous and part.contiguous and part.elements == chunk,
        tile=max(tile, SECTOR // part.dtype.itemsize if across else 1),
        chunk=chunk,
        block_rows=rows,
        sides=sides,
        norm=norm,
        chunked=part.elements > chunk,
        masked=masked,
        whole_chunks=all(m.elements.count % chunk == 0 for m in part.members),
        per_scope=per_scope,
        counts_16=part.width % 16 == 0,
    )


def _form(part: Part, among_kept: bool, contiguous: bool, **more: Any) -> Form:
    return Form(
        dtype=TYPES[part.dtype],
        mask_dtype=TYPES[part.mask_dtype],
        nests=part.nests,
        unit_strides=part.unit_strides,
        alignment=part.alignment(contiguous),
        big=part.big,
        members=len(part.members),
        inner=part.inner,
        single=part.single,
        among_kept=among_kept,
        contiguous=contiguous,
        **more,
    )


def is_fused(part: Part, among_kept: bool, limits: Limits) -> bool:
    """Whether a program takes scopes of this part whole."""
    largest = limits.fused // (1 + (part.big and among_kept))  # 64-bit offsets take the registers of half the tile
    chunk, _ = tree_of(part, limits)
    return power_of_two(part.width) * chunk <= largest and chunk <= limits.held


def tree_of(part: Part, limits: Limits) -> tuple[int, tuple[tuple[int, int, int, int], ...]]:
    """Positions of a block's halving tree, a power of two; and `Form.sides`, empty where the tree has no gaps.

    Blocks of more than `limits.block` positions are padded at the end instead.
    """
    padded = [power_of_two(n) for n in part.block]
    if prod(padded) > limits.block or tuple(padded) == part.block:
        return power_of_two(part.elements), ()
    sides = ((side, padded[k], prod(padded[k + 1 :]), prod(part.block[k + 1 :])) for k, side in enumerate(part.block))
    return max(prod(padded), power_of_two(part.elements)), tuple(sides)


def rows_of_block(part: Part, limits: Limits) -> int:
    """Rows of a block, where they are few, read by 16 bytes, and its sum is that of the whole tree; else 1."""
    sides, (m, *others) = part.block, part.members
    is_plain = not others and len(sides) == len(m.elements.sizes) == 2 and all(part.unit_strides[4:])
    in_tree = is_plain and all(n == power_of_two(n) for n in sides) and prod(sides) <= 2 * limits.block
    if not in_tree or sides[0] > MOST_ROWS:
        return 1
    return sides[0] if min(part.alignment(False), sides[1]) * part.dtype.itemsize >= 16 else 1  # else registers spill


def key_bits(dtype: torch.dtype, signed: bool) -> int:
    """Bits of a key: one less for magnitudes, which have no sign."""
    return (32 if dtype == torch.float32 else 16) - (not signed)


def norm_name(update: Update) -> str:
    """An update's norm as `Form.norm`."""
    return "inf" if update.norm == math.inf else str(update.norm).removesuffix(".0")


def is_per_scope(keep: int | Tensor) -> bool:
    """Whether every scope has its own budget."""
    return isinstance(keep, Tensor) and keep.numel() > 1


def run(kernel: Any, programs: int, *arguments: Any, form: Form, columns: int = 1, **constants: Any) -> None:
    """Launch a kernel on `programs` times `columns` programs: its arguments in order, then form and constants."""
    options = options_of(kernel.__name__, form)
    kernel[(programs, columns)](
        *arguments, **({"FORM": form} if "FORM" in kernel.arg_names else {}), **constants, **options
    )


def options_of(kernel: str, form: Form) -> dict[str, Any]:
    """Warps of a program and registers of a thread.

    A thread holds 32 elements, 16 where offsets take many registers too. Products are never fused with sums, so
    that bits are the reference's.
    """
    warps = 8
    if kernel == "fused_kernel":
        spread = not (form.contiguous or form.apart)
        warps = _warps(form.tile * form.padded * form.chunk, 1024 if not spread else 512 if form.whole_chunks else 256)
    elif kernel in ("score_kernel", "fill_kernel", "threshold_kernel"):
        spread = form.big or form.members > 1 or kernel == "threshold_kernel"
        warps = _warps(form.tile * form.chunk, 1024 if not spread else 256 if form.big and form.members > 1 else 512)
    elif kernel == "condition_kernel":
        warps = _warps(form.tile * form.chunk, 256 if form.big else 512)
    elif kernel == "sample_kernel":
        warps = 4
    elif kernel in ("narrow_kernel", "mark_kernel"):
        warps = form.row_warps
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    return options if kernel == "fused_kernel" else options | {"maxnreg": REGISTERS}  # that one spills with a limit


def _warps(held: int, elements: int) -> int:
    """Warps of a program that holds so many elements, `elements` per warp."""
    return min(16, max(4, held // elements))
