"""One proximal step of a component: blocks are shrunk in the metric of an optimizer, by a strength or to a budget."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Newton, Scopes, block_scores, fill_mask, finished
from ..structure import BlockSpec, Budget, SparseBlock, block_windows, is_number, soft_threshold_windows
from .component import Component
from .optimizer_state import Diagonal

Strength = float | Callable[[int], float]
_NEWTON = Newton(eps=0.0, atol=1e-6, max_iter=50)  # of the kernels; plain torch takes as many steps as it needs


def proximal_step(
    component: Component,
    weights: Mapping[BlockSpec, Tensor],
    diagonals: Mapping[BlockSpec, Diagonal],
    masks: Mapping[BlockSpec, Tensor],
    *,
    strength: float | None,
    keep: Budget,
) -> None:
    """Shrink the blocks of a component in place, and fill masks with what is then not zero, also if it is interrupted.

    Args:
        component: over meta placeholders.
        weights, masks: of each leaf; bool masks of the weights' shapes.
        diagonals: the metric, of the weights' shapes, or numbers.
        strength: of the penalty; None for the strength that leaves `keep` blocks in every scope.
        keep: the budget.
    """
    numbers = set(diagonals.values()) if all(isinstance(d, float) for d in diagonals.values()) else set()
    common = numbers.pop() if len(numbers) == 1 else None
    tensors = {} if common is not None else {s: _as_tensor(d, weights[s]) for s, d in diagonals.items()}
    thresholds: Mapping[SparseBlock, Tensor | float]
    if strength is not None:
        t = strength if common is None else strength / common
        thresholds = {m.block: t for m in component.scope.members()}
    else:
        values = {s.view.param: w if common is not None else w * tensors[s] for s, w in weights.items()}
        thresholds = component.scope.keep_thresholds(keep, values)
        if any(w.dtype == torch.float16 for w in weights.values()):  # what is left must not be rounded to zero
            thresholds = {b: torch.where(t.isinf(), t, t * (1 - 2**-8)) for b, t in thresholds.items()}
    shrunk = {s: w.clone() for s, w in weights.items()}
    kept = {s: m.clone() for s, m in masks.items()}
    for member in component.scope.members():
        _shrink(member.block, thresholds[member.block], shrunk, tensors)
        _fill(member.block, shrunk, kept)

    def write() -> None:
        for spec, weight in weights.items():
            weight.copy_(shrunk[spec])
            masks[spec].copy_(kept[spec])

    finished(write)


def _as_tensor(diagonal: Diagonal, weight: Tensor) -> Tensor:
    if isinstance(diagonal, Tensor):
        return diagonal
    return torch.full_like(weight, diagonal, dtype=torch.promote_types(weight.dtype, torch.float32))


def _shrink(
    block: SparseBlock, t: Tensor | float, weights: Mapping[BlockSpec, Tensor], diagonals: Mapping[BlockSpec, Tensor]
) -> None:
    if isinstance(t, Tensor) and not bool(t.any()):
        return
    own = block.blocks()
    windows = block_windows(block, {s.view.param: weights[s] for s in own})
    if diagonals:
        given = block_windows(block, {s.view.param: diagonals[s] for s in own})
        windows = tuple(replace(m, mask=h.values) for m, h in zip(windows, given, strict=True))
    scopes = Scopes(members=windows, shape=(1,) * block.grid_ndim)
    soft_threshold_windows([scopes], t, newton=_NEWTON if diagonals else None, where=f"{block.name}: ")
    for spec, m in zip(own, windows, strict=True):
        if not spec.view.is_aligned(weights[spec]):
            spec.view.write_back(m.window, weights[spec])


def _fill(block: SparseBlock, weights: Mapping[BlockSpec, Tensor], masks: Mapping[BlockSpec, Tensor]) -> None:
    own = block.blocks()
    windows = block_windows(block, {s.view.param: weights[s] for s in own})
    kept = block_scores(windows, math.inf, ndim=block.grid_ndim, as_mean=False) != 0
    filled = block_windows(block, None, {s: masks[s] for s in own})
    fill_mask(filled, kept)
    for spec, m in zip(own, filled, strict=True):
        if not spec.view.is_aligned(masks[spec]):
            assert m.mask is not None
            spec.view.write_back(m.mask, masks[spec])


def checked_strength(given: Any, where: str, *, is_value: bool = False) -> Any:
    """A strength; raises unless it is a finite number >= 0, or a function (but as the value of one)."""
    if (callable(given) and not is_value) or (is_number(given) and 0 <= float(given) < math.inf):
        return given
    what = "a schedule must return a number" if is_value else "a number or a schedule"
    raise SparsityError(f"{where}strength must be >= 0 and finite, {what}, got {given!r}")
