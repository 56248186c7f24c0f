"""Sparsifiers, which make masks from config dicts."""

from .base import MaskSparsifier
from .drop_ins import NearlyDiagonalSparsifier, WeightNormSparsifier
from .proximal import ProximalSparsifier
from .report import Report, Row
from .scope import BudgetSparsifier, ScopeSparsifier

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
