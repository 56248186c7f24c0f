"""Reports as tables: rows as data, as aligned text, and as CSV."""

import csv
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


def aligned(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return lines of cells as texts whose columns are aligned to the left, or to the right if listed in `right`.

    >>> aligned([("name", "n"), ("a", "10")], right=[1])
    ['name   n', 'a     10']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        [cell.rjust(w) if k in right else cell.ljust(w) for k, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        for cells in lines
    ]
    return ["  ".join(cells) for cells in texts]


@dataclass(frozen=True, kw_only=True)
class Table(Sequence[Row], Generic[Row]):
    """A report that is a sequence of its rows.

    Attributes:
        rows: Dataclass objects of one class.
    """

    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self.rows[at]

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return a header and one line for each row, numbers as they are; written to `path` if there is one.

        >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
        >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
        >>> print(sparsifier.report().to_csv().splitlines()[0])
        tensor,rule,shape,pattern,asked,sparsity,kept,blocks,mask_bytes
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = [field.name for row in self.rows[:1] for field in fields(row)]  # type: ignore[arg-type]
        writer.writerows([names, *([_csv_cell(getattr(row, name)) for name in names] for row in self.rows)])
        if path is not None:
            Path(path).write_text(out.getvalue())
        return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """A tuple as text: sizes as 8x4, texts with semicolons."""
    if not isinstance(value, tuple):
        return value
    return ("; " if any(isinstance(entry, str) for entry in value) else "x").join(map(str, value))
