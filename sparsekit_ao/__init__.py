"""sparsekit_ao: exact structured sparsity as a drop-in plugin for `torch.ao.pruning`.

`ScopeSparsifier` turns config dicts into views, blocks and scopes and keeps exactly as many blocks as each budget says.
Drop-ins for the classes there are `WeightNormSparsifier` and `NearlyDiagonalSparsifier`. Common structures are in
`patterns`; `schedules` change budgets over time.
"""

from . import coupling, densities, dynamic, export, patterns, removal, schedules, scores
from .checkpoints import shrink_vocabulary
from .coupling import Coupling
from .dynamic import GMP, SET, SNFS, SRSTE, STE, DynamicSparsifier, RigL, Static, StraightThrough, TopKAST
from .errors import CouplingError, SparsityError
from .masking import WeightMask
from .oneshot import mixed, one_shot, prune, quality, recover, spliced
from .removal import shrink
from .selection import keep_mask
from .sparsifiers import NearlyDiagonalSparsifier, ProximalSparsifier, ScopeSparsifier, WeightNormSparsifier
from .structure import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, View
from .version import __version__ as __version__

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
    "ProximalSparsifier",
    "RigL",
    "ScopeCoupling",
    "ScopeSparsifier",
    "ScopeSpec",
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
    "mixed",
    "one_shot",
    "patterns",
    "prune",
    "quality",
    "recover",
    "removal",
    "schedules",
    "scores",
    "shrink",
    "shrink_vocabulary",
    "spliced",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
