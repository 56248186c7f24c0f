"""The keys of a group that specify blocks and scopes, checked without any tensor.

Three notations specify a structure: shapes (`view`, `block_shape`, `scope_shape`), an axis pattern (`axes`, `unit`,
`scope`, `sizes`) and a `pattern`, which is resolved to one of the other two. `groups` counts budgets.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError, is_number
from ..patterns import Pattern
from ..scores import Score, parse_score
from ..structure import AxisPattern
from ..structure.tiles import Shape
from .config import ConfigContext, TensorGroup

ViewArg = tuple | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The structure of one tensor in one stage: the structural keys of a config dict, checked."""

    block_shape: Shape = ()
    scope_shape: Shape = ()
    view: ViewArg = None
    norm: float = 2
    score: Score | None = None
    edge: str = "error"
    block_coupling: str | None = None
    coupling_order: Shape | None = None
    scope_coupling: str | None = None
    member_scores: str = "sum"
    max_sparsity: float | None = None


STRUCTURE = tuple(f.name for f in fields(Stage))
SHAPES = ("view", "block_shape", "scope_shape")
AXES = ("axes", "unit", "scope", "sizes")
BUDGETS = ("sparsity_level", "nnz")


def resolved(given: Mapping[str, Any], place: ConfigContext) -> dict[str, Any]:
    """A dict of config keys with its `pattern`, if it has one, resolved to config keys for one tensor.

    Raises:
        SparsityError: not a pattern, it does not fit, or blocks and scopes are specified beside it.
    """
    where = f"{place.tensor_fqn}: "
    own = {k: v for k, v in given.items() if k != "pattern"}
    pattern = checked_pattern(given.get("pattern"), where)
    if pattern is None:
        return own
    _refuse_two_notations(["pattern", *own], where)
    return {**pattern.resolve(place.module, place.tensor_name, place.tensor, where), **own}


def checked_pattern(pattern: object, where: str) -> Pattern | None:
    """The pattern, or None where there is none."""
    if pattern is None or isinstance(pattern, Pattern):
        return pattern
    raise SparsityError(
        f"{where}pattern must be one of `sparsekit_ao.patterns`, got {pattern!r}; give one such as patterns.n_m(2, 4)"
    )


def stages_of(group: TensorGroup) -> tuple[Stage, ...]:
    """The structure that a group specifies, one entry per stage."""
    where = f"{group['tensor_fqn']}: "
    stages = group.get("stages")
    if stages is None:
        return (_stage(group, where),)
    if isinstance(stages, Mapping) or not isinstance(stages, Sequence) or not stages:
        raise SparsityError(f"{where}stages must be a non-empty list of dicts, got {stages!r}")
    for at, stage in enumerate(stages):
        if not isinstance(stage, Mapping):
            raise SparsityError(f"{where}stages[{at}] must be a dict, got {stage!r}")
        unknown = set(stage) - {*STRUCTURE, *AXES, *BUDGETS}
        if unknown:
            raise SparsityError(f"{where}stages[{at}]: unknown key {sorted(unknown)[0]!r}")
        refuse_two_budgets(stage, f"{where}stages[{at}]: ")
    shared = {k: group[k] for k in (*STRUCTURE, *AXES) if k in group}
    wheres = [f"{where}stages[{at}]: " for at in range(len(stages))]
    return tuple(_stage(joined(shared, s, w), w) for s, w in zip(stages, wheres, strict=True))


def refuse_as_level(level: object) -> None:
    """Raise if the first argument of a sparsifier is a pattern or a model, which are given elsewhere."""
    if isinstance(level, Pattern):
        raise SparsityError(f"sparsity_level must be a number, got {level}; give a pattern as pattern=")
    if isinstance(level, nn.Module):
        raise SparsityError(
            f"sparsity_level must be a number, got a {type(level).__name__}; give the model to prepare(model, config)"
        )


def refuse_two_budgets(given: Mapping[str, Any], where: str) -> list[str]:
    """The budget keys that are given, at most one, and none beside a pattern that has a budget."""
    found, pattern = [k for k in BUDGETS if given.get(k) is not None], given.get("pattern")
    if len(found) > 1:
        raise SparsityError(f"{where}sparsity_level and nnz are mutually exclusive")
    if found and isinstance(pattern, Pattern) and pattern.budget is not None:
        raise SparsityError(f"{where}{found[0]} and {pattern} are mutually exclusive: both specify how much is kept")
    return found


def joined(defaults: Mapping[str, Any], own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Merge own values with defaults; of the notations of blocks and scopes, the own one replaces the default one.

    Raises:
        SparsityError: two notations among the own values, part of an axis pattern without `axes`, or a norm beside a
            score.
    """
    found = {**defaults, **own}
    if "norm" in own and "score" in found:
        found["score"] = own.get("score")
    _refuse_two_notations(own, where)
    axes = [k for k in AXES if k in own]
    if axes and "axes" not in found:
        raise SparsityError(f"{where}{axes[0]!r} is part of an axis pattern and needs 'axes'")
    if own.get("score") is not None and "norm" in own:
        raise SparsityError(f"{where}'norm' and 'score' are mutually exclusive: a block's saliencies are summed")
    shapes = any(k in own for k in SHAPES)
    for key in AXES if shapes else SHAPES if "axes" in found else ():
        found.pop(key, None)
    return found


def _refuse_two_notations(keys: Mapping[str, Any] | Sequence[str], where: str) -> None:
    others = (AXES, SHAPES, ("stages",)) if "pattern" in keys else (AXES, SHAPES)
    notations = [[k for k in some if k in keys] for some in (("pattern",), *others)]
    given = [found[0] for found in notations if found]
    if len(given) > 1:
        raise SparsityError(
            f"{where}{given[0]!r} and {given[1]!r} are mutually exclusive: each specifies what a block and a scope are"
        )


def _stage(given: Mapping[str, Any], where: str) -> Stage:
    found = {k: given[k] for k in STRUCTURE if k in given}
    if "axes" in given:
        if "unit" not in given:
            raise SparsityError(f"{where}'axes' needs 'unit': the axes that index what is kept or dropped")
        pattern = AxisPattern(**{k: given[k] for k in AXES if k in given}, where=where)
        found |= {"view": pattern, "block_shape": pattern.block_shape, "scope_shape": pattern.scope_shape}
    for key in ("block_shape", "scope_shape", "coupling_order"):
        value = found.get(key)
        is_missing = value is None and (key not in found or key == "coupling_order")
        if isinstance(value, str) or not (is_missing or isinstance(value, Sequence)):
            raise SparsityError(f"{where}{key} must be a tuple of ints, got {value!r}")
        if value is not None:
            found[key] = tuple(value)
    while (last := found.get("scope_shape", ())[-1:]) and isinstance(last[0], int) and last[0] == -1:
        found["scope_shape"] = found["scope_shape"][:-1]  # the same scope; equal ones then compare equal
    for key in ("block_coupling", "scope_coupling"):
        if found.get(key) is not None and not isinstance(found[key], str):
            raise SparsityError(f"{where}{key} must be a name (a str) or None, got {found[key]!r}")
    found["score"] = parse_score(found.get("score"), where)
    _check_scoring(found, where)
    _check_max_sparsity(found.get("max_sparsity"), where)
    found["view"] = _view_arg(found.get("view"), where)
    return Stage(**found)


def _check_scoring(found: Mapping[str, Any], where: str) -> None:
    """Check `norm`, `score` and `member_scores`."""
    norm, score, how = found.get("norm", 2), found.get("score"), found.get("member_scores", "sum")
    if not is_number(norm) or norm not in (1, 2, math.inf):
        hint = " Give a function of the weight as score=." if callable(norm) else ""
        raise SparsityError(f"{where}norm must be 1, 2 or inf, got {norm!r}.{hint}")
    if not isinstance(how, str) or how not in ("sum", "mean", "consumers"):
        raise SparsityError(f"{where}member_scores must be 'sum', 'mean' or 'consumers', got {how!r}")
    if how == "consumers" and score is None:
        raise SparsityError(f"{where}member_scores='consumers' needs a score")
    if how == "mean" and score is None and norm not in (1, 2):
        raise SparsityError(
            f"{where}member_scores='mean' needs norm 1 or 2, whose powers add over members, got {norm!r}"
        )


def _check_max_sparsity(value: object, where: str) -> None:
    if value is not None and not (is_number(value) and 0 <= float(value) <= 1):
        raise SparsityError(f"{where}max_sparsity must be a number in [0, 1] or None, got {value!r}")


def _view_arg(view: object, where: str) -> ViewArg:
    if view is None or callable(view):
        return view
    if isinstance(view, Sequence) and len(view) in (2, 3) and all(isinstance(v, Sequence) for v in view[:2]):
        return (tuple(view[0]), tuple(view[1]), *view[2:])
    raise SparsityError(f"{where}view must be (shape, stride), (shape, stride, offset) or a function, got {view!r}")


def checked_tile(shape: object, where: str) -> tuple[int, int]:
    """A `sparse_block_shape` as a tuple; raises unless it is two positive ints."""
    ok = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) == 2
    if not ok or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):  # type: ignore[attr-defined]
        raise SparsityError(f"{where}sparse_block_shape must be two positive ints (rows, columns), got {shape!r}")
    return tuple(shape)  # type: ignore[arg-type, return-value]
