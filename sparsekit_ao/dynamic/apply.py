"""Gathers what an update reads and applies the masks that it chose; and the update as a whole.

`run_update` gathers, chooses and applies. What may raise is computed before anything is changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..calibration import Statistics
from ..distributed import fill, full_tensor, is_sharded, local, placed_like, sum_over_ranks
from ..errors import SparsityError
from ..masking import select
from ..scores import keyed_generator
from ..selection import finished
from ..sparsifiers.config import TensorGroup
from .budgets import Budgets
from .choose import NotReadyError, Reader, choose
from .gradients import GradientCapture
from .mask import find_dynamic
from .optimizers import original, placed_gradient, reset_state, second_moments, start_second_moments
from .settings import Settings, read_numbers, value_at
from .slots import Gathered, Part, Slots


@dataclass(frozen=True, kw_only=True)
class Movement:
    """What one update changed.

    Attributes:
        iteration: when.
        fraction: of the active blocks that were pruned, of which some may have grown again at once.
        grown, pruned: {tensor_fqn: elements} that became active, and that became inactive.
        kept: {tensor_fqn: elements} that are active now. On a GPU these three are read when they are first used.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sparsifier = sparsekit_ao.SET(0.5, optimizer, update_every=1)
    >>> sparsifier.prepare(model)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> sparsifier.step()
    >>> sparsifier.last_update.iteration, sparsifier.last_update.kept
    (1, {'0.weight': 4})
    """

    iteration: int
    fraction: float
    grown: Mapping[str, int]
    pruned: Mapping[str, int]
    kept: Mapping[str, int]


class Counts(Mapping[str, int]):
    """{name: a number in a tensor}, all read together when one of them is first used; pickled as a dict.

    >>> Counts({"0.weight": torch.tensor(3), "1.weight": torch.tensor(4)})
    {'0.weight': 3, '1.weight': 4}
    """

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        self._found = found

    @cached_property
    def _read(self) -> dict[str, int]:
        return dict(zip(self._found, map(int, read_numbers([*self._found.values()])), strict=True))

    def __getitem__(self, name: str) -> int:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return repr(self._read)

    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return dict, (self._read,)


def run_update(
    budgets: Budgets,
    capture: GradientCapture,
    momenta: Mapping[str, Tensor | None],
    level_given: dict[str, float],
    iteration: int,
    statistics: Sequence[Statistics],
    done: Callable[[], None],
    is_ready: bool | Tensor = True,
) -> Movement | None:
    """Gather, choose and apply; if a rule raises, or a tensor `is_ready` holds 0, nothing has changed (None).

    It waits for a device only to read `is_ready`, and where budgets depend on what is pruned: where tensors compete
    (prune="global"), share what grows (redistribute), or follow a target; the first time for both. Shared budgets are
    set to their new values, and their levels written into `level_given` (see `ScopeSparsifier`).
    `momenta` are by tensor_fqn, where a rule needs them; `statistics` are one for each group. `done` is called once
    everything is written.
    """
    settings = budgets.settings
    only_prunes = settings.grow is None and settings.target is not None
    fraction = 0.0 if only_prunes else value_at(settings.update_fraction, iteration, "update_fraction")
    parts = _gather(budgets, capture.gradients, momenta, level_given, iteration, statistics)
    read = Reader(is_ready)
    try:
        chosen, held = choose(parts, budgets, iteration, fraction, read)
        read([])
    except NotReadyError:
        return None
    masks: dict[int, Tensor] = {}
    for part, kept in zip(parts, chosen, strict=True):
        new = part.masks(kept)
        masks.update({at: new[spec] for spec, at in part.slots.component.leaves})
    ordered = [masks[at] for at in range(len(budgets.groups))]
    shared = dict(zip(budgets.shared, map(int, read_numbers([held[k][0] for k in budgets.shared])), strict=True))

    def set_budgets() -> None:
        for k, nnz in shared.items():
            level_given.update(budgets.set(k, nnz))
        done()

    counts = _apply(budgets.groups, ordered, settings, capture, iteration, set_budgets)
    return Movement(
        iteration=iteration,
        fraction=fraction,
        grown=Counts({fqn: found[0] for fqn, found in counts.items()}),
        pruned=Counts({fqn: found[1] - found[0] for fqn, found in counts.items()}),
        kept=Counts({fqn: found[2] for fqn, found in counts.items()}),
    )


def _gather(
    budgets: Budgets,
    gradients: Mapping[str, Tensor],
    momenta: Mapping[str, Tensor | None],
    level_given: Mapping[str, float],
    step: int,
    statistics: Sequence[Statistics],
) -> list[Part]:
    """One part for each component of the budgets, in their order; gradients and momenta are by tensor_fqn."""
    parts = []
    for k, component in enumerate(budgets.components):
        own = {spec: budgets.groups[at] for spec, at in component.leaves}
        weights = {spec: original(g).detach() for spec, g in own.items()}
        device = next(iter(weights.values())).device
        slots = Slots(
            component=component,
            weights=Gathered(weights),
            masks=Gathered({s: _mask(g) for s, g in own.items()}),
            gradients=Gathered({s: t for s, g in own.items() if (t := gradients.get(g["tensor_fqn"])) is not None}),
            momenta=Gathered({s: t for s, g in own.items() if (t := momenta.get(g["tensor_fqn"])) is not None}),
            statistics={spec: statistics[at] for spec, at in component.leaves},
            device=device,
            step=step,
            seed=budgets.settings.seed,
        )
        sharded = weights if any(map(is_sharded, weights.values())) else {}
        parts.append(Part(slots=slots, budget=budgets.rows(k, level_given), sharded=sharded))
    return parts


def _apply(
    groups: Sequence[TensorGroup],
    masks: Sequence[Tensor],
    settings: Settings,
    capture: GradientCapture,
    iteration: int,
    set_budgets: Callable[[], None],
) -> dict[str, Tensor]:
    """Write new masks (bool, one for each group, sharded as its weight) into the present ones, in place.

    Grown and pruned weights become zero (or `new_values`), and so does their optimizer state; all of it also where
    Ctrl-C comes in the middle. Returns {tensor_fqn: elements [grown, grown or pruned, kept]}.
    """
    optimizers, weights = capture.optimizers, [original(g) for g in groups]
    moments: list[list[Tensor]] = [[] for _ in groups]
    if settings.state_init == "grad":
        moments = [second_moments(optimizers, w, g["tensor_fqn"]) for w, g in zip(weights, groups, strict=True)]
    values = [_new_values(g, new, settings, iteration) for g, new in zip(groups, masks, strict=True)]
    changed = [new ^ (_mask(g) != 0) for g, new in zip(groups, masks, strict=True)]

    def write() -> None:
        for k, group in enumerate(groups):
            held, value, grown = local(weights[k]), values[k], changed[k] & masks[k]
            held.masked_fill_(local(changed[k]), 0)
            if value is not None:
                held.copy_(torch.where(local(grown), local(value), held))
            reset_state(optimizers, weights[k], changed[k])
            if moments[k]:
                start_second_moments(moments[k], grown, capture.gradients[group["tensor_fqn"]])
            fill(_mask(group), masks[k])
        set_budgets()

    finished(write)
    counts = {}
    for k, group in enumerate(groups):
        found = torch.stack([local(t).count_nonzero() for t in (changed[k] & masks[k], changed[k], masks[k])])
        counts[group["tensor_fqn"]] = sum_over_ranks(found, weights[k])
    return counts


def _new_values(group: TensorGroup, new: Tensor, settings: Settings, iteration: int) -> Tensor | None:
    """What the user's function returns for one weight; called before anything is changed, since it may raise."""
    if settings.new_values is None:
        return None
    weight, fqn = original(group).detach(), group["tensor_fqn"]
    zeroed = full_tensor(weight).masked_fill(full_tensor(new) ^ (full_tensor(_mask(group)) != 0), 0)
    found = settings.new_values(zeroed, keyed_generator(settings.seed, fqn, iteration, "values"))
    if not isinstance(found, Tensor) or found.shape != weight.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SparsityError(
            f"{fqn}: new_values must return a tensor of the weight's shape {tuple(weight.shape)}, got {what}"
        )
    return placed_like(found.to(zeroed), weight)


@torch.no_grad()
def zero_dropped(groups: Sequence[TensorGroup]) -> None:
    """Zero every weight that its mask drops, in place."""
    for group in groups:
        weight = local(original(group))
        weight.copy_(select(weight, local(_mask(group))))


def zero_dropped_state(groups: Sequence[TensorGroup], optimizers: Sequence[Optimizer]) -> None:
    """Zero the optimizer state of dropped weights, which would change them for many more steps."""
    for group in groups:
        reset_state(optimizers, original(group), _mask(group) == 0)


@torch.no_grad()
def zero_dropped_gradients(held: Sequence[tuple[Tensor, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Zero gradients and optimizer state of (parameter, mask) where the mask drops, so that zeros outlast the mask."""
    for parameter, mask in held:
        gradient = placed_gradient(parameter)
        if gradient is not None:
            grad = local(gradient)
            grad.copy_(select(grad, local(mask)))
        reset_state(optimizers, parameter, mask == 0)


def _mask(group: TensorGroup) -> Tensor:
    return find_dynamic(group["module"], group["tensor_name"]).mask
