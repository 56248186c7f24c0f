"""Sparsifiers whose masks are scopes with budgets: `BudgetSparsifier`, their base class, and `ScopeSparsifier`.

At each update, budgets are read from the groups, and weights and masks are passed to the scopes of pruning groups.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..calibration import (
    NEEDS,
    Calibration,
    LayerAdapter,
    Statistics,
    Target,
    adapter_of,
    checked_batches,
    loaded_statistics,
    progress_bar,
    run_batches,
)
from ..errors import SparsityError, refuse_meta_masks
from ..patterns import Pattern
from ..schedules import UpdateInterval
from ..scores import Score, needs_of
from ..selection import Request
from ..structure import checked_level
from .base import MaskSparsifier
from .checkpoint import checked_pass, copied_state, saved_count
from .config import ConfigContext, TensorGroup, copied, hint_of_key
from .groups import (
    PruningGroup,
    batches,
    check_masks,
    connected,
    elements_of,
    is_same,
    kept_in,
    make_pruning_groups,
    refuse_unfit,
    stage_budgets,
    update_masks,
)
from .progress import shown
from .report import Row, make_row
from .stages import (
    AXES,
    GROUP_KEYS,
    SHAPES,
    checked_pattern,
    joined,
    refuse_two_budgets,
    refuse_two_notations,
    stages_of,
)

AT_ONCE = 1 << 25  # elements whose masks are chosen together; limits memory, since they may be copied


class BudgetSparsifier(MaskSparsifier):
    """Masks that keep an exact number of blocks in every scope; see `ScopeSparsifier` for the arguments.

    Subclasses decide when masks change (`_update_all`), and which structure keys they take.

    >>> class Once(BudgetSparsifier):
    ...     def _update_all(self):
    ...         self._update_groups(self._pruning_groups(self.groups), self.groups)
    ...         self.enable_mask_update = False
    >>> sparsifier = Once(0.5)
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> sparsifier.step(); sparsifier.check()
    1
    """

    #: config keys that specify scoring, edges and couplings, with their defaults
    structure_defaults: Mapping[str, Any] = {
        "norm": 2,
        "score": None,
        "edge": "error",
        "block_coupling": None,
        "coupling_order": None,
        "scope_coupling": None,
        "member_scores": "sum",
    }
    optional_keys: tuple[str, ...] = ("nnz", "pattern", "stages", *SHAPES, *AXES)
    bool_masks = True
    _grouped: tuple[Any, tuple[PruningGroup, ...]] | None = None
    _statistics: Mapping[str, Statistics] = {}
    _adapters: Mapping[str, LayerAdapter | None] = {}

    def __init__(self, sparsity_level: float | None = None, *, nnz: int | None = None, **structure: Any) -> None:
        known = (*self.structure_defaults, *self.optional_keys)
        for key in structure:
            if key not in known:
                hint, takes = hint_of_key(key, ("sparsity_level", *known)), ", ".join(sorted(known))
                raise TypeError(f"{type(self).__name__} has no argument {key!r}.{hint} It takes {takes}")
        sparsity_level, nnz, structure = copied(sparsity_level), copied(nnz), copied(structure)
        if isinstance(sparsity_level, Pattern):
            raise SparsityError(f"sparsity_level must be a number, got {sparsity_level}; give a pattern as pattern=")
        if isinstance(sparsity_level, nn.Module):
            name = type(sparsity_level).__name__
            raise SparsityError(
                f"sparsity_level must be a number, got a {name}; give the model to prepare(model, config)"
            )
        pattern = structure["pattern"] = checked_pattern(structure.get("pattern"), "")
        refuse_two_budgets({"sparsity_level": sparsity_level, "nnz": nnz, "pattern": pattern}, "")
        if pattern is not None and pattern.budget_key is not None:
            sparsity_level = pattern.sparsity_level
        arguments = {k: v for k, v in structure.items() if v is not None and v != ()}
        shapes = {"view": None, "block_shape": (), "scope_shape": ()} if pattern is None else {}
        defaults = {
            "sparsity_level": 0.5 if sparsity_level is None else sparsity_level,
            **joined({**shapes, **self.structure_defaults}, arguments, "defaults: "),
            **({} if nnz is None else {"nnz": nnz}),
        }
        super().__init__(defaults)
        stages_of({**defaults, "tensor_fqn": "defaults"})
        checked_level(defaults["sparsity_level"], "defaults: ")

    @abstractmethod
    def _update_all(self) -> None:
        """Update all masks; called under no_grad while `enable_mask_update` is True."""

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Choose the mask of one tensor anew, together with every tensor that it is coupled to.

        Args:
            module, tensor_name: A prepared tensor.
            kwargs: The tensor's group, or any config keys; what differs from the group overrides it, for this call, as
                a config entry overrides defaults.
        """
        self._need_prepared("update_mask")
        is_named = [g["module"] is module and g["tensor_name"] == tensor_name for g in self.groups]
        if True not in is_named:
            raise SparsityError(f"update_mask: {tensor_name!r} of this {type(module).__name__} was not prepared")
        at = is_named.index(True)
        groups = [self._changed(g, kwargs) if i == at else g for i, g in enumerate(self.groups)]
        coupled = connected(self._pruning_groups(groups), len(groups))[at]
        with torch.no_grad():
            self._update_groups(coupled, groups)
            self._after_update([self.groups[i] for i in sorted({i for g in coupled for _, i in g.members})])

    def _changed(self, group: TensorGroup, values: Mapping[str, Any]) -> TensorGroup:
        """The group with other values; those that it has already are no change."""
        changes = {k: v for k, v in values.items() if k not in group or not is_same(v, group[k])}
        self._refuse_unknown(changes, self.keys)
        if not changes:
            return group
        names = {k: group[k] for k in ("module", "module_fqn", "tensor_name", "tensor_fqn")}
        place = ConfigContext(**names, tensor=self._dense(group), where=f"update_mask: {group['tensor_fqn']}: ")
        changed = self._over({k: v for k, v in group.items() if k in self.keys}, changes, place)
        if self._resolve(changes, place).get("nnz") is not None:  # a level that differs would replace it
            changed["level_of_nnz"] = changed["sparsity_level"]
        return {**{k: v for k, v in group.items() if k not in self.keys}, **changed}

    def _structure(self, group: TensorGroup) -> str:
        keys = (*SHAPES, "block_coupling", "coupling_order", "scope_coupling")
        texts = []
        for stage, budget in zip(stages_of(group), stage_budgets(group), strict=True):
            values = [*((k, getattr(stage, k)) for k in keys), *([budget] if budget else [])]
            texts.append(", ".join(f"{k}={v!r}" for k, v in values if v not in (None, ())))
        return " then ".join(text or "single elements over the tensor" for text in texts)

    def _rows(self) -> Iterator[Row]:
        pruning_groups, rules = self._pruning_groups(self.groups), self._resolved.rules
        for at, group in enumerate(shown(self.groups, "report", elements_of(pruning_groups))):
            stages = [g for g in pruning_groups if any(i == at for _, i in g.members)]
            mask, last = self._live_mask(group), stages[-1]
            spec = last.spec(at)
            blocks = kept_in(spec, distributed.full_tensor(mask)), spec.numblk()
            pattern = " then ".join(g.pattern(at) for g in stages)
            key, asked = stage_budgets(group)[last.stage] or ("sparsity_level", group["sparsity_level"])
            asked = asked if key == "sparsity_level" else last.scope.level_of(last.budget(self.groups))
            yield make_row(group, mask, rules, pattern=pattern, asked=asked, blocks=blocks)

    def check(self, model: nn.Module | None = None) -> int:
        """Verify that every scope holds exactly its budget (as the levels are now) and every block is whole.

        With several stages this is required of the last one only. Scopes of earlier stages, and scopes of the last one
        in which an earlier stage may have kept too few elements (not so in V:N:M), hold at most their budget.

        Args:
            model: The prepared model (default), or a deep copy of it. In a squashed one zeros are taken for the mask,
                and a scope may hold less than its budget, since a kept weight may be zero.

        Returns:
            The number of scopes that were checked.

        Raises:
            SparsityError: Naming every tensor with a wrong scope, the first such scope, and its count.
        """
        if self._phase not in ("prepared", "squashed"):
            self._need_prepared("check")
        distributed.reshard(self.model if model is None else model)
        pruning_groups, masks = self._pruning_groups(self.groups, model), self._masks(model)
        refuse_meta_masks("check", self.groups, [mask for mask, _ in masks])
        try:
            return check_masks(pruning_groups, self.groups, masks)
        except SparsityError:
            if self._chosen_at is None and all(is_mask and bool(mask.all()) for mask, is_mask in masks):
                hint = "check: every mask keeps everything, as step was never called; call step() first"
                raise SparsityError(hint) from None
            raise

    def _miscounted(self) -> str:
        try:
            self.check()
        except SparsityError as e:
            first, *others = str(e).removeprefix("masks do not hold their budgets:\n  ").split("\n  ")
            why = "The masks were not chosen at these levels; they may have been loaded with the model"
            advice = "Call step() to choose them anew, or set enable_mask_update = False to keep them"
            return f"{first}{f' (and {len(others)} more)' if others else ''}. {why}. {advice}"
        return ""

    def _complete(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        return self._over(copied(self.defaults), entry, place)

    def _over(self, defaults: dict[str, Any], entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        """An entry's keys over default ones, patterns resolved; its level replaces a default `nnz`."""
        pattern = checked_pattern(entry.get("pattern"), f"{place.tensor_fqn}: ")
        refuse_two_budgets(entry if pattern is None else {**entry, "pattern": pattern}, place.where)
        entry = self._resolve(entry, place)
        budgets = refuse_two_budgets(entry, place.where)  # now with the keys that the pattern gave
        if not {*SHAPES, *AXES, "stages"}.isdisjoint(entry):  # the entry's structure replaces the default one
            defaults = {**defaults, "pattern": None}
            defaults.pop("stages", None)
        pattern = defaults.get("pattern") if pattern is None else pattern
        group = joined(self._resolve(defaults, place), entry, place.where)
        if pattern is not None and pattern.budget_key == "nnz" and group.get("scope_coupling") is not None:
            raise SparsityError(
                f"{place.where}{pattern} keeps a number of every group of elements, but scope_coupling="
                f"{group['scope_coupling']!r} would make groups of several tensors share it; leave out scope_coupling, "
                "or give a sparsity_level without a pattern"
            )
        if budgets == ["sparsity_level"]:
            group.pop("nnz", None)
        if budgets and None not in stage_budgets(group):
            raise SparsityError(
                f"{place.where}{budgets[0]} has no effect, because every stage has a budget of its own; give it in a "
                "stage"
            )
        return group

    def _resolve(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        """The keys of an entry with its pattern, if it has one, resolved to config keys for one tensor."""
        where = f"{place.tensor_fqn}: "
        pattern = checked_pattern(entry.get("pattern"), where)
        entry = {**entry}
        entry.pop("pattern", None)
        if pattern is None:
            return entry
        refuse_two_notations(["pattern", *entry], where)
        keys = {**pattern.resolve(place.module, place.tensor_name, place.tensor, where), **entry}
        for key in keys:
            if key not in self.keys:
                raise SparsityError(
                    f"{where}{pattern} needs the key {key!r}, which {type(self).__name__} does not take; it takes "
                    f"{', '.join(sorted(self.keys))}"
                )
        return keys

    def _check_fit(self, group: TensorGroup) -> None:
        checked_level(group["sparsity_level"], f"{group['tensor_fqn']}: ")

    def _check_alone(self, group: TensorGroup) -> None:
        super()._check_alone(group)
        refuse_unfit(group, stages_of(group), self._dense(group))

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        super()._check_groups(groups)
        for g in self._pruning_groups(groups):
            g.budget(groups)

    def _begin(self, groups: Sequence[TensorGroup]) -> None:
        """Write the level that a count amounts to: `level_of_nnz`. A scheduler that changes the level replaces it."""
        levels: dict[int, float] = {}
        members: dict[int, int] = {}  # of the largest pruning group of a tensor, whose level it has
        for g in self._pruning_groups(groups):
            level = g.scope.level_of(g.budget(groups))
            for _, at in g.members:
                if stage_budgets(groups[at])[g.stage] is None and members.get(at, 0) <= len(g.members):
                    levels[at], members[at] = level, len(g.members)
        for at, group in enumerate(groups):
            if group.get("nnz") is not None and at in levels:
                group["sparsity_level"] = levels[at]  # what schedulers start from
            group["level_of_nnz"] = group["sparsity_level"]

    def _after_update(self, groups: Sequence[TensorGroup]) -> None:
        """Called after `update_mask` changed masks; does nothing where masks depend on weights alone."""

    def _update_groups(self, pruning_groups: Sequence[PruningGroup], groups: Sequence[TensorGroup]) -> None:
        """Fill the masks of pruning groups; every budget and mask is checked before any mask changes."""
        masks = {i: self._live_mask(groups[i]) for g in pruning_groups for _, i in g.members}
        keeps = {g: g.budget(groups) for g in pruning_groups}
        at_once = sum(map(Tensor.numel, masks.values())) <= AT_ONCE
        if distributed.has_process_group():
            for g in pruning_groups:
                distributed.common_mesh([(spec.name, masks[i]) for spec, i in g.members])
            at_once |= any(distributed.is_sharded(m) for m in masks.values())
        if at_once:
            self._fill(pruning_groups, groups, masks, keeps)
            return
        parts = list(batches(pruning_groups, AT_ONCE))
        for part in shown(parts, "step", elements_of(pruning_groups)):
            self._fill(part, groups, masks, keeps)

    def _fill(
        self,
        pruning_groups: Sequence[PruningGroup],
        groups: Sequence[TensorGroup],
        masks: Mapping[int, Tensor],
        keeps: Mapping[PruningGroup, int | Tensor],
    ) -> None:
        """Fill masks by these budgets, earlier stages first; holds the dense weights and saliencies at once."""
        stages: dict[int, dict[PruningGroup, Request]] = {}
        dense = cache(lambda at: self._dense(groups[at]))
        for g in pruning_groups:  # scores may raise, so those of this part precede its masks
            values = g.values(dense, lambda i: self._statistics_of(groups[i]))
            norm = g.norm_of(values.values())
            stages.setdefault(g.stage, {})[g] = g.request(masks, keeps[g], values, norm)
        for request in stages.get(0, {}).values():
            for spec, mask in request.masks.items():
                if math.prod(spec.view.shape) < mask.numel():  # a later stage may have dropped what is outside the view
                    distributed.local(mask).fill_(True)
        for stage in sorted(stages):
            update_masks(stages[stage])

    def _needs(self) -> dict[str, tuple[str, ...]]:
        """{tensor_fqn: the statistics that scores read of it}."""
        needs_of_tensors: dict[str, tuple[str, ...]] = {}
        for g in self._pruning_groups(self.groups):
            needs = needs_of(g.score)
            for _, at in g.scored(lambda i: self._statistics_of(self.groups[i])) if needs else ():
                fqn = self.groups[at]["tensor_fqn"]
                needs_of_tensors[fqn] = tuple(dict.fromkeys((*needs_of_tensors.get(fqn, ()), *needs)))
        return needs_of_tensors

    def _pruning_groups(
        self, groups: Sequence[TensorGroup], model: nn.Module | None = None
    ) -> tuple[PruningGroup, ...]:
        """The pruning groups of these groups; kept while structure, shapes and strides stay the same."""
        tensors, key = [], []
        for group in groups:
            tensor = self._dense(group, model)
            tensors.append(tensor)
            key.append((*map(group.get, GROUP_KEYS), tuple(tensor.shape), tensor.stride()))
        if self._grouped is None or not is_same(self._grouped[0], key):
            self._grouped = copied(key), make_pruning_groups(groups, list(map(stages_of, groups)), tensors)
        return self._grouped[1]

    def _dense(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        module, name = self._module_in(model, group), group["tensor_name"]
        is_masked = masking.find_mask(module, name) is not None
        return masking.dense_weight(module, name) if is_masked else getattr(module, name).detach()

    def _masks(self, model: nn.Module | None) -> list[tuple[Tensor, bool]]:
        """Each group's mask in the model, and whether it is one (else the zeros of a squashed weight)."""
        out = []
        for group in self.groups:
            module, name = self._module_in(model, group), group["tensor_name"]
            live = masking.live_mask(module, name, group["tensor_fqn"])
            out.append((live.mask, True) if live is not None else (getattr(module, name).detach() != 0, False))
        return out

    # calibration

    def calibrate(
        self,
        batches: Iterable[Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        token_mask: str | Callable[[Any], Tensor] | None = None,
        needs: Sequence[str] = (),
        progress: bool = True,
    ) -> Calibration | None:
        """Record the statistics that scores need while the model runs; they add to those recorded before.

        The sums do not depend on how tokens are split into batches, up to float32 rounding. Over ranks each one runs
        its own batches, and all statistics are summed at the end.

        Args:
            batches: Each is passed to the model, in eval mode: dicts as keyword arguments, tuples and lists as
                positional ones. None returns a context for a loop of your own (`with sparsifier.calibrate() as c:`).
                There `c.token_mask` may be set before each forward pass.
            forward: Called instead, `(model, batch) -> output`; scores of gradients need the loss from it.
            token_mask: Which tokens count, such as an attention mask: a key of the batches, or a function of a batch.
                It applies to layers that read [batch, tokens, inputs]; convolutions, and layers that read something
                else (a pooled token, say), count every position.
            needs: More statistics for every tensor, some of `calibration.NEEDS`.
            progress: Show a progress bar on a terminal.

        Raises:
            SparsityError: No score needs statistics, no batches, layers whose inputs cannot be recorded, inputs, losses
                or gradients that are not finite. Hooks are removed and no statistics are kept then.

        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> from sparsekit_ao import ScopeSparsifier
        >>> sparsifier = ScopeSparsifier(0.5, score="wanda")
        >>> sparsifier.prepare(model)
        >>> sparsifier.calibrate([torch.ones(3, 4)])
        >>> with sparsifier.calibrate() as c:
        ...     output = model(torch.ones(2, 4))
        >>> sparsifier.statistics["0.weight"].tokens
        5
        """
        self._need_prepared("calibrate")
        assert self.model is not None
        for need in needs:
            if need not in NEEDS:
                raise SparsityError(f"calibrate: needs are some of {', '.join(map(repr, NEEDS))}, got {need!r}")
        of_scores = self._needs()
        targets = [self._target(g, n) for g in self.groups if (n := (*of_scores.get(g["tensor_fqn"], ()), *needs))]
        if not targets:
            raise SparsityError(
                "calibrate: no score of this sparsifier needs statistics; give one that does (score='wanda'), or name "
                "them in needs="
            )
        calibration = Calibration(targets, self._add_statistics)
        if batches is None:
            if forward is not None or token_mask is not None:
                raise SparsityError(
                    "calibrate: forward and token_mask need batches; in a context set c.token_mask instead"
                )
            return calibration
        checked_batches(batches, token_mask, forward, "calibrate")
        with calibration:
            bar = progress_bar(batches, "calibrate", progress, unit="batch")
            run_batches(calibration, self.model, bar, forward, token_mask)
        return None

    @property
    def statistics(self) -> Mapping[str, Statistics]:
        """{tensor_fqn: what was recorded for it}."""
        return {g["tensor_fqn"]: self._statistics_of(g) for g in self.groups if g["tensor_fqn"] in self._statistics}

    def forget_statistics(self) -> None:
        """Free all statistics; the next calibration starts anew."""
        self._statistics = {}

    def _after_prepare(self) -> None:
        self._adapters = {}
        if not self._resumes:
            self._statistics = {}

    def _target(self, group: TensorGroup, needs: Iterable[str]) -> Target:
        module, name = group["module"], group["tensor_name"]
        return Target(
            name=group["tensor_fqn"],
            module=module,
            tensor_name=name,
            parameter=masking.parameter_under(module, name),
            shape=tuple(self._live_mask(group).shape),
            needs=tuple(dict.fromkeys(needs)),
            adapter=self._adapter(group),
        )

    def _adapter(self, group: TensorGroup) -> LayerAdapter | None:
        """How a tensor is a matrix; looked up for all tensors at once and kept until `prepare`."""
        assert self.model is not None
        if set(self._adapters) != {g["tensor_fqn"] for g in self.groups}:
            attentions = {id(m.out_proj): m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)}
            adapters = [adapter_of(g["module"], g["tensor_name"], attentions) for g in self.groups]
            self._adapters = {g["tensor_fqn"]: a for g, a in zip(self.groups, adapters, strict=True)}
        return self._adapters[group["tensor_fqn"]]

    def _statistics_of(self, group: TensorGroup) -> Statistics:
        """What was recorded for a tensor, or statistics without sums."""
        statistics = self._statistics.get(group["tensor_fqn"]) or self._blank(group)
        statistics.adapter = self._adapter(group)  # which a copy or a pickle has not
        return statistics

    def _blank(self, group: TensorGroup) -> Statistics:
        shape = tuple(self._live_mask(group).shape)
        return Statistics(name=group["tensor_fqn"], shape=shape, adapter=self._adapter(group))

    def _add_statistics(self, new: Mapping[str, Statistics]) -> None:
        total = dict(self._statistics)
        for name, statistics in new.items():
            if name in total:
                total[name].add(statistics.sums, statistics.tokens, statistics.passes)
            else:
                total[name] = statistics
        self._statistics = total

    def _extra_state(self) -> dict[str, Any]:
        statistics = {name: s.saved() for name, s in self._statistics.items()}
        return {"statistics": statistics} if statistics else {}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As `MaskSparsifier.load_state_dict`; statistics replace the present ones."""
        self._need_prepared("load_state_dict")
        saved = state_dict.get("statistics", {}) if isinstance(state_dict, Mapping) else {}
        groups = {g["tensor_fqn"]: g for g in self.groups if saved != {}}
        devices = {name: self._live_mask(g).device for name, g in groups.items()}
        loaded = loaded_statistics(saved, {name: self._blank(g) for name, g in groups.items()}, devices)
        super().load_state_dict(state_dict, strict)
        self._statistics = loaded


class ScopeSparsifier(BudgetSparsifier):
    """Drop `sparsity_level` of the blocks in every scope (0.5 by default), exactly.

    Every argument is a default that a config entry may override.

    Args:
        sparsity_level: Fraction of blocks dropped in each scope, in [0, 1].
        nnz: Blocks kept in each scope, instead of a level. A scheduler that changes a group's `sparsity_level`
            overrules it.
        block_shape: Elements of a block; () is single elements, -1 the whole dimension.
        scope_shape: Blocks of a scope; () is the whole tensor, -1 the whole dimension.
        view: On the row-major layout, (shape, stride) or (shape, stride, offset), or a function that returns a torch
            view; None is the tensor as it is.
        axes, unit, scope, sizes: An axis pattern: view, block and scope in einops notation instead; see
            `structure.AxisPattern`.
        pattern: One of `patterns`, or its text ("2:4"), which fits itself to each weight; instead of shapes or axes.
        norm: How the elements of a block make its score: 1, 2 (default) or inf.
        score: One of `scores`, by name ("wanda", calibrated first) or object, or a function `(weight, name) ->
            saliency`. A block's score is the sum of its saliencies, the mean where blocks differ in size, and the
            highest are kept. None scores by the norm of the weight.
        edge: With `"partial"` blocks and scopes may be smaller where a dimension does not divide, and a scope with
            fewer blocks than `nnz` keeps all of them. With `"error"` they may not.
        block_coupling: A name; blocks of tensors that give the same one are kept or dropped together.
        coupling_order: Permutes this tensor's block grid onto the first member's.
        scope_coupling: A name; tensors that give the same one share one budget.
        max_sparsity: The largest fraction of the blocks of any one tensor that a shared budget may drop, in [0, 1]; the
            others then keep fewer. None: a tensor may lose all of them.
        member_scores: How a block's score is made of those of coupled tensors, to the norm's power. With `"sum"` a
            tensor counts by its elements, with `"mean"` each counts the same. With `"consumers"` (and a score) only
            tensors count whose blocks are inputs of their layer: a dropped unit causes its error there.
        stages: A list of dicts of these keys, each choosing among what the earlier kept; budgets count all blocks of
            a scope.
        update_every: Masks are chosen in the calls of `step` whose number, counted from 1, is a multiple of this; no
            config key.
        until: The last call of `step` that may choose masks; None for no end; no config key.

    Raises:
        SparsityError: sparsity_level and nnz together, a level outside [0, 1], a default of a wrong kind; whatever
            needs a tensor is checked in `prepare`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))  # 2:4
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> sparsifier.mask("0.weight").view(-1, 4).sum(1).unique()
    tensor([2])
    >>> sparsifier.squash_mask()
    >>> int((model[0].weight == 0).sum())
    16
    """

    optional_keys = (*BudgetSparsifier.optional_keys, "max_sparsity")
    _one_shot: dict[str, Any] | None = None  # finished rows and chosen masks of a pass; see `one_shot`

    def __init__(
        self,
        sparsity_level: float | None = None,
        *,
        nnz: int | None = None,
        pattern: Pattern | str | None = None,
        block_shape: Sequence[int] = (),
        scope_shape: Sequence[int] = (),
        view: tuple | Callable[[Tensor], Tensor] | None = None,
        axes: str | None = None,
        unit: str | Sequence[str] | None = None,
        scope: str | Sequence[str] | None = None,
        sizes: Mapping[str, int] | None = None,
        norm: float | None = None,
        score: Score | None = None,
        edge: str = "error",
        block_coupling: str | None = None,
        coupling_order: Sequence[int] | None = None,
        scope_coupling: str | None = None,
        member_scores: str = "sum",
        max_sparsity: float | None = None,
        stages: Sequence[Mapping[str, Any]] | None = None,
        update_every: int = 1,
        until: int | None = None,
        **unknown: Any,
    ) -> None:
        structure = {**locals()}
        for name in ("self", "sparsity_level", "nnz", "update_every", "until", "unknown", "__class__"):
            structure.pop(name)
        structure |= unknown
        self.interval, self._steps = UpdateInterval(update_every, until), 0
        super().__init__(sparsity_level, nnz=nnz, **structure)

    def step(self, use_path: bool = True) -> None:
        """Choose the masks anew, unless `update_every` or `until` leave this call out or updates are disabled."""
        if self.interval.is_due(self._steps + 1):
            super().step(use_path)
        else:
            self._need_prepared("step")
        self._steps += 1

    @property
    def _is_frozen(self) -> bool:
        return self.interval.is_over(self._steps)

    @torch.no_grad()
    def block_scores(self) -> list[tuple[tuple[str, ...], Tensor]]:
        """What `step` would compare: the score of every block of the dense weights, by tensor or coupled tensors.

        Returns:
            ([names of the tensors], [*scope grid, blocks of a scope]) for each stage of each tensor or coupling,
            earlier stages first. Scores are norms, or sums of saliencies.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> model[0].weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> sparsifier = ScopeSparsifier(block_shape=(1, -1))
        >>> sparsifier.prepare(model)
        >>> sparsifier.block_scores()
        [(('0.weight',), tensor([[[5., 1.]]]))]
        """
        self._need_prepared("block_scores")
        scores = []
        for g in self._pruning_groups(self.groups):
            values = g.values(lambda i: self._dense(self.groups[i]), lambda i: self._statistics_of(self.groups[i]))
            names = tuple(self.groups[at]["tensor_fqn"] for _, at in g.members)
            scores.append((names, g.scope.block_norms(values, norm=g.norm_of(values.values()))))
        return scores

    def _extra_state(self) -> dict[str, Any]:
        progress = {} if self._one_shot is None else {"one_shot": copied_state(self._one_shot)}
        return {**super()._extra_state(), **progress, "steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As of any sparsifier, with the number of calls of `step` and the progress of `one_shot` if there are any."""
        self._need_prepared("load_state_dict")
        steps, progress = saved_count(state_dict, "steps", self._steps), checked_pass(state_dict, self.groups)
        super().load_state_dict(state_dict, strict)
        self._steps, self._one_shot = steps, progress

    def _after_prepare(self) -> None:
        super()._after_prepare()
        if not self._resumes:  # else it goes on with a copy of the same model
            self._one_shot, self._steps = None, 0

    def _update_all(self) -> None:
        self._update_groups(self._pruning_groups(self.groups), self.groups)
