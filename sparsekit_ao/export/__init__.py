"""Dense state dicts of masked models; units removed from a model, and its outputs compared with the masked one's."""

from ..masking import dense_state_dict
from .compact import compact
from .manifest import cut_to
from .removable import removable
from .report import Compaction, KeptUnits, Size
from .shrink import shrink

__all__ = ["Compaction", "KeptUnits", "Size", "compact", "cut_to", "dense_state_dict", "removable", "shrink"]
