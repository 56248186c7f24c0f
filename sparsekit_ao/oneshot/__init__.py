"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .one_shot_report import BlockRow, DryRun, OneShotReport, RecoveryReport
from .pruning import one_shot, prune
from .recovery import recover
from .solving import LayerRow

__all__ = ["BlockRow", "DryRun", "LayerRow", "OneShotReport", "RecoveryReport", "one_shot", "prune", "recover"]
