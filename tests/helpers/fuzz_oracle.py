"""The oracle of `fuzz.py`: every element is labelled with its block and scope, and blocks are ranked one by one.

It uses no code of the library, only docs/concepts.md: an element's block is floor(i / b) of its window index i, a
block's scope floor(k / g) of its grid index k. Values are small integers times powers of two, so that sums are exact;
scores are computed with the largest element scaled to one, so that nothing overflows.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Stage:
    """One stage of one tensor.

    Attributes:
        keys: the config keys that specify it.
        view: a function of a tensor, (shape, stride, offset) on the row-major layout, or None.
        block, scope: shapes; -1 is the whole dimension, () and missing scope entries too.
        norm: 1, 2 or inf; None where `score` gives saliencies.
        score: a function of (weight, name), or None.
        budget: ("nnz", n) or ("level", s) of its own, or None for the tensor's.
        together: name of the block coupling, with `order`.
        order: permutes the block grid onto that of the coupling's first member.
        shares: name of the scope coupling.
    """

    keys: dict
    view: Any = None
    block: tuple = ()
    scope: tuple = ()
    norm: float | None = 2
    score: Any = None
    budget: tuple | None = None
    together: str | None = None
    order: tuple | None = None
    shares: str | None = None


@dataclass
class Sparse:
    """A tensor with its stages and budget: `level`, or `nnz` as long as `level` is None."""

    fqn: str
    shape: tuple
    stages: list
    level: float | None = 0.5
    nnz: int | None = None
    labels: dict = field(default_factory=dict)

    def blocks(self, at):
        """The blocks of a stage, as {grid index: flat indices of its elements}, and the grid."""
        if at not in self.labels:
            self.labels[at] = label(self.stages[at], self.shape)
        return self.labels[at]


def label(stage, shape):
    window = window_of(stage.view, shape)
    block = resolve(stage.block or (1,) * window.ndim, window.shape)
    found = defaultdict(list)
    for at in np.ndindex(*window.shape):
        found[tuple(i // b for i, b in zip(at, block, strict=True))].append(int(window[at]))
    grid = tuple(-(-n // b) for n, b in zip(window.shape, block, strict=True))
    return dict(found), grid, any(n % b for n, b in zip(window.shape, block, strict=True))


def window_of(view, shape):
    """The window as an array of flat (row-major) indices of the tensor."""
    if isinstance(view, tuple):
        size, stride, *offset = view
        steps = np.indices(size).reshape(len(size), math.prod(size)).T @ np.array(stride, dtype=np.int64).reshape(-1)
        return (steps + sum(offset)).reshape(size)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return (numbers if view is None else view(numbers)).numpy()


def resolve(tile, sizes):
    full = (*tile, *(-1,) * (len(sizes) - len(tile)))
    return tuple(max(n, 1) if t == -1 else t for n, t in zip(sizes, full, strict=True))


def components(tensors, at):
    """Lists of units that share budgets in a stage; a unit is the list of tensors whose blocks go together."""
    units, shared = {}, {}
    for t, tensor in enumerate(tensors):
        if at < len(tensor.stages):
            units.setdefault(tensor.stages[at].together or t, []).append(t)
    for members in units.values():
        shared.setdefault(tensors[members[0]].stages[at].shares or members[0], []).append(members)
    return list(shared.values())


def connected(tensors, start):
    """The tensors that are coupled to one, in any stage, by way of others too."""
    found = {start}
    stages = range(max(len(t.stages) for t in tensors))
    sets = [{t for unit in c for t in unit} for at in stages for c in components(tensors, at)]
    while more := [s for s in sets if s & found and not s <= found]:
        found.update(*more)
    return found


def masks_of(tensors, weights, before, only=None):
    """The masks after a step, as flat lists of bools.

    Args:
        tensors: the `Sparse` of each weight.
        weights: dense, as they are now.
        before: masks, flat; returned for tensors that are not in `only`.
        only: indices of the tensors that are updated; all by default.
    """
    only = range(len(tensors)) if only is None else only
    masks = [[True] * len(old) if t in only else list(old) for t, old in enumerate(before)]
    for at in range(max(len(t.stages) for t in tensors)):
        for units in components(tensors, at):
            if all(t in only for unit in units for t in unit):
                update(tensors, weights, masks, at, units)
    return masks


def update(tensors, weights, masks, at, units):
    scopes = competitors(tensors, at, units)
    values = {t: saliency(tensors[t], weights[t], at) for unit in units for t in unit}
    is_mean = any(tensors[t].blocks(at)[2] for unit in units for t in unit)
    for blocks in scopes.values():
        ranked = []
        for unit, slot, parts in blocks:
            held = [masks[t][e] for t, elements in parts for e in elements]
            if at and not any(held):
                continue
            x = [values[t][0][e] for t, elements in parts for e in elements]
            x = [v if h or not at else 0.0 for v, h in zip(x, held, strict=True)]
            wide = np.float64 if any(values[t][1] for t, _ in parts) else np.float32
            score = block_score(x, tensors[units[0][0]].stages[at].norm, is_mean, wide)
            ranked.append(((0, 0.0) if math.isnan(score) else (1, -score), unit, slot, parts))
        ranked.sort(key=lambda r: r[:3])
        for place, (*_, parts) in enumerate(ranked):
            for t, elements in parts if place >= budget(tensors[units[0][0]], at, len(blocks)) else ():
                for e in elements:
                    masks[t][e] = False


def competitors(tensors, at, units):
    """{scope index: [(unit, slot, [(tensor, elements)])]}: the blocks of every scope, in the order of ties."""
    scopes = defaultdict(list)
    for number, unit in enumerate(units):
        ndim = max(len(tensors[t].blocks(at)[1]) for t in unit)
        blocks = defaultdict(list)
        for t in unit:
            own, grid, _ = tensors[t].blocks(at)
            order = tensors[t].stages[at].order or ()
            order = (*order, *range(len(order), ndim))
            for index, elements in own.items():
                full = (*index, *(0,) * (ndim - len(grid)))
                blocks[tuple(full[k] for k in order)].append((t, elements))
        first = unit[0]
        grid = (*tensors[first].blocks(at)[1], *(1,) * ndim)[:ndim]
        tile = resolve(tensors[first].stages[at].scope, grid)
        for index in sorted(blocks):
            slot = 0
            for k, n in zip(index, tile, strict=True):
                slot = slot * n + k % n
            place = [k // n for k, n in zip(index, tile, strict=True)]
            while place and not place[-1]:
                place.pop()
            scopes[tuple(place)].append((number, slot, blocks[index]))
    return scopes


def saliency(tensor, weight, at):
    """The scored values of a tensor as a flat list of floats, and whether they are float64."""
    score = tensor.stages[at].score
    found = weight if score is None else score(weight, tensor.fqn)
    return found.double().reshape(-1).tolist(), found.dtype == torch.float64


def block_score(x, norm, is_mean, wide):
    """The norm of a block's values, or their sum; with `is_mean` the power mean, or mean; rounded to `wide`."""
    if any(map(math.isnan, x)) or (norm is None and math.inf in x and -math.inf in x):
        return math.nan
    x = x if norm is None else [abs(v) for v in x]
    if len(x) == 1 and not is_mean:
        return x[0]
    if any(map(math.isinf, x)):
        return next(v for v in x if math.isinf(v))
    if norm == math.inf:
        return max(x)
    exponent = math.frexp(max(map(abs, x)))[1]
    scaled = [math.ldexp(v, -exponent) for v in x]
    with np.errstate(all="ignore"):
        total = wide(math.fsum(v * v if norm == 2 else v for v in scaled))
        total = wide(total / wide(len(x))) if is_mean else total
        total = wide(math.sqrt(total)) if norm == 2 else total
        return float(np.ldexp(total, exponent))


def budget(tensor, at, blocks):
    """How many of the blocks of a scope are kept."""
    what, number = tensor.stages[at].budget or (
        ("nnz", tensor.nnz) if tensor.level is None else ("level", tensor.level)
    )
    return min(number, blocks) if what == "nnz" else blocks - math.floor(number * blocks + 1e-9)
