"""Reports that are tables of rows, which can be read as data, as aligned text and as CSV."""

import csv
import inspect
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import folded, is_number

FOLDED_ABOVE = 40  # rows above which like tensors share a line of a sparsifier's report
FAR = 0.7  # from this relative error on, half of the variation of the dense model's outputs is lost
Row = TypeVar("Row")
_NUMBER = re.compile(r"([-\d.,]|inf)*( to [\d.]+)?")


def lines_of_dry_run(what: str, seconds: float, memory: int) -> list[str]:
    """Return the first lines of a dry run's report: what was not done, and what the call would take."""
    time = f"{seconds:.1f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"
    takes = f"{time}, and {memory / 2**20:,.1f} MiB of memory beside what is in use"
    return [f"dry run: nothing was {what}", f"the call would take about {takes}"]


def lines_of_error(error: float) -> list[str]:
    """Return what a report says of the error to the outputs of the dense model, unless it is NaN."""
    if math.isnan(error):
        return []
    far = ["they have little in common: remove less, give batches (more of them), or recover"] if error > FAR else []
    return [f"relative error of the outputs to those of the dense model: {error:.3f}", *far]


def call_text(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return a call as text; "..." stands for models and data. Of defaults, only fractions are shown.

    >>> call_text(sparsekit_ao.prune, {"model": torch.nn.Linear(2, 2), "sparsity_level": "2:4", "recover": False})
    "prune(..., sparsity_level='2:4')"
    """
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        value = arguments.get(name, parameter.default)
        text = repr(value) if _is_plain(value) else "..."
        if text != repr(parameter.default) or isinstance(value, float):
            parts.append(text if parameter.default is parameter.empty else f"{name}={text}")
    return f"{function.__name__}({', '.join(parts)})"


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, a dataclass such as a score, or a list or mapping of these."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float)) or is_dataclass(value)


class Table(Sequence[Row], Generic[Row]):
    """Base class of reports: a sequence of rows, in which a name gives a row too: `report["0.weight"]`."""

    rows: tuple[Row, ...]  # dataclass objects of one class; their first field is the row's name, those with `repr` show
    bars: tuple[str, ...] = ()  # fields that `plot` draws

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Return the names of the rows' fields, and the rows as text; with `folds`, equal rows share a line."""
        names = [field.name for row in self.rows[:1] for field in fields(row) if field.repr]  # type: ignore[arg-type]
        lines = [tuple(_text(getattr(row, name), name) for name in names) for row in self.rows]
        return [tuple(names), *(folded(lines) if folds else lines)]

    def above(self) -> list[str]:
        """Return the lines above the table."""
        return []

    def below(self) -> list[str]:
        """Return the lines below the table."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return {"<field>/<row>": number} of what is known, for any logger."""
        names = [field.name for row in self.rows[:1] for field in fields(row) if field.repr]  # type: ignore[arg-type]
        values = {f"{name}/{getattr(row, names[0])}": getattr(row, name) for row in self.rows for name in names}
        return {name: float(value) for name, value in values.items() if is_number(value) and not math.isnan(value)}

    def log_dict(self, prefix: str = "") -> dict[str, float]:
        """Return `metrics()` with a prefix before every name.

        >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
        >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
        >>> sparsifier.step()
        >>> sparsifier.report().log_dict("pruning/")
        {'pruning/sparsity/0.weight': 0.5, 'pruning/sparsity': 0.5, 'pruning/mask_bytes': 32.0}
        """
        return {f"{prefix}{name}": value for name, value in self.metrics().items()}

    def table(self, folds: bool = False) -> str:
        """Return the rows as aligned text, one line for each."""
        lines = self.cells(folds)
        columns = list(zip(*lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        pads = [str.rjust if all(map(_NUMBER.fullmatch, column[1:])) else str.ljust for column in columns]
        texts = ("  ".join(pad(cell, n) for pad, cell, n in zip(pads, cells, widths, strict=True)) for cells in lines)
        return "\n".join(text.rstrip() for text in texts)

    def __str__(self) -> str:
        return "\n".join([*self.above(), self.table(folds=True), *self.below()])

    def _repr_html_(self) -> str:
        """The same as an HTML table, for notebooks."""
        from html import escape

        head, *lines = self.cells(folds=True)
        body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in line)}</tr>" for line in lines)
        first, notes = ("<br>".join(escape(line.strip()) for line in lines) for lines in (self.above(), self.below()))
        heads = "".join(f"<th>{escape(c)}</th>" for c in head)
        first = first and f"<p>{first}</p>"
        return f"{first}<table><tr>{heads}</tr>{body}</table><p>{notes}</p>"

    def plot(self, path: str | Path) -> None:
        """Save a picture of one or two fields, row by row; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1.5 + 0.25 * len(self.rows)), layout="constrained")
        axes, at = figure.add_subplot(), range(len(self.rows))
        for name, height, color in zip(self.bars, (0.8, 0.4), ("lightgray", "C0"), strict=False):
            axes.barh(at, [getattr(row, name) for row in self.rows], height, color=color, label=name)
        axes.set_yticks(at, [cells[0] for cells in Table.cells(self)[1:]], fontsize=7)
        axes.invert_yaxis()
        axes.legend()
        figure.savefig(path, dpi=150)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        if not isinstance(at, str):
            return self.rows[at]
        rows = {getattr(row, fields(row)[0].name): row for row in self.rows}  # type: ignore[arg-type]
        if at not in rows:
            raise KeyError(f"{at!r}; the rows are {', '.join(rows)}")
        return rows[at]

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return a header and a line for each row as CSV, with exact numbers; also write it to `path` if given.

        >>> sparsifier = sparsekit_ao.ScopeSparsifier(0.5)
        >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)))
        >>> print(sparsifier.report().to_csv().splitlines()[0])
        tensor,entry,shape,pattern,asked,sparsity,kept,blocks,mask_bytes
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = [field.name for row in self.rows[:1] for field in fields(row) if field.repr]  # type: ignore[arg-type]
        writer.writerows([names, *([_csv_cell(getattr(row, name)) for name in names] for row in self.rows)])
        if path is not None:
            Path(path).write_text(out.getvalue())
        return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """A tuple as text: sizes as 8x4, texts with semicolons."""
    if not isinstance(value, tuple):
        return value
    return ("; " if any(isinstance(entry, str) for entry in value) else "x").join(map(str, value))


def _text(value: Any, name: str) -> str:
    """A value of the field of this name as the text of a cell."""
    if isinstance(value, float):
        text = f"{value:.2f}" if name == "seconds" else f"{value:.4f}"
        return "-" if math.isnan(value) else text
    if name == "block":
        return value or "(model)"
    return f"{value:,}" if isinstance(value, int) else str(_csv_cell(value))
