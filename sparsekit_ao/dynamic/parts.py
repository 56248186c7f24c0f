"""What an update looks at, gathered: every component of the plan with its weights, masks, gradients and budget.

Knows groups and where their tensors are; decides nothing and changes nothing.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..config import TensorGroup
from ..plan import Component
from ..spec import BlockSpec
from .budgets import budget_rows, is_fixed, sizes
from .masking import find_dynamic
from .slots import Slots
from .trained import original
from .update import Part

__all__ = ["gather"]


def gather(
    components: Sequence[Component],
    groups: Sequence[TensorGroup],
    values: Mapping[str, Mapping[str, Tensor | None]],
    level_given: Mapping[str, float],
    step: int,
    seed: int,
) -> list[Part]:
    """One part a component.

    Args:
        components: of the plan of these groups.
        groups: of a prepared model.
        values: "gradients" and "momenta" by tensor_fqn, where there are any.
        level_given: see `ScopeSparsifier`.
        step, seed: what random numbers are keyed by.
    """
    parts = []
    for component, size in zip(components, sizes(components), strict=True):
        own = {spec: groups[at] for spec, at in component.leaves}
        slots = Slots(
            component=component,
            weights={spec: original(g).detach() for spec, g in own.items()},
            masks={spec: find_dynamic(g["module"], g["tensor_name"]).mask for spec, g in own.items()},
            gradients=_found(values["gradients"], own),
            momenta=_found(values["momenta"], own),
            step=step,
            seed=seed,
        )
        budget = budget_rows(component, groups, level_given).to(slots.active.device)
        parts.append(Part(slots=slots, budget=budget, is_open=not is_fixed(component, groups), size=size))
    return parts


def _found(values: Mapping[str, Tensor | None], own: Mapping[BlockSpec, TensorGroup]) -> dict[BlockSpec, Tensor]:
    return {spec: found for spec, g in own.items() if (found := values.get(g["tensor_fqn"])) is not None}
