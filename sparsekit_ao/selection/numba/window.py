"""What the compiled loops are given: one window as nests of integers over flat numpy arrays."""

import ctypes
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..nests import Nest, lower
from ..strides import addresses, cosize
from ..tiling import Scopes
from ..work import Norm

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INTS = {1: ctypes.c_uint8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}  # by their bytes
NORMS = {None: 1, 1: 1, 2: 2, math.inf: 3}
Array = np.ndarray[Any, Any]


class Window(NamedTuple):
    """Steps count elements; loops of a nest go outermost first.

    Attributes:
        bits: the values' storage as int16 or int32, flat; floats are read as integers, so bfloat16 needs no copy.
        mask: the mask's storage as uint8, flat.
        under: storage of the mask that values are scored under, as integers, with the mask's addresses; else `mask`.
        scope: int64 [3, loops], sizes of the scope nest, its steps in the values, its steps in the mask.
        block: the same of the block nest.
        elements: int64 [2, elements], the address of each element of a block in values and mask.
        run: consecutive elements of a block that are contiguous, in values and mask.
        tree: int64, the block's shape, in the order in which its sum is taken.
        norm: 1, 2, or 3 for the largest.
        kind: 0 float32, 1 bfloat16, 2 float16.
        signed: rank single elements by score, not by |score|.
        among_kept: choose only among what the mask still keeps.
        masked: score 0 for the elements that `under` drops.
        extreme: uint8 [1], set to 1 where sums of powers may leave the range of float32.
    """

    bits: Array
    mask: Array
    under: Array
    scope: Array
    block: Array
    elements: Array
    run: int
    tree: Array
    norm: int
    kind: int
    signed: bool
    among_kept: bool
    masked: bool
    extreme: Array


def make_window(scopes: Scopes, norm: Norm, *, among_kept: bool) -> Window:
    """The window of scopes with one member, whose mask is bool and whose values are of a dtype in KINDS."""
    only, nests = scopes.members[0], lower(scopes)
    assert only.values is not None and only.mask is not None
    return Window(
        bits=_flat(only.values, ctypes.c_int16 if KINDS[only.values.dtype] else ctypes.c_int32),
        mask=_flat(only.mask, ctypes.c_uint8),
        under=_flat(*((only.mask, ctypes.c_uint8) if only.under is None else (only.under, INTS[only.under.itemsize]))),
        scope=loops_of(nests.scope),
        block=loops_of(nests.block),
        elements=_elements(nests.elements[0]),
        run=contiguous_run(nests.elements[0]),
        tree=integers(only.shape),
        norm=NORMS[norm],
        kind=KINDS[only.values.dtype],
        signed=norm is None,
        among_kept=among_kept,
        masked=only.under is not None,
        extreme=np.zeros(1, np.uint8),
    )


def contiguous_run(elements: Nest) -> int:
    """Contiguous elements of a block, in values and mask."""
    return elements.sizes[-1] if elements.sizes and all(steps[-1] == 1 for steps in elements.strides) else 1


def integers(numbers: Any) -> Array:
    """An int64 array of integers or of an integer tensor."""
    return torch.as_tensor(numbers, dtype=torch.int64, device="cpu").numpy()


@lru_cache(maxsize=4096)  # as many as nests are cached; a model has many tensors of few shapes
def loops_of(nest: Nest) -> Array:
    """A nest as the compiled loops read it, see `Window`."""
    return integers([nest.sizes, *nest.strides])


@lru_cache(maxsize=256)
def _elements(nest: Nest) -> Array:
    return torch.stack([addresses(nest.sizes, steps) for steps in nest.strides]).numpy()


def _flat(t: Tensor, kind: Any) -> Array:
    """The storage that a tensor spans, from its first element on; valid as long as the tensor exists.

    `Tensor.numpy()` would forbid the storage to be resized ever after, which is how FSDP2 frees gathered weights.
    """
    return np.ctypeslib.as_array((kind * cosize(t.shape, t.stride())).from_address(t.data_ptr()))
