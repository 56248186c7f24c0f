"""Rows of numbers about masks: what was asked, what is there, and whether every scope holds its budget.

Knows plans and masks; prints nothing and changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import Group
from .errors import SparsityError
from .kernels import fill_mask
from .kernels.reference import candidates_of
from .kernels.tiling import to_scopes
from .plan import Component, Plan

__all__ = ["Report", "Row", "check_masks", "element_report", "make_report"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sparsified tensor.

    Attributes:
        tensor: its name.
        shape: its shape.
        pattern: block and scope shapes in numbers, stage by stage.
        asked: the sparsity level asked for, as the budget gives it.
        sparsity: the fraction of its elements that the mask drops.
        kept, blocks: blocks kept and blocks in all, of the last stage.
        mask_bytes: memory of its mask.
    """

    tensor: str
    shape: tuple[int, ...]
    pattern: str
    asked: float
    sparsity: float
    kept: int
    blocks: int
    mask_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report(Sequence[Row]):
    """Rows as data; `str()` of it is a table, `.metrics()` a flat dict of floats."""

    rows: tuple[Row, ...]
    elements: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self.rows[at]

    @property
    def sparsity(self) -> float:
        """The fraction of all sparsified elements that masks drop."""
        dropped = sum(r.sparsity * n for r, n in zip(self.rows, self.elements, strict=True))
        return dropped / max(sum(self.elements), 1)

    def metrics(self) -> dict[str, float]:
        """{"sparsity/<tensor>": ..., "sparsity": over all, "mask_bytes": ...}, for any logger."""
        out = {f"sparsity/{r.tensor}": r.sparsity for r in self.rows}
        return {**out, "sparsity": self.sparsity, "mask_bytes": float(sum(r.mask_bytes for r in self.rows))}

    def __str__(self) -> str:
        head = ("tensor", "shape", "pattern", "asked", "sparsity", "kept", "blocks", "mask bytes")
        lines = [head, *map(_cells, self.rows)]
        lines.append(("all", "", "", "", f"{self.sparsity:.4f}", "", "", f"{sum(r.mask_bytes for r in self.rows):,}"))
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        return "\n".join(
            "  ".join(c.ljust(w) if k < 3 else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        )


def _cells(r: Row) -> tuple[str, ...]:
    numbers = (f"{r.asked:.4f}", f"{r.sparsity:.4f}", f"{r.kept:,}", f"{r.blocks:,}", f"{r.mask_bytes:,}")
    return (r.tensor, "x".join(map(str, r.shape)), r.pattern, *numbers)


def element_report(groups: Sequence[Group], masks: Sequence[Tensor], pattern: Callable[[Group], str]) -> Report:
    """One row a group that counts single elements: for masks that are not made of scopes."""
    rows = []
    for group, mask in zip(groups, masks, strict=True):
        kept = int(torch.count_nonzero(mask))
        rows.append(
            Row(
                tensor=group["tensor_fqn"],
                shape=tuple(mask.shape),
                pattern=pattern(group),
                asked=float(group.get("sparsity_level", float("nan"))),
                sparsity=1 - kept / max(mask.numel(), 1),
                kept=kept,
                blocks=mask.numel(),
                mask_bytes=mask.numel() * mask.element_size(),
            )
        )
    return Report(rows=tuple(rows), elements=tuple(m.numel() for m in masks))


def make_report(
    plan: Plan, groups: Sequence[Group], masks: Sequence[tuple[Tensor, bool]], level_given: Mapping[str, float]
) -> Report:
    """One row a group, in order."""
    rows = []
    for at, group in enumerate(groups):
        mask = masks[at][0]
        own = [c for c in plan.components if any(i == at for _, i in c.leaves)]
        last = own[-1]
        leaf = next(spec for spec, i in last.leaves if i == at)
        alive = candidates_of(leaf.operands(None, {leaf: mask}), leaf.grid_ndim)
        rows.append(
            Row(
                tensor=group["tensor_fqn"],
                shape=tuple(mask.shape),
                pattern=" then ".join(_pattern(c, at) for c in own),
                asked=last.level(groups, level_given),
                sparsity=1 - int(torch.count_nonzero(mask)) / max(mask.numel(), 1),
                kept=int(torch.count_nonzero(alive)),
                blocks=leaf.numblk(),
                mask_bytes=mask.numel() * mask.element_size(),
            )
        )
    return Report(rows=tuple(rows), elements=tuple(m.numel() for m, _ in masks))


def check_masks(
    plan: Plan, groups: Sequence[Group], masks: Sequence[tuple[Tensor, bool]], level_given: Mapping[str, float]
) -> int:
    """Count every scope; see `ScopeSparsifier.check`."""
    wrong: list[str] = []
    checked = 0
    for component in plan.components:
        exact = all(masks[at][1] and groups[at].get("stages") is None for _, at in component.leaves)
        wrong += [f"{component.label}: {text}" for text in _violations(component, groups, masks, level_given, exact)]
        checked += component.scope.numscp()
    if wrong:
        raise SparsityError("masks do not hold their budgets:\n  " + "\n  ".join(wrong))
    return checked


def _violations(
    component: Component,
    groups: Sequence[Group],
    masks: Sequence[tuple[Tensor, bool]],
    level_given: Mapping[str, float],
    exact: bool,
) -> Iterator[str]:
    own = {leaf: masks[at][0] for leaf, at in component.leaves}
    kept = torch.zeros((), dtype=torch.int64)
    for group, (spec, _) in zip(component.scope.groups(None, own), component.scope.scopes(), strict=True):
        alive = candidates_of(group.members, len(group.shape))
        for member, leaf in zip(group.members, spec.block.blocks(), strict=True):
            assert member.mask is not None
            whole = member.mask.clone()
            fill_mask((replace(member, mask=whole),), alive)
            if exact and not torch.equal(whole, member.mask):
                yield f"{leaf.name}: some block is neither kept whole nor dropped whole, or its coupled one differs"
        kept = kept + to_scopes(alive, group, False).sum(1).cpu()
    want = torch.as_tensor(component.budget(groups, level_given)).expand(component.scope.grid_shape)
    want = torch.minimum(want, component.scope.members_per_scope()).reshape(-1)
    bad = (kept != want) if exact else (kept > want)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        yield (
            f"{int(bad.sum())} of {bad.numel()} scopes are wrong; scope {first} keeps {int(kept[first])} blocks, "
            f"its budget is {int(want[first])}"
        )


def _pattern(component: Component, at: int) -> str:
    leaf = next(spec for spec, i in component.leaves if i == at)
    scope = next(s for s, _ in component.scope.scopes() if leaf in s.block.blocks())
    view = "" if leaf.view.shape == tuple(leaf.view.param.shape) else f"view {_by(leaf.view.shape)} "
    return f"{view}block {_by(leaf.shape)} scope {_by(scope.shape)}"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"
