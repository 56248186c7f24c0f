"""What the compiled loops are given: one window as nests of integers over flat numpy arrays."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Blocks", "Ints", "Window", "borrowed"]

Ints = NDArray[np.int64]


class Blocks(NamedTuple):
    """Blocks of several elements, which all have the same memory layout.

    Attributes:
        elements: [2, elements], the address of each element of a block in values and mask.
        run: consecutive elements of a block that are contiguous, in values and mask.
        tree: the block's shape, in the order in which its sum is taken.
        norm: 1, 2, or 3 for the largest.
    """

    elements: Ints
    run: int
    tree: Ints
    norm: int


class Window(NamedTuple):
    """Steps count elements; loops of a nest go outermost first.

    Attributes:
        bits: the values' storage as int16 or int32, flat; floats are read as integers, so bfloat16 needs no copy.
        mask: the mask's storage as uint8, flat.
        scope: [3, loops], sizes of the scope nest, its steps in the values, its steps in the mask.
        block: the same of the block nest.
        blocks: None for single elements.
        single: None for blocks of several elements, else 1: numba distinguishes the two by the None.
        kind: 0 float32, 1 bfloat16, 2 float16.
        signed: rank single elements by score, not by |score|.
        among_kept: choose only among what the mask still keeps.
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


def borrowed(t: Tensor) -> NDArray:
    """A tensor's elements as a flat array, which is valid as long as the tensor exists.

    `Tensor.numpy()` would forbid the storage to be resized ever after, which is how FSDP2 frees gathered weights.
    """
    kind = {torch.uint8: ctypes.c_uint8, torch.int16: ctypes.c_int16, torch.int32: ctypes.c_int32}[t.dtype]
    return np.ctypeslib.as_array((kind * t.numel()).from_address(t.data_ptr()))
