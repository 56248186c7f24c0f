"""Remove pruned units from a model, and compare the smaller model's outputs with the masked one's."""

from .compact import compact
from .manifest import cut_to
from .report import Compaction, KeptUnits, Size

__all__ = ["Compaction", "KeptUnits", "Size", "compact", "cut_to"]
