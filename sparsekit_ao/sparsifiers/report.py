"""Reports about masks: the level asked for, what each mask keeps, how much of the model is covered."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..distributed import full_tensor, local_bytes
from ..tables import Table, aligned
from .config import ResolvedConfig, TensorGroup
from .names import named_tensors, owner_of, parameter_of

NEARLY_EMPTY = 0.99  # sparsity above which a printed report names a tensor
SHOWN = 5  # parameters that no rule names in a printed report
FOLDED_ABOVE = 40  # rows above which like tensors share a line of a printed report
HEAD = ("tensor", "rule", "shape", "pattern", "asked", "sparsity", "kept", "blocks", "mask bytes")


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

    >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
    >>> sparsifier.step()
    >>> row = sparsifier.report()[0]
    >>> row.tensor, row.shape, row.sparsity, row.kept
    ('0.weight', (4, 8), 0.5, 16)
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
class Report(Table[Row]):
    """Rows as data; printed, a table in which like tensors of large models share a line.

    `table()` shows every tensor, `to_csv()` and `plot()` write them, `log_dict()` is a flat dict of floats.

    Attributes:
        rows: one per sparsified tensor.
        total: elements of all parameters of the model.
        covered: the share of these that belong to sparsified tensors.
        skipped: {tensor: why it was left out although a rule names it}.
        others: {tensor: its elements} of the parameters that no rule names, the largest first.

    >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
    >>> sparsifier.step()
    >>> report = sparsifier.report()
    >>> len(report), report.sparsity, report.total, round(report.covered, 3)
    (1, 0.5, 36, 0.889)
    """

    total: int
    covered: float
    skipped: Mapping[str, str]
    others: Mapping[str, int]

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

    def log_dict(self, prefix: str = "") -> dict[str, float]:
        """`metrics()` with a prefix before every name: flat numbers for any logger.

        >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
        >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
        >>> sparsifier.step()
        >>> sparsifier.report().log_dict("pruning/")
        {'pruning/sparsity/0.weight': 0.5, 'pruning/sparsity': 0.5, 'pruning/mask_bytes': 32.0}
        """
        return {f"{prefix}{name}": value for name, value in self.metrics().items()}

    def plot(self, path: str | Path) -> None:
        """Save a picture of the level asked for and the sparsity of each tensor; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1.5 + 0.2 * len(self.rows)), layout="constrained")
        axes, at = figure.add_subplot(), range(len(self.rows))
        axes.barh(at, [row.sparsity for row in self.rows], color="0.75", label="sparsity")
        axes.plot([row.asked for row in self.rows], at, "k|", label="asked")
        axes.set_yticks(at, [row.tensor for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.legend(loc="lower right")
        figure.savefig(path)

    def table(self) -> str:
        """One line for each tensor, however many there are."""
        return "\n".join(aligned(self._cells(folds=False), right=range(4, len(HEAD))))

    def __str__(self) -> str:
        """The table, in which like tensors share a line where there are many, and what is not covered."""
        lines = aligned(self._cells(folds=len(self.rows) > FOLDED_ABOVE), right=range(4, len(HEAD)))
        return "\n".join([*lines, *self._coverage()])

    def _repr_html_(self) -> str:
        """The same as an HTML table, for notebooks."""
        from html import escape

        head, *lines = self._cells(folds=len(self.rows) > FOLDED_ABOVE)
        body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in line)}</tr>" for line in lines)
        notes = "<br>".join(escape(line.strip()) for line in self._coverage())
        return f"<table><tr>{''.join(f'<th>{c}</th>' for c in head)}</tr>{body}</table><p>{notes}</p>"

    def _cells(self, folds: bool) -> list[tuple[str, ...]]:
        """Head, rows and total as text."""
        alike: dict[Any, list[Row]] = {}  # rows that differ only in numbers of their names and in what masks keep
        for at, row in enumerate(self.rows):
            texts = tuple(re.sub(r"\d+", "0", text) for text in (row.tensor, row.rule))
            key = (*texts, row.shape, row.pattern, row.cells()[4]) if folds else at
            alike.setdefault(key, []).append(row)
        return [
            HEAD,
            *map(_folded, alike.values()),
            ("all", "", "", "", "", f"{self.sparsity:.4f}", "", "", f"{self.mask_bytes:,}"),
        ]

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


def _folded(rows: Sequence[Row]) -> tuple[str, ...]:
    """Like rows as one: stars for the numbers in which their names differ, sums of what they keep."""
    first = rows[0].cells()
    if len(rows) == 1:
        return first
    levels = sorted({row.cells()[5] for row in rows})
    sums = (sum(getattr(row, name) for row in rows) for name in ("kept", "blocks", "mask_bytes"))
    names = []
    for key in ("tensor", "rule"):
        columns = zip(*(re.split(r"(\d+)", getattr(row, key)) for row in rows), strict=True)
        names.append("".join(column[0] if len(set(column)) == 1 else "*" for column in columns))
    sparsity = levels[0] if len(levels) == 1 else f"{levels[0]} to {levels[-1]}"
    return (f"{names[0]} ({len(rows)} tensors)", names[1], *first[2:5], sparsity, *(f"{total:,}" for total in sums))


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


def make_report(
    rows: Sequence[Row], resolved: ResolvedConfig, model: nn.Module, groups: Sequence[TensorGroup]
) -> Report:
    """A report of these rows, one for each group, and of the parameters that they do not cover."""
    distinct: dict[int, tuple[str, int]] = {}
    for name, p in named_tensors(model):
        distinct.setdefault(id(p), (name, _elements(model, name)))
    total = sum(count for _, count in distinct.values())
    covered = sum(distinct.pop(id(parameter_of(g["module"], g["tensor_name"])), ("", 0))[1] for g in groups)
    others = sorted((named for named in distinct.values() if named[0] not in resolved.skipped), key=lambda n: -n[1])
    return Report(
        rows=tuple(rows), total=total, covered=covered / max(total, 1), skipped=resolved.skipped, others=dict(others)
    )


def _elements(model: nn.Module, fqn: str) -> int:
    """Elements of the parameters behind a tensor name; 0 where a lazy module has not made them yet."""
    module, name = owner_of(model, fqn)
    is_parametrized = parametrize.is_parametrized(module, name)
    parameters = module.parametrizations[name].parameters() if is_parametrized else [parameter_of(module, name)]  # type: ignore
    return sum(p.numel() for p in parameters if not isinstance(p, nn.parameter.UninitializedParameter))
