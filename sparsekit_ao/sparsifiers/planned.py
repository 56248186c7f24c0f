"""The abstract base class of sparsifiers whose masks are scopes with budgets: plan, update, report, check.

Each update reads budgets from the groups and passes weights and masks to the scopes of the plan. When masks are updated
is decided by the subclasses.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..errors import SparsityError
from ..scores import needs_of
from ..selection import finished
from ..structure import MaskUpdate, sparsity_to_nnz
from .calibrated import CalibratedSparsifier
from .component import Component
from .config import ConfigContext, TensorGroup, copied
from .mask_check import check_masks
from .minimum import update_masks
from .plan import Plan, batches, elements_of, make_plan
from .progress import shown
from .report import Row, make_row
from .structure import (
    AXES,
    SHAPES,
    STRUCTURE,
    checked_pattern,
    joined,
    refuse_as_level,
    refuse_two_budgets,
    resolved,
    stage_budgets,
    stages_of,
)
from .usage import refuse_meta

AT_ONCE = 1 << 25  # elements on CPU whose masks are chosen together; limits memory, since they may be copied


class PlannedSparsifier(CalibratedSparsifier):
    """Masks that keep an exact number of blocks in every scope; see `ScopeSparsifier` for the arguments.

    Subclasses decide when masks change (`_update_all`), and which structure keys they take.

    >>> class Once(PlannedSparsifier):
    ...     def _update_all(self):
    ...         self._update_components(self._planned(self.groups).components, self.groups)
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
    _plan: tuple[Any, Plan] | None = None

    def __init__(self, sparsity_level: float | None = None, *, nnz: int | None = None, **structure: Any) -> None:
        given = {k: v for k, v in structure.items() if v is not None and v != ()}
        known = (*self.structure_defaults, *self.optional_keys)
        for key in structure:
            if key not in known:
                raise TypeError(f"{type(self).__name__} has no argument {key!r}; it takes {', '.join(sorted(known))}")
        refuse_as_level(sparsity_level)
        pattern = checked_pattern(structure.get("pattern"), "")
        refuse_two_budgets({"sparsity_level": sparsity_level, "nnz": nnz, "pattern": pattern}, "")
        if pattern is not None and pattern.budget is not None:
            sparsity_level = pattern.sparsity_level
        shapes = {"view": None, "block_shape": (), "scope_shape": ()} if pattern is None else {}
        defaults = {
            "sparsity_level": 0.5 if sparsity_level is None else sparsity_level,
            **joined({**shapes, **self.structure_defaults}, given, "defaults: "),
        }
        if nnz is not None:
            defaults["nnz"] = nnz
        super().__init__(defaults)
        stages_of({**defaults, "tensor_fqn": "defaults"})
        sparsity_to_nnz(defaults["sparsity_level"], 1, "defaults: ")
        self._level_given: dict[str, float] = {}

    @abstractmethod
    def _update_all(self) -> None:
        """Update all masks; called under no_grad while `enable_mask_update` is True."""

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Choose the mask of one tensor anew, together with every tensor that it is coupled to.

        Args:
            module, tensor_name: a prepared tensor.
            kwargs: the tensor's group, or any config keys; what differs from the group overrides it, for this call, as
                a config entry overrides defaults.
        """
        self._need_prepared("update_mask")
        at = self._index_of(module, tensor_name)
        groups = [self._changed(g, kwargs) if i == at else g for i, g in enumerate(self.groups)]
        components = self._planned(groups).connected[at]
        with torch.no_grad():
            self._update_components(components, groups)
            self._after_update([self.groups[i] for i in sorted({i for c in components for _, i in c.leaves})])

    def _changed(self, group: TensorGroup, given: Mapping[str, Any]) -> TensorGroup:
        """The group with other values; those that it has already are no change."""
        own = {k: v for k, v in given.items() if k not in group or not _is_same(v, group[k])}
        self._refuse_unknown(own, self.keys)
        if not own:
            return group
        place = ConfigContext(
            module=group["module"],
            module_fqn=group["module_fqn"],
            tensor_name=group["tensor_name"],
            tensor_fqn=group["tensor_fqn"],
            tensor=self._dense(group),
            where=f"update_mask: {group['tensor_fqn']}: ",
        )
        found = self._over({k: v for k, v in group.items() if k in self.keys}, own, place)
        if self._resolve(own, place).get("nnz") is not None:  # a level that a scheduler wrote would overrule it
            found["sparsity_level"] = self._level_given[place.tensor_fqn]
        return {**{k: v for k, v in group.items() if k not in self.keys}, **found}

    def _rows(self) -> Iterator[Row]:
        plan, rules = self._planned(self.groups), self._resolved.rules
        for at, group in enumerate(shown(self.groups, "report", plan.elements)):
            own = [c for c in plan.components if any(i == at for _, i in c.leaves)]
            mask, level = self._live_mask(group), own[-1].level(self.groups, self._level_given)
            blocks = own[-1].kept_blocks(at, distributed.full_tensor(mask))
            pattern = " then ".join(c.pattern(at) for c in own)
            yield make_row(group, mask, rules, pattern=pattern, asked=level, blocks=blocks)

    def check(self, model: nn.Module | None = None) -> int:
        """Verify that every scope holds exactly its budget (as the levels are now) and every block is whole.

        With several stages this is required of the last one only. Scopes of earlier stages, and scopes of the last one
        in which an earlier stage may have kept too few elements (not so in V:N:M), hold at most their budget.

        Args:
            model: the prepared model (default), or a deep copy of it. In a squashed one zeros are taken for the mask,
                and a scope may hold less than its budget, since a kept weight may be zero.

        Returns:
            The number of scopes that were checked.

        Raises:
            SparsityError: naming every tensor with a wrong scope, the first such scope, and its count.
        """
        if self._phase not in ("prepared", "squashed"):
            self._need_prepared("check")
        distributed.reshard(self.model if model is None else model)
        plan, masks = self._planned(self.groups, model), self._masks(model)
        refuse_meta("check", self.groups, [mask for mask, _ in masks])
        try:
            return check_masks(plan, self.groups, masks, self._level_given)
        except SparsityError:
            if self._chosen_at is None and all(is_mask and bool(mask.all()) for mask, is_mask in masks):
                hint = "check: every mask keeps everything, as step was never called; call step() first"
                raise SparsityError(hint) from None
            raise

    def _complete(self, own: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        return self._over(copied(self.defaults), own, place)

    def _over(self, defaults: dict[str, Any], own: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        """Own keys over default ones, patterns resolved."""
        refuse_two_budgets(own, place.where)
        given_pattern = own.get("pattern")
        own = self._resolve(own, place)
        budgets = refuse_two_budgets(own, place.where)
        if any(k in own for k in (*SHAPES, *AXES, "stages")):  # the entry's structure replaces the default one
            defaults = {k: v for k, v in defaults.items() if k not in ("pattern", "stages")}
        pattern = given_pattern if given_pattern is not None else defaults.get("pattern")
        group = joined(self._resolve(defaults, place), own, place.where)
        if pattern is not None and pattern.budget == "nnz" and group.get("scope_coupling") is not None:
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

    def _resolve(self, given: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        """The keys of `given` with its pattern resolved; an error where this class does not take one of them."""
        found = resolved(given, place)
        for key in found:
            if key not in self.keys:
                raise SparsityError(
                    f"{place.tensor_fqn}: {given['pattern']} needs the key {key!r}, which {type(self).__name__} does "
                    f"not take; it takes {', '.join(sorted(self.keys))}"
                )
        return found

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        plan = self._planned(groups)
        prepared = self._phase == "prepared"
        levels = {}
        for component in sorted(plan.components, key=lambda c: len(c.leaves)):  # coupled tensors need one level
            keep = component.budget(groups, self._level_given if prepared else {})
            for _, at in component.leaves:
                if stage_budgets(groups[at])[component.stage] is None:
                    levels[at] = component.scope.level_of(keep)
        for at, group in enumerate(groups):
            sparsity_to_nnz(group["sparsity_level"], 1, f"{group['tensor_fqn']}: ")
            if not prepared and group.get("nnz") is not None and at in levels:
                group["sparsity_level"] = levels[at]  # what torch.ao's schedulers start from
        if not prepared:
            self._level_given = {g["tensor_fqn"]: g["sparsity_level"] for g in groups}

    def _after_update(self, groups: Sequence[TensorGroup]) -> None:
        """Called after `update_mask` changed masks; does nothing where masks depend on weights alone."""

    def _update_components(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> None:
        """Fill the masks of components; those of coupled tensors are all old or all new if anything is raised."""
        masks = self._check_components(components, groups)
        at_once = any(m.is_cuda or distributed.is_sharded(m) for m in masks)
        parts, elements = list(batches(components, None if at_once else AT_ONCE)), elements_of(components)
        for part in shown(parts, "step", elements):
            self._choose(part, groups)

    def _check_components(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> list[Tensor]:
        """Their masks; raises, before any mask changes, if a budget does not fit or meshes are not the same."""
        masks = []
        for component in components:
            component.budget(groups, self._level_given)
            own = [(leaf.name, self._live_mask(groups[i])) for leaf, i in component.leaves]
            distributed.common_mesh(own)
            masks += [mask for _, mask in own]
        return masks

    def _choose(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> None:
        """Fill the masks of components, earlier stages first; holds their dense weights and saliencies at once."""
        self._fill(components, groups, self._live_mask, lambda c: c.budget(groups, self._level_given))

    def _fill(
        self,
        components: Sequence[Component],
        groups: Sequence[TensorGroup],
        mask_of: Callable[[TensorGroup], Tensor],
        keep_of: Callable[[Component], int | Tensor],
    ) -> None:
        """As `_choose`, with masks and budgets given.

        On a GPU tensors of one kind share launches; sharded ones share their sums over the ranks.
        """
        updates: dict[int, list[tuple[Component, MaskUpdate]]] = {}
        for component in components:  # scores may raise, so all of them are called before any mask is written
            values = component.values(lambda i: self._dense(groups[i]), lambda i: self._statistics_of(groups[i]))
            update = MaskUpdate(
                scope=component.scope,
                masks={leaf: mask_of(groups[i]) for leaf, i in component.leaves},
                keep=keep_of(component),
                values=values,
                norm=component.norm_of(values.values()),
                among_kept=component.stage > 0,
            )
            updates.setdefault(component.stage, []).append((component, update))
        is_sharded = any(distributed.is_sharded(m) for _, u in updates.get(0, ()) for m in u.masks.values())
        stages = [updates[stage] for stage in sorted(updates)]
        if is_sharded:
            _write(stages)  # other ranks would not repeat it
        else:
            finished(_write, stages)

    def _needs(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for component in self._planned(self.groups).components:
            needs = needs_of(component.score)
            for _, at in component.scored(lambda i: self._statistics_of(self.groups[i])) if needs else ():
                fqn = self.groups[at]["tensor_fqn"]
                found[fqn] = tuple(dict.fromkeys((*found.get(fqn, ()), *needs)))
        return found

    def _planned(self, groups: Sequence[TensorGroup], model: nn.Module | None = None) -> Plan:
        """The plan of these groups; kept while structure, shapes and strides stay the same."""
        tensors = [self._dense(g, model) for g in groups]
        key = [
            (g["tensor_fqn"], [g.get(k) for k in (*STRUCTURE, *AXES, "stages")], tuple(t.shape), t.stride())
            for g, t in zip(groups, tensors, strict=True)
        ]
        if self._plan is None or self._plan[0] != key:
            self._plan = (copied(key), make_plan(groups, [stages_of(g) for g in groups], tensors))
        return self._plan[1]

    def _dense(self, group: TensorGroup, model: nn.Module | None = None) -> Tensor:
        module, name = self._module_in(model, group), group["tensor_name"]
        if masking.find_mask(module, name) is None:
            return getattr(module, name).detach()
        return masking.dense_weight(module, name)

    def _masks(self, model: nn.Module | None) -> list[tuple[Tensor, bool]]:
        """Each group's mask in the model, and whether it is one (else the zeros of a squashed weight)."""
        out = []
        for group in self.groups:
            module, name = self._module_in(model, group), group["tensor_name"]
            found = masking.live_mask(module, name, group["tensor_fqn"])
            out.append((found.mask, True) if found is not None else (getattr(module, name).detach() != 0, False))
        return out

    def _index_of(self, module: nn.Module, tensor_name: str) -> int:
        for at, group in enumerate(self.groups):
            if group["module"] is module and group["tensor_name"] == tensor_name:
                return at
        raise SparsityError(f"update_mask: {tensor_name!r} of this {type(module).__name__} was not prepared")


def _write(stages: Sequence[Sequence[tuple[Component, MaskUpdate]]]) -> None:
    """Fill the masks of stages, one after the other; from the start each time, whatever the masks are before."""
    for leaf, mask in (pair for _, update in stages[0] for pair in update.masks.items()):
        if leaf.view.numel() < leaf.view.param.numel():  # a later stage may have dropped what is outside the view
            distributed.local(mask).fill_(True)
    for updates in stages:
        update_masks(updates)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))
