"""Densities: how an overall budget is spread over tensors; shapes and numbers in, numbers out.

Knows no tensors' values and no masks. A distribution gives every tensor a density (the fraction kept); `allocate`
turns ideals into whole numbers that sum exactly.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence

from .errors import SparsityError

__all__ = ["Densities", "allocate", "erdos_renyi", "erdos_renyi_kernel", "power", "shares", "uniform"]

Shapes = Mapping[str, Sequence[int]]
Densities = Callable[[Shapes, float, Mapping[str, float]], dict[str, float]]


def uniform(shapes: Shapes, density: float, fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """The same density for every tensor that has none fixed.

    >>> uniform({"a": (4, 4), "b": (2, 8)}, 0.25, {"a": 0.5})
    {'a': 0.5, 'b': 0.0}
    """
    return _solve(shapes, density, fixed, lambda shape: 1.0)


def erdos_renyi(shapes: Shapes, density: float, fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """Density in proportion to (d0 + d1) / (d0 d1): more to small layers (SET, arXiv 1707.04780).

    Tensors whose density would exceed 1 become dense, and the others make up for it.
    """
    return power(shapes, density, fixed, kernel=False)


def erdos_renyi_kernel(shapes: Shapes, density: float, fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """Density in proportion to sum(shape) / prod(shape): kernel sizes count too (ERK of RigL, arXiv 1911.11134).

    >>> found = erdos_renyi_kernel({"1": (300, 784), "2": (100, 300), "3": (10, 100)}, 0.1)
    >>> {name: round(d, 5) for name, d in found.items()}
    {'1': 0.07957, '2': 0.23019, '3': 1.0}
    """
    return power(shapes, density, fixed)


def power(
    shapes: Shapes,
    density: float,
    fixed: Mapping[str, float] | None = None,
    *,
    exponent: float = 1.0,
    kernel: bool = True,
) -> dict[str, float]:
    """Density in proportion to a power of the Erdos-Renyi ratio: 0 is uniform, 1 is ER or ERK.

    Args:
        shapes: {name: shape} in elements, also of tensors that are cut into blocks: a layer's density does not depend
            on what it is pruned by.
        density: the fraction of all elements together that is kept, in [0, 1].
        fixed: {name: density} of tensors that keep their own; the others make up for them.
        exponent: of the ratio; at least 0.
        kernel: ratio sum(shape) / prod(shape), else that of the first two dimensions alone.

    Returns:
        {name: density in [0, 1]}, in the order of `shapes`; weighted by size they average to `density`.

    Raises:
        SparsityError: a density outside [0, 1], an unknown name, or a total that the fixed ones put out of reach.
    """
    if not exponent >= 0:
        raise SparsityError(f"power: exponent must be at least 0, got {exponent!r}")
    return _solve(shapes, density, fixed, lambda shape: _ratio(shape, kernel) ** exponent)


def shares(weights: Sequence[float], total: float, room: Sequence[float]) -> list[float]:
    """Split `total` in proportion to the weights, none getting more than its room (water-filling).

    What a full member cannot take goes to the others in proportion. Weights that are not finite count as 0; where
    only members of weight 0 are left, room is their weight.

    >>> shares([3.0, 1.0, 0.0], 8, [4, 8, 8])
    [4.0, 4.0, 0.0]
    """
    if total > sum(room) + 1e-6:
        raise SparsityError(f"shares: {total} to give, but there is room for {sum(room)}")
    clean = [w if math.isfinite(w) and w > 0 else 0.0 for w in weights]
    given = [0.0] * len(clean)
    left = float(total)
    while left > 1e-9:
        open_ = [k for k in range(len(clean)) if given[k] < room[k] and clean[k] > 0]
        if not open_:
            clean = [float(r - g) for r, g in zip(room, given, strict=True)]
            open_ = [k for k in range(len(clean)) if clean[k] > 0]
            if not open_:
                break
        whole = sum(clean[k] for k in open_)
        parts = {k: left * (clean[k] / whole) for k in open_}
        full = [k for k in open_ if given[k] + parts[k] >= room[k]]
        for k in full or open_:
            step = room[k] - given[k] if full else parts[k]
            given[k] += step
            left -= step
        if not full:
            break
    return given


def allocate(
    ideals: Sequence[float], total: int, low: Sequence[int], high: Sequence[int], unit: Sequence[int]
) -> list[int]:
    """Whole multiples of units nearest the ideals that sum to `total`: the largest remainder goes first.

    Args:
        ideals: what each member would get if it could be cut; they sum to about `total`.
        total: what the result sums to: exactly where all units are 1, else as near below as units allow.
        low, high: bounds of each member, themselves multiples of its unit.
        unit: each member is given whole multiples of this.

    Raises:
        SparsityError: the bounds leave `total` out of reach.

    >>> allocate([2.5, 1.7, 0.8], 5, [0, 0, 0], [9, 9, 9], [1, 1, 1])
    [2, 2, 1]
    """
    if not sum(low) <= total <= sum(high):
        raise SparsityError(f"a budget of {total} is out of reach; the tensors hold {sum(low)} .. {sum(high)}")
    near = _feasible(ideals, total, low, high)
    out = [math.floor(x / u + 1e-9) * u for x, u in zip(near, unit, strict=True)]
    while True:
        short = total - sum(out)
        fits = [k for k, n in enumerate(out) if n + unit[k] <= min(high[k], n + short)]
        if not fits:
            return out
        best = max(fits, key=lambda k: (round((near[k] - out[k]) / unit[k], 9), -k))
        out[best] += unit[best]


def _feasible(ideals: Sequence[float], total: int, low: Sequence[int], high: Sequence[int]) -> list[float]:
    """The ideals inside their bounds, with what that adds or takes made up for by the others in proportion."""
    near = [float(min(max(x, a), b)) for x, a, b in zip(ideals, low, high, strict=True)]
    extra = sum(near) - total
    room = [x - a if extra > 0 else b - x for x, a, b in zip(near, low, high, strict=True)]
    moved = shares(near, min(abs(extra), sum(room)), room)
    return [x - m if extra > 0 else x + m for x, m in zip(near, moved, strict=True)]


def _ratio(shape: Sequence[int], kernel: bool) -> float:
    sizes = tuple(shape) if kernel or len(shape) < 2 else tuple(shape[:2])
    sizes = sizes if len(sizes) > 1 else (*sizes, 1)
    return sum(sizes) / max(math.prod(sizes), 1)


def _solve(
    shapes: Shapes, density: float, fixed: Mapping[str, float] | None, raw: Callable[[Sequence[int]], float]
) -> dict[str, float]:
    """Scale the raw densities of the open tensors so that all together keep `density`."""
    fixed = fixed or {}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    _check(sizes, density, fixed)
    wanted = density * sum(sizes.values()) - sum(fixed[n] * sizes[n] for n in fixed)
    found = dict(fixed)
    ratios = {name: raw(shape) for name, shape in shapes.items() if name not in fixed}
    while True:
        left = [n for n in ratios if n not in found]
        weight = sum(ratios[n] * sizes[n] for n in left)
        scale = (wanted - sum(sizes[n] for n in ratios if n in found)) / weight if weight else 0.0
        dense = [n for n in left if scale * ratios[n] > 1]
        found.update(dict.fromkeys(dense, 1.0))
        if not dense:
            found.update({n: max(scale * ratios[n], 0.0) for n in left})
            return {name: found[name] for name in shapes}


def _check(sizes: Mapping[str, int], density: float, fixed: Mapping[str, float]) -> None:
    for name, value in {"the overall density": density, **fixed}.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
            raise SparsityError(f"{name}: a density must lie in [0, 1], got {value!r}")
    unknown = sorted(set(fixed) - set(sizes))
    if unknown:
        raise SparsityError(f"fixed names {unknown[0]!r}, which is not among the tensors {sorted(sizes)}")
    total = sum(sizes.values())
    if not total:
        raise SparsityError("densities need tensors that have elements")
    taken = sum(fixed[n] * sizes[n] for n in fixed)
    spare = sum(n for name, n in sizes.items() if name not in fixed)
    low, high = taken / total, (taken + spare) / total
    if not low - 1e-9 <= density <= high + 1e-9:
        raise SparsityError(
            f"an overall density of {density:g} is out of reach: with the fixed tensors it lies in "
            f"[{low:g}, {high:g}]. Change the level, or fix less."
        )
