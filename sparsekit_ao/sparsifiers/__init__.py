"""Sparsifiers, which make masks from config dicts."""

from .base import MaskSparsifier
from .calibrated import Calibrated
from .drop_ins import NearlyDiagonalSparsifier, WeightNormSparsifier
from .proximal import ProximalSparsifier
from .report import Report, Row
from .scope import BudgetSparsifier, ScopeSparsifier

__all__ = ["BudgetSparsifier", "Calibrated", "MaskSparsifier", "NearlyDiagonalSparsifier", "ProximalSparsifier"]
__all__ += ["Report", "Row", "ScopeSparsifier", "WeightNormSparsifier"]
