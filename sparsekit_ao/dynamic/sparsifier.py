"""DynamicSparsifier: masks that change during training with a constant number of kept blocks; torch.ao's interface.

`step()` counts iterations and determines when to update. `apply` makes an update, `gradients` captures the gradients
for it, and `start` makes the initial masks.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import has_process_group
from ..errors import SparsityError
from ..selection import finished
from ..sparsifiers.config import ConfigContext, TensorGroup
from ..sparsifiers.optimizers import unwrap_optimizer, unwrap_optimizers
from ..sparsifiers.planned import PlannedSparsifier
from ..sparsifiers.structure import checked_pattern
from .apply import Movement, run_update, zero_dropped, zero_dropped_gradients, zero_dropped_state
from .budgets import Budgets, check_exclusive, overall_level
from .gradients import GradientCapture
from .mask import DynamicMask, starting_mask
from .optimizers import check_optimizers, keeps_zeros, original
from .progress import checked_progress, progress_of
from .settings import NewValues, make_settings
from .start import finish_start, mark_initialized, refuse_meta, refuse_parametrized, start_masks


@final
class DynamicSparsifier(PlannedSparsifier):
    """Train with `sparsity_level` of all blocks dropped (0.9 by default, over all tensors), which change at updates.

    The loop is torch.ao's, `loss.backward(); optimizer.step(); sparsifier.step()`, with one `sparsifier.step()` for
    each `optimizer.step()`. Every scope keeps exactly its budget after every update. Dropped weights are zero, and
    grown ones start from zero, with zero optimizer state; one that is pruned and grown in the same update is unchanged.

    A config entry with `sparsity_level` or `nnz` fixes the budget of its tensors; the others share the overall one, and
    a tensor of several scopes keeps the same number of blocks in each (constant fan-in, N:M).

    Args:
        sparsity_level: the overall fraction dropped, which `init` distributes over the tensors.
        optimizer: the optimizer, or several, that train the sparsified parameters; or `attach` it later.
        nnz: instead, blocks kept in each scope of every tensor.
        init: "erk", "er", "uniform", "random" (as uniform), "resume", or from `inits`.
        update_every: iterations from one update to the next; None for masks that never change.
        update_fraction: iteration -> fraction of the active blocks that an update replaces, in [0, 1); or a number; 0.3
            by default. Not used where `target` determines how many are pruned and `grow` is None.
        until: the last iteration that may update; None for no end.
        prune: "magnitude", "global", or from `prune`.
        grow: "gradient", "momentum", "random", None, or from `grow`.
        redistribute: "gradient", "momentum", "nonzero", None, or from `redistribute`.
        target: iteration -> overall sparsity, instead of `sparsity_level`: budgets follow it at every update.
        seed: of random choices, together with the tensor name, the iteration and the purpose.
        state_init: the optimizer's second moment of a grown weight: "zero", or "grad" for the squared gradient, without
            which Adam's first step is several times too large.
        new_values: (weight, generator) -> values of grown weights, in the weight's shape; zeros by default.
        structure: pattern, block_shape, scope_shape, view, axes, unit, scope, sizes, norm, edge, block_coupling,
            coupling_order, scope_coupling: as for `ScopeSparsifier`.

    Raises:
        SparsityError: arguments that contradict each other; whatever needs a tensor is checked in `prepare`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sparsifier = DynamicSparsifier(0.75, optimizer, init="uniform", update_every=2, update_fraction=0.5)
    >>> sparsifier.prepare(model, None)
    >>> for _ in range(4):
    ...     model(torch.ones(1, 8)).sum().backward()
    ...     optimizer.step()
    ...     sparsifier.step()
    >>> sparsifier.check(), int(sparsifier.mask("0.weight").sum()), sparsifier.last_update.iteration
    (2, 12, 4)
    """

    structure_defaults: Mapping[str, Any] = {  # rules score weights, gradients and momenta by norms of their own
        k: v for k, v in PlannedSparsifier.structure_defaults.items() if k not in ("score", "member_scores")
    }
    optional_keys = tuple(k for k in PlannedSparsifier.optional_keys if k != "stages")

    def __init__(
        self,
        sparsity_level: float | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        nnz: int | None = None,
        init: Any = "erk",
        update_every: int | None = 100,
        update_fraction: Any = None,
        until: int | None = None,
        prune: Any = "magnitude",
        grow: Any = "gradient",
        redistribute: Any = None,
        target: Any = None,
        seed: int = 0,
        state_init: str = "zero",
        new_values: NewValues | None = None,
        **structure: Any,
    ) -> None:
        self.settings = make_settings(
            init=init,
            update_every=update_every,
            update_fraction=update_fraction,
            until=until,
            prune=prune,
            grow=grow,
            redistribute=redistribute,
            target=target,
            seed=seed,
            state_init=state_init,
            new_values=new_values,
        )
        if isinstance(sparsity_level, Optimizer):
            raise SparsityError("sparsity_level must be a number, got an optimizer; give it as optimizer=")
        pattern = checked_pattern(structure.get("pattern"), "")
        if pattern is not None and pattern.sparsity_level is not None and sparsity_level is None:
            sparsity_level, structure["pattern"] = pattern.sparsity_level, replace(pattern, sparsity_level=None)
        count = pattern.arguments[0] if pattern is not None and pattern.budget == "nnz" else nnz
        check_exclusive(self.settings, sparsity_level, count)
        if sparsity_level is None and count is None and (pattern is None or pattern.budget is None):
            sparsity_level = overall_level(self.settings, 0.9, 0)
        super().__init__(sparsity_level, nnz=nnz, **structure)
        self.iteration = 0
        self.last_update: Movement | None = None
        self._pending = self._has_updated = False
        self._start_masks: dict[str, Tensor] = {}
        self._known: list[int] = []  # ids of the parameters that were looked up in the optimizers
        self._capture = GradientCapture()
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Watch the steps of the optimizer, or of several, that train the sparsified parameters.

        Over ranks: call it after `fully_shard`, with an optimizer made after that. Masks are then sharded like their
        weights, and initial masks are chosen that `prepare` could not choose (meta device).
        """
        optimizers = unwrap_optimizers(optimizer)
        super().attach(optimizers)
        is_prepared = self._phase == "prepared"
        if is_prepared:
            self._need_prepared("attach")
            self._finish_start(optimizers)
        self._capture.attach(optimizers)
        if is_prepared and self._capture.masked:
            zero_dropped_state(self.groups, optimizers)

    def take_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Copy the dense gradients and mask `.grad`: call it before clipping gradients by their norm.

        Call it after the last backward of an iteration and after unscaling (`scaler.unscale_`). It does nothing in
        iterations whose gradients no update needs. Without it, the optimizer's step does the same.

        Args:
            optimizer: take only the gradients of its parameters, where several optimizers have a backward pass each;
                by default all.
        """
        self._need_prepared("take_gradients")
        self._capture.take(None if optimizer is None else unwrap_optimizer(optimizer))

    @property
    def uses_gradients(self) -> bool:
        """Whether updates read gradients or momentum, so that `take_gradients` must precede clipping."""
        return self.settings.needs_gradient or self.settings.needs_momentum

    def _after_prepare(self) -> None:
        """Zero the weights that the initial masks drop; for weights on the meta device, `attach` does so."""
        assert self.model is not None
        self._capture.watch(self.groups, self.model)
        self._known = []
        if not self._resumes:
            self.iteration, self._pending, self.last_update = 0, False, None
            self._after_update(self.groups)
        if not any(original(g).is_meta for g in self.groups):
            self._start_masks = {}
        self._set_open()

    def step(self, use_path: bool = True) -> None:
        """Count one training iteration, after the optimizer's step; update the masks if an update is due.

        An update waits for the next iteration while an optimizer skipped its step (gradient scaling) or a gradient
        that it needs is missing or not finite. While `enable_mask_update` is False there is none. If a rule raises,
        nothing is changed, the iteration is not counted, and `step` may be called again.
        """
        self._need_prepared("step")
        if self.settings.updates and not self._capture.optimizers:
            raise SparsityError("step: no optimizer to take gradients from; call sparsifier.attach(optimizer) first")
        if not self._known or (has_process_group() and self._known != [id(original(g)) for g in self.groups]):
            self._finish_start(self._capture.optimizers)
        before, was_masked = (self.iteration, self._pending), self._capture.masked
        self.iteration += 1
        self._has_updated = False
        try:
            with torch.no_grad():
                if self.enable_mask_update:
                    self._update_all()
        except BaseException:
            if self._has_updated:  # Ctrl-C after everything was written: the iteration counts
                finished(self._end_iteration, was_masked)
            else:
                self.iteration, self._pending = before
            raise
        finished(self._end_iteration, was_masked)

    def _end_iteration(self, was_masked: bool) -> None:
        if not was_masked or not all(map(keeps_zeros, self._capture.optimizers)):
            zero_dropped(self.groups)  # momentum, or an optimizer that mixes elements, changed dropped weights
        self._capture.clear()
        self._set_open()
        if self._capture.masked and not was_masked:
            zero_dropped_state(self.groups, self._capture.optimizers)

    def _squash(self, model: nn.Module, kept: Sequence[Mapping[str, Any]]) -> None:
        """The next step of an optimizer keeps the zeros too; `attach` it again before another `prepare`."""
        held = [(original(g), self._live_mask(g)) for g in self.groups]
        super()._squash(model, kept)
        if model is self.model:
            zero_dropped_gradients(held, self._capture.optimizers)

    def _end(self) -> None:
        super()._end()
        self._capture.detach()

    def state_dict(self, with_gradients: bool = False) -> dict[str, Any]:
        """Masks, groups, and the position in the update schedule; see `MaskSparsifier.state_dict`.

        Args:
            with_gradients: add an entry for the gradient of every tensor, which a state has that was saved between
                an optimizer's step and this one's: `torch.distributed.checkpoint` loads only existing entries.
        """
        return {**super().state_dict(), "dynamic": self._progress(with_gradients)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue exactly where `state_dict` was saved, even while an update was pending."""
        self._need_prepared("load_state_dict")
        saved = checked_progress(state_dict, self.groups, self._capture)
        super().load_state_dict(state_dict, strict)
        self.iteration, self._pending = saved["iteration"], saved["pending"]
        self._level_given = {**self._level_given, **saved["level_given"]}
        self._capture.restore(saved["gradients"], saved["stepped"])
        mark_initialized([g for g in self.groups if g["tensor_fqn"] in state_dict["state"]])
        self._set_open()

    def _complete(self, own: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        group = super()._complete(own, place)
        is_fixed = self._resolve(own, place).get("sparsity_level") is not None or group.get("nnz") is not None
        return {**group, "fixed": is_fixed}

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        if self._phase != "prepared":
            refuse_parametrized(groups)
            if self._capture.optimizers:
                check_optimizers(self._capture.optimizers, groups, self.settings)
            if self._resumes:
                refuse_meta(groups, "Unpickled masks cannot be restored there: materialize the model before prepare.")
            else:
                components, level = self._planned(groups).components, self.defaults["sparsity_level"]
                self._start_masks = start_masks(components, groups, self.settings, level)
        super()._check_groups(groups)

    def _new_mask(self, group: TensorGroup) -> DynamicMask:
        weight, kept = original(group).detach(), self._start_masks.get(group["tensor_fqn"])
        return DynamicMask(starting_mask(weight, kept), is_initialized=not weight.is_meta)

    def _finish_start(self, optimizers: Sequence[Optimizer]) -> None:
        """Finish what `prepare` could not do, with weights that may have been sharded or materialized since."""
        for group in self.groups:
            self._live_mask(group)
        finish_start(self._planned(self.groups).components, self.groups, optimizers, self.settings, self._start_masks)
        self._capture.shard_like_weights()
        self._start_masks, self._known = {}, [id(original(g)) for g in self.groups]

    def _set_open(self) -> None:
        """Open masks if an update needs the next iteration's gradients of dropped weights, or rules read momentum."""
        s, coming = self.settings, self.iteration + 1
        feeds = s.is_due(coming) or (self._pending and s.may_update(coming))
        always = s.needs_momentum and s.may_update(coming)
        self._capture.set_open(always or (feeds and s.needs_gradient), keep=feeds, masked=not always)

    def _after_update(self, groups: Sequence[TensorGroup]) -> None:
        zero_dropped(groups)
        zero_dropped_state(groups, self._capture.optimizers)

    def _update_all(self) -> None:
        s = self.settings
        is_due, is_late = s.is_due(self.iteration), not s.may_update(self.iteration)
        if self._pending and (is_due or is_late):
            warnings.warn(
                f"the mask update due in iteration {s.due_before(self.iteration)} never happened: an optimizer took no "
                "step, or a gradient was missing or not finite, in every iteration since",
                stacklevel=3,
            )
        self._pending = (self._pending or is_due) and not is_late
        if self._pending:
            momenta = self._capture.momenta() if s.needs_momentum else {}
            is_ready = self._capture.is_ready(s.needs_gradient, momenta)
            if not s.can_choose_first:
                is_ready = bool(is_ready)
            if is_ready is not False:
                plan, given = self._planned(self.groups), self._level_given
                budgets = Budgets(components=plan.components, groups=self.groups, settings=s)
                statistics = [self._statistics_of(g) for g in self.groups]
                arguments = budgets, self._capture, momenta, given, self.iteration, statistics
                self.last_update = run_update(*arguments, self._finish_update, is_ready) or self.last_update

    def _finish_update(self) -> None:
        self._pending, self._has_updated = False, True

    def _needs(self) -> dict[str, tuple[str, ...]]:
        return {g["tensor_fqn"]: self.settings.statistics for g in self.groups}

    def _progress(self, with_gradients: bool = False) -> dict[str, Any]:
        return progress_of(self.iteration, self._pending, self._level_given, self._capture, with_gradients)

    def _pickled(self) -> dict[str, Any]:
        return {**super()._pickled(), "dynamic": self._progress()}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the optimizers, which belong to the user; captured gradients are included."""
        capture, saved = GradientCapture(), self._progress()
        capture.restore(saved["gradients"], saved["stepped"])
        return {**super().__getstate__(), "_capture": capture, "_start_masks": {}}
