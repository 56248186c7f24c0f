"""`report`: which patterns the weights of a model satisfy, and which export targets take them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .check import TARGETS
from .layers import Layer, layers_of
from .structures import satisfied


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One weight.

    Attributes:
        tensor: its name.
        kind: the class of its module.
        shape: of the weight.
        dtype: of the weight, without "torch.".
        masked: whether its mask is still there.
        density: the fraction that is not zero.
        patterns: the structures that its zeros satisfy: "2:4", "1x4 blocks", "rows", "columns", or "unstructured";
            nothing if it is dense.
        targets: {target: reasons why it does not take the weight}; no reasons if it does.

    >>> row = sparsekit_ao.export.report(torch.nn.Sequential(torch.nn.Linear(8, 4)))[0]
    >>> row.tensor, row.kind, row.density, row.patterns
    ('0.weight', 'Linear', 1.0, ())
    """

    tensor: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    masked: bool
    density: float
    patterns: tuple[str, ...]
    targets: Mapping[str, tuple[str, ...]]

    @property
    def taken_by(self) -> tuple[str, ...]:
        """The targets that take the weight."""
        return tuple(name for name, why in self.targets.items() if not why)

    def cells(self) -> tuple[str, ...]:
        """The row as text, one cell a column."""
        shape, state = "x".join(map(str, self.shape)), "masked" if self.masked else ""
        names = (", ".join(found) or "-" for found in (self.patterns, self.taken_by))
        return (self.tensor, self.kind, shape, self.dtype, state, f"{self.density:.4f}", *names)


@dataclass(frozen=True, kw_only=True)
class LayerReport(Sequence[LayerRow]):
    """Rows as data; `str()` of it is a table, and `sparsekit_ao.plot.plot_layers` a picture.

    Attributes:
        rows: one for each weight of the model.

    >>> report = sparsekit_ao.export.report(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)))
    >>> [row.tensor for row in report]
    ['0.weight', '1.weight']
    """

    rows: tuple[LayerRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self.rows[at]

    def __str__(self) -> str:
        head = ("tensor", "module", "shape", "dtype", "", "density", "patterns", "taken by")
        lines = [head, *(row.cells() for row in self.rows)]
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*table, *self._by_target()])

    def _by_target(self) -> Iterator[str]:
        pruned = [row for row in self.rows if row.patterns]
        for target in TARGETS if pruned else ():
            refused = [row for row in pruned if row.targets[target]]
            first = f"; not {refused[0].tensor}: {refused[0].targets[target][0]}" if refused else ""
            yield f"{target} takes {len(pruned) - len(refused)} of {len(pruned)} pruned weights{first}"


def report(model: nn.Module) -> LayerReport:
    """Which patterns the weights of a model satisfy, and which export targets take them, layer by layer.

    Works on masked and on squashed models, and changes nothing.

    Args:
        model: with weights of two or more dimensions, all of which are listed; tied ones once.

    Returns:
        A report whose text is a table; `sparsekit_ao.plot.plot_layers(report)` draws density and patterns.

    >>> from sparsekit_ao import ScopeSparsifier, export, patterns
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4)).half()
    >>> sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4))
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> [(row.tensor, row.density, row.patterns, "pack_2_4" in row.taken_by) for row in export.report(model)]
    [('0.weight', 0.5, ('2:4',), True), ('1.weight', 1.0, (), False)]
    """
    return LayerReport(rows=tuple(_row(layer.loaded()) for layer in layers_of(model)))


def _row(layer: Layer) -> LayerRow:
    weight = layer.weight
    return LayerRow(
        tensor=layer.fqn,
        kind=layer.kind,
        shape=tuple(weight.shape),
        dtype=str(weight.dtype).removeprefix("torch."),
        masked=layer.masked,
        density=layer.density,
        patterns=tuple(satisfied(layer)),
        targets={target: tuple(reasons(layer)) for target, reasons in TARGETS.items()},
    )
