"""One-shot pruning of trained models: masks and compensated weights in one pass over calibration data."""

from .prune_report import BlockRow, DryRun, PruneReport, RecoverReport
from .pruning import one_shot, prune
from .quality import QualityReport, QualityRow, mixed, quality, spliced
from .recovery import recover
from .solving import LayerRow

__all__ = [
    "BlockRow",
    "DryRun",
    "LayerRow",
    "PruneReport",
    "QualityReport",
    "QualityRow",
    "RecoverReport",
    "mixed",
    "one_shot",
    "prune",
    "quality",
    "recover",
    "spliced",
]
