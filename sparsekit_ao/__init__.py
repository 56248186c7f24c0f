"""sparsekit_ao: exact structured sparsity as a drop-in plugin for `torch.ao.pruning`.

`ScopeSparsifier` turns config dicts into views, blocks and scopes and keeps exactly as many blocks as each budget
says; `WeightNormSparsifier` and `NearlyDiagonalSparsifier` replace torch.ao's by an import. `patterns` names common
structures, `schedules` and `schedulers` move budgets over time.
"""

from . import densities, dynamic, export, groups, patterns, schedulers, schedules
from .dynamic import GMP, SET, SNFS, SRSTE, STE, DynamicSparsifier, RigL, Static, StraightThrough, TopKAST
from .errors import CouplingError, SparsityError
from .groups import Group
from .kernels import keep_mask
from .masking import WeightMask
from .nearly_diagonal import NearlyDiagonalSparsifier
from .report import Report, Row
from .sparsifier import ScopeSparsifier
from .spec import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, SparseBlock, SparseScope, View
from .weight_norm import WeightNormSparsifier

__version__ = "0.1.0"

__all__ = [
    "GMP",
    "SET",
    "SNFS",
    "SRSTE",
    "STE",
    "BlockCoupling",
    "BlockSpec",
    "CouplingError",
    "DynamicSparsifier",
    "Group",
    "NearlyDiagonalSparsifier",
    "Report",
    "RigL",
    "Row",
    "ScopeCoupling",
    "ScopeSparsifier",
    "ScopeSpec",
    "SparseBlock",
    "SparseScope",
    "SparsityError",
    "Static",
    "StraightThrough",
    "TopKAST",
    "View",
    "WeightMask",
    "WeightNormSparsifier",
    "densities",
    "dynamic",
    "export",
    "groups",
    "keep_mask",
    "patterns",
    "schedulers",
    "schedules",
]
