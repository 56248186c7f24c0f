"""Mask updates of sharded tensors: what is whole on a rank is chosen there, what is not is chosen together.

Takes the same pieces of work as `kernels.scope_masks`, with DTensors in them. For each, one of three ways, which all
ranks agree on: every scope lies whole on some rank (nothing is sent), every block does (histograms are summed), or
neither (the tensor is gathered, for as long as it takes). The masks are those of one process, bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algebra import BlockSpec, ScopeSpec, SparseScope
from ..errors import SparsityError
from ..selection import Blocks, Norm, Scopes, Update, scope_masks
from ..selection.radix import BITS
from ..selection.strides import Shape
from .pieces import Piece
from .placement import AWKWARD, BLOCKS, SCOPES, box_of, cuts_of, is_cut, is_part, is_sharded, reach_of, window_of
from .tensors import fill, local, own_copy, whole
from .together import choose_passes, run_together, sum_over

__all__ = ["Job", "common_mesh", "update_masks"]

FEW = 32  # scopes whose histograms are summed without asking whether the weights would be fewer bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One set of scopes to choose: what `SparseScope.update_masks` takes, with DTensors among values and masks."""

    scope: SparseScope
    masks: Mapping[BlockSpec, Tensor]
    keep: int | Tensor
    values: Mapping[Tensor, Tensor]
    norm: Norm = 2
    among_kept: bool = False

    def value_of(self, leaf: BlockSpec) -> Tensor:
        """The values that a block spec looks at."""
        return self.values[leaf.view.param]

    @property
    def leaves(self) -> list[BlockSpec]:
        """The block specs that take part, in order."""
        return [leaf for spec, _ in self.scope.scopes() for leaf in spec.block.blocks()]


@torch.no_grad()
def update_masks(jobs: Sequence[Job]) -> None:
    """Fill the masks of jobs that do not depend on each other, in place, on every rank its part.

    Collective: every rank of the tensors' mesh calls it with the same jobs.

    Raises:
        SparsityError: tensors of one job that lie on different meshes.
    """
    by_mesh: dict[Any, list[Job]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for job in jobs:
        mesh = common_mesh([(leaf.name, job.value_of(leaf)) for leaf in job.leaves])
        by_mesh.setdefault(mesh, []).append(_in_row_order(job, copies))
    for mesh, found in by_mesh.items():
        dims = sorted({d for j in found for leaf in j.leaves for d in cuts_of(j.value_of(leaf), mesh)})
        reaches = iter(_agreed(mesh, dims, found))
        ways = [[next(reaches) for _ in job.scope.scopes()] for job in found]
        for job, reach in zip(found, ways, strict=True):
            if _way_of(job, reach) == SCOPES:
                _choose_here(job)
            elif _way_of(job, reach) == AWKWARD:
                _choose_whole(job)
        together = [(j, r) for j, r in zip(found, ways, strict=True) if _way_of(j, r) == BLOCKS]
        if together:
            _choose_together(mesh, dims, together)
    for mask, filled in copies:
        fill(mask, filled)


def common_mesh(tensors: Sequence[tuple[str | None, Any]]) -> Any:
    """The widest mesh of those of the tensors that are DTensors, of which the meshes of the others are parts.

    Args:
        tensors: (name, tensor) of what is chosen together.

    Returns:
        None where all of them are plain.

    Raises:
        SparsityError: two of them lie on meshes of which neither is a part of the other.
    """
    found = [(name, t.device_mesh) for name, t in tensors if is_sharded(t)]
    if not found:
        return None
    widest, mesh = max(found, key=lambda pair: pair[1].ndim)
    for name, own in found:
        if not is_part(own, mesh):
            raise SparsityError(
                f"{name}: it lies on {own}, but {widest}, with which it shares a budget or its blocks, on {mesh}. "
                "Tensors that are chosen together must lie on one mesh, or on named parts of it."
            )
    return mesh


def _in_row_order(job: Job, copies: list[tuple[Tensor, Tensor]]) -> Job:
    """The job, whose windows can be aliases; a mask whose part here lies otherwise goes into `copies` with its copy."""
    masks = dict(job.masks)
    for leaf, mask in job.masks.items():
        if is_cut(mask) and not local(mask).is_contiguous():
            masks[leaf] = own_copy(mask)
            copies.append((mask, masks[leaf]))
    return replace(job, masks=masks)


def _agreed(mesh: Any, dims: Sequence[int], jobs: Sequence[Job]) -> list[int]:
    """How much of each scope spec is whole on every rank: the least over the ranks."""
    own = []
    for job in jobs:
        for spec, _ in job.scope.scopes():
            leaf, *more = spec.block.blocks()
            value = job.value_of(leaf)
            if more:  # coupled blocks are in several tensors
                own.append(AWKWARD)
            else:
                own.append(reach_of(spec, box_of(value)) if is_sharded(value) else SCOPES)
    least = torch.tensor(own, dtype=torch.int32, device=mesh.device_type)
    for dim in dims:
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
    return least.tolist()


def _way_of(job: Job, reaches: Sequence[int]) -> int:
    """SCOPES: chosen on every rank by itself; BLOCKS: by histograms; AWKWARD: on the whole tensors."""
    if reaches == [SCOPES] or not any(is_cut(job.value_of(leaf)) for leaf in job.leaves):
        return SCOPES
    scopes = job.scope.numscp()
    histograms = scopes * 2 * 8 << BITS
    weights = sum(job.value_of(leaf).numel() * job.value_of(leaf).element_size() for leaf in job.leaves)
    if set(reaches) == {AWKWARD} or (scopes > FEW and histograms > weights):
        return AWKWARD
    return BLOCKS


def _choose_here(job: Job) -> None:
    """Scopes that lie whole on this rank, or on every rank."""
    ((spec, order), *more) = job.scope.scopes()
    leaf = spec.block.blocks()[0]
    if more or not is_cut(job.value_of(leaf)):
        values = {p: local(v) for p, v in job.values.items()}
        masks = {leaf: local(m) for leaf, m in job.masks.items()}
        job.scope.update_masks(masks, job.keep, values, norm=job.norm, among_kept=job.among_kept)
        return
    members, start = _windows(job, leaf)
    if members[0].window.numel() == 0:
        return
    scopes = Scopes(members=members, shape=spec.shape, order=order)
    keep = job.keep
    if isinstance(keep, Tensor):  # of the scope grid's shape: the part for the scopes that lie here
        first = [at // g for at, g in zip(start, spec.shape, strict=True)]
        sizes = [-(-n // g) for n, g in zip(scopes.grid, spec.shape, strict=True)]
        keep = keep[tuple(slice(at, at + n) for at, n in zip(first, sizes, strict=True))]
    scope_masks([Update(scopes=(scopes,), keep=keep, norm=job.norm, among_kept=job.among_kept)])


def _choose_whole(job: Job) -> None:
    """On tensors gathered for the purpose; every rank chooses all and keeps its part."""
    masks = {leaf: _gathered(job.masks[leaf], leaf) for leaf in job.leaves}
    values = {p: whole(v) for p, v in job.values.items()}
    job.scope.update_masks(masks, job.keep, values, norm=job.norm, among_kept=job.among_kept)
    for leaf, mask in masks.items():
        fill(job.masks[leaf], mask)


def _choose_together(mesh: Any, dims: Sequence[int], jobs: Sequence[tuple[Job, list[int]]]) -> None:
    """Scopes that lie on several ranks: one sum of histograms a pass, for all of them."""
    selections = []
    gathered: dict[BlockSpec, tuple[Tensor, Tensor]] = {}
    for job, reaches in jobs:
        pieces: list[Piece] = []
        base = 0
        for (spec, order), reach in zip(job.scope.scopes(), reaches, strict=True):
            leaves = spec.block.blocks()
            cuts = () if reach == AWKWARD else cuts_of(job.value_of(leaves[0]), mesh)
            if not cuts:
                gathered |= {leaf: (job.masks[leaf], _gathered(job.masks[leaf], leaf)) for leaf in leaves}
            members, start = _windows(job, leaves[0]) if cuts else _whole_windows(job, spec, gathered)
            counts = all(mesh.get_local_rank(d) == 0 for d in dims if d not in cuts)
            pieces += _pieces(job, spec, members, order=order, start=start, base=base, counts=counts)
            base += math.prod(spec.shape)
        wide = torch.float64 if any(v.dtype == torch.float64 for v in job.values.values()) else torch.float32
        selections.append(choose_passes(pieces, _budgets(job), job.scope.numblk_per_scope(), wide))
    run_together(selections, sum_over(mesh, dims, max(job.scope.numblk() for job, _ in jobs)))
    for mask, filled in gathered.values():
        fill(mask, filled)


def _pieces(job: Job, spec: ScopeSpec, members: tuple[Blocks, ...], **place: Any) -> list[Piece]:
    """The spec's piece on this rank, if it has any element."""
    if members[0].window.numel() == 0:
        return []
    piece = Piece(
        members,
        tile=spec.shape,
        scope_grid=spec.grid_shape,
        norm=job.norm,
        as_mean=job.scope.as_mean,
        among_kept=job.among_kept,
        **place,
    )
    return [piece]


def _whole_windows(
    job: Job, spec: ScopeSpec, gathered: Mapping[BlockSpec, tuple[Tensor, Tensor]]
) -> tuple[tuple[Blocks, ...], Shape]:
    """Windows on a spec's gathered values and masks."""
    leaves = spec.block.blocks()
    values = {leaf.view.param: whole(job.value_of(leaf)) for leaf in leaves}
    masks = {leaf: gathered[leaf][1] for leaf in leaves}
    return spec.block.operands(values, masks), (0,) * spec.block.grid_ndim


def _gathered(mask: Tensor, leaf: BlockSpec) -> Tensor:
    """A whole copy of a mask that lies in memory as the spec's parameter does, so that its windows are aliases."""
    found = whole(mask)
    stride = leaf.view.param.stride()
    return torch.empty_strided(found.shape, stride, dtype=found.dtype, device=found.device).copy_(found)


def _windows(job: Job, leaf: BlockSpec) -> tuple[tuple[Blocks, ...], Shape]:
    """A block spec's part on this rank, and where it starts in the grid."""
    window = window_of(leaf, box_of(job.value_of(leaf)))
    assert window is not None
    blocks = Blocks(
        shape=leaf.shape, values=window.on(local(job.value_of(leaf))), mask=window.on(local(job.masks[leaf]))
    )
    return (blocks,), tuple(at // b for at, b in zip(window.start, leaf.shape, strict=True))


def _budgets(job: Job) -> Tensor:
    """Blocks to keep, one entry a scope; a scope at a partial edge keeps at most what it has."""
    keep = torch.as_tensor(job.keep, dtype=torch.int64, device="cpu").expand(job.scope.grid_shape)
    if job.scope.is_partial:
        keep = torch.minimum(keep, job.scope.members_per_scope().cpu())
    return keep.reshape(-1)
