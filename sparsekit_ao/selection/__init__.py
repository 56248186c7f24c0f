"""The hot path: score blocks, choose exactly as many as the budget says, fill the mask. See README.md beside this."""

from .api import IMPLS, block_scores, fill_mask, keep_mask, scope_mask, scope_scores
from .batch import scope_masks
from .proximal import check_impl, condition_path, threshold_path
from .radix import CHUNK
from .reference import Norm
from .tiling import Blocks, Scopes, from_scopes, to_scopes
from .update import Update

__all__ = [
    "CHUNK",
    "IMPLS",
    "Blocks",
    "Norm",
    "Scopes",
    "Update",
    "block_scores",
    "check_impl",
    "condition_path",
    "fill_mask",
    "from_scopes",
    "keep_mask",
    "scope_mask",
    "scope_masks",
    "scope_scores",
    "threshold_path",
    "to_scopes",
]
