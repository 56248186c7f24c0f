"""Gathers what an update reads: one `Part` for each component of the plan.

A part has a component's weights, masks, gradients, momenta (`Slots`) and budget. Sharded tensors are whole only while a
rule reads them: what was chosen (`KeptSlots`) is sharded again before the next component is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..algebra import BlockSpec
from ..distributed import full_tensor, is_sharded, placed_like
from .budgets import Budgets
from .mask import find_dynamic
from .optimizers import original
from .slots import Gathered, Slots

__all__ = ["KeptSlots", "Part", "gather"]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSlots:
    """Which slots of a part are kept: bool rows, or sharded masks where the weights are sharded.

    Attributes:
        count: int64 [scopes], how many are kept in each scope.
        rows: bool rows, or None where there are masks.
        masks: {block: bool mask, sharded as its weight}, where there are no rows.
    """

    count: Tensor
    rows: Tensor | None = None
    masks: Mapping[BlockSpec, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A component in an update.

    Attributes:
        slots: its blocks with all that rules read.
        budget: int64 [scopes], blocks that each scope keeps after the update, unless they are redistributed.
        sharded: {block: weight} where weights are sharded; empty where all are plain.
    """

    slots: Slots
    budget: Tensor
    sharded: Mapping[BlockSpec, Tensor] = field(default_factory=dict)

    @property
    def scopes(self) -> int:
        """Number of scopes."""
        return self.slots.shape[0]

    def store(self, rows: Tensor) -> KeptSlots:
        """What is kept, from bool rows; where weights are sharded no whole tensor or row is held afterwards."""
        if not self.sharded:
            return KeptSlots(count=rows.sum(1), rows=rows)
        masks = self._masks_from(rows)
        self.release()
        return KeptSlots(count=rows.sum(1), masks={s: placed_like(m, self.sharded[s]) for s, m in masks.items()})

    def release(self) -> None:
        """Free the rows that were computed from gathered tensors, if any were."""
        if self.sharded:
            self.slots.clear_cache()

    def rows(self, kept: KeptSlots) -> Tensor:
        """Stored slots as bool rows."""
        if kept.rows is not None:
            return kept.rows
        return self.slots.rows_of_masks({spec: full_tensor(m) for spec, m in kept.masks.items()})

    def masks(self, kept: KeptSlots) -> Mapping[BlockSpec, Tensor]:
        """Stored slots as bool masks, sharded as the weights."""
        return kept.masks if kept.rows is None else self._masks_from(kept.rows)

    def _masks_from(self, rows: Tensor) -> dict[BlockSpec, Tensor]:
        """New masks; elements outside a view stay as they are."""
        masks = {spec: mask != 0 for spec, mask in self.slots.masks.items()}
        self.slots.write(rows, masks)
        return masks


def gather(
    budgets: Budgets,
    gradients: Mapping[str, Tensor],
    momenta: Mapping[str, Tensor | None],
    level_given: Mapping[str, float],
    step: int,
) -> list[Part]:
    """One part for each component of the budgets, in their order; gradients and momenta are by tensor_fqn."""
    parts = []
    for k, component in enumerate(budgets.components):
        own = {spec: budgets.groups[at] for spec, at in component.leaves}
        weights = {spec: original(g).detach() for spec, g in own.items()}
        device = next(iter(weights.values())).device
        slots = Slots(
            component=component,
            weights=Gathered(weights),
            masks=Gathered({s: find_dynamic(g["module"], g["tensor_name"]).mask for s, g in own.items()}),
            gradients=Gathered({s: t for s, g in own.items() if (t := gradients.get(g["tensor_fqn"])) is not None}),
            momenta=Gathered({s: t for s, g in own.items() if (t := momenta.get(g["tensor_fqn"])) is not None}),
            device=device,
            step=step,
            seed=budgets.settings.seed,
        )
        part = Part(
            slots=slots,
            budget=budgets.rows(k, level_given).to(device),
            sharded=weights if any(map(is_sharded, weights.values())) else {},
        )
        parts.append(part)
    return parts
