"""Finds the box of a sharded tensor that this rank holds, and how it cuts the blocks of a view.

It computes with shapes, strides and offsets only. A `DTensor` is recognized by its attribute `placements`, so that
`torch.distributed.tensor` need not be imported.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..structure import BlockSpec, ScopeMember
from ..structure.tiles import Shape, row_major

# How masks are chosen, by what is whole on every rank: each scope (LOCAL), each block (BISECTION), or neither.
GATHERED, BISECTION, LOCAL = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class LocalWindow:
    """The part of a view inside a box: its start in the view and its shape."""

    start: Shape
    shape: Shape
    steps: tuple[tuple[int, int], ...]  # for each dimension: that of the parameter which it steps along, and how far

    def on(self, local: Tensor) -> Tensor:
        """A live alias of this window on a tensor of the box's shape, whatever its strides."""
        return local.as_strided(self.shape, [local.stride(k) * n for k, n in self.steps], local.storage_offset())


def has_process_group() -> bool:
    """Whether there is a process group; without one nothing is sharded."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """The number of this process in the default group; 0 without one."""
    return torch.distributed.get_rank() if has_process_group() else 0


def of_all_ranks(value: Any) -> list[Any]:
    """The values that all ranks of the default group give, in order; that of this process alone without a group."""
    if not has_process_group():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def is_sharded(t: object) -> bool:
    """Whether a tensor is a `DTensor`, whatever its placements."""
    return hasattr(t, "placements")


def is_part(mesh: Any, of: Any) -> bool:
    """Whether a mesh equals another one, or consists of some of its named dimensions."""
    names, wider = mesh.mesh_dim_names, of.mesh_dim_names
    return mesh == of or bool(names and wider and set(names) <= set(wider) and of[names] == mesh)


def cuts_of(t: Any, mesh: Any) -> tuple[int, ...]:
    """Return the dimensions of a mesh over which a tensor, on all or a part of it, is sharded and not replicated."""
    if not is_sharded(t):
        return ()
    part = t.device_mesh
    at = range(mesh.ndim) if part == mesh else [mesh.mesh_dim_names.index(n) for n in part.mesh_dim_names]
    return tuple(k for k, p in zip(at, t.placements, strict=True) if not p.is_replicate())


def box_of(t: Any) -> Any:
    """The box of a DTensor that this rank holds, by its `offsets` and `sizes`; padding not counted."""
    (chunk,) = t.__create_chunk_list__()
    return chunk


def window_of(spec: BlockSpec, box: Any) -> LocalWindow | None:
    """Return the part of a block spec's view inside a box, or None where that is not a window."""
    view, full = spec.view, tuple(spec.view.param.shape)
    strides = row_major(full)
    if view.param.stride() != strides or view.offset != 0:
        return None
    steps = [(0, 0)] * view.ndim
    for j, (n, d) in enumerate(zip(view.shape, view.stride, strict=True)):
        if n == 1:
            continue
        # every dimension of the view must step along one dimension of the parameter
        k = next((k for k in range(len(full)) if full[k] > 1 and strides[k] <= d < strides[k] * full[k]), None)
        if k is None or d % strides[k] or (d // strides[k]) * (n - 1) >= full[k]:
            return None
        steps[j] = (k, d // strides[k])
    start, shape = [0] * view.ndim, list(view.shape)
    for k, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size == full[k]:
            continue
        largest, covered = None, 1  # the steps along a dimension that is cut must be nested and cover all of it
        for step, j in sorted((step, j) for j, (dim, step) in enumerate(steps) if step and dim == k):
            if step != covered:
                return None
            largest, covered = (step, j), step * view.shape[j]
        # the box may cut only the dimension of the largest step, between two steps
        if largest is None or covered != full[k] or at % largest[0] or size % largest[0]:
            return None
        step, j = largest
        start[j], shape[j] = at // step, size // step
    return LocalWindow(start=tuple(start), shape=tuple(shape), steps=tuple(steps))


def method_of(member: ScopeMember, value: Any) -> int:
    """Return how masks of a scope's member can be chosen, for this rank; `value` is that of its first block spec."""
    spec, *more = member.block.blocks()
    if not (more or is_sharded(value)):
        return LOCAL
    window = None if more else window_of(spec, box_of(value))
    if window is None:
        return GATHERED
    is_whole, view = True, spec.view.shape
    for at, n, block, size, tile in zip(window.start, window.shape, spec.shape, view, member.shape, strict=True):
        end, scope = at + n, block * tile
        if size % block or (n != size and (at % block or end % block)):
            return GATHERED
        is_whole &= n == size or (at % scope == 0 and (end % scope == 0 or end == size))
    return LOCAL if is_whole or 0 in window.shape else BISECTION
