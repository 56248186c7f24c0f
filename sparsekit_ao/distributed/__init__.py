"""Beyond one device: masks of sharded tensors, chosen as one process would choose them.

Nothing here imports `torch.distributed.tensor` before a DTensor is seen; plain tensors pass through. `README.md` in
this folder says how it works and why.
"""

from .fsdp import (
    bare,
    is_managed,
    managed,
    refuse_gathered,
    refuse_sharded_first,
    refuse_wrapped_outside,
    rehome,
    reshard,
)
from .placement import is_sharded
from .tensors import beside, fill, held_bytes, is_beside, local, whole
from .update import Job, common_mesh, update_masks

__all__ = [
    "Job",
    "bare",
    "beside",
    "common_mesh",
    "fill",
    "held_bytes",
    "is_beside",
    "is_managed",
    "is_sharded",
    "local",
    "managed",
    "refuse_gathered",
    "refuse_sharded_first",
    "refuse_wrapped_outside",
    "rehome",
    "reshard",
    "update_masks",
    "whole",
]
