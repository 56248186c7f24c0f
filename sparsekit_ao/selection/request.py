"""A request: the specs of one set of scopes, with the tensors that they describe and their budget."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..structure import BlockSpec, Budget, SparseScope, scope_windows
from ..structure.thresholds import Values
from ..structure.windows import Norm, ScopeWindows, Window


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The masks of one set of scopes, to be chosen and filled in place.

    Attributes:
        scope: Which blocks compete.
        masks: {block spec: mask} for every block spec, in the parameters' shapes and of any dtype. They hold 0 or 1
            (keep).
        keep: The number of blocks kept in each scope, already checked: an int, or an integer tensor of the scope grid's
            shape. A scope with fewer blocks keeps all of them.
        values: The tensors that are scored, in the parameter's shape ({parameter: tensor} for several). None: the
            parameters.
        norm: 1, 2 or inf: a block's score is this norm of its values. None: the values are saliencies, and a block's
            score is their signed sum (their mean where some block is partial).
        within_mask: Choose only among blocks that the masks still keep, scored as with `masked`.
        masked: Score the values that the masks keep, and give the others a score of 0, with which they still compete.
    """

    scope: SparseScope
    masks: Mapping[BlockSpec, Tensor]
    keep: Budget
    values: Values = None
    norm: Norm = 2
    within_mask: bool = False
    masked: bool = False

    def value_of(self, spec: BlockSpec) -> Tensor:
        """The values of one of the scope's block specs."""
        param = spec.view.param
        return param if self.values is None else self.values if isinstance(self.values, Tensor) else self.values[param]

    @cached_property
    def scope_windows(self) -> tuple[ScopeWindows, ...]:
        """The windows of each member of the scope on the values and masks.

        They must be cached: if windows are copies, backends fill them, and `fill_masks` writes the same ones back.
        """
        return tuple(scope_windows(self.scope, self.values, self.masks))

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The windows of all members."""
        return tuple(m for s in self.scope_windows for m in s.windows)

    @property
    def device(self) -> torch.device:
        """The device of the first mask."""
        return next(iter(self.masks.values())).device

    @property
    def budget(self) -> int | Tensor:
        """`keep` as an int, or int64 of the scope grid's shape on the windows' device."""
        if not isinstance(self.keep, Tensor):
            return self.keep
        return self.keep.to(self.device, torch.int64, non_blocking=True).expand(self.scope.grid_shape)
