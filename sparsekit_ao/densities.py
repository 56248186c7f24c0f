"""Densities: functions that distribute an overall budget over tensors by their shapes.

Each function returns the density of every tensor, which is the fraction of its elements that is kept. `power` describes
their arguments. `allocate` rounds ideal numbers of kept elements to integers with an exact sum.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from .errors import SparsityError, is_number

__all__ = ["Densities", "allocate", "erdos_renyi", "erdos_renyi_kernel", "power", "shares", "uniform"]

Shapes = Mapping[str, Sequence[int]]
Densities = Callable[[Shapes, float, Mapping[str, float]], dict[str, float]]


def uniform(shapes: Shapes, density: float, fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the same density for every tensor that has no fixed one.

    >>> uniform({"a": (4, 4), "b": (2, 8)}, 0.25, {"a": 0.5})
    {'a': 0.5, 'b': 0.0}
    """
    return power(shapes, density, fixed, exponent=0)


def erdos_renyi(shapes: Shapes, density: float, fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return densities in proportion to (d0 + d1) / (d0 d1), higher for small layers (SET, arXiv 1707.04780).

    Tensors whose density would exceed 1 become dense, and the others are scaled to keep the overall density.

    >>> densities = erdos_renyi({"wide": (100, 100), "narrow": (10, 10)}, 0.1)
    >>> {name: round(d, 5) for name, d in densities.items()}
    {'wide': 0.09182, 'narrow': 0.91818}
    """
    return power(shapes, density, fixed, kernel=False)


def erdos_renyi_kernel(shapes: Shapes, density: float, fixed: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return densities in proportion to sum(shape) / prod(shape), so kernel sizes count (ERK, arXiv 1911.11134).

    >>> densities = erdos_renyi_kernel({"1": (300, 784), "2": (100, 300), "3": (10, 100)}, 0.1)
    >>> {name: round(d, 5) for name, d in densities.items()}
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
    """Return densities in proportion to a power of the Erdos-Renyi ratio.

    Args:
        shapes: {name: shape of the tensor}, in elements even if the tensor is pruned in blocks, so that a layer's
            density does not depend on its block shape.
        density: The fraction of the elements of all tensors together that is kept, in [0, 1].
        fixed: {name: density} for tensors with a density of their own. The others are scaled to keep the overall one.
        exponent: The exponent of the ratio, at least 0: 0 gives uniform densities, 1 (default) gives ER or ERK.
        kernel: If True (default), the ratio is sum(shape) / prod(shape), as in ERK; if False, only of two dimensions
            (ER).

    Returns:
        {name: density in [0, 1]}, in the order of `shapes`; weighted by size they average to `density`.

    Raises:
        SparsityError: A density is outside [0, 1], a name is unknown, or fixed densities contradict the overall one.

    >>> densities = power({"wide": (100, 100), "narrow": (10, 10)}, 0.1, exponent=0.5)
    >>> {name: round(d, 3) for name, d in densities.items()}
    {'wide': 0.098, 'narrow': 0.31}
    """
    if not exponent >= 0:
        raise SparsityError(f"power: exponent must be at least 0, got {exponent!r}")
    fixed = fixed or {}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    _check(sizes, density, fixed)
    wanted = density * sum(sizes.values()) - sum(fixed[n] * sizes[n] for n in fixed)
    densities, ratios = dict(fixed), {}
    for name, shape in shapes.items():
        if name not in fixed:
            lengths = (*(shape if kernel else shape[:2]), *([1] * (len(shape) < 2)))
            ratios[name] = (sum(lengths) / max(math.prod(lengths), 1)) ** exponent
    while True:
        sparse = [n for n in ratios if n not in densities]
        weight = sum(ratios[n] * sizes[n] for n in sparse)
        scale = (wanted - sum(sizes[n] for n in ratios if n in densities)) / weight if weight else 0.0
        dense = [n for n in sparse if scale * ratios[n] > 1]
        densities.update(dict.fromkeys(dense, 1.0))
        if not dense:
            densities.update({n: max(scale * ratios[n], 0.0) for n in sparse})
            return {name: densities[name] for name in shapes}


def shares(weights: Sequence[float], total: float, capacity: Sequence[float]) -> list[float]:
    """Split `total` in proportion to the weights, but none above its capacity (water-filling).

    What exceeds a capacity is split among the others in proportion. Weights that are not finite count as 0; where
    only members of weight 0 are left, the remaining capacities are their weights.

    >>> shares([3.0, 1.0, 0.0], 8, [4, 8, 8])
    [4.0, 4.0, 0.0]
    """
    if total > sum(capacity) + 1e-6:
        raise SparsityError(f"shares: a total of {total} exceeds the sum of capacities, {sum(capacity)}")
    clean = [w if math.isfinite(w) and w > 0 else 0.0 for w in weights]
    amounts, remaining = [0.0] * len(clean), float(total)
    while remaining > 1e-9:
        if not any(a < c and w > 0 for a, c, w in zip(amounts, capacity, clean, strict=True)):
            clean = [float(c - a) for c, a in zip(capacity, amounts, strict=True)]
        open_ = [k for k, w in enumerate(clean) if w > 0 and amounts[k] < capacity[k]]
        whole = sum(clean[k] for k in open_)
        parts = {k: remaining * (clean[k] / whole) for k in open_}
        full = [k for k in open_ if amounts[k] + parts[k] >= capacity[k]]
        for k in full or open_:
            step = capacity[k] - amounts[k] if full else parts[k]
            amounts[k] += step
            remaining -= step
        if not full:
            break
    return amounts


def allocate(
    ideals: Sequence[float], total: int, low: Sequence[int], high: Sequence[int], unit: Sequence[int]
) -> list[int]:
    """Round real numbers to integers whose sum is `total`: first down, then up those of the largest remainders.

    Args:
        ideals: Real numbers whose sum is about `total`.
        total: The sum of the result: exactly if all units are 1, else at most and as near as units allow.
        low, high: Bounds of each number, themselves multiples of its unit.
        unit: Each number is a multiple of this.

    Raises:
        SparsityError: The bounds do not allow `total`.

    >>> allocate([2.5, 1.7, 0.8], 5, [0, 0, 0], [9, 9, 9], [1, 1, 1])
    [2, 2, 1]
    """
    if not sum(low) <= total <= sum(high):
        raise SparsityError(f"a budget of {total} is not possible; the tensors allow {sum(low)} to {sum(high)}")
    near = [float(min(max(x, a), b)) for x, a, b in zip(ideals, low, high, strict=True)]
    extra = sum(near) - total  # is taken from the others, or given to them, in proportion to what their bounds leave
    capacity = [x - a if extra > 0 else b - x for x, a, b in zip(near, low, high, strict=True)]
    moved = shares(near, min(abs(extra), sum(capacity)), capacity)
    near = [x - m if extra > 0 else x + m for x, m in zip(near, moved, strict=True)]
    out = [math.floor(x / u + 1e-9) * u for x, u in zip(near, unit, strict=True)]
    short = total - sum(out)
    waiting = [(-round((near[k] - out[k]) / unit[k], 9), k) for k in range(len(out))]  # the largest remainder first
    heapq.heapify(waiting)
    while waiting:
        k = heapq.heappop(waiting)[1]
        if unit[k] <= short and out[k] + unit[k] <= high[k]:  # else it cannot take more later either
            out[k] += unit[k]
            short -= unit[k]
            heapq.heappush(waiting, (-round((near[k] - out[k]) / unit[k], 9), k))
    return out


def _check(sizes: Mapping[str, int], density: float, fixed: Mapping[str, float]) -> None:
    for name, value in {"the overall density": density, **fixed}.items():
        if not is_number(value) or not 0 <= float(value) <= 1:
            raise SparsityError(f"{name}: a density must be in [0, 1], got {value!r}")
    if unknown := sorted(set(fixed) - set(sizes)):
        raise SparsityError(f"unknown tensor {unknown[0]!r} in fixed; the tensors are {sorted(sizes)}")
    total = sum(sizes.values())
    if not total:
        raise SparsityError("densities need tensors with elements, got none")
    taken = sum(fixed[n] * sizes[n] for n in fixed)
    spare = sum(n for name, n in sizes.items() if name not in fixed)
    low, high = taken / total, (taken + spare) / total
    if not low - 1e-9 <= density <= high + 1e-9:
        raise SparsityError(
            f"an overall density of {density:g} is not possible: with the fixed tensors it must be in "
            f"[{low:g}, {high:g}]. Change the level, or fix fewer tensors."
        )
