"""Check masks against their budgets: every scope is counted, every block must be kept whole or dropped whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ..distributed import full_tensor
from ..errors import SparsityError
from ..selection import Blocks, Scopes, fill_mask
from ..selection.counts import are_whole, kept_blocks, kept_flags
from ..selection.tiling import to_aligned
from ..structure import BlockSpec, scope_windows
from .component import Component, labels_of
from .config import TensorGroup
from .plan import Plan
from .progress import shown


def check_masks(
    plan: Plan, groups: Sequence[TensorGroup], masks: Sequence[tuple[Tensor, bool]], level_given: Mapping[str, float]
) -> int:
    """Count every scope; see `ScopeSparsifier.check`."""
    wrong: list[str] = []
    checked = 0
    for component in shown(plan.components, "check", plan.elements):
        exact = all(masks[at][1] for _, at in component.leaves)
        own = {leaf: full_tensor(masks[at][0]) for leaf, at in component.leaves}
        budget = component.budget(groups, level_given)
        earlier, later = _neighbours(plan, component)
        if later:  # blocks of which a later stage dropped a part may be kept in part, or not at all
            low: int | None = 0
        else:
            low = None if not earlier else _certain(earlier, component, groups, level_given)
            if exact:
                wrong += [f"{component.label}: {text}" for text in _broken_blocks(component, own, earlier)]
        low = low if exact else 0
        wrong += [f"{component.label}: {text}" for text in _miscounted(component, own, budget, low)]
        checked += component.scope.numscp()
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
    views = [(v.shape, v.stride, v.offset, v.param.stride()) for v in (leaf.view for leaf in leaves)]
    budgets = [c.budget(groups, level_given) for c in (*earlier, last)]
    plain = len(specs) == 2 and all(len(c.leaves) == 1 and not c.scope.is_partial for c in (*earlier, last))
    if not plain or any(isinstance(b, Tensor) for b in budgets):
        return 0
    is_partial = any(n % b for n, b in zip(leaves[0].view.shape, leaves[0].shape, strict=True))
    if is_partial or views[0] != views[1] or any(b != 1 for b in leaves[1].shape):
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


def _broken_blocks(
    component: Component, own: Mapping[BlockSpec, Tensor], earlier: Sequence[Component]
) -> Iterator[str]:
    """Tensors with a block that is kept in part, though no earlier stage may have dropped the rest of it."""
    indices = dict(component.leaves)
    for scopes, spec in zip(scope_windows(component.scope, None, own), component.scope.members(), strict=True):
        agree = _agree(scopes) if not earlier else [True] * len(scopes.members)
        for member, leaf, agrees in zip(scopes.members, spec.block.blocks(), agree, strict=True):
            before = [c.leaf(indices[leaf]) for c in earlier if any(at == indices[leaf] for _, at in c.leaves)]
            if not agrees or not (_are_whole_but(member, leaf, before) if before else are_whole(member)):
                yield f"{leaf.name}: some block is neither kept whole nor dropped whole, or its coupled one differs"


def _agree(scopes: Scopes) -> list[bool]:
    """Whether each of coupled members keeps every block of which another one keeps anything."""
    if len(scopes.members) == 1:
        return [True]
    kept = [to_aligned(kept_flags(m), m.order, len(scopes.shape)) for m in scopes.members]
    together = reduce(torch.bitwise_or, kept)
    return [torch.equal(one, together) for one in kept]


def _are_whole_but(member: Blocks, leaf: BlockSpec, before: Sequence[BlockSpec]) -> bool:
    """Whether blocks are kept whole or dropped whole, but for those that blocks of earlier stages cut."""
    assert member.mask is not None
    whole = member.mask.clone()
    fill_mask((replace(member, mask=whole, order=()),), kept_flags(member) != 0)
    wrong = whole != member.mask
    return not bool((wrong & ~leaf.view.window(_cut(leaf, before).to(wrong.device))).any())


def _cut(leaf: BlockSpec, others: Sequence[BlockSpec]) -> Tensor:
    """The elements, bool in the tensor's shape, of blocks that are in several blocks of another spec of the tensor."""
    own = labels_of(leaf).reshape(-1) + 1  # 0 is outside the view
    found = torch.zeros(leaf.numblk() + 1, dtype=torch.bool, device="cpu")
    for other in others:
        labels = labels_of(other).reshape(-1)
        empty = torch.full(found.shape, -1, device="cpu")
        low, high = (empty.scatter_reduce(0, own, labels, how, include_self=False) for how in ("amin", "amax"))
        found |= low != high
    return found[own].reshape(tuple(leaf.view.param.shape))


def _miscounted(
    component: Component, own: Mapping[BlockSpec, Tensor], budget: int | Tensor, low: int | None
) -> Iterator[str]:
    """Scopes that keep more than their budget, or fewer than `low` (None: than the budget)."""
    scope = component.scope
    counts = [kept_blocks(w).reshape(scope.grid_shape) for w in scope_windows(scope, None, own)]
    kept = counts[0] if len(counts) == 1 else torch.stack([c.cpu().long() for c in counts]).sum(0)
    if isinstance(budget, int) and not scope.is_partial and kept.numel():
        least, most = map(int, kept.aminmax())
        if most <= budget and least >= (budget if low is None else low):
            return
    kept = kept.cpu().long()
    want = torch.minimum(torch.as_tensor(budget, device="cpu").expand(scope.grid_shape), scope.blocks_per_scope())
    bad = ((kept > want) | (kept < (want if low is None else low))).reshape(-1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        yield (
            f"{int(bad.sum())} of {bad.numel()} scopes are wrong; scope {first} keeps {int(kept.reshape(-1)[first])} "
            f"blocks, its budget is {int(want.reshape(-1)[first])} (as the levels are now; step() again if a scheduler "
            "changed them)"
        )
