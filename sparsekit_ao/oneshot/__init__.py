"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .prune_report import BlockRow, DryRun, PruneReport, RecoverReport
from .pruning import one_shot, prune
from .recovery import recover
from .solving import LayerRow

__all__ = ["BlockRow", "DryRun", "LayerRow", "PruneReport", "RecoverReport", "one_shot", "prune", "recover"]
