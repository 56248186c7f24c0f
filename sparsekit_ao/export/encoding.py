"""Which elements of a tensor are kept, as bits or as the gaps between them.

An element is kept unless all its bits are zero: -0.0 and nan are kept, so that decoding gives the same bits. Everything
is numbered in row-major order.
"""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SKIP = 255  # a byte of the gaps: so many zeros, and no kept element after them


def memory_of(tensor: Tensor) -> Hashable | None:
    """Equal for tensors that read the same values from the same memory; None for an empty tensor."""
    if not tensor.numel():
        return None
    kind = (tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), *kind)


def flat(tensor: Tensor) -> Tensor:
    """The elements on the CPU, as one dimension."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)


def bits_of(elements: Tensor) -> Tensor:
    """The same memory as integers, since not every operation supports every dtype."""
    return elements.view(_INTEGERS[elements.element_size()])


def kept_of(elements: Tensor) -> Tensor:
    """Bool [n] of elements [n]: any bit is set."""
    return bits_of(elements) != 0


def to_mask(kept: Tensor) -> Tensor:
    """Bool [n] as uint8 [ceil(n / 8)], the first element in the lowest bit.

    >>> to_mask(torch.tensor([True, False, False, True]))
    tensor([9], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(kept.numpy(), bitorder="little"))


def from_mask(mask: Tensor, n: int) -> Tensor | None:
    """Indices of kept elements, or None where bits after the n-th are set."""
    bits = np.unpackbits(mask.numpy(), bitorder="little")
    return None if bits[n:].any() else torch.from_numpy(np.flatnonzero(bits))


def to_gaps(kept: Tensor) -> Tensor:
    """Bool [n] as bytes: 0 to 254 is a kept element after so many zeros, 255 skips 255 zeros.

    >>> to_gaps(torch.tensor([True, False, False, True]))
    tensor([0, 2], dtype=torch.uint8)
    """
    at = np.flatnonzero(kept.numpy())
    zeros = np.diff(at, prepend=-1, append=len(kept)) - 1
    skips, rest = np.divmod(zeros, _SKIP)
    gaps = np.full(len(at) + skips.sum(), _SKIP, dtype=np.uint8)
    gaps[(np.cumsum(skips) + np.arange(len(zeros)))[:-1]] = rest[:-1]
    return torch.from_numpy(gaps)


def from_gaps(gaps: Tensor, n: int) -> Tensor | None:
    """Indices of kept elements, or None where the gaps do not cover n elements, but for less than 255 zeros."""
    bytes_ = gaps.numpy()
    ends = np.cumsum(bytes_.astype(np.int64) + (bytes_ != _SKIP))
    covered = int(ends[-1]) if len(ends) else 0
    return torch.from_numpy(ends[bytes_ != _SKIP] - 1) if n - _SKIP < covered <= n else None


def smaller_code(kept: Tensor) -> tuple[str, int]:
    """The code of fewer bytes, "mask" or "gaps", and its bytes."""
    n, count = len(kept), int(kept.count_nonzero())
    mask = -(-n // 8)
    gaps = len(to_gaps(kept)) if count < mask else mask
    return ("gaps", gaps) if gaps < mask else ("mask", mask)


CODES = {"mask": (to_mask, from_mask), "gaps": (to_gaps, from_gaps)}
