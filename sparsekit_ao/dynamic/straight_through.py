"""Masks chosen anew at every step from dense weights that train on under them: straight-through, SR-STE, Top-KAST.

The same parametrization as dynamic sparse training, with gradients that always reach further than the forward mask.
No hooks: the loop is `loss.backward(); optimizer.step(); sparsifier.step()`, and masks follow the weights.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..config import Group
from ..errors import SparsityError
from ..plan import Plan
from ..sparsifier import ScopeSparsifier
from .masking import DynamicMask, find_dynamic

__all__ = ["StraightThrough"]


class StraightThrough(ScopeSparsifier):
    """A `ScopeSparsifier` under whose masks weights go on learning.

    Args:
        sparsity_level, nnz, structure: the forward masks, as for `ScopeSparsifier`.
        backward_level: the fraction of blocks in each scope that gets no gradient. 0 is straight-through: all weights
            learn (STE, arXiv 1308.3432). In between it is Top-KAST (arXiv 2106.03517): the forward mask is the top,
            the backward mask a larger top by the same scores.
        decay: weights outside the forward mask get `decay * weight` added to their gradient, so that masks settle
            (SR-STE, arXiv 2102.04010).

    Raises:
        SparsityError: a backward mask smaller than the forward one, a negative decay; see `ScopeSparsifier`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False))
    >>> sparsifier = StraightThrough(nnz=2, scope_shape=(1, 4))
    >>> sparsifier.prepare(model, None); sparsifier.step()
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model[0].parametrizations.weight.original.grad
    tensor([[1., 1., 1., 1.]])
    """

    def __init__(
        self, sparsity_level: float | None = None, *, backward_level: float = 0.0, decay: float = 0.0, **structure: Any
    ) -> None:
        for name, value, most in (("backward_level", backward_level, 1.0), ("decay", decay, float("inf"))):
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= most:
                raise SparsityError(f"{name} must be a number in [0, {most:g}], got {value!r}")
        if backward_level > 0 and structure.get("stages") is not None:
            raise SparsityError("backward_level needs scopes of one stage; leave stages out, or let it be 0")
        super().__init__(sparsity_level, **structure)
        self.backward_level, self.decay = backward_level, decay

    def _check_groups(self, groups: Sequence[Group]) -> None:
        super()._check_groups(groups)
        if not self.backward_level:
            return
        given = self._level_given
        for component in self._planned(groups).components:
            forward = torch.as_tensor(component.budget(groups, given))
            backward = torch.as_tensor(component.scope.sparsity_to_nnz(self.backward_level))
            if component.stage or bool((forward > backward).any()):
                raise SparsityError(
                    f"{component.label}: gradients must reach all that the forward mask keeps, in one stage, but "
                    f"backward_level={self.backward_level:g} leaves {int(backward.min())} blocks a scope and the "
                    f"forward mask {int(forward.max())}; lower backward_level"
                )

    def _install(self, group: Group) -> None:
        mask = DynamicMask(self._new_mask(group), reach=True, decay=self.decay)
        parametrize.register_parametrization(group["module"], group["tensor_name"], mask, unsafe=True)

    def _update_family(self, plan: Plan, at: int, groups: Sequence[Group]) -> None:
        super()._update_family(plan, at, groups)
        for component in plan.families[at] if self.backward_level else ():
            values = {leaf.view.param: self._dense(groups[i]) for leaf, i in component.leaves}
            found = {leaf: find_dynamic(groups[i]["module"], groups[i]["tensor_name"]) for leaf, i in component.leaves}
            masks = {leaf: mask.backward_mask for leaf, mask in found.items() if mask.backward_mask is not None}
            keep = component.scope.sparsity_to_nnz(self.backward_level)
            component.scope.update_masks(masks, keep, values, norm=component.norm)
