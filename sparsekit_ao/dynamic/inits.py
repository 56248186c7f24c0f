"""How masks start: an `Init` distributes the overall budget over tensors, or loads saved masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import densities
from ..densities import Densities
from ..distributed import full_tensor, placed_like
from ..errors import SparsityError
from ..selection import keep_mask
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.optimizer_state import original
from .budgets import Budgets
from .criteria import Slots
from .dynamic_mask import mask_of

__all__ = ["INITS", "Init", "lottery_ticket", "parse_init", "random_blocks", "resume"]

_DENSITIES: dict[str, Densities] = {
    "uniform": densities.uniform,
    "er": densities.erdos_renyi,
    "erk": densities.erdos_renyi_kernel,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Init:
    """How the masks of a `DynamicSparsifier` start.

    Attributes:
        name: Used in messages.
        densities: A function (shapes, overall density, fixed densities) -> densities; see the module `densities`.
        masks: Saved masks, or a checkpoint that contains them. An empty mapping means the zeros of the model's weights,
            and None that kept blocks are drawn at random.
        shuffle: If True, take only the number of kept blocks from the saved masks, and draw which ones at random.
        first_dense: If True, the first tensor without a budget of its own stays dense, and the others keep fewer.
    """

    name: str
    densities: Densities | None = None
    masks: Mapping[str, Any] | None = None
    shuffle: bool = False
    first_dense: bool = False


def random_blocks(distribution: str | Densities = "uniform", *, first_dense: bool = False) -> Init:
    """Start with an exact number of random blocks; with `first_dense`, the first tensor stays dense.

    `distribution` says how the budget is divided among tensors: "uniform" (default), "er", "erk" or a function such as
    `densities.power`.
    """
    if isinstance(distribution, str) and distribution not in _DENSITIES:
        names = ", ".join(_DENSITIES)
        raise SparsityError(f"random_blocks: distribution must be one of {names}, or a function, got {distribution!r}")
    function = _DENSITIES[distribution] if isinstance(distribution, str) else distribution
    return Init(name="random_blocks", densities=function, first_dense=first_dense)


def lottery_ticket(masks: Mapping[str, Any], *, shuffle: bool = False) -> Init:
    """Start with the masks of an earlier run (arXiv 1803.03635).

    `masks` is a dict {tensor_fqn: mask, or weight whose zeros are the mask}, a sparsifier's `state_dict()`, or the
    `state_dict()` of a prepared model. With `shuffle`, blocks are drawn at random, as many in each scope as the masks
    keep.
    """
    if not isinstance(masks, Mapping) or not masks:
        raise SparsityError(f"lottery_ticket needs a non-empty mapping of masks, got {type(masks).__name__}")
    return Init(name="lottery_ticket", masks=masks, shuffle=shuffle)


def resume(masks: Mapping[str, Any] | None = None) -> Init:
    """Start with the zeros that the model's weights have, or with saved masks as in `lottery_ticket`."""
    if masks is not None and not isinstance(masks, Mapping):
        raise SparsityError(f"resume: masks must be a dict of names and masks, got {masks!r}")
    return Init(name="resume", masks={} if masks is None else masks)


#: starts by name, for the argument `init` of `DynamicSparsifier`
INITS = {"random": random_blocks(), **{name: random_blocks(name) for name in _DENSITIES}, "resume": resume()}


def parse_init(init: object) -> Init:
    """Return an init from a name, an `Init`, or a function that distributes densities."""
    if isinstance(init, Init):
        return init
    if isinstance(init, str) and init in INITS:
        return INITS[init]
    if callable(init):
        return random_blocks(init)
    raise SparsityError(
        f"init must be one of {', '.join(map(repr, INITS))}, an Init or a function of densities, got {init!r}"
    )


def initial_masks(
    budgets: Budgets, init: Init, sparsity_level: float, later_levels: Sequence[float], seed: int
) -> dict[str, Tensor]:
    """Return {tensor_fqn: initial mask, bool and sharded as its weight}, and set the shared budgets in the groups."""
    if init.masks is None and budgets.shared:
        if init.first_dense:
            first = budgets.pruning_groups[budgets.shared[0]]
            budgets.set(budgets.shared[0], first.scope.numblk_per_scope())
            for name in first.specs:
                budgets.groups[name]["fixed"] = True
        for level in later_levels:
            budgets.counts(level)  # an error that training would reach is raised now, not in the middle of a run
        for k, nnz in budgets.counts(sparsity_level).items():
            budgets.set(k, nnz)
    masks: dict[str, Tensor] = {}
    for k, pruning in enumerate(budgets.pruning_groups):
        is_meta = any(original(budgets.groups[name]).is_meta for name in pruning.specs)
        # Weights on the meta device get no masks yet, unless they are saved ones.
        if init.masks is not None or not is_meta:
            masks.update(group_masks(budgets, k, init, seed))
    return masks


def group_masks(budgets: Budgets, k: int, init: Init, seed: int) -> dict[str, Tensor]:
    """Return the initial masks of one pruning group's groups; see `initial_masks`."""
    pruning = budgets.pruning_groups[k]
    groups = {spec: budgets.groups[name] for name, spec in pruning.specs.items()}
    weights = {spec: original(g).detach() for spec, g in groups.items()}
    saved = None if init.masks is None else {s: _saved(g, weights[s], init.masks) for s, g in groups.items()}
    dense = {}  # masks that keep everything, not sharded; on the CPU for the meta device
    for spec, w in weights.items():
        device = "cpu" if w.is_meta else w.device
        dense[spec] = torch.empty_strided(w.shape, w.stride(), dtype=torch.bool, device=device).fill_(True)
    given = dense if saved is None else {s: t != 0 for s, t in saved.items()}
    slots = Slots(pruning=pruning, placed={"weights": dense, "masks": given}, seed=seed)
    if saved is None:
        rows = keep_mask(slots.random("init"), budgets.of_scopes(k), candidates=slots.real)
    else:
        is_weight = {s: t.is_floating_point() and bool(((t != 0) & (t != 1)).any()) for s, t in saved.items()}
        rows = slots.active
        whole = slots.masks_of(rows)
        for spec, mask in slots.masks.items():
            if not is_weight[spec] and not torch.equal(whole[spec], mask):  # single zeros of weights are by chance
                raise SparsityError(
                    f"{spec.name}: the saved mask keeps parts of blocks; give the block_shape that it was made with"
                )
        _take_budget(budgets, k, rows.sum(1).cpu())
        if init.shuffle:
            rows = keep_mask(slots.random("shuffle"), rows.sum(1), candidates=slots.real)
        slots = Slots(pruning=pruning, placed={"weights": dense, "masks": dense})  # kept outside of a view
    masks = slots.masks_of(rows)
    placed = {s: masks[s] if w.is_meta else placed_like(masks[s], w) for s, w in weights.items()}
    return {g["tensor_fqn"]: placed[s] for s, g in groups.items()}


def initialize_masks(
    budgets: Budgets, waiting: Mapping[str, TensorGroup], prepared: Mapping[str, Tensor], init: Init, seed: int
) -> None:
    """Fill the masks of groups that wait for their weights, {tensor_fqn: group}, with prepared masks or new ones."""
    for k, pruning in enumerate(budgets.pruning_groups):
        names = [name for name in pruning.specs if name in waiting]
        masks = prepared if all(name in prepared for name in names) else group_masks(budgets, k, init, seed)
        for name in names:
            mask_of(waiting[name]).initialize(masks[name])


def refuse_meta(groups: Sequence[TensorGroup], advice: str) -> None:
    """Raise where a weight is on the meta device."""
    for group in groups:
        if original(group).is_meta:
            raise SparsityError(f"{group['tensor_fqn']}: it is on the meta device. {advice}")


def _saved(group: TensorGroup, weight: Tensor, masks: Mapping[str, Any]) -> Tensor:
    """The saved mask of one tensor, or the weight whose zeros are the mask; an empty mapping means its own weight."""
    fqn = group["tensor_fqn"]
    prefix = f"{group['module_fqn']}." if group["module_fqn"] else ""
    state = masks.get("state", {})
    mask = state.get(fqn, {}).get("mask") if isinstance(state, Mapping) else None
    for key in (f"{prefix}parametrizations.{group['tensor_name']}.0.mask", fqn):
        mask = masks.get(key) if mask is None else mask
    if not masks:
        refuse_meta([group], "It has no zeros to resume from; pass saved masks to resume, or load the weights first.")
        mask = weight
    if not isinstance(mask, Tensor):
        raise SparsityError(f"{fqn}: the saved masks have none for it, only for {sorted(map(str, masks))[:5]}")
    if mask.shape != weight.shape:
        raise SparsityError(f"{fqn}: the saved mask is {tuple(mask.shape)}, the weight {tuple(weight.shape)}")
    return full_tensor(mask).to("cpu" if weight.is_meta else weight.device)


def _take_budget(budgets: Budgets, k: int, count: Tensor) -> None:
    """Take the budget of a pruning group that shares one from its saved masks; a fixed budget must agree with them."""
    label = budgets.pruning_groups[k].label
    if k not in budgets.shared:
        if not torch.equal(count, budgets.of_scopes(k)):
            raise SparsityError(
                f"{label}: the saved mask keeps {int(count.min())} .. {int(count.max())} blocks in each scope, but "
                "its config entry has another budget; leave the budget out, or take another mask"
            )
    elif count.numel() and int(count.min()) != int(count.max()):
        raise SparsityError(
            f"{label}: scopes of the saved mask keep from {int(count.min())} to {int(count.max())} blocks, and every "
            "scope needs the same number; give the scope_shape that the mask was made with. A ProximalSparsifier with "
            "a strength leaves any number in a scope, so prepare that one without scope_shape"
        )
    else:
        budgets.set(k, int(count[0]))
