"""How many blocks each scope holds: an overall level spread over components, and what groups say of it.

Knows plans, groups and numbers; no weights and no masks. Open components share the overall budget, whole blocks in
every scope alike; fixed ones have the budget of their config entry.
"""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..densities import allocate
from ..errors import SparsityError
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.plan import Component
from .settings import Settings, value_at

__all__ = [
    "budget_rows",
    "distribute",
    "is_fixed",
    "overall_level",
    "refuse_two",
    "refuse_uneven",
    "set_budget",
    "sizes",
    "spread",
]


def refuse_two(settings: Settings, sparsity_level: float | None, nnz: int | None) -> None:
    """Raise unless one thing alone says how much is kept."""
    given = {"sparsity_level": sparsity_level, "nnz": nnz, "target": settings.target}
    named = [name for name, value in given.items() if value is not None]
    named += [f"init={settings.init.name!r}"] if settings.init.masks is not None else []
    if len(named) > 1:
        raise SparsityError(f"{named[0]} and {named[1]} are two budgets; give one")


def overall_level(settings: Settings, sparsity_level: float, iteration: int) -> float:
    """The overall sparsity in an iteration: the target's, or the constant one."""
    level = sparsity_level if settings.target is None else value_at(settings.target, iteration, "target")
    if not 0 <= level <= 1:
        raise SparsityError(f"target: an overall sparsity must lie in [0, 1], got {level!r} at iteration {iteration}")
    return level


def is_fixed(component: Component, groups: Sequence[TensorGroup]) -> bool:
    """Whether an entry of the config says what this component holds."""
    return any(groups[at]["fixed"] for _, at in component.leaves)


def sizes(components: Sequence[Component]) -> list[int]:
    """Elements of one block of each component, in units of their greatest common divisor."""
    members = [c.scope.members() for c in components]
    found = [sum(m.block.numel_per_block() for m in ms) // len(ms) for ms in members]
    unit = math.gcd(*found) if found else 1
    return [n // unit for n in found]


def budget_rows(component: Component, groups: Sequence[TensorGroup], level_given: Mapping[str, float]) -> Tensor:
    """Blocks that each scope is to hold; int64 [scopes]."""
    asked = torch.as_tensor(component.budget(groups, level_given)).expand(component.scope.grid_shape)
    return torch.minimum(asked, component.scope.blocks_per_scope()).reshape(-1)


def distribute(
    components: Sequence[Component], groups: Sequence[TensorGroup], settings: Settings, level: float
) -> dict[int, tuple[float, int]]:
    """What each open component would hold at an overall sparsity, by the init's distribution.

    Returns:
        {index of the component: (its ideal, the sum of all)}, in the units of `sizes`; the sum is exact, what fixed
        components hold taken off.
    """
    shapes = {groups[at]["tensor_fqn"]: tuple(s.view.param.shape) for c in components for s, at in c.leaves}
    fixed = {}
    for c in components:
        if is_fixed(c, groups):
            fixed.update({groups[at]["tensor_fqn"]: 1 - c.level(groups, {}) for _, at in c.leaves})
    assert settings.init.densities is not None
    found = _checked(settings.init.densities(shapes, 1 - level, fixed), shapes)
    size = sizes(components)
    blocks = [c.scope.numblk() for c in components]
    total = round((1 - level) * sum(n * s for n, s in zip(blocks, size, strict=True)))
    ideals = {}
    for k, c in enumerate(components):
        elements = {groups[at]["tensor_fqn"]: s.view.numel() for s, at in c.leaves}
        density = sum(found[n] * e for n, e in elements.items()) / max(sum(elements.values()), 1)
        if is_fixed(c, groups):
            total -= int(budget_rows(c, groups, {}).sum()) * size[k]
        else:
            ideals[k] = density * blocks[k] * size[k]
    return {k: (ideal, total) for k, ideal in ideals.items()}


def _checked(found: object, names: Iterable[str]) -> Mapping[str, float]:
    """What a distribution gave, which may be a user's function."""
    for name in names:
        density = found.get(name) if isinstance(found, Mapping) else None
        is_number = isinstance(density, numbers.Real) and not isinstance(density, bool)
        if not is_number or not -1e-9 <= float(density) <= 1 + 1e-9:  # type: ignore[arg-type]
            raise SparsityError(f"{name}: init must give it a density in [0, 1], got {density!r}")
    assert isinstance(found, Mapping)
    return found


def spread(
    components: Sequence[Component],
    wanted: Mapping[int, tuple[float, int]],
    low: Mapping[int, int] | None = None,
    high: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Blocks in each scope of every open component: whole numbers whose sum is the wanted one, or just below.

    Args:
        components: all of them.
        wanted: from `distribute`.
        low, high: bounds of the blocks in each scope; by default one, so that no layer is empty, and all.
    """
    size, at = sizes(components), list(wanted)
    refuse_uneven([components[k] for k in at])
    unit = [size[k] * components[k].scope.numscp() for k in at]
    least = [u * (1 if low is None else low[k]) for k, u in zip(at, unit, strict=True)]
    full = {k: components[k].scope.numblk_per_scope() for k in at} if high is None else high
    most = [u * full[k] for k, u in zip(at, unit, strict=True)]
    ideals = [wanted[k][0] for k in at]
    total = wanted[at[0]][1] if at else 0
    if high is not None:
        total = min(total, sum(most))
    if not sum(least) <= total <= sum(most):
        raise SparsityError(
            f"the overall budget leaves {total} blocks for the tensors that share it, and they hold from {sum(least)} "
            f"(one in every scope, so that none is empty) to {sum(most)}; change the level, or fix less"
        )
    whole = allocate(ideals, total, least, most, unit)
    return {k: n // u for k, n, u in zip(at, whole, unit, strict=True)}


def refuse_uneven(components: Sequence[Component]) -> None:
    """Raise where scopes of one component differ in size: one more block in each is not the same everywhere."""
    for component in components:
        if component.scope.is_partial and component.scope.numscp() > 1:
            raise SparsityError(
                f"{component.label}: its scopes differ in size, so they cannot share one distributed budget. Give "
                "the entry a sparsity_level or nnz of its own, or a scope_shape that divides."
            )


def set_budget(component: Component, groups: Sequence[TensorGroup], nnz: int) -> dict[str, float]:
    """Write a budget into a component's groups, as a count and as the level that it amounts to.

    Returns:
        {tensor_fqn: that level}.
    """
    level = component.scope.level_of(nnz)
    for _, at in component.leaves:
        groups[at]["nnz"] = nnz
        groups[at]["sparsity_level"] = level
    return {groups[at]["tensor_fqn"]: level for _, at in component.leaves}
