"""Sharded tensors as the rest of the library meets them: make one whole, fill one, cut a mask like its weight.

Every function takes plain tensors too and then does the plain thing. All of them are collective where a DTensor is
involved: every rank must call them, in the same order.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from .placement import box_of, is_part, is_sharded

__all__ = [
    "contiguous_copy",
    "fill",
    "from_local",
    "full_tensor",
    "is_placed_like",
    "local",
    "local_bytes",
    "placed_like",
]


def local(t: Any) -> Tensor:
    """What this rank holds of a tensor: a live alias, outside autograd."""
    with torch.no_grad():
        return t.to_local().detach() if is_sharded(t) else t.detach()


def full_tensor(t: Any) -> Tensor:
    """The whole tensor, gathered from the ranks; a plain one as it is.

    >>> t = torch.ones(2)
    >>> full_tensor(t) is t
    True
    """
    if not is_sharded(t):
        return t
    with torch.no_grad():
        if t.dtype == torch.bool and torch.compiler.is_compiling():  # Inductor takes a gathered bool for an integer
            return t.detach().to(torch.uint8).full_tensor() != 0
        return t.detach().full_tensor()


def local_bytes(t: Tensor) -> int:
    """Bytes of a tensor on this rank."""
    held = local(t)
    return held.numel() * held.element_size()


def contiguous_copy(t: Any) -> Tensor:
    """A copy of a DTensor whose part on this rank is contiguous; nothing is sent."""
    return _copy_like(local(t), t)


def part_of(t: Any, like: Any) -> Tensor:
    """Of what this rank holds of a tensor the part that it holds of `like`, which is cut further; a view."""
    box, first = box_of(like), box_of(t).start if is_sharded(t) else (0,) * like.ndim
    return local(t)[tuple(slice(at - f, at - f + n) for at, f, n in zip(box.start, first, box.size, strict=True))]


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Copy values of the same global shape into a tensor, in place, however each of them is sharded."""
    if is_sharded(values) and is_sharded(target) and _placed_alike(values, target):
        local(target).copy_(local(values))
    elif is_sharded(target):
        local(target).copy_(part_of(full_tensor(values), target))
    else:
        target.copy_(full_tensor(values))


def placed_like(mask: Any, weight: Any) -> Tensor:
    """The mask as it lies beside its weight, whichever of them is cut further.

    A mask is cut like its weight, and nothing is sent; a mask that is cut further is gathered as its weight was.

    Args:
        mask: of the weight's global shape.
        weight: plain, or a DTensor; of their meshes one is the other's or a named part of it.

    >>> mask = torch.ones(2, dtype=torch.bool)
    >>> placed_like(mask, torch.zeros(2)) is mask
    True
    """
    if not is_sharded(weight):
        return full_tensor(mask).to(weight.device) if is_sharded(mask) else mask  # an offloaded shard lies on the CPU
    if not is_sharded(mask):
        return _copy_like(part_of(mask, weight), weight)
    if _placed_alike(mask, weight):
        return mask
    if mask.device_mesh != weight.device_mesh and is_part(mask.device_mesh, weight.device_mesh):
        return _copy_like(part_of(mask, weight), weight)
    return _copy_like(_gathered(mask, weight), weight)


def is_placed_like(mask: Any, weight: Any) -> bool:
    """Whether both are plain, or lie on the ranks alike."""
    return is_sharded(mask) == is_sharded(weight) and (not is_sharded(mask) or _placed_alike(mask, weight))


def _gathered(mask: Any, weight: Any) -> Tensor:
    """This rank's part of a weight that was gathered over some dimensions of the mask's mesh."""
    from torch.distributed.tensor import Replicate

    own, kept = mask.device_mesh, weight.device_mesh
    if own == kept:
        return mask.redistribute(placements=weight.placements).to_local()
    if not is_part(kept, own):
        raise SparsityError(
            f"the mask lies on the mesh {own}, its weight on {kept}, and neither is part of the other. Name the "
            "dimensions of the meshes (mesh_dim_names)."
        )
    names = kept.mesh_dim_names
    at = [weight.placements[names.index(n)] if n in names else Replicate() for n in own.mesh_dim_names]
    return mask.redistribute(placements=at).to_local()


def from_local(part: Tensor, weight: Any) -> Tensor:
    """What this rank holds, as a tensor that lies as another does; nothing is copied.

    >>> t = torch.ones(2)
    >>> from_local(t, torch.zeros(2)) is t
    True
    """
    if not is_sharded(weight):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _copy_like(part: Tensor, weight: Any) -> Tensor:
    return from_local(part.detach().clone(memory_format=torch.contiguous_format), weight)


def _placed_alike(a: Any, b: Any) -> bool:
    return a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)
