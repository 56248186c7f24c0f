"""Sparsifiers whose masks are scopes with budgets: `BudgetSparsifier`, their base class, and `ScopeSparsifier`.

At each update, budgets are read from the groups, and weights and masks are passed to the scopes of pruning groups.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..calibration import Statistics
from ..errors import SparsityError
from ..models.names import connected
from ..models.progress import progress_bar
from ..patterns import Pattern
from ..schedules import UpdateInterval
from ..scores import Score
from ..selection import Request
from ..structure import checked_level
from .base import MaskSparsifier
from .calibrated import Calibrated
from .checkpoint import saved_count
from .config import ConfigContext, Exclusion, ResolvedConfig, TensorGroup, copied, hint_of_key, resolve_groups
from .groups import (
    PruningGroup,
    batches,
    choose_masks,
    groups_by_name,
    is_same,
    kept_in,
    make_pruning_groups,
    numel_of_groups,
    refuse_unfit,
)
from .report import Row, check_masks, make_row
from .stages import (
    AXES,
    GROUP_KEYS,
    SHAPES,
    checked_pattern,
    joined,
    merged,
    refuse_two_budgets,
    stage_budgets,
    stages_of,
    without_pattern,
)
from .usage import refuse_meta_masks, refuse_unknown_keys

AT_ONCE = 1 << 25  # elements whose masks are chosen together; limits memory, since they may be copied


class BudgetSparsifier(MaskSparsifier):
    """Masks that keep an exact number of blocks in every scope; see `ScopeSparsifier` for the arguments.

    Subclasses decide when masks change (`_update_all`), and which structure keys they take.

    >>> class Once(BudgetSparsifier):
    ...     def _update_all(self):
    ...         self._update_groups(self.pruning_groups(), groups_by_name(self.groups))
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
    not_copied = (*MaskSparsifier.not_copied, "_grouped")  # pruning groups are made again when needed
    bool_masks = True
    _grouped: tuple[Any, tuple[PruningGroup, ...]] | None = None

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
        self.require_prepared("update_mask")
        groups = groups_by_name(self.groups)
        name = next((n for n, g in groups.items() if g["module"] is module and g["tensor_name"] == tensor_name), None)
        if name is None:
            raise SparsityError(f"update_mask: {tensor_name!r} of this {type(module).__name__} was not prepared")
        changed = {**groups, name: self._changed(groups[name], kwargs)}
        lists = connected({pruning: pruning.specs for pruning in self.pruning_groups(list(changed.values()))})
        coupled = next(pruning_groups for pruning_groups in lists if any(name in p.specs for p in pruning_groups))
        with torch.no_grad():
            self._update_groups(coupled, changed)
            updated = {other for pruning in coupled for other in pruning.specs}
            self._after_update([group for other, group in groups.items() if other in updated])

    def _changed(self, group: TensorGroup, values: Mapping[str, Any]) -> TensorGroup:
        """The group with other values; those that it has already are no change."""
        changes = {k: v for k, v in values.items() if k not in group or not is_same(v, group[k])}
        refuse_unknown_keys(changes, self.keys, self.keys)
        if not changes:
            return group
        names = {k: group[k] for k in ("module", "module_fqn", "tensor_name", "tensor_fqn")}
        place = ConfigContext(**names, tensor=self._dense(group), where=f"update_mask: {group['tensor_fqn']}: ")
        changed = merged({k: v for k, v in group.items() if k in self.keys}, changes, place, self.keys)
        if without_pattern(changes, place, self.keys).get("nnz") is not None:  # a level that differs would replace it
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
        pruning_groups, entries = self.pruning_groups(), self._resolved.entries
        stages_of_tensors: dict[str, list[PruningGroup]] = {}
        for pruning in pruning_groups:
            for name in pruning.specs:
                stages_of_tensors.setdefault(name, []).append(pruning)
        for group in progress_bar(self.groups, "report", "tensors", elements=numel_of_groups(pruning_groups)):
            name = group["tensor_fqn"]
            mask, stages = self.live_mask(group), stages_of_tensors[name]
            last = stages[-1]
            spec = last.specs[name]
            blocks = kept_in(spec, distributed.full_tensor(mask)), spec.numblk()
            pattern = " then ".join(pruning.pattern(name) for pruning in stages)
            key, asked = stage_budgets(group)[last.stage] or ("sparsity_level", group["sparsity_level"])
            asked = asked if key == "sparsity_level" else last.scope.level_of(last.budget(groups_by_name(self.groups)))
            yield make_row(group, mask, entries, pattern=pattern, asked=asked, blocks=blocks)

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
            self.require_prepared("check")
        distributed.reshard(self.model if model is None else model)
        pruning_groups, masks = self.pruning_groups(self.groups, model), self._masks(model)
        refuse_meta_masks("check", self.groups, [mask for mask, _ in masks.values()])
        try:
            return check_masks(pruning_groups, groups_by_name(self.groups), masks)
        except SparsityError:
            if self._chosen_at is None and all(is_mask and bool(mask.all()) for mask, is_mask in masks.values()):
                hint = "check: every mask keeps everything, because no masks were chosen yet; call step() or one_shot"
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

    def resolved(
        self, model: nn.Module, exclude: Sequence[Exclusion] = (), more: Sequence[TensorGroup] = ()
    ) -> ResolvedConfig:
        """The groups that `prepare(model, exclude=exclude, skip_unfit=True)` would mask; the model stays as it is.

        `more` are entries beside those of `make_config_from_model`.

        >>> from sparsekit_ao import ScopeSparsifier
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> [group["tensor_fqn"] for group in ScopeSparsifier(pattern="2:4").resolved(model).groups]
        ['0.weight']
        """
        config, exclude, _ = self._chosen(model, None, exclude, more)
        options: dict[str, Any] = {"exclude": exclude, "is_default": True, "check": self._check_alone}
        resolved = resolve_groups(model, config, self.keys, self._complete, **options)
        self._check_groups(resolved.groups)
        return resolved

    def _complete(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        return merged(copied(self.defaults), entry, place, self.keys)

    def _check_fit(self, group: TensorGroup) -> None:
        checked_level(group["sparsity_level"], f"{group['tensor_fqn']}: ")

    def _check_alone(self, group: TensorGroup) -> None:
        super()._check_alone(group)
        refuse_unfit(group, stages_of(group), self._dense(group))

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        super()._check_groups(groups)
        for pruning in self.pruning_groups(groups):
            pruning.budget(groups_by_name(groups))

    def _begin(self, groups: Sequence[TensorGroup]) -> None:
        """Write the level that a count amounts to: `level_of_nnz`. A scheduler that changes the level replaces it."""
        named = groups_by_name(groups)
        largest: dict[str, PruningGroup] = {}  # of those that a tensor is in, whose level it has
        for pruning in self.pruning_groups(groups):
            for name in pruning.specs:
                is_larger = name not in largest or len(largest[name].specs) <= len(pruning.specs)
                if stage_budgets(named[name])[pruning.stage] is None and is_larger:
                    largest[name] = pruning
        levels = {pruning: pruning.scope.level_of(pruning.budget(named)) for pruning in {*largest.values()}}
        for name, group in named.items():
            if group.get("nnz") is not None and name in largest:
                group["sparsity_level"] = levels[largest[name]]  # what schedulers start from
            group["level_of_nnz"] = group["sparsity_level"]

    def _after_update(self, groups: Sequence[TensorGroup]) -> None:
        """Called after `update_mask` changed masks; does nothing where masks depend on weights alone."""

    def _update_groups(self, pruning_groups: Sequence[PruningGroup], groups: Mapping[str, TensorGroup]) -> None:
        """Fill the masks of pruning groups; every budget and mask is checked before any mask changes."""
        masks = {name: self.live_mask(groups[name]) for pruning in pruning_groups for name in pruning.specs}
        keeps = {pruning: pruning.budget(groups) for pruning in pruning_groups}
        at_once = sum(map(Tensor.numel, masks.values())) <= AT_ONCE
        if distributed.has_process_group():
            for pruning in pruning_groups:
                distributed.common_mesh([(name, masks[name]) for name in pruning.specs])
            at_once |= any(distributed.is_sharded(m) for m in masks.values())
        if at_once:
            self._fill(pruning_groups, groups, masks, keeps)
            return
        parts = list(batches(pruning_groups, AT_ONCE))
        for part in progress_bar(parts, "step", "tensors", elements=numel_of_groups(pruning_groups)):
            self._fill(part, groups, masks, keeps)

    def _fill(
        self,
        pruning_groups: Sequence[PruningGroup],
        groups: Mapping[str, TensorGroup],
        masks: Mapping[str, Tensor],
        keeps: Mapping[PruningGroup, int | Tensor],
    ) -> None:
        """Fill masks by these budgets, earlier stages first; holds the dense weights and saliencies at once."""
        stages: dict[int, dict[PruningGroup, Request]] = {}
        names = {name for pruning in pruning_groups for name in pruning.specs}
        dense = {name: self._dense(groups[name]) for name in names}
        for pruning in pruning_groups:  # scores may raise, so those of this part precede its masks
            values = pruning.values(dense.__getitem__, self._statistics_of)
            request = pruning.request(masks, keeps[pruning], values, pruning.norm_of(values.values()))
            stages.setdefault(pruning.stage, {})[pruning] = request
        for request in stages.get(0, {}).values():
            for spec, mask in request.masks.items():
                if math.prod(spec.view.shape) < mask.numel():  # a later stage may have dropped what is outside the view
                    distributed.local(mask).fill_(True)
        for stage in sorted(stages):
            choose_masks(stages[stage])

    def _statistics_of(self, name: str) -> Statistics:
        """What a score gets to read about a tensor; here its name alone."""
        return Statistics(name=name, shape=(), adapter=None)

    def pruning_groups(
        self, groups: Sequence[TensorGroup] | None = None, model: nn.Module | None = None
    ) -> tuple[PruningGroup, ...]:
        """The tensors that are pruned together, stage by stage; kept while structure, shapes and strides stay the same.

        Args:
            groups: Group dicts in place of the sparsifier's own.
            model: A copy of the model, whose tensors have the shapes.
        """
        groups = self.groups if groups is None else groups
        tensors = {group["tensor_fqn"]: self._dense(group, model) for group in groups}
        keys = zip(groups, tensors.values(), strict=True)
        key = [(*map(group.get, GROUP_KEYS), tuple(tensor.shape), tensor.stride()) for group, tensor in keys]
        if self._grouped is None or not is_same(self._grouped[0], key):
            stages = {group["tensor_fqn"]: stages_of(group) for group in groups}
            self._grouped = copied(key), make_pruning_groups(stages, tensors)
        return self._grouped[1]

    def _dense(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        module, name = self._module_in(model, group), group["tensor_name"]
        is_masked = masking.find_mask(module, name) is not None
        return masking.dense_weight(module, name) if is_masked else getattr(module, name).detach()

    def _masks(self, model: nn.Module | None) -> dict[str, tuple[Tensor, bool]]:
        """Each tensor's mask in the model, and whether it is one (else the zeros of a squashed weight)."""
        masks = {}
        for group in self.groups:
            module, name = self._module_in(model, group), group["tensor_name"]
            live = masking.live_mask(module, name, group["tensor_fqn"])
            mask = getattr(module, name).detach() != 0 if live is None else live.mask
            masks[group["tensor_fqn"]] = mask, live is not None
        return masks


class ScopeSparsifier(Calibrated, BudgetSparsifier):
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
            self.require_prepared("step")
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
        self.require_prepared("block_scores")
        scores, recorder, groups = [], self.recorder, groups_by_name(self.groups)
        for pruning in self.pruning_groups():
            values = pruning.values(lambda name: self._dense(groups[name]), recorder.of)
            norms = pruning.scope.block_norms(values, norm=pruning.norm_of(values.values()))
            scores.append((tuple(pruning.specs), norms))
        return scores

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As of any sparsifier, with the number of calls of `step`."""
        self.require_prepared("load_state_dict")
        steps = saved_count(state_dict, "steps", self._steps)
        super().load_state_dict(state_dict, strict)
        self._steps = steps

    def _after_prepare(self) -> None:
        super()._after_prepare()
        if not self._resumes:  # else it goes on with a copy of the same model
            self._steps = 0

    def _update_all(self) -> None:
        self._update_groups(self.pruning_groups(), groups_by_name(self.groups))
