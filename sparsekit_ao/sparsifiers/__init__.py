"""Sparsifiers, which make masks from config dicts."""

from .base import MaskSparsifier
from .nearly_diagonal import NearlyDiagonalSparsifier
from .proximal import ProximalSparsifier
from .report import Report, Row
from .scope import BudgetSparsifier, ScopeSparsifier
from .weight_norm import WeightNormSparsifier

__all__ = [
    "BudgetSparsifier",
    "MaskSparsifier",
    "NearlyDiagonalSparsifier",
    "ProximalSparsifier",
    "Report",
    "Row",
    "ScopeSparsifier",
    "WeightNormSparsifier",
]
