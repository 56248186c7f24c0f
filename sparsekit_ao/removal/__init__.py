"""Removal of units that a pruned model holds as zeros: smaller dense models with the same outputs, verified."""

from .compaction import compact
from .find import removable
from .layers import shrink_experts, shrink_layers
from .manifest import cut_to
from .removal_report import KeptUnits, ShrinkReport, Size
from .shrinking import shrink

__all__ = ["KeptUnits", "ShrinkReport", "Size", "compact", "cut_to", "removable", "shrink"]
__all__ += ["shrink_experts", "shrink_layers"]
