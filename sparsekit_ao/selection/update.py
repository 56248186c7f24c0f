"""One mask update as a value, so that many of them can be handed over together."""

from dataclasses import dataclass

from torch import Tensor

from .reference import Norm
from .tiling import Scopes

__all__ = ["Update"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """What one set of scopes is to become.

    Attributes:
        groups: scopes with values and masks; at one aligned scope index the blocks of all groups compete.
        keep: blocks kept in each scope: an int, or an integer tensor of the shape of the aligned scope grid (or of
            none).
        norm: 1, 2, inf, or a callable giving a saliency per element.
        stage: choose only among blocks that the masks still hold.
    """

    groups: tuple[Scopes, ...]
    keep: int | Tensor
    norm: Norm = 2
    among_kept: bool = False
