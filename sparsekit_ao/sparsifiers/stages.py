"""Checks the keys of a group that specify blocks and scopes, without any tensor.

Shapes (`view`, `block_shape`, `scope_shape`) or an axis pattern (`axes`, `unit`, `scope`, `sizes`) specify a structure.
`without_pattern` turns a `pattern` into one of these, or `stages`. Budgets of stages are read here, and those of groups
in `PruningGroup.budget`, because schedulers change them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from ..errors import SparsityError, is_number
from ..patterns import Pattern, parse
from ..scores import Score, parse_score
from ..structure import AxisPattern
from ..structure.tiles import Shape
from .config import ConfigContext, TensorGroup, hint_of_key

Level = float | Pattern | str | None  # a level, or the pattern in its place


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The structure of one tensor in one stage: the structural keys of a config dict, checked, and its own budget."""

    block_shape: Shape = ()
    scope_shape: Shape = ()
    view: tuple | Callable[[Tensor], Tensor] | None = None
    norm: float = 2
    score: Score | None = None
    edge: str = "error"
    block_coupling: str | None = None
    coupling_order: Shape | None = None
    scope_coupling: str | None = None
    member_scores: str = "sum"
    max_sparsity: float | None = None
    budget: tuple[str, Any] | None = None  #: the stage's own (key, number); None if it has the budget of its group


STRUCTURE = tuple(f.name for f in fields(Stage) if f.name != "budget")
SHAPES = ("view", "block_shape", "scope_shape")
AXES = ("axes", "unit", "scope", "sizes")
GROUP_KEYS = ("tensor_fqn", *STRUCTURE, *AXES, "stages")  # what pruning groups depend on
BUDGETS = ("sparsity_level", "nnz")


def checked_pattern(pattern: object, where: str) -> Pattern | None:
    """The pattern, parsed if it is a text, or None where there is none."""
    return pattern if pattern is None or isinstance(pattern, Pattern) else parse(pattern, where)


def level_and_pattern(level: Any, pattern: Any) -> tuple[Any, Any]:
    """Return the level and the pattern; a pattern, or its text, may stand in the place of the level."""
    if not isinstance(level, (Pattern, str)):
        return level, pattern
    if pattern is not None:
        raise SparsityError(f"give one pattern, got {level!r} and pattern={pattern!r}")
    if isinstance(level, str) and level.replace(".", "", 1).isdigit():
        raise SparsityError(f"sparsity_level must be a number or a pattern, got the text {level!r}")
    return None, level


def stages_of(group: TensorGroup, accepted: Collection[str] = (*STRUCTURE, *AXES)) -> tuple[Stage, ...]:
    """The structure that a group specifies, one entry per stage; `accepted` has the keys that the sparsifier takes."""
    where = f"{group['tensor_fqn']}: "
    stages = group.get("stages")
    if stages is None:
        return (_stage(group, where),)
    if isinstance(stages, Mapping) or not isinstance(stages, Sequence) or not stages:
        raise SparsityError(f"{where}stages must be a non-empty list of dicts, got {stages!r}")
    keys = (*STRUCTURE, *AXES)
    shared, taken = {k: group[k] for k in keys if k in group}, ({*keys} & {*accepted}) | {*BUDGETS}
    checked = []
    for at, stage in enumerate(stages):
        of_stage = f"{where}stages[{at}]: "
        if not isinstance(stage, Mapping):
            raise SparsityError(f"{where}stages[{at}] must be a dict, got {stage!r}")
        if unknown := set(stage) - taken:
            key = sorted(unknown)[0]
            raise SparsityError(f"{of_stage}unknown key {key!r}.{hint_of_key(key, taken)}")
        refuse_two_budgets(stage, of_stage)
        budget = next(((key, stage[key]) for key in BUDGETS if stage.get(key) is not None), None)
        checked.append(replace(_stage(joined(shared, stage, of_stage), of_stage), budget=budget))
    return tuple(checked)


def refuse_two_budgets(entry: Mapping[str, Any], where: str) -> list[str]:
    """The budget keys of an entry; raises if there are two, or one beside a pattern that has a budget."""
    budgets, pattern = [k for k in BUDGETS if entry.get(k) is not None], entry.get("pattern")
    if len(budgets) > 1:
        raise SparsityError(f"{where}sparsity_level and nnz are mutually exclusive")
    if budgets and isinstance(pattern, Pattern) and pattern.budget_key is not None:
        raise SparsityError(f"{where}{budgets[0]} and {pattern} are mutually exclusive: both specify how much is kept")
    return budgets


def joined(defaults: Mapping[str, Any], entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Merge an entry with defaults; of the notations of blocks and scopes, the entry's replaces the default one."""
    keys = {**defaults, **entry}
    if "norm" in entry and "score" in keys:
        keys["score"] = entry.get("score")
    refuse_two_notations(entry, where)
    for key in AXES:
        if key in entry and "axes" not in keys:
            raise SparsityError(f"{where}{key!r} is part of an axis pattern and needs 'axes'")
    if entry.get("score") is not None and "norm" in entry:
        raise SparsityError(f"{where}'norm' and 'score' are mutually exclusive: a block's saliencies are summed")
    has_shapes = not set(SHAPES).isdisjoint(entry)
    for key in AXES if has_shapes else SHAPES if "axes" in keys else ():
        keys.pop(key, None)
    return keys


def merged(
    defaults: Mapping[str, Any], entry: Mapping[str, Any], place: ConfigContext, accepted: Collection[str]
) -> dict[str, Any]:
    """Return an entry's keys over default ones, with patterns fitted to a tensor; a level replaces a default `nnz`."""
    pattern = checked_pattern(entry.get("pattern"), f"{place.tensor_fqn}: ")
    refuse_two_budgets(entry if pattern is None else {**entry, "pattern": pattern}, place.where)
    entry, defaults = without_pattern(entry, place, accepted), dict(defaults)
    budgets = refuse_two_budgets(entry, place.where)  # now with the keys that the pattern gave
    if not {*SHAPES, *AXES, "stages"}.isdisjoint(entry):  # the entry's structure replaces the default one
        defaults["pattern"] = None
        defaults.pop("stages", None)
    pattern = defaults.get("pattern") if pattern is None else pattern
    group = joined(without_pattern(defaults, place, accepted), entry, place.where)
    if pattern is not None and pattern.budget_key == "nnz" and group.get("scope_coupling") is not None:
        raise SparsityError(
            f"{place.where}{pattern} keeps a fixed number in every group of elements, so tensors cannot share a "
            f"budget (scope_coupling={group['scope_coupling']!r}); leave out scope_coupling, or give a sparsity_level "
            "without a pattern"
        )
    if budgets == ["sparsity_level"]:
        group.pop("nnz", None)
    has_stages = group.get("stages") is not None
    if has_stages and all(s.budget for s in stages_of({"tensor_fqn": place.tensor_fqn, **group}, accepted)) and budgets:
        raise SparsityError(
            f"{place.where}{budgets[0]} has no effect, because every stage has a budget of its own; give it in a stage"
        )
    return group


def without_pattern(entry: Mapping[str, Any], place: ConfigContext, accepted: Collection[str]) -> dict[str, Any]:
    """Return the keys of an entry with its pattern, if it has one, as config keys for one tensor."""
    where = f"{place.tensor_fqn}: "
    pattern, entry = checked_pattern(entry.get("pattern"), where), {k: v for k, v in entry.items() if k != "pattern"}
    if pattern is None:
        return entry
    refuse_two_notations(["pattern", *entry], where)
    keys = {**pattern.resolve(place.module, place.tensor_name, place.tensor, where), **entry}
    for key in keys:
        if key not in accepted:
            raise SparsityError(
                f"{where}{pattern} needs the key {key!r}, which this sparsifier does not take; it takes "
                f"{', '.join(sorted(accepted))}"
            )
    return keys


def refuse_two_notations(keys: Iterable[str], where: str) -> None:
    """Raise if keys specify blocks and scopes in two ways; stages may stand beside all but a pattern."""
    keys = set(keys)
    notations = (("pattern",), AXES, SHAPES, ("stages",) if "pattern" in keys else ())
    used = [key for notation in notations if (key := next((k for k in notation if k in keys), None)) is not None]
    if len(used) > 1:
        raise SparsityError(
            f"{where}{used[0]!r} and {used[1]!r} are mutually exclusive: each specifies what a block and a scope are"
        )


def _stage(keys: Mapping[str, Any], where: str) -> Stage:
    checked = {k: keys[k] for k in STRUCTURE if k in keys}
    if "axes" in keys:
        if "unit" not in keys:
            raise SparsityError(f"{where}'axes' needs 'unit': the axes that index what is kept or dropped")
        pattern = AxisPattern(**{k: keys[k] for k in AXES if k in keys}, where=where)
        checked |= {"view": pattern, "block_shape": pattern.block_shape, "scope_shape": pattern.scope_shape}
    for key in ("block_shape", "scope_shape", "coupling_order"):
        shape = checked.get(key)
        is_missing = shape is None and (key not in checked or key == "coupling_order")
        if isinstance(shape, str) or not (is_missing or isinstance(shape, Sequence)):
            raise SparsityError(f"{where}{key} must be a tuple of ints, got {shape!r}")
        if shape is not None:
            checked[key] = tuple(shape)
    while (last := checked.get("scope_shape", ())[-1:]) and isinstance(last[0], int) and last[0] == -1:
        checked["scope_shape"] = checked["scope_shape"][:-1]  # the same scope; equal ones then compare equal
    for key in ("block_coupling", "scope_coupling"):
        if checked.get(key) is not None and not isinstance(checked[key], str):
            raise SparsityError(f"{where}{key} must be a name (a str) or None, got {checked[key]!r}")
    score = checked["score"] = parse_score(checked.get("score"), where)
    checked["norm"] = math.inf if checked.get("norm") == "inf" else checked.get("norm", 2)
    norm, member_scores = checked["norm"], checked.get("member_scores", "sum")
    if not is_number(norm) or norm not in (1, 2, math.inf):
        hint = " Give a function of the weight as score=." if callable(norm) else ""
        raise SparsityError(f"{where}norm must be 1, 2 or inf, got {norm!r}.{hint}")
    if not isinstance(member_scores, str) or member_scores not in ("sum", "mean", "consumers"):
        raise SparsityError(f"{where}member_scores must be 'sum', 'mean' or 'consumers', got {member_scores!r}")
    if member_scores == "consumers" and score is None:
        raise SparsityError(f"{where}member_scores='consumers' needs a score")
    if member_scores == "mean" and score is None and norm == math.inf:
        raise SparsityError(
            f"{where}member_scores='mean' needs norm 1 or 2, whose powers add over members, got {norm!r}"
        )
    level = checked.get("max_sparsity")
    if level is not None and not (is_number(level) and 0 <= float(level) <= 1):
        raise SparsityError(f"{where}max_sparsity must be a number in [0, 1] or None, got {level!r}")
    view = checked.get("view")
    if view is not None and not callable(view):
        is_sequence = isinstance(view, Sequence) and len(view) in (2, 3)
        if not is_sequence or not all(isinstance(v, Sequence) for v in view[:2]):
            raise SparsityError(
                f"{where}view must be (shape, stride), (shape, stride, offset) or a function, got {view!r}"
            )
        checked["view"] = (tuple(view[0]), tuple(view[1]), *view[2:])
    return Stage(**checked)
