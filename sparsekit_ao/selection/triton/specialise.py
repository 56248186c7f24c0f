"""Which form the kernels take for a part: what can be known when they are compiled, and what sizes decide."""

import math
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..work import Update
from .forms import TYPES, Form
from .parts import Part, power_of_two

__all__ = ["Limits", "asks", "block_form", "fused_form", "is_fused", "key_bits", "wide_form"]

SECTOR = 32  # bytes of memory that are read together


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


@lru_cache(maxsize=4096)
def wide_form(part: Part, among_kept: bool, limits: Limits, *, stored: bool = False, signed: bool = False) -> Form:
    """What the kernels for long rows are specialised on."""
    return _form(
        part,
        among_kept,
        False,
        tile=limits.tile,
        signed=signed,
        bits=key_bits(part.dtype, signed),
        stored=stored,
        even=part.width % 16 == 0,
    )


@lru_cache(maxsize=4096)
def fused_form(
    part: Part, norm: str, among_kept: bool, each: bool, limits: Limits, *, stored: bool = False, signed: bool = False
) -> Form:
    """What the fused kernel is specialised on."""
    padded, (chunk, sides) = power_of_two(part.width), tree_of(part, limits)
    return _form(
        part,
        among_kept,
        part.flat and part.width == padded and part.elements == chunk,
        members=len(part.members),
        inner=part.inner,
        tile=max(1, limits.tile // (padded * chunk)),
        width=part.width,
        padded=padded,
        chunk=chunk,
        sides=sides,
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
def block_form(
    part: Part, norm: str, among_kept: bool, limits: Limits, *, flat: bool = True, each: bool = False, held: int = 0
) -> Form:
    """What kernels over slots are specialised on: scores, masks, thresholds."""
    elements, sides = tree_of(part, limits)
    chunk = elements if elements <= held else min(elements, limits.block)
    # Where neighbours in memory are other blocks, not other elements, a tile takes enough of them side by side.
    across = any(m.block[0][-1:] == (1,) and m.elements.strides[0][-1:] != (1,) for m in part.members)
    return _form(
        part,
        among_kept,
        flat and part.flat and part.elements == chunk,
        members=len(part.members),
        inner=part.inner,
        tile=max(limits.tile // chunk, SECTOR // part.dtype.itemsize if across else 1),
        chunk=chunk,
        sides=sides,
        norm=norm,
        single=part.single,
        long=part.elements > chunk,
        whole=all(m.elements.count % chunk == 0 for m in part.members),
        each=each,
        even=part.width % 16 == 0,
    )


def _form(part: Part, among_kept: bool, flat: bool, **more: Any) -> Form:
    return Form(
        dtype=TYPES[part.dtype],
        mask_dtype=TYPES[part.mask_dtype],
        nests=part.nests,
        units=part.units,
        aligned=part.aligned(flat),
        big=part.big,
        among_kept=among_kept,
        flat=flat,
        **more,
    )


def is_fused(part: Part, update: Update, limits: Limits) -> bool:
    """Whether a program takes scopes of this part whole."""
    crowded = part.big and update.among_kept  # addresses take the registers of half the tile
    chunk, _ = tree_of(part, limits)
    return power_of_two(part.width) * chunk <= limits.fused // (1 + crowded) and chunk <= limits.held


def tree_of(part: Part, limits: Limits) -> tuple[int, tuple[tuple[int, int, int, int], ...]]:
    """Positions of a block's halving tree, a power of two; and `Form.sides` where it has gaps that are followed."""
    padded = [power_of_two(n) for n in part.block]
    if prod(padded) > limits.block or tuple(padded) == part.block:
        return power_of_two(part.elements), ()
    sides = ((side, padded[k], prod(padded[k + 1 :]), prod(part.block[k + 1 :])) for k, side in enumerate(part.block))
    return max(prod(padded), power_of_two(part.elements)), tuple(sides)


def _has_each(update: Update) -> bool:
    return isinstance(update.keep, Tensor) and update.keep.numel() > 1


def key_bits(dtype: torch.dtype, signed: bool) -> int:
    """Bits of a key as the kernels make it: one less for magnitudes, whose sign is gone."""
    return (32 if dtype == torch.float32 else 16) - (not signed)


def asks(update: Update) -> tuple[str, bool, bool]:
    """An update's norm, whether it is a later stage, whether scopes have budgets of their own."""
    norm = "inf" if update.norm == math.inf else str(update.norm).removesuffix(".0")
    return norm, update.among_kept, _has_each(update)
