"""What ranks tell each other about tensors that they hold parts of: whether all are ready, how much there is in all.

Knows meshes and numbers; plain tensors are everybody's own, and nothing is sent for them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .placement import is_sharded

__all__ = ["all_agree", "sum_over_ranks"]


def all_agree(holds: bool, tensors: Iterable[Any]) -> bool:
    """Whether something holds on every rank of the tensors' meshes.

    >>> all_agree(True, [torch.ones(2)])
    True
    """
    for mesh in {t.device_mesh: None for t in tensors if is_sharded(t)}:
        flag = torch.tensor(int(holds), dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
        holds = bool(flag)
    return holds


def sum_over_ranks(counts: Tensor, of: Any) -> Tensor:
    """Numbers counted on this rank's part of a tensor, summed over the ranks that hold other parts of it.

    >>> sum_over_ranks(torch.tensor([3, 4]), torch.ones(2))
    tensor([3, 4])
    """
    if is_sharded(of):
        counts = counts.clone()
        for dim, placement in enumerate(of.placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(counts, group=of.device_mesh.get_group(dim))
    return counts
