"""Exact masks: score blocks, choose exactly as many as the budget says, fill the mask. See README.md beside this."""

from .api import BACKENDS, keep_mask, update_masks
from .request import Request
