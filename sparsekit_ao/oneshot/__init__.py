"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .layers import LayerRow
from .matching import BlockRow, RecoveryReport, recover
from .pruning import OneShotReport, one_shot, prune

__all__ = ["BlockRow", "LayerRow", "OneShotReport", "RecoveryReport", "one_shot", "prune", "recover"]
