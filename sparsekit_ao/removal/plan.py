"""`Plan`: what is to happen to the units of one coupling of a model."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..coupling import BoundCoupling, Coupling
from ..structure import sparsity_to_nnz
from .remove import Removal, round_up

HALF = 0.5  # the fraction of the units that is removed in trials, and by default
MAX_SPARSITY = 0.9  # the largest fraction of its units that a coupling loses by default
PREFERRED_MULTIPLE = 32  # of units of an MLP: kernels like it, and llama.cpp quantizes no rows of other lengths
MAX_FAILURES = 3  # after so many failures, plans that differ only in the numbers in their names are not tried
NOT_HELD = "the config cannot hold it ({}); keep_config=False removes it"
NOT_TRIED = f"not tried, since {MAX_FAILURES} like it cannot be removed: "


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What is to happen to the units of one coupling, in each of its scopes.

    `level` is the fraction of the units that is removed. If the whole model has one budget, that decides how many are
    removed, and `limit` is the largest fraction. The number of kept units is a multiple of `multiple`, or all are kept.
    `score_units` fills `scores`, what chooses units fills `removals`, and `fit_to_config` fills `fields`.

    >>> model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 4))
    >>> plan = Plan.of(Coupling({"0.weight": "u i", "1.weight": "o u"}), model, multiple=4)
    >>> plan.scope_units, plan.kept, plan.least
    (12, 8, 4)
    """

    coupling: Coupling
    bound: tuple[BoundCoupling, ...] = ()  # one for each layer
    level: float = HALF
    limit: float = MAX_SPARSITY
    multiple: int = 1
    scores: tuple[Tensor, ...] = ()  # for each layer, those of its units [scopes, units], which add up
    removals: tuple[Removal, ...] = ()  # for each layer, which units are kept
    fields: tuple[str, ...] = ()  # fields of the config that count the units, perhaps with those of other plans
    left_out: str = ""  # why the coupling keeps its units

    @classmethod
    def of(cls, coupling: Coupling, model: nn.Module, multiple: int = 1) -> "Plan":
        """Return a plan of a coupling that is bound to a model."""
        return cls(coupling=coupling, bound=tuple(coupling.bind(model)), multiple=multiple)

    @property
    def name(self) -> str:
        """The name of the coupling."""
        return self.coupling.name

    @property
    def kind(self) -> str:
        """What the units are."""
        return self.coupling.kind

    @property
    def attrs(self) -> Mapping[str, str]:
        """The integer attributes that change with the units, {path: axes}, as far as they are known."""
        return self.coupling.attrs

    @property
    def scope_units(self) -> int:
        """The number of units of a scope."""
        return self.bound[0].scope_units

    @property
    def kept(self) -> int:
        """The number of units of a scope that are kept at the level."""
        return self._rounded(self.level, "shrink: ratio: ")

    @property
    def least(self) -> int:
        """The number of units of a scope that are always kept."""
        return self._rounded(self.limit, "max_sparsity: ")

    def _rounded(self, level: float, where: str) -> int:
        return round_up(sparsity_to_nnz(level, self.scope_units, where), self.scope_units, self.multiple)

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors that have the units."""
        return {member.fqn for bound in self.bound for member in bound.members}

    def with_attrs(self, paths: Mapping[str, str]) -> "Plan":
        """Return the plan with more integer attributes that change."""
        attrs = {**self.attrs, **paths}
        return self._with(replace(self.coupling, attrs=attrs), [replace(b, attrs=attrs) for b in self.bound])

    def named(self, name: str) -> "Plan":
        """Return the plan of a coupling with another name."""
        coupling = replace(self.coupling, name=name)
        return self._with(coupling, [replace(b, name=coupling.name_of(b.captured)) for b in self.bound])

    def _with(self, coupling: Coupling, bound: Iterable[BoundCoupling]) -> "Plan":
        bound = tuple(bound)
        removals = tuple(replace(removal, bound=b) for removal, b in zip(self.removals, bound, strict=False))
        return replace(self, coupling=coupling, bound=bound, removals=removals)

    def split(self) -> list["Plan"]:
        """Return a plan for each layer."""
        plans = []
        for at, bound in enumerate(self.bound):
            layer, own = self.coupling.of_layer(bound), slice(at, at + 1)
            plan = replace(self, bound=self.bound[own], scores=self.scores[own], removals=self.removals[own])
            plans.append(plan._with(layer, [replace(bound, captured=(), attrs=layer.attrs)]))
        return plans


def give_own_names(plans: Sequence[Plan]) -> list[Plan]:
    """Make the names of plans that are not left out differ: equal ones get the kind, the first axes or a number."""
    renamed = list(plans)
    for name, count in Counter(plan.name for plan in active(plans)).items():
        alike = [at for at, plan in enumerate(plans) if plan.name == name and not plan.left_out]
        choices = (
            [f"({plans[at].kind})" for at in alike],
            [next(iter(plans[at].coupling.members.values())) for at in alike],
            [f"#{at}" for at in alike],
        )
        suffixes = next(choice for choice in choices if len({*choice}) == count)
        for at, suffix in zip(alike, suffixes, strict=True) if count > 1 else ():
            renamed[at] = plans[at].named(f"{name} {suffix}")
    return renamed


def leave_out_layers(plans: Iterable[Plan], why_not: Callable[[BoundCoupling], str]) -> list[Plan]:
    """Leave out each layer of the plans for which `why_not` returns a reason."""
    parts = list[Plan]()
    for plan in plans:
        reasons = [plan.left_out or why_not(bound) for bound in plan.bound]
        if not any(reasons):
            parts.append(plan)
        elif all(reasons):
            parts.append(replace(plan, left_out=reasons[0]))
        else:
            parts += [replace(layer, left_out=why) for layer, why in zip(plan.split(), reasons, strict=True)]
    return give_own_names(parts)


def active(plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans that are not left out."""
    return [plan for plan in plans if not plan.left_out]


def removals_of(plans: Iterable[Plan]) -> list[Removal]:
    """Return what the plans remove from all layers."""
    return [replace(r, source=at, fields=plan.fields) for at, plan in enumerate(plans) for r in plan.removals]
