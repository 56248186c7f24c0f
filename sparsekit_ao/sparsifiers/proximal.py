"""ProximalSparsifier: training with a penalty of block norms, by a proximal step after each step of the optimizer.

Weights stay plain parameters, which the proximal operator changes in place; no mask is registered. What a step keeps is
remembered as masks, for `squash_mask`, for checkpoints and for `to_masks`, which hands the zeros over.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..distributed import is_sharded
from ..errors import CouplingError, SparsityError
from ..masking import WeightMask
from .checkpoint import saved_count, saved_names
from .component import Component
from .config import Place, TensorGroup
from .hand_over import handed_over
from .optimizer_state import (
    Conditioner,
    Diagonal,
    StepCounts,
    check_conditioner,
    check_optimizer,
    diagonal_of,
    options_of,
    unwrap_optimizers,
)
from .planned import PlannedSparsifier
from .proximal_step import Strength, checked_strength, proximal_step
from .structure import checked_pattern, refuse_two_budgets, stage_budgets


@final
class ProximalSparsifier(PlannedSparsifier):
    """Group lasso on any structure: `step()` after `optimizer.step()` shrinks blocks, and makes small ones zero.

    The step is the proximal operator of `strength * sum of ||block||_2` in the metric D of the optimizer,
    `argmin_w 1/2 (w - v)' D (w - v) + strength * sum ||block||`, with its learning rate as step size: for SGD `D = 1 /
    lr` (Yuan and Lin 2006), for Adam `D = (sqrt(exp_avg_sq / (1 - beta2^t)) + eps) / lr`, so that blocks with small
    gradients are dropped first. With a budget instead, the strength is the one that leaves exactly that many blocks in
    every scope (the mean of the last kept and the first dropped norm ||D v||).

    A step that the optimizer has not taken (gradient accumulation, `GradScaler`, a tensor without gradient) is none
    here either. Weights are plain parameters. Sharded ones (DTensor) are refused; under DistributedDataParallel every
    rank computes the same.

    Args:
        strength: >= 0: a number, or a function of the number of steps so far, such as `schedules.linear`. An entry
            of the config may give its own.
        sparsity_level, nnz: instead, the fraction of blocks dropped, or the number kept, in each scope. Schedulers
            change the level.
        optimizer: what trains the sparsified parameters, or several; or `attach` it later. Budgets with
            `conditioner=None` need none.
        conditioner: "auto" (SGD, Adam, AdamW, RMSprop, Adagrad); None for `D = 1 / lr` with any optimizer; or a
            function `(optimizer, parameter) -> D`, positive, a number or of the parameter's shape.
        structure: pattern, block_shape, scope_shape, view, axes, unit, scope, sizes, edge, block_coupling,
            coupling_order, scope_coupling, stages: as for `ScopeSparsifier`.

    Raises:
        SparsityError: arguments that contradict each other; whatever needs a tensor is checked in `prepare`.

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
        k: v for k, v in PlannedSparsifier.structure_defaults.items() if k not in ("norm", "score", "member_scores")
    }
    optional_keys = (*PlannedSparsifier.optional_keys, "strength")

    def __init__(
        self,
        *,
        strength: Strength | None = None,
        sparsity_level: float | None = None,
        nnz: int | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        conditioner: Conditioner = "auto",
        **structure: Any,
    ) -> None:
        pattern = checked_pattern(structure.get("pattern"), "")
        has_budget = (
            sparsity_level is not None or nnz is not None or (pattern is not None and pattern.budget is not None)
        )
        if strength is not None and has_budget:
            raise SparsityError("strength and a budget (sparsity_level, nnz or a pattern's) are mutually exclusive")
        check_conditioner(conditioner)
        super().__init__(sparsity_level, nnz=nnz, **structure)
        if strength is not None:
            self.defaults |= {"strength": checked_strength(strength, ""), "sparsity_level": 0.0}
        self._has_default = has_budget or strength is not None
        self.conditioner: Conditioner = conditioner
        self.iteration = 0
        self._counts = StepCounts()
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Read learning rates and diagonals of the optimizer, or of several, that train the sparsified parameters."""
        found = unwrap_optimizers(optimizer)
        super().attach(found)
        before, self._counts = self._counts, StepCounts()
        try:
            self._counts.attach(found)
            if self._phase == "prepared":
                self._check_optimizers()
        except SparsityError:
            self._counts.attach([])
            self._counts = before
            raise
        before.attach([])
        self._counts.restore(before.restored())

    def step(self, use_path: bool = True) -> None:
        """Apply the proximal operator to every tensor that its optimizer has moved since the last call.

        Coupled tensors are shrunk once all of them were moved, so never while one of them has no gradients.
        Does nothing while `enable_mask_update` is False.

        Raises:
            SparsityError: no optimizer is attached, and the strength or the conditioner needs one.
        """
        self._need_prepared("step")
        if not self._counts.optimizers and self._needs_optimizer():
            raise SparsityError(
                "step: the learning rate and the diagonal are the optimizer's; call sparsifier.attach(optimizer) first"
            )
        before = self._chosen_at, self.iteration
        super().step(use_path)
        if before[1] == self.iteration:
            self._chosen_at = before[0]

    def to_masks(self, sparsifier: PlannedSparsifier | None = None) -> PlannedSparsifier:
        """Hand the zeros over as masks of another sparsifier, with the same structure; this one ends.

        Args:
            sparsifier: not prepared yet. None, or a `ScopeSparsifier`, gets the zeros as masks that stay
                (`enable_mask_update` is False) and their counts as budgets; a `DynamicSparsifier` with `init="resume"`
                moves them from now on.

        Returns:
            The other sparsifier, prepared on the model.

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> proximal = ProximalSparsifier(nnz=2, conditioner=None, scope_shape=(1, -1))
        >>> proximal.prepare(model); proximal.step()
        >>> masks = proximal.to_masks()
        >>> int(masks.mask("0.weight").sum()), masks.check()
        (8, 4)
        """
        self._need_prepared("to_masks")
        plan, masks = self._planned(self.groups), {g["tensor_fqn"]: self._live_mask(g) for g in self.groups}
        assert self.model is not None
        found = handed_over(self.model, self.groups, plan, masks, sparsifier, lambda: self._zero_dropped(None))
        self._end()
        return found

    def state_dict(self) -> dict[str, Any]:
        """What the last step kept, groups, the number of steps, and tensors whose optimizer has stepped since then."""
        return {**super().state_dict(), **self._position()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue where `state_dict` was saved, at that position of the strength's schedule."""
        self._need_prepared("load_state_dict")
        iteration, stepped = saved_count(state_dict, "iteration", 0), saved_names(state_dict, "stepped", self.groups)
        super().load_state_dict(state_dict, strict)
        self.iteration = iteration
        self._counts.restore(stepped)

    def _pickled(self) -> dict[str, Any]:
        return {**super()._pickled(), **self._position()}

    def _position(self) -> dict[str, Any]:
        is_prepared = self._phase == "prepared"
        stepped = self._counts.stepped(self._parameters(self.groups)) if is_prepared else self._counts.restored()
        return {"iteration": self.iteration, "stepped": stepped}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the optimizers, which belong to the user."""
        counts = StepCounts()
        counts.restore(self._position()["stepped"])
        return {**super().__getstate__(), "_counts": counts}

    def _over(self, defaults: dict[str, Any], own: dict[str, Any], place: Place) -> dict[str, Any]:
        pattern = checked_pattern(own.get("pattern"), place.where)
        has_budget = bool(refuse_two_budgets(own, place.where)) or getattr(pattern, "budget", None) is not None
        strength = own.get("strength")
        if strength is not None:
            checked_strength(strength, place.where)
            defaults = {k: v for k, v in defaults.items() if k != "nnz"}
        elif has_budget:
            defaults = {k: v for k, v in defaults.items() if k != "strength"}
        group = super()._over(defaults, own, place)
        budgets = has_budget or any(budget is not None for budget in stage_budgets(group))
        if group.get("strength") is None:
            group.pop("strength", None)
            if not (self._has_default or budgets):
                raise SparsityError(f"{place.where}give strength, sparsity_level or nnz, here or as a default")
            return group
        if budgets:
            raise SparsityError(f"{place.where}strength and a budget are mutually exclusive: both specify what is kept")
        return {**group, "sparsity_level": 0.0}

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        for group in groups:
            fqn, module, name = group["tensor_fqn"], group["module"], group["tensor_name"]
            if parametrize.is_parametrized(module, name):
                raise SparsityError(
                    f"{fqn}: a parametrization computes this weight, so it cannot be changed in place. Remove that one "
                    "first (squash_mask for a mask), or leave the tensor out."
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
        super()._check_groups(groups)
        for component in self._planned(groups).components:
            given = [groups[at].get("strength") for _, at in component.leaves]
            if any(s is not given[0] and s != given[0] for s in given):
                raise CouplingError(f"{component.label}: members need the same strength, got {given}")

    def _new_masks(self, groups: Sequence[TensorGroup]) -> list[tuple[nn.Module, str, WeightMask]]:
        return []

    def _after_prepare(self) -> None:
        if not self._resumes:
            self.iteration = 0
            self._counts.restore(())
        if self._counts.optimizers:
            self._check_optimizers()

    def _sync_state(self) -> None:
        for group in self.groups:
            if group.get("module") is not None:
                self._live_mask(group)

    def _live_mask(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        """What the last step kept, bool of the tensor's shape on its device; all True before."""
        state, weight = self._state[group["tensor_fqn"]], self._parameter(group)
        mask = state.get("mask")
        if mask is None or mask.is_meta:
            mask = torch.ones_like(weight, dtype=torch.bool, requires_grad=False)
        state["mask"] = mask.to(weight.device)
        return state["mask"]

    def _parameter(self, group: TensorGroup, model: nn.Module | None = None) -> nn.Parameter:
        found = self._module_in(model, group)._parameters[group["tensor_name"]]
        assert found is not None
        return found

    def _squash(self, model: nn.Module, kept: Sequence[Mapping[str, Any]]) -> None:
        """Write zeros into the blocks that the last step dropped, also where the optimizer has moved them since."""
        self._zero_dropped(model)
        for group, params in zip(self.groups, kept, strict=True):
            if params:
                self._module_in(model, group).sparse_params = params  # type: ignore[assignment]

    def _end(self) -> None:
        super()._end()
        self._counts.attach([])

    def _zero_dropped(self, model: nn.Module | None) -> None:
        for group in self.groups:
            weight = self._parameter(group, model).detach()
            weight.masked_fill_(~self._live_mask(group).to(weight.device), 0)

    def _needs_optimizer(self) -> bool:
        return self.conditioner is not None or any(g.get("strength") is not None for g in self.groups)

    def _check_optimizers(self) -> None:
        for group in self.groups:
            at = self._counts.trainer_of(self._parameter(group), group["tensor_fqn"])
            check_optimizer(self._counts.optimizers[at], self.conditioner, group["tensor_fqn"])

    def _update_all(self) -> None:
        self._check_groups(self.groups)
        components = self._planned(self.groups).components
        if self._counts.optimizers:  # else every call is a step
            stepped = set(self._counts.stepped(self._parameters(self.groups)))
            own = [{self.groups[at]["tensor_fqn"] for _, at in c.leaves} for c in components]
            components = tuple(c for c, names in zip(components, own, strict=True) if names <= stepped)
        if components:
            self._update_components(components, self.groups)
            self.iteration += 1

    def _parameters(self, groups: Iterable[TensorGroup]) -> dict[str, Tensor]:
        return {g["tensor_fqn"]: self._parameter(g) for g in groups}

    def _choose(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> None:
        for component in components:
            own = {leaf: groups[at] for leaf, at in component.leaves}
            diagonals = {leaf: self._diagonal(g) for leaf, g in own.items()}
            known = {leaf: d for leaf, d in diagonals.items() if d is not None}
            strength = groups[component.leaves[0][1]].get("strength")
            if len(known) == len(own):  # else the optimizer has not moved some member yet
                proximal_step(
                    component,
                    {leaf: self._parameter(g).detach() for leaf, g in own.items()},
                    known,
                    {leaf: self._live_mask(g) for leaf, g in own.items()},
                    strength=None if strength is None else self._value(strength, component.label),
                    keep=component.budget(groups, self._level_given),
                )
            self._counts.use(self._parameters(own.values()))

    def _diagonal(self, group: TensorGroup) -> Diagonal | None:
        """The metric of a tensor; None where its optimizer changes nothing."""
        if not self._counts.optimizers:
            return 1.0
        parameter, name = self._parameter(group), group["tensor_fqn"]
        optimizer = self._counts.optimizers[self._counts.trainer_of(parameter, name)]
        options = options_of(optimizer, parameter)
        assert options is not None
        return diagonal_of(optimizer, parameter, options, self.conditioner, name)

    def _value(self, strength: Strength, name: str) -> float:
        """The strength at this step; raises where a schedule returns no number >= 0."""
        return checked_strength(
            strength(self.iteration) if callable(strength) else strength, f"{name}: ", is_value=True
        )
