"""The masks that training starts with: budgets spread over components, places drawn or taken from saved masks.

Knows a plan, groups and the init; writes budgets into the groups, and changes no model. Places of weights without
memory (meta device) are drawn once they have it.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..distributed import placed_like
from ..errors import SparsityError
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.plan import Component
from .budgets import budget_rows, distribute, is_fixed, overall_level, refuse_uneven, set_budget, sizes, spread
from .inits import given_mask, memory_of, start_rows
from .settings import Settings
from .slots import Slots
from .trained import original

__all__ = ["component_masks", "refuse_means", "refuse_parametrized", "start_masks"]


def start_masks(
    components: Sequence[Component],
    groups: Sequence[TensorGroup],
    settings: Settings,
    sparsity_level: float,
) -> dict[str, Tensor]:
    """The initial mask of every group, {tensor_fqn: bool, beside its weight}; not of those drawn on the meta device.

    Args:
        components: of the plan of these groups.
        groups: open ones get their budgets written.
        settings: how to start.
        sparsity_level: the overall one, unless a target says otherwise.
    """
    open_ = [k for k, c in enumerate(components) if not is_fixed(c, groups)]
    _check_open(components, open_, settings)
    if settings.init.masks is None and open_:
        if settings.init.first_dense:
            _fix_dense(components[open_[0]], groups)
        for level in _extremes(settings):  # better now than in the middle of a run
            spread(components, distribute(components, groups, settings, level))
        level = overall_level(settings, sparsity_level, 0)
        for k, nnz in spread(components, distribute(components, groups, settings, level)).items():
            set_budget(components[k], groups, nnz)
    masks: dict[str, Tensor] = {}
    weights = [original(g).detach() for g in groups]
    for component in components:
        if settings.init.masks is not None or not any(weights[at].is_meta for _, at in component.leaves):
            masks.update(component_masks(component, groups, weights, settings))
    return masks


def component_masks(
    component: Component, groups: Sequence[TensorGroup], weights: Sequence[Tensor], settings: Settings
) -> Mapping[str, Tensor]:
    """The initial masks of one component's groups; see `start_masks`."""
    init, saved = settings.init, {}
    if init.masks is not None:
        saved = {spec: given_mask(groups[at], weights[at], init.masks) for spec, at in component.leaves}
    fresh = {spec: _keeping_all(weights[at]) for spec, at in component.leaves}
    device = next(iter(fresh.values())).device
    slots = Slots(component=component, weights=fresh, masks=saved, device=device, seed=settings.seed)
    rows = start_rows(slots, init, lambda: budget_rows(component, groups, {}))
    if init.masks is not None:
        _take_budget(component, groups, rows)
    slots.write(rows, fresh)
    return {groups[at]["tensor_fqn"]: _placed(fresh[spec], weights[at]) for spec, at in component.leaves}


def _keeping_all(weight: Tensor) -> Tensor:
    """A whole mask that lies in memory as the weight does."""
    mask = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.bool, device=memory_of(weight))
    return mask.fill_(True)


def _placed(mask: Tensor, weight: Tensor) -> Tensor:
    return mask if weight.is_meta else placed_like(mask, weight)


def _take_budget(component: Component, groups: Sequence[TensorGroup], rows: Tensor) -> None:
    """Saved masks bring their counts: an open component takes them over, a fixed one must agree."""
    found = rows.sum(1).cpu()
    if is_fixed(component, groups):
        if not torch.equal(found, budget_rows(component, groups, {})):
            raise SparsityError(
                f"{component.label}: the saved mask keeps {int(found.min())} .. {int(found.max())} blocks a scope, but "
                "its config entry has another budget; leave that out, or take another mask"
            )
    elif found.numel() and int(found.min()) != int(found.max()):
        raise SparsityError(
            f"{component.label}: scopes of the saved mask keep from {int(found.min())} to {int(found.max())} blocks, "
            "and every scope needs the same number; give the scope_shape that the mask was made with"
        )
    else:
        set_budget(component, groups, int(found[0]))


def _fix_dense(component: Component, groups: Sequence[TensorGroup]) -> None:
    set_budget(component, groups, component.scope.numblk_per_scope())
    for _, at in component.leaves:
        groups[at]["fixed"] = True


def refuse_means(groups: Sequence[TensorGroup]) -> None:
    """Raise where coupled tensors are to count the same however many elements they have."""
    for group in groups:
        if group["member_scores"] != "sum":
            raise SparsityError(
                f"{group['tensor_fqn']}: member_scores={group['member_scores']!r} is not for masks that move, whose "
                "rules score weights, gradients and momenta by norms of their own; leave it out"
            )


def refuse_parametrized(groups: Sequence[TensorGroup]) -> None:
    """Raise where something else than a parameter lies under the mask to be: it has no `.grad` to take."""
    for group in groups:
        if parametrize.is_parametrized(group["module"], group["tensor_name"]):
            raise SparsityError(
                f"{group['tensor_fqn']}: another parametrization makes this weight, so it has no gradient of its own "
                "to grow by. Remove that one first, or leave the tensor out."
            )


def _check_open(components: Sequence[Component], open_: Sequence[int], settings: Settings) -> None:
    asked = {
        "redistribute": settings.redistribute is not None,
        "target": settings.target is not None,
        "prune='global'": settings.prune.is_global,
    }
    for what, is_asked in asked.items():
        if is_asked and not open_:
            raise SparsityError(
                f"{what} moves budgets between tensors, but every tensor has one of its own; leave nnz and "
                "sparsity_level out of the entries that should share"
            )
    if settings.prune.is_global and settings.target and len({sizes(components)[k] for k in open_}) > 1:
        raise SparsityError(
            "prune='global' with a target counts blocks of all tensors together, so they need one size; use "
            "prune='magnitude'"
        )
    if settings.redistribute is not None:
        refuse_uneven([components[k] for k in open_])
        _refuse_without_exchange(components, open_)


def _refuse_without_exchange(components: Sequence[Component], open_: Sequence[int]) -> None:
    """Raise where no two tensors could ever pass blocks to each other, since every scope gets the same number."""
    units = [sizes(components)[k] * components[k].scope.numscp() for k in open_]
    rooms = [u * components[k].scope.numblk_per_scope() for k, u in zip(open_, units, strict=True)]
    pairs = [(a, b) for a in range(len(units)) for b in range(a)]
    if pairs and all(math.lcm(units[a], units[b]) > min(rooms[a], rooms[b]) for a, b in pairs):
        raise SparsityError(
            f"redistribute: {components[open_[0]].label} and the others have numbers of scopes and block sizes with no "
            f"common multiple that fits ({units} elements for one more block in every scope), so nothing could ever "
            "move; use redistribute=None, or other scopes"
        )


def _extremes(settings: Settings) -> tuple[float, ...]:
    """The lowest and highest overall sparsity that a target asks for, where the end is known."""
    if settings.target is None:
        return ()
    levels = [overall_level(settings, 0.0, t) for t in (0, *settings.due())]
    falls = [k for k in range(1, len(levels)) if levels[k] < levels[k - 1] - 1e-9]
    if settings.grow is None and falls:
        raise SparsityError(
            f"target: falls from {levels[falls[0] - 1]:g} to {levels[falls[0]]:g} at iteration "
            f"{settings.due()[falls[0] - 1]}, and grow=None never adds a block; give a growth rule or another target"
        )
    return () if settings.until is None else (min(levels), max(levels))
