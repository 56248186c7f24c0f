"""Published methods by name: a few arguments of `DynamicSparsifier` each, all of which can be given anew."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ..errors import SparsityError
from ..schedules import cosine, cubic
from .sparsifier import DynamicSparsifier
from .straight_through import StraightThrough

__all__ = ["GMP", "SET", "SNFS", "SRSTE", "STE", "RigL", "Static", "TopKAST"]

Optimizers = Optimizer | Sequence[Optimizer] | None


def Static(optimizer: Optimizers = None, sparsity_level: float | None = None, **arguments: Any) -> DynamicSparsifier:
    """Random masks that never change: the baseline."""
    return DynamicSparsifier(optimizer, sparsity_level, **{"update_every": None, **arguments})


def SET(optimizer: Optimizers = None, sparsity_level: float | None = None, **arguments: Any) -> DynamicSparsifier:
    """Drop the smallest, grow at random (SET, arXiv 1707.04780)."""
    return DynamicSparsifier(optimizer, sparsity_level, **{"grow": "random", "init": "er", **arguments})


def RigL(
    optimizer: Optimizers = None, sparsity_level: float | None = None, *, until: int, **arguments: Any
) -> DynamicSparsifier:
    """Drop the smallest, grow the largest gradients, less and less until an iteration (RigL, arXiv 1911.11134)."""
    chosen = {"update_fraction": cosine(0.3, until), **arguments}
    return DynamicSparsifier(optimizer, sparsity_level, until=until, **chosen)


def SNFS(
    optimizer: Optimizers = None, sparsity_level: float | None = None, *, until: int, **arguments: Any
) -> DynamicSparsifier:
    """Grow and redistribute by momentum (Sparse Networks from Scratch, arXiv 1907.04840)."""
    return RigL(optimizer, sparsity_level, until=until, **{"grow": "momentum", "redistribute": "momentum", **arguments})


def GMP(
    optimizer: Optimizers = None,
    sparsity_level: float = 0.9,
    *,
    until: int,
    begin: int = 0,
    update_every: int = 100,
    **arguments: Any,
) -> DynamicSparsifier:
    """Gradual magnitude pruning from dense, by a cubic target (Zhu and Gupta, arXiv 1710.01878); nothing grows.

    The level is reached at the last update that `until` allows.
    """
    if "target" in arguments:
        raise SparsityError(
            "GMP: the target is made from sparsity_level, begin and until; for another one use "
            "DynamicSparsifier(target=..., grow=None)"
        )
    last = until - until % update_every
    if last <= begin:
        raise SparsityError(f"GMP: no update falls between begin={begin} and until={until} (every {update_every})")
    target = cubic(0.0, sparsity_level, last - begin, begin=begin)
    chosen = {"target": target, "grow": None, "init": "uniform", **arguments}
    return DynamicSparsifier(optimizer, until=until, update_every=update_every, **chosen)


def STE(sparsity_level: float | None = None, **arguments: Any) -> StraightThrough:
    """Every weight learns, the masked ones count forward (straight-through, arXiv 1308.3432)."""
    return StraightThrough(sparsity_level, **arguments)


def SRSTE(sparsity_level: float | None = None, *, decay: float = 2e-4, **arguments: Any) -> StraightThrough:
    """Straight-through with decay of what is dropped, for N:M (SR-STE, arXiv 2102.04010); `attach` the optimizer."""
    return StraightThrough(sparsity_level, decay=decay, **arguments)


def TopKAST(sparsity_level: float, backward_level: float, **arguments: Any) -> StraightThrough:
    """The top of the weights counts forward, a larger top learns (Top-KAST, arXiv 2106.03517)."""
    return StraightThrough(sparsity_level, backward_level=backward_level, **arguments)
