"""Operations on sharded tensors: gather and fill them, place masks like their weights, sum counts.

Every function also takes plain tensors, for which nothing is sent. With a DTensor, all of them are collective: every
rank must call them, in the same order.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from .placement import box_of, is_part, is_sharded


def local(t: Any) -> Tensor:
    """This rank's part of a tensor: a live alias, outside autograd."""
    with torch.no_grad():
        return t.to_local().detach() if is_sharded(t) else t.detach()


def full_tensor(t: Any) -> Tensor:
    """The full tensor, gathered from the ranks; a plain one as it is."""
    if not is_sharded(t):
        return t
    with torch.no_grad():
        if t.dtype == torch.bool and torch.compiler.is_compiling():  # Inductor treats a gathered bool as an integer
            return t.detach().to(torch.uint8).full_tensor() != 0
        return t.detach().full_tensor()


def part_of(t: Any, like: Any) -> Tensor:
    """The part of a tensor that this rank holds of `like`, which is sharded further; a view."""
    box, first = box_of(like), box_of(t).offsets if is_sharded(t) else (0,) * like.ndim
    return local(t)[tuple(slice(at - f, at - f + n) for at, f, n in zip(box.offsets, first, box.sizes, strict=True))]


@torch.no_grad()
def copy_values(target: Tensor, values: Tensor) -> None:
    """Copy values of the same global shape into a tensor, in place, however each of them is sharded."""
    if not is_sharded(target):
        target.copy_(full_tensor(values))
    elif is_placed_like(values, target):
        local(target).copy_(local(values))
    else:
        local(target).copy_(part_of(full_tensor(values), target))


def is_placed_like(mask: Any, weight: Any) -> bool:
    """Whether both are plain, or have the same mesh and placements."""
    if not (is_sharded(mask) and is_sharded(weight)):
        return is_sharded(mask) == is_sharded(weight)
    return mask.device_mesh == weight.device_mesh and tuple(mask.placements) == tuple(weight.placements)


def placed_like(mask: Any, weight: Any) -> Tensor:
    """The mask with the mesh and placements of its weight; only a mask that is sharded further than it is sent."""
    if is_placed_like(mask, weight):
        return mask
    if not is_sharded(weight):
        return full_tensor(mask).to(weight.device)  # an offloaded shard is on the CPU
    of_mask, of_weight = getattr(mask, "device_mesh", None), weight.device_mesh
    if of_mask is None or (of_mask != of_weight and is_part(of_mask, of_weight)):
        part = part_of(mask, weight)
    elif is_part(of_weight, of_mask):  # the weight was gathered over some dimensions of the mask's mesh
        from torch.distributed.tensor import Replicate

        placements = weight.placements
        if of_mask != of_weight:
            kept = dict(zip(of_weight.mesh_dim_names, placements, strict=True))
            placements = [kept.get(name, Replicate()) for name in of_mask.mesh_dim_names]
        part = mask.redistribute(placements=placements).to_local()
    else:
        raise SparsityError(
            f"the mask is on the mesh {of_mask}, its weight on {of_weight}, and neither is part of the other. Name the "
            "dimensions of the meshes (mesh_dim_names)."
        )
    return from_local(part.detach().clone(memory_format=torch.contiguous_format), weight)


def from_local(part: Tensor, weight: Any) -> Tensor:
    """This rank's part as a tensor with the mesh and placements of another; nothing is copied."""
    if not is_sharded(weight):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


class LocalParts:
    """This rank's parts of a parameter and its mask, and of its gradient, which is first sharded like the parameter."""

    gradient: Tensor

    def __init__(self, parameter: Any, mask: Tensor, *, has_gradient: bool = False) -> None:
        self.parameter, self.weight, self.mask = parameter, local(parameter), local(mask)
        if has_gradient:
            if not is_placed_like(parameter.grad, parameter):
                parameter.grad = placed_like(parameter.grad, parameter)
            self.gradient = local(parameter.grad)

    def put_back(self, part: Tensor) -> Tensor:
        """Return a part as a tensor that is sharded like the parameter."""
        return from_local(part, self.parameter)


def all_agree(condition: bool | Tensor, tensors: Iterable[Any]) -> bool | Tensor:
    """Whether a condition is true on all ranks of the tensors' meshes; a tensor if it is one or if there are meshes."""
    for mesh in {t.device_mesh: None for t in tensors if is_sharded(t)}:
        flag = torch.ones((), dtype=torch.int32, device=mesh.device_type)
        flag *= condition.to(mesh.device_type, non_blocking=True) if isinstance(condition, Tensor) else condition
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
        condition = flag
    return condition


def sum_over_ranks(counts: Tensor, of: Any) -> Tensor:
    """Counts of this rank's part of a tensor, summed over the ranks that hold other parts of it."""
    if is_sharded(of):
        counts = counts.clone()
        for dim, placement in enumerate(of.placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(counts, group=of.device_mesh.get_group(dim))
    return counts
