"""Scores of blocks whose powers leave the range of their dtype, computed anew from scaled values.

Squares of float32 overflow from 1.8e19 on and vanish below 1e-23. A block is scored anew if its sum is not finite, or
is a sum of squares below `LEAST`: its values are divided by a power of two next to the largest of them, which is exact,
and its score is multiplied by it. Only a score that is itself too large becomes infinite. All other blocks keep the
bits that they have.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .tiling import Blocks, pad_to, split, to_aligned
from .work import Norm

LEAST = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}  # sums of squares above it lose nothing to underflow


def suspects(total: Tensor, norm: Norm, loses: Callable[[], bool]) -> Tensor | None:
    """Which blocks are scored anew, bool of the grid's shape; None if there are none.

    Args:
        total: the sums of the blocks' powers.
        norm: 1, 2 or None.
        loses: whether some square of a value that is not zero is zero; called if some block's sum is zero.
    """
    if total.device.type != "cpu":  # reading numbers would wait for the device
        return ~total.isfinite() | (total < (LEAST[total.dtype] if norm == 2 else -math.inf))
    if total.numel() == 0:
        return None
    low, high = (float(end) for end in total.aminmax())  # a NaN is both
    least = LEAST[total.dtype] if norm == 2 else -math.inf
    if low >= least and math.isfinite(low) and math.isfinite(high):
        return None
    found = ~total.isfinite() | (total < least)
    if norm == 2 and not low > 0 and not loses():
        found &= total != 0
    return found if bool(found.any()) else None


def rescored(
    scores: Tensor,
    which: Tensor,
    windows: Sequence[tuple[Blocks, Tensor]],
    norm: Norm,
    counts: Tensor | int,
    reduce: Callable[[Tensor], Tensor],
    root: Callable[[Tensor], Tensor],
) -> Tensor:
    """`scores` with those of some blocks computed from scaled values.

    Args:
        scores: float32 or float64, of the aligned grid's shape.
        which: the blocks, bool of that shape.
        windows: (member, its values as scored).
        norm: 1, 2 or None.
        counts: elements of each block, of the grid's shape, for means; 1 for norms and sums.
        reduce: adds up the columns of a matrix in a fixed order.
        root: the correctly rounded root.
    """
    on_cpu = scores.device.type == "cpu"
    places = which.nonzero(as_tuple=True) if on_cpu else ()
    rows = torch.cat([_elements(m, values, which.ndim, places) for m, values in windows], dim=1).to(scores.dtype)
    peak = rows.abs().amax(1)
    exponent = torch.where(peak.isfinite(), torch.frexp(peak).exponent, 0)
    scaled = _scaled(rows, -exponent[:, None])
    # with an infinity in it, a sum is that infinity, whatever the others add up to
    scaled = torch.where((peak == math.inf)[:, None] & scaled.isfinite(), 0, scaled)
    total = reduce(scaled * scaled if norm == 2 else scaled if norm is None else scaled.abs())
    total = total / (counts[places] if on_cpu else counts.reshape(-1)) if isinstance(counts, Tensor) else total
    found = _scaled(root(total) if norm == 2 else total, exponent)
    if not on_cpu:
        return torch.where(which, found.reshape(scores.shape), scores)
    scores = scores.clone()
    scores[places] = found
    return scores


def _elements(m: Blocks, values: Tensor, ndim: int, places: tuple[Tensor, ...]) -> Tensor:
    """The elements of blocks at some places of the aligned grid (() is everywhere) as rows [blocks, elements]."""
    n = values.ndim
    tiles = split(pad_to(values, m.shape, 0.0), m.shape)
    aligned = to_aligned(tiles.permute([*range(0, 2 * n, 2), *range(1, 2 * n, 2)]), m.order, ndim, trailing=n)
    rows = aligned[places] if places else aligned
    return rows.reshape(-1, math.prod(m.shape))


def _scaled(t: Tensor, exponent: Tensor) -> Tensor:
    """`t * 2^exponent`, rounded once at most; in two factors, since one may be out of float64's range."""
    half = exponent.div(2, rounding_mode="floor")
    return (t.double() * _power_of_two(half) * _power_of_two(exponent - half)).to(t.dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64 by its bits, since `pow` may round."""
    return (exponent.long() + 1023).bitwise_left_shift(52).view(torch.float64)
