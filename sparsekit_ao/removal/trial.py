"""One compaction, before it is accepted: units removed from a copy of a masked model, and how its outputs compare."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..coupling import Coupling
from ..errors import SparsityError
from .attributes import Change, apply_changes, find_changes
from .listed import check_lists, drop_modules, outside_dropped
from .norms import change_config_eps, fold_norm, narrowed_group_norms, pruned_norms
from .removal import Removal, find_removal, plain_tensors, remove_units
from .verify import Comparison, Reference


@dataclass(frozen=True, kw_only=True, eq=False)
class Compacted:
    """A compacted copy, what was removed, the changed attributes, what is not exact, and the dense shapes."""

    model: nn.Module
    removals: Sequence[Removal]
    changes: list[Change]
    notes: list[str]
    shapes: dict[str, tuple[int, ...]]


def find_removals(
    model: nn.Module, couplings: Sequence[Coupling], multiple_of: int | Mapping[str, int]
) -> list[Removal]:
    """What each coupling of a masked model would remove, except in dropped modules; see `compact` for the arguments."""
    names = [coupling.name for coupling in couplings]
    for name in multiple_of if isinstance(multiple_of, Mapping) else ():
        if name not in names:
            raise SparsityError(f"multiple_of names {name!r}, but the couplings are {', '.join(map(repr, names))}")
    removals = []
    for source, coupling in enumerate(couplings):
        multiple = multiple_of.get(coupling.name, 1) if isinstance(multiple_of, Mapping) else multiple_of
        for bound in coupling.bind(model):
            names = [*(m.fqn for m in bound.members), *(fqn for own in bound.listed for fqn in own)]
            tensors = plain_tensors(model, names)
            removals.append(find_removal(bound, tensors, multiple, source))
    return outside_dropped(removals)


def compacted(model: nn.Module, removals: Sequence[Removal]) -> Compacted:
    """A copy of a masked model without some units; raises where they cannot be removed."""
    check_lists(model, removals, "")
    changes, small = find_changes(model, removals), copy.deepcopy(model)
    remove_units(small, removals)
    apply_changes(small, changes)
    notes = narrowed_group_norms(model, small)
    folded: list[Change] = []
    for fqn, keep in pruned_norms(model, removals).items():
        own, note = fold_norm(model, small, fqn, keep)
        folded += own
        notes += [note] if note else []
    of_config, lost = change_config_eps(model, small, folded)
    changes += folded + of_config
    notes += lost
    drop_modules(small, removals)  # last, since it changes names
    fqns = [m.fqn for removal in removals for m in removal.coupling.members]
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in plain_tensors(model, fqns).items()}
    return Compacted(model=small, removals=removals, changes=changes, notes=notes, shapes=shapes)


def compared(reference: Reference, result: Compacted, tolerance: float, *, discarded: bool = False) -> Comparison | str:
    """How a compacted model compares, or a description of what is wrong with it; see `Reference.compare`."""
    try:
        found = reference.compare(result.model, tolerance, discarded=discarded)
    except Exception as e:
        return f"does not run: {e}"
    if found.decisive <= tolerance:
        return found
    finite = found.decisive < float("inf")
    how = f"a relative difference of {found.difference:.1e}" if finite else "other shapes, integers, inf or nan"
    return f"gives other outputs: {how}"
