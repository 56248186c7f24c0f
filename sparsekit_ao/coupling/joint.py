"""Config entries of several couplings for one sparsifier, where a tensor may be a member of more than one.

A tensor's couplings become the stages of its entry: each chooses units among what the earlier ones kept, and the
tensor's mask keeps what all of them keep.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import SparsityError, checked_model
from ..sparsifiers.names import owner_of, parameter_of
from .coupling import Coupling


def joint_entries(couplings: Sequence[Coupling], model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    """Config dicts for one sparsifier that prunes several couplings, so that one budget or schedule spans them all.

    Where couplings share a tensor (heads and the residual stream, in a query projection), its entry has `stages`, in
    the order of the couplings, and its mask drops what any of them drops. A scheduler that writes `sparsity_level`
    changes the level of every coupling.

    Args:
        couplings: of different names.
        model: where the names are looked up.
        keys: further keys of every entry, as `Coupling.entries` takes them. `sparsity_level` and `nnz` may be a dict
            {name of a coupling: its number}; a coupling that it does not name has the sparsifier's default.

    Raises:
        SparsityError: as `Coupling.entries`; two couplings of one name; an unknown name in a budget.

    >>> from sparsekit_ao import ScopeSparsifier
    >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 2))
    >>> couplings = [Coupling({f"{k}.weight": "u i", f"{k + 1}.weight": "o u"}) for k in (0, 1)]
    >>> sparsifier = ScopeSparsifier()
    >>> sparsifier.prepare(model, joint_entries(couplings, model, sparsity_level=0.5))
    >>> sparsifier.step()
    >>> mask = sparsifier.mask("1.weight")  # half of its rows, and half of its columns
    >>> int(mask.any(1).sum()), int(mask.any(0).sum()), int(mask.sum())
    (4, 3, 12)
    """
    checked_model(model, "joint_entries")
    if not isinstance(couplings, (list, tuple)) or not all(isinstance(one, Coupling) for one in couplings):
        raise SparsityError(f"joint_entries: couplings must be a list of Coupling, got {type(couplings).__name__}")
    names = [coupling.name for coupling in couplings]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise SparsityError(f"joint_entries: two couplings have the name {name!r}; give them names: Coupling(name=...)")
    budgets = {key: value for key, value in keys.items() if isinstance(value, Mapping)}
    for key, value in budgets.items():
        for name in set(value) - set(names):
            raise SparsityError(f"joint_entries: {key} names {name!r}, but the couplings are {', '.join(names)}")
    whole: dict[str, Any] = {key: keys[key] for key in ("sparsity_level", "nnz") if key in keys and key not in budgets}
    rest = {key: value for key, value in keys.items() if key not in whole and key not in budgets}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    first: dict[int, str] = {}  # a tied parameter has the name that comes first
    for coupling in couplings:
        own = {key: value[coupling.name] for key, value in budgets.items() if coupling.name in value}
        for rows in coupling.bound_entries(model, **rest, **own):
            fqns = [row.pop("tensor_fqn") for row in rows]
            fqns = [first.setdefault(id(parameter_of(*owner_of(model, fqn))), fqn) for fqn in fqns]
            taken = {stage for fqn in fqns for stage in found.get(fqn, ())}
            stage = next(k for k in itertools.count() if k not in taken)
            for fqn, row in zip(fqns, rows, strict=True):
                found.setdefault(fqn, {})[stage] = row
    return [{"tensor_fqn": fqn, **_structure(model, fqn, stages), **whole} for fqn, stages in found.items()]


def _structure(model: nn.Module, fqn: str, stages: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The keys of one tensor's entry; all members of a coupling have it in the same stage."""
    if set(stages) == {0}:
        return stages[0]
    # In a stage of none of its couplings, all of it is one block, which is kept.
    whole = (-1,) * parameter_of(*owner_of(model, fqn)).ndim
    kept = {"block_shape": whole, "nnz": 1, "norm": 2, "member_scores": "sum", "scope_coupling": None}
    return {"stages": [stages.get(stage, kept) for stage in range(max(stages) + 1)]}
