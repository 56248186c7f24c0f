"""Radix selection over ranks: every pass sums the histograms of all selections by one all-reduce.

Takes the `Piece`s that this rank holds, and fills their masks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..selection.radix import Passes, threshold_passes
from .pieces import Piece, PieceRows, TiedRows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["choose_passes", "run_together", "sum_over"]


def choose_passes(pieces: Sequence[Piece], keep: Tensor, members: int, dtype: torch.dtype) -> Passes[None]:
    """Choose the blocks of scopes that are spread over ranks, and fill the masks of this rank's pieces.

    Args:
        pieces: what this rank holds.
        keep: int64 [scopes], at most the blocks that a scope has.
        members: blocks of the largest scope, over all ranks.
        dtype: of the scores on all ranks: float32 or float64.

    Yields:
        A histogram, for its sum over the ranks.
    """
    source = PieceRows([p for p in pieces if p.counts], len(keep), dtype)
    limits, need, ties = yield from threshold_passes(source, keep)
    last = torch.full_like(need, members)
    if not torch.equal(need, ties):
        place, _, _ = yield from threshold_passes(TiedRows(source, limits, members), need)
        last = torch.where(need > 0, -place, -1)
    for piece in pieces:
        piece.fill(limits, last, dtype)


def run_together(selections: Sequence[Passes[None]], sum_of: Callable[[Tensor], Tensor]) -> None:
    """Run all selections to their end; one sum serves a pass of all of them.

    Args:
        selections: of the same kind and order on every rank.
        sum_of: sums an int64 vector over the ranks.

    >>> def passes(counts):
    ...     print((yield torch.tensor([[counts]])).tolist())
    >>> run_together([passes(1), passes(5)], lambda counts: counts * 2)
    [[2]]
    [[10]]
    """
    waiting = [(p, next(p)) for p in selections]
    while waiting:
        summed = sum_of(torch.cat([counts.reshape(-1) for _, counts in waiting]))
        parts = summed.split([counts.numel() for _, counts in waiting])
        waiting = [
            (p, found)
            for (p, counts), part in zip(waiting, parts, strict=True)
            if (found := _sent(p, part.reshape(counts.shape))) is not None
        ]


def _sent(selection: Passes[None], counts: Tensor) -> Tensor | None:
    """The next histogram, or None at the end."""
    try:
        return selection.send(counts)
    except StopIteration:
        return None


def sum_over(mesh: "DeviceMesh", dims: Sequence[int], most: int) -> Callable[[Tensor], Tensor]:
    """A sum of int64 vectors over some dimensions of a mesh, one all-reduce each.

    Args:
        mesh, dims: whose ranks are summed over.
        most: no entry of the sum is larger; up to 2^31 - 1, entries are sent as int32.
    """
    dtype = torch.int32 if most < 2**31 else torch.int64

    def summed(counts: Tensor) -> Tensor:
        sent = counts.to(mesh.device_type, dtype)
        for dim in dims:
            torch.distributed.all_reduce(sent, group=mesh.get_group(dim))
        return sent.to(counts.device, torch.int64)

    return summed
