"""Exact masks: score blocks, choose exactly as many as the budget says, fill the mask. See README.md beside this."""

from .api import BACKENDS, fill_masks, keep_mask
from .request import Request
