"""The blocks of scopes as rows [scopes, slots]: what the rules of an update score, and where their choice is written.

Knows one component of a plan with its weights, masks and gradients at one moment; decides nothing.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..algebra import BlockSpec
from ..distributed import whole
from ..errors import SparsityError
from ..selection import Norm, fill_mask, from_scopes, scope_scores, to_scopes
from ..selection.reference import candidates_of
from ..selection.tiling import real_slots
from ..sparsifiers.plan import Component
from .draws import draw, generator

__all__ = ["Slots", "Wholes"]


class Wholes(Mapping[BlockSpec, Tensor]):
    """Tensors by block spec; those cut over ranks are gathered whenever they are looked at, and let go afterwards.

    Looking is collective then: every rank looks at the same ones, in the same order.
    """

    def __init__(self, held: Mapping[BlockSpec, Tensor]) -> None:
        self._held = held

    def __getitem__(self, spec: BlockSpec) -> Tensor:
        return whole(self._held[spec])

    def __iter__(self) -> Iterator[BlockSpec]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """One component at one moment; scopes that are chosen together, over one tensor or coupled ones.

    Rules get this. Rows are [scopes, slots]; a slot is one block (of several tensors, where they share a fate).

    Attributes:
        component: the scopes and how their blocks are scored.
        weights, gradients, momenta: {block: parameter-shaped tensor}; the last two are empty where nothing asked for
            them. Always whole, however the ranks hold them.
        masks: {block: mask}.
        device: where all of these are.
        step: the training iteration.
        seed: what random numbers are keyed by, besides name and step.
    """

    component: Component
    weights: Mapping[BlockSpec, Tensor]
    masks: Mapping[BlockSpec, Tensor]
    device: torch.device
    step: int = 0
    seed: int = 0
    gradients: Mapping[BlockSpec, Tensor] = field(default_factory=dict)
    momenta: Mapping[BlockSpec, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The tensor's name, or the coupling's."""
        return self.component.label

    @cached_property
    def active(self) -> Tensor:
        """Which slots are kept now; bool rows."""
        return self.rows_of_masks(self.masks)

    @cached_property
    def real(self) -> Tensor:
        """Which slots hold a block: all but the padding of a partial scope; bool rows."""
        found = real_slots(self.component.scope.groups(None, None), self.device)
        return torch.ones(self.shape, dtype=torch.bool, device=self.device) if found is None else found

    @property
    def shape(self) -> tuple[int, int]:
        """Scopes, and slots of each."""
        return self.component.scope.numscp(), self.component.scope.numblk_per_scope()

    def forget(self) -> None:
        """Let go of rows that were made on the way; they are made again when they are asked for."""
        for name in ("active", "real"):
            vars(self).pop(name, None)

    def scores(self, values: Mapping[BlockSpec, Tensor], norm: Norm | str = None) -> Tensor:
        """Block scores of parameter-shaped values; float rows, padding 0.

        Args:
            values: `weights`, `gradients` or `momenta`.
            norm: 1, 2, inf or "mean" (of the absolute values); the tensor's own by default.
        """
        if not values:
            raise SparsityError(f"{self.name}: no such values were gathered; a rule says what it needs in `needs`")
        taken = {spec.view.param: t for spec, t in values.items()}
        groups = self.component.scope.groups(taken, None)
        as_mean = any(m.is_partial for g in groups for m in g.members)
        if norm == "mean":
            norm, as_mean = 1, True
        norm = self.component.norm if norm is None else norm  # type: ignore[assignment]
        assert not isinstance(norm, str)
        return torch.cat([scope_scores(g, norm, as_mean=as_mean) for g in groups], dim=1)

    def random(self, purpose: str) -> Tensor:
        """Uniform numbers in [0, 1), the same on every rank and after a resume; float64 rows."""
        source = generator(self.seed, self.name, self.step, purpose)
        return draw(self.shape, source, self.device)

    def mean_active(self, values: Mapping[BlockSpec, Tensor]) -> float:
        """The mean magnitude of the values over active blocks."""
        size = self.scores(values, "mean").double()
        return float(torch.where(self.active, size, 0).sum() / self.active.sum().clamp(min=1))

    def rows_of_masks(self, masks: Mapping[BlockSpec, Tensor]) -> Tensor:
        """Which slots some parameter-shaped masks keep; bool rows."""
        groups = self.component.scope.groups(None, masks)
        return torch.cat([to_scopes(candidates_of(g.members, len(g.shape)), g, False) for g in groups], dim=1)

    def write(self, rows: Tensor, masks: Mapping[BlockSpec, Tensor]) -> None:
        """Fill parameter-shaped masks in place from bool rows; elements outside a view stay as they are."""
        scope = self.component.scope
        groups = scope.groups(None, masks)
        widths = [math.prod(g.shape) for g in groups]
        for group, (spec, _), part in zip(groups, scope.scopes(), rows.split(widths, dim=1), strict=True):
            fill_mask(group.members, from_scopes(part, group))
            for member, leaf in zip(group.members, spec.block.blocks(), strict=True):
                if not leaf.view.is_aligned(masks[leaf]):
                    assert member.mask is not None
                    leaf.view.write_back(member.mask, masks[leaf])
