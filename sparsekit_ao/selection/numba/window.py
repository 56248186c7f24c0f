"""What the loops are handed: one window, lowered to three nests of integers over flat numpy arrays."""

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Blocks", "Ints", "Window", "borrowed", "compiled"]

Ints = NDArray[np.int64]


class Blocks(NamedTuple):
    """Blocks of several elements, which all lie alike in memory.

    Attributes:
        elements: [2, elements], the address of each element of a block in values and mask.
        run: consecutive elements of a block that lie side by side, in values and mask.
        tree: the block's shape, in the order in which its sum is taken.
        outer: leading entries of `tree`, whose elements do not lie side by side: those of rows.
        order: [rows], the first element of each row of a block, in the order in which rows are folded.
        joins: [rows], down to which row of those at hand each is then joined.
        edges: [block loops], a bit for each loop whose last trip is a block cut by the tensor's edge, else 0; empty
            where no block is cut.
        inside: [edges, elements], whether an element of a block at these edges (bits together) lies in the tensor.
        volumes: [edges], how many do; empty where a score is a sum and not a mean.
        norm: 1, 2, or 3 for the largest.
    """

    elements: Ints
    run: int
    tree: Ints
    outer: int
    order: Ints
    joins: Ints
    edges: Ints
    inside: NDArray[np.bool_]
    volumes: NDArray[np.float32]
    norm: int


class Window(NamedTuple):
    """Steps count elements; loops of a nest go outermost first.

    Attributes:
        bits: the values' storage as int16 or int32, flat; floats are read as integers, so bfloat16 needs no copy.
        mask: the mask's storage as uint8, flat.
        scope: [3, loops], sizes of the scope nest, its steps in the values, its steps in the mask.
        block: the same of the block nest.
        blocks: None for single elements.
        single: None for blocks of several elements, else 1: numba tells either kind by its None.
        kind: 0 float32, 1 bfloat16, 2 float16.
        signed: rank single elements by score, not by |score|.
        stage: choose only among what the mask still holds.
    """

    bits: NDArray[Any]
    mask: NDArray[np.uint8]
    scope: Ints
    block: Ints
    blocks: Blocks | None
    single: int | None
    kind: int
    signed: bool
    among_kept: bool

    @property
    def size(self) -> int:
        """Elements of a block."""
        return 1 if self.blocks is None else int(self.blocks.elements.shape[1])


def compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called, to run without the GIL; keep the machine code on disk where one may write."""
    try:
        made = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder can be written
        return numba.njit(nogil=True)(function)
    cache: Any = getattr(made, "_cache", None)
    if hasattr(cache, "save_overload"):
        cache.save_overload = _if_there_is_room(cache.save_overload)
    return made


def _if_there_is_room(save: Callable[..., None]) -> Callable[..., None]:
    """A full disk or a quota must not stop a training step."""

    def attempt(*args: Any) -> None:
        with contextlib.suppress(OSError):
            save(*args)

    return attempt


def borrowed(t: Tensor) -> NDArray:
    """A tensor's elements as a flat array, for as long as somebody holds the tensor.

    `Tensor.numpy()` would forbid the storage to be resized ever after, which is how FSDP2 frees gathered weights.
    """
    kind = {torch.uint8: ctypes.c_uint8, torch.int16: ctypes.c_int16, torch.int32: ctypes.c_int32}[t.dtype]
    return np.ctypeslib.as_array((kind * t.numel()).from_address(t.data_ptr()))
