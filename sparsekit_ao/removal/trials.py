"""`Trials`: test whether a model without some units gives the same outputs as the model in which they are zero."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..errors import SparsityError
from ..masking.normalized import redo_weight_norms
from ..structure import sparsity_to_nnz
from .compaction import compare_models, kept_units, make_smaller, verify_removal
from .config_fields import ConfigFields
from .plan import HALF, NOT_HELD, Plan, removals_of
from .removal_report import ShrinkReport, Size
from .remove import Removal, masked_copy, round_up
from .verify import Reference


class Trials:
    """Trials of some plans, whose units are zero in one masked model.

    A trial removes the units of some of the plans; those of the others stay as zeros, which changes no output.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        reference_of: Callable[..., Reference],
        done: Callable[[], object] = lambda: None,
        fields: ConfigFields | None = None,
        in_training: bool = False,
    ) -> None:
        self._fields = fields  # if given, a config must hold what is removed
        self._in_training = in_training  # whether trials also run in training mode, as the final verification does
        self.plans = list(plans)
        self.failures = defaultdict[str, list[str]](list)  # {family: why each of its plans that failed did so}
        self._problems: dict[tuple[object, ...], str] = {}  # {couplings: what `problem` returned for them}
        self.masked = masked_copy(model, removals_of(plans))
        self._done, self.reference = done, reference_of(self.masked, dense=model)

    def problem(self, plans: Sequence[Plan]) -> str:
        """Return what is wrong with the model without the zero units of these plans, or "" if nothing is."""
        key = tuple((plan.coupling, plan.fields) for plan in plans)
        if key not in self._problems:
            self._problems[key] = self._problem(plans)
            self._done()
        return self._problems[key]

    def _problem(self, plans: Sequence[Plan]) -> str:
        try:
            small = make_smaller(self.masked, removals_of(plans), single_use=True)[0]
        except SparsityError as e:
            return str(e)
        problem = compare_models(self.reference, small, single_use=True).problem
        if problem and not self._problems:  # the first trial
            self.reference.check_repeats()
        problem = problem or (self.reference.not_trainable(small) if self._in_training else "")
        if self._fields is None or problem:
            return problem
        redo_weight_norms(small, self.reference.normed)
        why = self._fields.fit(small, removals_of(plans), self.reference, single_use=True)[1]
        return NOT_HELD.format(why) if why else ""

    def removed(self, plans: Sequence[Plan], fields: ConfigFields | None) -> tuple[nn.Module, ShrinkReport]:
        """Return the smaller model, whose config follows if it can hold the result, and its report."""
        small, report = verify_removal(self.reference, removals_of(plans), fields, by_caller=True)
        if why := self.reference.not_trainable(small):
            raise SparsityError(f"the smaller model {why}")
        if self._fields is not None and report.not_in_config:
            raise SparsityError(NOT_HELD.format(report.not_in_config))
        return small, report

    def planned(self, plans: Sequence[Plan]) -> tuple[nn.Module, ShrinkReport]:
        """Return the masked model and a report without sizes, for a dry run, or raise an error as `removed` does."""
        if why := self.problem(plans):
            raise SparsityError(why)
        none = Size(parameters=0, bytes=0, flops=0)
        couplings = kept_units(removals_of(plans))
        return self.masked, ShrinkReport(couplings=couplings, before=none, after=none, difference=math.nan, manifest={})


def choose_random_removals(plans: Sequence[Plan]) -> list[Plan]:
    """Choose half of the units of each plan for removal, always the same; at least one unit if `multiple` allows."""
    generator, random = torch.Generator().manual_seed(0), list[Plan]()
    for plan in plans:
        removals = []
        for bound in plan.bound:
            units = bound.scope_units
            kept = sparsity_to_nnz(HALF, units, "")
            kept = round_up(min(kept, units - plan.multiple) if units > plan.multiple else kept, units, plan.multiple)
            keep = torch.rand(bound.grid, generator=generator, device="cpu").argsort(-1) < kept
            removals.append(Removal(bound=bound, keep=keep))
        random.append(replace(plan, removals=tuple(removals)))
    return random
