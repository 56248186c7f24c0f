"""Plots of masks; matplotlib is imported only when one is drawn."""

import math
import os
from typing import TYPE_CHECKING

from torch import Tensor

from .errors import SparsityError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_mask"]

_INCHES = 6
_DPI = (150, 600)  # least and most; a higher resolution would need too much memory


def plot_mask(
    mask: Tensor, path: str | os.PathLike[str] | None = None, *, title: str = "", ax: "Axes | None" = None
) -> "Axes":
    """Plot which elements a mask keeps (dark) and drops (white), one cell for each.

    Args:
        mask: True or 1 is keep; of rank 1 or more, drawn as the matrix (dimension 0) x (all the others).
        path: where to save the plot, in the format of the suffix; PNG without one. None saves nothing.
        title: a line above the shape and the fraction that the mask drops.
        ax: where to draw; a new figure if None. No window is opened and no global figure is registered.

    Returns:
        The axes.

    Raises:
        SparsityError: a mask without elements or without dimensions.
        ImportError: matplotlib is not installed.

    >>> ax = plot_mask(torch.eye(4, 8), title="fc.weight")
    >>> print(ax.get_title())
    fc.weight
    4 x 8, sparsity 0.8750
    """
    if mask.ndim < 1 or mask.numel() == 0:
        raise SparsityError(f"plot_mask needs a mask of rank >= 1 with elements, got shape {tuple(mask.shape)}")
    kept = (mask.detach().flatten(1) if mask.ndim > 1 else mask.detach().unsqueeze(1)).ne(0).cpu()
    ax = _new_axes() if ax is None else ax
    # matplotlib's default interpolation shows the mean of cells smaller than a pixel: a density, without aliasing.
    ax.imshow(kept.numpy(), cmap="Greys", vmin=0, vmax=1)
    rows, columns = kept.shape
    sparsity = 1 - int(kept.count_nonzero()) / kept.numel()
    ax.set_title(f"{title}\n{rows} x {columns}, sparsity {sparsity:.4f}".lstrip(), fontsize="small")
    if path is not None:
        # At least one pixel for each cell up to the highest resolution; the axes fill two thirds of the figure or more.
        dpi = min(max(_DPI[0], math.ceil(1.5 * max(rows, columns) / _INCHES)), _DPI[1])
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.savefig(path, dpi=dpi)
    return ax


def _new_axes() -> "Axes":
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("plot_mask needs matplotlib: pip install matplotlib") from e
    return Figure(figsize=(_INCHES, _INCHES), layout="constrained").add_subplot()
