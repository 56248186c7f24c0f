"""The one selection rule: exactly `keep` members of each scope, the highest scores, the lower index among equals.

Scores are compared as integers in their order. Every NaN is equal and above +inf, -0.0 equals 0.0, and `absent`, the
smallest integer, is below every score.
"""

import torch
from torch import Tensor

_INT = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
KEY_DTYPES = tuple(_INT)
_INF = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}


def absent(dtype: torch.dtype) -> int:
    """The key of a slot that may never be kept; `dtype` is the score's."""
    return torch.iinfo(_INT[dtype]).min


def key_bits(dtype: torch.dtype) -> int:
    """Width of a key in bits: 16, 32 or 64."""
    return torch.iinfo(_INT[dtype]).bits


def order_keys(scores: Tensor, *, magnitude: bool = False) -> Tensor:
    """Integer keys in the order of `scores`, or of their absolute values.

    Args:
        scores: any shape; float16, bfloat16, float32 or float64.
        magnitude: rank by |score|; one operation cheaper, and exact.

    Returns:
        int16, int32 or int64 of the same shape.

    >>> order_keys(torch.tensor([-1.0, -0.0, 0.0, float("inf")])).argsort(stable=True).tolist()
    [0, 1, 2, 3]
    """
    bits = scores.view(_INT[scores.dtype])
    top = torch.iinfo(bits.dtype).max
    nan = _INF[scores.dtype] + 1
    if magnitude:
        return (bits & top).clamp_(max=nan)
    # A set sign bit reverses the order of the remaining bits, which two's complement then restores.
    keys = torch.where(bits < 0, -(bits & top), bits)
    return torch.where(scores.isnan(), nan, keys)


def keep_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """Keep exactly `keep` members of each row by a stable sort: the definition of the rule.

    Args:
        scores: float [rows, members].
        keep: an int, or int64 [rows].
        candidates: bool [rows, members]; others are never kept.

    Returns:
        bool [rows, members].
    """
    keys = order_keys(scores)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, absent(scores.dtype))
    ranking = keys.sort(dim=1, descending=True, stable=True).indices
    limit = keep[:, None] if isinstance(keep, Tensor) else keep
    kept = (torch.arange(scores.shape[1], device=scores.device) < limit).expand(scores.shape)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ranking, kept)
    return mask if candidates is None else mask & candidates
