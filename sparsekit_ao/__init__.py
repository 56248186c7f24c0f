"""sparsekit_ao: exact structured sparsity as a drop-in plugin for `torch.ao.pruning`.

`ScopeSparsifier` turns config dicts into views, blocks and scopes and keeps exactly as many blocks as each budget
says; `WeightNormSparsifier` and `NearlyDiagonalSparsifier` replace torch.ao's by an import. `patterns` names common
structures, `schedules` change budgets over time.
"""

from . import coupling, densities, dynamic, export, patterns, schedules
from .algebra import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, SparseBlock, SparseScope, View
from .coupling import Coupling
from .dynamic import GMP, SET, SNFS, SRSTE, STE, DynamicSparsifier, RigL, Static, StraightThrough, TopKAST
from .errors import CouplingError, SparsityError
from .masking import WeightMask
from .selection import keep_mask
from .sparsifiers.nearly_diagonal import NearlyDiagonalSparsifier
from .sparsifiers.report import Report, Row
from .sparsifiers.scope import ScopeSparsifier
from .sparsifiers.weight_norm import WeightNormSparsifier

__version__ = "0.1.0"

__all__ = [
    "GMP",
    "SET",
    "SNFS",
    "SRSTE",
    "STE",
    "BlockCoupling",
    "BlockSpec",
    "Coupling",
    "CouplingError",
    "DynamicSparsifier",
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
    "coupling",
    "densities",
    "dynamic",
    "export",
    "keep_mask",
    "patterns",
    "schedules",
]
