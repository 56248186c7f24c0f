"""The manifest: which units of which tensors were kept, as plain data; `cut_to` applies it in another process.

It contains numbers and names, no weights: those are saved as a state dict.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..algebra import AxisPattern
from ..coupling import BoundCoupling, Member
from ..errors import SparsityError
from .attributes import Change, apply_changes, check_old_values
from .removal import Removal, plain_tensors, remove_units

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
                "kept": removal.keep.reshape(-1, removal.of).nonzero()[:, 1].reshape(-1, removal.kept).tolist(),
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
    >>> from sparsekit_ao.export import compact
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
    if data.get("version") != VERSION:
        raise SparsityError(f"cut_to: the manifest has version {data.get('version')!r}, this library reads {VERSION}")
    _check_shapes(fresh_model, data["tensors"])
    changes = [Change(**change) for change in data["attributes"]]
    check_old_values(fresh_model, changes)
    remove_units(fresh_model, [_removal(coupling) for coupling in data["groups"]])
    apply_changes(fresh_model, changes)
    return fresh_model


def _check_shapes(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    try:
        found = plain_tensors(model, list(shapes))
    except AttributeError as e:
        raise SparsityError(f"cut_to: the manifest is of another model ({e})") from None
    for name, shape in shapes.items():
        if list(found[name].shape) != list(shape):
            raise SparsityError(
                f"cut_to: {name} is {tuple(found[name].shape)}, but the dense model's was {tuple(shape)}; pass a "
                "model with the dense shapes"
            )


def _removal(data: Mapping[str, Any]) -> Removal:
    unit, scope = data["unit"], tuple(data["scope"])
    members = tuple(
        Member(
            fqn=m["name"],
            pattern=AxisPattern(axes=m["axes"], unit=(*scope, unit), scope=scope, sizes=m["sizes"]),
            is_parameter=False,
        )
        for m in data["members"]
    )
    coupling = BoundCoupling(
        name=data["name"], captured=(), members=members, unit=unit, scope=scope, sizes=data["sizes"], attrs={}
    )
    keep = torch.zeros(len(data["kept"]), data["sizes"][unit], dtype=torch.bool, device="cpu")
    keep.scatter_(1, torch.tensor(data["kept"], device="cpu"), True)
    return Removal(coupling=coupling, keep=keep.reshape(coupling.grid))
