"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .one_shot import one_shot
from .report import LayerRow, OneShotReport

__all__ = ["LayerRow", "OneShotReport", "one_shot"]
