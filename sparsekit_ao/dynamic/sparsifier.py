"""DynamicSparsifier: masks that move while training goes on, at constant cost, through torch.ao's interface.

`step()` counts iterations and says when; what happens in an update is `update`'s, which gradients it sees
`gradients`', and where it starts `inits`' business.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..config import Group
from ..errors import SparsityError
from ..plan import Component
from ..select import select
from ..sparsifier import ScopeSparsifier
from .budgets import budget_rows, is_fixed, overall_level, refuse_two, set_budget, sizes
from .choice import choose
from .gradients import GradientTap, check_optimizers, original
from .masking import DynamicMask
from .movement import Movement, move
from .settings import NewValues, make_settings
from .slots import Slots
from .start import refuse_parametrized, start_masks
from .update import Part

__all__ = ["DynamicSparsifier"]


class DynamicSparsifier(ScopeSparsifier):
    """Train sparse from the start: every so often drop the weakest active blocks and grow others.

    The loop is torch.ao's, `loss.backward(); optimizer.step(); sparsifier.step()`, with one `sparsifier.step()` for
    each `optimizer.step()`. Every scope holds exactly its budget after every update. Dropped weights are zero, and new
    ones start from zero, with no memory in the optimizer; one that is dropped and grown again at once stays.

    An entry of the config that gives `sparsity_level` or `nnz` fixes the budget of its tensors; the others share the
    overall one, and a tensor of several scopes gets the same number of blocks in each (constant fan-in, N:M).

    Args:
        optimizer: the optimizer, or several, that train the sparsified parameters; or `attach` it later.
        sparsity_level: the overall fraction dropped, which `init` distributes over the tensors; 0.9 by default.
        nnz: instead, blocks kept in each scope of every tensor.
        init: "erk", "er", "uniform", "random" (as uniform), "resume", or from `inits`.
        update_every: iterations from one update to the next; None for masks that never change.
        update_fraction: iteration -> fraction of the active blocks that an update replaces, in [0, 1); or a number.
        until: the last iteration that may update; None for no end.
        prune: "magnitude", "global", or from `prune`.
        grow: "gradient", "momentum", "random", None, or from `grow`.
        redistribute: "gradient", "momentum", "nonzero", None, or from `redistribute`.
        target: iteration -> overall sparsity, instead of `sparsity_level`: budgets follow it at every update.
        seed: what random choices are keyed by, with tensor name, iteration and purpose.
        state_init: what the optimizer's second moment of a new weight starts from: "zero", or "grad" for the squared
            gradient, which spares Adam a first step several times too long.
        new_values: (weight, generator) -> values of the weight's shape that new weights take; zeros by default.
        structure: block_shape, scope_shape, view, norm, edge, block_coupling, coupling_order, scope_coupling: as for
            `ScopeSparsifier`.

    Raises:
        SparsityError: arguments that do not go together; whatever needs a tensor is checked in `prepare`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sparsifier = DynamicSparsifier(optimizer, 0.75, init="uniform", update_every=2, update_fraction=0.5)
    >>> sparsifier.prepare(model, None)
    >>> for _ in range(4):
    ...     model(torch.ones(1, 8)).sum().backward()
    ...     optimizer.step()
    ...     sparsifier.step()
    >>> sparsifier.check(), int(sparsifier.mask("0.weight").sum()), sparsifier.last_update.iteration
    (2, 12, 4)
    """

    optional_keys = tuple(k for k in ScopeSparsifier.optional_keys if k != "stages")

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        sparsity_level: float | None = None,
        *,
        nnz: int | None = None,
        init: Any = "erk",
        update_every: int | None = 100,
        update_fraction: Any = 0.3,
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
        when, rules = (update_every, update_fraction, until), (prune, grow, redistribute)
        self.settings = make_settings(init, *when, *rules, target, seed, state_init, new_values)
        refuse_two(self.settings, sparsity_level, nnz)
        if sparsity_level is None and nnz is None:
            sparsity_level = overall_level(self.settings, 0.9, 0)
        if "stages" in structure:
            raise SparsityError("stages: masks that move are chosen in one stage; leave stages out")
        super().__init__(sparsity_level, nnz=nnz, **structure)
        self.iteration = 0
        self.last_update: Movement | None = None
        self._pending = False
        self._resumes = False
        self._starts: dict[str, Tensor] = {}
        self._tap = GradientTap()
        if optimizer is not None:
            self.attach(optimizer)

    # -- what users call --------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Watch the steps of the optimizer, or of several, that train the sparsified parameters."""
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if not optimizers:
            raise SparsityError("attach: no optimizer given")
        check_optimizers(optimizers, self.groups, self.settings.needs_momentum)
        self._tap.attach(optimizers)

    def take_gradients(self) -> None:
        """Copy dense gradients aside and mask `.grad`: call it before clipping gradients by their norm.

        After the last backward of an iteration and after unscaling (`scaler.unscale_`). In iterations that feed no
        update it does nothing. Without it the optimizer's step does the same by itself.
        """
        self._need_prepared("take_gradients")
        self._tap.take()

    def prepare(self, model: nn.Module, config: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Put the initial masks on, in place, and zero the weights that they drop; see `ScopeSparsifier.prepare`.

        Raises:
            SparsityError: anything that does not fit; the model is then unchanged.
        """
        self._resumes = self._phase == "detached" and config is None
        super().prepare(model, config)
        self._tap.watch(self.groups)
        self._starts = {}
        if not self._resumes:
            self.iteration, self._pending, self.last_update = 0, False, None
            with torch.no_grad():
                self._zero_dropped()
        self._set_gates()

    def step(self, use_path: bool = True) -> None:
        """Count one training iteration, after the optimizer's step; update the masks if an update is due.

        An update waits for the next iteration while an optimizer skipped its step (gradient scaling) or a gradient
        that it needs is missing or not finite. While `enable_mask_update` is False there is none.
        """
        self._need_prepared("step")
        if self.settings.updates and not self._tap.optimizers:
            raise SparsityError("step: no optimizer to take gradients from; call sparsifier.attach(optimizer) first")
        self.iteration += 1
        with torch.no_grad():
            if self.enable_mask_update:
                self._update_if_due()
            if not self._tap.masked:  # momentum moved weights that the mask hides
                self._zero_dropped()
        self._tap.clear()
        self._set_gates()

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Refused: weights, optimizer state and the masks of all tensors move together, in `step`."""
        raise SparsityError("update_mask: a dynamic sparsifier moves all its masks together; call step()")

    def squash_mask(self, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Write zeros into the parameters and take masks and hooks away; see `MaskSparsifier.squash_mask`."""
        super().squash_mask(*args, model=model, **kwargs)
        if self._phase == "squashed":
            self._tap.detach()

    def state_dict(self) -> dict[str, Any]:
        """Masks, groups, and where in its schedule training is; see `MaskSparsifier.state_dict`."""
        return {**super().state_dict(), "dynamic": self._progress()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on exactly where `state_dict` was taken, in the middle of an update too."""
        if not isinstance(state_dict, Mapping) or "dynamic" not in state_dict:
            raise SparsityError("load_state_dict: this state is not a dynamic sparsifier's; it has no 'dynamic' entry")
        super().load_state_dict(state_dict, strict)
        saved = state_dict["dynamic"]
        self.iteration, self._pending = saved["iteration"], saved["pending"]
        self._level_given = {**self._level_given, **saved["level_given"]}
        self._tap.gradients = {fqn: g.clone() for fqn, g in saved["gradients"].items()}
        if len(saved["stepped"]) == len(self._tap.stepped):
            self._tap.stepped = list(saved["stepped"])
        self._set_gates()

    # -- prepare, filled in -----------------------------------------------------------------------------------------

    def _complete(self, own: dict[str, Any], where: str) -> dict[str, Any]:
        budgeted = [k for k in ("sparsity_level", "nnz") if own.get(k) is not None]
        return {**super()._complete(own, where), "fixed": bool(budgeted) or "nnz" in self.defaults}

    def _check_groups(self, groups: Sequence[Group]) -> None:
        if self._phase != "prepared":
            refuse_parametrized(groups)
            if self._tap.optimizers:
                check_optimizers(self._tap.optimizers, groups, self.settings.needs_momentum)
            if not self._resumes:
                weights = [self._dense(g) for g in groups]
                components = self._planned(groups).components
                self._starts = start_masks(components, groups, weights, self.settings, self.defaults["sparsity_level"])
        super()._check_groups(groups)

    def _new_mask(self, group: Group) -> Tensor:
        weight = getattr(group["module"], group["tensor_name"]).detach()
        # in eager mode on CPU a float mask costs what a product does at every size; elsewhere a bool one saves memory
        dtype = weight.dtype if weight.device.type == "cpu" else torch.bool
        start = self._starts.get(group["tensor_fqn"])
        mask = torch.ones_like(weight, dtype=dtype)
        return mask if start is None else mask.copy_(start)

    def _install(self, group: Group) -> None:
        mask = DynamicMask(self._new_mask(group))
        parametrize.register_parametrization(group["module"], group["tensor_name"], mask, unsafe=True)

    # -- one iteration ----------------------------------------------------------------------------------------------

    def _set_gates(self) -> None:
        """Open masks if the coming iteration feeds an update, or always where rules look at momentum."""
        s, coming = self.settings, self.iteration + 1
        feeds = s.is_due(coming) or (self._pending and s.may_update(coming))
        always = s.needs_momentum and s.may_update(coming)
        self._tap.set_gates(always or (feeds and s.needs_gradient), keep=feeds, masked=not always)

    def _zero_dropped(self) -> None:
        for group in self.groups:
            weight = original(group).detach()
            weight.copy_(select(weight, self._live_mask(group)))

    def _update_if_due(self) -> None:
        s = self.settings
        if s.is_due(self.iteration):
            if self._pending:
                warnings.warn(
                    f"the mask update due in iteration {self.iteration - (s.update_every or 0)} never happened: an "
                    "optimizer took no step, or a gradient was missing or not finite, in every iteration since",
                    stacklevel=3,
                )
            self._pending = True
        if self._pending and not s.may_update(self.iteration):
            self._pending = False
        if self._pending:
            momenta = self._tap.momenta() if s.needs_momentum else {}
            if self._tap.is_ready(s.needs_gradient, momenta):
                self._update(momenta)
                self._pending = False

    def _update(self, momenta: Mapping[str, Tensor | None]) -> None:
        s, components = self.settings, self._planned(self.groups).components
        fraction = 0.0 if s.grow is None and s.target is not None else float(s.update_fraction(self.iteration))
        parts = [self._part(c, n, momenta) for c, n in zip(components, sizes(components), strict=True)]
        rows, held = choose(parts, s, self.groups, self.iteration, fraction)
        new = [self._live_mask(g) != 0 for g in self.groups]
        for part, kept in zip(parts, rows, strict=True):
            part.slots.write(kept, {spec: new[at] for spec, at in part.slots.component.leaves})
        self.last_update = move(
            self.groups, new, s, self._tap.optimizers, self._tap.gradients, self.iteration, fraction
        )
        for part, count in zip(parts, held, strict=True):
            if part.is_open:
                self._level_given.update(set_budget(part.slots.component, self.groups, int(count[0])))

    def _part(self, component: Component, size: int, momenta: Mapping[str, Tensor | None]) -> Part:
        names = {spec: self.groups[at]["tensor_fqn"] for spec, at in component.leaves}
        slots = Slots(
            component=component,
            weights={spec: self._dense(self.groups[at]) for spec, at in component.leaves},
            masks={spec: self._live_mask(self.groups[at]) for spec, at in component.leaves},
            gradients={spec: self._tap.gradients[n] for spec, n in names.items() if n in self._tap.gradients},
            momenta={spec: m for spec, n in names.items() if (m := momenta.get(n)) is not None},
            step=self.iteration,
            seed=self.settings.seed,
        )
        budget = budget_rows(component, self.groups, self._level_given).to(slots.active.device)
        return Part(slots=slots, budget=budget, is_open=not is_fixed(component, self.groups), size=size)

    def _progress(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "pending": self._pending,
            "level_given": dict(self._level_given),
            "stepped": list(self._tap.stepped),
            "gradients": {fqn: g.detach().clone() for fqn, g in self._tap.gradients.items()},
        }

    def _pickled(self) -> dict[str, Any]:
        return {**super()._pickled(), "dynamic": self._progress()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tap": GradientTap(), "_starts": {}}
