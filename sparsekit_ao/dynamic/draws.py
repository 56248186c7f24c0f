"""Random numbers that everyone draws alike: keyed by seed, tensor name, step and purpose, never by what came before.

So all ranks agree without sending anything, and a resumed run draws what an uninterrupted one draws.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["draw", "generator"]


def generator(seed: int, name: str, step: int, purpose: str) -> torch.Generator:
    """A CPU generator that depends on these four alone.

    >>> a, b = generator(0, "fc.weight", 100, "grow"), generator(0, "fc.weight", 100, "grow")
    >>> bool(torch.rand((), generator=a) == torch.rand((), generator=b))
    True
    """
    key = f"{seed}\0{name}\0{step}\0{purpose}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number)


def draw(shape: Sequence[int], source: torch.Generator, device: torch.device) -> Tensor:
    """Uniform float64 numbers in [0, 1): drawn on the CPU, so that every device gets the same ones."""
    return torch.rand(tuple(shape), generator=source, dtype=torch.float64).to(device)
