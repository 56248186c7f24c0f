"""Triton kernels and their launches, imported only when called. See README.md beside this."""

from triton import JITFunction

from .launches import fill_masks
from .lowering import lower, lower_rows
from .short_rows import fused_kernel

INTERPRETED = not isinstance(fused_kernel, JITFunction)  # TRITON_INTERPRET=1: kernels run on CPU tensors, slowly
