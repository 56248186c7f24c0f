"""One update from end to end: what it looks at gathered, the choice made, weights and masks moved, budgets written.

Knows the order of these; each is another room's.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..sparsifiers.config import TensorGroup
from ..sparsifiers.plan import Plan
from .budgets import set_budget
from .choice import choose
from .gradients import GradientTap
from .movement import Movement, move
from .parts import gather
from .settings import Settings, value_at

__all__ = ["turn_over"]


def turn_over(
    plan: Plan,
    groups: Sequence[TensorGroup],
    settings: Settings,
    tap: GradientTap,
    momenta: Mapping[str, Tensor | None],
    level_given: dict[str, float],
    iteration: int,
) -> Movement:
    """Move masks, weights and optimizer state; if a rule raises, nothing has changed.

    Args:
        plan: of these groups.
        groups: of a prepared model; those that share a budget get their new one written.
        settings: by which rules.
        tap: the gradients taken, and the optimizers.
        momenta: by tensor_fqn, where a rule looks at them.
        level_given: see `ScopeSparsifier`; the levels of new budgets are written here too.
        iteration: now.
    """
    is_growth_free = settings.grow is None and settings.target is not None
    fraction = 0.0 if is_growth_free else value_at(settings.update_fraction, iteration, "update_fraction")
    values = {"gradients": tap.gradients, "momenta": momenta}
    parts = gather(plan.components, groups, values, level_given, iteration, settings.seed)
    chosen, held = choose(parts, settings, groups, iteration, fraction)
    new: dict[int, Tensor] = {}
    for part, kept in zip(parts, chosen, strict=True):
        masks = part.masks(kept)
        new.update({at: masks[spec] for spec, at in part.slots.component.leaves})
    moved = [new[at] for at in range(len(groups))]
    done = move(groups, moved, settings, tap.optimizers, tap.gradients, iteration, fraction)
    for part, count in zip(parts, held, strict=True):
        if part.is_open:
            level_given.update(set_budget(part.slots.component, groups, int(count[0])))
    return done
