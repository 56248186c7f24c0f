"""The structure that a group asks for: the half of a config dict that says what a block and a scope are.

Checked here by itself, before any tensor is looked at; budgets are only named, not counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from ..algebra import AxisPattern
from ..errors import SparsityError
from ..selection.strides import Shape
from .config import TensorGroup

__all__ = ["AXES", "STRUCTURE", "TILES", "Stage", "joined", "stage_budgets", "stages_of"]

ViewArg = tuple | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """How one tensor takes part in one stage: the structural half of a config dict, checked."""

    block_shape: Shape = ()
    scope_shape: Shape = ()
    view: ViewArg = None
    norm: float | Callable[[Tensor], Tensor] = 2
    edge: str = "error"
    block_coupling: str | None = None
    coupling_order: Shape | None = None
    scope_coupling: str | None = None
    member_scores: str = "sum"


STRUCTURE = tuple(f.name for f in fields(Stage))
AXES = ("axes", "unit", "scope", "sizes")  # an axis pattern, which says ...
TILES = ("view", "block_shape", "scope_shape")  # ... what these say otherwise


def stages_of(group: TensorGroup) -> tuple[Stage, ...]:
    """The structure that a group asks for, one entry a stage."""
    where = f"{group['tensor_fqn']}: "
    stages = group.get("stages")
    if stages is None:
        return (_stage(group, where),)
    if isinstance(stages, Mapping) or not isinstance(stages, Sequence) or not stages:
        raise SparsityError(f"{where}stages must be a non-empty list of dicts, got {stages!r}")
    for at, stage in enumerate(stages):
        if not isinstance(stage, Mapping):
            raise SparsityError(f"{where}stages[{at}] must be a dict, got {stage!r}")
        unknown = set(stage) - {*STRUCTURE, *AXES, "sparsity_level", "nnz"}
        if unknown:
            raise SparsityError(f"{where}stages[{at}]: unknown key {sorted(unknown)[0]!r}")
        if "sparsity_level" in stage and "nnz" in stage:
            raise SparsityError(f"{where}stages[{at}]: sparsity_level and nnz are two budgets; give one")
    shared = {k: group[k] for k in (*STRUCTURE, *AXES) if k in group}
    wheres = [f"{where}stages[{at}]: " for at in range(len(stages))]
    return tuple(_stage(joined(shared, s, w), w) for s, w in zip(stages, wheres, strict=True))


def joined(defaults: Mapping[str, Any], own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What is said here over what holds otherwise; of an axis pattern and the tiles only one can hold.

    Raises:
        SparsityError: both are said here, or a part of an axis pattern without `axes`.
    """
    found = {**defaults, **own}
    tiles, axes = [k for k in TILES if k in own], [k for k in AXES if k in own]
    if tiles and axes:
        raise SparsityError(f"{where}{axes[0]!r} and {tiles[0]!r} both say what a block and a scope are; give one")
    if axes and "axes" not in found:
        raise SparsityError(f"{where}{axes[0]!r} is part of an axis pattern and needs 'axes'")
    for key in AXES if tiles else TILES if "axes" in found else ():
        found.pop(key, None)
    return found


def _stage(given: Mapping[str, Any], where: str) -> Stage:
    found = {k: given[k] for k in STRUCTURE if k in given}
    if "axes" in given:
        if "unit" not in given:
            raise SparsityError(f"{where}'axes' needs 'unit': the axes that index what is kept or dropped")
        pattern = AxisPattern(**{k: given[k] for k in AXES if k in given}, where=where)
        found |= {"view": pattern, "block_shape": pattern.block_shape, "scope_shape": pattern.scope_shape}
    for key in ("block_shape", "scope_shape", "coupling_order"):
        value = found.get(key)
        if isinstance(value, str) or (value is not None and not isinstance(value, Sequence)):
            raise SparsityError(f"{where}{key} must be a tuple of ints, got {value!r}")
        if value is not None:
            found[key] = tuple(value)
    while found.get("scope_shape", ())[-1:] == (-1,):
        found["scope_shape"] = found["scope_shape"][:-1]  # missing entries mean the same, and then compare equal
    for key in ("block_coupling", "scope_coupling"):
        if found.get(key) is not None and not isinstance(found[key], str):
            raise SparsityError(f"{where}{key} must be a name (a str) or None, got {found[key]!r}")
    norm = found.get("norm", 2)
    if not callable(norm) and (isinstance(norm, bool) or norm not in (1, 2, math.inf)):
        raise SparsityError(f"{where}norm must be 1, 2, inf or a callable (weight -> saliency), got {norm!r}")
    _check_member_scores(found.get("member_scores", "sum"), norm, where)
    found["view"] = _view_arg(found.get("view"), where)
    return Stage(**found)


def _check_member_scores(how: object, norm: object, where: str) -> None:
    if how not in ("sum", "mean"):
        raise SparsityError(f"{where}member_scores must be 'sum' or 'mean', got {how!r}")
    if how == "mean" and norm not in (1, 2):
        raise SparsityError(
            f"{where}member_scores='mean' needs norm 1 or 2, whose powers add over members, got {norm!r}"
        )


def _view_arg(view: object, where: str) -> ViewArg:
    if view is None or callable(view):
        return view
    if isinstance(view, Sequence) and len(view) in (2, 3) and all(isinstance(v, Sequence) for v in view[:2]):
        return (tuple(view[0]), tuple(view[1]), *view[2:])
    raise SparsityError(f"{where}view must be (shape, stride), (shape, stride, offset) or a function, got {view!r}")


def stage_budgets(group: TensorGroup) -> list[tuple[str, Any] | None]:
    """Each stage's own budget as (key, number); None where the stage follows its group."""
    stages = group.get("stages")
    if stages is None:
        return [None]
    return [next(((k, s[k]) for k in ("nnz", "sparsity_level") if k in s), None) for s in stages]
