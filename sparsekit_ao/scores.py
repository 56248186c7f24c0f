"""The type of a score, and the check of what it returns.

A score is a function `(weight, name) -> saliency`. Both tensors have the parameter's own shape, whatever view, axes or
blocks the pattern takes; a block's score is the sum of its elements' saliencies (the mean where blocks differ in size).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import SparsityError

__all__ = ["Score", "saliency_of"]

Score = Callable[[Tensor, str], Tensor]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def saliency_of(score: Score, weight: Tensor, name: str) -> Tensor:
    """Call a score for one weight and check what it returns.

    Args:
        score: called as `score(weight, name)`; it must not change the weight.
        weight: the dense weight, whole, detached.
        name: its `tensor_fqn`.

    Returns:
        A floating-point tensor (16 bits or more) of the weight's shape on the weight's device; the highest saliencies
        are kept. They may be negative; NaN ranks highest.

    Raises:
        SparsityError: the score returned something else.

    >>> saliency_of(lambda weight, name: weight.abs() * 2, torch.tensor([1.0, -3.0]), "fc.weight")
    tensor([2., 6.])
    """
    found = score(weight, name)
    if not isinstance(found, Tensor) or found.shape != weight.shape or found.dtype not in _FLOATS:
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SparsityError(
            f"{name}: score must return a floating-point tensor of the weight's shape {tuple(weight.shape)}, got {what}"
        )
    if found.device != weight.device:
        raise SparsityError(
            f"{name}: score must return a tensor on the weight's device {weight.device}, got {found.device}"
        )
    return found.detach()
