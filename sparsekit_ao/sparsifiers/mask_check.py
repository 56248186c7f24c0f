"""Check masks against their budgets: every scope is counted, every block must be kept whole or dropped whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..distributed import full_tensor
from ..errors import SparsityError
from ..structure import BlockSpec, Budget, SparseScope, scope_windows
from ..structure.tiles import to_aligned
from ..structure.windows import Window, fill_mask, kept_flags, kept_grid
from .config import TensorGroup
from .groups import PruningGroup, counts_in_scopes, elements_of, labels_of
from .progress import shown


def check_masks(
    pruning_groups: Sequence[PruningGroup], groups: Sequence[TensorGroup], masks: Sequence[tuple[Tensor, bool]]
) -> int:
    """Count every scope; see `ScopeSparsifier.check`."""
    wrong: list[str] = []
    checked = 0
    for group in shown(pruning_groups, "check", elements_of(pruning_groups)):
        is_exact = all(masks[at][1] for _, at in group.members)
        of_group = {spec: full_tensor(masks[at][0]) for spec, at in group.members}
        tensors = {at for _, at in group.members}
        others = [c for c in pruning_groups if c is not group and tensors & {at for _, at in c.members}]
        earlier = [c for c in others if c.stage < group.stage]
        low: int | None = 0  # blocks of which a later stage dropped a part may be kept in part, or not at all
        if is_exact and len(earlier) == len(others):
            low = None if not earlier else _certain(earlier, group, groups)
            wrong += [f"{group.label}: {text}" for text in _broken_blocks(group, of_group, earlier)]
        wrong += [f"{group.label}: {text}" for text in _miscounted(group.scope, of_group, group.budget(groups), low)]
        checked += group.scope.numscp()
    if wrong:
        raise SparsityError("masks do not hold their budgets:\n  " + "\n  ".join(wrong))
    return checked


def _certain(earlier: Sequence[PruningGroup], last: PruningGroup, groups: Sequence[TensorGroup]) -> int:
    """A lower bound of the blocks that a scope of the last stage keeps, whatever the weights.

    Known where one earlier stage on the same view keeps a fixed number of elements in every scope of single elements
    (V:N:M). It is 0 elsewhere, since an earlier stage may keep less in a scope than its budget.
    """
    members = [c.scope.members()[0] for c in (*earlier, last)]
    specs = [m.block.blocks()[0] for m in members]
    views = [(v.shape, v.stride, v.offset, v.param.stride()) for v in (spec.view for spec in specs)]
    budgets = [c.budget(groups) for c in (*earlier, last)]
    plain = len(members) == 2 and all(len(c.members) == 1 and not c.scope.is_partial for c in (*earlier, last))
    if not plain or any(isinstance(b, Tensor) for b in budgets):
        return 0
    if specs[0].is_partial or views[0] != views[1] or any(b != 1 for b in specs[1].shape):
        return 0
    elements = int(budgets[0])
    for block, blocks, reach in zip(specs[0].shape, members[0].shape, members[1].shape, strict=True):
        if blocks == 1 and block % reach == 0:
            elements *= reach
        elif blocks > 1 and reach % (block * blocks) == 0:
            elements *= block * (reach // (block * blocks))
        else:
            return 0
    return min(elements, int(budgets[1]))


def _broken_blocks(
    group: PruningGroup, masks: Mapping[BlockSpec, Tensor], earlier: Sequence[PruningGroup]
) -> Iterator[str]:
    """Tensors with a block that is kept in part, though no earlier stage may have dropped the rest of it."""
    indices = dict(group.members)
    for scopes, scope_member in zip(scope_windows(group.scope, None, masks), group.scope.members(), strict=True):
        agree = [True] * len(scopes.members)
        if not earlier and len(agree) > 1:  # each of coupled members keeps every block of which another one keeps any
            together = kept_grid(scopes.members, len(scopes.shape))
            agree = [torch.equal(to_aligned(kept_flags(m), m.order, together.ndim), together) for m in scopes.members]
        for member, spec, agrees in zip(scopes.members, scope_member.block.blocks(), agree, strict=True):
            before = [c.spec(indices[spec]) for c in earlier if any(at == indices[spec] for _, at in c.members)]
            if not agrees or not _are_whole(member, spec, before):
                yield f"{spec.name}: some block is neither kept whole nor dropped whole, or its coupled one differs"


def _are_whole(member: Window, spec: BlockSpec, before: Sequence[BlockSpec]) -> bool:
    """Whether blocks are kept whole or dropped whole, but for those that blocks of earlier stages cut."""
    if not before:
        return all(n == 1 for n in member.shape) or torch.equal(kept_flags(member, every=True), kept_flags(member))
    assert member.mask is not None
    whole = member.mask.clone()
    fill_mask((replace(member, mask=whole, order=()),), kept_flags(member))
    wrong = whole != member.mask
    return not bool((wrong & ~spec.view.window(_cut(spec, before).to(wrong.device))).any())


def _cut(spec: BlockSpec, others: Sequence[BlockSpec]) -> Tensor:
    """The elements, bool in the tensor's shape, of blocks that are divided over several blocks of another spec."""
    blocks = labels_of(spec).reshape(-1) + 1  # 0 is outside the view
    is_cut = torch.zeros(spec.numblk() + 1, dtype=torch.bool, device="cpu")
    for other in others:
        labels = labels_of(other).reshape(-1)
        empty = torch.full(is_cut.shape, -1, device="cpu")
        low, high = (empty.scatter_reduce(0, blocks, labels, how, include_self=False) for how in ("amin", "amax"))
        is_cut |= low != high
    return is_cut[blocks].reshape(tuple(spec.view.param.shape))


def _miscounted(
    scope: SparseScope, masks: Mapping[BlockSpec, Tensor], budget: Budget, low: int | None
) -> Iterator[str]:
    """Scopes that keep more than their budget, or fewer than `low` (None: than the budget)."""
    kept = counts_in_scopes(scope, masks)
    if isinstance(budget, int) and not scope.is_partial and kept.numel():
        least, most = map(int, kept.aminmax())
        if most <= budget and least >= (budget if low is None else low):
            return
    kept = kept.cpu()
    want = torch.minimum(torch.as_tensor(budget, device="cpu").expand(scope.grid_shape), scope.blocks_per_scope())
    bad = ((kept > want) | (kept < (want if low is None else low))).reshape(-1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        yield (
            f"{int(bad.sum())} of {bad.numel()} scopes are wrong; scope {first} keeps {int(kept.reshape(-1)[first])} "
            f"blocks, its budget is {int(want.reshape(-1)[first])} (as the levels are now; step() again if a scheduler "
            "changed them)"
        )
