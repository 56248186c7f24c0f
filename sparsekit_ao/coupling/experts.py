"""Couplings of a mixture of experts: hidden units inside each expert, and whole experts with their rows of the router.

Packed experts hold `gate_up_proj` (experts, 2 * hidden, width) and `down_proj` (experts, width, hidden), as Mixtral,
Qwen-MoE and DeepSeek of transformers do. Listed ones are modules `experts.0`, `experts.1`, ... of an `nn.ModuleList`.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .coupling import Coupling
from .listed import is_list

_LISTED = re.compile(r"(.*\bexperts\.)\d+\.(gate_proj|w1)\.weight")
_UP_AND_DOWN = {"gate_proj": (("gate_proj", "up_proj"), "down_proj"), "w1": (("w1", "w3"), "w2")}
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "experts_per_rank")


def expert_couplings(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Coupling]:
    """`"expert_units"`, and for experts with a router `"experts"`; {} for a model without experts.

    Args:
        model: for integers that hold numbers of experts and units.
        tensors: its parameters and buffers by name.
    """
    packed = next((fqn.rpartition(".")[0] for fqn in tensors if _is_packed(fqn, tensors)), None)
    if packed is not None:
        return _packed(model, tensors, packed)
    listed = next((match for match in map(_LISTED.fullmatch, tensors) if match), None)
    if listed is None:
        return {}
    ups, down = _UP_AND_DOWN[listed[2]]
    path, first = listed[1].removesuffix("."), listed[0].removesuffix(f".{listed[2]}.weight")
    members = {f"{up}.weight": "u i" for up in ups} | {f"{up}.bias": "u" for up in ups} | {f"{down}.weight": "o u"}
    members = {f"{_starred(path)}.*.{name}": axes for name, axes in members.items() if f"{first}.{name}" in tensors}
    found = {"expert_units": Coupling(members, name="expert_units")}
    experts: Any = model.get_submodule(path)
    if not is_list(experts):
        return found
    return found | _whole(model, tensors, path, len(experts), (), lists=(_starred(path),))


def _is_packed(fqn: str, tensors: Mapping[str, Tensor]) -> bool:
    up, down = tensors[fqn], tensors.get(f"{fqn.rpartition('.')[0]}.down_proj")
    if not fqn.endswith(".gate_up_proj") or down is None or (up.ndim, down.ndim) != (3, 3):
        return False
    return tuple(up.shape) == (down.shape[0], 2 * down.shape[2], down.shape[1])


def _packed(model: nn.Module, tensors: Mapping[str, Tensor], path: str) -> dict[str, Coupling]:
    up, down = (f"{_starred(path)}.{name}" for name in ("gate_up_proj", "down_proj"))
    units = Coupling(
        {up: "s (g u) i", down: "s o u"},
        scope="s",
        sizes={"g": 2},
        attrs=_held(model, path, ("intermediate_dim",), "u"),
        name="expert_units",
    )
    return {"expert_units": units} | _whole(model, tensors, path, len(tensors[f"{path}.down_proj"]), (up, down))


def _whole(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str, experts: int, packed: tuple[str, ...], **keys: Any
) -> dict[str, Coupling]:
    """`"experts"` with the packed tensors, or with `lists` in `keys`; {} without a router."""
    parent = path.rpartition(".")[0]
    routers = _routers(tensors, parent, experts)
    if not routers:
        return {}
    groups = max(_groups(model.get_submodule(router)) for router in routers)
    rows, axes = ("(s u)", "s u") if groups > 1 else ("u", "u")
    members = dict.fromkeys(packed, f"{rows} a b")
    for router in routers:
        own = [fqn for fqn, t in tensors.items() if fqn.rpartition(".")[0] == router and t.shape[:1] == (experts,)]
        members |= {_starred(fqn): rows + " i" * (tensors[fqn].ndim - 1) for fqn in own}
    attrs: dict[str, str] = {}
    for holder in (path, parent, *routers):
        held = vars(model.get_submodule(holder))
        attrs |= {f"{_starred(holder)}.{key}".removeprefix("."): axes for key in _COUNTS if held.get(key) == experts}
    config = vars(getattr(model, "config", None) or nn.Module())
    attrs |= {f"config.{key}": axes for key in _COUNTS if config.get(key) == experts}
    keys |= {"scope": "s", "sizes": {"s": groups}} if groups > 1 else {}
    return {"experts": Coupling(members, attrs=attrs, name="experts", **keys)}


def _routers(tensors: Mapping[str, Tensor], parent: str, experts: int) -> list[str]:
    """The modules beside experts whose `weight` is a matrix with a row for each of them."""
    beside = re.compile(re.escape(f"{parent}." if parent else "") + r"[^.]+\.weight")
    return [
        fqn.removesuffix(".weight")
        for fqn, tensor in tensors.items()
        if beside.fullmatch(fqn) and tensor.ndim == 2 and len(tensor) == experts
    ]


def _groups(router: nn.Module) -> int:
    """Groups of experts among which a router chooses first."""
    return next((n for n in (getattr(router, key, None) for key in ("num_group", "n_group")) if isinstance(n, int)), 1)


def _held(model: nn.Module, path: str, names: tuple[str, ...], axes: str) -> dict[str, str]:
    """Integer attributes of a module, as `attrs` of a coupling."""
    module = model.get_submodule(path)
    return {f"{_starred(path)}.{name}": axes for name in names if isinstance(getattr(module, name, None), int)}


def _starred(path: str) -> str:
    """A name with `*` for its first number, that of the layer."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)
