"""Scopes of one or several tensors that are chosen together in one stage: what they score, and their budgets."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..calibration import Statistics
from ..distributed import full_tensor, is_sharded, local, placed_like
from ..errors import CouplingError, SparsityError
from ..scores import Score, saliency_of
from ..selection import fill_mask
from ..selection.counts import kept_flags
from ..structure import BlockSpec, SparseScope, block_windows
from .config import TensorGroup
from .structure import stage_budgets


@dataclass(frozen=True, kw_only=True, eq=False)
class Component:
    """Scopes that are chosen together in one stage: one tensor's, or those of coupled tensors.

    Attributes:
        scope: the scopes, over meta placeholders.
        leaves: for each block spec of `scope`, the index of its group.
        stage: 0 for the first; a later one chooses among the elements that earlier ones kept.
        norm: how the elements of a block make its score; 1, 2 or inf, or None where a `score` gives saliencies.
        score: see `scores`; None scores the weight itself.
        member_scores: "sum", or "mean" where every member counts the same however many elements it has, or
            "consumers" where only members count whose blocks are inputs of their layer.
        least: blocks that each member of `scope` keeps at least, whatever the budget over all; () without a limit.
        label: its name in errors and reports.
    """

    scope: SparseScope
    leaves: tuple[tuple[BlockSpec, int], ...]
    stage: int
    norm: float | None
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
            dense: the weight of a group, by the group's index.
            statistics: those of a group; a score is called with them, or with the name in them.
            known: {index of a group: its `value_of`}, where it was computed before.
        """
        scored = self.scored(statistics)
        found = {leaf.view.param: torch.zeros_like(dense(at)) for leaf, at in self.leaves if (leaf, at) not in scored}
        for leaf, at in scored:
            known_value = known.get(at)
            found[leaf.view.param] = (
                self.value_of(leaf, dense(at), statistics(at)) if known_value is None else known_value
            )
        return found

    def value_of(self, leaf: BlockSpec, weight: Tensor, statistics: Statistics) -> Tensor:
        """What is scored of one tensor: its weight, or its saliency."""
        if self.score is not None:
            uses_blocks = getattr(self.score, "uses_blocks", False)
            statistics.blocks = labels_of(leaf).to(weight.device) if uses_blocks else None
            weight = placed_saliency(self.score, weight, statistics)
            statistics.blocks = None
        return self._weighed(leaf, weight)

    def scored(self, statistics: Callable[[int], Statistics]) -> tuple[tuple[BlockSpec, int], ...]:
        """The leaves whose scores count: all, or with "consumers" those whose blocks are inputs of their layer.

        Raises:
            CouplingError: "consumers", and there is none.
        """
        if self.member_scores != "consumers":
            return self.leaves
        found = tuple((leaf, at) for leaf, at in self.leaves if _is_consumer(leaf, statistics(at)))
        if not found:
            raise CouplingError(
                f"{self.label}: member_scores='consumers', but no member's blocks are inputs of its layer, such as "
                "columns of a Linear"
            )
        return found

    def norm_of(self, values: Iterable[Tensor]) -> float | None:
        """How these values are reduced: saliencies that are known not to be negative are their own magnitudes.

        Magnitudes have faster kernels. Values on a GPU are not inspected, since that would wait for the device.
        """
        is_sum = self.score is not None and all(_is_magnitude(t) for t in values)
        return 1 if is_sum else self.norm

    def _weighed(self, leaf: BlockSpec, values: Tensor) -> Tensor:
        """For "mean", values times n^(-1/p), n elements in a block: the sum of p-th powers is then a mean."""
        if self.member_scores != "mean":
            return values
        wide = values if values.dtype == torch.float64 else values.float()
        return wide * math.prod(leaf.shape) ** (-1 / (1 if self.norm is None else self.norm))

    def budget(self, groups: Sequence[TensorGroup], level_given: Mapping[str, float]) -> int | Tensor:
        """Blocks to keep in each scope now.

        Args:
            groups: all groups; those of the members must agree.
            level_given: {tensor_fqn: the level that a group's `nnz` amounts to}; a `sparsity_level` that differs was
                written by a scheduler and overrules the `nnz`.
        """
        scheduled = any(_is_scheduled(groups[at], level_given) for _, at in self.leaves)
        asked = {groups[at]["tensor_fqn"]: _asked(groups[at], self.stage, scheduled) for _, at in self.leaves}
        first = next(iter(asked.values()))
        for fqn, ask in asked.items():
            if not _same(ask, first):
                raise CouplingError(
                    f"{self.label}: members share one budget, but {next(iter(asked))} asks for {first[0]}={first[1]} "
                    f"and {fqn} for {ask[0]}={ask[1]}"
                )
        what, number = first
        found = self.scope.sparsity_to_nnz(number) if what == "sparsity_level" else self.scope.budget(number)
        if self.least and total_of(found) < sum(self.least):
            raise CouplingError(
                f"{self.label}: {what}={number} keeps {total_of(found)} blocks of all tensors, but "
                f"max_sparsity requires {sum(self.least)}, rounded up for each tensor; keep more, or raise max_sparsity"
            )
        return found

    def level(self, groups: Sequence[TensorGroup], level_given: Mapping[str, float]) -> float:
        """The sparsity level that the budget amounts to, over all scopes."""
        return self.scope.level_of(self.budget(groups, level_given))

    def leaf(self, at: int) -> BlockSpec:
        """The block spec of a group, by the group's index."""
        return next(spec for spec, i in self.leaves if i == at)

    def kept_blocks(self, at: int, mask: Tensor) -> tuple[int, int]:
        """Blocks of a group that a whole mask keeps, and blocks in all."""
        leaf = self.leaf(at)
        return kept_in(leaf, mask), leaf.numblk()

    def pattern(self, at: int) -> str:
        """The shapes of a group's view (where it is not the tensor), blocks and scopes, as text."""
        leaf = self.leaf(at)
        scope = next(m for m in self.scope.members() if leaf in m.block.blocks())
        view = "" if leaf.view.shape == tuple(leaf.view.param.shape) else f"view {_by(leaf.view.shape)} "
        return f"{view}block {_by(leaf.shape)} scope {_by(scope.shape)}"


def total_of(budget: int | Tensor) -> int:
    """Blocks that all scopes keep, where there is a budget for each of them or a single scope."""
    return int(budget.sum()) if isinstance(budget, Tensor) else budget


def kept_in(leaf: BlockSpec, mask: Tensor) -> int:
    """Blocks of which a whole mask keeps any element."""
    return sum(int(torch.count_nonzero(kept_flags(m))) for m in block_windows(leaf, None, {leaf: mask}))


def placed_saliency(score: Score, weight: Tensor, statistics: Statistics) -> Tensor:
    """The saliency of a weight, sharded as the weight is; a score sees the whole weight."""
    return placed_like(saliency_of(score, full_tensor(weight), statistics.name, statistics), weight)


def labels_of(leaf: BlockSpec) -> Tensor:
    """The block of each element of a tensor, int64 in its shape; -1 outside the view."""
    param = leaf.view.param  # of its strides, so that the window is no copy
    labels = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64, device="cpu").fill_(-1)
    windows = block_windows(leaf, None, {leaf: labels})
    fill_mask(windows, torch.arange(leaf.numblk(), device="cpu").view(windows[0].grid))
    return labels


def _is_consumer(leaf: BlockSpec, statistics: Statistics) -> bool:
    """Whether each block is the same inputs of all outputs."""
    if statistics.adapter is None:
        return False
    labels = statistics.matrix(labels_of(leaf))
    return bool((labels == labels[:, :1]).all()) and bool((labels != labels[:, :, :1]).any())


def _is_magnitude(values: Tensor) -> bool:
    own = local(values)
    return own.device.type == "cpu" and not is_sharded(values) and bool((own >= 0).all())


def _is_scheduled(group: TensorGroup, level_given: Mapping[str, float]) -> bool:
    """Whether a scheduler has changed the level of a group."""
    return bool(group["sparsity_level"] != level_given.get(group["tensor_fqn"], group["sparsity_level"]))


def _asked(group: TensorGroup, stage: int, scheduled: bool) -> tuple[str, Any]:
    """The budget that a group asks for in a stage, as ("nnz", n) or ("sparsity_level", s)."""
    budgets = stage_budgets(group)
    if scheduled and None not in budgets:
        raise SparsityError(
            f"{group['tensor_fqn']}: sparsity_level was set to {group['sparsity_level']}, but every stage has a budget "
            "of its own. Leave the budget out of the stage that a scheduler is to change."
        )
    own = budgets[stage]
    if own is not None:
        return own
    if group.get("nnz") is not None and not scheduled:
        return "nnz", group["nnz"]
    return "sparsity_level", group["sparsity_level"]


def _same(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """Whether two members ask for the same; budgets may be tensors."""
    (what, number), (other_what, other_number) = one, other
    if isinstance(number, Tensor) and isinstance(other_number, Tensor):
        return what == other_what and torch.equal(number, other_number)
    return not isinstance(number, Tensor) and not isinstance(other_number, Tensor) and one == other


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"
