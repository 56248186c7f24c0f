"""Pruning groups: tensors that are pruned together in one stage, from the structure of config entries to requests.

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
from ..structure.tiles import row_major, to_aligned
from ..structure.windows import Norm, Window, fill_mask, kept_flags, kept_grid, to_scopes
from .config import TensorGroup
from .progress import shown
from .stages import Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningGroup:
    """Tensors that are pruned together in one stage: one tensor, or coupled ones.

    Attributes:
        scope: Their scopes, over meta placeholders.
        members: Of each tensor the block spec, and the index of its group dict.
        stage: Number of the stage. A later one chooses among the elements that earlier ones kept.
        norm: How the elements of a block make its score; 1, 2 or inf, or None where a `score` gives saliencies.
        score: See `scores`; None scores the weight itself.
        member_scores: With "sum" a member counts by its elements, with "mean" each counts the same, with "consumers"
            only members count whose blocks are inputs of their layer.
        least: Blocks that each member of `scope` keeps at least, whatever the budget over all; () without a limit.
        label: Its name in errors and reports.
    """

    scope: SparseScope
    members: tuple[tuple[BlockSpec, int], ...]
    stage: int
    norm: Norm
    score: Score | None
    member_scores: str
    label: str
    least: tuple[int, ...] = ()

    def values(
        self,
        dense: Callable[[int], Tensor],
        statistics: Callable[[int], Statistics],
        known: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> dict[Tensor, Tensor]:
        """The tensors that the scope scores: {meta placeholder: weight or saliency}.

        Args:
            dense: The weight of a group, by the group's index.
            statistics: Those of a group; a score is called with them, or with the name in them.
            known: {index of a group: its `value_of`}, where it was computed before.
        """
        if self.score is None and self.member_scores == "sum":
            return {spec.view.param: dense(at) for spec, at in self.members}
        scored, values = self.scored(statistics), {}
        for spec, at in self.members:
            if (spec, at) not in scored:
                values[spec.view.param] = torch.zeros_like(dense(at))
            else:
                values[spec.view.param] = known[at] if at in known else self.value_of(spec, dense(at), statistics(at))
        return values

    def value_of(self, spec: BlockSpec, weight: Tensor, statistics: Statistics) -> Tensor:
        """What is scored of one tensor: its weight, or its saliency."""
        if self.score is not None:
            # a score sees the whole weight; its saliency is sharded as the weight is
            whole, blocks = full_tensor(weight), partial(labels_of, spec)
            weight = placed_like(saliency_of(self.score, whole, statistics.name, statistics, blocks), weight)
        if self.member_scores != "mean":
            return weight
        # times n^(-1/p), n elements in a block: the sum of p-th powers is then a mean
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return wide * math.prod(spec.shape) ** (-1 / (1 if self.norm is None else self.norm))

    def scored(self, statistics: Callable[[int], Statistics]) -> tuple[tuple[BlockSpec, int], ...]:
        """The members whose scores count: all, or with "consumers" those whose blocks are inputs of their layer.

        Raises:
            CouplingError: "consumers", and there is none.
        """
        if self.member_scores != "consumers":
            return self.members
        consumers = tuple((spec, at) for spec, at in self.members if _is_consumer(spec, statistics(at)))
        if not consumers:
            raise CouplingError(
                f"{self.label}: member_scores='consumers', but no member's blocks are inputs of its layer, such as "
                "columns of a Linear"
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

    def budget(self, groups: Sequence[TensorGroup]) -> Budget:
        """Return how many blocks each scope keeps now; the one place where a budget is checked.

        A `sparsity_level` that differs from `level_of_nnz`, the level that a group's count amounts to, was written by a
        scheduler and replaces the count.
        """
        is_scheduled, asked = False, {}
        for _, at in self.members:
            level = checked_level(groups[at]["sparsity_level"], f"{groups[at]['tensor_fqn']}: ")
            is_scheduled |= level != groups[at].get("level_of_nnz", level)
        for _, at in self.members:
            group = groups[at]
            budgets = stage_budgets(group)
            if is_scheduled and None not in budgets:
                raise SparsityError(
                    f"{group['tensor_fqn']}: sparsity_level was set to {group['sparsity_level']}, but every stage has "
                    "a budget of its own. Leave the budget out of the stage that a scheduler is to change."
                )
            key = "sparsity_level" if group.get("nnz") is None or is_scheduled else "nnz"
            asked[group["tensor_fqn"]] = budgets[self.stage] or (key, group[key])
        first, (what, number) = next(iter(asked.items()))
        for fqn, (other_what, other) in [*asked.items()][1:]:
            if other_what != what or not is_same(other, number):
                raise CouplingError(
                    f"{self.label}: members share one budget, but {first} asks for {what}={number} "
                    f"and {fqn} for {other_what}={other}"
                )
        keep = self.scope.sparsity_to_nnz(number) if what == "sparsity_level" else self.scope.budget(number)
        if self.least and total_of(keep) < sum(self.least):
            raise CouplingError(
                f"{self.label}: {what}={number} keeps {total_of(keep)} blocks of all tensors, but "
                f"max_sparsity requires {sum(self.least)}, rounded up for each tensor; keep more, or raise max_sparsity"
            )
        return keep

    def request(self, masks: Mapping[int, Tensor], keep: Budget, values: dict[Tensor, Tensor], norm: Norm) -> Request:
        """Return the request that fills the masks, {index of a group: mask}, by this norm of these values."""
        return Request(
            scope=self.scope,
            masks={spec: masks[at] for spec, at in self.members},
            keep=keep,
            values=values,
            norm=norm,
            within_mask=self.stage > 0,
        )

    def spec(self, at: int) -> BlockSpec:
        """The block spec of a group, by the group's index."""
        return next(spec for spec, i in self.members if i == at)

    def pattern(self, at: int) -> str:
        """The shapes of a group's view (where it is not the tensor), blocks and scopes, as text."""
        spec = self.spec(at)
        scope = next(m for m in self.scope.members() if spec in m.block.blocks())
        view = "" if spec.view.shape == tuple(spec.view.param.shape) else f"view {_by(spec.view.shape)} "
        return f"{view}block {_by(spec.shape)} scope {_by(scope.shape)}"


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of a config key are the same; tensors, inside of lists and dicts too, by their elements."""
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is other or (isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other))
    try:
        return value is other or bool(value == other)
    except RuntimeError:  # "Boolean value of Tensor ...": the containers are alike but for tensors inside
        if isinstance(value, Mapping):
            return all(is_same(v, other[k]) for k, v in value.items())
        return all(map(is_same, value, other))


def stage_budgets(group: TensorGroup) -> list[tuple[str, Any] | None]:
    """Return each stage's own budget as (key, number); None where the stage follows its group."""
    stages = group.get("stages")
    if stages is None:
        return [None]
    return [next(((k, s[k]) for k in ("nnz", "sparsity_level") if k in s), None) for s in stages]


def total_of(budget: Budget) -> int:
    """Blocks that all scopes keep, where there is a budget for each of them or a single scope."""
    return int(budget.sum()) if isinstance(budget, Tensor) else budget


def kept_in(spec: BlockSpec, mask: Tensor) -> int:
    """Blocks of which a whole mask keeps any element."""
    return sum(int(torch.count_nonzero(kept_flags(m))) for m in block_windows(spec, None, {spec: mask}))


def counts_in_scopes(scope: SparseScope, masks: Mapping[BlockSpec, Tensor]) -> Tensor:
    """Blocks of which whole masks keep any element, in each scope; int64, of the scope grid's shape."""
    windows = scope_windows(scope, None, masks)
    counts = [to_scopes(kept_grid(w.members, len(w.shape)), w, False).sum(1) for w in windows]
    total = counts[0] if len(counts) == 1 else torch.stack([c.cpu() for c in counts]).sum(0)
    return total.reshape(scope.grid_shape)


def labels_of(spec: BlockSpec) -> Tensor:
    """The block of each element of a tensor, int64 in its shape; -1 outside the view."""
    param = spec.view.param  # of its strides, so that the window is no copy
    labels = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64, device="cpu").fill_(-1)
    windows = block_windows(spec, None, {spec: labels})
    fill_mask(windows, torch.arange(spec.numblk(), device="cpu").view(windows[0].grid))
    return labels


def _is_consumer(spec: BlockSpec, statistics: Statistics) -> bool:
    """Whether each block is the same inputs of all outputs."""
    if statistics.adapter is None:
        return False
    labels = statistics.matrix(labels_of(spec))
    return bool((labels == labels[:, :1]).all()) and bool((labels != labels[:, :, :1]).any())


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"


def make_pruning_groups(
    groups: Sequence[TensorGroup], stages: Sequence[tuple[Stage, ...]], tensors: Sequence[Tensor]
) -> tuple[PruningGroup, ...]:
    """Make the pruning groups of all tensors: stage by stage, uncoupled tensors alone, coupled ones together.

    Of the dense weights `tensors`, only shape, strides and dtype are read. Errors name the tensor that does not fit.
    """
    pruning_groups: list[PruningGroup] = []
    for stage in range(max(map(len, stages), default=0)):
        members = []
        for at, (group, structures, tensor) in enumerate(zip(groups, stages, tensors, strict=True)):
            if stage < len(structures):
                structure = structures[stage]
                members.append(_Member(at, structure, _block_spec(group["tensor_fqn"], structure, tensor)))
        named: dict[object, list[_Unit]] = {}  # units that share one budget, by the name of their scope coupling
        for unit in _block_units(members):
            first = unit[0][0]
            name = first.structure.scope_coupling
            named.setdefault(name if name is not None else (first.at,), []).append(unit)
        for coupling, units in named.items():
            label = f"scope coupling {coupling!r}" if isinstance(coupling, str) else str(units[0][1].name)
            pruning_groups.append(_pruning_group(label, units, stage))
    return tuple(pruning_groups)


def refuse_unfit(group: TensorGroup, stages: Sequence[Stage], tensor: Tensor) -> None:
    """Raise where blocks, scopes or budgets do not fit one tensor, as far as no coupled tensor takes part in them."""
    for at, stage in enumerate(stages):
        spec = _block_spec(group["tensor_fqn"], stage, tensor)
        if stage.block_coupling is None:  # a coupling's scopes are those of the grid that its members share
            ScopeSpec(spec, stage.scope_shape)
            if stage.scope_coupling is None:
                _pruning_group(group["tensor_fqn"], [([_Member(0, stage, spec)], spec)], at).budget([group])


def elements_of(pruning_groups: Sequence[PruningGroup]) -> int:
    """Elements of all tensors of pruning groups, once for each stage."""
    return sum(spec.view.numel() for g in pruning_groups for spec, _ in g.members)


def batches(pruning_groups: Sequence[PruningGroup], most: int) -> Iterator[list[PruningGroup]]:
    """Yield batches of at most `most` elements; coupled tensors stay in one batch, which may be larger."""
    count = 1 + max((at for g in pruning_groups for _, at in g.members), default=-1)
    batch: list[PruningGroup] = []
    total = 0
    for coupled in dict.fromkeys(connected(pruning_groups, count)):
        size = elements_of(coupled)
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch += coupled
        total += size
    if batch:
        yield batch


def connected(pruning_groups: Sequence[PruningGroup], count: int) -> tuple[tuple[PruningGroup, ...], ...]:
    """Return, for each group, the pruning groups of all stages of it and of the groups that are coupled to it."""
    connection = list(range(count))
    for g in pruning_groups:
        joined = {connection[at] for _, at in g.members}
        if len(joined) > 1:
            connection = [min(joined) if f in joined else f for f in connection]
    coupled: dict[int, list[PruningGroup]] = {}
    for g in pruning_groups:
        coupled.setdefault(connection[g.members[0][1]], []).append(g)
    return tuple(tuple(coupled.get(f, ())) for f in connection)


class _Member(NamedTuple):
    """A tensor in one stage: the index of its group, its structure and its blocks."""

    at: int
    structure: Stage
    spec: BlockSpec


_Unit = tuple[list[_Member], SparseBlock]  # blocks that are kept or dropped together
_SCORING = ("norm", "score", "member_scores", "max_sparsity")  # what tensors that are chosen together agree on


def _block_units(members: Iterable[_Member]) -> list[_Unit]:
    """Each tensor's own blocks, or a BlockCoupling of tensors that give one name."""
    named: dict[object, list[_Member]] = {}
    for m in members:
        name = m.structure.block_coupling
        named.setdefault(name if name is not None else (m.at,), []).append(m)
    units: list[_Unit] = []
    for coupling, coupled in named.items():
        _, structure, spec = coupled[0]
        if not isinstance(coupling, str):
            if structure.coupling_order is not None:
                raise SparsityError(f"{spec.name}: coupling_order needs a block_coupling")
            if structure.member_scores != "sum":
                raise SparsityError(f"{spec.name}: member_scores needs a block_coupling")
            units.append((coupled, spec))
            continue
        label = f"block coupling {coupling!r}"
        if len(coupled) == 1:
            raise CouplingError(f"{label}: {spec.name} is its only member; a coupling needs two")
        _must_agree(label, ("scope_shape", "scope_coupling", *_SCORING), coupled)
        orders = [m.structure.coupling_order for m in coupled]
        units.append((coupled, BlockCoupling([m.spec for m in coupled], orders, name=label)))
    return units


def _pruning_group(label: str, units: Sequence[_Unit], stage: int) -> PruningGroup:
    members = [m for coupled, _ in units for m in coupled]
    scopes = [ScopeSpec(block, coupled[0].structure.scope_shape) for coupled, block in units]
    if len(members) > 1:
        _must_agree(label, _SCORING, members)
    structure = members[0].structure
    least: tuple[int, ...] = ()
    if structure.max_sparsity is not None:
        if structure.scope_coupling is None or stage or any(s.numscp() != 1 for s in scopes):
            raise SparsityError(
                f"{label}: max_sparsity limits what a budget over several whole tensors drops of each; it needs a "
                "scope_coupling, scopes that are whole tensors, and the first stage"
            )
        where = f"{label}: max_sparsity: "
        least = tuple(sparsity_to_nnz(structure.max_sparsity, s.numblk(), where) for s in scopes)
    return PruningGroup(
        scope=scopes[0] if len(scopes) == 1 else ScopeCoupling(scopes, name=label),
        members=tuple([(m.spec, m.at) for m in members]),
        stage=stage,
        norm=structure.norm if structure.score is None else None,
        score=structure.score,
        member_scores=structure.member_scores,
        label=label,
        least=least,
    )


def _must_agree(label: str, keys: Sequence[str], members: Sequence[_Member]) -> None:
    for m in members[1:]:
        for key in keys:
            first, other = getattr(members[0].structure, key), getattr(m.structure, key)
            if other != first:
                raise CouplingError(
                    f"{label}: members need the same {key}, but {members[0].spec.name} gives {first!r} and "
                    f"{m.spec.name} {other!r}"
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


def update_masks(requests: Mapping[PruningGroup, Request]) -> None:
    """Fill the masks of pruning groups that do not depend on each other; see `distributed.update_masks`."""
    distributed.update_masks(list(requests.values()))
    for group, request in requests.items():
        if group.least:
            _keep_least(group, request)


def _keep_least(group: PruningGroup, request: Request) -> None:
    """Choose again until no tensor keeps fewer blocks than its least number (`max_sparsity`).

    Tensors that keep too few get their least number each. The others share what remains, so that they keep fewer than
    before. These are the masks that keep the best blocks of all under these limits.
    """
    free = {k: ScopeSpec(m.block, m.shape) for k, m in enumerate(group.scope.members())}
    remaining = total_of(request.keep)

    def part(scope: SparseScope, keep: int) -> Request:
        return replace(request, scope=scope, masks={s: request.masks[s] for s in scope.blocks()}, keep=keep)

    while True:
        first_specs = {k: s.blocks()[0] for k, s in free.items()}  # coupled blocks are kept together
        short = [
            k for k, spec in first_specs.items() if kept_in(spec, full_tensor(request.masks[spec])) < group.least[k]
        ]
        if not short:
            return
        requests = [part(free.pop(k), group.least[k]) for k in short]
        remaining -= sum(group.least[k] for k in short)
        if free:
            rest = list(free.values())
            requests.append(part(rest[0] if len(rest) == 1 else ScopeCoupling(rest), remaining))
        distributed.update_masks(requests)


# checking masks: every scope is counted, every block must be kept whole or dropped whole


def check_masks(
    pruning_groups: Sequence[PruningGroup], groups: Sequence[TensorGroup], masks: Sequence[tuple[Tensor, bool]]
) -> int:
    """Count every scope; see `ScopeSparsifier.check`."""
    wrong: list[str] = []
    checked = 0
    for group in shown(pruning_groups, "check", elements_of(pruning_groups)):
        is_exact = all(masks[at][1] for _, at in group.members)
        of_group = {spec: full_tensor(masks[at][0]) for spec, at in group.members}
        tensors = {at for _, at in group.members}
        others = [c for c in pruning_groups if c is not group and tensors & {at for _, at in c.members}]
        earlier = [c for c in others if c.stage < group.stage]
        low: int | None = 0  # blocks of which a later stage dropped a part may be kept in part, or not at all
        if is_exact and len(earlier) == len(others):
            low = None if not earlier else _certain(earlier, group, groups)
            wrong += [f"{group.label}: {text}" for text in _broken_blocks(group, of_group, earlier)]
        wrong += [f"{group.label}: {text}" for text in _miscounted(group.scope, of_group, group.budget(groups), low)]
        checked += group.scope.numscp()
    if wrong:
        raise SparsityError("masks do not hold their budgets:\n  " + "\n  ".join(wrong))
    return checked


def _certain(earlier: Sequence[PruningGroup], last: PruningGroup, groups: Sequence[TensorGroup]) -> int:
    """A lower bound of the blocks that a scope of the last stage keeps, whatever the weights.

    Known where one earlier stage on the same view keeps a fixed number of elements in every scope of single elements
    (V:N:M). It is 0 elsewhere, since an earlier stage may keep less in a scope than its budget.
    """
    members = [c.scope.members()[0] for c in (*earlier, last)]
    specs = [m.block.blocks()[0] for m in members]
    views = [(v.shape, v.stride, v.offset, v.param.stride()) for v in (spec.view for spec in specs)]
    budgets = [c.budget(groups) for c in (*earlier, last)]
    plain = len(members) == 2 and all(len(c.members) == 1 and not c.scope.is_partial for c in (*earlier, last))
    if not plain or any(isinstance(b, Tensor) for b in budgets):
        return 0
    if specs[0].is_partial or views[0] != views[1] or any(b != 1 for b in specs[1].shape):
        return 0
    elements = int(budgets[0])
    for block, blocks, reach in zip(specs[0].shape, members[0].shape, members[1].shape, strict=True):
        if blocks == 1 and block % reach == 0:
            elements *= reach
        elif blocks > 1 and reach % (block * blocks) == 0:
            elements *= block * (reach // (block * blocks))
        else:
            return 0
    return min(elements, int(budgets[1]))


def _broken_blocks(
    group: PruningGroup, masks: Mapping[BlockSpec, Tensor], earlier: Sequence[PruningGroup]
) -> Iterator[str]:
    """Tensors with a block that is kept in part, though no earlier stage may have dropped the rest of it."""
    indices = dict(group.members)
    for scopes, scope_member in zip(scope_windows(group.scope, None, masks), group.scope.members(), strict=True):
        agree = [True] * len(scopes.members)
        if not earlier and len(agree) > 1:  # each of coupled members keeps every block of which another one keeps any
            together = kept_grid(scopes.members, len(scopes.shape))
            agree = [torch.equal(to_aligned(kept_flags(m), m.order, together.ndim), together) for m in scopes.members]
        for member, spec, agrees in zip(scopes.members, scope_member.block.blocks(), agree, strict=True):
            before = [c.spec(indices[spec]) for c in earlier if any(at == indices[spec] for _, at in c.members)]
            if not agrees or not _are_whole(member, spec, before):
                yield f"{spec.name}: some block is neither kept whole nor dropped whole, or its coupled one differs"


def _are_whole(member: Window, spec: BlockSpec, before: Sequence[BlockSpec]) -> bool:
    """Whether blocks are kept whole or dropped whole, but for those that blocks of earlier stages cut."""
    if not before:
        return all(n == 1 for n in member.shape) or torch.equal(kept_flags(member, every=True), kept_flags(member))
    assert member.mask is not None
    whole = member.mask.clone()
    fill_mask((replace(member, mask=whole, order=()),), kept_flags(member))
    wrong = whole != member.mask
    return not bool((wrong & ~spec.view.window(_cut(spec, before).to(wrong.device))).any())


def _cut(spec: BlockSpec, others: Sequence[BlockSpec]) -> Tensor:
    """The elements, bool in the tensor's shape, of blocks that are divided over several blocks of another spec."""
    blocks = labels_of(spec).reshape(-1) + 1  # 0 is outside the view
    is_cut = torch.zeros(spec.numblk() + 1, dtype=torch.bool, device="cpu")
    for other in others:
        labels = labels_of(other).reshape(-1)
        empty = torch.full(is_cut.shape, -1, device="cpu")
        low, high = (empty.scatter_reduce(0, blocks, labels, how, include_self=False) for how in ("amin", "amax"))
        is_cut |= low != high
    return is_cut[blocks].reshape(tuple(spec.view.param.shape))


def _miscounted(
    scope: SparseScope, masks: Mapping[BlockSpec, Tensor], budget: Budget, low: int | None
) -> Iterator[str]:
    """Scopes that keep more than their budget, or fewer than `low` (None: than the budget)."""
    kept = counts_in_scopes(scope, masks)
    if isinstance(budget, int) and not scope.is_partial and kept.numel():
        least, most = map(int, kept.aminmax())
        if most <= budget and least >= (budget if low is None else low):
            return
    kept = kept.cpu()
    want = torch.minimum(torch.as_tensor(budget, device="cpu").expand(scope.grid_shape), scope.blocks_per_scope())
    bad = ((kept > want) | (kept < (want if low is None else low))).reshape(-1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        yield (
            f"{int(bad.sum())} of {bad.numel()} scopes are wrong; scope {first} keeps {int(kept.reshape(-1)[first])} "
            f"blocks, its budget is {int(want.reshape(-1)[first])} (as the levels are now; step() again if a scheduler "
            "changed them)"
        )
