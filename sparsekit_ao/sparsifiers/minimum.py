"""`max_sparsity`: tensors that share a budget each keep a least number of blocks; the number in all stays the same."""

from collections.abc import Sequence
from dataclasses import replace

from .. import distributed
from ..structure import MaskUpdate, ScopeCoupling, ScopeSpec
from .component import Component, kept_in, total_of


def update_masks(updates: Sequence[tuple[Component, MaskUpdate]]) -> None:
    """Fill the masks of components that do not depend on each other; see `distributed.update_masks`."""
    distributed.update_masks([update for _, update in updates])
    for component, update in updates:
        if component.least:
            _keep_least(component, update)


def _keep_least(component: Component, update: MaskUpdate) -> None:
    """Choose again until no tensor keeps fewer blocks than its least number.

    Tensors that keep too few get their least number each, and the others share what is left, so that they keep fewer
    than before: these are the masks that keep the best blocks of all under these limits.
    """
    free = {k: ScopeSpec(m.block, m.shape) for k, m in enumerate(component.scope.members())}
    left = total_of(update.keep)
    while True:
        short = [k for k, s in free.items() if _kept(s, update) < component.least[k]]
        if not short:
            return
        chosen = [_part(update, free.pop(k), component.least[k]) for k in short]
        left -= sum(component.least[k] for k in short)
        if free:
            rest = list(free.values())
            chosen.append(_part(update, rest[0] if len(rest) == 1 else ScopeCoupling(rest), left))
        distributed.update_masks(chosen)


def _part(update: MaskUpdate, scope: ScopeSpec | ScopeCoupling, keep: int) -> MaskUpdate:
    return replace(update, scope=scope, masks={spec: update.masks[spec] for spec in scope.blocks()}, keep=keep)


def _kept(scope: ScopeSpec, update: MaskUpdate) -> int:
    leaf = scope.blocks()[0]  # coupled blocks are kept together
    return kept_in(leaf, distributed.full_tensor(update.masks[leaf]))
