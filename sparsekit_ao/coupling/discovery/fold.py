"""Repeated layers said once: numbers in names become stars, where the stars match exactly what was meant."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ..names import matched
from .ties import Frozen, Tie

__all__ = ["fold", "fold_frozen"]


def fold(ties: Sequence[Tie], names: Collection[str]) -> list[tuple[Tie, int]]:
    """Ties with starred names, and how many each stands for, in the order of the first of each.

    Args:
        ties: with names as they are in the model.
        names: all of the model's, which the stars must not catch by mistake.
    """
    left = dict(enumerate(ties))
    found: list[tuple[int, Tie, int]] = []
    for which in (slice(None), slice(-1, None), slice(0, 1)):  # all numbers, else the last, else the first
        alike: dict[tuple, list[int]] = {}
        for k, tie in left.items():
            starred = _starred(tie, which)
            alike.setdefault((tuple(starred.members.items()), tie.scope, tuple(tie.sizes.items())), []).append(k)
        for ks in alike.values():
            columns = list(zip(*(left[k].members for k in ks), strict=True))
            stars = [_common(column) for column in columns]
            if len(ks) > 1 and all(_exact(star, column, names) for star, column in zip(stars, columns, strict=True)):
                members = dict(zip(stars, left[ks[0]].members.values(), strict=True))
                found.append((ks[0], replace(left[ks[0]], members=members), len(ks)))
                left = {k: tie for k, tie in left.items() if k not in ks}
    found += [(k, _together(tie, names), 1) for k, tie in left.items()]
    return [(tie, count) for _, tie, count in sorted(found, key=lambda row: row[0])]


def fold_frozen(frozen: Iterable[Frozen]) -> list[tuple[Frozen, int]]:
    """Those alike but for numbers in names once, and how many each stands for; what is not understood first."""
    alike: dict[Frozen, list[Frozen]] = {}
    for one in frozen:
        places = tuple((_unnumbered(name), d) for name, d in one.places)
        alike.setdefault(replace(one, why=_unnumbered(one.why), places=places), []).append(one)
    return sorted(
        ((_alike(ones), len(ones)) for ones in alike.values()), key=lambda row: "not understood" not in row[0].why
    )


def _alike(ones: Sequence[Frozen]) -> Frozen:
    """One that stands for all, with `*` for the numbers in which they differ."""
    columns = zip(*(one.places for one in ones), strict=True)
    places = tuple((_common([name for name, _ in column]), column[0][1]) for column in columns)
    return replace(ones[0], why=_common([one.why for one in ones]), places=places)


def _common(texts: Sequence[str]) -> str:
    columns = zip(*(re.split("([ .:])", text) for text in texts), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def _starred(tie: Tie, which: slice) -> Tie:
    """The tie with `*` for some of the numbers that the beginnings of all its names share."""
    rows = [name.split(".") for name in tie.members]
    common = [column[0] for column in zip(*rows, strict=False)]
    same = next((k for k, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), len(common))
    numbers = [k for k, part in enumerate(common[:same]) if part.isdigit()][which]
    starred = [".".join("*" if k in numbers else part for k, part in enumerate(row)) for row in rows]
    return replace(tie, members=dict(zip(starred, tie.members.values(), strict=True)))


def _exact(starred: str, meant: Collection[str], names: Collection[str]) -> bool:
    """Whether a starred name matches the names that were meant and no others."""
    return {name for found in matched(starred, names).values() for name in found} == set(meant)


def _together(tie: Tie, names: Collection[str]) -> Tie:
    """One tie that goes through many layers, with `**` for their numbers."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, axes in tie.members.items():
        alike.setdefault((_unnumbered(name), axes), []).append(name)
    members: dict[str, str] = {}
    for (_, axes), group in alike.items():
        columns = zip(*(name.split(".") for name in group), strict=True)
        star = ".".join(column[0] if len(set(column)) == 1 else "**" for column in columns)
        whole = len(group) > 1 and _exact(star, group, names)
        members |= dict.fromkeys([star] if whole else group, axes)
    return replace(tie, members=members)


def _unnumbered(text: str) -> str:
    return re.sub(r"(?<![^. ])\d+(?![^.:])", "*", text)
