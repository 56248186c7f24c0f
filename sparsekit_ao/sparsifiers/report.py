"""Reports about masks: the level asked for, what each mask keeps, how much of the model is covered."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..distributed import full_tensor, local_bytes
from .config import Resolved, TensorGroup
from .names import named_tensors, owner_of, parameter_of

NEARLY_EMPTY = 0.99  # sparsity above which a printed report names a tensor
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

    def cells(self) -> tuple[str, ...]:
        """The row as text, one cell per column."""
        numbers = (f"{self.asked:.4f}", f"{self.sparsity:.4f}", f"{self.kept:,}", f"{self.blocks:,}")
        return (self.tensor, self.rule, "x".join(map(str, self.shape)), self.pattern, *numbers, f"{self.mask_bytes:,}")


@dataclass(frozen=True, kw_only=True)
class Report(Sequence[Row]):
    """Rows as data; `str()` of it is a table, `.metrics()` a flat dict of floats.

    Attributes:
        rows: one per sparsified tensor.
        total: elements of all parameters of the model.
        covered: the share of these that belong to sparsified tensors.
        skipped: {tensor: why it was left out although a rule names it}.
        others: {tensor: its elements} of the parameters that no rule names, the largest first.
    """

    rows: tuple[Row, ...]
    total: int
    covered: float
    skipped: Mapping[str, str]
    others: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self.rows[at]

    @property
    def sparsity(self) -> float:
        """The fraction of all sparsified elements that masks drop."""
        return sum(r.sparsity * math.prod(r.shape) for r in self.rows) / max(self.elements, 1)

    @property
    def mask_bytes(self) -> int:
        """Memory of all masks, of sharded ones on this rank."""
        return sum(r.mask_bytes for r in self.rows)

    @property
    def elements(self) -> int:
        """Elements of all sparsified tensors."""
        return sum(math.prod(r.shape) for r in self.rows)

    def metrics(self) -> dict[str, float]:
        """{"sparsity/<tensor>": ..., "sparsity": over all, "mask_bytes": ...}, for any logger."""
        out = {f"sparsity/{r.tensor}": r.sparsity for r in self.rows}
        return {**out, "sparsity": self.sparsity, "mask_bytes": float(self.mask_bytes)}

    def __str__(self) -> str:
        head = ("tensor", "rule", "shape", "pattern", "asked", "sparsity", "kept", "blocks", "mask bytes")
        last = ("all", "", "", "", "", f"{self.sparsity:.4f}", "", "", f"{self.mask_bytes:,}")
        lines = [head, *(r.cells() for r in self.rows), last]
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
        for row in self.rows:
            if row.sparsity > NEARLY_EMPTY:
                yield f"  nearly empty: {row.tensor} keeps {1 - row.sparsity:.2%} of its elements"
        for name, count in list(self.others.items())[:SHOWN]:
            yield f"  named by no rule: {name} ({count:,})"
        if len(self.others) > SHOWN:
            yield f"  named by no rule: {len(self.others) - SHOWN} more ({sum(list(self.others.values())[SHOWN:]):,})"


def make_row(
    group: TensorGroup, mask: Tensor, rules: Mapping[str, str], *, pattern: str, asked: float, blocks: tuple[int, int]
) -> Row:
    """The row of one tensor; `blocks` are those kept and those in all."""
    fqn = group["tensor_fqn"]
    return Row(
        tensor=fqn,
        rule=rules.get(fqn, ""),
        shape=tuple(mask.shape),
        pattern=pattern,
        asked=asked,
        sparsity=1 - int(torch.count_nonzero(full_tensor(mask))) / max(mask.numel(), 1),
        kept=blocks[0],
        blocks=blocks[1],
        mask_bytes=local_bytes(mask),
    )


def make_report(rows: Sequence[Row], resolved: Resolved, model: nn.Module, groups: Sequence[TensorGroup]) -> Report:
    """A report of these rows, one for each group, and of the parameters that they do not cover."""
    distinct: dict[int, tuple[str, int]] = {}
    for name, p in named_tensors(model):
        distinct.setdefault(id(p), (name, _elements(model, name)))
    total = sum(count for _, count in distinct.values())
    own = [distinct.pop(id(parameter_of(g["module"], g["tensor_name"])), ("", 0))[1] for g in groups]
    others = sorted((f for f in distinct.values() if f[0] not in resolved.skipped), key=lambda found: -found[1])
    return Report(
        rows=tuple(rows), total=total, covered=sum(own) / max(total, 1), skipped=resolved.skipped, others=dict(others)
    )


def _elements(model: nn.Module, fqn: str) -> int:
    """Elements of the parameters behind a tensor name; 0 where a lazy module has not made them yet."""
    module, name = owner_of(model, fqn)
    is_parametrized = parametrize.is_parametrized(module, name)
    found = module.parametrizations[name].parameters() if is_parametrized else [parameter_of(module, name)]  # type: ignore
    return sum(p.numel() for p in found if not isinstance(p, nn.parameter.UninitializedParameter))
