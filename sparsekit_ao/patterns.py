"""Presets: common structures as config dicts, to be spread into an entry.

>>> from sparsekit_ao import patterns
>>> {"tensor_fqn": "fc.weight", **patterns.n_m(2, 4)}
{'tensor_fqn': 'fc.weight', 'block_shape': (1, 1), 'scope_shape': (1, 4), 'nnz': 2}
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .errors import SparsityError

__all__ = ["blocks", "columns", "filters", "heads", "n_m", "rows", "unstructured", "v_n_m"]

Preset = dict[str, Any]


def unstructured(sparsity_level: float | None = None) -> Preset:
    """Single elements over the whole tensor, of any rank."""
    return {"block_shape": (), "scope_shape": (), **_level(sparsity_level)}


def n_m(n: int, m: int, ndim: int = 2) -> Preset:
    """Keep n of every m consecutive inputs (2:4, 1:4, ...); `ndim=4` for the input channels of a Conv2d."""
    if not 0 <= n <= m:
        raise SparsityError(f"n_m keeps n of m, so 0 <= n <= m; got n={n}, m={m}")
    rest = (1,) * (ndim - 2)
    return {"block_shape": (1, 1, *rest), "scope_shape": (1, m, *rest), "nnz": n}


def blocks(rows: int, columns: int, sparsity_level: float | None = None) -> Preset:
    """Blocks of rows x columns elements over the whole matrix."""
    return {"block_shape": (rows, columns), "scope_shape": (-1, -1), **_level(sparsity_level)}


def rows(sparsity_level: float | None = None) -> Preset:
    """Whole rows of a matrix: output neurons of a Linear."""
    return {"block_shape": (1, -1), "scope_shape": (-1, -1), **_level(sparsity_level)}


def columns(sparsity_level: float | None = None) -> Preset:
    """Whole columns of a matrix: input features of a Linear."""
    return {"block_shape": (-1, 1), "scope_shape": (-1, -1), **_level(sparsity_level)}


def filters(sparsity_level: float | None = None, ndim: int = 4) -> Preset:
    """Whole filters (output channels) of a convolution; `ndim` is the weight's, 4 for Conv2d."""
    return {"block_shape": (1, *(-1,) * (ndim - 1)), "scope_shape": (-1,) * ndim, **_level(sparsity_level)}


def heads(count: int, sparsity_level: float | None = None) -> Preset:
    """Whole attention heads of one projection whose rows are `count` heads of equal size."""
    if count < 1:
        raise SparsityError(f"heads needs at least one head, got {count}")
    return {
        "view": SplitRows(count),
        "block_shape": (1, -1, -1),
        "scope_shape": (-1, -1, -1),
        **_level(sparsity_level),
    }


def v_n_m(v: int, n: int, m: int) -> Preset:
    """V:N:M (arXiv 2310.02065): of m columns keep 4 for every v rows together, then n of those 4 in each row."""
    if not 0 <= n <= 4 <= m:
        raise SparsityError(f"v_n_m keeps n of 4 of m columns, so 0 <= n <= 4 <= m; got n={n}, m={m}")
    return {
        "stages": [
            {"block_shape": (v, 1), "scope_shape": (1, m), "nnz": 4},
            {"block_shape": (1, 1), "scope_shape": (1, m), "nnz": n},
        ]
    }


@dataclass(frozen=True)
class SplitRows:
    """A view function: dimension 0 split into `count` equal parts."""

    count: int

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as (count, rows of a part, ...)."""
        if weight.shape[0] % self.count:
            raise SparsityError(
                f"heads({self.count}) needs dimension 0 divisible by {self.count}, got {weight.shape[0]}"
            )
        return weight.unflatten(0, (self.count, -1))


def _level(sparsity_level: float | None) -> Preset:
    return {} if sparsity_level is None else {"sparsity_level": sparsity_level}
