"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .dry import DryRun, PlannedRow
from .matching import BlockRow, RecoveryReport, recover
from .pruning import OneShotReport, one_shot, prune
from .solving import LayerRow

__all__ = ["BlockRow", "DryRun", "LayerRow", "OneShotReport", "PlannedRow", "RecoveryReport"]
__all__ += ["one_shot", "prune", "recover"]
