"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .one_shot import LayerRow, OneShotReport, one_shot

__all__ = ["LayerRow", "OneShotReport", "one_shot"]
