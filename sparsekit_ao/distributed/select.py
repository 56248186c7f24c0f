"""Chooses masks of sharded tensors: each rank fills its part of the masks that one process would choose, bit for bit.

Requests may contain DTensors. For each member of a scope all ranks agree on a method. With LOCAL every scope is whole
on one rank, so nothing is sent. With BISECTION every block is whole on one rank, and counts of scores are summed over
ranks. With GATHERED, for all others, the tensors are gathered while their masks are chosen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..errors import SparsityError
from ..selection import Request
from ..structure import BlockSpec, ScopeCoupling, ScopeMember, ScopeSpec, block_windows
from ..structure.rule import absent, key_bits, order_keys
from ..structure.tiles import row_major
from ..structure.windows import ScopeWindows, Window, block_scores, fill_mask, from_scopes, to_scopes
from .placement import GATHERED, LOCAL, box_of, cuts_of, is_part, is_sharded, method_of, window_of
from .tensors import copy_values, full_tensor, local

FEW = 32  # scopes up to which counts are summed even where the weights would be fewer bytes
SumOverRanks = Callable[[Tensor], Tensor]


@torch.no_grad()
def choose_sharded(requests: Sequence[Request]) -> None:
    """Fill the masks of independent requests in place; each rank fills its part of sharded masks.

    The call is collective if a tensor is sharded: every rank of its mesh must make it with the same requests. Values
    and masks of a request are plain tensors, or DTensors on one mesh and named parts of it.
    """
    by_mesh: dict[Any, list[Request]] = {}
    for request in requests:
        mesh = common_mesh([(spec.name, request.value_of(spec)) for spec in request.scope.blocks()])
        by_mesh.setdefault(mesh, []).append(request)
    selection.fill_masks(by_mesh.pop(None, []))
    for mesh, on_mesh in by_mesh.items():
        _update_on(mesh, on_mesh)


def common_mesh(tensors: Sequence[tuple[str | None, Any]]) -> Any:
    """The widest mesh of (name, tensor) that are chosen together, of which all are part; None where all are plain."""
    meshes = [(name, t.device_mesh) for name, t in tensors if is_sharded(t)]
    widest, mesh = max(meshes, key=lambda pair: pair[1].ndim, default=(None, None))
    for name, other in meshes:
        if not is_part(other, mesh):
            raise SparsityError(
                f"{name}: it is on {other}, but {widest}, with which it shares a budget or its blocks, on {mesh}. "
                "Tensors that are chosen together must be on one mesh, or on named parts of it."
            )
    return mesh


def _update_on(mesh: Any, requests: Sequence[Request]) -> None:
    """Fill the masks of requests on one mesh, each by the methods that the ranks agree on."""
    members = [(request, member) for request in requests for member in request.scope.members()]
    dims = sorted({d for u in requests for spec in u.scope.blocks() for d in cuts_of(u.value_of(spec), mesh)})
    local_methods = [method_of(m, request.value_of(m.block.blocks()[0])) for request, m in members]
    methods = torch.tensor(local_methods, dtype=torch.int32, device=mesh.device_type)
    for dim in dims:  # the least over the ranks
        torch.distributed.all_reduce(methods, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
    agreed = iter(methods.tolist())
    bisected = []
    for request in requests:
        methods_of = [next(agreed) for _ in request.scope.members()]
        values, scopes = [request.value_of(spec) for spec in request.scope.blocks()], request.scope.numscp()
        count_bytes = 8 * 2 * key_bits(_dtype_of(request)) * scopes  # with those of ties
        has_shared_mask = len({id(mask) for mask in request.masks.values()}) < len(request.masks)  # of several views
        is_costly = scopes > FEW and count_bytes > sum(v.numel() * v.element_size() for v in values)
        if not any(cuts_of(v, mesh) for v in values):  # whole on every rank
            masks = {spec: local(mask) for spec, mask in request.masks.items()}
            on_rank = {spec.view.param: local(v) for spec, v in zip(request.scope.blocks(), values, strict=True)}
            selection.fill_masks([replace(request, masks=masks, values=on_rank)])
        elif methods_of == [LOCAL]:
            _choose_locally(request)
        elif is_costly or set(methods_of) == {GATHERED} or has_shared_mask:
            masks, gathered = _gathered(request, request.scope.blocks())
            selection.fill_masks([replace(request, masks=masks, values=gathered)])
            for spec, mask in masks.items():
                copy_values(request.masks[spec], mask)
        else:
            bisected.append((request, methods_of))
    if bisected:
        _choose_by_bisection(mesh, dims, bisected)


def _choose_locally(request: Request) -> None:
    """Choose the blocks of scopes that are whole on this rank."""
    (member,) = request.scope.members()
    window, start = _local_window(request, member.block.blocks()[0])
    if window.window.numel() == 0:
        return
    keep, values = request.keep, window.window
    placeholder = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    spec = BlockSpec(placeholder, window.shape, edge="partial")
    scope: Any = ScopeSpec(spec, member.shape)
    scope = ScopeCoupling([scope], [member.order]) if member.order else scope
    if isinstance(keep, Tensor):  # of the scope grid's shape: the part for this rank's scopes
        sizes = zip(start, spec.grid_shape, member.shape, strict=True)
        parts = [slice(at // g, -(-(at + n) // g)) for at, n, g in sizes]
        keep = keep[tuple(parts[k] for k in member.order or range(len(parts)))]
    masks = {spec: window.mask}
    selection.fill_masks([replace(request, scope=scope, masks=masks, values=values, keep=keep)])  # type: ignore[arg-type]


def _choose_by_bisection(mesh: Any, dims: Sequence[int], requests: Sequence[tuple[Request, list[int]]]) -> None:
    """Choose the blocks of scopes that are spread over ranks, all requests together."""
    dtype = reduce(torch.promote_types, [_dtype_of(request) for request, _ in requests])
    shards: list[_Shard] = []
    copies: list[tuple[Tensor, Tensor]] = []
    budgets: list[Tensor] = []
    for request, methods in requests:
        first_scope, first_index = sum(map(len, budgets)), 0
        for member, method in zip(request.scope.members(), methods, strict=True):
            specs = member.block.blocks()
            cuts = () if method == GATHERED else cuts_of(request.value_of(specs[0]), mesh)
            if cuts:
                window, start = _local_window(request, specs[0])
                windows: tuple[Window, ...] = (window,)
            else:
                masks, values = _gathered(request, specs)
                copies += [(request.masks[spec], mask) for spec, mask in masks.items()]
                windows, start = block_windows(member.block, values, masks), (0,) * member.block.grid_ndim
            if windows[0].window.numel():
                shard = _shard_of(request, member, windows, start, dtype)
                shard.scopes = (shard.scopes + first_scope).to(mesh.device_type)
                shard.first_index = first_index
                shard.is_counted = all(mesh.get_local_rank(d) == 0 for d in dims if d not in cuts)
                shards.append(shard)
            first_index += member.width
        keep = torch.as_tensor(request.keep, dtype=torch.int64, device=mesh.device_type)
        budgets.append(keep.expand(request.scope.grid_shape).reshape(-1))

    def sum_over_ranks(counts: Tensor) -> Tensor:
        for dim in dims:
            torch.distributed.all_reduce(counts, group=mesh.get_group(dim))
        return counts

    width = max(request.scope.numblk_per_scope() for request, _ in requests)
    _select(shards, torch.cat(budgets), key_bits(dtype), width, sum_over_ranks)
    for s in shards:
        fill_mask(s.windows, from_scopes(s.keys, s.layout)[s.inside], within_mask=s.within_mask)
    for mask, filled in copies:
        copy_values(mask, filled)


@dataclass(kw_only=True, eq=False)
class _Shard:
    """What this rank holds of one member of a scope: a row of keys for each scope that it has blocks of."""

    # Integer keys of the blocks' scores, [rows, slots]; the lowest integer where no block may be kept. `_select`
    # replaces them by bools, True where the block is kept.
    keys: Tensor
    scopes: Tensor  # the scope of each row, among those of all requests
    indices: Sequence[Tensor]  # what each dimension of the block grid adds to `first_index`, for the slots of a row
    first_index: int = 0  # the index that the member's first block has in a scope
    is_counted: bool = True  # whether this rank counts these blocks; False for all replicas but one
    windows: Sequence[Window]  # on values and masks
    layout: ScopeWindows  # how the padded block grid is cut into rows
    inside: tuple[slice, ...]  # the block grid without its padding
    within_mask: bool

    def per_row(self, numbers: Tensor) -> Tensor:
        """Numbers of all scopes as those of each row, to be compared with its keys."""
        return numbers[self.scopes].to(self.keys.device, self.keys.dtype)[:, None]


def _shard_of(
    request: Request, member: ScopeMember, windows: Sequence[Window], start: Sequence[int], dtype: torch.dtype
) -> _Shard:
    """Return the keys of a member's blocks; scopes and indices are counted from the member's first ones."""
    keys = _keys(windows, request, member, dtype)
    order, index_steps = member.order or range(keys.ndim), row_major(member.shape)
    scope_steps = dict(zip(order, row_major([member.grid_shape[k] for k in order]), strict=True))
    # Rows begin where scopes do, so the block grid may be padded. Along dimensions of which this rank has blocks in one
    # scope only, rows are as long as these.
    padding, shape = [0] * keys.ndim, list(member.shape)
    scopes, indices = torch.zeros((), dtype=torch.int64, device="cpu"), []
    for k, (at, n, size) in enumerate(zip(start, keys.shape, member.shape, strict=True)):
        first, last = at // size, (at + n - 1) // size
        if first == last:
            shape[k] = n
        else:
            padding[k] = at % size
        scopes = scopes[..., None] + torch.arange(first, last + 1, device="cpu") * scope_steps[k]
        along = torch.arange(shape[k], device=keys.device) + (at % size - padding[k])
        indices.append(along * index_steps[k])
    inside = tuple(slice(a, None) for a in padding)
    padded = keys
    if any(padding):
        padded = keys.new_full([a + n for a, n in zip(padding, keys.shape, strict=True)], absent(dtype))
        padded[inside] = keys
    layout = ScopeWindows(windows=(Window(shape=(1,) * keys.ndim, values=padded),), shape=tuple(shape))
    return _Shard(
        keys=to_scopes(padded, layout, absent(dtype)),
        scopes=scopes.reshape(-1),
        indices=indices,
        windows=windows,
        layout=layout,
        inside=inside,
        within_mask=request.within_mask,
    )


def _select(shards: Sequence[_Shard], keep: Tensor, bits: int, width: int, sum_over_ranks: SumOverRanks) -> None:
    """Replace keys of `bits` bits by True where the block is kept; over all ranks, scopes have at most `width`."""
    limits, reached = _kth_largest(shards, keep, bits, sum_over_ranks)
    limits.clamp_(min=1 - (1 << (bits - 1)))  # above the lowest integer; no score has this key
    above = [s.keys > s.per_row(limits) for s in shards]
    if not bool((reached > keep).any()):
        for s in shards:
            s.keys = s.keys >= s.per_row(limits)
        return
    # ties are cut: those with the lowest indices over all ranks are kept
    need = keep - sum_over_ranks(_per_scope(shards, [a.sum(1) for a in above], keep))
    bits = width.bit_length() + 1
    dtype, lowest = torch.int32 if bits <= 32 else torch.int64, -(1 << (bits - 1))
    for s in shards:
        index = torch.full((), s.first_index, dtype=dtype, device=s.keys.device)
        for along in s.indices:
            index = index[..., None] + along.to(dtype)
        s.keys = torch.where(s.keys == s.per_row(limits), -index.reshape(-1), lowest)
    limits = _kth_largest(shards, need, bits, sum_over_ranks)[0].clamp_(min=lowest + 1)
    for s, a in zip(shards, above, strict=True):
        s.keys = (s.keys >= s.per_row(limits)) | a


def _kth_largest(
    shards: Sequence[_Shard], keep: Tensor, bits: int, sum_over_ranks: SumOverRanks
) -> tuple[Tensor, Tensor]:
    """Return the keep-th largest key of each scope by bisection, and how many keys are at least as large.

    Where a scope has fewer keys than `keep`, these are the lowest integer and 0; where `keep` is 0, the highest and 0.
    """
    keys = [s.keys for s in shards]
    left_out = torch.zeros_like(keep)  # keys that are no longer in `keys` and are larger than all guesses to come
    limits, reached = torch.full_like(keep, -(1 << (bits - 1))), torch.zeros_like(keep)
    for bit in range(bits - 1, -1, -1):
        guess = limits + (1 << bit) if bit < bits - 1 else torch.zeros_like(limits)  # 2^63 is too large to be added
        hits = [k >= s.per_row(guess) for s, k in zip(shards, keys, strict=True)]
        local_counts = [h.sum(1) for h in hits]
        counts = sum_over_ranks(left_out + _per_scope(shards, local_counts, keep))
        is_enough = counts >= keep
        limits, reached = torch.where(is_enough, guess, limits), torch.where(is_enough, counts, reached)
        for i, (s, h, n) in enumerate(zip(shards, hits, local_counts, strict=True)):
            if len(h) > 1:
                continue
            is_above = bool(is_enough[s.scopes])  # on which side of the guess the limit is
            if 8 * int(n if is_above else h.numel() - n) <= h.numel():  # few keys need comparing from now on
                keys[i] = keys[i][h == is_above][None]
                left_out[s.scopes] += n.to(keep.device) if s.is_counted and not is_above else 0
    return limits, reached


def _per_scope(shards: Sequence[_Shard], rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Counts of each shard's rows as those of all scopes; replicas count once over the ranks."""
    counts = torch.zeros_like(like)
    for s, n in zip(shards, rows, strict=True):
        if s.is_counted:
            counts.index_add_(0, s.scopes, n.to(counts.device))
    return counts


def _keys(windows: Sequence[Window], request: Request, member: ScopeMember, dtype: torch.dtype) -> Tensor:
    """Keys of the scores of a member's blocks on this rank, of the block grid's shape."""
    ndim, scored = member.block.grid_ndim, windows
    if request.within_mask or request.masked:
        scored = [replace(m, values=torch.where(m.mask != 0, m.values, 0)) for m in windows]  # type: ignore[arg-type]
    scores = block_scores(scored, request.norm, ndim, request.scope.as_mean)
    keys = order_keys(scores.to(dtype), magnitude=request.norm is not None)
    if request.within_mask:  # blocks of which the masks keep nothing cannot be chosen
        masks = [replace(m, values=(m.mask != 0).float()) for m in windows]  # type: ignore[union-attr]
        keys.masked_fill_(block_scores(masks, math.inf, ndim) == 0, absent(dtype))
    return keys


def _dtype_of(request: Request) -> torch.dtype:
    """The dtype in which a request's scores are compared, the same on every rank."""
    dtypes = {request.value_of(spec).dtype for spec in request.scope.blocks()}
    is_single = not request.scope.as_mean and all(n == 1 for spec in request.scope.blocks() for n in spec.shape)
    if is_single and len(dtypes) == 1:
        return dtypes.pop()
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _gathered(request: Request, specs: Sequence[BlockSpec]) -> tuple[dict[BlockSpec, Tensor], dict[Tensor, Tensor]]:
    """Full masks of block specs, copied to their parameters' strides so that windows are aliases, and full values.

    Block specs of one mask get the same copy.
    """
    copies, values = dict[int, Tensor](), dict[Tensor, Tensor]()
    for spec in specs:
        own, param = request.masks[spec], spec.view.param
        if id(own) not in copies:
            mask = full_tensor(own)
            copy = torch.empty_strided(mask.shape, param.stride(), dtype=mask.dtype, device=mask.device)
            copies[id(own)] = copy.copy_(mask)
        if param not in values:
            values[param] = full_tensor(request.value_of(spec))
    return {spec: copies[id(request.masks[spec])] for spec in specs}, values


def _local_window(request: Request, spec: BlockSpec) -> tuple[Window, tuple[int, ...]]:
    """A block spec's part on this rank, and where it starts in the block grid."""
    window: Any = window_of(spec, box_of(request.value_of(spec)))
    values, mask = window.on(local(request.value_of(spec))), window.on(local(request.masks[spec]))
    start = tuple(at // b for at, b in zip(window.start, spec.shape, strict=True))
    return Window(shape=spec.shape, values=values, mask=mask), start
