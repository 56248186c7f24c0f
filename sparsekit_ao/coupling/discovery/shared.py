"""From factors to patterns: `shared_axes` returns the axes that can be pruned and the frozen ones, with their tensors.

`fold` and `fold_frozen` join those of repeated layers, with stars for numbers where they match the joined names only.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..bound import match_names
from .call import Label
from .factors import Axis, Factor, leaves
from .trace import Trace

_DIMENSIONS = "oihwxyzabc"  # names of dimensions without units, as of weights: out, in, height, width
_SCOPES = "stpq"
_OTHERS = "dgefjklmnrvABC"  # names of the other factors in a dimension with a unit


@dataclass(frozen=True, kw_only=True)
class SharedAxis:
    """An axis of several tensors whose units can be removed: {tensor: its pattern}, in which the unit is `u`.

    `scope` are axes that accompany the unit in every tensor of the forward, so that units can be chosen within them;
    `sizes` are the lengths of the scope axes and of those inside a unit.
    """

    members: Mapping[str, str]
    scope: str
    sizes: Mapping[str, int]
    units: int


@dataclass(frozen=True, kw_only=True)
class FrozenAxis:
    """An axis of several tensors from which nothing may be removed: `why` names the operation and the module.

    `places` are (tensor, dimension) of each occurrence.
    """

    why: str
    size: int
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Row:
    """One dimension of a tensor: its factors; of a concatenation those of one part, and the entries around it."""

    factors: tuple[Factor, ...]
    before: int = 0
    after: int = 0


def shared_axes(found: Trace, parameters: Iterable[str]) -> tuple[list[SharedAxis], list[FrozenAxis]]:
    """Every axis of a parameter, free and frozen, in the order of their first tensors."""
    own = set(parameters)
    for axis in (axis for label in found.named.values() for axis in label):
        for part in leaves(axis)[1:] if axis else ():
            if part.factor.is_concatenation:
                part.factor.freeze("a concatenation inside of another axis, which a coupling cannot express")
    places: dict[Factor, list[tuple[str, int, _Row]]] = {}
    for name, label in found.named.items():
        for d, axis in enumerate(label):
            for row, factors in _rows(axis):
                for factor in factors:
                    places.setdefault(factor, []).append((name, d, row))
    companions = _companions([*found.seen, *found.named.values()])
    free, frozen = [], []
    for unit, at in places.items():
        if not own.intersection(name for name, _, _ in at):
            continue
        counts = Counter((name, d) for name, d, _ in at)
        twice = next((name for (name, _), count in counts.items() if count > 1), "")
        why = unit.frozen or (twice and f"{twice} has it twice in one dimension, which a coupling cannot express")
        if why:
            frozen.append(FrozenAxis(why=why, size=unit.size, places=tuple(counts)))
        else:
            free.append(_shared(unit, _with_unit(found.named, at), companions[unit]))
    return free, frozen


def _rows(axis: Axis) -> list[tuple[_Row, list[Factor]]]:
    """A dimension as a member of a coupling has it, and the factors that can be its unit, for each part of it."""
    factors = [part.factor for part in leaves(axis)]
    if not factors or not factors[0].is_concatenation:
        return [(_Row(tuple(factors)), factors)]
    first, *rest = factors
    found, start, each = [(_Row(tuple(factors)), rest)], 0, math.prod(factor.size for factor in rest)
    for piece in first.pieces:
        size = math.prod(factor.size for factor in piece)
        row = _Row((*piece, *rest), start * each, (first.size - start - size) * each)
        found.append((row, piece))
        start += size
    return found


def _with_unit(named: Mapping[str, Label], at: Sequence[tuple[str, int, _Row]]) -> dict[str, list[_Row]]:
    """The dimensions of every tensor with the unit."""
    found: dict[str, list[_Row]] = {}
    for name, d, row in at:
        whole = [_Row(tuple(part.factor for part in leaves(axis))) for axis in named[name]]
        found.setdefault(name, whole)[d] = row
    return found


def _companions(labels: Iterable[Label]) -> dict[Factor, set[Factor]]:
    """{factor: the factors that all tensors with it have}."""
    found: dict[Factor, set[Factor]] = {}
    for label in labels:
        rows = [row for axis in label for row in _rows(axis)]
        whole = {factor for axis in label for factor in (part.factor for part in leaves(axis))}
        for row, factors in rows:
            for factor in factors:
                together = whole.union(row.factors)
                found[factor] = found[factor] & together if factor in found else together
    return found


def _shared(unit: Factor, labels: Mapping[str, Sequence[_Row]], companions: set[Factor]) -> SharedAxis:
    order = [[factor for row in label for factor in row.factors] for label in labels.values()]
    # An operation that mixes entries of a factor (GroupNorm inside a group) freezes it, so it is no scope. Scopes are
    # looked for outside of units only, as heads are outside of their dimensions: two axes are not each other's scope.
    together = [factor for factor in dict.fromkeys(order[0]) if factor in companions - {unit} and not factor.frozen]
    once = all(row.count(unit) == 1 for row in order)
    outer = [f for f in together if once and all(row.count(f) == 1 and row.index(f) < row.index(unit) for row in order)]
    scopes = outer[: len(_SCOPES)]
    names = {unit: "u"} | dict(zip(scopes, _SCOPES, strict=False))
    joined = _joined([row.factors for label in labels.values() for row in label], names)
    others: dict[tuple[int, int], str] = {}
    members = {fqn: _pattern(label, names, joined, others) for fqn, label in labels.items()}
    return SharedAxis(
        members=members,
        scope=" ".join(names[factor] for factor in scopes),
        sizes={names[factor]: factor.size for factor in scopes} | {name: size for (size, _), name in others.items()},
        units=unit.size,
    )


def _joined(axes: Sequence[Sequence[Factor]], names: Mapping[Factor, str]) -> set[tuple[Factor, Factor]]:
    """Pairs of unnamed factors that are neighbours wherever they occur, so that they can be one factor."""
    pairs: set[tuple[Factor | None, Factor | None]] = set()
    for axis in axes:
        row = [None if factor in names else factor for factor in axis]
        pairs |= set(pairwise([None, *row, None]))
    after = {a: [y for x, y in pairs if x is a] for a, _ in pairs if a}
    before = {b: [x for x, y in pairs if y is b] for _, b in pairs if b}
    return {(a, b) for a, b in pairs if a and b and after[a] == [b] and before[b] == [a]}


def _runs(
    factors: Sequence[Factor], names: Mapping[Factor, str], joined: set[tuple[Factor, Factor]]
) -> list[str | int]:
    """The factors of a dimension: the names of unit and scopes, and the sizes of the others."""
    runs: list[str | int] = []
    last = None
    for factor in factors:
        if factor in names:
            runs.append(names[factor])
        elif (last, factor) in joined:
            runs[-1] = int(runs[-1]) * factor.size
        else:
            runs.append(factor.size)
        last = factor
    return runs


def _pattern(
    label: Sequence[_Row],
    names: Mapping[Factor, str],
    joined: set[tuple[Factor, Factor]],
    others: dict[tuple[int, int], str],
) -> str:
    """One tensor's axes as text. Unnamed factors are named from the right, the same in all tensors, in `others`."""
    counts: Counter[int] = Counter()

    def name(run: str | int) -> str:
        if isinstance(run, str):
            return run
        counts[run] += 1
        if (run, counts[run]) not in others:
            others[run, counts[run]] = _OTHERS[len(others)]
        return others[run, counts[run]]

    dimensions = []
    for d, row in reversed(list(enumerate(label))):
        axis = _runs(row.factors, names, joined)
        if all(isinstance(run, int) for run in axis):
            dimensions.append(_DIMENSIONS[d] if axis else "1")
        else:
            text = " ".join(reversed([name(run) for run in reversed(axis)]))
            parts = [str(row.before)] * (row.before > 0) + [text] + [str(row.after)] * (row.after > 0)
            dimensions.append(text if len(parts) == len(axis) == 1 else f"({' + '.join(parts)})")
    return " ".join(reversed(dimensions))


def fold(axes: Sequence[SharedAxis], names: Collection[str]) -> list[tuple[SharedAxis, int]]:
    """Axes with starred names, and how many each represents, in the order of the first of each.

    `names` are all names of the model, which the stars must not match by mistake.
    """
    left = dict(enumerate(axes))
    found: list[tuple[int, SharedAxis, int]] = []
    for which in (slice(None), slice(-1, None), slice(0, 1)):  # all numbers, else the last, else the first
        alike: dict[tuple, list[int]] = {}
        for k, axis in left.items():
            key = tuple(zip(_starred(axis, which), axis.members.values(), strict=True))
            alike.setdefault((key, axis.scope, tuple(axis.sizes.items())), []).append(k)
        for ks in alike.values():
            columns = list(zip(*(left[k].members for k in ks), strict=True))
            stars = [_common(column) for column in columns]
            if len(ks) > 1 and all(_exact(star, column, names) for star, column in zip(stars, columns, strict=True)):
                members = dict(zip(stars, left[ks[0]].members.values(), strict=True))
                found.append((ks[0], replace(left[ks[0]], members=members), len(ks)))
                left = {k: axis for k, axis in left.items() if k not in ks}
    found += [(k, _folded_within(axis, names), 1) for k, axis in left.items()]
    return [(axis, count) for _, axis, count in sorted(found, key=lambda row: row[0])]


def fold_frozen(frozen: Iterable[FrozenAxis]) -> list[tuple[FrozenAxis, int]]:
    """One for those that differ in numbers of names only, and how many it represents; `not understood` first."""
    alike: dict[FrozenAxis, list[FrozenAxis]] = {}
    for one in frozen:
        places = tuple((_unnumbered(name), d) for name, d in one.places)
        alike.setdefault(replace(one, why=_unnumbered(one.why), places=places), []).append(one)
    found = []
    for ones in alike.values():
        columns = zip(*(one.places for one in ones), strict=True)
        places = tuple((_common([name for name, _ in column]), column[0][1]) for column in columns)
        found.append((replace(ones[0], why=_common([one.why for one in ones]), places=places), len(ones)))
    return sorted(found, key=lambda row: "not understood" not in row[0].why)


def _common(texts: Sequence[str], star: str = "*") -> str:
    """One text for all, with stars for the words in which they differ."""
    columns = zip(*(re.split("([ .:])", text) for text in texts), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else star for column in columns)


def _starred(axis: SharedAxis, which: slice) -> list[str]:
    """The names with `*` for some of the numbers that the beginnings of all names share."""
    rows = [name.split(".") for name in axis.members]
    columns = list(zip(*rows, strict=False))
    same = next((k for k, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    numbers = [k for k in range(same) if rows[0][k].isdigit()][which]
    return [".".join("*" if k in numbers else part for k, part in enumerate(row)) for row in rows]


def _exact(starred: str, meant: Collection[str], names: Collection[str]) -> bool:
    """Whether a starred name matches these names and no others."""
    return {name for found in match_names(starred, names).values() for name in found} == set(meant)


def _folded_within(axis: SharedAxis, names: Collection[str]) -> SharedAxis:
    """One axis that extends over many layers, with `**` for their numbers."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, pattern in axis.members.items():
        alike.setdefault((_unnumbered(name), pattern), []).append(name)
    members: dict[str, str] = {}
    for (_, pattern), same in alike.items():
        star = _common(same, "**")
        members |= dict.fromkeys([star] if len(same) > 1 and _exact(star, same, names) else same, pattern)
    return replace(axis, members=members)


def _unnumbered(text: str) -> str:
    return re.sub(r"(?<![^. ])\d+(?![^.:])", "*", text)
