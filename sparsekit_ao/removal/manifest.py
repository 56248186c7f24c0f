"""The manifest: which units of which tensors were kept, as plain data without weights; `cut_to` applies it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..coupling import BoundCoupling, Member
from ..errors import SparsityError
from ..masking.normalized import redo_weight_norms, undo_weight_norms
from ..structure import AxisPattern
from .modules import check_lists, drop_modules, layer_fields
from .norms import CONFIG_EPS, EPS_NAMES
from .remove import Removal, plain_tensor, remove_units
from .sizes import FILLED, Change, apply_changes, check_old_values

VERSION = 1


def make_manifest(model: nn.Module, removals: Sequence[Removal], changes: Sequence[Change]) -> dict[str, Any]:
    """Return a compaction of a dense model as plain data: couplings with their kept units, shapes, attributes."""
    names = [m.fqn for removal in removals for m in removal.bound.members]
    return {
        "version": VERSION,
        "groups": [
            {
                "name": bound.name,
                "unit": bound.unit,
                "scope": list(bound.scope),
                "sizes": dict(bound.sizes),
                "members": [
                    {"name": m.fqn, "axes": m.pattern.axes, "sizes": dict(m.pattern.sizes)} for m in bound.members
                ],
                "kept": removal.keep.nonzero()[:, -1].reshape(-1, removal.kept).tolist(),
                "lists": list(bound.lists),
            }
            for bound, removal in ((removal.bound, removal) for removal in removals)
        ],
        "tensors": {name: list(plain_tensor(model, name).shape) for name in names},
        "attributes": [{"path": c.path, "was": c.was, "now": c.now} for c in changes],
        # the fields of the dense model that `drop_modules` changes
        "config": {k: v for r in removals for path in r.bound.lists for k, v in layer_fields(model, path).items()},
    }


def cut_to(fresh_model: nn.Module, manifest: Mapping[str, Any] | str | Path) -> nn.Module:
    """Give a fresh dense model the shapes of a compacted one, in place, for `load_state_dict`.

    Args:
        fresh_model: Constructed as the dense model was, with any weights, on any device (meta included).
        manifest: A report's `manifest`, or the path of the file that `report.save` wrote.

    Returns:
        The model itself.

    Raises:
        SparsityError: A manifest of another version, or a model of other shapes or attributes; its values are then
            unchanged.

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
    data: Any = manifest
    if not isinstance(manifest, Mapping):
        try:
            data = json.loads(Path(manifest).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as e:  # of JSON or of the encoding
            raise SparsityError(f"cut_to: {str(manifest)!r} is not what `report.save` writes: {e}") from e
    version = data.get("version") if isinstance(data, Mapping) else data
    if type(version) is not int or version != VERSION:
        raise SparsityError(f"cut_to: the manifest has version {version!r}, this library reads {VERSION}")
    normed = undo_weight_norms(fresh_model)
    try:
        _cut(fresh_model, data)
    finally:
        redo_weight_norms(fresh_model, normed)
    return fresh_model


def _cut(fresh_model: nn.Module, data: Mapping[str, Any]) -> None:
    try:
        _check_shapes(fresh_model, data["tensors"])
        changes = [Change(**change) for change in data["attributes"]]
        _check_changes(fresh_model, changes)
        check_old_values(fresh_model, changes)
        removals = [_removal(coupling, data["tensors"]) for coupling in data["groups"]]
        check_lists(fresh_model, removals, "cut_to: ")
    except SparsityError:
        raise
    except Exception as e:  # whatever data raise that `compact` did not write
        raise SparsityError(f"cut_to: the manifest is not what `compact` writes: {type(e).__name__}: {e}") from e
    remove_units(fresh_model, removals)
    apply_changes(fresh_model, changes)
    drop_modules(fresh_model, removals)


def _check_shapes(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    for name, shape in shapes.items():
        try:
            now = tuple(plain_tensor(model, name).shape)
        except AttributeError as e:
            raise SparsityError(f"cut_to: the manifest is of another model ({e})") from None
        if now != tuple(shape):
            raise SparsityError(
                f"cut_to: {name} is {now}, but the dense model's was {tuple(shape)}; pass a model with the dense shapes"
            )


def _check_changes(model: nn.Module, changes: Sequence[Change]) -> None:
    """Check that changes only lower public integers, or set the eps of norms."""
    modules = {name for name, _ in model.named_modules()}
    for change in changes:
        names = re.sub(r"\[\d+\]$", "", change.path).split(".")  # an entry of a tuple: shape[1]
        inside = next(names[at:] for at in reversed(range(len(names))) if ".".join(names[:at]) in modules)
        is_public = all((n.isidentifier() or n.isdecimal()) and not n.startswith("_") for n in inside)
        if names[-1] in (*EPS_NAMES, *CONFIG_EPS):
            is_valid = isinstance(change.now, float) and 0 < change.now < math.inf
        else:
            is_filled = change.was is None and names[-1] in FILLED
            was = change.now if is_filled else change.was
            least = int("config" not in names)  # no block of a kind may be left that a field counts
            is_valid = type(change.now) is type(was) is int and least <= change.now <= was
        if not (is_public and is_valid):
            raise SparsityError(f"cut_to: {change.path!r} cannot be set to {change.now!r} by a manifest")


def _removal(data: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Removal:
    unit, scope, where = data["unit"], tuple(data["scope"]), f"cut_to: coupling {data['name']!r}: "
    keys: dict[str, Any] = {"unit": (*scope, unit), "scope": scope, "where": where}
    patterns = [AxisPattern(axes=m["axes"], sizes=m["sizes"], **keys) for m in data["members"]]
    pairs = zip(data["members"], patterns, strict=True)
    members = tuple(Member(fqn=m["name"], pattern=pattern, is_parameter=False) for m, pattern in pairs)
    keys = {"members": members, "unit": unit, "scope": scope, "lists": tuple(data.get("lists", ()))}
    coupling = BoundCoupling(name=data["name"], sizes=data["sizes"], **keys)
    sizes = [size for axes in (data["sizes"], *(m["sizes"] for m in data["members"])) for size in axes.values()]
    lengths = [member.pattern.lengths(tuple(shapes[member.fqn])) for member in members]
    axes = {axis: data["sizes"][axis] for axis in (*scope, unit)}
    fits = all(type(n) is int for n in sizes) and not any(axes.items() - by.items() for by in lengths)
    if not fits or not (members or coupling.lists):
        raise SparsityError(f"{where}the sizes of its axes are not those of its tensors")
    kept = torch.tensor(data["kept"], device="cpu")
    if not kept.numel() or bool((kept.diff() <= 0).any()):
        raise SparsityError(f"{where}its kept units are not listed in order")
    keep = torch.zeros(len(kept), axes[unit], dtype=torch.bool, device="cpu").scatter_(1, kept, True)
    return Removal(bound=coupling, keep=keep.reshape(coupling.grid))
