"""Views, blocks, scopes and their couplings: which elements are kept or dropped together, and what competes.

The algebra is that of the Structured Sparsity Specification (S3, arXiv 2604.11315); docs/names.md compares the names.
"""

from .axes import AxisPattern, dimensions_of, window_shape
from .block import BlockCoupling, BlockSpec, SparseBlock, block_windows
from .budget import Budget, checked_level, is_number, sparsity_to_nnz
from .elements import elements_of
from .member import ScopeMember
from .proximal import soft_threshold_windows
from .scope import ScopeCoupling, ScopeSpec
from .sparse_scope import MaskUpdate, SparseScope, scope_windows, update_masks, write_back
from .view import View
