"""Parameters with several names, such as a head that is tied to an embedding: which name a config means."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from ..errors import SparsityError
from .names import named_tensors, owner_of, parameter_of


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in named_tensors(model):
        found.setdefault(id(parameter), []).append(name)
    return found


def tied_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """{tensor_fqn: why} of those names whose parameter has other names too."""
    parameters, shared = dict(named_tensors(model)), _names_of_parameters(model)
    own = {n: [o for o in shared[id(parameters[n])] if o != n] for n in names if n in parameters}
    return {n: f"tied to {', '.join(map(repr, others))}" for n, others in own.items() if others}


def names_to_skip(
    model: nn.Module, owners: Mapping[str, tuple[int, bool]], excluded: Mapping[str, str]
) -> dict[str, str]:
    """{tensor_fqn: why} of names whose parameter is left out, or named more precisely, under another one."""
    found: dict[str, str] = {}
    for names in _names_of_parameters(model).values():
        own = [name for name in names if name in owners]
        out = next((name for name in names if name in excluded), None)
        if len(names) < 2 or not own:
            continue
        first = next((name for name in own if owners[name][1]), own[0])
        for name in own:
            if out is not None and name != out:
                found[name] = f"tied to {out!r}, {excluded[out]}"
            elif out is None and name != first:
                found[name] = f"tied to {first!r}, which has the mask of both"
    return found


def refuse_tied(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> None:
    """Raise where a parameter has several names, under all of which its mask is registered, and one is parametrized."""
    names = _names_of_parameters(model)
    for g in groups:
        held = names.get(id(parameter_of(g["module"], g["tensor_name"])), [])
        owners = [owner_of(model, name) for name in held]
        if len(held) > 1 and any(parametrize.is_parametrized(*own) for own in owners):
            raise SparsityError(
                f"{g['tensor_fqn']!r} is one parameter under several names ({', '.join(held)}), and some of them are "
                "parametrized otherwise. Untie it, or leave it out (exclude=[...])."
            )
