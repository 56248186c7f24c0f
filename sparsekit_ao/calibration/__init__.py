"""Statistics of layers over calibration data, which scores and compensation read."""

from .adapters import SAMPLED, LayerAdapter, adapter_of, token_rows
from .gram import RowGram, damped_gram, damped_inverse
from .products import other_matrices
from .recorder import Recorder, Recording
from .statistics import GRADIENTS, INPUTS, NEEDS, Statistics, Target
