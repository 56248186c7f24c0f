"""The one selection rule: exactly `keep` slots of each scope, the highest scores, the lower index among equals.

Scores are compared as integers in their order. Every NaN is equal and above +inf, -0.0 equals 0.0, and `absent`, the
smallest integer, is below every score.
"""

import torch
from torch import Tensor

INTS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
KEY_DTYPES = tuple(INTS)
INF = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}


def absent(dtype: torch.dtype) -> int:
    """The key of a slot that may never be kept; `dtype` is the score's."""
    return torch.iinfo(INTS[dtype]).min


def key_bits(dtype: torch.dtype) -> int:
    """Width of a key in bits: 16, 32 or 64."""
    return torch.iinfo(INTS[dtype]).bits


def order_keys(scores: Tensor, *, magnitude: bool = False) -> Tensor:
    """int16, int32 or int64 keys in the order of `scores`, or of their absolute values."""
    bits = scores.view(INTS[scores.dtype])
    top = torch.iinfo(bits.dtype).max
    nan = INF[scores.dtype] + 1
    if magnitude:
        return (bits & top).clamp_(max=nan)
    # A set sign bit reverses the order of the remaining bits, which two's complement then restores.
    keys = torch.where(bits < 0, -(bits & top), bits)
    return torch.where(scores.isnan(), nan, keys)


def keep_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """Keep exactly `keep` (an int, or int64 [rows]) of each row of scores by a stable sort: the definition of the rule.

    Of bool `candidates` [rows, slots] those that are False are never kept.
    """
    keys = order_keys(scores)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, absent(scores.dtype))
    ranking = keys.sort(dim=1, descending=True, stable=True).indices
    limit = keep[:, None] if isinstance(keep, Tensor) else keep
    kept = (torch.arange(scores.shape[1], device=scores.device) < limit).expand(scores.shape)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ranking, kept)
    return mask if candidates is None else mask & candidates
