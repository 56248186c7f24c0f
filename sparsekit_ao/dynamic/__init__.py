"""Dynamic sparse training: masks that change during training, on any structure. See `DynamicSparsifier`."""

from . import inits, rules
from .apply import Movement
from .mask import DynamicMask
from .methods import GMP, SET, SNFS, SRSTE, STE, RigL, Static, TopKAST
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
    "inits",
    "rules",
]
