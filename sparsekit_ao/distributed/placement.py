"""Placement of sharded tensors: the box of a tensor that this rank holds, and how it cuts the blocks of a view.

Computes with shapes, strides and offsets. A `DTensor` is recognized by its attribute `placements`, so that
`torch.distributed.tensor` need not be imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..selection.strides import Shape, row_major
from ..structure import BlockSpec, ScopeMember

# How masks are chosen, by what is whole on every rank: each scope (LOCAL), each block (HISTOGRAM), or neither.
GATHERED, HISTOGRAM, LOCAL = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a tensor: its first index and its sizes, one entry a dimension."""

    start: Shape
    size: Shape


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of a view inside a box: its start in the view, its shape, and its strides in the box's own memory."""

    start: Shape
    shape: Shape
    stride: Shape

    def on(self, local: Tensor) -> Tensor:
        """This window on a tensor of the box's shape; a live alias of a contiguous one."""
        local = local.detach() if local.is_contiguous() else local.detach().contiguous()
        return local.as_strided(self.shape, self.stride, local.storage_offset())


def is_sharded(t: object) -> bool:
    """Whether a tensor is a `DTensor`, whatever its placements."""
    return hasattr(t, "placements")


def is_cut(t: Any) -> bool:
    """Whether ranks hold different parts of a tensor."""
    return is_sharded(t) and not all(p.is_replicate() for p in t.placements)


def is_part(own: Any, mesh: Any) -> bool:
    """Whether a mesh equals another one, or consists of some of its named dimensions."""
    names, wider = own.mesh_dim_names, mesh.mesh_dim_names
    return own == mesh or bool(names and wider and set(names) <= set(wider) and mesh[names] == own)


def cuts_of(t: Any, mesh: Any) -> tuple[int, ...]:
    """The dimensions of a mesh over which a tensor on (a part of) it is sharded; it is replicated over the others."""
    if not is_sharded(t):
        return ()
    own = t.device_mesh
    at = range(mesh.ndim) if own == mesh else [mesh.mesh_dim_names.index(n) for n in own.mesh_dim_names]
    return tuple(k for k, p in zip(at, t.placements, strict=True) if not p.is_replicate())


def box_of(t: Any) -> Box:
    """The box of a DTensor that this rank holds; padding not counted."""
    (chunk,) = t.__create_chunk_list__()
    return Box(start=tuple(chunk.offsets), size=tuple(chunk.sizes))


def window_of(spec: BlockSpec, box: Box) -> Window | None:
    """The part of a block spec's view inside a box, where that is a window again; else None.

    It is one where every dimension of the view steps along one dimension of the parameter, and the box cuts only the
    dimension of the largest step of each, between two steps.

    >>> import torch
    >>> spec = BlockSpec(torch.zeros(4, 8), (1, 2))
    >>> window_of(spec, Box(start=(2, 0), size=(2, 8)))
    Window(start=(2, 0), shape=(2, 8), stride=(8, 1))
    """
    view, full = spec.view, tuple(spec.view.param.shape)
    strides, inside = row_major(full), row_major(box.size)
    if view.param.stride() != strides or view.offset != 0:
        return None
    steps: dict[int, list[tuple[int, int]]] = {k: [] for k in range(len(full))}  # of each dimension (step, view dim)
    for j, (n, d) in enumerate(zip(view.shape, view.stride, strict=True)):
        if n == 1:
            continue
        k = next((k for k in range(len(full)) if full[k] > 1 and strides[k] <= d < strides[k] * full[k]), None)
        if k is None or d % strides[k] or (d // strides[k]) * (n - 1) >= full[k]:
            return None
        steps[k].append((d // strides[k], j))
    start, shape, stride = [0] * view.ndim, list(view.shape), [0] * view.ndim
    for k, found in steps.items():
        for step, j in found:
            stride[j] = step * inside[k]
        if box.size[k] == full[k]:
            continue
        largest = _largest_step(sorted(found), view.shape, full[k])
        if largest is None or box.start[k] % largest[0] or box.size[k] % largest[0]:
            return None
        step, j = largest
        start[j], shape[j] = box.start[k] // step, box.size[k] // step
    return Window(start=tuple(start), shape=tuple(shape), stride=tuple(stride))


def _largest_step(found: Sequence[tuple[int, int]], sizes: Shape, length: int) -> tuple[int, int] | None:
    """The largest of the steps along one dimension, if they are nested and cover all of it."""
    covered = 1
    for step, j in found:
        if step != covered:
            return None
        covered *= sizes[j]
    return found[-1] if found and covered == length else None


def method_of(member: ScopeMember, box: Box) -> int:
    """How masks of a scope's member can be chosen where this rank holds a box of its tensor.

    LOCAL where the box cuts no scope, HISTOGRAM where it cuts no block, else GATHERED; also GATHERED for blocks of
    several tensors and blocks at a partial edge.
    """
    specs = member.block.blocks()
    window = window_of(specs[0], box) if len(specs) == 1 else None
    if window is None:
        return GATHERED
    block, sizes = specs[0].shape, specs[0].view.shape
    cut = [
        (at, at + n, b, b * g, size)
        for at, n, b, size, g in zip(window.start, window.shape, block, sizes, member.shape, strict=True)
        if n != size
    ]
    if any(size % b for size, b in zip(sizes, block, strict=True)) or any(at % b or end % b for at, end, b, *_ in cut):
        return GATHERED
    inside = all(at % t == 0 and (end % t == 0 or end == size) for at, end, _, t, size in cut)
    return LOCAL if inside or 0 in window.shape else HISTOGRAM
