"""Budgets: how many blocks each scope keeps, as whole numbers.

A pruning group has the budget of its config entry ("fixed"), or shares the overall budget ("shared"). An overall level
is distributed over those that share it, with the same number of blocks in every scope of one pruning group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..densities import Densities, allocate
from ..errors import SparsityError, is_number
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.groups import PruningGroup


def refuse_optimizer_as_level(level: object) -> None:
    """Raise where the first positional argument, the sparsity level, is an optimizer, or several."""
    first = level[0] if isinstance(level, Sequence) and level else level
    if isinstance(getattr(first, "optimizer", first), Optimizer):
        raise SparsityError(
            f"the first argument is sparsity_level, got {type(first).__name__}; pass the optimizer as optimizer=..., "
            "or to attach"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Budgets:
    """The budgets of all pruning groups, which their groups store. Pruning groups are given by their index."""

    pruning_groups: Sequence[PruningGroup]  # stage by stage
    groups: Mapping[str, TensorGroup]  # by name; they store the budgets
    densities: Densities | None = None  # how an overall level is distributed; None where the masks were saved ones

    @cached_property
    def sizes(self) -> list[int]:
        """How many elements one block of each pruning group has, in units of their greatest common divisor."""
        blocks = [[m.block.numel_per_block() for m in c.scope.members()] for c in self.pruning_groups]
        sizes = [sum(numels) // len(numels) for numels in blocks]  # blocks that are chosen together may differ
        unit = math.gcd(*sizes) or 1
        return [n // unit for n in sizes]

    @cached_property
    def units(self) -> list[int]:
        """Elements of one more block in every scope of each pruning group, in the units of `sizes`."""
        return [n * c.scope.numscp() for n, c in zip(self.sizes, self.pruning_groups, strict=True)]

    @cached_property
    def capacities(self) -> list[int]:
        """Elements of all blocks of each pruning group, in the units of `sizes`."""
        return [u * c.scope.numblk_per_scope() for u, c in zip(self.units, self.pruning_groups, strict=True)]

    @property
    def shared(self) -> list[int]:
        """The pruning groups that share the overall budget: no entry specifies theirs, and they have blocks."""
        fixed = [any(self.groups[name]["fixed"] for name in c.specs) for c in self.pruning_groups]
        return [k for k, c in enumerate(self.pruning_groups) if c.scope.numblk() and not fixed[k]]

    def of_scopes(self, k: int) -> Tensor:
        """Return the blocks that each scope of a pruning group is to keep, by its groups; int64 [scopes] on the CPU."""
        scope, budget = self.pruning_groups[k].scope, self.pruning_groups[k].budget(self.groups)
        budget = torch.as_tensor(budget, device="cpu").expand(scope.grid_shape)
        return torch.minimum(budget, scope.blocks_per_scope()).reshape(-1)

    def set(self, k: int, nnz: int) -> None:
        """Write a budget into a pruning group's groups, as a count and as its level."""
        pruning = self.pruning_groups[k]
        level = pruning.scope.level_of(nnz)
        for name in pruning.specs:
            self.groups[name] |= {"nnz": nnz, "sparsity_level": level, "level_of_nnz": level}

    def ideals(self, level: float) -> tuple[dict[int, float], int]:
        """Return {shared pruning group: what it would keep at an overall sparsity}, and what all of them keep, exactly.

        Both are in the units of `sizes`; what fixed pruning groups keep is subtracted.
        """
        shared, pruning_groups = set(self.shared), self.pruning_groups
        shapes = {name: tuple(spec.view.param.shape) for c in pruning_groups for name, spec in c.specs.items()}
        fixed = dict[str, float]()
        for c in (c for k, c in enumerate(pruning_groups) if k not in shared):
            fixed |= dict.fromkeys(c.specs, 1 - c.scope.level_of(c.budget(self.groups)))
        assert self.densities is not None
        densities = self.densities(shapes, 1 - level, fixed)
        for name in shapes:  # the distribution may be a user's function
            density = densities.get(name) if isinstance(densities, Mapping) else None
            if not is_number(density) or not -1e-9 <= float(density) <= 1 + 1e-9:
                raise SparsityError(f"{name}: init must give it a density in [0, 1], got {density!r}")
        numels = [c.scope.numblk() * n for n, c in zip(self.sizes, pruning_groups, strict=True)]
        sum_kept, ideals = round((1 - level) * sum(numels)), {}
        for k, c in enumerate(pruning_groups):
            elements = {name: spec.view.numel() for name, spec in c.specs.items()}
            density = sum(densities[n] * e for n, e in elements.items()) / max(sum(elements.values()), 1)
            if k in shared:
                ideals[k] = density * numels[k]
            else:
                sum_kept -= int(self.of_scopes(k).sum()) * self.sizes[k]
        return ideals, sum_kept

    def counts(
        self, level: float, low: Mapping[int, int] | None = None, high: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Return the blocks in each scope of every shared pruning group, whose sum is the exact one, or just below.

        `low` and `high` bound the blocks in each scope; by default one, so that no layer is empty, and all.
        """
        ideals, sum_kept = self.ideals(level)
        unit = [self.units[k] for k in ideals]
        self.refuse_uneven_scopes()
        least = [u * (1 if low is None else low[k]) for k, u in zip(ideals, unit, strict=True)]
        most = [self.capacities[k] if high is None else u * high[k] for k, u in zip(ideals, unit, strict=True)]
        if high is not None:
            sum_kept = min(sum_kept, sum(most))
        if not sum(least) <= sum_kept <= sum(most):
            raise SparsityError(
                f"the overall budget leaves {sum_kept} blocks for the tensors that share it, but these can keep "
                f"only between {sum(least)} (one in every scope, so that none is empty) and {sum(most)}; change the "
                "overall level, or the levels of tensors that have their own"
            )
        totals = allocate(list(ideals.values()), sum_kept, least, most, unit)
        return {k: n // u for k, n, u in zip(ideals, totals, unit, strict=True)}

    def refuse_uneven_scopes(self) -> None:
        """Raise where scopes of a pruning group that shares the budget differ in size."""
        for pruning in (self.pruning_groups[k] for k in self.shared):
            if pruning.scope.is_partial and pruning.scope.numscp() > 1:
                raise SparsityError(
                    f"{pruning.label}: its scopes differ in size, so they cannot share one distributed budget. "
                    "Give the entry a sparsity_level or nnz of its own, or a scope_shape that divides."
                )

    def refuse_without_exchange(self) -> None:
        """Raise where no two tensors could ever exchange blocks, since every scope gets the same number."""
        units, capacity = [self.units[k] for k in self.shared], [self.capacities[k] for k in self.shared]
        pairs = [(a, b) for a in range(len(units)) for b in range(a)]
        if pairs and all(math.lcm(units[a], units[b]) > min(capacity[a], capacity[b]) for a, b in pairs):
            raise SparsityError(
                "redistribute: no block could ever move between "
                f"{self.pruning_groups[self.shared[0]].label} and the others: one more block in every scope "
                f"means {units} elements, with no common multiple that fits; use redistribute=None, or other scopes"
            )


def exchange(
    now: Sequence[int], ideals: Sequence[float], low: Sequence[int], high: Sequence[int], unit: Sequence[int]
) -> list[int]:
    """Move blocks from tensors above their ideal to those below it, in multiples of both units; the sum never changes.

    >>> exchange([12, 12], [5.0, 19.0], [0, 0], [24, 24], [2, 3])
    [6, 18]
    """
    out = list(now)
    for giver in range(len(out)):
        for taker in range(len(out)):
            step = math.lcm(unit[giver], unit[taker])
            spare = min(out[giver] - ideals[giver], out[giver] - low[giver])
            need = min(ideals[taker] - out[taker], high[taker] - out[taker])
            moved = max(math.floor(min(spare, need) / step + 1e-9), 0) * step
            out[giver] -= moved
            out[taker] += moved
    return out
