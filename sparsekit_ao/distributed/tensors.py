"""Sharded tensors as the rest of the library meets them: make one whole, fill one, cut a mask like its weight.

Every function takes plain tensors too and then does the plain thing. All of them are collective where a DTensor is
involved: every rank must call them, in the same order.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from .placement import box_of, is_sharded

__all__ = ["beside", "fill", "held_bytes", "local", "whole"]


def local(t: Any) -> Tensor:
    """What this rank holds of a tensor: a live alias, outside autograd."""
    with torch.no_grad():
        return t.to_local().detach() if is_sharded(t) else t.detach()


def whole(t: Any) -> Tensor:
    """The whole tensor, gathered from the ranks; a plain one as it is.

    >>> t = torch.ones(2)
    >>> whole(t) is t
    True
    """
    if not is_sharded(t):
        return t
    with torch.no_grad():
        return t.detach().full_tensor()


def held_bytes(t: Tensor) -> int:
    """Bytes of a tensor on this rank."""
    held = local(t)
    return held.numel() * held.element_size()


def part_of(t: Tensor, like: Tensor) -> Tensor:
    """Of a whole plain tensor the part that this rank holds of `like`."""
    box = box_of(like)
    return t[tuple(slice(at, at + n) for at, n in zip(box.start, box.size, strict=True))]


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Copy values of the same global shape into a tensor, in place, however each of them is sharded."""
    if is_sharded(values) and is_sharded(target) and _placed_alike(values, target):
        local(target).copy_(local(values))
    elif is_sharded(target):
        local(target).copy_(part_of(whole(values), target))
    else:
        target.copy_(whole(values))


def beside(mask: Tensor, weight: Any) -> Tensor:
    """The mask as it lies beside its weight, whichever of them is sharded.

    A whole mask is cut like a sharded weight, and nothing is sent. A sharded mask is gathered for a gathered weight,
    over the mesh dimensions that the weight is no longer sharded over.

    Args:
        mask: of the weight's global shape.
        weight: plain, or a DTensor on the mask's mesh or a part of it.

    >>> mask = torch.ones(2, dtype=torch.bool)
    >>> beside(mask, torch.zeros(2)) is mask
    True
    """
    if not is_sharded(mask):
        return _cut(mask, weight) if is_sharded(weight) else mask
    if not is_sharded(weight):
        return whole(mask)
    return mask if _placed_alike(mask, weight) else _replaced(mask, weight)


def _cut(mask: Tensor, weight: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    part = part_of(mask.detach(), weight).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _replaced(mask: Any, weight: Any) -> Tensor:
    """The mask gathered over the mesh dimensions that its weight is no longer sharded over."""
    from torch.distributed.tensor import DTensor, Replicate

    names, kept = mask.device_mesh.mesh_dim_names, weight.device_mesh.mesh_dim_names
    if not names or not kept or not set(kept) <= set(names):
        raise SparsityError(
            f"the mask is sharded over the mesh {mask.device_mesh}, its weight over {weight.device_mesh}, and "
            "one is not part of the other. Name the dimensions of the meshes (mesh_dim_names)."
        )
    placements = [weight.placements[kept.index(n)] if n in kept else Replicate() for n in names]
    here = mask.redistribute(placements=placements).to_local()
    return DTensor.from_local(
        here, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _placed_alike(a: Any, b: Any) -> bool:
    return a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)
