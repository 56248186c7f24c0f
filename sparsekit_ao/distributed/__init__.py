"""Beyond one device: masks of sharded tensors, chosen as one process would choose them.

Nothing here imports `torch.distributed.tensor` before a DTensor is seen; plain tensors pass through. `README.md` in
this folder says how it works and why.
"""

from .agreement import all_agree, total
from .fsdp import (
    bare,
    has_ranks,
    managed,
    refuse_gathered,
    refuse_sharded_first,
    refuse_wrapped_outside,
    rehome,
    reshard,
)
from .placement import is_sharded
from .tensors import beside, fill, held_bytes, is_beside, like, local, whole
from .update import Job, common_mesh, update_masks

__all__ = [
    "Job",
    "all_agree",
    "bare",
    "beside",
    "common_mesh",
    "fill",
    "has_ranks",
    "held_bytes",
    "is_beside",
    "is_sharded",
    "like",
    "local",
    "managed",
    "refuse_gathered",
    "refuse_sharded_first",
    "refuse_wrapped_outside",
    "rehome",
    "reshard",
    "total",
    "update_masks",
    "whole",
]
