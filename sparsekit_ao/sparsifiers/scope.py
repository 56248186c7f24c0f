"""ScopeSparsifier: masks with exact budgets, from config dicts, through torch.ao's interface."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..patterns import Pattern
from ..schedules import UpdateInterval
from ..scores import Score
from .checkpoint import checked_pass, copied_state, saved_count
from .planned import PlannedSparsifier


@final
class ScopeSparsifier(PlannedSparsifier):
    """Drop `sparsity_level` of the blocks in every scope (0.5 by default), exactly; a `torch.ao.pruning` sparsifier.

    Every argument is a default that a config entry may override.

    Args:
        sparsity_level: fraction of blocks dropped in each scope, in [0, 1].
        nnz: blocks kept in each scope, instead of a level. A scheduler that changes a group's `sparsity_level`
            overrules it.
        block_shape: elements of a block; () is single elements, -1 the whole dimension.
        scope_shape: blocks of a scope; () is the whole tensor, -1 the whole dimension.
        view: (shape, stride) or (shape, stride, offset) on the row-major layout, or a function that returns a torch
            view; None is the tensor as it is.
        axes, unit, scope, sizes: an axis pattern: view, block and scope in einops notation instead; see
            `structure.AxisPattern`.
        pattern: one of `patterns`, which fits itself to each weight; instead of shapes or axes.
        norm: how the elements of a block make its score: 1, 2 (default) or inf.
        score: one of `scores`, by name ("wanda", calibrated first) or object, or a function `(weight, name) ->
            saliency`; a block's score is the sum of its saliencies (the mean where blocks differ in size), and the
            highest are kept. None scores by the norm of the weight.
        edge: `"error"`, or `"partial"` to allow smaller blocks and scopes where a dimension does not divide; a scope
            with fewer blocks than `nnz` keeps all of them.
        block_coupling: a name; blocks of tensors that give the same one are kept or dropped together.
        coupling_order: permutes this tensor's block grid onto the first member's.
        scope_coupling: a name; tensors that give the same one share one budget.
        max_sparsity: the largest fraction of the blocks of any one tensor that a shared budget may drop, in [0, 1]; the
            others then keep fewer. None: a tensor may lose all of them.
        member_scores: how a block's score is made of those of coupled tensors, to the norm's power: `"sum"`, so that a
            tensor counts by its elements, `"mean"`, so that each tensor counts the same, or `"consumers"` (with a
            score): only tensors count whose blocks are inputs of their layer, since the error of dropping a unit
            arises where its output is read.
        stages: a list of dicts of these keys, each choosing among what the earlier kept; budgets count all blocks of
            a scope.
        update_every: masks are chosen in the first call of `step` and in every such call after it; no config key.
        until: calls of `step` from which on masks stay as they are; no config key.

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

    optional_keys = (*PlannedSparsifier.optional_keys, "max_sparsity")
    _one_shot: dict[str, dict[str, Any]] | None = None  # finished rows and chosen masks of a pass; see `one_shot`

    def __init__(
        self,
        sparsity_level: float | None = None,
        *,
        nnz: int | None = None,
        pattern: Pattern | None = None,
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
    ) -> None:
        structure = dict(locals())
        for name in ("self", "sparsity_level", "nnz", "update_every", "until", "__class__"):
            structure.pop(name)
        self.interval, self._steps = UpdateInterval(update_every, until), 0
        super().__init__(sparsity_level, nnz=nnz, **structure)

    def step(self, use_path: bool = True) -> None:
        """Choose the masks anew, unless `update_every` or `until` leave this call out or updates are disabled."""
        if self.interval.is_due(self._steps):
            super().step(use_path)
        else:
            self._need_prepared("step")
        self._steps += 1

    @property
    def _is_frozen(self) -> bool:
        return self.interval.until is not None and self._steps >= self.interval.until

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
        found = []
        for component in self._planned(self.groups).components:
            values = component.values(
                lambda i: self._dense(self.groups[i]), lambda i: self._statistics_of(self.groups[i])
            )
            scores = component.scope.block_norms(values, norm=component.norm_of(values.values()))
            found.append((tuple(self.groups[at]["tensor_fqn"] for _, at in component.leaves), scores))
        return found

    def state_dict(self) -> dict[str, Any]:
        """As of any sparsifier, with the number of calls of `step`, and the progress of an unfinished `one_shot`."""
        return {**super().state_dict(), **self._progress(), "steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As of any sparsifier, with the number of calls of `step` and the progress of `one_shot` if there are any."""
        self._need_prepared("load_state_dict")
        steps, progress = saved_count(state_dict, "steps", self._steps), checked_pass(state_dict, self.groups)
        super().load_state_dict(state_dict, strict)
        self._steps, self._one_shot = steps, progress

    def _pickled(self) -> dict[str, Any]:
        return {**super()._pickled(), **self._progress()}

    def _progress(self) -> dict[str, Any]:
        return {} if self._one_shot is None else {"one_shot": copied_state(self._one_shot)}

    def _forget_model(self) -> None:
        super()._forget_model()
        if not self._resumes:  # else it goes on with a copy of the same model
            self._one_shot, self._steps = None, 0

    def _update_all(self) -> None:
        self._update_components(self._planned(self.groups).components, self.groups)
