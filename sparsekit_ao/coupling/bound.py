"""Couplings bound to one model, with full names of tensors and numbers of units, and what `Coupling.bind` needs."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import CouplingError, SparsityError
from ..structure import AxisPattern, dimensions_of, window_shape
from ..structure.tiles import Shape

_DIMENSION = re.compile(r"\([^()]*\)|[^\s()]+")
_STAR = re.compile(r"(\*\*?)")
_MATCHES = {"*": "([^.]+)", "**": ".*"}
_MOST_STARS = 4

Matches = dict[tuple[str, ...], list[str]]  # {values of the stars of a pattern: names}


@dataclass(frozen=True, kw_only=True)
class Member:
    """A tensor of a bound coupling, with the dimension that has the unit.

    Attributes:
        fqn: The tensor's name in the model.
        pattern: The `AxisPattern` of its axes; its view has the dimensions (*scope, unit, the rest).
        is_parameter: Whether it has a mask. Others are only cut when units are removed: buffers, a second dimension
            with the unit (columns of recurrent weights), and members of a coupling with `lists`.
        tied_to: The name of an earlier member that is the same tensor, or "".

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    >>> bound = sparsekit_ao.Coupling({"0.weight": "u i", "0.bias": "u"}).bind(model)[0]
    >>> [(member.fqn, member.pattern.axes, member.is_parameter) for member in bound.members]
    [('0.weight', 'u i', True), ('0.bias', 'u', True)]
    """

    fqn: str
    pattern: AxisPattern
    is_parameter: bool
    tied_to: str = ""


@dataclass(frozen=True, kw_only=True)
class BoundCoupling:
    """A coupling matched against one model; `Coupling.bind` returns it.

    Attributes:
        name: The name in errors and reports.
        captured: The parts of names that the `*`s stand for.
        members: The tensors, in the order of the coupling's name patterns.
        unit: The name of the axis that is kept or dropped.
        scope: The names of the axes at each of whose indices a budget of its own applies.
        sizes: {axis: length} of the scope axes, the unit axis, and the axes whose sizes were given.
        attrs: {pattern of attributes: axes whose product they hold}, as in the coupling.
        lists: Names of the `nn.ModuleList`s whose modules belong to the units, in the order of the grid.
        listed: For each unit, the names of the parameters of its modules.
        kind: What the units are, as in `Coupling.kind`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 5))
    >>> [(b.name, b.grid) for b in sparsekit_ao.Coupling({"*.weight": "u i", "*.bias": "u"}).bind(model)]
    [('0.weight', (3,)), ('1.weight', (5,))]
    """

    name: str
    captured: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    unit: str
    scope: tuple[str, ...] = ()
    sizes: Mapping[str, int]
    attrs: Mapping[str, str] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    listed: tuple[tuple[str, ...], ...] = ()
    kind: str = ""

    @property
    def grid(self) -> Shape:
        """The shape of the grid of units: (*scope sizes, units of a scope)."""
        return tuple(self.sizes[axis] for axis in (*self.scope, self.unit))

    @property
    def scope_units(self) -> int:
        """The number of units of a scope."""
        return self.sizes[self.unit]

    @property
    def units(self) -> int:
        """The number of units of all scopes together."""
        return math.prod(self.grid)


def solve_sizes(
    name: str, tensors: Sequence[tuple[str, str, Shape]], shared: set[str], known: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of all shared axes: a dimension with one unknown axis gives its length, again and again."""
    sizes = dict(known)
    source: dict[str, str] = {}
    while True:
        before = len(sizes)
        for fqn, axes, shape in tensors:
            for axis, size in _implied_sizes(axes, shape, sizes):
                if axis not in shared or axis in known:
                    continue  # h and w of two kernels need not agree; the pattern itself checks a known size
                if sizes.setdefault(axis, size) != size:
                    raise CouplingError(
                        f"coupling {name!r}: {fqn} has {axis}={size}, but {source[axis]} has {axis}={sizes[axis]}. "
                        "Units must correspond one to one; correct the axes, or give the sizes of the axes inside a "
                        "unit."
                    )
                source.setdefault(axis, fqn)
        if len(sizes) == before:
            return sizes


def _implied_sizes(axes: str, shape: Shape, sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    dimensions = dimensions_of(axes)
    if len(dimensions) != len(shape):
        return  # check_shape reports it
    for size, whole, factors in zip(window_shape(axes, shape), shape, dimensions, strict=True):
        if size < 0 or size == 0 < whole:
            continue  # nothing is left beside the other parts, which check_shape reports too
        for axis in factors:
            others = [other for other in factors if other != axis]
            rest = math.prod(sizes.get(other, 0) for other in others)
            if rest and size % rest == 0:
                yield axis, size // rest


def occurrences(axes: str, unit: str) -> list[str]:
    """Return the pattern once for each dimension with the unit; in the others the unit then has another name.

    >>> occurrences("o u h w", "u"), occurrences("(g u) u", "u")
    (['o u h w'], ['(g u) u1', '(g u0) u'])
    """
    dimensions, word = _DIMENSION.findall(axes), re.compile(rf"\b{re.escape(unit)}\b")
    at = [d for d, dimension in enumerate(dimensions) if word.search(dimension)]
    if len(at) < 2:
        return [axes]
    patterns = []
    for kept in at:
        renamed = {d: word.sub(f"{unit}{d}", dimensions[d]) for d in at if d != kept}
        patterns.append(" ".join(renamed.get(d, dimension) for d, dimension in enumerate(dimensions)))
    return patterns


def count_stars(pattern: str) -> int:
    """Count the `*`s, each of which captures one part of a dotted name; a `**` matches any text and captures none."""
    return _STAR.findall(pattern).count("*")


def match_names(pattern: str, names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Return the names that a pattern matches, by what its `*`s capture; both in the order of `names`.

    >>> match_names("layers.*.up.weight", ["layers.0.up.weight", "layers.1.up.weight", "layers.1.up.bias"])
    {('0',): ['layers.0.up.weight'], ('1',): ['layers.1.up.weight']}
    >>> match_names("**.weight", ["a.weight", "a.b.weight"])
    {(): ['a.weight', 'a.b.weight']}
    """
    if pattern.count("**") > _MOST_STARS or max(part.count("*") for part in pattern.split(".")) > _MOST_STARS:
        raise CouplingError(
            f"{pattern!r}: a name pattern may have at most {_MOST_STARS} '**', and as many '*' between two dots, since "
            "matching more could take very long"
        )
    if "*" not in pattern:
        return {(): [pattern]} if pattern in names else {}
    regex = re.compile("".join(_MATCHES.get(text) or re.escape(text) for text in _STAR.split(pattern)))
    matches: Matches = {}
    for match in filter(None, map(regex.fullmatch, names)):
        matches.setdefault(match.groups(), []).append(match[0])
    return matches


def fill_stars(pattern: str, captured: Iterable[str]) -> str:
    """Replace the `*`s of a pattern by what they captured: `layers.*.weight` and `("3",)` give `layers.3.weight`."""
    values = iter(captured)
    return _STAR.sub(lambda star: "**" if star[0] == "**" else next(values, "*"), pattern)


def is_list(module: nn.Module | None) -> bool:
    """Whether this is an `nn.ModuleList` of the model, not one in which torch holds parametrizations."""
    return isinstance(module, nn.ModuleList) and not isinstance(module, parametrize.ParametrizationList)


def match_lists(model: nn.Module, patterns: Sequence[str], where: str) -> dict[str, Matches]:
    """Return the lists of modules that each pattern matches."""
    modules = model.named_modules(remove_duplicate=False) if patterns else ()
    names = [name for name, module in modules if is_list(module)]
    lists = {pattern: match_names(pattern, names) for pattern in patterns}
    for pattern, matches in lists.items():
        if not matches:
            raise SparsityError(f"{where}{pattern!r} in lists matches no nn.ModuleList of the model")
    return lists


def with_lists(
    bound: BoundCoupling, lists: Mapping[str, Matches], model: nn.Module, parameters: Mapping[str, Tensor]
) -> BoundCoupling:
    """Return the coupling with its lists and the parameters of each unit."""
    where = f"coupling {bound.name!r}: "
    for pattern, matches in lists.items():
        if bound.captured not in matches:
            raise SparsityError(f"{where}the model has no list {fill_stars(pattern, bound.captured)!r}")
    order = [*bound.scope, bound.unit]  # modules of a list have the order of the grid
    for member in bound.members:
        axes = [axis for dimension in member.pattern.dimensions for axis in dimension if axis in order]
        if axes != order:
            raise CouplingError(
                f"{where}{member.fqn} has its axes in the order {' '.join(axes)!r}, but with lists it must be "
                f"{' '.join(order)!r}, since the modules of a list belong to the units one scope after the other"
            )
    paths = tuple(path for matches in lists.values() for path in matches[bound.captured])
    units: list[list[str]] = [[] for _ in range(bound.units)]
    unit_of: dict[int, tuple[int, str]] = {}
    for path in paths:
        if paths.count(path) > 1:
            raise SparsityError(f"{where}two patterns in lists match {path!r}; each list may be matched once")
        count = len(model.get_submodule(path))  # type: ignore[arg-type]
        if count != bound.units:
            raise CouplingError(
                f"{where}the list {path} has {count} modules, but the coupling has {bound.units} units; each needs one"
            )
        for fqn, parameter in parameters.items():
            index = fqn[len(path) + 1 :].partition(".")[0] if fqn.startswith(f"{path}.") else ""
            if parameter.ndim and index.isdecimal():  # else a parameter of the list itself, which belongs to no unit
                units[int(index)].append(fqn)
                other, name = unit_of.setdefault(id(parameter), (int(index), fqn))
                if other != int(index):
                    raise CouplingError(
                        f"{where}{name} and {fqn} are one parameter, but belong to the units {other} and {index}; drop "
                        "units of modules that share nothing"
                    )
    if [] in units:
        raise SparsityError(
            f"{where}{paths[0]}.{units.index([])} has no parameters of its own, so there is nothing to put a mask on; "
            "a module may be in one place only"
        )
    return replace(bound, lists=paths, listed=tuple(map(tuple, units)))
