"""`Slots`: the blocks of one component as rows [scopes, slots], which is what the rules of an update score.

A `Slots` holds the weights, masks, gradients and momenta of a component of the plan in one iteration, computes block
scores and random numbers for rules, and writes chosen rows back into masks. A `Part` adds its budget. Sharded tensors
are whole only while a rule reads them: what is kept (`KeptSlots`) is sharded again before the next component is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..calibration import Statistics
from ..distributed import full_tensor, placed_like
from ..errors import SparsityError
from ..scores import keyed_generator
from ..selection import fill_mask, from_scopes, scope_scores, to_scopes
from ..selection.reference import candidates_of
from ..selection.tiling import real_slots
from ..sparsifiers.component import Component
from ..structure import BlockSpec, elements_of, scope_windows, write_back


class Gathered(Mapping[BlockSpec, Tensor]):
    """Tensors by block spec; a sharded one is gathered at every access (a collective operation) and not kept."""

    def __init__(self, tensors: Mapping[BlockSpec, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, spec: BlockSpec) -> Tensor:
        return full_tensor(self._tensors[spec])

    def __iter__(self) -> Iterator[BlockSpec]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """One component in one iteration: scopes that are chosen together, over one tensor or coupled ones.

    This is the argument of every rule. Rows are [scopes, slots]; a slot is one block (coupled tensors contribute one
    block each).

    Attributes:
        component: the scopes and how their blocks are scored.
        weights, gradients, momenta: {block: parameter-shaped tensor}; the last two are empty unless a rule needs them.
            Always whole tensors, however the ranks hold them.
        statistics: {block: what `sparsifier.calibrate` recorded for its tensor}.
        masks: {block: mask}.
        device: of all of these.
        step: the training iteration.
        seed: the key of random numbers, with name and step.

    A rule of your own is a function of it:

    >>> def rule(slots):
    ...     return slots.scores(slots.weights, 1)  # the sum of |w| of every block
    >>> sparsekit_ao.SET(0.9, prune=rule).settings.prune.name
    'rule'
    """

    component: Component
    weights: Mapping[BlockSpec, Tensor]
    masks: Mapping[BlockSpec, Tensor]
    device: torch.device
    step: int = 0
    seed: int = 0
    gradients: Mapping[BlockSpec, Tensor] = field(default_factory=dict)
    momenta: Mapping[BlockSpec, Tensor] = field(default_factory=dict)
    statistics: Mapping[BlockSpec, Statistics] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The tensor's name, or the coupling's."""
        return self.component.label

    @property
    def shape(self) -> tuple[int, int]:
        """Scopes, and slots of each."""
        return self.component.scope.numscp(), self.component.scope.numblk_per_scope()

    @cached_property
    def active(self) -> Tensor:
        """Which slots the masks keep now; bool rows."""
        return self.rows_of_masks(self.masks)

    @cached_property
    def real(self) -> Tensor:
        """Which slots hold a block: all but the padding of a partial scope; bool rows."""
        found = real_slots(scope_windows(self.component.scope), self.device)
        return torch.ones(self.shape, dtype=torch.bool, device=self.device) if found is None else found

    def clear_cache(self) -> None:
        """Free the cached rows; they are computed again at the next access."""
        for name in ("active", "real"):
            vars(self).pop(name, None)

    def scores(
        self,
        values: Mapping[BlockSpec, Tensor],
        norm: float | None = None,
        *,
        as_mean: bool | None = None,
        signed: bool = False,
    ) -> Tensor:
        """Block scores of parameter-shaped values; float rows, padding 0.

        Args:
            values: `weights`, `gradients` or `momenta`, or anything of the same keys and shapes.
            norm: 1, 2 or inf, over the elements of a block; the tensor's own norm by default.
            as_mean: divide by the number of elements; by default where some blocks are partial.
            signed: values are saliencies, which are summed as they are.
        """
        if not values:
            raise SparsityError(
                f"{self.name}: a rule reads values that were not gathered; list them in its `needs` attribute"
            )
        tensors = {spec.view.param: t for spec, t in values.items()}
        groups = scope_windows(self.component.scope, tensors)
        mean = any(m.is_partial for g in groups for m in g.members) if as_mean is None else as_mean
        chosen = None if signed else self.component.norm if norm is None else norm
        return torch.cat([scope_scores(g, chosen, as_mean=mean) for g in groups], dim=1)

    def pooled(self, values: Mapping[BlockSpec, Tensor], fn: Callable[..., Tensor]) -> Tensor:
        """`fn(magnitudes, dim=-1)` over the elements of each block, such as torch.amin; float rows, padding 0.

        Raises:
            SparsityError: some blocks are partial.
        """
        rows = []
        for scopes in scope_windows(self.component.scope, {spec.view.param: t for spec, t in values.items()}):
            if any(m.is_partial for m in scopes.members):
                raise SparsityError(f"{self.name}: a criterion by function needs whole blocks; give 'mean' or 'max'")
            elements = elements_of(scopes.members, len(scopes.shape), 0.0).abs()
            grid = fn(elements if elements.dtype == torch.float64 else elements.float(), dim=-1)
            if not isinstance(grid, Tensor) or grid.shape != elements.shape[:-1]:
                raise SparsityError(f"{self.name}: a criterion must reduce the last dimension, fn(magnitudes, dim=-1)")
            rows.append(to_scopes(grid, scopes, 0.0))
        return torch.cat(rows, dim=1)

    def random(self, purpose: str) -> Tensor:
        """Uniform numbers in [0, 1), the same on every rank, on every device and after a resume; float64 rows."""
        source = keyed_generator(self.seed, self.name, self.step, purpose)
        return torch.rand(self.shape, generator=source, dtype=torch.float64, device="cpu").to(
            self.device, non_blocking=True
        )

    def mean_active(self, scores: Tensor) -> Tensor:
        """The mean of float rows over the active slots, float64 of no dimension."""
        return torch.where(self.active, scores.double(), 0).sum() / self.active.sum().clamp(min=1)

    def rows_of_masks(self, masks: Mapping[BlockSpec, Tensor]) -> Tensor:
        """Which slots some parameter-shaped masks keep; bool rows."""
        groups = scope_windows(self.component.scope, None, masks)
        return torch.cat([to_scopes(candidates_of(g.members, len(g.shape)), g, False) for g in groups], dim=1)

    def write(self, rows: Tensor, masks: Mapping[BlockSpec, Tensor]) -> None:
        """Fill parameter-shaped masks in place from bool rows; elements outside a view stay as they are."""
        scope = self.component.scope
        groups = scope_windows(scope, None, masks)
        widths = [math.prod(g.shape) for g in groups]
        for group, part in zip(groups, rows.split(widths, dim=1), strict=True):
            fill_mask(group.members, from_scopes(part, group))
        write_back(groups, scope, masks)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSlots:
    """Which slots of a part are kept: bool rows, or {block: bool mask sharded as its weight} where weights are sharded.

    `count` is int64 [scopes], how many are kept in each scope.
    """

    count: Tensor
    rows: Tensor | None = None
    masks: Mapping[BlockSpec, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A component in an update: its blocks with all that rules read, and its budget.

    `budget` is int64 [scopes] on the CPU, blocks that each scope keeps after the update, unless they are redistributed;
    `sharded` is {block: weight} where weights are sharded, and empty where all are plain.
    """

    slots: Slots
    budget: Tensor
    sharded: Mapping[BlockSpec, Tensor] = field(default_factory=dict)

    @property
    def scopes(self) -> int:
        """Number of scopes."""
        return self.slots.shape[0]

    def at_most_budget(self, count: Tensor) -> Tensor:
        """Counts of each scope, none above its budget, on the device of the slots."""
        return torch.minimum(count, self.budget.to(count.device, non_blocking=True))

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
