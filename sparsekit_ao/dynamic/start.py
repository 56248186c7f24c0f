"""The start of training: initial budgets and masks, and masks that have to wait until weights have memory.

Takes a plan, its groups and the settings; writes budgets into the groups, and returns masks by tensor name. Weights on
the meta device get their masks later, in `finish_start`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..distributed import full_tensor, placed_like
from ..errors import SparsityError
from ..selection import keep_mask
from ..sparsifiers.component import Component
from ..sparsifiers.config import TensorGroup
from ..structure import BlockSpec
from .apply import zero_dropped, zero_dropped_state
from .budgets import Budgets, overall_level
from .inits import Init
from .mask import find_dynamic
from .optimizers import check_optimizers, original
from .settings import Settings
from .slots import Slots


def start_masks(
    components: Sequence[Component], groups: Sequence[TensorGroup], settings: Settings, sparsity_level: float
) -> dict[str, Tensor]:
    """The initial mask of every group, {tensor_fqn: bool, sharded as its weight}; none for weights on the meta device.

    Writes the budgets of the groups that share the overall one, `sparsity_level` unless there is a target.
    """
    budgets = Budgets(components=components, groups=groups, settings=settings)
    _check_shared(budgets)
    if settings.init.masks is None and budgets.shared:
        if settings.init.first_dense:
            first = budgets.components[budgets.shared[0]]
            budgets.set(budgets.shared[0], first.scope.numblk_per_scope())
            for _, at in first.leaves:
                groups[at]["fixed"] = True
        for level in _extremes(settings):  # raise now rather than in the middle of a run
            budgets.counts(level)
        for k, nnz in budgets.counts(overall_level(settings, sparsity_level, 0)).items():
            budgets.set(k, nnz)
    masks: dict[str, Tensor] = {}
    weights = [original(g).detach() for g in groups]
    for k, component in enumerate(components):
        if settings.init.masks is not None or not any(weights[at].is_meta for _, at in component.leaves):
            masks.update(_component_masks(budgets, k, weights))
    return masks


def finish_start(
    components: Sequence[Component],
    groups: Sequence[TensorGroup],
    optimizers: Sequence[Optimizer],
    settings: Settings,
    masks: Mapping[str, Tensor],
) -> None:
    """Check the optimizers, if any, and initialize masks of weights that were on the meta device in `start_masks`.

    If it raises (an optimizer does not fit, or a weight is still on the meta device), nothing is changed.
    """
    if optimizers:
        check_optimizers(optimizers, groups, settings)
    waiting = [g for g in groups if not find_dynamic(g["module"], g["tensor_name"]).is_initialized]
    refuse_meta(waiting, "Call to_empty and initialize the weights first, then attach(optimizer).")
    budgets = Budgets(components=components, groups=groups, settings=settings)
    weights = [original(g).detach() for g in groups]
    for k, component in enumerate(components):
        own = [g for _, at in component.leaves if (g := groups[at]) in waiting]
        is_known = all(g["tensor_fqn"] in masks for g in own)
        found = masks if is_known else _component_masks(budgets, k, weights)
        for g in own:
            find_dynamic(g["module"], g["tensor_name"]).initialize(found[g["tensor_fqn"]])
    zero_dropped(waiting)
    zero_dropped_state(waiting, optimizers)


def mark_initialized(groups: Sequence[TensorGroup]) -> None:
    """Masks that were loaded are initialized, if they had memory to be loaded into."""
    for group in groups:
        found = find_dynamic(group["module"], group["tensor_name"])
        found.is_initialized |= not found.mask.is_meta


def _component_masks(budgets: Budgets, k: int, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """The initial masks of one component's groups; see `start_masks`."""
    component, groups, init, saved = budgets.components[k], budgets.groups, budgets.settings.init, {}
    if init.masks is not None:
        saved = {spec: _saved(groups[at], weights[at], init.masks) for spec, at in component.leaves}
    fresh = {spec: _full_mask(weights[at]) for spec, at in component.leaves}
    device = next(iter(fresh.values())).device
    slots = Slots(
        component=component,
        weights=fresh,
        masks={s: t != 0 for s, t in saved.items()},
        device=device,
        seed=budgets.settings.seed,
    )
    if init.masks is None:
        rows = keep_mask(slots.random("init"), budgets.rows(k, {}), candidates=slots.real)
    else:
        rows = _saved_rows(slots, init, {spec for spec, t in saved.items() if not _is_weight(t)})
        _take_budget(budgets, k, rows)
    slots.write(rows, fresh)
    return {
        groups[at]["tensor_fqn"]: fresh[spec] if weights[at].is_meta else placed_like(fresh[spec], weights[at])
        for spec, at in component.leaves
    }


def _saved(group: TensorGroup, weight: Tensor, masks: Mapping[str, Any]) -> Tensor:
    """The saved mask of one tensor, or the weight whose zeros are the mask; an empty mapping means its own weight."""
    fqn = group["tensor_fqn"]
    prefix = f"{group['module_fqn']}." if group["module_fqn"] else ""
    state = masks.get("state", {})
    found = state.get(fqn, {}).get("mask") if isinstance(state, Mapping) else None
    for key in (f"{prefix}parametrizations.{group['tensor_name']}.0.mask", fqn):
        found = masks.get(key) if found is None else found
    if not masks:
        refuse_meta([group], "It has no zeros to resume from; pass saved masks to resume, or load the weights first.")
        found = weight
    if not isinstance(found, Tensor):
        raise SparsityError(f"{fqn}: the saved masks have no mask of it; they have {sorted(map(str, masks))[:5]}")
    if found.shape != weight.shape:
        raise SparsityError(f"{fqn}: the saved mask is {tuple(found.shape)}, the weight {tuple(weight.shape)}")
    return full_tensor(found).to("cpu" if weight.is_meta else weight.device)


def _is_weight(found: Tensor) -> bool:
    return found.is_floating_point() and bool(((found != 0) & (found != 1)).any())


def _saved_rows(slots: Slots, init: Init, masks: Collection[BlockSpec]) -> Tensor:
    """The slots that the saved masks keep, or with `shuffle` as many drawn ones; bool rows.

    Raises where one of `masks` keeps a part of a block; the others are weights, where single zeros are no pruning.
    """
    kept = slots.active
    rebuilt = {spec: mask.clone() for spec, mask in slots.masks.items()}
    slots.write(kept, rebuilt)
    broken = [spec.name for spec in masks if not torch.equal(rebuilt[spec], slots.masks[spec])]
    if broken:
        raise SparsityError(
            f"{broken[0]}: the saved mask keeps parts of blocks; give the block_shape that it was made with"
        )
    return keep_mask(slots.random("shuffle"), kept.sum(1), candidates=slots.real) if init.shuffle else kept


def _full_mask(weight: Tensor) -> Tensor:
    """A mask that keeps everything, not sharded, with the strides of the weight; on the CPU for the meta device."""
    device = "cpu" if weight.is_meta else weight.device
    return torch.empty_strided(weight.shape, weight.stride(), dtype=torch.bool, device=device).fill_(True)


def _take_budget(budgets: Budgets, k: int, rows: Tensor) -> None:
    """Saved masks define the budget of a component that shares one; a fixed budget must agree with them."""
    label, found = budgets.components[k].label, rows.sum(1).cpu()
    if k not in budgets.shared:
        if not torch.equal(found, budgets.rows(k, {})):
            raise SparsityError(
                f"{label}: the saved mask keeps {int(found.min())} .. {int(found.max())} blocks a scope, but its "
                "config entry has another budget; leave that out, or take another mask"
            )
    elif found.numel() and int(found.min()) != int(found.max()):
        raise SparsityError(
            f"{label}: scopes of the saved mask keep from {int(found.min())} to {int(found.max())} blocks, and every "
            "scope needs the same number; give the scope_shape that the mask was made with"
        )
    else:
        budgets.set(k, int(found[0]))


def refuse_meta(groups: Sequence[TensorGroup], advice: str) -> None:
    """Raise where a weight is on the meta device."""
    for group in groups:
        if original(group).is_meta:
            raise SparsityError(f"{group['tensor_fqn']}: it is on the meta device. {advice}")


def refuse_parametrized(groups: Sequence[TensorGroup]) -> None:
    """Raise where a weight is computed by another parametrization: it has no `.grad` to capture."""
    for group in groups:
        if parametrize.is_parametrized(group["module"], group["tensor_name"]):
            raise SparsityError(
                f"{group['tensor_fqn']}: another parametrization computes this weight, so it has no gradient of its "
                "own to grow by. Remove that one first, or leave the tensor out."
            )


def _check_shared(budgets: Budgets) -> None:
    """Raise where a setting that moves budgets between tensors cannot."""
    settings, shared = budgets.settings, budgets.shared
    given = {"redistribute": settings.redistribute, "target": settings.target}
    moving = [name for name, value in given.items() if value is not None]
    moving += ["prune='global'"] if settings.prune.is_global else []
    if moving and not shared:
        raise SparsityError(
            f"{moving[0]} moves budgets between tensors, but every tensor has one of its own; leave nnz and "
            "sparsity_level out of the entries that should share"
        )
    if settings.prune.is_global and settings.target and len({budgets.sizes[k] for k in shared}) > 1:
        raise SparsityError(
            "prune='global' with a target counts blocks of all tensors together, so they need one size; use "
            "prune='magnitude'"
        )
    if settings.redistribute is not None:
        budgets.refuse_uneven_scopes()
        _refuse_without_exchange(budgets)


def _refuse_without_exchange(budgets: Budgets) -> None:
    """Raise where no two tensors could ever exchange blocks, since every scope gets the same number."""
    shared = budgets.shared
    units, capacity = [budgets.units[k] for k in shared], [budgets.capacities[k] for k in shared]
    pairs = [(a, b) for a in range(len(units)) for b in range(a)]
    if pairs and all(math.lcm(units[a], units[b]) > min(capacity[a], capacity[b]) for a, b in pairs):
        raise SparsityError(
            f"redistribute: {budgets.components[shared[0]].label} and the others have numbers of scopes and block "
            f"sizes with no common multiple that fits ({units} elements for one more block in every scope), so no "
            "block could ever move; use redistribute=None, or other scopes"
        )


def _extremes(settings: Settings) -> tuple[float, ...]:
    """The lowest and highest overall sparsity of a target, where the end is known."""
    if settings.target is None:
        return ()
    levels = [overall_level(settings, 0.0, t) for t in (0, *settings.due())]
    falls = [k for k in range(1, len(levels)) if levels[k] < levels[k - 1] - 1e-9]
    if settings.grow is None and falls:
        raise SparsityError(
            f"target: falls from {levels[falls[0] - 1]:g} to {levels[falls[0]]:g} at iteration "
            f"{settings.due()[falls[0] - 1]}, and grow=None never adds a block; pass a growth rule or another target"
        )
    return () if settings.until is None else (min(levels), max(levels))
