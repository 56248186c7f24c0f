"""Sharded tensors: their masks are those that one process would choose. See README.md in this folder.

`torch.distributed.tensor` is imported only once a DTensor is given; plain tensors need none of this.
"""

from .fsdp import (
    fsdp_records,
    has_process_group,
    move_record,
    refuse_gathered,
    refuse_sharded_first,
    refuse_wrapped_outside,
    reshard,
    without_fsdp_class,
)
from .placement import is_sharded
from .tensors import (
    all_agree,
    fill,
    from_local,
    full_tensor,
    is_placed_like,
    local,
    local_bytes,
    placed_like,
    sum_over_ranks,
)
from .update import common_mesh, update_masks

__all__ = [
    "all_agree",
    "common_mesh",
    "fill",
    "from_local",
    "fsdp_records",
    "full_tensor",
    "has_process_group",
    "is_placed_like",
    "is_sharded",
    "local",
    "local_bytes",
    "move_record",
    "placed_like",
    "refuse_gathered",
    "refuse_sharded_first",
    "refuse_wrapped_outside",
    "reshard",
    "sum_over_ranks",
    "update_masks",
    "without_fsdp_class",
]
