"""Check masks against their budgets: every scope is counted, every block must be kept whole or dropped whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..algebra import BlockSpec, scope_windows
from ..distributed import full_tensor
from ..errors import SparsityError
from ..selection import fill_mask
from ..selection.reference import candidates_of
from ..selection.tiling import to_scopes
from .component import Component
from .config import TensorGroup
from .plan import Plan


def check_masks(
    plan: Plan, groups: Sequence[TensorGroup], masks: Sequence[tuple[Tensor, bool]], level_given: Mapping[str, float]
) -> int:
    """Count every scope; see `ScopeSparsifier.check`."""
    wrong: list[str] = []
    checked = 0
    for component in plan.components:
        exact = all(masks[at][1] for _, at in component.leaves)
        own = {leaf: full_tensor(masks[at][0]) for leaf, at in component.leaves}
        budget = component.budget(groups, level_given)
        earlier, later = _neighbours(plan, component)
        if later:  # a later stage may have dropped all that is left of a block
            low: int | None = 0
        else:
            low = None if not earlier else _certain(earlier, component, groups, level_given)
        low = low if exact else 0
        wrong += [f"{component.label}: {text}" for text in _miscounted(component, own, budget, low)]
        checked += component.scope.numscp()
    if all(is_mask for _, is_mask in masks):
        wrong += _broken_blocks(plan, groups, [full_tensor(mask) for mask, _ in masks])
    if wrong:
        raise SparsityError("masks do not hold their budgets:\n  " + "\n  ".join(wrong))
    return checked


def _neighbours(plan: Plan, component: Component) -> tuple[list[Component], list[Component]]:
    """The stages before and after this one that share a tensor with it."""
    tensors = {at for _, at in component.leaves}
    shared = [c for c in plan.components if c is not component and tensors & {at for _, at in c.leaves}]
    return [c for c in shared if c.stage < component.stage], [c for c in shared if c.stage > component.stage]


def _certain(
    earlier: Sequence[Component], last: Component, groups: Sequence[TensorGroup], level_given: Mapping[str, float]
) -> int:
    """A lower bound of the blocks that a scope of the last stage keeps, whatever the weights.

    Known where one earlier stage on the same view keeps a fixed number of elements in every scope of single elements
    (V:N:M); 0 elsewhere, since an earlier stage may keep less in a scope than its budget.
    """
    specs = [c.scope.members()[0] for c in (*earlier, last)]
    leaves = [s.block.blocks()[0] for s in specs]
    budgets = [c.budget(groups, level_given) for c in (*earlier, last)]
    plain = len(specs) == 2 and all(len(c.leaves) == 1 and not c.scope.is_partial for c in (*earlier, last))
    if not plain or any(isinstance(b, Tensor) for b in budgets):
        return 0
    if leaves[0].view.shape != leaves[1].view.shape or any(b != 1 for b in leaves[1].shape):
        return 0
    left = int(budgets[0])
    for block, blocks, reach in zip(leaves[0].shape, specs[0].shape, specs[1].shape, strict=True):
        if blocks == 1 and block % reach == 0:
            left *= reach
        elif blocks > 1 and reach % (block * blocks) == 0:
            left *= block * (reach // (block * blocks))
        else:
            return 0
    return min(left, int(budgets[1]))


def _broken_blocks(plan: Plan, groups: Sequence[TensorGroup], masks: Sequence[Tensor]) -> Iterator[str]:
    """Tensors whose mask is not what the kept blocks of all of their stages have in common.

    A stage keeps the blocks of which any element is kept, in any coupled tensor.
    """
    wanted, labels = [torch.ones_like(mask) for mask in masks], dict[int, str]()
    for component in plan.components:
        own, index = {leaf: masks[at] for leaf, at in component.leaves}, dict(component.leaves)
        for group, spec in zip(scope_windows(component.scope, None, own), component.scope.members(), strict=True):
            kept = candidates_of(group.members, len(group.shape))
            for member, leaf in zip(group.members, spec.block.blocks(), strict=True):
                at = index[leaf]
                window, labels[at] = leaf.view.window(wanted[at]), component.label
                fill_mask((replace(member, mask=window),), kept, among_kept=True)
                if not leaf.view.is_aligned(wanted[at]):
                    leaf.view.write_back(window, wanted[at])
    for at, label in labels.items():
        if not torch.equal(wanted[at], masks[at]):
            name = groups[at]["tensor_fqn"]
            yield f"{label}: {name}: some block is neither kept whole nor dropped whole, or its coupled one differs"


def _miscounted(
    component: Component, own: Mapping[BlockSpec, Tensor], budget: int | Tensor, low: int | None
) -> Iterator[str]:
    """Scopes that keep more than their budget, or fewer than `low` (None: than the budget)."""
    kept = torch.zeros((), dtype=torch.int64)
    for group in scope_windows(component.scope, None, own):
        kept = kept + to_scopes(candidates_of(group.members, len(group.shape)), group, False).sum(1).cpu()
    want = torch.as_tensor(budget).expand(component.scope.grid_shape)
    want = torch.minimum(want, component.scope.blocks_per_scope()).reshape(-1)
    bad = (kept > want) | (kept < (want if low is None else low))
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        yield (
            f"{int(bad.sum())} of {bad.numel()} scopes are wrong; scope {first} keeps {int(kept[first])} blocks, "
            f"its budget is {int(want[first])} (as the levels are now; step() again if a scheduler changed them)"
        )
