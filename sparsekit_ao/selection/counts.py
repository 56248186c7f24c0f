"""How much masks keep: elements of each block, and blocks of each scope."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import fold
from .tiling import Blocks, Scopes, pad_to, split, to_aligned

BYTE = 256  # entries from which on they are not counted in bytes


def kept_elements(m: Blocks) -> Tensor:
    """Elements of each block that its mask keeps: integers, uint8 if they fit, of the grid's shape."""
    assert m.mask is not None, "kept_elements needs masks"
    return _sums((m.mask if m.mask.dtype == torch.bool else m.mask != 0).view(torch.uint8), m.shape)


def kept_blocks(scopes: Scopes) -> Tensor:
    """Blocks of each scope of which the masks keep any element: integers, of the aligned scope grid's shape."""
    found: Tensor | None = None
    for m in scopes.members:
        kept = to_aligned(kept_elements(m), m.order, len(scopes.shape)) != 0
        found = kept if found is None else found | kept
    assert found is not None
    counts = _sums(found.view(torch.uint8), scopes.shape)
    return counts.permute(scopes.order) if scopes.order else counts


def _sums(flags: Tensor, tile: Sequence[int]) -> Tensor:
    """Sums of zeros and ones, uint8, over tiles."""
    tiles = split(pad_to(flags, tile, 0), tile)
    if math.prod(tile) < BYTE:
        return fold(tiles, torch.add)
    return tiles.sum(dim=tuple(range(1, tiles.ndim, 2)), dtype=torch.int64)
