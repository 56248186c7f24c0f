"""The zeros of one sparsifier as the masks of another, with the same structure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..selection import to_scopes
from ..selection.reference import candidates_of
from ..structure import scope_windows
from .component import Component
from .config import TensorGroup
from .plan import Plan
from .planned import PlannedSparsifier
from .scope import ScopeSparsifier
from .structure import AXES, STRUCTURE


def handed_over(
    model: nn.Module,
    groups: Sequence[TensorGroup],
    plan: Plan,
    masks: Mapping[str, Tensor],
    sparsifier: PlannedSparsifier | None,
    write_zeros: Callable[[], None],
) -> PlannedSparsifier:
    """Another sparsifier, prepared on the model with these masks.

    Args:
        model, groups, plan: of the sparsifier that ends.
        masks: {tensor_fqn: bool mask}.
        sparsifier: not prepared; None for a `ScopeSparsifier`.
        write_zeros: called once everything is checked, before the other sparsifier is prepared.
    """
    found = ScopeSparsifier() if sparsifier is None else sparsifier
    _check(found)
    is_scope = isinstance(found, ScopeSparsifier)
    entries = [_entry(g) for g in groups]
    if is_scope:
        for component in plan.components:
            if groups[component.leaves[0][1]].get("stages") is None:
                kept = _kept(component, groups, masks)
                for _, at in component.leaves:
                    entries[at]["nnz"] = kept
    write_zeros()
    found.prepare(model, entries)
    if is_scope:
        for group in found.groups:
            found.mask(group["tensor_fqn"]).copy_(masks[group["tensor_fqn"]])
        found.enable_mask_update = False
        found._chosen_at = [g["sparsity_level"] for g in found.groups]
    return found


def _check(sparsifier: PlannedSparsifier) -> None:
    """Raise unless a sparsifier is new, and will take the zeros of the weights."""
    if not isinstance(sparsifier, PlannedSparsifier) or sparsifier._phase != "new":
        raise SparsityError(
            f"to_masks takes a ScopeSparsifier or a DynamicSparsifier that is not prepared yet, got {sparsifier!r}"
        )
    if isinstance(sparsifier, ScopeSparsifier):
        return
    init = getattr(sparsifier, "init", None)
    if getattr(init, "masks", None) is None:
        raise SparsityError(
            f"to_masks: {type(sparsifier).__name__} would choose masks of its own; make a DynamicSparsifier with "
            'init="resume", which starts from the zeros'
        )


def _entry(group: TensorGroup) -> dict[str, Any]:
    """The structure of a group as a config entry."""
    keys = (*STRUCTURE, *AXES, "stages")
    given = {k: group[k] for k in keys if k in group and not _is_none(group[k])}
    return {"tensor_fqn": group["tensor_fqn"], **given}


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and not value)


def _kept(component: Component, groups: Sequence[TensorGroup], masks: Mapping[str, Tensor]) -> int | Tensor:
    """Blocks that masks keep in each scope; a number where it is the same in all."""
    own = {leaf: masks[groups[at]["tensor_fqn"]] for leaf, at in component.leaves}
    counts = torch.zeros((), dtype=torch.int64, device="cpu")
    for scopes in scope_windows(component.scope, None, own):
        counts = counts + to_scopes(candidates_of(scopes.members, len(scopes.shape)), scopes, False).sum(1).cpu()
    first = int(counts[0]) if counts.numel() else 0
    return first if bool((counts == first).all()) else counts.reshape(component.scope.grid_shape)
