"""`ProximalSparsifier` trains with a penalty on block norms: each optimizer step is followed by a proximal step.

Weights stay plain parameters, which the proximal operator changes in place; no mask is registered. Masks of
what the last step kept are stored for `squash_mask`, for checkpoints and for `to_masks`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..distributed import is_sharded
from ..errors import CouplingError, SparsityError, is_number, warn
from ..schedules import is_schedule
from ..structure import BlockSpec, Budget, block_windows, soft_threshold_windows
from ..structure.windows import ScopeWindows, block_scores, fill_mask
from .checkpoint import saved_count
from .config import ConfigContext, TensorGroup, copied
from .groups import PruningGroup, counts_in_scopes, groups_by_name
from .optimizer_state import (
    Conditioner,
    Diagonal,
    MovedParameters,
    check_optimizer,
    diagonal_of,
    trainer_of,
    unwrap_optimizers,
)
from .scope import BudgetSparsifier, ScopeSparsifier
from .stages import GROUP_KEYS, checked_pattern, level_and_pattern, merged, refuse_two_budgets, stages_of


class ProximalSparsifier(BudgetSparsifier):
    """Train with a group lasso: each `step()` after `optimizer.step()` shrinks all blocks and zeroes small ones.

    A step replaces the weights v by `argmin_w 1/2 (w - v)' D (w - v) + strength * sum of ||block||_2`. This is the
    proximal operator of the penalty in the metric D of the optimizer, which contains its learning rate: `D = 1 / lr`
    for SGD (Yuan and Lin 2006), and `D = (sqrt(exp_avg_sq / (1 - beta2^t)) + eps) / lr` for Adam, so that blocks with
    small gradients are dropped first. If a budget (`sparsity_level` or `nnz`) is given instead of a strength, the
    strength is chosen in each step such that exactly that many blocks remain in every scope. It equals the mean
    of the norms ||D v|| of the last kept and the first dropped block; if blocks at an edge may be smaller, all norms
    are divided by the root of the number of elements of their block.

    A tensor that the optimizer has not moved (gradient accumulation, a step that `GradScaler` skipped, no gradient) is
    not shrunk. Weights stay plain parameters without masks. Sharded weights (DTensor) raise an error; under
    DistributedDataParallel every rank computes the same result.

    Args:
        strength: The weight of the penalty: a number >= 0, or a function of the number of steps so far, such as
            `schedules.linear`. A config entry may have its own.
        sparsity_level, nnz: The fraction of blocks dropped, or the number of blocks kept, in each scope; given in place
            of a strength. Schedulers may change the level.
        optimizer: The optimizer or optimizers that train the sparsified parameters. They may also be given to `attach`
            later. Budgets with `conditioner=None` need no optimizer.
        conditioner: How D is found. "auto" (default) knows SGD, Adam, AdamW, RMSprop and Adagrad. None takes
            `D = 1 / lr` with any optimizer. A function `(optimizer, parameter) -> D` returns a positive number, or a
            positive tensor of the parameter's shape.
        structure: Pattern, block_shape, scope_shape, view, axes, unit, scope, sizes, edge, block_coupling,
            coupling_order, scope_coupling, stages: as for `ScopeSparsifier`.

    Raises:
        SparsityError: Arguments contradict each other; whatever needs a tensor is checked in `prepare`.

    >>> from sparsekit_ao import patterns
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> sparsifier = ProximalSparsifier(strength=0.3, optimizer=optimizer, pattern=patterns.columns())
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> x = torch.randn(64, 8)
    >>> for _ in range(300):
    ...     optimizer.zero_grad()
    ...     (model(x) - x[:, :4] @ torch.diag(torch.tensor([2.0, 2.0, 0.0, 0.0]))).square().mean().backward()
    ...     optimizer.step()
    ...     sparsifier.step()
    >>> model[0].weight.ne(0).any(0).tolist()
    [True, True, False, False, False, False, False, False]
    """

    structure_defaults: Mapping[str, Any] = {  # blocks are measured by their 2-norm in the optimizer's metric
        k: v for k, v in BudgetSparsifier.structure_defaults.items() if k not in ("norm", "score", "member_scores")
    }
    optional_keys = (*BudgetSparsifier.optional_keys, "strength")
    mask_class = None

    def __init__(
        self,
        *,
        strength: float | Callable[[int], float] | None = None,
        sparsity_level: float | None = None,
        nnz: int | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        conditioner: Conditioner = "auto",
        **structure: Any,
    ) -> None:
        sparsity_level, structure["pattern"] = level_and_pattern(sparsity_level, structure.get("pattern"))
        pattern = checked_pattern(structure["pattern"], "")
        budgets = (sparsity_level, nnz, None if pattern is None else pattern.budget_key)
        has_budget = any(budget is not None for budget in budgets)
        if strength is not None and has_budget:
            raise SparsityError("strength was given with a budget (sparsity_level, nnz, pattern); give one of them")
        if conditioner not in ("auto", None) and not callable(conditioner):
            raise SparsityError(
                "conditioner must be 'auto', None or a function (optimizer, parameter) -> diagonal, got "
                f"{conditioner!r}"
            )
        super().__init__(sparsity_level, nnz=nnz, **structure)
        if strength is not None:
            self.defaults |= {"strength": checked_strength(strength, ""), "sparsity_level": 0.0}
        self._has_default = has_budget or strength is not None
        self.conditioner: Conditioner = conditioner
        self.iteration = 0
        self._moved = MovedParameters()
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Register the optimizer or optimizers whose learning rates and diagonals `step` reads."""
        optimizers = unwrap_optimizers(optimizer)
        super().attach(optimizers)
        if self._phase == "prepared":
            check_optimizers(optimizers, parameters_of(self.groups), self.conditioner)
        self._moved.attach(optimizers)

    def step(self, use_path: bool = True) -> None:
        """Apply the proximal operator to every tensor that its optimizer has moved since the last call.

        Coupled tensors are shrunk once the optimizer has moved all of them, and thus never if one of them has no
        gradient. The call does nothing while `enable_mask_update` is False.

        Raises:
            SparsityError: No optimizer is attached, and the strength or the conditioner needs one.
        """
        self.require_prepared("step")
        needs_optimizer = self.conditioner is not None or any(g.get("strength") is not None for g in self.groups)
        if needs_optimizer and not self._moved.optimizers:
            raise SparsityError(
                "step: the learning rate is needed, but no optimizer is attached; call sparsifier.attach(optimizer)"
            )
        chosen_at, iteration = self.mask_levels, self.iteration
        super().step(use_path)
        if iteration == self.iteration:
            self.mask_levels = chosen_at

    def update_mask(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error, since a proximal step changes weights and has no mask to update."""
        raise SparsityError("update_mask: a proximal step changes weights; call step(), or use a ScopeSparsifier")

    def to_masks(self, sparsifier: BudgetSparsifier | None = None) -> BudgetSparsifier:
        """Turn the zeros into masks of another sparsifier, with the same structure, and end this one.

        Args:
            sparsifier: A sparsifier that is not prepared yet. None (default) is a new `ScopeSparsifier`. A
                `ScopeSparsifier` takes the zeros as masks that stay as they are (`enable_mask_update` is False), and
                their counts as budgets; a `DynamicSparsifier` with `init="resume"` starts from these masks and changes
                them from now on.

        Returns:
            The other sparsifier, prepared on the model.

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> proximal = ProximalSparsifier(nnz=2, conditioner=None, scope_shape=(1, -1))
        >>> proximal.prepare(model); proximal.step()
        >>> masks = proximal.to_masks()
        >>> int(masks.mask("0.weight").sum()), masks.check()
        (8, 4)
        """
        model = self.require_prepared("to_masks")
        target = checked_target(sparsifier)
        is_fixed = isinstance(target, ScopeSparsifier)
        masks = {g["tensor_fqn"]: self.live_mask(g) for g in self.groups}
        named = groups_by_name(self.groups)
        entries = {n: {k: g[k] for k in GROUP_KEYS if g.get(k) is not None and g[k] != ()} for n, g in named.items()}
        for pruning in self.pruning_groups() if is_fixed else ():
            if "stages" not in entries[next(iter(pruning.specs))]:
                count = kept_counts(pruning, masks)
                for name in pruning.specs:
                    entries[name]["nnz"] = count
        self._squash(model)
        target.prepare(model, list(entries.values()))
        if is_fixed:
            for group in target.groups:
                target.mask(group["tensor_fqn"]).copy_(masks[group["tensor_fqn"]])
            target.enable_mask_update = False
            target.mask_levels = [g["sparsity_level"] for g in target.groups]
        self._end()
        return target

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state, and continue the schedule of the strength at the step where the state was saved."""
        self.require_prepared("load_state_dict")
        iteration, names = saved_count(state_dict, "iteration", 0), [g["tensor_fqn"] for g in self.groups]
        stepped = state_dict.get("stepped", []) if isinstance(state_dict, Mapping) else []
        if not isinstance(stepped, list) or any(name not in names for name in stepped):
            raise SparsityError(
                f"load_state_dict: 'stepped' must be a list of names of tensors in the config, got {stepped!r}"
            )
        super().load_state_dict(state_dict, strict)
        self.iteration = iteration
        self._moved.restore(stepped)

    def _extra_state(self) -> dict[str, Any]:
        stepped = self._moved.stepped(parameters_of(self.groups)) if self._phase == "prepared" else []
        return {**super()._extra_state(), "iteration": self.iteration, "stepped": stepped}

    def _complete(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        defaults = copied(self.defaults)
        pattern = checked_pattern(entry.get("pattern"), place.where)
        has_budget = bool(refuse_two_budgets(entry, place.where)) or getattr(pattern, "budget_key", None) is not None
        if entry.get("strength") is not None:
            checked_strength(entry["strength"], place.where)
            defaults = {k: v for k, v in defaults.items() if k != "nnz"}
        elif has_budget:
            defaults = {k: v for k, v in defaults.items() if k != "strength"}
        group = merged(defaults, entry, place, self.keys)
        has_budget = has_budget or any(s.budget for s in stages_of({"tensor_fqn": place.tensor_fqn, **group}))
        if group.get("strength") is not None:
            if has_budget:
                raise SparsityError(f"{place.where}strength and a budget are mutually exclusive: both say what is kept")
            return {**group, "sparsity_level": 0.0}
        if not (self._has_default or has_budget):
            raise SparsityError(
                f"{place.where}how much to drop is missing; give strength, sparsity_level or nnz, here or as a default"
            )
        return {k: v for k, v in group.items() if k != "strength"}

    def _check_fit(self, group: TensorGroup) -> None:
        super()._check_fit(group)
        fqn, module, name = group["tensor_fqn"], group["module"], group["tensor_name"]
        if parametrize.is_parametrized(module, name):
            raise SparsityError(
                f"{fqn}: a parametrization computes this weight, so it cannot be changed in place. Remove the "
                "parametrization first (squash_mask for a mask), or leave the tensor out (exclude=[...])."
            )
        if is_sharded(module._parameters[name]):
            raise SparsityError(
                f"{fqn}: it is sharded over ranks, and proximal steps need whole tensors. Use "
                "DistributedDataParallel, or ScopeSparsifier, which works on sharded weights."
            )
        if group.get("strength") is not None and group["sparsity_level"] != 0:
            raise SparsityError(
                f"{fqn}: sparsity_level was set to {group['sparsity_level']}, but this tensor has a strength, and "
                "no budget. Give it a sparsity_level in place of the strength, or leave it out of the scheduler."
            )

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        super()._check_groups(groups)
        named = groups_by_name(groups)
        for pruning in self.pruning_groups(groups):
            strengths = [named[name].get("strength") for name in pruning.specs]
            if any(strength != strengths[0] for strength in strengths):
                raise CouplingError(f"{pruning.label}: members need the same strength, got {strengths}")

    def _after_prepare(self) -> None:
        super()._after_prepare()
        self.iteration = 0
        self._moved.restore(())
        if self._moved.optimizers:
            check_optimizers(self._moved.optimizers, parameters_of(self.groups), self.conditioner)

    def _sync_state(self, groups: Sequence[TensorGroup] | None = None) -> None:
        for group in self.groups if groups is None else groups:
            self.live_mask(group)

    def live_mask(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        """Return what the last step kept, a bool mask on the weight's device. Before the first step it is all True."""
        state, weight = self._state[group["tensor_fqn"]], self._parameter(group)
        mask = state.get("mask")
        if mask is None or mask.is_meta:
            mask = torch.ones_like(weight, dtype=torch.bool, requires_grad=False)
        state["mask"] = mask.to(weight.device)
        return state["mask"]

    def _parameter(self, group: TensorGroup, model: nn.Module | None = None) -> nn.Parameter:
        return self._module_in(model, group)._parameters[group["tensor_name"]]  # type: ignore[return-value]

    def _squash(self, model: nn.Module) -> None:
        """Write zeros into the blocks that the last step dropped, also where the optimizer has moved them since."""
        for group in self.groups:
            weight = self._parameter(group, model).detach()
            weight.masked_fill_(~self.live_mask(group).to(weight.device), 0)

    def check(self, model: nn.Module | None = None) -> int:
        """Verify that every scope keeps its budget, as `ScopeSparsifier.check` does."""
        try:
            return super().check(model)
        except SparsityError as e:
            whole = [g["tensor_fqn"] for g in self.groups if g["sparsity_level"] and self.live_mask(g).all()]
            whole = [name for name in whole if name in str(e)] or whole  # the error may name a coupling
            if not self.iteration or not whole:
                raise
            raise SparsityError(
                f"{e}\n{', '.join(whole[:5])} had no step yet: without a gradient (as in a layer that is not used) no "
                "optimizer moves a weight, and no step shrinks it. Leave it out of prepare (exclude=[...])."
            ) from None

    def _miscounted(self) -> str:
        return ""  # a step may leave a block out, and a strength has no budget

    def _end(self) -> None:
        super()._end()
        self._moved.attach([])

    def _update_all(self) -> None:
        self._check_groups(self.groups)
        pruning_groups, weights = self.pruning_groups(), parameters_of(self.groups)
        if self._moved.optimizers:  # without optimizers every call shrinks
            stepped = set(self._moved.stepped(weights))
            if changed := self._moved.changed_by_others(weights):
                warn(
                    f"step: {changed[0]} was changed, but not by an attached optimizer, so it is not shrunk; call "
                    "sparsifier.attach with the optimizers that train the model now",
                )
            pruning_groups = tuple(pruning for pruning in pruning_groups if stepped.issuperset(pruning.specs))
        if pruning_groups:
            self._update_groups(pruning_groups, groups_by_name(self.groups))
            self.iteration += 1

    def _fill(
        self, keeps: Mapping[PruningGroup, Budget], groups: Mapping[str, TensorGroup], masks: Mapping[str, Tensor]
    ) -> None:
        for pruning, keep in keeps.items():
            weights = parameters_of([groups[name] for name in pruning.specs])
            metric = diagonals_of(self._moved.optimizers, weights, self.conditioner)
            diagonals = {pruning.specs[name]: diagonal for name, diagonal in metric.items() if diagonal is not None}
            if len(diagonals) == len(metric):  # else the optimizer has not moved some tensor yet
                strength = groups[next(iter(pruning.specs))].get("strength")
                if strength is not None:
                    strength = strength(self.iteration) if callable(strength) else strength
                    strength = checked_strength(strength, f"{pruning.label}: ", is_value=True)
                _shrink(pruning, weights, masks, diagonals, keep, strength)
            self._moved.use(weights)


def parameters_of(groups: Sequence[TensorGroup]) -> dict[str, nn.Parameter]:
    """Return the parameters of groups, by name."""
    return {g["tensor_fqn"]: g["module"]._parameters[g["tensor_name"]] for g in groups}


def check_optimizers(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], conditioner: Conditioner
) -> None:
    """Raise an error unless an optimizer trains each parameter and `conditioner` can find its diagonal."""
    for name, parameter in parameters.items():
        check_optimizer(optimizers[trainer_of(optimizers, parameter, name)], conditioner, name)


def diagonals_of(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter], conditioner: Conditioner
) -> dict[str, Diagonal | None]:
    """Return the metric D of each parameter: 1 without optimizers, None if its optimizer has not moved it yet."""
    if not optimizers:
        return dict.fromkeys(parameters, 1.0)
    trainers = {name: optimizers[trainer_of(optimizers, p, name)] for name, p in parameters.items()}
    return {name: diagonal_of(trainers[name], p, conditioner, name) for name, p in parameters.items()}


def checked_target(sparsifier: BudgetSparsifier | None) -> BudgetSparsifier:
    """Return the sparsifier that turns zeros into masks, by default a new one, or raise an error if it cannot."""
    target = ScopeSparsifier() if sparsifier is None else sparsifier
    if not isinstance(target, BudgetSparsifier) or target.model is not None:
        raise SparsityError(
            f"to_masks takes a ScopeSparsifier or a DynamicSparsifier that is not prepared yet, got {target!r}"
        )
    init = getattr(target, "init", None)
    if not isinstance(target, ScopeSparsifier) and getattr(init, "masks", None) is None:
        raise SparsityError(
            f"to_masks: {type(target).__name__} would choose masks of its own; make a DynamicSparsifier with "
            'init="resume", which starts from the zeros'
        )
    return target


def _shrink(
    pruning: PruningGroup,
    parameters: Mapping[str, Tensor],
    all_masks: Mapping[str, Tensor],
    diagonals: Mapping[BlockSpec, Diagonal],
    keep: Budget,
    strength: float | None,
) -> None:
    """Shrink blocks in the metric `diagonals`, by a budget or a strength, and set masks to those that are not zero."""
    weights = {spec: parameters[name].detach() for name, spec in pruning.specs.items()}
    masks = {spec: all_masks[name] for name, spec in pruning.specs.items()}
    common = next(iter(diagonals.values()))  # one number for all elements gives the plain operator
    is_plain = isinstance(common, float) and all(isinstance(d, float) and d == common for d in diagonals.values())
    tensors = {
        spec: d if isinstance(d, Tensor) else weights[spec].new_full(weights[spec].shape, d, dtype=torch.float64)
        for spec, d in (() if is_plain else diagonals.items())
    }
    thresholds: dict[Any, Any]
    if strength is not None:
        thresholds = {m.block: strength / common if is_plain else strength for m in pruning.scope.members()}
    else:
        values = {s.view.param: w if is_plain else w * tensors[s] for s, w in weights.items()}
        thresholds = pruning.scope.keep_thresholds(keep, values)
        if any(w.dtype == torch.float16 for w in weights.values()):  # kept blocks must not be rounded to zero
            thresholds = {b: torch.where(t.isinf(), t, t * (1 - 2**-8)) for b, t in thresholds.items()}
    for block, threshold in thresholds.items():
        specs = block.blocks()
        windows = block_windows(block, {s.view.param: weights[s] for s in specs}, masks)
        metric = windows if is_plain else block_windows(block, {s.view.param: tensors[s] for s in specs})
        shrunk = [replace(w, mask=None if is_plain else h.values) for w, h in zip(windows, metric, strict=True)]
        scopes, by_mean = [ScopeWindows(windows=tuple(shrunk), shape=(1,) * block.grid_ndim)], pruning.scope.as_mean
        soft_threshold_windows(scopes, threshold, scale=strength is None and by_mean)
        values_alone = [replace(w, mask=None) for w in windows]
        fill_mask(windows, block_scores(values_alone, math.inf, block.grid_ndim, False) != 0)
        for spec, window in zip(specs, windows, strict=True):
            spec.view.write_back(window.window, weights[spec])
            spec.view.write_back(window.mask, masks[spec])


def checked_strength(strength: Any, where: str, *, is_value: bool = False) -> Any:
    """Return the strength. Raise an error unless it is a finite number >= 0 or, without `is_value`, a schedule."""
    if (is_schedule(strength) and not is_value) or (is_number(strength) and 0 <= float(strength) < math.inf):
        return strength
    what = "the schedule of the strength must return" if is_value else "strength must be a schedule or"
    raise SparsityError(f"{where}{what} a finite number >= 0, got {strength!r}")


def kept_counts(pruning: PruningGroup, masks: Mapping[str, Tensor]) -> Budget:
    """Return how many blocks masks keep in each scope: an int if the number is the same in all scopes."""
    counts = counts_in_scopes(pruning.scope, {spec: masks[name] for name, spec in pruning.specs.items()}).cpu()
    first = int(counts.flatten()[0]) if counts.numel() else 0
    return first if bool((counts == first).all()) else counts
