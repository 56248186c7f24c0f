"""Make pruning groups (tensors that are pruned together in one stage) from config entries, and requests from these.

A pruning group holds specs over placeholders on the meta device, that is, names and integers, but no weights and no
masks. Tensors are looked up at every update, because `.to()` and sharding replace them. Budgets, except for those of
stages, are read from the group dicts at every update, because schedulers write there.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import distributed
from ..calibration import Statistics
from ..distributed import full_tensor, is_sharded, placed_like
from ..errors import CouplingError, SparsityError
from ..models.names import connected
from ..scores import Score, saliency_of
from ..selection import Request, fill_masks
from ..structure import (
    BlockCoupling,
    BlockSpec,
    Budget,
    ScopeCoupling,
    ScopeSpec,
    SparseBlock,
    SparseScope,
    View,
    block_windows,
    checked_level,
    scope_windows,
    sparsity_to_nnz,
)
from ..structure.tiles import row_major
from ..structure.windows import Norm, fill_mask, kept_flags, kept_grid, to_scopes
from .config import TensorGroup
from .stages import Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningGroup:
    """Tensors that are pruned together in one stage: one tensor, or coupled ones."""

    scope: SparseScope  # over meta placeholders
    specs: Mapping[str, BlockSpec]  # by tensor name
    stage: int  # a later stage chooses among the elements that earlier ones kept
    norm: Norm  # of a block: 1, 2 or inf; None adds up the saliencies that a `score` gives
    score: Score | None  # None scores a block by the norm of its weights
    member_scores: str  # how the scores of coupled tensors are combined, as for `ScopeSparsifier`
    label: str  # its name in errors
    least: tuple[int, ...] = ()  # blocks that each member of `scope` keeps at least (`max_sparsity`); () sets no limit
    own_budgets: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # {name: (key, number)} in this stage
    # Tensors that have a budget of their own in every stage, so that `sparsity_level` has no effect on them; there may
    # be tensors of other pruning groups among them.
    fixed: Collection[str] = ()

    def values(
        self,
        dense: Callable[[str], Tensor],
        statistics: Callable[[str], Statistics],
        computed: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> tuple[dict[Tensor, Tensor], Norm]:
        """Return {meta placeholder: weight or saliency} to score, and its norm; `computed` are from `value_of`."""
        is_plain, values = self.score is None and self.member_scores == "sum", {}
        scored = self.specs if is_plain else self.scored(statistics)
        for name, spec in self.specs.items():
            if is_plain:
                values[spec.view.param] = dense(name)
            elif name not in scored:  # zeros add nothing to the score of the coupled blocks
                values[spec.view.param] = torch.zeros_like(dense(name))
            else:
                value = computed[name] if name in computed else self.value_of(name, dense(name), statistics(name))
                values[spec.view.param] = value
        # The sum of non-negative saliencies is their 1-norm, which has faster kernels. Values on a GPU are not
        # inspected, since that would wait for the device.
        is_non_negative = self.score is not None and all(
            t.device.type == "cpu" and not is_sharded(t) and bool((t >= 0).all()) for t in values.values()
        )
        return values, 1 if is_non_negative else self.norm

    def value_of(self, name: str, weight: Tensor, statistics: Statistics) -> Tensor:
        """Return the values of one tensor that are scored: its weight, or its saliency if there is a `score`."""
        spec, values = self.specs[name], weight
        if self.score is not None:
            # A score sees the whole weight. The saliency that it returns is then sharded as the weight is.
            whole, blocks = full_tensor(weight), partial(labels_of, spec)
            values = placed_like(saliency_of(self.score, whole, statistics.name, statistics, blocks), weight)
        if self.member_scores != "mean":
            return values
        # A factor n^(-1/p), for n elements in a block, turns the sum of p-th powers into a mean.
        wide = values if values.dtype == torch.float64 else values.float()
        return wide * math.prod(spec.shape) ** (-1 / (1 if self.norm is None else self.norm))

    def scored(self, statistics: Callable[[str], Statistics]) -> tuple[str, ...]:
        """Return the tensors whose scores count: with "consumers", those whose blocks are inputs of their layer."""
        if self.member_scores != "consumers":
            return tuple(self.specs)
        consumers = tuple(name for name, spec in self.specs.items() if _is_consumer(spec, statistics(name)))
        if not consumers:
            raise CouplingError(
                f"{self.label}: member_scores='consumers' needs a tensor whose blocks are inputs of its layer, such as "
                "columns of a Linear, but the coupling has none; use 'sum' or 'mean'"
            )
        return consumers

    def budget(self, groups: Mapping[str, TensorGroup]) -> Budget:
        """Return how many blocks each scope keeps now, or raise an error if a level or count does not fit."""
        is_scheduled, asked = False, {}
        for name in self.specs:
            level = groups[name]["sparsity_level"]
            # A level that differs from `level_of_nnz`, which the count amounts to, was written by a scheduler, and
            # replaces the count.
            if not is_same(level, groups[name].get("level_of_nnz", level)):
                checked_level(level, f"{name}: ")
                is_scheduled = True
        for name in self.specs:
            group = groups[name]
            if is_scheduled and name in self.fixed:
                raise SparsityError(
                    f"{name}: sparsity_level was set to {group['sparsity_level']}, but every stage has "
                    "a budget of its own. Leave the budget out of the stage that a scheduler is to change."
                )
            key = "sparsity_level" if group.get("nnz") is None or is_scheduled else "nnz"
            asked[name] = self.own_budgets.get(name) or (key, group[key])
        first, (key, number) = next(iter(asked.items()))
        for name, (other_key, other) in [*asked.items()][1:]:
            if other_key != key or not is_same(other, number):
                raise CouplingError(
                    f"{self.label}: members share one budget, but {first} asks for {key}={number} "
                    f"and {name} for {other_key}={other}"
                )
        keep = self.scope.sparsity_to_nnz(number) if key == "sparsity_level" else self.scope.budget(number)
        if self.least and total_of(keep) < sum(self.least):
            raise CouplingError(
                f"{self.label}: {key}={number} keeps {total_of(keep)} blocks of all tensors, but "
                f"max_sparsity requires {sum(self.least)}, rounded up for each tensor; keep more, or raise max_sparsity"
            )
        return keep

    def request(self, masks: Mapping[str, Tensor], keep: Budget, values: dict[Tensor, Tensor], norm: Norm) -> Request:
        """Return the request to keep, in `masks` ({name: mask}), the blocks whose `values` have the largest norms."""
        of_spec = {spec: masks[name] for name, spec in self.specs.items()}
        return Request(scope=self.scope, masks=of_spec, keep=keep, values=values, norm=norm, within_mask=self.stage > 0)

    def pattern(self, name: str) -> str:
        """Return the shapes of a tensor's view (unless it is the tensor itself), blocks and scopes as text."""
        spec = self.specs[name]
        scope = next(m for m in self.scope.members() if spec in m.block.blocks())
        view = "" if spec.view.shape == tuple(spec.view.param.shape) else f"view {_shape_text(spec.view.shape)} "
        return f"{view}block {_shape_text(spec.shape)} scope {_shape_text(scope.shape)}"


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values of a config key are equal; tensors, also nested ones, by shape and elements.

    >>> is_same([{"nnz": torch.tensor([1, 2])}], [{"nnz": torch.tensor([1, 2])}])
    True
    """
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is other or (isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other))
    try:
        return value is other or bool(value == other)
    except (RuntimeError, ValueError):  # == of tensors or arrays inside has no single truth value
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            return value.keys() == other.keys() and all(is_same(v, other[k]) for k, v in value.items())
        if not (hasattr(value, "__len__") and hasattr(other, "__len__")):  # an array and a number
            return False
        return len(value) == len(other) and all(map(is_same, value, other))


def total_of(budget: Budget) -> int:
    """Return how many blocks all scopes keep together; an int is the budget of a single scope."""
    return int(budget.sum()) if isinstance(budget, Tensor) else budget


def kept_in(spec: BlockSpec, mask: Tensor) -> int:
    """Return the number of blocks of which an unsharded mask keeps at least one element."""
    return sum(int(torch.count_nonzero(kept_flags(m))) for m in block_windows(spec, None, {spec: mask}))


def counts_in_scopes(scope: SparseScope, masks: Mapping[BlockSpec, Tensor]) -> Tensor:
    """Return the number of blocks, in each scope, of which unsharded masks keep an element: int64 [*scope grid]."""
    windows = scope_windows(scope, None, masks)
    counts = [to_scopes(kept_grid(w), w, False).sum(1) for w in windows]
    total = counts[0] if len(counts) == 1 else torch.stack([c.cpu() for c in counts]).sum(0)
    return total.reshape(scope.grid_shape)


def labels_of(spec: BlockSpec) -> Tensor:
    """Return the number of the block that each element is in, int64 of the tensor's shape; -1 outside the view."""
    param = spec.view.param  # labels get the strides of the parameter, so that their window is not a copy
    labels = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64, device="cpu").fill_(-1)
    windows = block_windows(spec, None, {spec: labels})
    fill_mask(windows, torch.arange(spec.numblk(), device="cpu").view(windows[0].grid))
    return labels


def _is_consumer(spec: BlockSpec, statistics: Statistics) -> bool:
    """Return whether each block has the weights of some inputs, but not of all of them, for all outputs."""
    if statistics.adapter is None:
        return False
    labels = statistics.matrix(labels_of(spec))
    return bool((labels == labels[:, :1]).all()) and bool((labels != labels[:, :, :1]).any())


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"


def groups_by_name(groups: Iterable[TensorGroup]) -> dict[str, TensorGroup]:
    """Return {tensor_fqn: group}."""
    return {group["tensor_fqn"]: group for group in groups}


def make_pruning_groups(
    stages: Mapping[str, tuple[Stage, ...]], tensors: Mapping[str, Tensor]
) -> tuple[PruningGroup, ...]:
    """Return the pruning groups of all tensors, stage by stage; only shape, strides and dtype of `tensors` are read."""
    pruning_groups: list[PruningGroup] = []
    fixed = {name for name, structures in stages.items() if all(structure.budget for structure in structures)}
    for stage in range(max(map(len, stages.values()), default=0)):
        staged = [
            _StagedTensor(structures[stage], _block_spec(name, structures[stage], tensors[name]))
            for name, structures in stages.items()
            if stage < len(structures)
        ]
        # {name of a scope coupling: the blocks that share its budget}. The key of blocks without a scope coupling is a
        # tuple, so that it differs from every name that a user may give.
        sharing: dict[object, list[_CoupledBlocks]] = {}
        for blocks in _coupled_blocks(staged):
            first = blocks.tensors[0]
            name = first.structure.scope_coupling
            sharing.setdefault(name if name is not None else (first.spec.name,), []).append(blocks)
        pruning_groups += [_pruning_group(blocks, stage, fixed) for blocks in sharing.values()]
    return tuple(pruning_groups)


def refuse_unfit(group: TensorGroup, stages: Sequence[Stage], tensor: Tensor) -> None:
    """Raise an error if blocks do not fit one tensor, or scopes and budgets that it does not share with others."""
    for at, stage in enumerate(stages):
        spec = _block_spec(group["tensor_fqn"], stage, tensor)
        if stage.block_coupling is None:  # scopes of coupled blocks cut the block grid that the tensors share
            ScopeSpec(spec, stage.scope_shape)  # raises an error if they do not fit
            if stage.scope_coupling is None:
                blocks = _CoupledBlocks([_StagedTensor(stage, spec)], spec)
                _pruning_group([blocks], at).budget({group["tensor_fqn"]: group})


def pruning_groups_by_name(pruning_groups: Iterable[PruningGroup]) -> dict[str, list[PruningGroup]]:
    """Return {tensor_fqn: the pruning groups that the tensor is in, earlier stages first}."""
    of_tensors: dict[str, list[PruningGroup]] = {}
    for pruning in pruning_groups:
        for name in pruning.specs:
            of_tensors.setdefault(name, []).append(pruning)
    return of_tensors


def numel_of_groups(pruning_groups: Sequence[PruningGroup]) -> int:
    """Return the number of elements of all tensors in pruning groups, counted once for each stage."""
    return sum(spec.view.numel() for pruning in pruning_groups for spec in pruning.specs.values())


def parts_of(pruning_groups: Sequence[PruningGroup], most: int) -> Iterator[list[PruningGroup]]:
    """Yield parts of at most `most` elements; pruning groups that share a tensor stay in one, which may be larger."""
    part: list[PruningGroup] = []
    total = 0
    for coupled in connected({pruning: pruning.specs for pruning in pruning_groups}):
        numel = numel_of_groups(coupled)
        if part and total + numel > most:
            yield part
            part, total = [], 0
        part += coupled
        total += numel
    if part:
        yield part


class _StagedTensor(NamedTuple):
    """A tensor in one stage: its structure and its blocks."""

    structure: Stage
    spec: BlockSpec


class _CoupledBlocks(NamedTuple):
    """Blocks that are kept or dropped together: the tensors that they are in, and their block coupling."""

    tensors: list[_StagedTensor]
    block: SparseBlock  # for a single tensor, its block spec


_SCORING = ("norm", "score", "member_scores", "max_sparsity")  # keys that are equal for tensors that compete


def _coupled_blocks(tensors: Iterable[_StagedTensor]) -> list[_CoupledBlocks]:
    """Return the blocks of each tensor, and one BlockCoupling for all tensors that give the same name."""
    named: dict[object, list[_StagedTensor]] = {}  # the key of an uncoupled tensor is a tuple, unlike any name
    for tensor in tensors:
        name = tensor.structure.block_coupling
        named.setdefault(name if name is not None else (tensor.spec.name,), []).append(tensor)
    result: list[_CoupledBlocks] = []
    for coupling, coupled in named.items():
        structure, spec = coupled[0]
        if not isinstance(coupling, str):
            if structure.coupling_order is not None:
                raise SparsityError(f"{spec.name}: coupling_order needs a block_coupling")
            if structure.member_scores != "sum":
                raise SparsityError(f"{spec.name}: member_scores needs a block_coupling")
            result.append(_CoupledBlocks(coupled, spec))
            continue
        label = f"block coupling {coupling!r}"
        if len(coupled) == 1:
            raise CouplingError(f"{label}: only {spec.name} gives this name, but a coupling needs two tensors")
        _must_agree(label, ("scope_shape", "scope_coupling", *_SCORING), coupled)
        orders = [structure.coupling_order for structure, _ in coupled]
        block = BlockCoupling([spec for _, spec in coupled], orders, name=label)
        result.append(_CoupledBlocks(coupled, block))
    return result


def _pruning_group(sharing: Sequence[_CoupledBlocks], stage: int, fixed: Collection[str] = ()) -> PruningGroup:
    """Return the pruning group of blocks that share one budget; `fixed` is as in `PruningGroup`."""
    tensors = [tensor for blocks in sharing for tensor in blocks.tensors]
    structure, coupling = tensors[0].structure, tensors[0].structure.scope_coupling
    label = str(sharing[0].block.name) if coupling is None else f"scope coupling {coupling!r}"
    scopes = [ScopeSpec(blocks.block, blocks.tensors[0].structure.scope_shape) for blocks in sharing]
    _must_agree(label, _SCORING, tensors)
    empty = [blocks.tensors[0].spec.name for blocks in sharing if not blocks.block.numblk()]
    if empty and len(empty) < len(sharing):
        raise CouplingError(f"{label}: {empty[0]} has no elements; leave it out of the shared budget")
    least: tuple[int, ...] = ()
    if structure.max_sparsity is not None:
        if coupling is None or stage or any(s.numscp() != 1 for s in scopes):
            raise SparsityError(
                f"{label}: max_sparsity applies only where several whole tensors share one budget; give them a "
                "scope_coupling and no scope_shape, and give max_sparsity in the first stage only"
            )
        where = f"{label}: max_sparsity: "
        least = tuple(sparsity_to_nnz(structure.max_sparsity, s.numblk(), where) for s in scopes)
    return PruningGroup(
        scope=scopes[0] if len(scopes) == 1 else ScopeCoupling(scopes, name=label),
        specs={str(spec.name): spec for _, spec in tensors},
        stage=stage,
        norm=structure.norm if structure.score is None else None,
        score=structure.score,
        member_scores=structure.member_scores,
        label=label,
        least=least,
        own_budgets={str(spec.name): tensor.budget for tensor, spec in tensors if tensor.budget is not None},
        fixed=fixed,
    )


def _must_agree(label: str, keys: Sequence[str], tensors: Sequence[_StagedTensor]) -> None:
    """Raise an error if the structures of tensors differ in one of these keys."""
    for structure, spec in tensors[1:]:
        for key in keys:
            first, other = getattr(tensors[0].structure, key), getattr(structure, key)
            if other != first:
                raise CouplingError(
                    f"{label}: members need the same {key}, but {tensors[0].spec.name} gives {first!r} and "
                    f"{spec.name} {other!r}"
                )


def _block_spec(fqn: str, structure: Stage, tensor: Tensor) -> BlockSpec:
    """Return the blocks of a tensor in one stage, over a meta placeholder with the tensor's shape and strides."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if isinstance(structure.view, tuple):
        stride = row_major(shape)  # a view that is given by numbers counts elements of the row-major layout
    placeholder = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    if structure.view is None:
        view = View.from_existing(placeholder, name=fqn)
    elif isinstance(structure.view, tuple):
        view = View(placeholder, *structure.view, name=fqn)
    else:
        view = View.from_function(placeholder, structure.view, name=fqn)
    return BlockSpec(view, structure.block_shape, name=fqn, edge=structure.edge)


def choose_masks(requests: Mapping[PruningGroup, Request]) -> None:
    """Choose the masks of pruning groups that do not depend on each other, and fill them in place."""
    # Without a process group, nothing is sharded.
    fill = distributed.choose_sharded if distributed.has_process_group() else fill_masks
    fill(list(requests.values()))
    for pruning, request in requests.items():
        if pruning.least:
            _keep_least(pruning, request)


def _keep_least(pruning: PruningGroup, request: Request) -> None:
    """Choose masks again, in place, until no tensor keeps fewer blocks than its least number (`max_sparsity`)."""
    free = {k: ScopeSpec(m.block, m.shape) for k, m in enumerate(pruning.scope.members())}
    remaining = total_of(request.keep)

    def request_of(scope: SparseScope, keep: int) -> Request:
        return replace(request, scope=scope, masks={s: request.masks[s] for s in scope.blocks()}, keep=keep)

    while True:
        first_specs = {k: s.blocks()[0] for k, s in free.items()}  # the first tensor counts for all coupled ones
        counts = {k: kept_in(spec, full_tensor(request.masks[spec])) for k, spec in first_specs.items()}
        short = [k for k, count in counts.items() if count < pruning.least[k]]
        if not short:
            return
        # Each of these tensors gets its least number of blocks. The others share the rest of the budget, and so keep
        # fewer than before. The masks then keep the best blocks that these limits allow.
        requests = [request_of(free.pop(k), pruning.least[k]) for k in short]
        remaining -= sum(pruning.least[k] for k in short)
        if free:
            scopes = list(free.values())
            requests.append(request_of(scopes[0] if len(scopes) == 1 else ScopeCoupling(scopes), remaining))
        distributed.choose_sharded(requests)
