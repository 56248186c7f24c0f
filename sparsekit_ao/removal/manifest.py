"""The manifest: which units of which tensors were kept, as plain data; `cut_to` applies it in another process.

It contains numbers and names, no weights: those are saved as a state dict.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..coupling import BoundCoupling, Member
from ..errors import SparsityError
from ..structure import AxisPattern
from .norms import CONFIG_EPS, EPS_NAMES
from .remove import Removal, check_lists, drop_modules, plain_tensors, remove_units
from .sizes import Change, apply_changes, check_old_values

VERSION = 1


def make_manifest(
    removals: Sequence[Removal], changes: Sequence[Change], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Plain data of a compaction: couplings with their kept units, dense shapes, attributes."""
    return {
        "version": VERSION,
        "groups": [
            {
                "name": removal.coupling.name,
                "unit": removal.coupling.unit,
                "scope": list(removal.coupling.scope),
                "sizes": dict(removal.coupling.sizes),
                "members": [
                    {"name": m.fqn, "axes": m.pattern.axes, "sizes": dict(m.pattern.sizes)}
                    for m in removal.coupling.members
                ],
                "kept": removal.keep.reshape(-1, removal.scope_units)
                .nonzero()[:, 1]
                .reshape(-1, removal.kept)
                .tolist(),
                **({"lists": list(removal.coupling.lists)} if removal.coupling.lists else {}),
            }
            for removal in removals
        ],
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "attributes": [{"path": c.path, "was": c.was, "now": c.now} for c in changes],
    }


def cut_to(fresh_model: nn.Module, manifest: Mapping[str, Any] | str | Path) -> nn.Module:
    """Give a fresh dense model the shapes of a compacted one, in place, for `load_state_dict`.

    Args:
        fresh_model: constructed as the dense model was, with any weights, on any device (meta included).
        manifest: a report's `manifest`, or the path of the file that `report.save` wrote.

    Returns:
        The model itself.

    Raises:
        SparsityError: a manifest of another version, or a model of other shapes or attributes; it is then unchanged.

    >>> from sparsekit_ao import Coupling
    >>> from sparsekit_ao.removal import compact
    >>> def make():
    ...     return torch.nn.Sequential(torch.nn.Linear(2, 4, bias=False), torch.nn.Linear(4, 2))
    >>> model = make()
    >>> with torch.no_grad():
    ...     _ = model[0].weight[1:].zero_(), model[1].weight[:, 1:].zero_()
    >>> small, report = compact(model, Coupling({"0.weight": "u i", "1.weight": "o u"}), torch.ones(1, 2))
    >>> cut_to(make(), report.manifest).load_state_dict(small.state_dict())
    <All keys matched successfully>
    """
    data = manifest if isinstance(manifest, Mapping) else json.loads(Path(manifest).read_text())
    version = data.get("version") if isinstance(data, Mapping) else data
    if not isinstance(data, Mapping) or not _is_size(version) or version != VERSION:
        raise SparsityError(f"cut_to: the manifest has version {version!r}, this library reads {VERSION}")
    for key, fits in _FIELDS.items():
        if key not in data or not fits(data[key]):
            raise SparsityError(f"cut_to: the manifest's {key!r} is missing or not what `compact` writes")
    _check_shapes(fresh_model, data["tensors"])
    changes = [Change(**change) for change in data["attributes"]]
    check_old_values(fresh_model, changes)
    removals = [_removal(coupling, data["tensors"]) for coupling in data["groups"]]
    check_lists(fresh_model, removals, "cut_to: ")
    remove_units(fresh_model, removals)
    apply_changes(fresh_model, changes)
    drop_modules(fresh_model, removals)
    return fresh_model


def _is_size(value: object, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _is_dict(value: object, keys: Sequence[str]) -> bool:
    return isinstance(value, Mapping) and set(value) == set(keys)


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_table(value: object, fits: Callable[[Any], bool]) -> bool:
    """Whether this is a dict whose keys are names and whose values fit."""
    return isinstance(value, Mapping) and all(isinstance(k, str) for k in value) and all(map(fits, value.values()))


def _is_attribute(value: object) -> bool:
    """Whether this is {path, was, now}: names joined by dots, none with a leading underscore, and sizes, or an eps."""
    if not _is_dict(value, ("path", "was", "now")):
        return False
    path, was, now = value["path"], value["was"], value["now"]  # type: ignore[index]
    names = re.sub(r"\[\d+\]$", "", path).split(".") if isinstance(path, str) else []  # an entry of a tuple: shape[1]
    plain = bool(names) and all((n.isidentifier() or n.isdecimal()) and not n.startswith("_") for n in names)
    if plain and names[-1] in (*EPS_NAMES, *CONFIG_EPS):
        return isinstance(now, float) and 0 < now < math.inf and (was is None or isinstance(was, float))
    return plain and _is_size(now) and _is_size(was) and now <= was


def _is_member(value: object) -> bool:
    if not _is_dict(value, ("name", "axes", "sizes")):
        return False
    name, axes, sizes = (value[k] for k in ("name", "axes", "sizes"))  # type: ignore[index]
    return isinstance(name, str) and isinstance(axes, str) and _is_table(sizes, _is_size)


def _is_coupling(value: object) -> bool:
    data = {"lists": [], **value} if isinstance(value, Mapping) else {}
    if not _is_dict(data, ("name", "unit", "scope", "sizes", "members", "kept", "lists")):
        return False
    if not _is_list(data["lists"], lambda path: isinstance(path, str)):
        return False
    if not _is_list(data["scope"], lambda axis: isinstance(axis, str)) or not _is_table(data["sizes"], _is_size):
        return False
    axes = [*data["scope"], data["unit"]]
    if not all(isinstance(a, str) and a in data["sizes"] for a in axes) or len(set(axes)) < len(axes):
        return False
    rows, size = data["kept"], data["sizes"][data["unit"]]
    if not _is_list(rows, lambda row: _is_list(row, lambda at: _is_size(at, 0) and at < size)) or not rows:
        return False
    increasing = all(row and all(a < b for a, b in itertools.pairwise(row)) for row in rows)
    scopes = math.prod(data["sizes"][axis] for axis in data["scope"])
    equal = len(rows) == scopes and len({len(row) for row in rows}) == 1
    return increasing and equal and _is_list(data["members"], _is_member) and bool(data["members"])


# So that a manifest only removes units, which may be modules of lists, lowers integers and sets a norm's eps.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "tensors": lambda value: _is_table(value, lambda shape: _is_list(shape, lambda n: _is_size(n, 0))),
    "attributes": lambda value: _is_list(value, _is_attribute),
    "groups": lambda value: _is_list(value, _is_coupling),
}


def _check_shapes(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    try:
        tensors = plain_tensors(model, list(shapes))
    except AttributeError as e:
        raise SparsityError(f"cut_to: the manifest is of another model ({e})") from None
    for name, shape in shapes.items():
        if not isinstance(tensors[name], Tensor):
            raise SparsityError(f"cut_to: the manifest is of another model ({name} is no tensor)")
        if list(tensors[name].shape) != list(shape):
            raise SparsityError(
                f"cut_to: {name} is {tuple(tensors[name].shape)}, but the dense model's was {tuple(shape)}; pass a "
                "model with the dense shapes"
            )


def _removal(data: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Removal:
    unit, scope, where = data["unit"], tuple(data["scope"]), f"cut_to: coupling {data['name']!r}: "
    members = tuple(
        Member(
            fqn=m["name"],
            pattern=AxisPattern(axes=m["axes"], unit=(*scope, unit), scope=scope, sizes=m["sizes"], where=where),
            is_parameter=False,
        )
        for m in data["members"]
    )
    for member in members:
        lengths = member.pattern.lengths(tuple(shapes[member.fqn])) if member.fqn in shapes else {}
        if any(lengths.get(axis) != data["sizes"][axis] for axis in (*scope, unit)):
            raise SparsityError(f"{where}the sizes of its axes are not those of {member.fqn}")
    coupling = BoundCoupling(
        name=data["name"],
        captured=(),
        members=members,
        unit=unit,
        scope=scope,
        sizes=data["sizes"],
        attrs={},
        lists=tuple(data.get("lists", ())),
    )
    keep = torch.zeros(len(data["kept"]), data["sizes"][unit], dtype=torch.bool, device="cpu")
    keep.scatter_(1, torch.tensor(data["kept"], device="cpu"), True)
    return Removal(coupling=coupling, keep=keep.reshape(coupling.grid))
