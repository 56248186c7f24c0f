"""`DynamicSparsifier`, whose masks change during training while the number of kept blocks is constant or scheduled.

`prepare` chooses the initial masks (`inits`), hooks capture gradients before an optimizer's step (`gradients`), and
`step` updates the masks (`update`) in the iterations that `Settings` schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..distributed import LocalParts, copy_values, has_process_group, is_sharded, placed_like
from ..errors import SparsityError, warn
from ..masking import select
from ..schedules import cut_short
from ..sparsifiers.base import refuse_meta_masks
from ..sparsifiers.calibrated import Calibrated
from ..sparsifiers.config import ConfigContext, TensorGroup
from ..sparsifiers.groups import groups_by_name
from ..sparsifiers.optimizer_state import ELEMENTWISE, original, reset_state, unwrap_optimizer, unwrap_optimizers
from ..sparsifiers.scope import BudgetSparsifier
from ..sparsifiers.stages import Level, checked_pattern, level_and_pattern, without_pattern
from .budgets import Budgets, refuse_optimizer_as_level
from .dynamic_mask import DynamicMask, mask_of
from .gradients import GradientCapture
from .inits import Init, initial_masks, initialize_masks, parse_init, refuse_meta
from .update import NewValues, Settings, UpdateStatistics, make_settings, run_update, zero_dropped, zero_dropped_state

#: the values that a checkpoint holds besides masks and groups, and their types
_PROGRESS = {"iteration": int, "pending": bool, "stepped": bool, "gradients": Mapping}


class DynamicSparsifier(Calibrated, BudgetSparsifier):
    """Train a sparse model whose masks change: updates prune some blocks and grow others in their place.

    The training loop calls `loss.backward(); optimizer.step(); sparsifier.step()`, with one `sparsifier.step()` for
    each `optimizer.step()`. After every update, every scope keeps exactly its budget. Dropped weights are zero. Grown
    weights start from zero, with zero optimizer state; a weight that is pruned and grown in the same update does not
    change. A config entry with `sparsity_level` or `nnz` fixes the budget of its tensors, and the other tensors share
    the overall one. A tensor with several scopes keeps the same number of blocks in each (constant fan-in, N:M).

    Args:
        sparsity_level: The fraction dropped over all tensors, in [0, 1]; 0.9 by default. `init` distributes it. Or a
            pattern, such as "2:4".
        optimizer: The optimizer or optimizers that train the sparsified parameters. You may also `attach` them later.
        nnz: The number of blocks kept in each scope of every tensor, instead of `sparsity_level`.
        init: How masks start: "erk", "er", "uniform", "random" (the same as uniform), "resume", or one from `inits`.
        update_every: The number of iterations from one update to the next. With None, masks never change.
        update_fraction: The fraction of the active blocks that an update replaces, in [0, 1): a number (0.3 by
            default), or a function of the iteration. With a `target` and `grow=None`, the target alone determines
            how many are pruned.
        until: The last iteration that may update masks; None (default) sets no end.
        prune: Which active blocks are dropped: "magnitude", "global", "random", or a criterion of `criteria`.
        grow: Which dropped blocks become active: "gradient", "momentum", "random", None (no blocks), or a criterion of
            `criteria`.
        redistribute: How growth is divided among tensors: "gradient", "momentum", "nonzero", None (each tensor grows
            what it lost), or a criterion of `criteria`.
        target: A function of the iteration that returns the overall sparsity, instead of a level. Budgets follow it at
            every update.
        seed: An int. Random choices depend on it, the tensor's name, the iteration and the purpose.
        state_init: The optimizer's second moment for a grown weight: "zero", or "grad" for the squared gradient. With
            "zero", Adam's first step is several times too large.
        new_values: A function (weight, generator) that returns a weight from which grown values are taken; None: zeros.
        structure: Pattern, block_shape, scope_shape, view, axes, unit, scope, sizes, norm, edge, block_coupling,
            coupling_order, scope_coupling: as for `ScopeSparsifier`.

    Raises:
        SparsityError: Arguments contradict each other; whatever needs a tensor is checked in `prepare`.

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

    structure_defaults: Mapping[str, Any] = {  # criteria compute the scores
        k: v for k, v in BudgetSparsifier.structure_defaults.items() if k not in ("score", "member_scores")
    }
    optional_keys = tuple(k for k in BudgetSparsifier.optional_keys if k != "stages")
    mask_class = DynamicMask

    def __init__(
        self,
        sparsity_level: Level = None,
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
        refuse_optimizer_as_level(sparsity_level)
        self.init = parse_init(init)
        schedule = {"update_every": update_every, "update_fraction": update_fraction, "until": until, "target": target}
        criteria = {"prune": prune, "grow": grow, "redistribute": redistribute}
        self.settings = make_settings(**schedule, **criteria, seed=seed, state_init=state_init, new_values=new_values)
        level, structure["pattern"] = level_and_pattern(sparsity_level, structure.get("pattern"))
        level, structure = _overall_level(level, nnz, structure, self.init, self.settings)
        super().__init__(level, nnz=nnz, **structure)
        self.iteration = 0
        self.last_update: UpdateStatistics | None = None
        self._pending = False  # an update waits for an optimizer's step, or for a finite gradient
        self._initial_masks: dict[str, Tensor] = {}
        self._known: list[int] = []  # ids of the parameters that were looked up in the optimizers
        self._capture = GradientCapture()
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Register the optimizer or optimizers that train the sparsified parameters.

        In distributed training, call it after `fully_shard`, with an optimizer constructed after that. Masks are then
        sharded like their weights, and weights that were on the meta device in `prepare` get initial masks.
        """
        optimizers = unwrap_optimizers(optimizer)
        super().attach(optimizers)
        if self._phase == "prepared":
            self.require_prepared("attach")
            self._initialize(optimizers)
            if self._capture.masked:
                zero_dropped_state(self.groups, optimizers)
        self._capture.attach(optimizers)

    def take_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Copy the dense gradients and mask `.grad`; call this before you clip gradients by their norm.

        Call it after the last backward pass of an iteration and after unscaling (`scaler.unscale_`). It does nothing in
        iterations whose gradients no update needs. If it is not called, the optimizer's step does the same.

        Args:
            optimizer: Take only the gradients of this optimizer's parameters. None (default) takes all gradients.
        """
        self.require_prepared("take_gradients")
        self._capture.take(None if optimizer is None else unwrap_optimizer(optimizer))

    @property
    def uses_gradients(self) -> bool:
        """Whether updates read gradients or momentum, so that `take_gradients` must precede clipping."""
        return self.settings.needs_gradient or self.settings.needs_momentum

    def _complete(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        group = super()._complete(entry, place)
        has_level = without_pattern(entry, place, self.keys).get("sparsity_level") is not None
        return {**group, "fixed": has_level or group.get("nnz") is not None}

    def _check_fit(self, group: TensorGroup) -> None:
        super()._check_fit(group)
        place = group["module"], group["tensor_name"]
        if self._phase != "prepared" and parametrize.is_parametrized(*place):
            raise SparsityError(
                f"{group['tensor_fqn']}: another parametrization computes this weight, so it has no gradient of its "
                "own that growth could read. Remove the parametrization first, or leave the tensor out (exclude=[...])."
            )

    def _begin(self, groups: Sequence[TensorGroup]) -> None:
        """Check settings against the groups, distribute the overall budget, and choose the initial masks."""
        if self._capture.optimizers:
            self.settings.check_optimizers(self._capture.optimizers, groups)
        budgets = self._budgets(groups)
        self.settings.check_budgets(budgets)
        level, later = self.defaults["sparsity_level"], self.settings.extreme_targets()
        self._initial_masks = initial_masks(budgets, self.init, level, later, self.settings.seed)
        super()._begin(groups)

    def _levels(self, groups: Sequence[TensorGroup]) -> dict[str, float]:
        if self.settings.target is not None:
            return {}
        sizes = {g["tensor_fqn"]: original(g).numel() for g in groups}
        dropped = sum(level * sizes[name] for name, level in super()._levels(groups).items())
        return {"the whole": round(dropped / max(sum(sizes.values()), 1), 3)}  # redistribution changes single levels

    def _budgets(self, groups: Sequence[TensorGroup]) -> Budgets:
        named, pruning_groups = groups_by_name(groups), self.pruning_groups(groups)
        return Budgets(pruning_groups=pruning_groups, groups=named, densities=self.init.densities)

    def _new_mask(self, group: TensorGroup) -> DynamicMask:
        weight, initial_mask = original(group).detach(), self._initial_masks.get(group["tensor_fqn"])
        # In eager mode on a CPU, a float mask is applied by a single product; elsewhere a bool mask saves memory.
        is_float = weight.device.type == "cpu" and not is_sharded(weight)
        mask = torch.ones_like(weight, dtype=weight.dtype if is_float else torch.bool)
        if initial_mask is not None:
            copy_values(mask, initial_mask)
        return DynamicMask(mask, is_initialized=not weight.is_meta)

    def _after_prepare(self) -> None:
        """Zero the weights that the initial masks drop; for weights on the meta device, `attach` does so."""
        super()._after_prepare()
        self._capture.watch(self.groups, self.model)
        self._known = []
        self.iteration, self._pending, self.last_update = 0, False, None
        self._after_update(self.groups)
        if not any(original(g).is_meta for g in self.groups):
            self._initial_masks = {}
        self._capture.set_open(**self.settings.opening(self.iteration + 1, self._pending))

    def _initialize(self, optimizers: Sequence[Optimizer]) -> None:
        """Check the optimizers, then finish what `prepare` left: weights on the meta device, and sharded ones."""
        for group in self.groups:
            self.live_mask(group)
        if optimizers:
            self.settings.check_optimizers(optimizers, self.groups)
        waiting = {g["tensor_fqn"]: g for g in self.groups if not mask_of(g).is_initialized}
        refuse_meta([*waiting.values()], "Call to_empty and initialize the weights first, then attach(optimizer).")
        initialize_masks(self._budgets(self.groups), waiting, self._initial_masks, self.init, self.settings.seed)
        zero_dropped([*waiting.values()])
        zero_dropped_state([*waiting.values()], optimizers)
        self._capture.shard_like_weights()
        self._known, self._initial_masks = [id(original(g)) for g in self.groups], {}

    def step(self, use_path: bool = True) -> None:
        """Count one training iteration, after the optimizer's step, and update the masks if an update is due.

        If an optimizer skipped its step (gradient scaling), or a gradient that the update needs is missing or not
        finite, the update waits for the next iteration. While `enable_mask_update` is False there are no updates. If a
        criterion raises an error, nothing is changed, the iteration is not counted, and `step` may be called again.
        """
        self.require_prepared("step")
        if self.settings.updates and not self._capture.optimizers:
            raise SparsityError(
                "step: no optimizer is attached, but updates follow its steps; call sparsifier.attach(optimizer) first"
            )
        if not self._known or (has_process_group() and self._known != [id(original(g)) for g in self.groups]):
            self._initialize(self._capture.optimizers)
        refuse_meta_masks("step", self.groups, [mask_of(g).mask for g in self.groups])
        was_masked, optimizers = self._capture.masked, self._capture.optimizers
        changes_dropped = not was_masked or any(type(optimizer) not in ELEMENTWISE for optimizer in optimizers)
        if loaded := [g for g in self.groups if mask_of(g).was_loaded]:
            if not changes_dropped:  # dropped weights are zero before every update
                zero_dropped(loaded)
                zero_dropped_state(loaded, optimizers)
            for group in loaded:
                mask_of(group).was_loaded = False
        if self.enable_mask_update:
            with torch.no_grad():
                self._update_all()
        self.iteration += 1
        if changes_dropped:
            zero_dropped(self.groups)  # momentum, or an optimizer that mixes elements, changed dropped weights
        self._capture.clear()
        self._capture.set_open(**self.settings.opening(self.iteration + 1, self._pending))
        if self._capture.masked and not was_masked:
            zero_dropped_state(self.groups, optimizers)

    def unfinished(self) -> str:
        """Return which sparsity a target has reached if it ends with another one."""
        target, every = self.settings.target, self.settings.update_every or 1
        if target is None:
            return super().unfinished()
        at = min(self.iteration, self.settings.until or self.iteration) // every * every  # of the last update
        return cut_short(target, self.iteration, self.settings.target_at(at), "all tensors")

    def _update_all(self) -> None:
        """Make the update that is due in the coming iteration, or still pending from an earlier one."""
        settings, iteration = self.settings, self.iteration + 1
        is_due, is_late = settings.is_due(iteration), not settings.may_update(iteration)
        if self._pending and (is_due or is_late):
            every = settings.update_every or 1
            warn(
                f"the mask update due in iteration {(iteration - 1) // every * every} never happened: an optimizer "
                "took no step, or a gradient was missing or not finite, in every iteration since",
            )
        is_pending = (self._pending or is_due) and not is_late
        momenta = self._capture.momenta() if is_pending and settings.needs_momentum else {}
        if is_pending and self._capture.is_ready(settings.needs_gradient, momenta):
            budgets = self._budgets(self.groups)
            self.last_update = run_update(budgets, settings, self._capture, momenta, iteration, self.recorder.of)
            is_pending = False
        self._pending = is_pending

    def _after_update(self, groups: Sequence[TensorGroup]) -> None:
        zero_dropped(groups)
        zero_dropped_state(groups, self._capture.optimizers)

    def _squash(self, model: nn.Module) -> None:
        """Squash such that the next optimizer step keeps the zeros, and detach the optimizers."""
        # Masks are removed last, so that the call can be repeated after an error.
        for group in self.groups if model is self.model else ():
            parameter, mask = original(group), self.live_mask(group)
            if parameter.grad is not None:
                parts = LocalParts(parameter, mask, has_gradient=True)
                parts.gradient.copy_(select(parts.gradient, parts.mask))
            reset_state(self._capture.optimizers, parameter, mask == 0)
        super()._squash(model)
        if model is self.model:
            self._capture.detach()

    def _needs(self) -> dict[str, tuple[str, ...]]:
        needs = tuple(dict.fromkeys(n for criterion in self.settings.criteria for n in criterion.statistics))
        return {g["tensor_fqn"]: needs for g in self.groups}

    def state_dict(self, with_gradients: bool = False) -> dict[str, Any]:
        """Return masks, groups, and the position in the update schedule; see `MaskSparsifier.state_dict`.

        A state that is saved between `optimizer.step()` and `sparsifier.step()` may contain gradients. To load it,
        `torch.distributed.checkpoint` needs entries for them, which `with_gradients=True` adds for every tensor.
        """
        state = super().state_dict()
        if with_gradients:
            blank = {g["tensor_fqn"]: torch.zeros_like(original(g).detach()) for g in self.groups}
            state["dynamic"]["gradients"] = {**blank, **state["dynamic"]["gradients"]}
        return state

    def _extra_state(self) -> dict[str, Any]:
        captured = {fqn: g.detach().clone() for fqn, g in self._capture.gradients.items()}
        progress = {"iteration": self.iteration, "pending": self._pending, "stepped": self._capture.has_stepped}
        return {**super()._extra_state(), "dynamic": {**progress, "taken": list(captured), "gradients": captured}}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state, and continue exactly where it was saved, also if an update was pending."""
        self.require_prepared("load_state_dict")
        progress = _checked_progress(state_dict, self.groups)
        super().load_state_dict(state_dict, strict)
        self.iteration, self._pending = progress["iteration"], progress["pending"]
        self._capture.restore(progress["gradients"], progress["stepped"])
        for group in self.groups:  # masks that were loaded are initialized, if they had memory
            mask = mask_of(group)
            mask.is_initialized |= group["tensor_fqn"] in state_dict["state"] and not mask.mask.is_meta
            mask.was_loaded = True
        self._capture.set_open(**self.settings.opening(self.iteration + 1, self._pending))


def _overall_level(
    level: float | None, nnz: int | None, structure: Mapping[str, Any], init: Init, settings: Settings
) -> tuple[float | None, dict[str, Any]]:
    """Return the overall level, and the structure without it. Raise an error if several arguments set a budget."""
    pattern = checked_pattern(structure.get("pattern"), "")
    if pattern is not None and pattern.sparsity_level is not None and level is None:
        level, structure = pattern.sparsity_level, {**structure, "pattern": replace(pattern, sparsity_level=None)}
    count = pattern.arguments[0] if pattern is not None and pattern.budget_key == "nnz" else nnz
    values = {"sparsity_level": level, "nnz": count, "target": settings.target, f"init={init.name!r}": init.masks}
    budgets = [name for name, value in values.items() if value is not None]
    if len(budgets) > 1:
        raise SparsityError(f"{budgets[0]} and {budgets[1]} are mutually exclusive; give one")
    if level is None and count is None and (pattern is None or pattern.budget_key is None):
        level = 0.9 if settings.target is None else settings.target_at(0)
    return level, dict(structure)


def _checked_progress(state_dict: object, groups: Sequence[TensorGroup]) -> dict[str, Any]:
    """Check and return the saved progress, with gradients copied to the devices and ranks of their weights."""
    if not isinstance(state_dict, Mapping) or "dynamic" not in state_dict:
        raise SparsityError("load_state_dict: the state has no 'dynamic' entry; give one of a DynamicSparsifier")
    saved = state_dict["dynamic"]
    for key, kind in _PROGRESS.items():
        value = saved.get(key) if isinstance(saved, Mapping) else None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SparsityError(
                f"load_state_dict: 'dynamic' needs {key!r} of type {kind.__name__.lower()}, as state_dict() gives, "
                f"got {value!r}"
            )
    taken, gradients = saved.get("taken", list(saved["gradients"])), {}
    if not isinstance(taken, list) or not all(isinstance(name, str) for name in taken):
        raise SparsityError(f"load_state_dict: 'dynamic' needs 'taken' as a list of names, got {taken!r}")
    captured = set(taken) & set(saved["gradients"])
    for name, weight in ((g["tensor_fqn"], original(g)) for g in groups if g["tensor_fqn"] in captured):
        gradient = saved["gradients"][name]
        if not isinstance(gradient, Tensor) or gradient.shape != weight.shape:
            shape = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            text = f"the saved gradient is {shape}, but the weight is {tuple(weight.shape)}"
            raise SparsityError(f"load_state_dict: {name}: {text}")
        gradients[name] = placed_like(gradient.detach().clone().to(weight.device), weight)
    return {**saved, "gradients": gradients}
