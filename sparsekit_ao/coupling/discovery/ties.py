"""From factors to groups: which axes of which tensors are one unit, and the patterns a person would write for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .call import Label
from .factors import Axis, Factor, leaves
from .trace import Trace

__all__ = ["Frozen", "Tie", "ties"]

_DIMENSIONS = "oihwxyzabc"  # names of dimensions without units, as weights have them: out, in, height, width
_SCOPES = "stpq"
_BESIDE = "dgefjklmnrvABC"  # names of what stands beside a unit in its dimension


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Axes that go together.

    Attributes:
        members: {tensor: its pattern}; the unit is `u`.
        scope: axes that go with the unit in every tensor of the forward, so that units can be chosen within them.
        sizes: lengths of the scope axes and of those inside a unit.
        units: how many units there are.
    """

    members: Mapping[str, str]
    scope: str
    sizes: Mapping[str, int]
    units: int


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Axes that go together and from which nothing may be removed.

    Attributes:
        why: the operation and the module that need all of it.
        size: its length.
        places: (tensor, dimension) of each.
    """

    why: str
    size: int
    places: tuple[tuple[str, int], ...]


def ties(found: Trace, parameters: Iterable[str]) -> tuple[list[Tie], list[Frozen]]:
    """Every tie that has a parameter, free and frozen, in the order of their first tensors."""
    own = set(parameters)
    labels = {name: tuple(leaves(axis) for axis in label) for name, label in found.named.items()}
    places: dict[Factor, list[tuple[str, int]]] = {}
    for name, label in labels.items():
        for d, axis in enumerate(label):
            for part in axis:
                places.setdefault(part.factor, []).append((name, d))
    always = _always_with([*found.seen, *labels.values()])
    free, frozen = [], []
    for unit, at in places.items():
        names = [name for name, _ in at]
        if not own.intersection(names):
            continue
        twice = next((name for name in names if names.count(name) > 1), "")
        why = unit.frozen or (twice and f"{twice} has it on two axes, which a group cannot say")
        if why:
            frozen.append(Frozen(why=why, size=unit.size, places=tuple(at)))
        else:
            free.append(_tie(unit, {name: labels[name] for name in names}, always[unit]))
    return free, frozen


def _always_with(labels: Iterable[Label]) -> dict[Factor, set[Factor]]:
    """{factor: the others that every tensor has that has it}."""
    always: dict[Factor, set[Factor]] = {}
    for label in labels:
        factors = {part.factor for axis in label for part in leaves(axis)}
        for factor in factors:
            always[factor] = always[factor] & factors if factor in always else set(factors)
    return always


def _tie(unit: Factor, labels: Mapping[str, Label], always: set[Factor]) -> Tie:
    order = [[part.factor for axis in label for part in axis] for label in labels.values()]
    # An operation that mixes entries of a factor (GroupNorm inside a group) freezes it, so it is no scope. Scopes are
    # looked for outside of units only, as heads are outside of their dimensions: two axes are not each other's scope.
    together = [factor for factor in dict.fromkeys(order[0]) if factor in always - {unit} and not factor.frozen]
    scopes = [factor for factor in together if all(_before(row, factor, unit) for row in order)][: len(_SCOPES)]
    said = {unit: "u"} | dict(zip(scopes, _SCOPES, strict=False))
    joined = _joined([axis for label in labels.values() for axis in label], said)
    beside = _Beside()
    members = {name: beside.pattern([_runs(axis, said, joined) for axis in label]) for name, label in labels.items()}
    return Tie(
        members=members,
        scope=" ".join(name for name in said.values() if name != "u"),
        sizes={said[factor]: factor.size for factor in scopes} | beside.sizes,
        units=unit.size,
    )


def _before(row: Sequence[Factor], scope: Factor, unit: Factor) -> bool:
    return row.count(scope) == 1 and row.index(scope) < row.index(unit)


def _joined(axes: Sequence[Axis], said: Mapping[Factor, str]) -> set[tuple[Factor, Factor]]:
    """Pairs of factors that are always neighbours, which need no names of their own."""
    pairs: set[tuple[Factor | None, Factor | None]] = set()
    for axis in axes:
        row = [None if part.factor in said else part.factor for part in axis]
        pairs |= set(pairwise([None, *row, None]))
    after = {a: [y for x, y in pairs if x is a] for a, _ in pairs if a}
    before = {b: [x for x, y in pairs if y is b] for _, b in pairs if b}
    return {(a, b) for a, b in pairs if a and b and after[a] == [b] and before[b] == [a]}


def _runs(axis: Axis, said: Mapping[Factor, str], joined: set[tuple[Factor, Factor]]) -> list[str | int]:
    """What a dimension is made of: the names of unit and scopes, and the sizes of what lies beside them."""
    runs: list[str | int] = []
    last = None
    for factor in (part.factor for part in axis):
        if factor in said:
            runs.append(said[factor])
        elif (last, factor) in joined:
            runs[-1] = int(runs[-1]) * factor.size
        else:
            runs.append(factor.size)
        last = factor
    return runs


class _Beside:
    """Names for what lies beside the unit in one dimension: equal sizes have equal names throughout a group."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._names: dict[tuple[int, int], str] = {}

    def pattern(self, row: Sequence[Sequence[str | int]]) -> str:
        """One tensor's axes; names are given from the right, where the innermost are."""
        met: dict[int, int] = {}
        dimensions = [self._dimension(d, axis, met) for d, axis in reversed(list(enumerate(row)))]
        return " ".join(reversed(dimensions))

    def _dimension(self, d: int, axis: Sequence[str | int], met: dict[int, int]) -> str:
        if not axis:
            return "1"
        if all(isinstance(run, int) for run in axis):
            return _DIMENSIONS[d]
        names = [run if isinstance(run, str) else self._name(run, met) for run in reversed(axis)]
        return names[0] if len(names) == 1 else f"({' '.join(reversed(names))})"

    def _name(self, size: int, met: dict[int, int]) -> str:
        key = size, met.setdefault(size, 0)
        met[size] += 1
        if key not in self._names:
            name = next(letter for letter in _BESIDE if letter not in self.sizes)
            self._names[key], self.sizes[name] = name, size
        return self._names[key]
