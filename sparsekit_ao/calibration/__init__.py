"""Statistics of layers over calibration data, which scores and compensation read."""

from .adapters import SAMPLED, LayerAdapter, adapter_of, token_rows
from .calibrate import (
    GRADIENTS,
    INPUTS,
    NEEDS,
    Calibration,
    Forward,
    RowGram,
    Statistics,
    Target,
    TokenMask,
    call,
    check_batch,
    checked_batches,
    damped_gram,
    damped_inverse,
    eval_mode,
    loaded_statistics,
    progress_bar,
    run_batches,
    token_mask_of,
)
