"""The manifest: which units of which tensors were kept, as plain data; `cut_to` applies it in another process.

It contains numbers and names, no weights: those are saved as a state dict.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
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
    for key, form in _FIELDS.items():
        if key not in data or not _fits(data[key], form):
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


def _fits(value: Any, form: Any) -> bool:
    """Whether data have a form: a type, a test, a list of a form, a dict of forms, or {str: form} for any keys."""
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(entry, form[0]) for entry in value)
    if isinstance(form, dict) and isinstance(value, Mapping):
        forms = {key: form[str] for key in value if type(key) is str} if str in form else form
        return value.keys() == forms.keys() and all(_fits(value[key], forms[key]) for key in forms)
    return isinstance(value, form) if isinstance(form, type) else callable(form) and form(value)


def _is_attribute(value: Any) -> bool:
    """Whether this is {path, was, now}: names joined by dots, none with a leading underscore, and sizes, or an eps."""
    if not _fits(value, {"path": str, "was": object, "now": object}):
        return False
    path, was, now = value["path"], value["was"], value["now"]
    names = re.sub(r"\[\d+\]$", "", path).split(".")  # an entry of a tuple: shape[1]
    plain = all((n.isidentifier() or n.isdecimal()) and not n.startswith("_") for n in names)
    if plain and names[-1] in (*EPS_NAMES, *CONFIG_EPS):
        return isinstance(now, float) and 0 < now < math.inf and (was is None or isinstance(was, float))
    return plain and _is_size(now) and _is_size(was) and now <= was


def _is_coupling(value: Any) -> bool:
    data = {"lists": [], **value} if isinstance(value, Mapping) else value
    if not _fits(data, _COUPLING) or not data["members"] or not data["kept"]:
        return False
    sizes, axes, rows = data["sizes"], [*data["scope"], data["unit"]], data["kept"]
    if not set(axes) <= sizes.keys() or len(set(axes)) < len(axes) or len({len(row) for row in rows}) > 1:
        return False
    increasing = all(row and all(a < b for a, b in itertools.pairwise(row)) for row in rows)
    return increasing and len(rows) == math.prod(sizes[a] for a in axes[:-1]) and max(map(max, rows)) < sizes[axes[-1]]


_SIZES = {str: _is_size}
_COUPLING = {
    "name": object,
    "unit": str,
    "scope": [str],
    "sizes": _SIZES,
    "members": [{"name": str, "axes": str, "sizes": _SIZES}],
    "kept": [[lambda at: _is_size(at, 0)]],
    "lists": [str],
}
# So that a manifest only removes units, which may be modules of lists, lowers integers and sets a norm's eps.
_FIELDS = {"tensors": {str: [lambda n: _is_size(n, 0)]}, "attributes": [_is_attribute], "groups": [_is_coupling]}


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
