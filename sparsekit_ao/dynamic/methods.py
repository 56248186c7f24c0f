"""Published methods by name: a few arguments of `DynamicSparsifier` or `StraightThrough` each.

`sparsity_level` always comes first; for `DynamicSparsifier`, the optimizer is second, or is attached later.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch.optim import Optimizer

from ..errors import SparsityError, is_number
from ..schedules import check_positive, cosine, cubic
from .budgets import refuse_optimizer_as_level
from .sparsifier import DynamicSparsifier
from .straight_through import StraightThrough

Optimizers = Optimizer | Sequence[Optimizer] | None


def Static(sparsity_level: float | None = None, optimizer: Optimizers = None, **arguments: Any) -> DynamicSparsifier:
    """Keep random masks, as a baseline; `sparsity_level` is the fraction dropped over all tensors (0.9 by default).

    >>> Static(0.8).settings.updates
    False
    """
    return DynamicSparsifier(sparsity_level, optimizer, **{"update_every": None, **arguments})


def SET(sparsity_level: float | None = None, optimizer: Optimizers = None, **arguments: Any) -> DynamicSparsifier:
    """Prune the smallest, grow at random; `sparsity_level` is the fraction dropped over all tensors (0.9).

    Sparse evolutionary training, arXiv 1707.04780.

    >>> SET(0.8).settings.grow.name
    'random'
    """
    return DynamicSparsifier(sparsity_level, optimizer, **{"grow": "random", "init": "er", **arguments})


def RigL(
    sparsity_level: float | None = None, optimizer: Optimizers = None, *, until: int, **arguments: Any
) -> DynamicSparsifier:
    """Prune the smallest, grow the largest gradients; `sparsity_level` is the fraction dropped over all tensors (0.9).

    The replaced fraction falls by a cosine from 0.3 to 0 at iteration `until` (RigL, arXiv 1911.11134).

    >>> RigL(0.8, until=1000).settings.update_fraction(500)
    0.15
    """
    check_positive("until", until)
    chosen = {"update_fraction": cosine(0.3, 0.0, until), "until": until}
    return DynamicSparsifier(sparsity_level, optimizer, **{**chosen, **arguments})


def SNFS(
    sparsity_level: float | None = None, optimizer: Optimizers = None, *, until: int, **arguments: Any
) -> DynamicSparsifier:
    """Grow and redistribute by momentum; `sparsity_level` is the fraction dropped over all tensors (0.9).

    Otherwise as `RigL` (Sparse Networks from Scratch, arXiv 1907.04840).

    >>> SNFS(0.8, until=1000).settings.needs_momentum
    True
    """
    return RigL(sparsity_level, optimizer, until=until, **{"grow": "momentum", "redistribute": "momentum", **arguments})


def GMP(
    sparsity_level: float = 0.9,
    optimizer: Optimizers = None,
    *,
    until: int,
    begin: int = 0,
    update_every: int = 100,
    **arguments: Any,
) -> DynamicSparsifier:
    """Gradual magnitude pruning from dense; `sparsity_level` is the final fraction dropped over all tensors.

    A cubic target (Zhu and Gupta, arXiv 1710.01878) from 0 after iteration `begin` to the level at the last update
    that `until` allows; nothing grows.

    >>> GMP(0.8, until=1000).settings.target(1000)
    0.8
    """
    refuse_optimizer_as_level(sparsity_level)
    if "target" in arguments:
        raise SparsityError(
            "GMP: the target is made from sparsity_level, begin and until; for another one use "
            "DynamicSparsifier(target=..., grow=None)"
        )
    for name, value in (("until", until), ("update_every", update_every)):
        check_positive(f"GMP: {name}", value)
    if isinstance(begin, bool) or not isinstance(begin, Integral):
        raise SparsityError(f"GMP: begin must be an int, got {begin!r}")
    last = until - until % update_every
    if last <= begin:
        raise SparsityError(
            f"GMP: no update falls between begin={begin} and until={until} (every {update_every}); give a smaller "
            "update_every or a larger until"
        )
    target = cubic(0.0, sparsity_level, last - begin, begin=begin)
    chosen = {"target": target, "grow": None, "init": "uniform", "until": until, "update_every": update_every}
    return DynamicSparsifier(None, optimizer, **{**chosen, **arguments})


def STE(sparsity_level: float | None = None, **arguments: Any) -> StraightThrough:
    """Train every weight, and use the kept ones forward; `sparsity_level` is the fraction dropped in each scope (0.5).

    Straight-through estimation, arXiv 1308.3432.

    >>> STE(0.5).backward_level
    0.0
    """
    return StraightThrough(sparsity_level, **arguments)


def SRSTE(sparsity_level: float | None = None, *, decay: float = 2e-4, **arguments: Any) -> StraightThrough:
    """Train as `STE`, with decay of dropped weights; `sparsity_level` is the fraction dropped in each scope (0.5).

    For N:M (SR-STE, arXiv 2102.04010); `attach` the optimizer, in whose steps the decay is added.

    >>> SRSTE(nnz=2, scope_shape=(1, 4)).decay
    0.0002
    """
    return StraightThrough(sparsity_level, decay=decay, **arguments)


def TopKAST(sparsity_level: float, backward_level: float | None = None, **arguments: Any) -> StraightThrough:
    """Drop `sparsity_level` of each scope forward; a smaller fraction, `backward_level`, gets no gradient.

    Top-KAST, arXiv 2106.03517. By default twice as many weights get a gradient as are kept forward.

    >>> TopKAST(0.75).backward_level
    0.5
    """
    if backward_level is None:
        backward_level = max(0.0, 2 * sparsity_level - 1) if is_number(sparsity_level) else 0.0
    return StraightThrough(sparsity_level, backward_level=backward_level, **arguments)
