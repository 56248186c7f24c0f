"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .matching import BlockRow, RecoveryReport, recover
from .one_shot_report import DryRun, OneShotReport
from .pruning import one_shot, prune, sensitivity
from .solving import LayerRow

__all__ = ["BlockRow", "DryRun", "LayerRow", "OneShotReport", "RecoveryReport", "one_shot", "prune", "recover"]
__all__ += ["sensitivity"]
