"""Two couplings as one, where a model has one number for the units of both."""

from collections.abc import Mapping
from dataclasses import replace
from string import ascii_letters

from torch import nn

from ..errors import SparsityError
from ..structure import dimensions_of
from .bound import BoundCoupling, count_stars, occurrences
from .coupling import Coupling


def merged_couplings(first: Coupling, second: Coupling, model: nn.Module) -> Coupling | None:
    """One coupling whose unit is a unit of one and as many of the other as there are for it.

    Queries and keys of a rotary attention have pairs of numbers as units, values single ones; where the forward has one
    size of a head for all, a pair goes with two single ones.

    Returns:
        The coupling, with the attributes of both; None if they share a tensor, are not bound to the same layers, have
        numbers of units of which neither divides the other, or have units in parts of a concatenation or in two
        dimensions of a tensor.

    >>> model = nn.ModuleDict({"q": nn.Linear(3, 8), "v": nn.Linear(3, 8)})
    >>> pairs, single = Coupling({"q.weight": "(d u) i"}, sizes={"d": 2}), Coupling({"v.weight": "u i"})
    >>> merged_couplings(pairs, single, model).members
    {'q.weight': '(d u) i', 'v.weight': '(a u) i'}
    """
    texts = [(axes, one.unit) for one in (first, second) for axes in one.members.values()]
    if any("+" in axes or len(occurrences(axes, unit)) > 1 for axes, unit in texts):
        return None
    if len({count_stars(next(iter(one.members))) for one in (first, second)}) > 1:
        first, second = _of_all_layers(first), _of_all_layers(second)
    try:
        ours, theirs = first.bind(model), second.bind(model)
    except SparsityError:  # layers of different sizes
        return None
    names = {member.fqn for one in ours for member in one.members}
    if [one.captured for one in ours] != [one.captured for one in theirs]:
        return None
    if names & {member.fqn for one in theirs for member in one.members}:
        return None
    if ours[0].grid[-1] > theirs[0].grid[-1]:
        first, second, ours, theirs = second, first, theirs, ours
    times = {b.grid[-1] / a.grid[-1] for a, b in zip(ours, theirs, strict=True)}
    if len(times) > 1 or not (each := times.pop()).is_integer():
        return None
    if ours[0].grid[:-1] != theirs[0].grid[:-1]:
        first, second = (_without_scope(one, bound[0]) for one, bound in ((first, ours), (second, theirs)))
    return _joined(first, second, int(each))


def _of_all_layers(coupling: Coupling) -> Coupling:
    """The coupling with the same units in all layers."""

    def joined(texts: Mapping[str, str]) -> dict[str, str]:
        return {text.replace("**", "*").replace("*", "**"): axes for text, axes in texts.items()}

    return replace(coupling, members=joined(coupling.members), attrs=joined(coupling.attrs))


def _without_scope(coupling: Coupling, bound: BoundCoupling) -> Coupling:
    """The coupling with the same units in every scope."""
    return replace(coupling, scope="", sizes={**{axis: bound.sizes[axis] for axis in bound.scope}, **coupling.sizes})


def _joined(first: Coupling, second: Coupling, each: int) -> Coupling:
    """The first coupling with the members of the second, of which `each` units make one."""
    used = {axis for one in (first, second) for text in one.members.values() for d in dimensions_of(text) for axis in d}
    fresh = (letter for letter in ascii_letters if letter not in used)
    scopes = dict(zip(second.scope.split(), first.scope.split(), strict=True))
    names = {axis: [scopes.get(axis) or next(fresh)] for axis in (*second.scope.split(), *second.sizes)}
    parts = [next(fresh)] if each > 1 else []
    names[second.unit] = [*parts, first.unit]
    sizes = {names[axis][0]: size for axis, size in second.sizes.items()} | dict.fromkeys(parts, each)
    return replace(
        first,
        members={**first.members, **{name: _renamed(text, names) for name, text in second.members.items()}},
        sizes={**sizes, **first.sizes},
        attrs={**{path: " ".join(_flat(text.split(), names)) for path, text in second.attrs.items()}, **first.attrs},
    )


def _renamed(axes: str, names: Mapping[str, list[str]]) -> str:
    dimensions = [_flat(dimension, names) for dimension in dimensions_of(axes)]
    return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dimensions)


def _flat(axes: list[str], names: Mapping[str, list[str]]) -> list[str]:
    return [name for axis in axes for name in names.get(axis, [axis])]
