"""Triton kernels and their launchers, imported only when called. See README.md beside this."""

from triton import JITFunction

from .blocks import fused_kernel
from .forms import Limits
from .launch import block_scores, condition, condition_reasons, keep_mask, scope_masks, threshold, threshold_reasons
from .reasons import reasons_of, rows_reasons, score_reasons
from .shared import SharedRows

INTERPRETED = not isinstance(fused_kernel, JITFunction)  # TRITON_INTERPRET=1: kernels run on CPU tensors, slowly
