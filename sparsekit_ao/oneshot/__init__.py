"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .one_shot import LayerRow, OneShotReport, one_shot, prune
from .recover import BlockRow, RecoveryReport, recover

__all__ = ["BlockRow", "LayerRow", "OneShotReport", "RecoveryReport", "one_shot", "prune", "recover"]
