"""Dynamic sparse training: masks that move while training goes on, on any structure. See `DynamicSparsifier`."""

from . import grow, inits, prune, redistribute
from .masking import DynamicMask
from .methods import GMP, SET, SNFS, SRSTE, STE, RigL, Static, TopKAST
from .movement import Movement
from .rules import Rule
from .slots import Slots
from .sparsifier import DynamicSparsifier
from .straight_through import StraightThrough

__all__ = [
    "GMP",
    "SET",
    "SNFS",
    "SRSTE",
    "STE",
    "DynamicMask",
    "DynamicSparsifier",
    "Movement",
    "RigL",
    "Rule",
    "Slots",
    "Static",
    "StraightThrough",
    "TopKAST",
    "grow",
    "inits",
    "prune",
    "redistribute",
]
