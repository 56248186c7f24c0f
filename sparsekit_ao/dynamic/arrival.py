"""When weights and optimizers of a prepared model are there: optimizers checked, masks drawn that had no memory.

Knows a plan, groups and optimizers. Between `prepare` and the first step ranks may have sharded parameters, and a model
on the meta device may have got its memory.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..errors import SparsityError
from ..sparsifiers.config import TensorGroup
from ..sparsifiers.plan import Component
from .masking import find_dynamic
from .movement import forget_dropped, zero_dropped
from .settings import Settings
from .start import component_masks
from .trained import check_optimizers, original

__all__ = ["mark_drawn", "meet", "refuse_meta"]


def meet(
    components: Sequence[Component],
    groups: Sequence[TensorGroup],
    optimizers: Sequence[Optimizer],
    settings: Settings,
    starts: Mapping[str, Tensor],
) -> None:
    """Check the optimizers, and draw masks that `prepare` could not, since weights were on the meta device.

    Args:
        components: of the plan of these groups.
        groups: of a prepared model.
        optimizers: those attached; none where nothing is to be checked.
        settings: how masks begin.
        starts: masks known since `prepare`.

    Raises:
        SparsityError: an optimizer that does not fit, or there is still no memory. Nothing is then changed.
    """
    if optimizers:
        check_optimizers(optimizers, groups, settings)
    waiting = [g for g in groups if not find_dynamic(g["module"], g["tensor_name"]).is_drawn]
    refuse_meta(waiting, "Call to_empty and initialise the weights first, then attach(optimizer).")
    weights = [original(g).detach() for g in groups]
    for component in components:
        own = [g for _, at in component.leaves if (g := groups[at]) in waiting]
        masks = starts
        if any(g["tensor_fqn"] not in starts for g in own):
            masks = component_masks(component, groups, weights, settings)
        for g in own:
            find_dynamic(g["module"], g["tensor_name"]).draw(masks[g["tensor_fqn"]])
    zero_dropped(waiting)
    forget_dropped(waiting, optimizers)


def mark_drawn(groups: Sequence[TensorGroup]) -> None:
    """Masks that were loaded need no drawing, if they had the memory to be loaded into."""
    for group in groups:
        found = find_dynamic(group["module"], group["tensor_name"])
        found.is_drawn |= not found.mask.is_meta


def refuse_meta(groups: Sequence[TensorGroup], advice: str) -> None:
    """Raise where a weight has no memory."""
    for group in groups:
        if original(group).is_meta:
            raise SparsityError(f"{group['tensor_fqn']}: it is on the meta device. {advice}")
