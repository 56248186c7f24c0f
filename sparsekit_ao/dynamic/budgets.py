"""Budgets: how many blocks each scope keeps, as whole numbers.

A component either has the budget of its config entry ("fixed"), or shares the overall budget with all others of that
kind ("shared"): an overall sparsity level is distributed over them, with the same number of blocks in every scope of
one component. Budgets are stored in the groups; this module computes, reads and writes them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..densities import allocate
from ..errors import SparsityError, is_number
from ..sparsifiers.component import Component
from ..sparsifiers.config import TensorGroup
from .optimizers import refuse_optimizer_as_level
from .settings import Settings, value_at


def check_exclusive(settings: Settings, sparsity_level: float | None, nnz: int | None) -> None:
    """Raise if more than one argument specifies how much is kept, or the level is an optimizer."""
    refuse_optimizer_as_level(sparsity_level)
    given = {"sparsity_level": sparsity_level, "nnz": nnz, "target": settings.target}
    named = [name for name, value in given.items() if value is not None]
    named += [f"init={settings.init.name!r}"] if settings.init.masks is not None else []
    if len(named) > 1:
        raise SparsityError(f"{named[0]} and {named[1]} are mutually exclusive; give one")


def overall_level(settings: Settings, sparsity_level: float, iteration: int) -> float:
    """The overall sparsity in an iteration: the target's, or the constant one."""
    level = sparsity_level if settings.target is None else value_at(settings.target, iteration, "target")
    if not 0 <= level <= 1:
        raise SparsityError(f"target: an overall sparsity must be in [0, 1], got {level!r} at iteration {iteration}")
    return level


@dataclass(frozen=True, kw_only=True, eq=False)
class Budgets:
    """The budgets of all components of a plan, in their groups; components are given by their index."""

    components: Sequence[Component]
    groups: Sequence[TensorGroup]
    settings: Settings

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of one block of each component, in units of their greatest common divisor."""
        members = [c.scope.members() for c in self.components]
        found = [sum(m.block.numel_per_block() for m in own) // len(own) for own in members]
        unit = math.gcd(*found) if found else 1
        return [n // unit for n in found]

    @cached_property
    def units(self) -> list[int]:
        """What one more block in every scope of each component takes, in the units of `sizes`."""
        return [n * c.scope.numscp() for n, c in zip(self.sizes, self.components, strict=True)]

    @cached_property
    def capacities(self) -> list[int]:
        """What all blocks of each component take, in the units of `sizes`."""
        return [u * c.scope.numblk_per_scope() for u, c in zip(self.units, self.components, strict=True)]

    @property
    def shared(self) -> list[int]:
        """The components that share the overall budget: no entry of the config specifies theirs."""
        members = [[at for _, at in c.leaves] for c in self.components]
        return [k for k, own in enumerate(members) if not any(self.groups[at]["fixed"] for at in own)]

    def rows(self, k: int, level_given: Mapping[str, float]) -> Tensor:
        """Blocks that each scope of a component is to keep, by its groups; int64 [scopes]."""
        component = self.components[k]
        budget = torch.as_tensor(component.budget(self.groups, level_given), device="cpu").expand(
            component.scope.grid_shape
        )
        return torch.minimum(budget, component.scope.blocks_per_scope()).reshape(-1)

    def set(self, k: int, nnz: int) -> dict[str, float]:
        """Write a budget into a component's groups, as a count and as its level; returns {tensor_fqn: that level}."""
        component = self.components[k]
        level = component.scope.level_of(nnz)
        own = [self.groups[at] for _, at in component.leaves]
        for group in own:
            group["nnz"], group["sparsity_level"] = nnz, level
        return {group["tensor_fqn"]: level for group in own}

    def ideals(self, level: float) -> tuple[dict[int, float], int]:
        """What each shared component would keep at an overall sparsity, by the distribution of the init.

        Returns {component: its ideal} and what all of them keep together, exactly; both in the units of `sizes`. What
        fixed components keep is subtracted.
        """
        shared, components = set(self.shared), self.components
        shapes = {self._fqn(at): tuple(s.view.param.shape) for c in components for s, at in c.leaves}
        fixed = [c for k, c in enumerate(components) if k not in shared]
        fixed_densities = {self._fqn(at): 1 - c.level(self.groups, {}) for c in fixed for _, at in c.leaves}
        assert self.settings.init.densities is not None
        found = _checked(self.settings.init.densities(shapes, 1 - level, fixed_densities), shapes)
        numels = [c.scope.numblk() * n for n, c in zip(self.sizes, components, strict=True)]
        sum_kept, ideals = round((1 - level) * sum(numels)), {}
        for k, c in enumerate(components):
            elements = {self._fqn(at): s.view.numel() for s, at in c.leaves}
            density = sum(found[n] * e for n, e in elements.items()) / max(sum(elements.values()), 1)
            if k in shared:
                ideals[k] = density * numels[k]
            else:
                sum_kept -= int(self.rows(k, {}).sum()) * self.sizes[k]
        return ideals, sum_kept

    def counts(
        self, level: float, low: Mapping[int, int] | None = None, high: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Blocks in each scope of every shared component: whole numbers whose sum is the exact one, or just below.

        `low` and `high` bound the blocks in each scope; by default one, so that no layer is empty, and all.
        """
        ideals, sum_kept = self.ideals(level)
        at, unit = list(ideals), [self.units[k] for k in ideals]
        self.refuse_uneven_scopes()
        least = [u * (1 if low is None else low[k]) for k, u in zip(at, unit, strict=True)]
        most = [self.capacities[k] if high is None else u * high[k] for k, u in zip(at, unit, strict=True)]
        if not at:
            return {}
        if high is not None:
            sum_kept = min(sum_kept, sum(most))
        if not sum(least) <= sum_kept <= sum(most):
            raise SparsityError(
                f"the overall budget leaves {sum_kept} blocks for the tensors that share it, and they keep from "
                f"{sum(least)} (one in every scope, so that none is empty) to {sum(most)}; change the overall level, "
                "or the levels of tensors that have their own"
            )
        found = allocate(list(ideals.values()), sum_kept, least, most, unit)
        return {k: n // u for k, n, u in zip(at, found, unit, strict=True)}

    def refuse_uneven_scopes(self) -> None:
        """Raise where scopes of a shared component differ in size: one more block in each is not the same for all."""
        for component in (self.components[k] for k in self.shared):
            if component.scope.is_partial and component.scope.numscp() > 1:
                raise SparsityError(
                    f"{component.label}: its scopes differ in size, so they cannot share one distributed budget. Give "
                    "the entry a sparsity_level or nnz of its own, or a scope_shape that divides."
                )

    def _fqn(self, at: int) -> str:
        return self.groups[at]["tensor_fqn"]


def _checked(found: object, names: Iterable[str]) -> Mapping[str, float]:
    """The densities of a distribution, which may be a user's function."""
    for name in names:
        density = found.get(name) if isinstance(found, Mapping) else None
        if not is_number(density) or not -1e-9 <= float(density) <= 1 + 1e-9:
            raise SparsityError(f"{name}: init must give it a density in [0, 1], got {density!r}")
    assert isinstance(found, Mapping)
    return found
