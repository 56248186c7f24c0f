"""Dynamic sparse training: masks that change during training, on any structure. See `DynamicSparsifier`."""

from . import criteria, inits
from .criteria import Criterion, Slots
from .dynamic_mask import DynamicMask
from .methods import GMP, SET, SNFS, SRSTE, STE, RigL, Static, TopKAST
from .sparsifier import DynamicSparsifier
from .straight_through import StraightThrough
from .update import UpdateStatistics

__all__ = ["GMP", "SET", "SNFS", "SRSTE", "STE", "Criterion", "DynamicMask", "DynamicSparsifier", "RigL", "Slots"]
__all__ += ["Static", "StraightThrough", "TopKAST", "UpdateStatistics", "criteria", "inits"]
