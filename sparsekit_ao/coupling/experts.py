"""Couplings of a mixture of experts: hidden units inside each expert, and whole experts with their rows of the router.

Packed experts hold `gate_up_proj` (experts, 2 * hidden, width) and `down_proj` (experts, width, hidden), as Mixtral,
Qwen-MoE and DeepSeek of transformers do. Listed ones are modules `experts.0`, `experts.1`, ...; whole ones cannot be
removed, since they are no axis of a tensor.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn

from .coupling import Coupling

_LISTED = re.compile(r"(.*\bexperts\.)\d+\.(gate_proj|w1)\.weight")
_UP_AND_DOWN = {"gate_proj": (("gate_proj", "up_proj"), "down_proj"), "w1": (("w1", "w3"), "w2")}
_CONFIG = ("num_local_experts", "num_experts", "n_routed_experts")


def expert_couplings(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Coupling]:
    """`"expert_units"`, and for packed experts with a router `"experts"`; {} for a model without experts.

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
    path = f"{_starred(listed[1])}*"
    members = {f"{path}.{up}.weight": "u i" for up in ups} | {f"{path}.{down}.weight": "o u"}
    return {"expert_units": Coupling(members, name="expert_units")}


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
    experts, routers = tensors[f"{path}.down_proj"].shape[0], _routers(tensors, path)
    if not routers:
        return {"expert_units": units}
    groups = max(getattr(model.get_submodule(router), "num_group", 1) for router in routers)
    rows, axes = ("(s u)", "s u") if groups > 1 else ("u", "u")
    members, attrs = {up: f"{rows} a b", down: f"{rows} a b"}, _held(model, path, ("num_experts",), axes)
    for router in routers:
        own = [fqn for fqn, t in tensors.items() if fqn.rpartition(".")[0] == router and t.shape[:1] == (experts,)]
        members |= {_starred(fqn): rows + " i" * (tensors[fqn].ndim - 1) for fqn in own}
        attrs |= _held(model, router, ("num_experts",), axes)
    config = vars(getattr(model, "config", None) or nn.Module())
    attrs |= {f"config.{key}": axes for key in _CONFIG if config.get(key) == experts}
    scope = {"scope": "s", "sizes": {"s": groups}} if groups > 1 else {}
    whole = Coupling(members, attrs=attrs, name="experts", **scope)  # type: ignore[arg-type]
    return {"expert_units": units, "experts": whole}


def _routers(tensors: Mapping[str, Tensor], path: str) -> list[str]:
    """The siblings of packed experts whose `weight` is a matrix with a row for each of them."""
    parent, experts = path.rpartition(".")[0], tensors[f"{path}.down_proj"].shape[0]
    return [
        fqn.removesuffix(".weight")
        for fqn, tensor in tensors.items()
        if re.fullmatch(rf"{re.escape(parent)}\.[^.]+\.weight", fqn) and tensor.ndim == 2 and len(tensor) == experts
    ]


def _held(model: nn.Module, path: str, names: tuple[str, ...], axes: str) -> dict[str, str]:
    """Integer attributes of a module, as `attrs` of a coupling."""
    module = model.get_submodule(path)
    return {f"{_starred(path)}.{name}": axes for name in names if isinstance(getattr(module, name, None), int)}


def _starred(path: str) -> str:
    """A name with `*` for its first number, that of the layer."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)
