"""Reports about masks: the level asked for, what each mask keeps, what is covered, whether every scope is exact."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..algebra import BlockSpec, block_windows, scope_windows
from ..distributed import full_tensor, local_bytes
from ..errors import SparsityError
from ..selection import fill_mask
from ..selection.reference import candidates_of
from ..selection.tiling import to_scopes
from .config import Resolved, TensorGroup
from .names import named_tensors
from .plan import Component, Plan

__all__ = ["Report", "Row", "check_masks", "element_report", "make_report"]

SHOWN = 5  # parameters that no rule names in a printed report


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sparsified tensor.

    Attributes:
        tensor: its name.
        rule: the config entry that it follows.
        shape: its shape.
        pattern: block and scope shapes in numbers, stage by stage.
        asked: the sparsity level that the budget amounts to.
        sparsity: the fraction of its elements that the mask drops.
        kept, blocks: blocks kept and blocks in all, of the last stage; elements where masks are not made of scopes.
        mask_bytes: memory of its mask; of a sharded one on this rank.
    """

    tensor: str
    rule: str
    shape: tuple[int, ...]
    pattern: str
    asked: float
    sparsity: float
    kept: int
    blocks: int
    mask_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report(Sequence[Row]):
    """Rows as data; `str()` of it is a table, `.metrics()` a flat dict of floats.

    Attributes:
        rows: one a sparsified tensor.
        elements: of each row's tensor.
        total: elements of all parameters of the model.
        skipped: {tensor: why} of those that a rule names and that were left out all the same.
        others: {tensor: its elements} of the parameters that no rule names, the largest first.
    """

    rows: tuple[Row, ...]
    elements: tuple[int, ...]
    total: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self.rows[at]

    @property
    def sparsity(self) -> float:
        """The fraction of all sparsified elements that masks drop."""
        dropped = sum(r.sparsity * n for r, n in zip(self.rows, self.elements, strict=True))
        return dropped / max(sum(self.elements), 1)

    @property
    def covered(self) -> float:
        """The share of the model's parameters (their elements) that are sparsified."""
        return sum(self.elements) / max(self.total, 1)

    def metrics(self) -> dict[str, float]:
        """{"sparsity/<tensor>": ..., "sparsity": over all, "mask_bytes": ...}, for any logger."""
        out = {f"sparsity/{r.tensor}": r.sparsity for r in self.rows}
        mask_bytes = float(sum(r.mask_bytes for r in self.rows))
        return {**out, "sparsity": self.sparsity, "mask_bytes": mask_bytes}

    def __str__(self) -> str:
        head = ("tensor", "rule", "shape", "pattern", "asked", "sparsity", "kept", "blocks", "mask bytes")
        lines = [head, *map(_cells, self.rows)]
        mask_bytes = sum(r.mask_bytes for r in self.rows)
        lines.append(("all", "", "", "", "", f"{self.sparsity:.4f}", "", "", f"{mask_bytes:,}"))
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        table = [
            "  ".join(c.ljust(w) if k < 4 else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        return "\n".join([*table, *self._coverage()])

    def _coverage(self) -> Iterator[str]:
        yield f"covers {self.covered:.1%} of the model's {self.total:,} parameters"
        for name, why in self.skipped.items():
            yield f"  left out: {name} ({why})"
        for name, count in list(self.others.items())[:SHOWN]:
            yield f"  named by no rule: {name} ({count:,})"
        if len(self.others) > SHOWN:
            yield f"  named by no rule: {len(self.others) - SHOWN} more ({sum(list(self.others.values())[SHOWN:]):,})"


def _cells(r: Row) -> tuple[str, ...]:
    numbers = (f"{r.asked:.4f}", f"{r.sparsity:.4f}", f"{r.kept:,}", f"{r.blocks:,}", f"{r.mask_bytes:,}")
    return (r.tensor, r.rule, "x".join(map(str, r.shape)), r.pattern, *numbers)


def element_report(
    groups: Sequence[TensorGroup],
    masks: Sequence[Tensor],
    pattern: Callable[[TensorGroup], str],
    resolved: Resolved,
    model: nn.Module | None,
) -> Report:
    """One row a group that counts single elements: for masks that are not made of scopes."""
    rows = []
    for group, mask in zip(groups, masks, strict=True):
        kept = int(torch.count_nonzero(full_tensor(mask)))
        rows.append(
            Row(
                tensor=group["tensor_fqn"],
                rule=resolved.rules.get(group["tensor_fqn"], ""),
                shape=tuple(mask.shape),
                pattern=pattern(group),
                asked=float(group.get("sparsity_level", float("nan"))),
                sparsity=1 - kept / max(mask.numel(), 1),
                kept=kept,
                blocks=mask.numel(),
                mask_bytes=local_bytes(mask),
            )
        )
    return _report(rows, [m.numel() for m in masks], resolved, model)


def make_report(
    plan: Plan,
    groups: Sequence[TensorGroup],
    masks: Sequence[tuple[Tensor, bool]],
    level_given: Mapping[str, float],
    resolved: Resolved,
    model: nn.Module | None,
) -> Report:
    """One row a group, in order."""
    rows = []
    for at, group in enumerate(groups):
        mask = full_tensor(masks[at][0])
        own = [c for c in plan.components if any(i == at for _, i in c.leaves)]
        last = own[-1]
        leaf = next(spec for spec, i in last.leaves if i == at)
        kept = candidates_of(block_windows(leaf, None, {leaf: mask}), leaf.grid_ndim)
        rows.append(
            Row(
                tensor=group["tensor_fqn"],
                rule=resolved.rules.get(group["tensor_fqn"], ""),
                shape=tuple(mask.shape),
                pattern=" then ".join(_pattern(c, at) for c in own),
                asked=last.level(groups, level_given),
                sparsity=1 - int(torch.count_nonzero(mask)) / max(mask.numel(), 1),
                kept=int(torch.count_nonzero(kept)),
                blocks=leaf.numblk(),
                mask_bytes=local_bytes(masks[at][0]),
            )
        )
    return _report(rows, [m.numel() for m, _ in masks], resolved, model)


def _report(rows: Sequence[Row], elements: Sequence[int], resolved: Resolved, model: nn.Module | None) -> Report:
    distinct: dict[int, tuple[str, int]] = {}
    for name, p in named_tensors(model or nn.Module()):
        distinct.setdefault(id(p), (name, p.numel()))
    named = {r.tensor for r in rows} | set(resolved.skipped)
    others = sorted(((n, count) for n, count in distinct.values() if n not in named), key=lambda found: -found[1])
    return Report(
        rows=tuple(rows),
        elements=tuple(elements),
        total=sum(count for _, count in distinct.values()),
        skipped=resolved.skipped,
        others=dict(others),
    )


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
        if later:  # what a later stage thinned out may be broken or empty
            low: int | None = 0
        else:
            low = None if not earlier else _certain(earlier, component, groups, level_given)
            if exact:
                wrong += [f"{component.label}: {text}" for text in _broken_blocks(component, own)]
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
    """Blocks that a last-stage scope keeps for certain, whatever the weights: its budget, if enough is left to it.

    Known where one earlier stage on the same view leaves a fixed number of elements to every scope of single elements
    (V:N:M); 0 elsewhere, since an earlier stage may leave a scope with less than its budget.
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


def _broken_blocks(component: Component, own: Mapping[BlockSpec, Tensor]) -> Iterator[str]:
    for group, spec in zip(scope_windows(component.scope, None, own), component.scope.members(), strict=True):
        kept = candidates_of(group.members, len(group.shape))
        for member, leaf in zip(group.members, spec.block.blocks(), strict=True):
            assert member.mask is not None
            whole = member.mask.clone()
            fill_mask((replace(member, mask=whole),), kept)
            if not torch.equal(whole, member.mask):
                yield f"{leaf.name}: some block is neither kept whole nor dropped whole, or its coupled one differs"


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


def _pattern(component: Component, at: int) -> str:
    leaf = next(spec for spec, i in component.leaves if i == at)
    scope = next(m for m in component.scope.members() if leaf in m.block.blocks())
    view = "" if leaf.view.shape == tuple(leaf.view.param.shape) else f"view {_by(leaf.view.shape)} "
    return f"{view}block {_by(leaf.shape)} scope {_by(scope.shape)}"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"
