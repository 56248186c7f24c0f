"""Out to users: what is zero is really removed, and the smaller dense model is checked against the masked one."""

from .compact import compact
from .manifest import cut_to
from .report import Compaction, KeptUnits, Size

__all__ = ["Compaction", "KeptUnits", "Size", "compact", "cut_to"]
