"""Blocks and scopes cut by a tensor's edge: regions of equal scopes, and what is left of a block at each edge.

Scopes choose for themselves, so those at an edge are handed over apart, as smaller scopes. Inside a scope the blocks
at an edge keep their place, because ties go by it: their loops say which of their elements there are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..strides import Shape
from ..tiling import Scopes

__all__ = ["cut_edges", "edge_bits", "inside", "regions", "stretch"]

Cut = tuple[int, int, int]  # the first block, the last one and one more, blocks of a scope; of one dimension


def cut_edges(group: Scopes) -> bool:
    """Whether some scope is smaller than the others, or holds a smaller block where the others hold none."""
    return _uneven(group, _cuts(group))


def regions(group: Scopes, keep: int | Tensor) -> Iterator[tuple[Scopes, int | Tensor]]:
    """Scopes of one tensor (in no other order than its own) as sets of equal ones, each with its budgets."""
    only = group.members[0]
    assert only.values is not None and only.mask is not None
    cuts = _cuts(group)
    if not _uneven(group, cuts):
        yield group, keep
        return
    for place in product(*cuts):
        part = tuple(slice(a * b, z * b) for (a, z, _), b in zip(place, only.shape, strict=True))
        member = replace(only, values=only.values[part], mask=only.mask[part])
        shape = tuple(n for *_, n in place)
        own = keep
        if isinstance(keep, Tensor) and keep.ndim:
            own = keep[tuple(slice(a // n, -(-z // n)) for (a, z, _), n in zip(place, group.shape, strict=True))]
        most = math.prod(shape)  # a scope smaller than its budget keeps all
        own = own.clamp(max=most) if isinstance(own, Tensor) else min(own, most)
        yield replace(group, members=(member,), shape=shape), own


def _uneven(group: Scopes, cuts: list[list[Cut]]) -> bool:
    """Whether some dimension has unlike scopes, or one that is smaller than asked for."""
    return any(len(c) > 1 or c[0][2] != n for c, n in zip(cuts, group.shape, strict=True))


def _cuts(group: Scopes) -> list[list[Cut]]:
    """For each dimension, the stretches in which all scopes have the same blocks."""
    only, found = group.members[0], []
    for blocks, n, size, block in zip(group.grid, group.shape, only.window.shape, only.shape, strict=True):
        whole = blocks // n - (1 if blocks % n == 0 and size % block else 0)  # scopes of whole blocks only
        parts = [(0, whole * n, n)] if whole else []
        if whole * n < blocks:
            parts.append((whole * n, blocks, blocks - whole * n))
        found.append(parts)
    return found


def stretch(group: Scopes) -> int:
    """Blocks of a scope, in their order, from one at an edge to the next; all of them where there is no edge."""
    only = group.members[0]
    cut = [k for k, (s, b) in enumerate(zip(only.window.shape, only.shape, strict=True)) if s % b]
    return math.prod(group.shape[cut[-1] :]) if cut else math.prod(group.shape)


def edge_bits(sizes: Sequence[int], block: Shape) -> list[int]:
    """A bit for each dimension that blocks do not divide, else 0."""
    cut = [s % b != 0 for s, b in zip(sizes, block, strict=True)]
    return [(1 << sum(cut[:k])) if c else 0 for k, c in enumerate(cut)]


def inside(sizes: Sequence[int], block: Shape) -> Tensor:
    """bool [edges, elements]: which elements a block at each combination of edges has.

    >>> inside((4, 5), (1, 3))
    tensor([[ True,  True,  True],
            [ True,  True, False]])
    """
    bits = edge_bits(sizes, block)
    found = []
    for edges in range(1 << sum(map(bool, bits))):
        there = torch.ones(block, dtype=torch.bool, device="cpu")
        for k, bit in enumerate(bits):
            if edges & bit:
                there.narrow(k, sizes[k] % block[k], block[k] - sizes[k] % block[k]).fill_(False)
        found.append(there.reshape(-1))
    return torch.stack(found)
