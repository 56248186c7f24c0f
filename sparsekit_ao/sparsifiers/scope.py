"""`ScopeSparsifier`, and `BudgetSparsifier`, the base class of sparsifiers that keep a number of blocks per scope."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..calibration import Statistics
from ..errors import SparsityError
from ..models.names import Exclusion, connected
from ..models.progress import progress_bar
from ..patterns import Pattern
from ..scores import Score
from ..selection import Request
from ..structure import Budget, checked_level
from .base import MaskSparsifier, UpdateInterval, refuse_meta_masks
from .calibrated import Calibrated
from .checkpoint import saved_count
from .config import ConfigContext, ResolvedConfig, TensorGroup, copied, hint_of_key, resolve_groups
from .groups import (
    PruningGroup,
    choose_masks,
    groups_by_name,
    is_same,
    make_pruning_groups,
    numel_of_groups,
    parts_of,
    pruning_groups_by_name,
    refuse_unfit,
)
from .report import Row, check_masks, make_row
from .stages import (
    AXES,
    GROUP_KEYS,
    SHAPES,
    Level,
    checked_pattern,
    joined,
    level_and_pattern,
    merged,
    refuse_two_budgets,
    stages_of,
    without_pattern,
)
from .usage import refuse_unknown_keys

AT_ONCE = 1 << 25  # masks of more elements are chosen in parts of about this many, to limit memory


class BudgetSparsifier(MaskSparsifier):
    """Base class of sparsifiers that keep an exact number of blocks in every scope.

    Subclasses may decide when masks change (`_update_all`), and which of the structural keys they take. The arguments
    are those of `ScopeSparsifier`, except for `max_sparsity`, `update_every` and `until`.

    >>> class Once(BudgetSparsifier):
    ...     def _update_all(self):
    ...         super()._update_all()
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
    #: the cache of `pruning_groups`: what the pruning groups depend on, and the pruning groups
    _grouped: tuple[Any, tuple[PruningGroup, ...]] | None = None

    def __init__(self, sparsity_level: Level = None, *, nnz: int | None = None, **structure: Any) -> None:
        accepted = (*self.structure_defaults, *self.optional_keys)
        for key in structure:
            if key not in accepted:
                hint, takes = hint_of_key(key, ("sparsity_level", *accepted)), ", ".join(sorted(accepted))
                raise TypeError(f"{type(self).__name__} has no argument {key!r}.{hint} It takes {takes}")
        sparsity_level, nnz, structure = copied(sparsity_level), copied(nnz), copied(structure)
        sparsity_level, structure["pattern"] = level_and_pattern(sparsity_level, structure.get("pattern"))
        if isinstance(sparsity_level, nn.Module):
            kind = type(sparsity_level).__name__
            raise SparsityError(f"sparsity_level must be a number, got a {kind}; give the model to prepare(model)")
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
        stages_of({**defaults, "tensor_fqn": "defaults"}, accepted)  # raises an error if a structural key is wrong
        checked_level(defaults["sparsity_level"], "defaults: ")

    def _update_all(self) -> None:
        self._update_groups(self.pruning_groups(), groups_by_name(self.groups))

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Choose the mask of one tensor anew, together with every tensor that it is coupled to.

        Args:
            module, tensor_name: The module that holds a prepared tensor, and the tensor's name in it.
            kwargs: The tensor's group, or any config keys. Values that differ from the group override it for this call,
                as a config entry overrides defaults.
        """
        self.require_prepared("update_mask")
        groups = groups_by_name(self.groups)
        name = next((n for n, g in groups.items() if g["module"] is module and g["tensor_name"] == tensor_name), None)
        if name is None:
            raise SparsityError(f"update_mask: {tensor_name!r} of this {type(module).__name__} was not prepared")
        changed = {**groups, name: self._overridden(groups[name], kwargs)}
        specs = {pruning: pruning.specs for pruning in self.pruning_groups(list(changed.values()))}
        coupled = next(coupled for coupled in connected(specs) if any(name in p.specs for p in coupled))
        with torch.no_grad():
            self._update_groups(coupled, changed)
            updated = {fqn for pruning in coupled for fqn in pruning.specs}
            self._after_update([group for fqn, group in groups.items() if fqn in updated])

    def _overridden(self, group: TensorGroup, values: Mapping[str, Any]) -> TensorGroup:
        """Return the group with these values, or the group itself if it has all of them already."""
        changes = {k: v for k, v in values.items() if k not in group or not is_same(v, group[k])}
        refuse_unknown_keys(changes, self.keys, self.keys)
        if not changes:
            return group
        names = {k: group[k] for k in ("module", "tensor_name", "tensor_fqn")}
        place = ConfigContext(**names, tensor=self._dense(group), where=f"update_mask: {group['tensor_fqn']}: ")
        changed = merged({k: v for k, v in group.items() if k in self.keys}, changes, place, self.keys)
        if without_pattern(changes, place, self.keys).get("nnz") is not None:
            # If the two differed, `PruningGroup.budget` would take the level for one that a scheduler has written.
            changed["level_of_nnz"] = changed["sparsity_level"]
        return {**{k: v for k, v in group.items() if k not in self.keys}, **changed}

    def _structure(self, group: TensorGroup) -> str:
        """Return the shapes, couplings and own budgets of each stage of a group as text."""
        keys = (*SHAPES, "block_coupling", "coupling_order", "scope_coupling")
        texts = []
        for stage in stages_of(group):
            values = [*((k, getattr(stage, k)) for k in keys), *([stage.budget] if stage.budget else [])]
            texts.append(", ".join(f"{k}={v!r}" for k, v in values if v not in (None, ())))
        return " then ".join(text or "single elements over the tensor" for text in texts)

    def _rows(self) -> Iterator[Row]:
        """Yield a row for each group, with the blocks of its last stage."""
        pruning_groups, entries, named = self.pruning_groups(), self._resolved.entries, groups_by_name(self.groups)
        of_tensors = pruning_groups_by_name(pruning_groups)
        for group in progress_bar(self.groups, "report", "tensors", elements=numel_of_groups(pruning_groups)):
            name = group["tensor_fqn"]
            last = of_tensors[name][-1]
            pattern = " then ".join(pruning.pattern(name) for pruning in of_tensors[name])
            key, asked = last.own_budgets.get(name) or ("sparsity_level", group["sparsity_level"])
            asked = asked if key == "sparsity_level" else last.scope.level_of(last.budget(named))  # reported as a level
            yield make_row(name, self.live_mask(group), entries, pattern=pattern, asked=asked, spec=last.specs[name])

    def check(self, model: nn.Module | None = None) -> int:
        """Verify that every scope keeps exactly its budget at the current levels, and that no block is kept in part.

        If there are several stages, only the scopes of the last one must hold exactly their budget. Scopes of earlier
        stages may hold less, and so may scopes of the last stage if an earlier one can leave too few elements in them
        (which cannot happen in V:N:M).

        Args:
            model: The prepared model (default), or a deep copy of it. In a squashed copy the zeros of the weights are
                taken as the mask, and a scope may hold less than its budget because a kept weight may be zero.

        Returns:
            The number of scopes that were checked, an int.

        Raises:
            SparsityError: A scope is wrong. The error names all tensors that have wrong scopes, and for each the
                first wrong scope with its count.
        """
        if self._phase not in ("prepared", "squashed"):
            self.require_prepared("check")
        distributed.reshard(self.model if model is None else model)
        pruning_groups, masks = self.pruning_groups(self.groups, model), self._masks(model)
        refuse_meta_masks("check", self.groups, [mask for mask, _ in masks.values()])
        try:
            return check_masks(pruning_groups, groups_by_name(self.groups), masks)
        except SparsityError:
            if self.mask_levels is None and all(is_mask and bool(mask.all()) for mask, is_mask in masks.values()):
                hint = "check: every mask keeps everything, because no masks were chosen yet; call step() or one_shot"
                raise SparsityError(hint) from None
            raise

    def _miscounted(self) -> str:
        """Return a warning if `check` fails, and otherwise ""."""
        try:
            self.check()
        except SparsityError as e:
            first, *further = str(e).removeprefix("masks do not hold their budgets:\n  ").split("\n  ")
            why = "The masks were not chosen at these levels; they may have been loaded with the model"
            advice = "Call step() to choose them anew, or set enable_mask_update = False to keep them"
            return f"{first}{f' (and {len(further)} more)' if further else ''}. {why}. {advice}"
        return ""

    def resolved(
        self, model: nn.Module, exclude: Sequence[Exclusion] = (), more: Sequence[TensorGroup] = (), config: Any = None
    ) -> ResolvedConfig:
        """Return what `prepare(model, config, exclude=exclude)` would mask, without changing the model.

        The result is a `ResolvedConfig`: the groups, the config entry that each tensor follows, and why other tensors
        are skipped. `more` lists config entries that are added to those of `make_config_from_model`.

        >>> from sparsekit_ao import ScopeSparsifier
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> [group["tensor_fqn"] for group in ScopeSparsifier("2:4").resolved(model).groups]
        ['0.weight']
        """
        options: dict[str, Any] = {"is_default": config is None, "check": self._check_alone if config is None else None}
        config = self._default_config(model, more) if config is None else config
        resolved = resolve_groups(model, config, self.keys, self._complete, exclude=exclude, **options)
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
        if groups is not self.groups:
            self._grouped = None  # their tensors may have other shapes than those of the same names and structure had
        named = groups_by_name(groups)
        for pruning in self.pruning_groups(groups):
            pruning.budget(named)  # raises an error if the budget does not fit

    def _begin(self, groups: Sequence[TensorGroup]) -> None:
        """Set `sparsity_level` to the level that `nnz` amounts to where it is given, and copy it to `level_of_nnz`."""
        named, largest = groups_by_name(groups), dict[str, PruningGroup]()
        # A count may amount to a different level in each stage; that in the largest (or last) pruning group is taken.
        for name, of_tensor in pruning_groups_by_name(self.pruning_groups(groups)).items():
            if sharing := [pruning for pruning in reversed(of_tensor) if name not in pruning.own_budgets]:
                largest[name] = max(sharing, key=lambda pruning: len(pruning.specs))
        levels = {pruning: pruning.scope.level_of(pruning.budget(named)) for pruning in {*largest.values()}}
        for name, group in named.items():
            if group.get("nnz") is not None and name in largest:
                group["sparsity_level"] = levels[largest[name]]  # what schedulers start from
            # If a scheduler changes `sparsity_level` later, the two differ, and the level overrides the count.
            group["level_of_nnz"] = group["sparsity_level"]

    def _after_update(self, groups: Sequence[TensorGroup]) -> None:
        """Do what has to follow when `update_mask` has changed the masks of these groups. Here this is nothing."""

    def _update_groups(self, pruning_groups: Sequence[PruningGroup], groups: Mapping[str, TensorGroup]) -> None:
        """Fill the masks of pruning groups; every budget and mask is checked before any mask changes."""
        masks, keeps = dict[str, Tensor](), dict[PruningGroup, Budget]()
        for pruning in pruning_groups:
            keeps[pruning] = pruning.budget(groups)
            for name in pruning.specs:
                if name not in masks:  # an earlier stage may have the same tensor
                    masks[name] = self.live_mask(groups[name])
                    refuse_meta_masks("step", [groups[name]], [masks[name]])
        at_once = sum(map(Tensor.numel, masks.values())) <= AT_ONCE
        if distributed.has_process_group():
            for pruning in pruning_groups:
                distributed.common_mesh([(name, masks[name]) for name in pruning.specs])
            at_once |= any(distributed.is_sharded(m) for m in masks.values())  # each rank holds only a shard
        if at_once:
            self._fill(keeps, groups, masks)
            return
        # A score that raises an error leaves the masks of earlier parts updated.
        parts = list(parts_of(pruning_groups, AT_ONCE))
        for part in progress_bar(parts, "step", "tensors", elements=numel_of_groups(pruning_groups)):
            self._fill({pruning: keeps[pruning] for pruning in part}, groups, masks)

    def _fill(
        self, keeps: Mapping[PruningGroup, Budget], groups: Mapping[str, TensorGroup], masks: Mapping[str, Tensor]
    ) -> None:
        """Fill masks to budgets, those of earlier stages first."""
        # All dense weights and saliencies are in memory at the same time, because a score may raise an error, and must
        # do so before a mask changes.
        stages: dict[int, dict[PruningGroup, Request]] = {}
        dense = dict[str, Tensor]()
        for pruning, keep in keeps.items():
            for name in pruning.specs.keys() - dense.keys():  # an earlier stage may have read the weight
                dense[name] = masking.dense_weight(groups[name]["module"], groups[name]["tensor_name"])
            values, norm = pruning.values(dense.__getitem__, self._statistics_of)
            request = pruning.request(masks, keep, values, norm)
            stages.setdefault(pruning.stage, {})[pruning] = request
        for request in stages.get(0, {}).values():
            for spec, mask in request.masks.items():
                # Elements outside the view are not written below, and a later stage may have dropped some before.
                if math.prod(spec.view.shape) < mask.numel():
                    mask.fill_(True)
        for stage in sorted(stages):
            choose_masks(stages[stage])

    def _statistics_of(self, name: str) -> Statistics:
        """Return the statistics of a tensor, which a score reads; here they hold only its name."""
        return Statistics(name=name, shape=(), adapter=None)

    def pruning_groups(
        self, groups: Sequence[TensorGroup] | None = None, model: nn.Module | None = None
    ) -> tuple[PruningGroup, ...]:
        """Return the groups of tensors that are pruned together, stage by stage; `groups` replace the sparsifier's own.

        Shapes are read from the prepared model, or from a copy of it. The result is cached until `_check_groups` checks
        other groups, as `prepare` and `load_state_dict` do, or the structure that the groups specify changes.
        """
        groups, structure = self.groups if groups is None else groups, list[Any]()
        for group in groups:
            structure.append((group.get("module"), *map(group.get, GROUP_KEYS)))
        if self._grouped is None or not is_same(self._grouped[0], structure):
            stages = {group["tensor_fqn"]: stages_of(group) for group in groups}
            tensors = {group["tensor_fqn"]: self._dense(group, model) for group in groups}
            self._grouped = copied(structure), make_pruning_groups(stages, tensors)
        return self._grouped[1]

    def _dense(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        """Return the dense weight of a group, in the prepared model or in a copy; without a mask, the weight itself."""
        return masking.dense_weight(self._module_in(model, group), group["tensor_name"])

    def _masks(self, model: nn.Module | None) -> dict[str, tuple[Tensor, bool]]:
        """Return {tensor name: (its mask, True)}, or (which elements are not zero, False) for a squashed weight."""
        masks = {}
        for group in self.groups:
            module, name = self._module_in(model, group), group["tensor_name"]
            live = masking.placed_mask(module, name, group["tensor_fqn"])
            mask = getattr(module, name).detach() != 0 if live is None else live.mask
            masks[group["tensor_fqn"]] = mask, live is not None
        return masks


class ScopeSparsifier(Calibrated, BudgetSparsifier):
    """Drop exactly the fraction `sparsity_level` of the blocks in every scope: the blocks that matter least.

    A block is a group of elements that are kept or dropped together; a scope is a set of blocks that compete with each
    other. Every argument except `update_every` and `until` is a default that a config entry may override.

    Args:
        sparsity_level: Fraction of blocks dropped in each scope, in [0, 1]; 0.5 by default. Or the pattern, such as
            "2:4"; see `pattern`.
        nnz: Number of blocks kept in each scope, instead of a level. A scheduler that changes a group's
            `sparsity_level` overrides it.
        block_shape: Number of elements of a block along each dimension. () (default) makes every element a block, and
            -1 makes a block as long as the dimension.
        scope_shape: Number of blocks of a scope along each dimension. () (default) makes the whole tensor one scope,
            and -1 makes a scope as long as the dimension.
        view: How to look at the tensor before it is cut into blocks: a function that returns a torch view of it, or
            (shape, stride) or (shape, stride, offset), which count elements of the tensor's row-major layout. None
            (default) cuts the tensor as it is.
        axes, unit, scope, sizes: An axis pattern, which describes view, blocks and scopes in einops notation, instead
            of the three arguments above; see `structure.AxisPattern`.
        pattern: One of `patterns`, or its text ("2:4"), instead of shapes or axes. It adapts to the class of each
            module and the shape of its weight.
        norm: The norm of a block's elements that is its score: 1, 2 (default) or inf.
        score: How much each element matters: one of `scores`, as a name or an object, or a function
            `(weight, name) -> saliency`. Some scores, such as "wanda", need `calibrate` first. A block's score is the
            sum of its elements' saliencies (the mean if blocks differ in size); the blocks with the highest scores are
            kept. None (default) scores a block by the norm of its weights.
        edge: What happens if a block or scope does not divide a dimension. `"error"` (default) raises an error. With
            `"partial"` the last blocks and scopes are smaller, and a scope with fewer blocks than `nnz` keeps all of
            its blocks.
        block_coupling: A name (str). Blocks of tensors with the same name here are kept or dropped together.
        coupling_order: A permutation that brings the dimensions of this tensor's block grid into the order of the grid
            of the first tensor of its coupling.
        scope_coupling: A name (str). Tensors with the same name here share one budget.
        max_sparsity: The largest fraction of the blocks of any one tensor that a shared budget may drop, in [0, 1]; the
            other tensors then keep fewer. With None (default) a tensor may lose all its blocks.
        member_scores: How the scores of coupled tensors are combined. With `"sum"` their saliencies are added, or
            without a `score` the p-th powers of their p-norms (with norm inf, the maximum is taken), so larger tensors
            count more. With `"mean"`, each is first divided by its number of elements, so that all tensors count the
            same. With `"consumers"` (which needs a score) only tensors whose blocks are inputs of their layer count,
            because the error of a dropped block arises there.
        stages: A list of dicts, one for each stage, with the keys above except `pattern`, whose
            `resolve(module, tensor_name)` returns such keys. Each stage chooses among the elements that the earlier
            ones kept; its budget still counts all blocks of a scope.
        update_every: Masks are chosen in those calls of `step` whose number, counted from 1, is a multiple of this; 1
            by default. It cannot be given in a config entry.
        until: The number of the last call of `step` that may choose masks; None (default) sets no end. It cannot be
            given in a config entry.

    Raises:
        SparsityError: `sparsity_level` and `nnz` are given together, a level is outside [0, 1], or an argument has the
            wrong type. Whatever needs a tensor is checked in `prepare`.

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
        sparsity_level: Level = None,
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
        self.interval, self._steps = UpdateInterval(update_every, until), 0
        super().__init__(
            sparsity_level,
            nnz=nnz,
            pattern=pattern,
            block_shape=block_shape,
            scope_shape=scope_shape,
            view=view,
            axes=axes,
            unit=unit,
            scope=scope,
            sizes=sizes,
            norm=norm,
            score=score,
            edge=edge,
            block_coupling=block_coupling,
            coupling_order=coupling_order,
            scope_coupling=scope_coupling,
            member_scores=member_scores,
            max_sparsity=max_sparsity,
            stages=stages,
            **unknown,
        )

    def step(self, use_path: bool = True) -> None:
        """Choose the masks anew, unless `update_every` or `until` exclude this call or updates are disabled."""
        if self.interval.is_due(self._steps + 1):
            super().step(use_path)
        else:
            self.require_prepared("step")
        self._steps += 1

    @property
    def is_frozen(self) -> bool:
        """Whether no later call of `step` chooses masks."""
        return self.interval.is_over(self._steps)

    @torch.no_grad()
    def block_scores(self) -> list[tuple[tuple[str, ...], Tensor]]:
        """Return the scores that `step` would compare: those of every block of the dense weights.

        Returns:
            A list with a pair (names of the tensors, scores [*scope grid, blocks of a scope]) for each stage of each
            tensor or coupling, earlier stages first. Scores are norms, or sums of saliencies.

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
            values, norm = pruning.values(lambda name: self._dense(groups[name]), recorder.of)
            scores.append((tuple(pruning.specs), pruning.scope.block_norms(values, norm=norm)))
        return scores

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state as `MaskSparsifier.load_state_dict` does, and the number of calls of `step` with it."""
        self.require_prepared("load_state_dict")
        steps = saved_count(state_dict, "steps", self._steps)
        super().load_state_dict(state_dict, strict)
        self._steps = steps

    def _after_prepare(self) -> None:
        super()._after_prepare()
        self._steps = 0
