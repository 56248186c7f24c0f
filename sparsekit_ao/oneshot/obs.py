"""Optimal Brain Surgeon on matrices: masks chosen from left to right, what is dropped made up for by what follows.

`structured_obs` prunes whole scopes at a time (S3, arXiv 2604.11315); with scopes of single elements it does what
SparseGPT does (arXiv 2301.00774), which `sparsegpt` is, column by column, as the baseline of comparisons.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import SparsityError

WIDTH = 128  # columns after which those to the right are compensated; SparseGPT's scope without N:M


def column_chunks(labels: Tensor) -> list[tuple[int, int]]:
    """The finest cut of columns into contiguous chunks such that no scope crosses a cut.

    Args:
        labels: the scope of every element, int64 [outputs, inputs].

    >>> column_chunks(torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3]]))
    [(0, 2), (2, 4)]
    """
    labels, columns = labels.cpu(), labels.shape[1]
    last = torch.zeros(int(labels.max()) + 1, dtype=torch.long, device="cpu")
    position = torch.arange(columns, device="cpu").expand_as(labels)
    last.scatter_reduce_(0, labels.reshape(-1), position.reshape(-1), "amax", include_self=False)
    reach = last[labels].amax(0)  # the last column of any scope that has an element in this one
    chunks, start, end = [], 0, 0
    for column, far in enumerate(reach.tolist()):
        end = max(end, far)
        if column == end:
            chunks.append((start, end + 1))
            start = end = end + 1
    return chunks


def structured_obs(
    weight: Tensor,
    inverse: Tensor,
    chunks: list[tuple[int, int]],
    choose: Callable[[Tensor, Tensor, int, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Prune chunk after chunk, and compensate in the columns to the right.

    Args:
        weight: [outputs, inputs].
        inverse: C = G^-1, [inputs, inputs], damped.
        chunks: see `column_chunks`.
        choose: (weights, C, start, stop) of the columns of a chunk, as they are now -> its mask.

    Returns:
        The mask, and the compensated weights.
    """
    found, mask = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    upper = torch.linalg.cholesky(inverse, upper=True)  # C of the columns from k on is upper[k:, k:]^T upper[k:, k:]
    for together in _joined(chunks):
        first, end = together[0][0], together[-1][1]
        errors = torch.zeros_like(weight[:, first:end])
        for start, stop in together:
            factor = upper[start:stop, start:stop]
            block = factor.mT @ factor
            own = choose(found[:, start:stop], block, start, stop)
            dropped = ~own
            system = torch.where(
                dropped[:, :, None] & dropped[:, None, :], block, torch.diag_embed(own.to(block.dtype))
            )
            lost = torch.linalg.solve(system, torch.where(dropped, found[:, start:stop], 0))
            found[:, start:stop] = torch.where(own, found[:, start:stop] - lost @ block, 0)
            error = lost @ factor.mT
            found[:, stop:end] -= error @ upper[start:stop, stop:end]
            mask[:, start:stop], errors[:, start - first : stop - first] = own, error
        found[:, end:] -= errors @ upper[first:end, end:]
    return mask, found


def _joined(chunks: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Chunks in runs of about `WIDTH` columns, after which all columns to the right are compensated at once."""
    runs: list[list[tuple[int, int]]] = [[]]
    for start, stop in chunks:
        if runs[-1] and stop - runs[-1][0][0] > WIDTH:
            runs.append([])
        runs[-1].append((start, stop))
    return runs


def sparsegpt(
    weight: Tensor, inverse: Tensor, level: float | None, n_m: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """SparseGPT: a Python loop over columns with the Cholesky factor of C; the baseline of comparisons.

    Args:
        weight: [outputs, inputs].
        inverse: C, [inputs, inputs].
        level: the fraction dropped in every `WIDTH` columns (the last ones even out the count); or
        n_m: n kept of every m consecutive inputs.

    Returns:
        The mask, and the compensated weights.
    """
    found, mask = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    upper = torch.linalg.cholesky(inverse, upper=True)
    rows, columns = weight.shape
    total = round(rows * columns * (1 - level)) if level is not None else 0
    for start in range(0, columns, WIDTH):
        stop = min(start + WIDTH, columns)
        block, factor = found[:, start:stop].clone(), upper[start:stop, start:stop]
        errors = torch.zeros_like(block)
        if n_m is None:
            keep = round(total * stop / columns) - round(total * start / columns)
            saliency = (block / factor.diagonal()).square().reshape(-1)
            chosen = torch.zeros_like(saliency, dtype=torch.bool)
            chosen[saliency.topk(keep).indices] = True
            mask[:, start:stop] = chosen.view_as(block)
        for at in range(stop - start):
            if n_m is not None and (start + at) % n_m[1] == 0:
                _choose_n_m(block, factor, mask, start, at, n_m)
            pruned = block[:, at] * mask[:, start + at]
            errors[:, at] = (block[:, at] - pruned) / factor[at, at]
            block[:, at:] -= errors[:, at : at + 1] @ factor[at : at + 1, at:]
            block[:, at] = pruned
        found[:, start:stop] = block
        found[:, stop:] -= errors @ upper[start:stop, stop:]
    return mask, found


def _choose_n_m(block: Tensor, factor: Tensor, mask: Tensor, start: int, at: int, n_m: tuple[int, int]) -> None:
    n, m = n_m
    if at + m > block.shape[1]:
        raise SparsityError(f"sparsegpt: {n}:{m} does not divide {WIDTH} columns")
    saliency = (block[:, at : at + m] / factor.diagonal()[at : at + m]).square()
    own = torch.zeros_like(saliency, dtype=torch.bool).scatter_(1, saliency.topk(n, dim=1).indices, True)
    mask[:, start + at : start + at + m] = own
