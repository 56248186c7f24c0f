"""ScopeSparsifier: config dicts in, exact masks out, through torch.ao's interface.

Each step reads budgets from the groups and hands weights and masks to the scopes of the plan; nothing else happens
here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..algebra import sparsity_to_nnz
from ..errors import SparsityError
from ..selection import scope_masks
from . import report
from .base import MaskSparsifier
from .config import TensorGroup, copied
from .plan import Component, Plan, batches, make_plan
from .structure import AXES, STRUCTURE, TILES, joined, stage_budgets, stages_of

__all__ = ["ScopeSparsifier"]

AT_ONCE = 1 << 25  # elements on CPU whose masks are chosen together, since copies may be held of what lies otherwise


class ScopeSparsifier(MaskSparsifier):
    """Keep an exact number of blocks in every scope; a drop-in `torch.ao.pruning` sparsifier.

    Every argument is a default that a config entry may override.

    Args:
        sparsity_level: fraction of blocks dropped in each scope, in [0, 1]; 0.5 if `nnz` is not given either.
        nnz: blocks kept in each scope, instead of a level. A scheduler that changes a group's `sparsity_level`
            overrules it.
        block_shape: elements of a block; () is single elements, -1 the whole dimension.
        scope_shape: blocks of a scope; () is the whole tensor, -1 the whole dimension.
        view: (shape, stride) or (shape, stride, offset) on the row-major layout, or a function that returns a torch
            view; None is the tensor as it is.
        axes, unit, scope, sizes: an axis pattern, which says view, block and scope in einops notation instead; see
            `spec.AxisPattern`.
        norm: 1, 2, inf, or a callable giving a saliency per element, of which a block's score is the mean.
        edge: `"error"`, or `"partial"` to allow smaller blocks and scopes where a dimension does not divide; a scope
            with fewer blocks than `nnz` keeps all it has.
        block_coupling: a name; tensors that give the same one share one fate, block by block.
        coupling_order: permutes this tensor's block grid onto the first member's.
        scope_coupling: a name; tensors that give the same one share one budget.
        member_scores: how a block's score is made of those of coupled tensors, to the norm's power: `"sum"`, so that a
            tensor counts by its elements, or `"mean"`, so that each tensor counts the same.
        stages: a list of dicts of these keys, each choosing among what the earlier left; budgets count all blocks of
            a scope.

    Raises:
        SparsityError: two budgets, a level outside [0, 1], a default of a wrong kind; whatever needs a tensor is
            checked in `prepare`.

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

    optional_keys: tuple[str, ...] = ("nnz", "stages", *TILES, *AXES)
    _plan: tuple[Any, Plan] | None = None

    def __init__(
        self,
        sparsity_level: float | None = None,
        *,
        nnz: int | None = None,
        block_shape: Sequence[int] = (),
        scope_shape: Sequence[int] = (),
        view: tuple | Callable[[Tensor], Tensor] | None = None,
        axes: str | None = None,
        unit: str | Sequence[str] | None = None,
        scope: str | Sequence[str] | None = None,
        sizes: Mapping[str, int] | None = None,
        norm: float | Callable[[Tensor], Tensor] = 2,
        edge: str = "error",
        block_coupling: str | None = None,
        coupling_order: Sequence[int] | None = None,
        scope_coupling: str | None = None,
        member_scores: str = "sum",
        stages: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if sparsity_level is not None and nnz is not None:
            raise SparsityError("sparsity_level and nnz are two budgets; give one")
        tiles = {"view": view, "block_shape": block_shape, "scope_shape": scope_shape}
        pattern = {k: v for k, v in zip(AXES, (axes, unit, scope, sizes), strict=True) if v is not None}
        said = {k: v for k, v in tiles.items() if v is not None and v != ()}
        defaults: dict[str, Any] = {
            "sparsity_level": 0.5 if sparsity_level is None else sparsity_level,
            **joined(tiles, {**said, **pattern}, "defaults: "),
            "norm": norm,
            "edge": edge,
            "block_coupling": block_coupling,
            "coupling_order": coupling_order,
            "scope_coupling": scope_coupling,
            "member_scores": member_scores,
        }
        if nnz is not None:
            defaults["nnz"] = nnz
        if stages is not None:
            defaults["stages"] = list(stages)
        super().__init__(defaults)
        stages_of({**defaults, "tensor_fqn": "defaults"})
        sparsity_to_nnz(defaults["sparsity_level"], 1, "defaults: ")
        self._level_given: dict[str, float] = {}

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Choose the mask of one tensor anew, together with every tensor that it is coupled to.

        Args:
            module, tensor_name: a prepared tensor.
            kwargs: the tensor's group; values given here are used instead of the group's.
        """
        self._need_prepared("update_mask")
        at = self._index_of(module, tensor_name)
        unknown = sorted(set(kwargs) - set(self.groups[at]) - set(self.keys))
        if unknown:
            raise SparsityError(f"update_mask: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(self.keys))}")
        groups = [{**g, **kwargs} if i == at else g for i, g in enumerate(self.groups)]
        components = self._planned(groups).families[at]
        with torch.no_grad():
            self._update_components(components, groups)

    def report(self) -> report.Report:
        """What every mask holds now; see `report.Report`."""
        self._need_prepared("report")
        plan = self._planned(self.groups)
        return report.make_report(plan, self.groups, self._masks(None), self._level_given)

    def check(self, model: nn.Module | None = None) -> int:
        """Verify that every scope holds exactly its budget (as the levels are now) and every block is whole.

        Of several stages the last one is held to this; where an earlier one may have left a scope with less than its
        budget (not so in V:N:M), and for the earlier ones, at most the budget is asked for.

        Args:
            model: the prepared model (default), or a deep copy of it. In a squashed one zeros stand for the mask, and
                a scope may hold less than its budget, since a kept weight may be zero.

        Returns:
            The number of scopes that were checked.

        Raises:
            SparsityError: naming every tensor with a wrong scope, the first such scope, and its count.
        """
        if self._phase not in ("prepared", "squashed"):
            self._need_prepared("check")
        distributed.reshard(self.model if model is None else model)
        plan = self._planned(self.groups, model)
        return report.check_masks(plan, self.groups, self._masks(model), self._level_given)

    def _complete(self, own: dict[str, Any], where: str) -> dict[str, Any]:
        budgets = [k for k in ("sparsity_level", "nnz") if own.get(k) is not None]
        if len(budgets) == 2:
            raise SparsityError(f"{where}sparsity_level and nnz are two budgets; give one")
        group = joined(copied(self.defaults), own, where)
        if "stages" not in own and any(k in own for k in (*STRUCTURE, *AXES)):
            group.pop("stages", None)  # an entry that says what it wants does not want the default's stages
        if budgets == ["sparsity_level"]:
            group.pop("nnz", None)
        if budgets and None not in stage_budgets(group):
            raise SparsityError(
                f"{where}{budgets[0]} has no effect, because every stage has a budget of its own; give it in a stage"
            )
        return group

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        plan = self._planned(groups)
        prepared = self._phase == "prepared"
        levels = {}
        for component in plan.components:
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

    def _update_all(self) -> None:
        plan = self._planned(self.groups)
        if type(self).update_mask is ScopeSparsifier.update_mask:
            self._update_components(plan.components, self.groups)
            return
        self._check_components(plan.components, self.groups)
        done: set[int] = set()
        for at, group in enumerate(self.groups):
            if at not in done:
                self.update_mask(**group)
                done.update(i for component in plan.families[at] for _, i in component.leaves)

    def _update_components(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> None:
        """Fill the masks of components, earlier stages first."""
        masks = self._check_components(components, groups)
        at_once = any(m.is_cuda or distributed.is_sharded(m) for m in masks)
        for part in batches(components, None if at_once else AT_ONCE):
            self._choose(part, groups)

    def _check_components(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> list[Tensor]:
        """Their masks. Raises, before any changes, on a budget that does not fit or meshes with nothing in common."""
        masks = []
        for component in components:
            component.budget(groups, self._level_given)
            own = [(leaf.name, self._live_mask(groups[i])) for leaf, i in component.leaves]
            distributed.common_mesh(own)
            masks += [mask for _, mask in own]
        return masks

    def _choose(self, components: Sequence[Component], groups: Sequence[TensorGroup]) -> None:
        """Fill the masks of components that do not depend on each other; holds their dense weights at once."""
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
        updates, jobs = [], []
        for component in components:
            scope, among_kept = component.scope, component.stage > 0
            values = component.values(lambda i: self._dense(groups[i]))
            masks = {leaf: mask_of(groups[i]) for leaf, i in component.leaves}
            keep = keep_of(component)
            if any(map(distributed.is_sharded, values.values())):
                jobs.append(
                    distributed.Job(
                        scope=scope,
                        masks=masks,
                        values=values,
                        keep=keep,
                        norm=component.norm,  # type: ignore[arg-type]
                        among_kept=among_kept,
                    )
                )
            else:
                norm: Any = component.norm
                update = scope.update_of(masks, keep, values, norm=norm, among_kept=among_kept)
                updates.append((scope, update, masks))
        scope_masks([update for _, update, _ in updates])
        for scope, update, masks in updates:
            scope.write_back(update, masks)
        distributed.update_masks(jobs)

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
