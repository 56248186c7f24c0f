"""Which common structures the zeros of a weight satisfy."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .. import patterns
from ..errors import SparsityError
from .layers import DENSE, Layer

_N_M = ((1, 8), (1, 4), (2, 4), (4, 8), (8, 16))  # the first that fits implies those after it
_SAMPLE = 64  # parts of each dimension that are looked at first, since most weights break a structure there
_BLOCKS = ((32, 32), (16, 16), (8, 8), (4, 4), (1, 16), (16, 1), (1, 8), (8, 1), (1, 4), (4, 1))  # the largest first


def satisfied(layer: Layer) -> list[str]:
    """Names of the structures that a weight satisfies: rows, columns, the strictest n:m; else the largest blocks.

    "n:m" is along the inputs of the module. In rows, columns and blocks no zero is outside of one that is all zero.
    """
    kept = layer.kept
    if layer.density >= DENSE:  # an empty one, too
        return []
    found = [p.kind for p in (patterns.rows(), patterns.columns()) if _is_blocks(layer, kept, p)]
    found += [f"{n}:{m}" for n, m in _N_M if _is_n_m(layer, kept, n, m)][:1]
    if not found:
        found = [f"{a}x{b} blocks" for a, b in _BLOCKS if _is_blocks(layer, kept, patterns.blocks(a, b))][:1]
    return found or ["unstructured"]


def _is_n_m(layer: Layer, kept: Tensor, n: int, m: int) -> bool:
    scope = _shape(layer, kept, patterns.n_m(n, m), "scope_shape")
    if scope is None:
        return False
    return all(bool((reduced(part, _sum) <= n).all()) for part in _parts(kept, scope))


def _is_blocks(layer: Layer, kept: Tensor, pattern: patterns.Pattern) -> bool:
    block = _shape(layer, kept, pattern, "block_shape")
    if block is None or math.prod(block) == 1:
        return False
    return all(torch.equal(reduced(p, torch.amax), reduced(p, torch.amin)) for p in _parts(kept, block))


def _shape(layer: Layer, kept: Tensor, pattern: patterns.Pattern, key: str) -> tuple[int, ...] | None:
    """Sizes of a pattern's blocks or scopes in the weight's dimensions, or None where it does not fit them."""
    try:
        found: Sequence[int] | None = pattern.resolve(layer.module, layer.tensor_name, kept).get(key)
    except SparsityError:
        return None
    if not found:
        return None
    sizes = tuple(n if size == -1 else size for n, size in zip(kept.shape, found, strict=True))
    return None if any(size == 0 or n % size for n, size in zip(kept.shape, sizes, strict=True)) else sizes


def reduced(split: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce every second dimension of a tensor of bytes, one after the other, which is faster than all at once."""
    for dim in range(split.ndim - 1, 0, -2):
        split = function(split, dim)
    return split


def _sum(values: Tensor, dim: int) -> Tensor:
    return values.sum(dim, dtype=torch.uint8)  # of at most 16 ones


def _parts(kept: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Bytes, each dimension as two, number of parts and their size: of the first parts, then of all."""
    split = kept.view(torch.uint8).reshape(
        [k for n, size in zip(kept.shape, sizes, strict=True) for k in (n // size, size)]
    )
    yield split[tuple(slice(None) if k % 2 else slice(_SAMPLE) for k in range(split.ndim))]
    yield split
