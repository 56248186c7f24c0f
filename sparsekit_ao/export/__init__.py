"""Dense state dicts of masked models; units removed from a model, and its outputs compared with the masked one's."""

from ..masking import dense_state_dict
from .check import check
from .compact import compact
from .manifest import cut_to
from .report import Compaction, Conversion, KeptUnits, Size

__all__ = ["Compaction", "Conversion", "KeptUnits", "Size", "check", "compact", "cut_to", "dense_state_dict"]
