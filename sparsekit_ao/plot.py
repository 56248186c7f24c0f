"""Plots of masks and of the layers of a model; matplotlib is imported only when one is drawn."""

import math
import os
from typing import TYPE_CHECKING

from torch import Tensor

from .errors import SparsityError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .export import LayerReport

__all__ = ["plot_layers", "plot_mask"]

_INCHES = 6
_DPI = (150, 600)  # least and most; a higher resolution would need too much memory
_ROW_INCHES, _MOST_INCHES = 0.18, 40.0  # height of a layer in a plot of layers, and of the whole plot


def plot_mask(
    mask: Tensor, path: str | os.PathLike[str] | None = None, *, title: str = "", ax: "Axes | None" = None
) -> "Axes":
    """Plot which elements a mask keeps (dark) and drops (white), one cell for each; return the axes.

    Args:
        mask: A tensor of rank 1 or more, True or 1 for keep. It is drawn as a matrix (dimension 0) x (all others).
        path: The file to save the plot to, in the format of its suffix (PNG without one). None saves nothing.
        title: A line to show above the shape and the fraction that the mask drops.
        ax: The axes to draw on; None makes a new figure. No window is opened and no global figure is registered.

    Raises:
        SparsityError: The mask has no elements or no dimensions.
        ImportError: Matplotlib is not installed.

    >>> ax = plot_mask(torch.eye(4, 8), title="fc.weight")
    >>> print(ax.get_title())
    fc.weight
    4 x 8, sparsity 0.8750
    """
    if not isinstance(mask, Tensor):
        raise SparsityError(f"plot_mask needs a mask, such as sparsifier.mask(name), got {type(mask).__name__}")
    if mask.ndim < 1 or mask.numel() == 0:
        raise SparsityError(f"plot_mask needs a mask of rank >= 1 with elements, got shape {tuple(mask.shape)}")
    kept = (mask.detach().flatten(1) if mask.ndim > 1 else mask.detach().unsqueeze(1)).ne(0).cpu()
    ax = _new_axes() if ax is None else ax
    # matplotlib's default interpolation shows the mean of cells smaller than a pixel: a density, without aliasing.
    ax.imshow(kept.numpy(), cmap="Greys", vmin=0, vmax=1)
    rows, columns = kept.shape
    sparsity = 1 - int(kept.count_nonzero()) / kept.numel()
    ax.set_title(f"{title}\n{rows} x {columns}, sparsity {sparsity:.4f}".lstrip(), fontsize="small")
    # At least one pixel for each cell up to the highest resolution; the axes fill two thirds of the figure or more.
    _save(ax, path, min(max(_DPI[0], math.ceil(1.5 * max(rows, columns) / _INCHES)), _DPI[1]))
    return ax


def _new_axes(height: float = _INCHES) -> "Axes":
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("plotting needs matplotlib: pip install matplotlib") from e
    return Figure(figsize=(_INCHES, height), layout="constrained").add_subplot()


def plot_layers(
    report: "LayerReport", path: str | os.PathLike[str] | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Plot the density of every weight of an `export.report`, one bar each, coloured by the first pattern it satisfies.

    Args:
        report: The report of a model.
        path: The file to save the plot to, in the format of its suffix (PNG without one). None saves nothing.
        ax: The axes to draw on; None makes a new figure, as high as the number of layers needs.

    Raises:
        SparsityError: The report has no rows.
        ImportError: Matplotlib is not installed.

    >>> from sparsekit_ao import export
    >>> ax = plot_layers(export.report(torch.nn.Linear(8, 4)))
    >>> [text.get_text() for text in ax.get_yticklabels()]
    ['weight']
    """
    if not all(hasattr(row, "patterns") for row in report):
        raise SparsityError(f"plot_layers needs sparsekit_ao.export.report(model), got a {type(report).__name__}")
    if not report:
        raise SparsityError("plot_layers needs a report with at least one weight")
    ax = _new_axes(max(2.0, min(_ROW_INCHES * len(report), _MOST_INCHES))) if ax is None else ax
    names = [row.patterns[0] if row.patterns else "dense" for row in report]
    pruned = list(dict.fromkeys(name for name in names if name != "dense"))
    colors = {"dense": "0.8"} | {name: f"C{at % 10}" for at, name in enumerate(pruned)}
    for name in dict.fromkeys(names):
        rows = [k for k, row_name in enumerate(names) if row_name == name]
        ax.barh(rows, [report[k].density for k in rows], color=colors[name], label=name)
    ax.set_yticks(range(len(report)), [row.tensor for row in report], fontsize="x-small")
    ax.set(xlim=(0, 1), ylim=(len(report) - 0.5, -0.5), xlabel="density")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="x-small")
    _save(ax, path, _DPI[0])
    return ax


def _save(ax: "Axes", path: str | os.PathLike[str] | None, dpi: int) -> None:
    if path is not None:
        ax.get_figure(root=True).savefig(path, dpi=dpi)  # type: ignore[union-attr]
