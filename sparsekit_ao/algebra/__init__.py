"""The algebra: views, blocks, scopes and their couplings. Lower to strided windows, act through the kernels."""

from .axes import AxisPattern, dimensions_of
from .block import BlockSpec, SparseBlock
from .budget import sparsity_to_nnz
from .coupling import BlockCoupling, ScopeCoupling
from .scope import ScopeSpec
from .sparse_scope import SparseScope
from .view import View

__all__ = [
    "AxisPattern",
    "BlockCoupling",
    "BlockSpec",
    "ScopeCoupling",
    "ScopeSpec",
    "SparseBlock",
    "SparseScope",
    "View",
    "dimensions_of",
    "sparsity_to_nnz",
]
