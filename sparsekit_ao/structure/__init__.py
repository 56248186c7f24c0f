"""Views, blocks, scopes and their couplings: which elements are kept or dropped together, and what competes.

The algebra is that of the Structured Sparsity Specification (S3, arXiv 2604.11315); docs/names.md compares the names.
"""

from .axes import AxisPattern, dimensions_of, window_shape
from .blocks import BlockCoupling, BlockSpec, SparseBlock, block_windows
from .scopes import (
    Budget,
    ScopeCoupling,
    ScopeMember,
    ScopeSpec,
    SparseScope,
    checked_level,
    counts_after_dropping,
    scope_windows,
    sparsity_to_nnz,
    write_back,
)
from .thresholds import soft_threshold_windows
from .view import View
from .windows import elements_of
