"""Training with masks chosen anew from dense weights at every step: straight-through, SR-STE and Top-KAST.

The parametrization is that of dynamic sparse training, with a backward mask that keeps more than the forward mask. The
training loop calls `loss.backward(); optimizer.step(); sparsifier.step()`; only a decay needs `attach(optimizer)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import copy_values, has_process_group, is_sharded, local
from ..errors import SparsityError, is_number
from ..sparsifiers.calibrated import Calibrated
from ..sparsifiers.checkpoint import check_saved
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.groups import PruningGroup, groups_by_name
from ..sparsifiers.optimizer_state import groups_trained_by, original, unwrap_optimizers
from ..sparsifiers.scope import BudgetSparsifier
from ..sparsifiers.stages import Level
from ..structure import Budget
from .budgets import refuse_optimizer_as_level
from .dynamic_mask import DynamicMask, mask_of
from .gradients import ORDER, DecayHooks


@final
class StraightThrough(Calibrated, BudgetSparsifier):
    """Drop blocks in the forward pass only, and train the dropped weights too, so that they can return.

    Args:
        sparsity_level, nnz, structure: What the masks of the forward pass drop in every scope, as for
            `ScopeSparsifier`; half of the blocks by default.
        backward_level: The fraction of blocks in each scope that gets no gradient. With 0 (default) all weights are
            trained, which is straight-through estimation (STE, arXiv 1308.3432). A level between 0 and `sparsity_level`
            is Top-KAST (arXiv 2106.03517): the backward mask keeps more blocks, by the same scores.
        decay: A number >= 0 (0 by default). `decay * weight` is added to the gradient of weights that the forward mask
            drops, so that masks change less (SR-STE, arXiv 2102.04010). It is added once per step of the optimizer
            given to `attach`, after any clipping.

    Raises:
        SparsityError: The backward mask is smaller than the forward mask, or `decay` is negative; see
            `ScopeSparsifier`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False))
    >>> sparsifier = StraightThrough(nnz=2, scope_shape=(1, 4))
    >>> sparsifier.prepare(model, None); sparsifier.step()
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model[0].parametrizations.weight.original.grad
    tensor([[1., 1., 1., 1.]])
    """

    mask_class = DynamicMask

    def __init__(
        self, sparsity_level: Level = None, *, backward_level: float = 0.0, decay: float = 0.0, **structure: Any
    ) -> None:
        refuse_optimizer_as_level(sparsity_level)
        for name, value, most in (("backward_level", backward_level, 1.0), ("decay", decay, float("inf"))):
            if not is_number(value) or not 0 <= float(value) <= most:
                raise SparsityError(f"{name} must be a number in [0, {most:g}], got {value!r}")
        if backward_level > 0 and structure.get("stages") is not None:
            raise SparsityError("backward_level needs a single stage; remove stages=, or set backward_level=0")
        super().__init__(sparsity_level, **structure)
        self.backward_level, self.decay = backward_level, decay
        self._hooks = DecayHooks(decay)

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Register the optimizer or optimizers that train the sparsified parameters, in whose steps decay is added.

        In distributed training, call it after `fully_shard`, with an optimizer constructed after that.
        """
        optimizers = unwrap_optimizers(optimizer)
        super().attach(optimizers)
        if self.decay and self._phase == "prepared":
            self.require_prepared("attach")
            self._refuse_replaced(optimizers)
            for group in self.groups:
                self.live_mask(group)
        self._hooks.attach(optimizers if self.decay else [])

    def _after_prepare(self) -> None:
        super()._after_prepare()
        self._hooks.watch(self.groups, self.model)

    def step(self, use_path: bool = True) -> None:
        """Choose the masks from the present weights.

        Raises:
            SparsityError: `decay` is not 0, but no optimizer is attached.
        """
        self.require_prepared("step")
        if self.decay and not self._hooks.optimizers:
            raise SparsityError("step: decay is added before an optimizer's step; call sparsifier.attach(optimizer)")
        if self.decay and has_process_group():
            self._refuse_replaced(self._hooks.optimizers)
        if self.enable_mask_update and self.backward_level:
            self._check_groups(self.groups)  # a scheduler, or the user, may have changed levels
        super().step(use_path)

    def _refuse_replaced(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise where a parameter has been sharded since, so that the optimizers hold another object."""
        trained = groups_trained_by(optimizers, self.groups)
        for group in self.groups:
            if is_sharded(original(group)) and group not in trained:
                raise SparsityError(f"{group['tensor_fqn']}: none of the optimizers given trains it. {ORDER}")

    def _extra_state(self) -> dict[str, Any]:
        masks = {g["tensor_fqn"]: mask_of(g).backward_mask for g in self.groups if self.backward_level}
        saved = {name: mask.detach().clone() for name, mask in masks.items() if mask is not None}
        return {**super()._extra_state(), **({"backward_masks": saved} if saved else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the masks and groups of a state dict; see `MaskSparsifier.load_state_dict`."""
        self.require_prepared("load_state_dict")
        saved = state_dict.get("backward_masks", {}) if isinstance(state_dict, Mapping) else {}
        if not isinstance(saved, Mapping):
            raise SparsityError("load_state_dict: 'backward_masks' must be a dict {tensor name: mask}")
        entries = {name: {"mask": mask} for name, mask in saved.items()}
        backward_masks, _ = check_saved({"state": entries, "groups": []}, self.groups, strict=False)
        super().load_state_dict(state_dict, strict)
        for group in self.groups:
            mask = mask_of(group)
            if mask.backward_mask is not None and self.backward_level:
                if group["tensor_fqn"] in backward_masks:
                    copy_values(mask.backward_mask, backward_masks[group["tensor_fqn"]])
                else:  # of a state without them: gradients reach the kept weights at least
                    local(mask.backward_mask).logical_or_(local(mask.mask) != 0)

    def _end(self) -> None:
        super()._end()
        self._hooks.detach()

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        super()._check_groups(groups)
        if not self.backward_level:
            return
        named = groups_by_name(groups)
        for pruning in self.pruning_groups(groups):
            forward = torch.as_tensor(pruning.budget(named), device="cpu")
            backward = torch.as_tensor(pruning.scope.sparsity_to_nnz(self.backward_level), device="cpu")
            if pruning.stage or bool((forward > backward).any()):
                raise SparsityError(
                    f"{pruning.label}: the backward mask must keep all that the forward mask keeps, in one "
                    f"stage, but backward_level={self.backward_level:g} keeps {int(backward.min())} blocks in a scope "
                    f"and the forward mask {int(forward.max())}; lower backward_level"
                )

    def _new_mask(self, group: TensorGroup) -> DynamicMask:
        weight = getattr(group["module"], group["tensor_name"]).detach()
        mask = DynamicMask(torch.ones_like(weight, dtype=torch.bool), with_backward_mask=True)
        mask.set_open(not self.backward_level)
        return mask

    def _fill(
        self, keeps: Mapping[PruningGroup, Budget], groups: Mapping[str, TensorGroup], masks: Mapping[str, Tensor]
    ) -> None:
        super()._fill(keeps, groups, masks)
        dynamic = {name: mask_of(groups[name]) for pruning in keeps for name in pruning.specs}
        for mask in dynamic.values():  # with gradients for all, the backward mask is not gathered
            mask.set_open(not self.backward_level)
        if self.backward_level:
            backward = {name: mask.backward_mask for name, mask in dynamic.items() if mask.backward_mask is not None}
            budgets = {pruning: pruning.scope.sparsity_to_nnz(self.backward_level) for pruning in keeps}
            super()._fill(budgets, groups, backward)
