"""Published methods by name; each sets a few arguments of `DynamicSparsifier` or `StraightThrough`.

The first argument is always `sparsity_level`. For methods of `DynamicSparsifier` the second is the optimizer, which may
also be attached later. All other arguments are passed on to the class.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch.optim import Optimizer

from ..errors import SparsityError, is_number
from ..schedules import check_positive, cosine, cubic
from ..sparsifiers.stages import Level
from .budgets import refuse_optimizer_as_level
from .sparsifier import DynamicSparsifier
from .straight_through import StraightThrough

Optimizers = Optimizer | Sequence[Optimizer] | None


def Static(sparsity_level: Level = None, optimizer: Optimizers = None, **arguments: Any) -> DynamicSparsifier:
    """Train with random masks that never change, as a baseline.

    `sparsity_level` is the fraction dropped over all tensors, 0.9 by default.

    >>> Static(0.8).settings.updates
    False
    """
    return DynamicSparsifier(sparsity_level, optimizer, **{"update_every": None, **arguments})


def SET(sparsity_level: Level = None, optimizer: Optimizers = None, **arguments: Any) -> DynamicSparsifier:
    """Prune the smallest weights and grow random ones: sparse evolutionary training (SET, arXiv 1707.04780).

    `sparsity_level` is the fraction dropped over all tensors, 0.9 by default.

    >>> SET(0.8).settings.grow.name
    'random'
    """
    return DynamicSparsifier(sparsity_level, optimizer, **{"grow": "random", "init": "er", **arguments})


def RigL(
    sparsity_level: Level = None, optimizer: Optimizers = None, *, until: int, **arguments: Any
) -> DynamicSparsifier:
    """Prune the smallest weights and grow those with the largest gradients (RigL, arXiv 1911.11134).

    `sparsity_level` is the fraction dropped over all tensors, 0.9 by default. The fraction that an update replaces
    falls by a cosine from 0.3 to 0 at iteration `until`, the last one that may update.

    >>> RigL(0.8, until=1000).settings.update_fraction(500)
    0.15
    """
    check_positive("until", until)
    chosen = {"update_fraction": cosine(0.3, 0.0, until), "until": until}
    return DynamicSparsifier(sparsity_level, optimizer, **{**chosen, **arguments})


def SNFS(
    sparsity_level: Level = None, optimizer: Optimizers = None, *, until: int, **arguments: Any
) -> DynamicSparsifier:
    """Grow and redistribute by momentum: Sparse Networks from Scratch (SNFS, arXiv 1907.04840).

    The arguments, and everything else, are as in `RigL`.

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
    """Prune a dense model gradually by magnitude (GMP; Zhu and Gupta, arXiv 1710.01878).

    The target follows a cubic from 0 after iteration `begin` to `sparsity_level`, the fraction dropped over all tensors
    (0.9 by default), at the last update that `until` allows. Nothing grows.

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


def STE(sparsity_level: Level = None, **arguments: Any) -> StraightThrough:
    """Use only kept weights in the forward pass but train all: straight-through estimation (STE, arXiv 1308.3432).

    `sparsity_level` is the fraction of blocks dropped in each scope, 0.5 by default.

    >>> STE(0.5).backward_level
    0.0
    """
    return StraightThrough(sparsity_level, **arguments)


def SRSTE(sparsity_level: Level = None, *, decay: float = 2e-4, **arguments: Any) -> StraightThrough:
    """Train as `STE` does, with a decay of dropped weights, for N:M sparsity (SR-STE, arXiv 2102.04010).

    `sparsity_level` is the fraction dropped in each scope, 0.5 by default. Call `attach` with the optimizer, in whose
    steps `decay * weight` is added to gradients.

    >>> SRSTE(nnz=2, scope_shape=(1, 4)).decay
    0.0002
    """
    return StraightThrough(sparsity_level, decay=decay, **arguments)


def TopKAST(sparsity_level: Level = None, backward_level: float | None = None, **arguments: Any) -> StraightThrough:
    """Use fewer weights in the forward pass than get a gradient (Top-KAST, arXiv 2106.03517).

    The fraction `sparsity_level` of each scope is dropped in the forward pass, and the smaller fraction
    `backward_level` gets no gradient. By default, twice as many weights get a gradient as are kept; with a pattern or
    `nnz` in place of a level, `backward_level` must be given. It must not exceed a level that a scheduler sets.

    >>> TopKAST(0.75).backward_level
    0.5
    """
    if backward_level is None:
        if not is_number(sparsity_level):
            raise SparsityError(
                f"TopKAST: backward_level is needed where sparsity_level is no number, got {sparsity_level!r}; 0.5 for "
                "'1:4', for example, lets twice as many weights get a gradient as are kept"
            )
        backward_level = max(0.0, 2 * sparsity_level - 1)
    return StraightThrough(sparsity_level, backward_level=backward_level, **arguments)
