"""What a kernel is specialised on, and how it is launched: the one table of warps and registers.

Launchers and the ahead-of-time tests both go through `run`, so that what is tested is what runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

__all__ = ["REGISTERS", "TYPES", "Form", "options_of", "run"]

REGISTERS = 128  # of a thread, so that an SM holds 16 warps; left to itself the assembler takes fewer, and spills

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8}


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is known of a batch of parts when its kernels are compiled.

    Attributes:
        dtype, mask_dtype: of values and masks, as Triton names them.
        nests: loops over scope, block and element.
        units: whether innermost strides are 1: of scopes, blocks and elements, of values and masks.
        aligned: power of two (16 at most) that divides addresses and strides; 0 if memory starts anywhere.
        big: addresses are counted in 64 bits.
        members: tensors whose blocks share one fate.
        inner: the innermost element loop where all members share it, else 0.
        tile: scopes, slots or keys that a program holds at a time.
        width, padded: blocks of a scope that a program takes whole, and the power of two above.
        chunk: elements of a block that are read at a time, a power of two.
        sides: sides of a block of which some is no power of two: each with the power of two above, and how far the next
            of it lies among positions and among elements; else nothing.
        norm: "1", "2" or "inf".
        single: a block is one element of one tensor, so that its score is |x| as it is.
        signed, bits: keys of either sign; bits of a key.
        stage: choose among what the mask still holds.
        stored: rows of stored scores, not weights.
        flat: a tile is one run of memory in values and mask alike.
        long, whole: blocks take more than one chunk; blocks are made of whole ones.
        each: every scope has a budget (or threshold) of its own.
        even: counts are multiples of 16, so that vectors stay whole.
        narrow: long rows are sampled and narrowed first.
    """

    dtype: Any
    mask_dtype: Any
    nests: tuple[int, ...]
    units: tuple[bool, ...]
    aligned: int
    big: bool
    members: int = 1
    inner: int = 0
    tile: int = 1
    width: int = 0
    padded: int = 1
    chunk: int = 1
    sides: tuple[tuple[int, int, int, int], ...] = ()
    norm: str = "2"
    single: bool = False
    signed: bool = False
    bits: int = 31
    among_kept: bool = False
    stored: bool = False
    flat: bool = False
    long: bool = False
    whole: bool = False
    each: bool = False
    even: bool = False
    narrow: bool = False


def run(kernel: Any, programs: int, *arguments: Any, form: Form, **constants: Any) -> None:
    """Launch a kernel on `programs` programs.

    Args:
        kernel: of this folder.
        programs: how many.
        arguments: in the kernel's order, up to its constants.
        form: what it is specialised on; decides on warps and registers too.
        constants: its further compile-time arguments.
    """
    options = options_of(kernel.__name__, form)
    kernel[(programs,)](*arguments, **({"FORM": form} if "FORM" in kernel.arg_names else {}), **constants, **options)


def options_of(kernel: str, form: Form) -> dict[str, Any]:
    """Warps of a program and registers of a thread.

    A thread holds 32 elements, 16 where addresses take many registers too. Products are never fused with sums, so
    that bits are the reference's.
    """
    crowded = form.big or form.among_kept or not form.aligned or max(form.nests[1:]) > 1
    options: dict[str, Any] = {"num_warps": 8, "maxnreg": REGISTERS, "enable_fp_fusion": False}
    if kernel == "fused_kernel":
        each = 1024 if form.flat else 512 if form.whole else 256
        options["num_warps"] = _warps(form.tile * form.padded * form.chunk, each)
        del options["maxnreg"]  # here it is the other way round
    elif kernel in ("score_kernel", "fill_kernel", "threshold_kernel"):
        spread = form.big or form.members > 1 or kernel == "threshold_kernel"
        each = 1024 if not spread else 256 if form.big and form.members > 1 else 512
        options["num_warps"] = _warps(form.tile * form.chunk, each)
    elif kernel == "condition_kernel":
        options["num_warps"] = _warps(form.tile * form.chunk, 256 if form.big else 512)
    elif kernel == "sample_kernel":
        options["num_warps"] = 4
    elif kernel in ("narrow_kernel", "mark_kernel"):
        options["num_warps"] = 16 if crowded else 8
    return options


def _warps(held: int, each: int) -> int:
    """Warps of a program that holds so many elements, `each` of them a warp."""
    return min(16, max(4, held // each))
