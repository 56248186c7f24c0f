"""Statistics of layers over calibration data, which scores and compensation read."""

from .collect import Calibration, Target, call, checked_batches, run_batches, shown, tokens_of
from .forms import Form, form_of
from .statistics import GRADIENTS, INPUTS, NEEDS, Statistics, check_statistics

__all__ = [
    "GRADIENTS",
    "INPUTS",
    "NEEDS",
    "Calibration",
    "Form",
    "Statistics",
    "Target",
    "call",
    "check_statistics",
    "checked_batches",
    "form_of",
    "run_batches",
    "shown",
    "tokens_of",
]
