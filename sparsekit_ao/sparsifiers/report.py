"""Reports of what masks keep, with the levels asked for and the share of the model covered, and checks of every scope.

A check counts every scope, and requires that every block is kept whole or dropped whole.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..distributed import full_tensor, local
from ..errors import SparsityError, by_reason
from ..models.names import named_tensors, owner_of, parameter_of
from ..models.progress import progress_bar
from ..structure import BlockSpec, Budget, SparseScope, scope_windows
from ..structure.tiles import to_aligned
from ..structure.windows import Window, fill_mask, kept_flags, kept_grid
from ..tables import FOLDED_ABOVE, Table
from .config import ResolvedConfig, TensorGroup
from .groups import PruningGroup, counts_in_scopes, kept_in, labels_of, numel_of_groups, pruning_groups_by_name

NEARLY_EMPTY = 0.99  # sparsity above which a printed report names a tensor
SHOWN = 5  # parameters that no entry names in a printed report


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a `Report`: what the mask of one tensor keeps.

    Attributes:
        tensor: The name of the tensor.
        entry: The config entry that it follows, as text.
        shape: The shape of the tensor.
        pattern: The shapes of its blocks and scopes as text, stage by stage.
        asked: The sparsity level that was asked for. If a number of blocks was asked for, the level that it amounts to.
        sparsity: The fraction of its elements that the mask drops, in [0, 1].
        kept, blocks: The number of blocks kept, and of all blocks, in the last stage. Elements are counted instead if
            masks are not made of scopes.
        mask_bytes: The memory of its mask in bytes. For a sharded mask, the memory on this rank.

    >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
    >>> sparsifier.step()
    >>> row = sparsifier.report()[0]
    >>> row.tensor, row.shape, row.sparsity, row.kept
    ('0.weight', (4, 8), 0.5, 16)
    """

    tensor: str
    entry: str
    shape: tuple[int, ...]
    pattern: str
    asked: float
    sparsity: float
    kept: int
    blocks: int
    mask_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report(Table[Row]):
    """What every mask of a model keeps; prints as a table in which like tensors of large models share a line.

    `table()` shows every tensor, `to_csv()` and `plot()` write them to files, and `log_dict()` returns a flat dict of
    floats for loggers. `report["0.weight"]` is the row of one tensor.

    Attributes:
        rows: A `Row` for each sparsified tensor.
        total: The number of elements of all parameters of the model.
        covered: The fraction of these that belongs to sparsified tensors.
        matrices: The same fraction, among parameters of two or more dimensions.
        skipped: {tensor: why it was left out although an entry names it}.
        others: {tensor: elements} of the tensors with two or more dimensions that no entry names, the largest first.
        schedule: Which level a schedule has reached, as text, if it ends with another one.

    >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
    >>> sparsifier.step()
    >>> report = sparsifier.report()
    >>> len(report), report.sparsity, report.total, round(report.covered, 3)
    (1, 0.5, 36, 0.889)
    """

    rows: tuple[Row, ...]
    total: int
    covered: float
    matrices: float
    skipped: Mapping[str, str]
    others: Mapping[str, int]
    schedule: str = ""
    bars = ("asked", "sparsity")

    @property
    def sparsity(self) -> float:
        """The fraction of all sparsified elements that masks drop."""
        return sum(r.sparsity * math.prod(r.shape) for r in self.rows) / max(self.elements, 1)

    @property
    def mask_bytes(self) -> int:
        """The memory of all masks in bytes; for sharded masks, the memory on this rank."""
        return sum(r.mask_bytes for r in self.rows)

    @property
    def elements(self) -> int:
        """The number of elements of all sparsified tensors."""
        return sum(math.prod(r.shape) for r in self.rows)

    def metrics(self) -> dict[str, float]:
        """Return {"sparsity/<tensor>": ..., "sparsity": over all tensors, "mask_bytes": ...} for any logger."""
        out = {f"sparsity/{r.tensor}": r.sparsity for r in self.rows}
        return {**out, "sparsity": self.sparsity, "mask_bytes": float(self.mask_bytes)}

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Return the head, the rows and the total as text; with `folds`, like rows share a line if there are many."""
        head, *lines = super().cells()
        alike: dict[Any, list[tuple[str, ...]]] = {}  # lines that differ only in numbers of names and what masks keep
        for at, line in enumerate(lines):
            texts = (re.sub(r"\d+", "0", text) for text in line[:2])
            key = (*texts, *line[2:5]) if folds and len(lines) > FOLDED_ABOVE else at
            alike.setdefault(key, []).append(line)
        total = ("all", "", "", "", "", f"{self.sparsity:.4f}", "", "", f"{self.mask_bytes:,}")
        return [head, *map(_folded, alike.values()), total]

    def below(self) -> list[str]:
        """Return lines that tell what is covered, what is not, and which tensors have nearly nothing left."""
        matrices = f"{self.matrices:.1%} of the weights of two or more dimensions"
        lines = [f"covers {matrices}, and {self.covered:.1%} of all {self.total:,} parameters"]
        lines += [f"  {self.schedule}"] * bool(self.schedule)
        lines += [f"  left out: {names} ({why})" for names, why in by_reason(self.skipped)]
        lines += [
            f"  nearly empty: {r.tensor} keeps {1 - r.sparsity:.2%} of its elements; give it a level of its own, or a "
            "shared budget max_sparsity"
            for r in self.rows
            if r.sparsity > NEARLY_EMPTY and 0 not in r.shape
        ]
        lines += [f"  named by no entry: {name} ({count:,})" for name, count in list(self.others.items())[:SHOWN]]
        more = list(self.others.values())[SHOWN:]
        return [*lines, *([f"  named by no entry: {len(more)} more ({sum(more):,})"] if more else [])]


def _folded(lines: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Like lines as one: stars for the numbers in which their names differ, sums of what they keep."""
    if len(lines) == 1:
        return lines[0]
    names = []
    for texts in list(zip(*lines, strict=True))[:2]:
        columns = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
        names.append("".join(column[0] if len(set(column)) == 1 else "*" for column in columns))
    levels = sorted({line[5] for line in lines})
    sparsity = levels[0] if len(levels) == 1 else f"{levels[0]} to {levels[-1]}"
    sums = (f"{sum(int(line[at].replace(',', '')) for line in lines):,}" for at in (6, 7, 8))
    return (f"{names[0]} ({len(lines)} tensors)", names[1], *lines[0][2:5], sparsity, *sums)


def make_row(
    name: str, mask: Tensor, entries: Mapping[str, str], *, pattern: str, asked: float, spec: BlockSpec | None = None
) -> Row:
    """Return the row of one tensor, whose blocks are single elements without a `spec`."""
    whole = full_tensor(mask)
    elements = int(torch.count_nonzero(whole))
    return Row(
        tensor=name,
        entry=entries.get(name, ""),
        shape=tuple(mask.shape),
        pattern=pattern,
        asked=asked,
        sparsity=1 - elements / max(mask.numel(), 1),
        kept=elements if spec is None else kept_in(spec, whole),
        blocks=mask.numel() if spec is None else spec.numblk(),
        mask_bytes=local(mask).numel() * mask.element_size(),
    )


def make_report(
    rows: Sequence[Row], resolved: ResolvedConfig, model: nn.Module, groups: Sequence[TensorGroup]
) -> Report:
    """A report of these rows, one for each group, and of the parameters that they do not cover."""
    distinct: dict[int, tuple[str, int, bool]] = {}  # (name, elements, whether it is a vector) of each parameter
    for name, p in named_tensors(model):
        distinct.setdefault(id(p), (name, _elements(model, name), p.ndim < 2))
    total, matrices = (sum(n for _, n, is_vector in distinct.values() if not (is_vector and m)) for m in (False, True))
    covered = [distinct.pop(id(parameter_of(g["module"], g["tensor_name"])), ("", 0, True)) for g in groups]
    others = [(name, n) for name, n, is_vector in distinct.values() if name not in resolved.skipped and not is_vector]
    return Report(
        rows=tuple(rows),
        total=total,
        covered=sum(n for _, n, _ in covered) / max(total, 1),
        matrices=sum(n for _, n, is_vector in covered if not is_vector) / max(matrices, 1),
        skipped=resolved.skipped,
        others=dict(sorted(others, key=lambda named: -named[1])),
    )


def _elements(model: nn.Module, fqn: str) -> int:
    """Elements of the parameters behind a tensor name; 0 where a lazy module has not made them yet."""
    module, name = owner_of(model, fqn)
    is_parametrized = parametrize.is_parametrized(module, name)
    parameters = module.parametrizations[name].parameters() if is_parametrized else [parameter_of(module, name)]  # type: ignore
    return sum(p.numel() for p in parameters if not isinstance(p, nn.parameter.UninitializedParameter))


def check_masks(
    pruning_groups: Sequence[PruningGroup], groups: Mapping[str, TensorGroup], masks: Mapping[str, tuple[Tensor, bool]]
) -> int:
    """Return the number of scopes; raise if one is wrong. `masks` is what `BudgetSparsifier._masks` returns."""
    wrong: list[str] = []
    checked, of_tensors = 0, pruning_groups_by_name(pruning_groups)
    for pruning in progress_bar(pruning_groups, "check", "tensors", elements=numel_of_groups(pruning_groups)):
        is_exact = all(masks[name][1] for name in pruning.specs)
        of_group = {spec: full_tensor(masks[name][0]) for name, spec in pruning.specs.items()}
        peers = [c for c in dict.fromkeys(c for name in pruning.specs for c in of_tensors[name]) if c is not pruning]
        earlier = [c for c in peers if c.stage < pruning.stage]
        low: int | None = 0  # blocks of which a later stage dropped a part may be kept in part, or not at all
        if is_exact and len(earlier) == len(peers):
            low = None if not earlier else _certain(earlier, pruning, groups)
            wrong += [f"{pruning.label}: {text}" for text in _broken_blocks(pruning, of_group, earlier)]
        budget = pruning.budget(groups)
        now = " (as the levels are now; step() again if a scheduler changed them)" if is_exact else ""
        wrong += [f"{pruning.label}: {text}{now}" for text in _miscounted(pruning.scope, of_group, budget, low)]
        checked += pruning.scope.numscp()
    if wrong:
        raise SparsityError("masks do not hold their budgets:\n  " + "\n  ".join(wrong))
    return checked


def _certain(earlier: Sequence[PruningGroup], last: PruningGroup, groups: Mapping[str, TensorGroup]) -> int:
    """Return a lower bound of the blocks that a scope of the last stage keeps, whatever the weights."""
    members = [c.scope.members()[0] for c in (*earlier, last)]
    specs = [m.block.blocks()[0] for m in members]
    views = [(v.shape, v.stride, v.offset, v.param.stride()) for v in (spec.view for spec in specs)]
    budgets = [c.budget(groups) for c in (*earlier, last)]
    # The bound is known where one earlier stage on the same view keeps a fixed number of elements in every scope of
    # single elements (V:N:M). It is 0 elsewhere, since an earlier stage may keep less in a scope than its budget.
    plain = len(members) == 2 and all(len(c.specs) == 1 and not c.scope.is_partial for c in (*earlier, last))
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
    pruning: PruningGroup, masks: Mapping[BlockSpec, Tensor], earlier: Sequence[PruningGroup]
) -> Iterator[str]:
    """Tensors with a block that is kept in part, though no earlier stage may have dropped the rest of it."""
    for scopes, scope_member in zip(scope_windows(pruning.scope, None, masks), pruning.scope.members(), strict=True):
        agree = [True] * len(scopes.windows)
        if not earlier and len(agree) > 1:  # each of coupled members keeps every block of which another one keeps any
            together = kept_grid(scopes)
            agree = [torch.equal(to_aligned(kept_flags(m), m.order, together.ndim), together) for m in scopes.windows]
        for member, spec, agrees in zip(scopes.windows, scope_member.block.blocks(), agree, strict=True):
            before = [c.specs[str(spec.name)] for c in earlier if spec.name in c.specs]
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


def _cut(spec: BlockSpec, other_specs: Sequence[BlockSpec]) -> Tensor:
    """The elements, bool in the tensor's shape, of blocks that are divided over several blocks of another spec."""
    blocks = labels_of(spec).reshape(-1) + 1  # 0 is outside the view
    is_cut = torch.zeros(spec.numblk() + 1, dtype=torch.bool, device="cpu")
    for other in other_specs:
        labels = labels_of(other).reshape(-1)
        empty = torch.full(is_cut.shape, -1, device="cpu")
        low, high = (empty.scatter_reduce(0, blocks, labels, how, include_self=False) for how in ("amin", "amax"))
        is_cut |= low != high
    return is_cut[blocks].reshape(tuple(spec.view.param.shape))


def _miscounted(
    scope: SparseScope, masks: Mapping[BlockSpec, Tensor], budget: Budget, low: int | None
) -> Iterator[str]:
    """Scopes that keep more than their budget, or fewer than `low` (None: than the budget)."""
    counts = counts_in_scopes(scope, masks)
    if isinstance(budget, int) and not scope.is_partial and counts.numel():
        least, most = map(int, counts.aminmax())
        if most <= budget and least >= (budget if low is None else low):
            return
    counts = counts.cpu()
    want = torch.minimum(torch.as_tensor(budget, device="cpu").expand(scope.grid_shape), scope.blocks_per_scope())
    bad = ((counts > want) | (counts < (want if low is None else low))).reshape(-1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        yield (
            f"{int(bad.sum())} of {bad.numel()} scopes are wrong; scope {first} keeps {int(counts.reshape(-1)[first])} "
            f"blocks, its budget is {int(want.reshape(-1)[first])}"
        )
