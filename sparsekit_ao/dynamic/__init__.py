"""Dynamic sparse training: masks that change during training, on any structure. See `DynamicSparsifier`."""

from . import criteria, inits
from .criteria import Rule, Slots
from .dynamic_mask import DynamicMask
from .methods import GMP, SET, SNFS, SRSTE, STE, RigL, Static, TopKAST
from .sparsifier import DynamicSparsifier
from .straight_through import StraightThrough
from .update import UpdateStatistics

__all__ = [
    "GMP",
    "SET",
    "SNFS",
    "SRSTE",
    "STE",
    "DynamicMask",
    "DynamicSparsifier",
    "RigL",
    "Rule",
    "Slots",
    "Static",
    "StraightThrough",
    "TopKAST",
    "UpdateStatistics",
    "criteria",
    "inits",
]
