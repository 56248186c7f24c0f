"""What masks keep: which blocks, whether these are whole, and how many in each scope."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import fold
from .tiling import Blocks, Scopes, pad_to, split, to_aligned

BYTE = 256  # entries from which on they are not counted in bytes
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes


def kept_flags(m: Blocks) -> Tensor:
    """Blocks of which the mask keeps any element: 0 or 1, uint8, of the grid's shape."""
    return _folded(_flags(m), m.shape, every=False)


def are_whole(m: Blocks) -> bool:
    """Whether the mask keeps all elements of each block or none."""
    if all(n == 1 for n in m.shape):
        return True
    return torch.equal(_folded(_flags(m), m.shape, every=True), kept_flags(m))


def kept_blocks(scopes: Scopes) -> Tensor:
    """Blocks of each scope of which the masks keep any element: integers, of the aligned scope grid's shape."""
    found: Tensor | None = None
    for m in scopes.members:
        kept = to_aligned(kept_flags(m), m.order, len(scopes.shape))
        found = kept if found is None else found | kept
    assert found is not None
    counts = _sums(found, scopes.shape)
    return counts.permute(scopes.order) if scopes.order else counts


def _flags(m: Blocks) -> Tensor:
    assert m.mask is not None, "masks are required"
    return (m.mask if m.mask.dtype == torch.bool else m.mask != 0).view(torch.uint8)


def _folded(flags: Tensor, tile: Sequence[int], *, every: bool) -> Tensor:
    """Whether any flag of a tile is set, or every one: 0 or 1, uint8."""
    flags = pad_to(flags, tile, int(every))
    word = _WORDS.get(tile[-1]) if flags.ndim else None
    if word is not None and flags.stride(-1) == 1:
        steps = (flags.storage_offset(), *flags.stride()[:-1])
        if all(step % tile[-1] == 0 for step in steps):  # bytes side by side are looked at together
            words = flags.view(word)
            ones = int.from_bytes(bytes([1] * tile[-1]), "little")
            flags, tile = (words == ones if every else words != 0).view(torch.uint8), (*tile[:-1], 1)
    return fold(split(flags, tile), torch.bitwise_and if every else torch.bitwise_or)


def _sums(flags: Tensor, tile: Sequence[int]) -> Tensor:
    """Sums of zeros and ones, uint8, over tiles: uint8 if none can be too large, else int64."""
    tiles = split(pad_to(flags, tile, 0), tile)
    if math.prod(tile) < BYTE:
        return fold(tiles, torch.add)
    most, inner = 1, range(1, tiles.ndim, 2)
    for dim in inner:  # adding bytes, as long as they hold the sums, takes a tenth of the time
        while tiles.shape[dim] % 2 == 0 and 2 * most < BYTE:
            upper, lower = tiles.chunk(2, dim)
            tiles, most = upper + lower, 2 * most
    return tiles.sum(dim=tuple(inner), dtype=torch.int64)
