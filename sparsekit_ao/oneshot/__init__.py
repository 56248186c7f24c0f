"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .report import LayerRow, OneShotReport
from .run import one_shot

__all__ = ["LayerRow", "OneShotReport", "one_shot"]
