"""What an update looks at: every component of the plan with its weights, masks, gradients and budget, and what stays.

Knows groups and where their tensors are; decides nothing and changes nothing. Tensors that are cut over ranks are whole
only while a rule looks at them, and what was chosen is cut before the next component is looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..algebra import BlockSpec
from ..distributed import full_tensor, is_sharded, placed_like
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.plan import Component
from .budgets import budget_rows, is_fixed, sizes
from .masking import find_dynamic
from .slots import Slots, Wholes
from .trained import original

__all__ = ["Kept", "Part", "gather"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """Which slots of a part stay: bool rows, or where tensors are cut over ranks masks cut like them.

    Attributes:
        rows: bool rows.
        masks: {block: bool mask}, where there are no rows.
        counted: int64 [scopes], where there are no rows.
    """

    rows: Tensor | None = None
    masks: Mapping[BlockSpec, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None

    @cached_property
    def count(self) -> Tensor:
        """How many stay; int64 [scopes]."""
        if self.rows is not None:
            return self.rows.sum(1)
        assert self.counted is not None
        return self.counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A component in an update.

    Attributes:
        slots: its blocks and what is known of them.
        budget: int64 [scopes], blocks that each scope holds after the update, unless they are redistributed.
        is_open: it takes part in redistribution and in competition over all tensors: all its scopes are alike, and
            its budget is the sparsifier's to set.
        size: elements of a block, in units that all parts share.
        cut: {block: weight} where ranks hold parts of them; empty where all are plain.
    """

    slots: Slots
    budget: Tensor
    is_open: bool
    size: int = 1
    cut: Mapping[BlockSpec, Tensor] = field(default_factory=dict)

    @property
    def scopes(self) -> int:
        """Number of scopes."""
        return self.slots.shape[0]

    @property
    def unit(self) -> int:
        """Elements that one more block in every scope costs."""
        return self.size * self.scopes

    def keep(self, rows: Tensor) -> Kept:
        """Put rows away, and let go of everything that was made whole for them."""
        if not self.cut:
            return Kept(rows=rows)
        masks = self._written(rows)
        self.forget()
        return Kept(counted=rows.sum(1), masks={spec: placed_like(m, self.cut[spec]) for spec, m in masks.items()})

    def forget(self) -> None:
        """Let go of what was made whole, if anything was."""
        if self.cut:
            self.slots.forget()

    def rows(self, kept: Kept) -> Tensor:
        """What was put away, as bool rows."""
        if kept.rows is not None:
            return kept.rows
        return self.slots.rows_of_masks({spec: full_tensor(m) for spec, m in kept.masks.items()})

    def masks(self, kept: Kept) -> Mapping[BlockSpec, Tensor]:
        """What was put away, as a bool mask beside every weight."""
        return kept.masks if kept.rows is None else self._written(kept.rows)

    def _written(self, rows: Tensor) -> dict[BlockSpec, Tensor]:
        """New masks; elements outside a view stay as they are."""
        masks = {spec: mask != 0 for spec, mask in self.slots.masks.items()}
        self.slots.write(rows, masks)
        return masks


def gather(
    components: Sequence[Component],
    groups: Sequence[TensorGroup],
    values: Mapping[str, Mapping[str, Tensor | None]],
    level_given: Mapping[str, float],
    step: int,
    seed: int,
) -> list[Part]:
    """One part a component.

    Args:
        components: of the plan of these groups.
        groups: of a prepared model.
        values: "gradients" and "momenta" by tensor_fqn, where there are any.
        level_given: see `ScopeSparsifier`.
        step, seed: what random numbers are keyed by.
    """
    parts = []
    for component, size in zip(components, sizes(components), strict=True):
        own = {spec: groups[at] for spec, at in component.leaves}
        weights = {spec: original(g).detach() for spec, g in own.items()}
        device = next(iter(weights.values())).device
        slots = Slots(
            component=component,
            weights=Wholes(weights),
            masks=Wholes({spec: find_dynamic(g["module"], g["tensor_name"]).mask for spec, g in own.items()}),
            gradients=Wholes(_found(values["gradients"], own)),
            momenta=Wholes(_found(values["momenta"], own)),
            device=device,
            step=step,
            seed=seed,
        )
        budget = budget_rows(component, groups, level_given).to(device)
        is_open, cut = not is_fixed(component, groups), weights if any(map(is_sharded, weights.values())) else {}
        parts.append(Part(slots=slots, budget=budget, is_open=is_open, size=size, cut=cut))
    return parts


def _found(values: Mapping[str, Tensor | None], own: Mapping[BlockSpec, TensorGroup]) -> dict[BlockSpec, Tensor]:
    return {spec: found for spec, g in own.items() if (found := values.get(g["tensor_fqn"])) is not None}
