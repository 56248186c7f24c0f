"""Removal of units that a pruned model holds as zeros: smaller dense models with the same outputs, verified."""

from .compaction import Compaction, KeptUnits, Size, compact
from .layers import shrink_experts, shrink_layers
from .manifest import cut_to
from .shrinking import shrink
from .trials import removable

__all__ = [
    "Compaction",
    "KeptUnits",
    "Size",
    "compact",
    "cut_to",
    "removable",
    "shrink",
    "shrink_experts",
    "shrink_layers",
]
