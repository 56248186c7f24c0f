"""Beyond one device: masks of sharded tensors, chosen as one process would choose them.

Nothing here imports `torch.distributed.tensor` before a DTensor is seen; plain tensors pass through. `README.md` in
this folder says how it works and why.
"""

from .placement import is_sharded
from .tensors import cut_like, fill, gathered_for, held_bytes, local, whole
from .update import Job, update_masks

__all__ = ["Job", "cut_like", "fill", "gathered_for", "held_bytes", "is_sharded", "local", "update_masks", "whole"]
