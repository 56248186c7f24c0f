"""Exact masks: score blocks, choose exactly as many as the budget says, fill the mask. See README.md beside this."""

from .api import (
    block_scores,
    fill_mask,
    keep_mask,
    keep_masks,
    scope_mask,
    scope_masks,
    scope_scores,
    threshold_backend,
)
from .backend import check_impl
from .finish import finished
from .tiling import Blocks, Scopes, from_scopes, to_scopes
from .work import Newton, Norm, Threshold, Update
