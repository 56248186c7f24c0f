"""Names with stars: `*` is one part of a dotted name and is captured, `**` is any text and is not.

Knows strings only.
"""

import re
from collections.abc import Iterable

__all__ = ["filled", "matched", "stars"]

_STAR = re.compile(r"\*\*|\*")


def stars(pattern: str) -> int:
    """How many parts of a name a pattern captures.

    >>> stars("layers.*.experts.*.w1.weight"), stars("layers.**.weight")
    (2, 0)
    """
    return sum(star == "*" for star in _STAR.findall(pattern))


def matched(pattern: str, names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """The names that a pattern matches, by what its `*`s capture; both in the order of `names`.

    >>> matched("layers.*.up.weight", ["layers.0.up.weight", "layers.1.up.weight", "layers.1.up.bias"])
    {('0',): ['layers.0.up.weight'], ('1',): ['layers.1.up.weight']}
    >>> matched("**.weight", ["a.weight", "a.b.weight"])
    {(): ['a.weight', 'a.b.weight']}
    """
    parts = _STAR.split(pattern)
    between = [".*" if star == "**" else "([^.]+)" for star in _STAR.findall(pattern)]
    regex = re.compile("".join(re.escape(a) + b for a, b in zip(parts, [*between, ""], strict=True)))
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        match = regex.fullmatch(name)
        if match is not None:
            found.setdefault(match.groups(), []).append(name)
    return found


def filled(pattern: str, captured: Iterable[str]) -> str:
    """A pattern with its `*`s replaced by what they captured.

    >>> filled("layers.*.up.weight", ("3",))
    'layers.3.up.weight'
    """
    values = iter(captured)
    return _STAR.sub(lambda star: "**" if star[0] == "**" else next(values, "*"), pattern)
