"""Modules of lists that are units of a coupling, such as experts: checked, and dropped from their lists."""

from collections.abc import Sequence

from torch import nn

from ..coupling.bound import is_list
from ..errors import SparsityError
from .removal import Removal


def check_lists(model: nn.Module, removals: Sequence[Removal], where: str) -> None:
    """Raise unless all lists of the couplings are in the model, each once and with a module for each unit.

    Errors begin with `where`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[int, str] = {}
    for removal in removals:
        name, units = removal.coupling.name, removal.coupling.units
        for path in removal.coupling.lists:
            found = modules.get(path)
            if found is None or not is_list(found) or len(found) != units:
                raise SparsityError(f"{where}coupling {name!r}: {path!r} is no nn.ModuleList of {units} modules")
            if id(found) in seen:
                raise SparsityError(
                    f"{where}the couplings {seen[id(found)]!r} and {name!r} both drop modules of {path!r}"
                )
            seen[id(found)] = name


def drop_modules(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Drop the modules of dropped units from their lists, in place; later ones move up."""
    # All lists are looked up first, since one list may be in a module of another.
    found = [(model.get_submodule(path), removal) for removal in removals for path in removal.coupling.lists]
    for modules, removal in found:
        for at in reversed(_dropped(removal)):
            del modules[at]  # type: ignore[operator]


def outside_dropped(removals: Sequence[Removal]) -> list[Removal]:
    """The removals without those of which all members are in modules that others drop."""
    paths = [(path, removal) for removal in removals for path in removal.coupling.lists]
    prefixes = tuple(f"{path}.{at}." for path, removal in paths for at in _dropped(removal))
    return [one for one in removals if not all(m.fqn.startswith(prefixes) for m in one.coupling.members)]


def _dropped(removal: Removal) -> list[int]:
    found: list[int] = (~removal.keep.reshape(-1)).nonzero()[:, 0].tolist()
    return found
