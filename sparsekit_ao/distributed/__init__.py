"""Sharded tensors, whose masks are those that one process would choose; see README.md in this folder.

`torch.distributed.tensor` is imported only when a DTensor is given; plain tensors do not need it.
"""

from .fsdp import (
    abandon_forward,
    fsdp_records,
    gathered,
    is_managed,
    move_record,
    refuse_gathered,
    refuse_sharded_first,
    refuse_wrapped_outside,
    reshard,
    without_fsdp_class,
)
from .placement import has_process_group, is_sharded, of_all_ranks, rank
from .select import choose_sharded, common_mesh
from .tensors import (
    LocalParts,
    all_agree,
    copy_values,
    from_local,
    full_tensor,
    is_placed_like,
    local,
    placed_like,
    sum_over_ranks,
)
