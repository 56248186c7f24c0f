"""Mask updates of sharded tensors: every rank fills its part of the masks that one process would choose, bit for bit.

Takes `structure.MaskUpdate`s with DTensors in them. For each, all ranks agree on a method: LOCAL where every scope is
whole on a rank (nothing is sent), HISTOGRAM where every block is (histograms of scores are summed), else GATHERED (the
tensors are gathered while their masks are chosen).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import structure
from ..errors import SparsityError
from ..selection import Blocks, Scopes, Update, scope_masks
from ..selection.radix import BITS
from ..selection.strides import Shape
from ..structure import BlockSpec, MaskUpdate, ScopeMember, block_windows
from .device_passes import choose_on_device, kernels_take
from .pieces import Piece, Selection, choose_passes, dtype_of, run_together, sum_over
from .placement import GATHERED, HISTOGRAM, LOCAL, box_of, cuts_of, is_cut, is_part, is_sharded, method_of, window_of
from .tensors import copied_like, fill, full_tensor, local

FEW = 32  # scopes up to which histograms are summed even where the weights would be fewer bytes


@torch.no_grad()
def update_masks(updates: Sequence[MaskUpdate]) -> None:
    """Fill the masks of updates that do not depend on each other, in place; of sharded masks each rank its part.

    Collective where a tensor is sharded: every rank of its mesh calls this with the same updates. Values and masks of
    each are plain, or DTensors on one mesh and named parts of it.
    """
    by_mesh: dict[Any, list[MaskUpdate]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for update in updates:
        mesh = common_mesh([(spec.name, update.value_of(spec)) for spec in update.scope.blocks()])
        by_mesh.setdefault(mesh, []).append(update if mesh is None else _with_contiguous_masks(update, copies))
    structure.update_masks(by_mesh.pop(None, []))
    for mesh, found in by_mesh.items():
        _update_on(mesh, found)
    for mask, filled in copies:
        fill(mask, filled)


def common_mesh(tensors: Sequence[tuple[str | None, Any]]) -> Any:
    """The widest mesh of (name, tensor) that are chosen together; None where all of them are plain.

    Raises:
        SparsityError: the mesh of one of them is no part of it.
    """
    found = [(name, t.device_mesh) for name, t in tensors if is_sharded(t)]
    if not found:
        return None
    widest, mesh = max(found, key=lambda pair: pair[1].ndim)
    for name, own in found:
        if not is_part(own, mesh):
            raise SparsityError(
                f"{name}: it is on {own}, but {widest}, with which it shares a budget or its blocks, on {mesh}. "
                "Tensors that are chosen together must be on one mesh, or on named parts of it."
            )
    return mesh


def _with_contiguous_masks(update: MaskUpdate, copies: list[tuple[Tensor, Tensor]]) -> MaskUpdate:
    """The update with masks whose windows are aliases; (mask, its copy) of those that had to be copied are added."""
    masks = dict(update.masks)
    for spec, mask in update.masks.items():
        if is_cut(mask) and not local(mask).is_contiguous():
            masks[spec] = copied_like(local(mask), mask)
            copies.append((mask, masks[spec]))
    return replace(update, masks=masks)


def _update_on(mesh: Any, updates: Sequence[MaskUpdate]) -> None:
    dims = sorted({d for u in updates for spec in u.scope.blocks() for d in cuts_of(u.value_of(spec), mesh)})
    agreed = iter(_agreed(mesh, dims, updates))
    together = []
    for update in updates:
        methods = [next(agreed) for _ in update.scope.members()]
        method = _joint_method(update, methods)
        if method == LOCAL:
            _choose_locally(update)
        elif method == GATHERED:
            _choose_gathered(update)
        else:
            together.append((update, methods))
    if together:
        _choose_by_histograms(mesh, dims, together)


def _agreed(mesh: Any, dims: Sequence[int], updates: Sequence[MaskUpdate]) -> list[int]:
    """The method for each member of each update's scope: the least over the ranks."""
    own = []
    for update in updates:
        for member in update.scope.members():
            spec, *more = member.block.blocks()
            value = update.value_of(spec)
            if more:  # coupled blocks are spread over several tensors
                own.append(GATHERED)
            else:
                own.append(method_of(member, box_of(value)) if is_sharded(value) else LOCAL)
    least = torch.tensor(own, dtype=torch.int32, device=mesh.device_type)
    for dim in dims:
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
    return least.tolist()


def _joint_method(update: MaskUpdate, methods: Sequence[int]) -> int:
    """The method for an update as a whole; with HISTOGRAM, members whose own is GATHERED are gathered one by one."""
    values = [update.value_of(spec) for spec in update.scope.blocks()]
    if methods == [LOCAL] or not any(map(is_cut, values)):
        return LOCAL
    scopes = update.scope.numscp()
    histograms = scopes * 2 * 8 << BITS
    weights = sum(v.numel() * v.element_size() for v in values)
    too_many = scopes > FEW and histograms > weights
    return GATHERED if set(methods) == {GATHERED} or too_many else HISTOGRAM


def _choose_locally(update: MaskUpdate) -> None:
    """Scopes that are whole on this rank, or on every rank."""
    member, *more = update.scope.members()
    spec = member.block.blocks()[0]
    if more or not is_cut(update.value_of(spec)):
        values = {s.view.param: local(update.value_of(s)) for s in update.scope.blocks()}
        masks = {s: local(m) for s, m in update.masks.items()}
        structure.update_masks([replace(update, masks=masks, values=values)])
        return
    windows, start = _local_windows(update, spec)
    if windows[0].window.numel() == 0:
        return
    scopes = Scopes(members=windows, shape=member.shape, order=member.order)
    keep = update.keep
    if isinstance(keep, Tensor):  # of the scope grid's shape: the part for this rank's scopes
        first = [at // g for at, g in zip(start, member.shape, strict=True)]
        sizes = [-(-n // g) for n, g in zip(scopes.grid, member.shape, strict=True)]
        keep = keep[tuple(slice(at, at + n) for at, n in zip(first, sizes, strict=True))]
    scope_masks(
        [Update(scopes=(scopes,), keep=keep, norm=update.norm, among_kept=update.among_kept, masked=update.masked)]
    )


def _choose_gathered(update: MaskUpdate) -> None:
    """Every rank chooses from the gathered tensors and keeps its part."""
    masks, values = _gathered(update, update.scope.blocks())
    structure.update_masks([replace(update, masks=masks, values=values)])
    for spec, mask in masks.items():
        fill(update.masks[spec], mask)


def _choose_by_histograms(mesh: Any, dims: Sequence[int], updates: Sequence[tuple[MaskUpdate, list[int]]]) -> None:
    """Scopes that are spread over ranks: one sum of histograms a pass, for all updates together."""
    selections: dict[torch.device | None, list[Selection]] = {}  # by the device on which kernels take them
    gathered: list[tuple[Tensor, Tensor]] = []
    for update, methods in updates:
        pieces: list[tuple[int, Piece]] = []
        base = 0
        for at, (member, method) in enumerate(zip(update.scope.members(), methods, strict=True)):
            spec = member.block.blocks()[0]
            cuts = () if method == GATHERED else cuts_of(update.value_of(spec), mesh)
            windows, start = _local_windows(update, spec) if cuts else _gathered_windows(update, member, gathered)
            counts = all(mesh.get_local_rank(d) == 0 for d in dims if d not in cuts)
            if windows[0].window.numel():
                pieces.append((at, Piece(windows, update, member, start=start, base=base, counts=counts)))
            base += member.width
        dtype, tiles = dtype_of(update), [member.shape for member in update.scope.members()]
        found = Selection(pieces=pieces, keep=_budgets(update), tiles=tiles, dtype=dtype, signed=update.norm is None)
        selections.setdefault(_kernel_device(update, dtype), []).append(found)
    sum_of = sum_over(mesh, dims, max(update.scope.numblk() for update, _ in updates))
    for device, chosen in selections.items():
        if device is None:
            run_together([choose_passes(s) for s in chosen], sum_of)
        else:
            choose_on_device(chosen, device, sum_of)
    for mask, filled in gathered:
        fill(mask, filled)


def _kernel_device(update: MaskUpdate, dtype: torch.dtype) -> torch.device | None:
    """The device on which kernels select among an update's scores, on every rank; offloaded shards are on the CPU."""
    device, *more = {update.value_of(spec).device for spec in update.scope.blocks()}
    return device if not more and kernels_take(dtype, device) else None


def _gathered_windows(
    update: MaskUpdate, member: ScopeMember, gathered: list[tuple[Tensor, Tensor]]
) -> tuple[tuple[Blocks, ...], Shape]:
    """Windows on a member's gathered values and masks; (mask, its gathered copy) are added to `gathered`."""
    masks, values = _gathered(update, member.block.blocks())
    gathered += [(update.masks[spec], mask) for spec, mask in masks.items()]
    return block_windows(member.block, values, masks), (0,) * member.block.grid_ndim


def _gathered(update: MaskUpdate, specs: Sequence[BlockSpec]) -> tuple[dict[BlockSpec, Tensor], dict[Tensor, Tensor]]:
    """Full masks of block specs, copied to their parameters' strides so that windows are aliases, and full values."""
    full = {spec: full_tensor(update.masks[spec]) for spec in specs}
    params = {spec: spec.view.param for spec in specs}
    masks = {
        s: torch.empty_strided(m.shape, params[s].stride(), dtype=m.dtype, device=m.device).copy_(m)
        for s, m in full.items()
    }
    return masks, {params[spec]: full_tensor(update.value_of(spec)) for spec in specs}


def _local_windows(update: MaskUpdate, spec: BlockSpec) -> tuple[tuple[Blocks, ...], Shape]:
    """A block spec's part on this rank, and where it starts in the block grid."""
    value, mask = update.value_of(spec), update.masks[spec]
    window = window_of(spec, box_of(value))
    assert window is not None
    blocks = Blocks(shape=spec.shape, values=window.on(local(value)), mask=window.on(local(mask)))
    return (blocks,), tuple(at // b for at, b in zip(window.start, spec.shape, strict=True))


def _budgets(update: MaskUpdate) -> Tensor:
    """Blocks to keep, one entry a scope; a scope at a partial edge keeps at most what it has."""
    keep = torch.as_tensor(update.keep, dtype=torch.int64, device="cpu").expand(update.scope.grid_shape)
    if update.scope.is_partial:
        keep = torch.minimum(keep, update.scope.blocks_per_scope().cpu())
    return keep.reshape(-1)
