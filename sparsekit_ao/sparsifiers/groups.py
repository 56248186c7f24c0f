"""Make pruning groups (tensors that are pruned together in one stage) from config entries, and requests from these.

A pruning group holds specs over placeholders on the meta device: names and integers, no weights and no masks. Tensors
are looked up at every update, because `.to()` and sharding replace them. Budgets are read from the group dicts at
every update, because schedulers write there.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import distributed
from ..calibration import Statistics
from ..distributed import full_tensor, is_sharded, local, placed_like
from ..errors import CouplingError, SparsityError
from ..models.names import connected
from ..scores import Score, saliency_of
from ..selection import Request
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
from .stages import Stage, stage_budgets


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningGroup:
    """Tensors that are pruned together in one stage: one tensor, or coupled ones.

    Attributes:
        scope: The scopes of the tensors, over meta placeholders.
        specs: {tensor name: its block spec}.
        stage: The number of the stage. A later stage chooses among the elements that earlier ones kept.
        norm: The norm that scores a block: 1, 2 or inf, or None if a `score` gives saliencies.
        score: See `scores`; None scores the weight itself.
        member_scores: How the scores of coupled tensors are combined; see `ScopeSparsifier`.
        least: The smallest number of blocks that each member of `scope` may keep (`max_sparsity`); () sets no limit.
        label: The name in errors and reports.
    """

    scope: SparseScope
    specs: Mapping[str, BlockSpec]
    stage: int
    norm: Norm
    score: Score | None
    member_scores: str
    label: str
    least: tuple[int, ...] = ()

    def values(
        self,
        dense: Callable[[str], Tensor],
        statistics: Callable[[str], Statistics],
        known: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[Tensor, Tensor]:
        """Return the tensors that the scope scores: {meta placeholder: weight or saliency}.

        Args:
            dense: The weight of a tensor, by name.
            statistics: Returns the statistics of a tensor by its name; a score is called with them, or with the name.
            known: Results of `value_of` that were computed before, by the names of tensors.
        """
        if self.score is None and self.member_scores == "sum":
            return {spec.view.param: dense(name) for name, spec in self.specs.items()}
        scored, values = self.scored(statistics), {}
        for name, spec in self.specs.items():
            if name not in scored:
                values[spec.view.param] = torch.zeros_like(dense(name))
            else:
                value = known[name] if name in known else self.value_of(name, dense(name), statistics(name))
                values[spec.view.param] = value
        return values

    def value_of(self, name: str, weight: Tensor, statistics: Statistics) -> Tensor:
        """Return the values of one tensor that are scored: its weight or its saliency."""
        spec = self.specs[name]
        if self.score is not None:
            # a score sees the whole weight; its saliency is sharded as the weight is
            whole, blocks = full_tensor(weight), partial(labels_of, spec)
            weight = placed_like(saliency_of(self.score, whole, statistics.name, statistics, blocks), weight)
        if self.member_scores != "mean":
            return weight
        # a factor n^(-1/p), for n elements in a block, turns the sum of p-th powers into a mean
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return wide * math.prod(spec.shape) ** (-1 / (1 if self.norm is None else self.norm))

    def scored(self, statistics: Callable[[str], Statistics]) -> tuple[str, ...]:
        """Return the tensors whose scores count: all, or with "consumers" those whose blocks are inputs of their layer.

        Raises:
            CouplingError: `member_scores` is "consumers", but no tensor has such blocks.
        """
        if self.member_scores != "consumers":
            return tuple(self.specs)
        consumers = tuple(name for name, spec in self.specs.items() if _is_consumer(spec, statistics(name)))
        if not consumers:
            raise CouplingError(
                f"{self.label}: member_scores='consumers' needs a tensor whose blocks are inputs of its layer, such as "
                "columns of a Linear, but the coupling has none; use 'sum' or 'mean'"
            )
        return consumers

    def norm_of(self, values: Iterable[Tensor]) -> Norm:
        """Return the norm that reduces these values: 1 for saliencies known to be non-negative, else the group's own.

        The 1-norm has faster kernels. Values on a GPU are not inspected, since that would wait for the device.
        """
        if self.score is None:
            return self.norm
        for t in values:
            if local(t).device.type != "cpu" or is_sharded(t) or not bool((t >= 0).all()):
                return self.norm
        return 1

    def budget(self, groups: Mapping[str, TensorGroup]) -> Budget:
        """Return how many blocks each scope keeps now. Every budget is checked here.

        A `sparsity_level` that differs from `level_of_nnz`, the level that a group's count amounts to, was written by a
        scheduler and replaces the count.
        """
        is_scheduled, asked = False, {}
        for name in self.specs:
            level = checked_level(groups[name]["sparsity_level"], f"{name}: ")
            is_scheduled |= level != groups[name].get("level_of_nnz", level)
        for name in self.specs:
            group = groups[name]
            budgets = stage_budgets(group)
            if is_scheduled and None not in budgets:
                raise SparsityError(
                    f"{name}: sparsity_level was set to {group['sparsity_level']}, but every stage has "
                    "a budget of its own. Leave the budget out of the stage that a scheduler is to change."
                )
            key = "sparsity_level" if group.get("nnz") is None or is_scheduled else "nnz"
            asked[name] = budgets[self.stage] or (key, group[key])
        first, (what, number) = next(iter(asked.items()))
        for name, (other_what, other) in [*asked.items()][1:]:
            if other_what != what or not is_same(other, number):
                raise CouplingError(
                    f"{self.label}: members share one budget, but {first} asks for {what}={number} "
                    f"and {name} for {other_what}={other}"
                )
        keep = self.scope.sparsity_to_nnz(number) if what == "sparsity_level" else self.scope.budget(number)
        if self.least and total_of(keep) < sum(self.least):
            raise CouplingError(
                f"{self.label}: {what}={number} keeps {total_of(keep)} blocks of all tensors, but "
                f"max_sparsity requires {sum(self.least)}, rounded up for each tensor; keep more, or raise max_sparsity"
            )
        return keep

    def request(self, masks: Mapping[str, Tensor], keep: Budget, values: dict[Tensor, Tensor], norm: Norm) -> Request:
        """Return the request to fill `masks`, {name: mask}, with the blocks whose `values` have the largest norms."""
        return Request(
            scope=self.scope,
            masks={spec: masks[name] for name, spec in self.specs.items()},
            keep=keep,
            values=values,
            norm=norm,
            within_mask=self.stage > 0,
        )

    def pattern(self, name: str) -> str:
        """Return the shapes of a tensor's view (unless it is the tensor itself), blocks and scopes as text."""
        spec = self.specs[name]
        scope = next(m for m in self.scope.members() if spec in m.block.blocks())
        view = "" if spec.view.shape == tuple(spec.view.param.shape) else f"view {_by(spec.view.shape)} "
        return f"{view}block {_by(spec.shape)} scope {_by(scope.shape)}"


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values of a config key are equal; tensors (also in lists and dicts) compare by elements."""
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is other or (isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other))
    try:
        return value is other or bool(value == other)
    except RuntimeError:  # "Boolean value of Tensor ...": the containers differ at most in tensors
        if isinstance(value, Mapping):
            return all(is_same(v, other[k]) for k, v in value.items())
        return all(map(is_same, value, other))


def total_of(budget: Budget) -> int:
    """Return how many blocks all scopes keep together; an int is the budget of a single scope."""
    return int(budget.sum()) if isinstance(budget, Tensor) else budget


def kept_in(spec: BlockSpec, mask: Tensor) -> int:
    """Return the number of blocks of which an unsharded mask keeps at least one element."""
    return sum(int(torch.count_nonzero(kept_flags(m))) for m in block_windows(spec, None, {spec: mask}))


def counts_in_scopes(scope: SparseScope, masks: Mapping[BlockSpec, Tensor]) -> Tensor:
    """Return the number of blocks, in each scope, of which unsharded masks keep an element: int64 [*scope grid]."""
    windows = scope_windows(scope, None, masks)
    counts = [to_scopes(kept_grid(w.windows, len(w.shape)), w, False).sum(1) for w in windows]
    total = counts[0] if len(counts) == 1 else torch.stack([c.cpu() for c in counts]).sum(0)
    return total.reshape(scope.grid_shape)


def labels_of(spec: BlockSpec) -> Tensor:
    """Return the number of the block that each element is in, int64 of the tensor's shape; -1 outside the view."""
    param = spec.view.param  # labels get its strides, so that the window is no copy
    labels = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64, device="cpu").fill_(-1)
    windows = block_windows(spec, None, {spec: labels})
    fill_mask(windows, torch.arange(spec.numblk(), device="cpu").view(windows[0].grid))
    return labels


def _is_consumer(spec: BlockSpec, statistics: Statistics) -> bool:
    """Return whether each block holds the weights of the same inputs for all outputs."""
    if statistics.adapter is None:
        return False
    labels = statistics.matrix(labels_of(spec))
    return bool((labels == labels[:, :1]).all()) and bool((labels != labels[:, :, :1]).any())


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"


def groups_by_name(groups: Iterable[TensorGroup]) -> dict[str, TensorGroup]:
    """Return {tensor_fqn: group}."""
    return {group["tensor_fqn"]: group for group in groups}


def make_pruning_groups(
    stages: Mapping[str, tuple[Stage, ...]], tensors: Mapping[str, Tensor]
) -> tuple[PruningGroup, ...]:
    """Make the pruning groups of all tensors: stage by stage, uncoupled tensors alone, coupled ones together.

    Args:
        stages: {name: the structure of a tensor in each stage}.
        tensors: {name: the dense weight}, of which only shape, strides and dtype are read.

    Raises:
        SparsityError: A structure does not fit; the error names the tensor.
    """
    pruning_groups: list[PruningGroup] = []
    for stage in range(max(map(len, stages.values()), default=0)):
        here = {name: structures[stage] for name, structures in stages.items() if stage < len(structures)}
        staged = [_Staged(structure, _block_spec(name, structure, tensors[name])) for name, structure in here.items()]
        named: dict[object, list[_Unit]] = {}  # units that share one budget, by the name of their scope coupling
        for unit in _block_units(staged):
            first = unit[0][0]
            name = first.structure.scope_coupling
            named.setdefault(name if name is not None else (first.spec.name,), []).append(unit)
        for coupling, units in named.items():
            label = f"scope coupling {coupling!r}" if isinstance(coupling, str) else str(units[0][1].name)
            pruning_groups.append(_pruning_group(label, units, stage))
    return tuple(pruning_groups)


def refuse_unfit(group: TensorGroup, stages: Sequence[Stage], tensor: Tensor) -> None:
    """Raise an error if blocks, scopes or budgets do not fit one tensor; those shared by a coupling are not checked."""
    for at, stage in enumerate(stages):
        spec = _block_spec(group["tensor_fqn"], stage, tensor)
        if stage.block_coupling is None:  # else scopes cut the block grid that the coupled tensors share
            ScopeSpec(spec, stage.scope_shape)
            if stage.scope_coupling is None:
                pruning = _pruning_group(group["tensor_fqn"], [([_Staged(stage, spec)], spec)], at)
                pruning.budget({group["tensor_fqn"]: group})


def numel_of_groups(pruning_groups: Sequence[PruningGroup]) -> int:
    """Return the number of elements of all tensors in pruning groups, counted once for each stage."""
    return sum(spec.view.numel() for pruning in pruning_groups for spec in pruning.specs.values())


def batches(pruning_groups: Sequence[PruningGroup], most: int) -> Iterator[list[PruningGroup]]:
    """Yield batches of at most `most` elements; coupled tensors stay in one batch, which may be larger."""
    batch: list[PruningGroup] = []
    total = 0
    for coupled in connected({pruning: pruning.specs for pruning in pruning_groups}):
        size = numel_of_groups(coupled)
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch += coupled
        total += size
    if batch:
        yield batch


class _Staged(NamedTuple):
    """A tensor in one stage: its structure and its blocks."""

    structure: Stage
    spec: BlockSpec


_Unit = tuple[list[_Staged], SparseBlock]  # blocks that are kept or dropped together
_SCORING = ("norm", "score", "member_scores", "max_sparsity")  # equal for tensors that are chosen together


def _block_units(tensors: Iterable[_Staged]) -> list[_Unit]:
    """Return the blocks of each tensor, with one BlockCoupling for tensors that give the same name."""
    named: dict[object, list[_Staged]] = {}
    for tensor in tensors:
        name = tensor.structure.block_coupling
        named.setdefault(name if name is not None else (tensor.spec.name,), []).append(tensor)
    units: list[_Unit] = []
    for coupling, coupled in named.items():
        structure, spec = coupled[0]
        if not isinstance(coupling, str):
            if structure.coupling_order is not None:
                raise SparsityError(f"{spec.name}: coupling_order needs a block_coupling")
            if structure.member_scores != "sum":
                raise SparsityError(f"{spec.name}: member_scores needs a block_coupling")
            units.append((coupled, spec))
            continue
        label = f"block coupling {coupling!r}"
        if len(coupled) == 1:
            raise CouplingError(f"{label}: only {spec.name} gives this name, but a coupling needs two tensors")
        _must_agree(label, ("scope_shape", "scope_coupling", *_SCORING), coupled)
        orders = [structure.coupling_order for structure, _ in coupled]
        units.append((coupled, BlockCoupling([spec for _, spec in coupled], orders, name=label)))
    return units


def _pruning_group(label: str, units: Sequence[_Unit], stage: int) -> PruningGroup:
    tensors = [tensor for coupled, _ in units for tensor in coupled]
    scopes = [ScopeSpec(block, coupled[0].structure.scope_shape) for coupled, block in units]
    if len(tensors) > 1:
        _must_agree(label, _SCORING, tensors)
    structure = tensors[0].structure
    least: tuple[int, ...] = ()
    if structure.max_sparsity is not None:
        if structure.scope_coupling is None or stage or any(s.numscp() != 1 for s in scopes):
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
    )


def _must_agree(label: str, keys: Sequence[str], tensors: Sequence[_Staged]) -> None:
    for structure, spec in tensors[1:]:
        for key in keys:
            first, other = getattr(tensors[0].structure, key), getattr(structure, key)
            if other != first:
                raise CouplingError(
                    f"{label}: members need the same {key}, but {tensors[0].spec.name} gives {first!r} and "
                    f"{spec.name} {other!r}"
                )


def _block_spec(fqn: str, structure: Stage, tensor: Tensor) -> BlockSpec:
    shape, stride = tuple(tensor.shape), tensor.stride()
    if isinstance(structure.view, tuple):
        stride = row_major(shape)  # a view given by numbers refers to the row-major layout
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
    distributed.choose_sharded(list(requests.values()))
    for pruning, request in requests.items():
        if pruning.least:
            _keep_least(pruning, request)


def _keep_least(pruning: PruningGroup, request: Request) -> None:
    """Choose again until no tensor keeps fewer blocks than its least number (`max_sparsity`).

    Tensors that keep too few get their least number each. The others share what remains, so that they keep fewer than
    before. The masks then keep the best blocks that these limits allow.
    """
    free = {k: ScopeSpec(m.block, m.shape) for k, m in enumerate(pruning.scope.members())}
    remaining = total_of(request.keep)

    def part(scope: SparseScope, keep: int) -> Request:
        return replace(request, scope=scope, masks={s: request.masks[s] for s in scope.blocks()}, keep=keep)

    while True:
        first_specs = {k: s.blocks()[0] for k, s in free.items()}  # coupled blocks are kept together
        short = [
            k for k, spec in first_specs.items() if kept_in(spec, full_tensor(request.masks[spec])) < pruning.least[k]
        ]
        if not short:
            return
        requests = [part(free.pop(k), pruning.least[k]) for k in short]
        remaining -= sum(pruning.least[k] for k in short)
        if free:
            rest = list(free.values())
            requests.append(part(rest[0] if len(rest) == 1 else ScopeCoupling(rest), remaining))
        distributed.choose_sharded(requests)
