"""The report of a one-shot pass: what happened to each layer."""

from dataclasses import dataclass
from pathlib import Path

from ..tables import Table, aligned


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer.

    Attributes:
        tensor: its name.
        before: relative output error with the mask alone, sqrt(tr((W-V) G (W-V)^T) / tr(W G W^T)); NaN without inputs.
        after: the same with compensated weights.
        density: the fraction of elements that the mask keeps.
        seconds: spent on this layer, its share of recording not included.
        note: what was special, or "".

    >>> LayerRow(tensor="fc.weight", before=0.3, after=0.1, density=0.5, seconds=0.2).after
    0.1
    """

    tensor: str
    before: float
    after: float
    density: float
    seconds: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class OneShotReport(Table[LayerRow]):
    """Rows as data; `str()` of it is a table, `plot` a picture.

    Attributes:
        rows: one per layer, in the order of the forward pass.
        seconds: of the whole pass, recording included.
        blocks: repeated blocks that were walked one by one; 0 where the model ran once for each layer.

    >>> rows = (LayerRow(tensor="fc.weight", before=0.3, after=0.1, density=0.5, seconds=0.2),)
    >>> print(OneShotReport(rows=rows, seconds=0.25))
    tensor     error before   after  density  seconds  note
    fc.weight        0.3000  0.1000   0.5000     0.20
    1 layers in 0.2 s, no blocks: the model ran once for each layer
    """

    seconds: float
    blocks: int = 0

    def metrics(self) -> dict[str, float]:
        """{"output_error/<tensor>": ..., "seconds": ...}, for any logger."""
        return {**{f"output_error/{r.tensor}": r.after for r in self.rows}, "seconds": self.seconds}

    def __str__(self) -> str:
        lines = [("tensor", "error before", "after", "density", "seconds", "note")]
        for r in self.rows:
            numbers = (f"{r.before:.4f}", f"{r.after:.4f}", f"{r.density:.4f}", f"{r.seconds:.2f}")
            lines.append((r.tensor, *numbers, r.note))
        how = f"{self.blocks} blocks" if self.blocks else "no blocks: the model ran once for each layer"
        table = [line.rstrip() for line in aligned(lines, right=range(1, 5))]
        return "\n".join([*table, f"{len(self.rows)} layers in {self.seconds:.1f} s, {how}"])

    def plot(self, path: str | Path) -> None:
        """Save a picture of the errors before and after, layer by layer; needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1.5 + 0.25 * len(self.rows)), layout="constrained")
        axes = figure.add_subplot()
        at = range(len(self.rows))
        axes.barh(at, [r.before for r in self.rows], color="lightgray", label="mask alone")
        axes.barh(at, [r.after for r in self.rows], height=0.5, label="compensated")
        axes.set_yticks(at, [r.tensor for r in self.rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("relative output error")
        axes.legend()
        figure.savefig(path, dpi=150)
