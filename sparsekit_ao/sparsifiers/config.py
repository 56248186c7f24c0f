"""Config dicts as torch.ao takes them, checked and completed: one group dict for each tensor that is sparsified.

Knows names, keys and defaults. What the values mean for shapes and budgets is `plan`'s business.
"""

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SparsityError
from ..masking import find_mask

__all__ = ["TensorGroup", "copied", "make_config", "named_tensors", "resolve_groups"]

TensorGroup = dict[str, Any]
_WHERE_KEYS = ("tensor_fqn", "module", "module_fqn", "tensor_name")
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def make_config(model: nn.Module, kinds: Iterable[type[nn.Module]] = ()) -> list[TensorGroup]:
    """One entry for the weight of every Linear (subclasses too) and convolution, in model order.

    Args:
        model: looked through.
        kinds: module classes to take instead.

    >>> make_config(torch.nn.Sequential(torch.nn.Conv1d(1, 1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1)))
    [{'tensor_fqn': '0.weight'}, {'tensor_fqn': '2.weight'}]
    """
    layers = tuple(kinds) or (nn.Linear, *_CONVS)
    return [{"tensor_fqn": _join(name, "weight")} for name, m in model.named_modules() if isinstance(m, layers)]


def resolve_groups(
    model: nn.Module,
    config: Sequence[Mapping[str, Any]] | None,
    keys: Collection[str],
    complete: Callable[[dict[str, Any], str], dict[str, Any]],
) -> list[TensorGroup]:
    """One complete group for each tensor that the config names, in the config's order.

    Args:
        model: where the names are looked up.
        config: entries with `tensor_fqn` (an exact name, a glob in which `*` crosses dots, or `re:` and a regular
            expression for the whole name) and any of `keys`; None is `make_config(model)`.
        keys: what an entry may say besides naming its tensor.
        complete: adds defaults to what an entry says; its second argument opens error messages.

    Raises:
        SparsityError: whatever does not fit; nothing is changed.
    """
    if config is None:
        config = make_config(model)
        if not config:
            raise SparsityError("config=None found no Linear or convolution in the model; name tensors in a config")
    if isinstance(config, (str, Mapping)) or not isinstance(config, Sequence):
        raise SparsityError(f"config must be a list of dicts or None, got {type(config).__name__}")
    if not config:
        raise SparsityError("config is empty, so nothing would be sparsified; pass None for every Linear and conv")
    names = dict(named_tensors(model))
    groups: list[TensorGroup] = []
    owner: dict[str, str] = {}
    for at, entry in enumerate(config):
        where = f"config[{at}]: "
        rule = _checked_entry(entry, keys, where)
        for fqn in _matches(model, rule, names, where):
            if fqn in owner:
                raise SparsityError(f"{where}{fqn!r} is already named by {owner[fqn]}; name each tensor once")
            owner[fqn] = f"config[{at}] ({rule!r})"
            groups.append(_group(model, fqn, entry, complete, where))
    _refuse_tied(groups, model)
    return groups


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by the name users know it by, parametrized ones included."""
    for prefix, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) or ".parametrizations." in f".{prefix}.":
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _join(prefix, name), parameter
        if parametrize.is_parametrized(module):
            for name in module.parametrizations:
                yield _join(prefix, name), _parameter(module, name)


def copied(value: Any) -> Any:
    """A copy of the dicts, lists and tuples; what they hold (a callable with a state of its own, say) is the same."""
    if value is None or isinstance(value, (str, int, float)):  # most are; asking for a Mapping first takes longer
        return value
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return value


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _parameter(module: nn.Module, name: str) -> Tensor:
    """The (first) parameter behind a tensor name."""
    if not parametrize.is_parametrized(module, name):
        found = module._parameters[name]
        assert found is not None
        return found
    chain = module.parametrizations[name]  # type: ignore[index]
    assert isinstance(chain, parametrize.ParametrizationList)
    first = chain.original if chain.is_tensor else chain.original0
    assert isinstance(first, Tensor)
    return first


def _checked_entry(entry: object, keys: Collection[str], where: str) -> str:
    """The entry's name rule, once its keys are known to be right."""
    if not isinstance(entry, Mapping):
        raise SparsityError(
            f"{where}an entry must be a dict such as {{'tensor_fqn': 'fc.weight'}}, got {type(entry).__name__}"
        )
    for key in entry:
        if key not in keys and key not in _WHERE_KEYS:
            close = difflib.get_close_matches(str(key), [*keys, *_WHERE_KEYS], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SparsityError(f"{where}unknown key {key!r}.{hint} Known keys: {', '.join(sorted(keys))}.")
    rule = entry.get("tensor_fqn")
    if not isinstance(rule, str) or not rule:
        raise SparsityError(f"{where}'tensor_fqn' (a name, a glob or 're:...') is required, got {rule!r}")
    return rule


def _matches(model: nn.Module, rule: str, names: Collection[str], where: str) -> list[str]:
    exact = rule.removeprefix(".")
    if exact in names or _reachable(model, exact):
        return [exact]
    try:
        pattern = re.compile(rule[3:] if rule.startswith("re:") else fnmatch.translate(rule))
    except re.error as e:
        raise SparsityError(f"{where}'tensor_fqn' {rule!r} is not a regular expression: {e}") from None
    found = [name for name in names if pattern.fullmatch(name)]
    if not found:
        close = difflib.get_close_matches(exact, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" The model has {len(names)} named tensors."
        raise SparsityError(f"{where}'tensor_fqn' {rule!r} matches no parameter of the model.{hint}")
    return found


def _reachable(model: nn.Module, fqn: str) -> bool:
    """Whether an exact name that `named_modules` lists under another alias exists all the same."""
    prefix, _, name = fqn.rpartition(".")
    try:
        module = model.get_submodule(prefix)
    except AttributeError:
        return False
    return isinstance(module._parameters.get(name), Tensor) or parametrize.is_parametrized(module, name)


def _group(
    model: nn.Module,
    fqn: str,
    entry: Mapping[str, Any],
    complete: Callable[[dict[str, Any], str], dict[str, Any]],
    where: str,
) -> TensorGroup:
    prefix, _, name = fqn.rpartition(".")
    module = model.get_submodule(prefix)
    found = {"module": module, "module_fqn": prefix, "tensor_name": name, "tensor_fqn": fqn}
    for key in ("module", "module_fqn", "tensor_name"):
        if key in entry and entry[key] is not found[key] and entry[key] != found[key]:
            raise SparsityError(f"{where}{key!r} and 'tensor_fqn' disagree: {entry[key]!r} and {fqn!r}")
    if find_mask(module, name) is not None:
        raise SparsityError(f"{where}{fqn!r} already has a sparsity mask; squash it before preparing it again")
    tensor = _parameter(module, name)
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        raise SparsityError(f"{where}{fqn!r} has no shape yet; run one forward of the lazy module first")
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise SparsityError(
            f"{where}{fqn!r} is {tensor.dtype}; only float16, bfloat16, float32 and float64 can be sparsified"
        )
    own = copied({k: v for k, v in entry.items() if k not in _WHERE_KEYS})
    return {**complete(own, where), **found}


def _refuse_tied(groups: Sequence[TensorGroup], model: nn.Module) -> None:
    """A mask sits on one name; a parameter that has a second one would be dense there until squash changes both."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_tensors(model):
        names.setdefault(id(parameter), []).append(name)
    for g in groups:
        held = names.get(id(_parameter(g["module"], g["tensor_name"])), [])
        if len(held) > 1:
            raise SparsityError(
                f"{g['tensor_fqn']!r} is one parameter under several names ({', '.join(held)}), and a mask on one of "
                "them would leave the others dense. Untie it, or leave it out of the config."
            )
