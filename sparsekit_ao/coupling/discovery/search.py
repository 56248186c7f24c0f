"""`discover` suggests couplings from one forward of a model, as Python code to read, edit and keep.

`shared_axes` writes the factors of a trace as patterns, for axes that can be pruned and for frozen ones; `fold` and
`fold_frozen` merge the axes of repeated layers by stars.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from ...errors import SparsityError
from ...structure import dimensions_of
from ..bound import match_names, occurrences
from ..coupling import Coupling
from .factors import Axis, Factor, leaves
from .operation import Label
from .tracing import NOT_UNDERSTOOD, Trace, trace

_DIMENSIONS = "oihwxyzabc"  # names of dimensions without units, as of weights: out, in, height, width
_SCOPES = "stpq"
_SHOWN = 3  # values that one line of code read
_OTHERS = "dgefjklmnrvABC"  # names of the other factors in a dimension with a unit


@dataclass(frozen=True, kw_only=True)
class FrozenAxis:
    """An axis from which nothing may be removed: why, its size, and (tensor, dimension) of each occurrence."""

    why: str
    size: int
    places: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        first, *more = [f"{name}[{d}]" for name, d in self.places]
        others = f" and {more[0]}" if len(more) == 1 else f" and {len(more)} more" if more else ""
        return f"{self.size} in {first}{others}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The result of `discover`; printed, it is Python to be edited.

    Attributes:
        couplings: One for each kind of unit, with stars for repeated layers.
        counts: For each coupling, how often it is bound and how many units each bound coupling has.
        frozen: Axes from which nothing may be removed, with the reason, each with its number of repetitions.
        opaque: Objects in the output that were not inspected, so tensors in them are not frozen.
        values: Lines of code that read values of the example inputs, with these values; others may change the branch.
        uncalled: The outermost modules whose parameters the forward did not read.
        left_out: (name, reason) of couplings from which `compact` cannot remove units; set by `removal.removable`.

    >>> discovery = discover(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 2)), torch.zeros(1, 4))
    >>> [coupling.members for coupling in discovery.couplings], discovery.counts
    ([{'0.weight': 'u i', '0.bias': 'u', '1.weight': 'o u'}], ((1, 16),))
    """

    couplings: tuple[Coupling, ...]
    counts: tuple[tuple[int, int], ...]
    frozen: tuple[tuple[FrozenAxis, int], ...]
    opaque: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        rows = zip(self.couplings, self.counts, strict=True)
        lines = [line for coupling, counts in rows for line in _coupling_lines(coupling, *counts)]
        text = ["couplings = [", *lines, "]"]
        left_out = [f"{name}: {why}" for name, why in self.left_out]
        frozen = [f"{f'{count} x ' if count > 1 else ''}{axis}" for axis, count in self.frozen]
        for title, notes in (
            ("Left out, they cannot be removed:", left_out),
            ("Frozen, nothing is removed there:", frozen),
            ("Not inspected, tensors in there are not frozen:", self.opaque),
            ("Values of the example inputs that the forward read; others may lead to another branch:", self.values),
            ("Never called with these example inputs:", self.uncalled),
        ):
            text += ["", f"# {title}", *(f"#   {note}" for note in notes)] if notes else []
        return "\n".join(text)

    __repr__ = __str__


def discover(model: nn.Module, example_inputs: Any) -> Discovery:
    """Suggest couplings: which axes of which tensors belong together, found in one forward without values.

    Every operation identifies axes of its operands with axes of its result; a reshape splits and merges axes. An axis
    that is not frozen can be pruned: its units can be removed as soon as their parameters are zero. These are frozen:
    dimensions of inputs and outputs, the axes that LayerNorm or softmax normalizes, what is read by index, and
    everything that an unknown operation reads. The result lists them. Outputs are searched for in tuples, mappings and
    dataclasses; objects of other types, such as a cache, are listed but not inspected. Axes are named as in einops: `u`
    is the unit, `s` and `t` are scope axes, and sizes are as the forward split them. It is a suggestion: print it, read
    it, keep the lines you want. Tied parameters have their first name. Tensors of a parametrization are frozen. A
    forward that reads values runs with the real values; the result lists what was read.

    Args:
        model: The model, which is not changed, moved or run: a copy without values runs in eval mode, with its hooks,
            and in training mode too if parameters were not read.
        example_inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments; only shapes matter,
            unless the forward reads values.

    Raises:
        SparsityError: The model has a masked, lazy or scripted module, or its forward fails.

    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    >>> print(discover(mlp, torch.zeros(1, 4)))
    couplings = [
        # mlp: 1 coupling of 16 units
        Coupling(
            {
                "0.weight": "u i",
                "0.bias": "u",
                "2.weight": "o u",
            },
        ),
    ]
    <BLANKLINE>
    # Frozen, nothing is removed there:
    #   4 in 0.weight[1]: input[0]
    #   2 in 2.weight[0] and 2.bias[0]: output
    """
    if not isinstance(model, nn.Module):
        raise SparsityError(f"discover needs a model (an nn.Module), got {type(model).__name__}")
    recorded = trace(model, example_inputs)
    free, frozen = shared_axes(recorded, [name for name, _ in model.named_parameters()])
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    folded = fold(free, [name for name, _ in tensors])
    return Discovery(
        couplings=tuple(coupling for coupling, _, _ in folded),
        counts=tuple((count, units) for _, units, count in folded),
        frozen=tuple(fold_frozen(frozen)),
        opaque=tuple(recorded.opaque),
        values=tuple(f"{line} (read {', '.join(values[:_SHOWN])})" for line, values in recorded.values.items()),
        uncalled=tuple(_uncalled(model, recorded.used)),
    )


def _uncalled(model: nn.Module, used: Collection[str]) -> list[str]:
    """Return the outermost modules whose parameters were not used, under this name or another."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    ids = {id(tensors[name]) for name in used if name in tensors}
    names = [*used, *(name for name, tensor in tensors.items() if id(tensor) in ids)]
    called = {name[: end.start()] for name in names for end in re.finditer(r"\.|$", name)}
    names = [name for name, module in model.named_modules() if next(module.parameters(), None) is not None]
    return [n for n in names if n and n not in called and (n.rpartition(".")[0] in {"", *called})]


def _coupling_lines(coupling: Coupling, count: int, units: int) -> list[str]:
    name = coupling.name if coupling.name != next(iter(coupling.members)) else ""
    keys = {"scope": coupling.scope, "sizes": coupling.sizes, "name": name, "attrs": coupling.attrs}
    return [
        f"    # {coupling.kind}: {count} coupling{'s' * (count > 1)} of {units} units",
        "    Coupling(",
        "        {",
        *(f'            "{member}": "{axes}",' for member, axes in coupling.members.items()),
        "        },",
        *(f"        {key}={json.dumps(value, ensure_ascii=False)}," for key, value in keys.items() if value),
        "    ),",
    ]


@dataclass(frozen=True)
class _Row:
    """The factors of a dimension, or of one part of a concatenation, with the numbers of entries around the part."""

    factors: tuple[Factor, ...]
    before: int = 0
    after: int = 0


def shared_axes(recorded: Trace, parameters: Iterable[str]) -> tuple[list[tuple[Coupling, int]], list[FrozenAxis]]:
    """Return the couplings, each with the number of its units, and the frozen axes, in the order of first tensors."""
    trained = set(parameters)
    for axis in (axis for label in recorded.named.values() for axis in label if axis):
        for part in leaves(axis)[1:]:
            if part.factor.is_concatenation:
                part.factor.freeze("a concatenation inside of another axis, which a coupling cannot express")
    places: dict[Factor, list[tuple[str, int, _Row]]] = {}
    for name, label in recorded.named.items():
        for d, axis in enumerate(label):
            for row, factors in _rows(axis):
                for factor in factors:
                    places.setdefault(factor, []).append((name, d, row))
    companions = _companions([*recorded.seen, *recorded.named.values()])
    free, frozen = [], []
    for unit, rows in places.items():
        if not trained.intersection(name for name, _, _ in rows):
            continue
        counts = Counter((name, d) for name, d, _ in rows)
        twice = next((name for (name, _), count in counts.items() if count > 1), "")
        why = unit.frozen or (twice and f"{twice} has it twice in one dimension, which a coupling cannot express")
        if why:
            frozen.append(FrozenAxis(why=why, size=unit.size, places=tuple(counts)))
            continue
        labels: dict[str, list[_Row]] = {}
        for name, d, row in rows:
            whole = [_Row(tuple(part.factor for part in leaves(axis))) for axis in recorded.named[name]]
            labels.setdefault(name, whole)[d] = row
        coupling = _coupling(unit, labels, companions[unit])
        free.append((replace(coupling, passes_on=_passes_on(coupling.members, recorded.branches)), unit.size))
    return free, frozen


def _passes_on(members: Mapping[str, str], branches: Collection[str]) -> bool:
    """Return False if names of members differ only in numbers of modules that are branches of one input."""
    alike: dict[tuple[str, tuple[bool, ...]], list[list[str]]] = {}
    for name, axes in members.items():
        places = tuple("u" in dimension for dimension in dimensions_of(occurrences(axes, "u")[0])[:2])
        alike.setdefault((_unnumbered(name), places), []).append(name.split("."))
    rows = [(first, other, at) for first, *more in alike.values() for other in more for at in range(len(first))]
    lists = {".".join(one[:at]) for first, other, at in rows for one in (first, other) if first[at] != other[at]}
    return not lists or not lists <= {*branches}


def _rows(axis: Axis) -> list[tuple[_Row, list[Factor]]]:
    """Return each part of a dimension as couplings describe it, with the factors that can be its unit."""
    factors = [part.factor for part in leaves(axis)]
    if not factors or not factors[0].is_concatenation:
        return [(_Row(tuple(factors)), factors)]
    first, *rest = factors
    rows, start, each = [(_Row(tuple(factors)), rest)], 0, math.prod(factor.size for factor in rest)
    for piece in first.pieces:
        size = math.prod(factor.size for factor in piece)
        row = _Row((*piece, *rest), start * each, (first.size - start - size) * each)
        rows.append((row, piece))
        start += size
    return rows


def _companions(labels: Iterable[Label]) -> dict[Factor, set[Factor]]:
    """Return {factor: the factors that all tensors with it have}."""
    companions: dict[Factor, set[Factor]] = {}
    for label in labels:
        rows = [row for axis in label for row in _rows(axis)]
        whole = {factor for axis in label for factor in (part.factor for part in leaves(axis))}
        for row, factors in rows:
            for factor in factors:
                together = whole.union(row.factors)
                companions[factor] = companions.get(factor, together) & together
    return companions


def _coupling(unit: Factor, labels: Mapping[str, Sequence[_Row]], companions: set[Factor]) -> Coupling:
    order = [[factor for row in label for factor in row.factors] for label in labels.values()]
    # An operation that mixes entries of a factor (GroupNorm inside a group) freezes it, so it is not a scope. Only
    # factors left of the unit are scopes, as heads are left of their dimensions. Otherwise two axes would be each
    # other's scope.
    together = [factor for factor in dict.fromkeys(order[0]) if factor in companions - {unit} and not factor.frozen]
    once = all(row.count(unit) == 1 for row in order)
    outer = [f for f in together if once and all(row.count(f) == 1 and row.index(f) < row.index(unit) for row in order)]
    scopes = outer[: len(_SCOPES)]
    names = {unit: "u"} | dict(zip(scopes, _SCOPES, strict=False))
    joined = _joined([row.factors for label in labels.values() for row in label], names)
    others: dict[tuple[int, int], str] = {}
    members = {fqn: _pattern(label, names, joined, others) for fqn, label in labels.items()}
    sizes = {names[factor]: factor.size for factor in scopes} | {name: size for (size, _), name in others.items()}
    return Coupling(members, scope=" ".join(names[factor] for factor in scopes), sizes=sizes)


def _joined(axes: Sequence[Sequence[Factor]], names: Mapping[Factor, str]) -> set[tuple[Factor, Factor]]:
    """Return pairs of unnamed factors that are neighbours wherever they occur, so that they can be one factor."""
    pairs: set[tuple[Factor | None, Factor | None]] = set()
    for axis in axes:
        row = [None if factor in names else factor for factor in axis]
        pairs |= set(pairwise([None, *row, None]))
    after = {a: [y for x, y in pairs if x is a] for a, _ in pairs if a}
    before = {b: [x for x, y in pairs if y is b] for _, b in pairs if b}
    return {(a, b) for a, b in pairs if a and b and after[a] == [b] and before[b] == [a]}


def _pattern(
    label: Sequence[_Row],
    names: Mapping[Factor, str],
    joined: set[tuple[Factor, Factor]],
    others: dict[tuple[int, int], str],
) -> str:
    """Return a tensor's axes as text. Unnamed factors get names from the right; `others` keeps them for all tensors."""
    counts: Counter[int] = Counter()
    dimensions: list[str] = []
    for d, row in reversed(list(enumerate(label))):
        axes: list[str | int] = []  # names of unit and scopes, sizes of the others
        for last, factor in zip([None, *row.factors], row.factors, strict=False):
            if (last, factor) in joined:
                axes[-1] = int(axes[-1]) * factor.size
            else:
                axes.append(names.get(factor, factor.size))
        if all(isinstance(axis, int) for axis in axes):
            dimensions.append(_DIMENSIONS[d] if axes else "1")
            continue
        for k, size in reversed(list(enumerate(axes))):
            if isinstance(size, int):
                counts[size] += 1
                key = size, counts[size]
                axes[k] = others[key] = others.get(key) or _OTHERS[len(others)]
        text = " ".join(map(str, axes))
        parts = [str(row.before)] * (row.before > 0) + [text] + [str(row.after)] * (row.after > 0)
        dimensions.append(text if len(parts) == len(axes) == 1 else f"({' + '.join(parts)})")
    return " ".join(reversed(dimensions))


def fold(axes: Sequence[tuple[Coupling, int]], names: Collection[str]) -> list[tuple[Coupling, int, int]]:
    """Return (coupling with starred names, units, how many it represents), ordered by the first of each."""
    single = dict(enumerate(axes))
    folded: list[tuple[int, Coupling, int, int]] = []
    for which in (slice(None), slice(-1, None), slice(0, 1)):  # all numbers, else the last, else the first
        alike: dict[tuple, list[int]] = {}
        for k, (coupling, _) in single.items():
            texts = tuple(zip(_starred(list(coupling.members), which), coupling.members.values(), strict=True))
            alike.setdefault((texts, coupling.scope, tuple(coupling.sizes.items())), []).append(k)
        for ks in alike.values():
            columns = list(zip(*(single[k][0].members for k in ks), strict=True))
            stars = [_common(column) for column in columns]  # must match no other names of the model by mistake
            if len(ks) > 1 and all(_exact(star, column, names) for star, column in zip(stars, columns, strict=True)):
                first, units = single[ks[0]]
                members = dict(zip(stars, first.members.values(), strict=True))
                folded.append((ks[0], replace(first, members=members, name=""), units, len(ks)))
                single = {k: axis for k, axis in single.items() if k not in ks}
    folded += [(k, _folded_within(coupling, names), units, 1) for k, (coupling, units) in single.items()]
    return [row[1:] for row in sorted(folded, key=lambda row: row[0])]


def fold_frozen(frozen: Iterable[FrozenAxis]) -> list[tuple[FrozenAxis, int]]:
    """Merge axes whose names differ only in numbers to (axis, how many it represents), `not understood` first."""
    alike: dict[FrozenAxis, list[FrozenAxis]] = {}
    for axis in frozen:
        places = tuple((_unnumbered(name), d) for name, d in axis.places)
        alike.setdefault(replace(axis, why=_unnumbered(axis.why), places=places), []).append(axis)
    folded = []
    for axes in alike.values():
        columns = zip(*(axis.places for axis in axes), strict=True)
        places = tuple((_common([name for name, _ in column]), column[0][1]) for column in columns)
        folded.append((replace(axes[0], why=_common([axis.why for axis in axes]), places=places), len(axes)))
    return sorted(folded, key=lambda row: NOT_UNDERSTOOD not in row[0].why)


def _common(texts: Sequence[str], star: str = "*") -> str:
    """Return one text for all, with stars for the words in which they differ."""
    columns = zip(*(re.split("([ .:])", text) for text in texts), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else star for column in columns)


def _starred(names: Sequence[str], which: slice) -> list[str]:
    """Return the names with `*` for some of the numbers that the beginnings of all names share."""
    rows = [name.split(".") for name in names]
    columns = list(zip(*rows, strict=False))
    same = next((k for k, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    numbers = [k for k in range(same) if rows[0][k].isdigit()][which]
    return [".".join("*" if k in numbers else part for k, part in enumerate(row)) for row in rows]


def _exact(starred: str, meant: Collection[str], names: Collection[str]) -> bool:
    """Return whether a starred name matches these names and no others."""
    return {name for matches in match_names(starred, names).values() for name in matches} == set(meant)


def _folded_within(coupling: Coupling, names: Collection[str]) -> Coupling:
    """Return the coupling with `**` for the numbers of the many layers that it extends over."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, pattern in coupling.members.items():
        alike.setdefault((_unnumbered(name), pattern), []).append(name)
    members: dict[str, str] = {}
    for (_, pattern), same in alike.items():
        star = _common(same, "**")
        members |= dict.fromkeys([star] if len(same) > 1 and _exact(star, same, names) else same, pattern)
    return replace(coupling, members=members, name="")


def _unnumbered(text: str) -> str:
    return re.sub(r"(?<![^. ])\d+(?![^.:])", "*", text)
