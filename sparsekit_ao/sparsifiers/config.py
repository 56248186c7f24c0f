"""Checks config dicts and completes them to one group dict for each tensor that is sparsified.

It checks names, module classes, keys and whether tensors can be masked; `stages` and `structure` check values.
"""

import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..calibration.adapters import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, packed_experts
from ..errors import SparsityError, by_reason, did_you_mean
from ..masking import find_mask, refuse_uninvertible
from ..models.names import (
    Exclusion,
    adapters,
    computed_names,
    describe,
    excluded_names,
    exists,
    hint_of,
    is_of_transformers,
    matcher,
    named_tensors,
    owner_of,
    parameter_of,
    sharing_memory,
)
from ..structure.view import refuse_expanded

TensorGroup = dict[str, Any]
Classes = tuple[type[nn.Module], ...]
_WHERE_KEYS = ("tensor_fqn", "module", "module_fqn", "tensor_name")
_OF_OTHERS = {  # keys of other sparsifiers
    **dict.fromkeys(("score", "member_scores", "stages", "max_sparsity"), "ScopeSparsifier"),
    **dict.fromkeys(("zeros_per_block", "nearliness"), "another sparsifier"),
    "strength": "ProximalSparsifier",
}
_SHARED = (
    ", so zeros in one would change the other. Make both one Parameter, give one a copy (.clone()), or leave the "
    "tensor out (exclude=[...])."
)
_OF_A_METHOD = (
    "has a name that is an attribute of nn.ModuleDict, where torch keeps parametrizations",
    "; give the parameter another name, or leave it out (exclude=[...])",
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ConfigContext(NamedTuple):
    """The tensor that a config entry is completed for, and the first words of errors about the entry."""

    module: nn.Module
    tensor_name: str
    tensor_fqn: str
    tensor: Tensor
    where: str


Complete = Callable[[dict[str, Any], ConfigContext], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The groups of one model that a config names."""

    groups: list[TensorGroup] = field(default_factory=list)  # a complete one for each tensor
    entries: dict[str, str] = field(default_factory=dict)  # {tensor_fqn: the config entry that it follows, as text}
    skipped: dict[str, str] = field(default_factory=dict)  # {tensor_fqn: why it was left out, though an entry names it}


def make_config(model: nn.Module, classes: Iterable[type[nn.Module]] = ()) -> list[TensorGroup]:
    """Return an entry for each matrix that config=None takes, or for the weight of each module of `classes`."""
    classes, modules = tuple(classes), model.named_modules()
    of_modules = ((n, ["weight"] if isinstance(m, classes) else [] if classes else _matrices_of(m)) for n, m in modules)
    return [{"tensor_fqn": f"{name}.{t}".removeprefix(".")} for name, tensors in of_modules for t in tensors]


def _matrices_of(module: nn.Module) -> list[str]:
    """Return the names of the weights of a module that config=None takes."""
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return [n for n, _ in named_tensors(module) if re.fullmatch(r"(in|q|k|v)_proj_weight|weight_\w+", n)]
    if isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)) or is_of_transformers(module, "Conv1D"):
        return ["weight"]
    return packed_experts(module)


def _left_dense(model: nn.Module) -> dict[str, str]:
    """Return {tensor_fqn: reason} for weights that config=None leaves dense: routers and output embeddings."""
    modules = dict(model.named_modules())
    getters = [getattr(module, "get_output_embeddings", None) for module in modules.values()]
    heads = [get_head() for get_head in getters if callable(get_head)]
    reasons = {f"{n}.weight": "the output embedding" for n, m in modules.items() if any(m is head for head in heads)}
    for prefix, module in modules.items():
        path, _, name = prefix.rpartition(".")
        packed, is_list = packed_experts(module), isinstance(module, nn.ModuleList) and "experts" in name
        count = len(parameter_of(module, packed[0])) if packed else len(module) if is_list else 0
        # In the module around the experts, a router has a row for each expert, the gate of a shared expert has one row.
        for beside, tensor in named_tensors(modules[path]) if count > 1 else ():
            fqn = f"{path}.{beside}".removeprefix(".")
            if tensor.ndim == 2 and len(tensor) == 1 and re.fullmatch(r"\w*shared\w*gate\.weight", beside):
                reasons[fqn] = "the gate of a shared expert"
            elif tensor.ndim == 2 and len(tensor) == count and "expert" not in beside:
                reasons[fqn] = "a router, whose outputs choose experts"
    return reasons


def _refuse_empty(config: object) -> None:
    """Raise unless a config is a list that is not empty."""
    if isinstance(config, (str, Mapping)) or not isinstance(config, Sequence):
        raise SparsityError(
            f"config must be a list of dicts or None, got {type(config).__name__}; give one such as "
            "[{'tensor_fqn': 'fc.weight'}]"
        )
    if not config:
        raise SparsityError("config is empty, so nothing would be sparsified; pass None for every Linear and conv")


def resolve_groups(
    model: nn.Module,
    config: Sequence[Mapping[str, Any]],
    keys: Collection[str],  # that an entry may have besides those that name its tensors
    complete: Complete,  # adds defaults to the keys of an entry for one tensor
    *,
    exclude: Sequence[Exclusion] = (),
    is_default: bool = False,  # the config was made from the model; tied parameters, adapters and so on are left out
    check: Callable[[TensorGroup], None] | None = None,  # where it raises, skip the tensor, if its entry fits another
    is_registered: bool = False,  # whether masks will be registered as parametrizations
) -> ResolvedConfig:
    """Return a complete group for each tensor that the config names, in its order; see `MaskSparsifier.prepare`."""
    _refuse_empty(config)
    names = dict(named_tensors(model))
    names_of: dict[int, list[str]] = {}  # {id of a parameter: all its names}
    for name, parameter in names.items():
        names_of.setdefault(id(parameter), []).append(name)
    listed = [fqn for entry in config if is_default and isinstance(fqn := entry.get("tensor_fqn"), str)]
    missing = [n for n in dict.fromkeys([*computed_names(model), *listed]) if n not in names and not exists(model, n)]
    excluded = excluded_names(model, exclude, [*names, *missing]) if exclude != () else {}
    owners, labels = _owners(model, config, keys, [*names, *missing])
    sharing, taken = sharing_memory(model), {*dir(nn.ModuleDict())} if is_registered else set()
    unmaskable = {  # {tensor_fqn: (why, what follows or helps)}
        **{n: (f"is no parameter.{hint_of(model, n, names)}", "") for n in owners if n in missing},
        **{n: _OF_A_METHOD for tied in names_of.values() if taken & {n.rpartition(".")[2] for n in tied} for n in tied},
        **{n: (f"shares memory with {sharing[id(p)]!r}", _SHARED) for n, p in names.items() if id(p) in sharing},
    }
    skipped = {
        **(_left_dense(model) | adapters(model, owners) if is_default else {}),
        **_tied_to_skip(names_of.values(), owners, excluded, is_default),
        **{fqn: unmaskable[fqn][0] for fqn in owners if fqn in unmaskable and is_default},
        **{fqn: excluded[fqn] for fqn in owners if fqn in excluded},
    }
    resolved = ResolvedConfig(skipped=skipped)
    unfit: dict[int, SparsityError | None] = {}  # the first error of each entry, or None where it fits some tensor
    for fqn, (at, is_exact) in owners.items():
        if fqn not in skipped:
            try:
                if fqn in unmaskable:
                    raise SparsityError(f"config[{at}]: {fqn!r} {''.join(unmaskable[fqn])}")
                group = _group(model, fqn, config[at], complete, f"config[{at}]: ")
                if check is not None:
                    check(group)
            except SparsityError as e:
                if check is None:
                    raise
                skipped[fqn] = str(e).removeprefix(f"config[{at}]: ").removeprefix(f"{fqn}: ")
                unfit.setdefault(at, e)
                continue
            unfit[at] = None
            resolved.groups.append(group)
            resolved.entries[fqn] = "config=None" if is_default else labels[at]
        elif is_exact and not is_default:
            raise SparsityError(f"config[{at}]: {fqn!r} is named here, but it is {skipped[fqn]}; remove one of the two")
    for error in () if is_default else filter(None, unfit.values()):  # an entry that fits no tensor is a mistake
        raise error
    if not resolved.groups:
        reasons = "; ".join(f"{names}: {why.rstrip('.')}" for names, why in by_reason(skipped))
        what = "config=None finds" if is_default else "config names"
        remedy = "Name tensors, and set their keys, in a config of a sparsifier."
        raise SparsityError(f"every tensor that {what} is left out: {reasons}. {remedy}")
    _refuse_shared(resolved.groups, model, {} if is_default else names_of)
    return resolved


def copied(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples; other objects in them (such as a score) are not copied."""
    if value is None or type(value) in (str, int, float, bool):  # the common case; isinstance(..., Mapping) is slower
        return value
    # NumPy values and tensors of one element become Python values, for `torch.load(weights_only=True)`.
    if isinstance(value, (np.generic, np.ndarray)) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value.item()
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Mapping):
        return dict(zip(value, map(copied, value.values()), strict=True))
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(copied, value))
    return value


def _owners(
    model: nn.Module, config: Sequence[Mapping[str, Any]], keys: Collection[str], names: Collection[str]
) -> tuple[dict[str, tuple[int, bool]], list[str]]:
    """Return {tensor_fqn: (index of its entry, whether the entry names it exactly)} and a label for each entry."""
    owners: dict[str, tuple[int, bool]] = {}
    labels = []
    for at, entry in enumerate(config):
        where = f"config[{at}]: "
        patterns, classes = _checked_entry(model, entry, keys, where)
        labels.append(f"config[{at}] ({', '.join(map(repr, patterns)) or describe(classes)})")
        tensor = entry.get("tensor_name", "weight")
        for fqn, is_exact in _matches(model, patterns, classes, tensor, names, where).items():
            owner = owners.get(fqn)
            if owner is not None and owner[1] and is_exact:
                raise SparsityError(f"{where}{fqn!r} is already named by {labels[owner[0]]}; name each tensor once")
            if owner is None or is_exact or not owner[1]:
                owners.pop(fqn, None)  # tensors follow the order of their entries
                owners[fqn] = (at, is_exact)
    used = {at for at, _ in owners.values()}
    if unused := [label for at, label in enumerate(labels) if at not in used]:
        raise SparsityError(f"{unused[0]} has no effect, because other entries name all of its tensors; remove it")
    return owners, labels


def _checked_entry(model: nn.Module, entry: object, keys: Collection[str], where: str) -> tuple[list[str], Classes]:
    """Check the keys of an entry, and return the names and the module classes that it gives."""
    if not isinstance(entry, Mapping):
        raise SparsityError(
            f"{where}an entry must be a dict such as {{'tensor_fqn': 'fc.weight'}}, got {type(entry).__name__}"
        )
    for key in entry:
        if key not in keys and key not in _WHERE_KEYS:
            hint = hint_of_key(str(key), (*keys, *_WHERE_KEYS))
            raise SparsityError(f"{where}unknown key {key!r}.{hint} Known keys: {', '.join(sorted(keys))}.")
    module, fqn = entry.get("module"), entry.get("tensor_fqn")
    classes: Classes = ()
    if module is not None and not isinstance(module, nn.Module):
        classes = tuple(module) if isinstance(module, (list, tuple)) else (module,)
        if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise SparsityError(f"{where}'module' must be a module class or a list of them, got {module!r}")
    patterns = [fqn] if isinstance(fqn, str) else fqn
    if fqn is None and isinstance(module, nn.Module):  # a module stands for its name in the model
        name = next((name for name, m in model.named_modules() if m is module), None)
        if name is None:
            raise SparsityError(f"{where}'module', a {type(module).__name__}, is not a module of the model")
        patterns = [f"{name}.{entry.get('tensor_name', 'weight')}".removeprefix(".")]
    listed = patterns if isinstance(patterns, (list, tuple)) else ()
    is_named = bool(listed) and all(isinstance(text, str) and text for text in listed)
    if not is_named and (fqn is not None or not classes):
        raise SparsityError(
            f"{where}'tensor_fqn' (a name, a glob, 're:...' or a list of them) or 'module' (a module class) is "
            f"required, got {fqn!r}"
        )
    named: list[str] = list(patterns or ())
    if len(set(named)) < len(named):
        raise SparsityError(f"{where}'tensor_fqn' has {max(named, key=named.count)!r} twice; name each tensor once")
    return named, classes


def hint_of_key(key: str, keys: Collection[str]) -> str:
    """Return a sentence for an error that says what an unknown key may have meant."""
    if key in _OF_OTHERS:
        return f" {_OF_OTHERS[key]} takes it, this sparsifier does not."
    if key == "exclude":
        return " It is an argument of prepare: prepare(model, config, exclude=[...])."
    return did_you_mean(key, keys)


def _matches(
    model: nn.Module, patterns: Sequence[str], classes: Classes, tensor: str, names: Collection[str], where: str
) -> dict[str, bool]:
    """Return {tensor_fqn: whether it is named exactly} for the tensors that an entry names."""
    modules = dict(model.named_modules(remove_duplicate=not patterns)) if classes else {}

    def is_of_classes(name: str) -> bool:
        return not classes or isinstance(modules.get(name.rpartition(".")[0]), classes)

    of_classes = list(filter(is_of_classes, names)) if classes else names
    matched = {} if patterns else {n: False for n in of_classes if n.rpartition(".")[2] == tensor}
    for pattern in patterns:
        exact = pattern.removeprefix(".")
        if exact in names or exists(model, exact):
            if not is_of_classes(exact):
                raise SparsityError(f"{where}{exact!r} does not belong to a module of class {describe(classes)}")
            matched[exact] = True
            continue
        is_match = matcher(pattern, f"{where}'tensor_fqn' ")
        if not any(map(is_match, names)):
            raise SparsityError(
                f"{where}'tensor_fqn' {pattern!r} matches no parameter of the model.{hint_of(model, exact, names)}"
            )
        matching = [n for n in of_classes if is_match(n)]
        if classes:  # whose weights are meant, unless the glob matches other tensors only
            matching = [n for n in matching if n.rpartition(".")[2] == tensor] or matching
        matched = {**dict.fromkeys(matching, False), **matched}
    if not matched:
        raise SparsityError(f"{where}the model has no module of class {describe(classes)} with a tensor {tensor!r}")
    return matched


def _group(model: nn.Module, fqn: str, entry: Mapping[str, Any], complete: Complete, where: str) -> TensorGroup:
    """Return the complete group of one tensor, or raise an error if the tensor cannot be masked."""
    prefix, _, name = fqn.rpartition(".")
    module = model.get_submodule(prefix)
    place = {"module": module, "module_fqn": prefix, "tensor_name": name, "tensor_fqn": fqn}
    for key in ("module", "module_fqn", "tensor_name"):
        is_class = key == "module" and isinstance(entry.get(key), (type, list, tuple))
        if key in entry and not is_class and entry[key] is not place[key] and entry[key] != place[key]:
            raise SparsityError(f"{where}{key!r} and 'tensor_fqn' disagree: {entry[key]!r} and {fqn!r}")
    if isinstance(module, torch.jit.ScriptModule):
        raise SparsityError(
            f"{where}{fqn!r} is in a scripted or traced module, whose weights cannot be masked; prune the model before "
            "torch.jit, or leave the tensor out of the config"
        )
    if find_mask(module, name) is not None:
        raise SparsityError(f"{where}{fqn!r} already has a sparsity mask; squash it before preparing it again")
    tensor = parameter_of(module, name)
    if tensor.layout != torch.strided:
        raise SparsityError(f"{where}{fqn!r} is stored as {tensor.layout}; only dense weights (to_dense) can be masked")
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        raise SparsityError(f"{where}{fqn!r} has no shape yet; run one forward of the lazy module first")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise SparsityError(
            f"{where}{fqn!r} was made in inference mode, so it cannot be masked or trained outside of it; load the "
            "weights into a model made outside of it, or prepare inside torch.inference_mode() if it is not trained"
        )
    if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise SparsityError(
            f"{where}{fqn!r} belongs to an embedding with sparse=True, whose gradient cannot be masked; construct it "
            "with sparse=False"
        )
    if tensor.dtype not in _FLOATS:
        raise SparsityError(
            f"{where}{fqn!r} is {tensor.dtype}; only float16, bfloat16, float32 and float64 can be sparsified"
        )
    if type(tensor).__module__.startswith("torchao"):
        raise SparsityError(
            f"{where}{fqn!r} is a {type(tensor).__name__}, which torchao has quantized; prune the model before it "
            "is quantized (export.quantize), or leave the tensor out (exclude=[...])"
        )
    refuse_expanded(tuple(tensor.shape), tensor.stride(), f"{where}{fqn!r}: ")
    if parametrize.is_parametrized(module, name):
        refuse_uninvertible(module, name, f"{where}{fqn!r}: ")
    keys = copied({k: v for k, v in entry.items() if k not in _WHERE_KEYS})
    return {**complete(keys, ConfigContext(module, name, fqn, tensor, where)), **place}


def _refuse_shared(groups: Sequence[TensorGroup], model: nn.Module, names_of: Mapping[int, list[str]]) -> None:
    """Raise an error if two groups are one tensor, or if a parameter of several names is parametrized under one."""
    seen: dict[tuple[int, str], str] = {}
    for g in groups:
        other = seen.setdefault((id(g["module"]), g["tensor_name"]), g["tensor_fqn"])
        if other != g["tensor_fqn"]:
            raise SparsityError(f"{other!r} and {g['tensor_fqn']!r} are one tensor of one module; name it once")
        shared = names_of.get(id(parameter_of(g["module"], g["tensor_name"])), [])
        if len(shared) > 1 and any(parametrize.is_parametrized(*owner_of(model, name)) for name in shared):
            raise SparsityError(
                f"{g['tensor_fqn']!r} is one parameter under several names ({', '.join(shared)}), and some of them are "
                "parametrized otherwise. Untie it, or leave it out (exclude=[...])."
            )


def _tied_to_skip(
    names_of: Iterable[list[str]], owners: Mapping[str, tuple[int, bool]], excluded: Mapping[str, str], is_default: bool
) -> dict[str, str]:
    """Return {tensor_fqn: reason} for names that are left out because their parameter has other names too."""
    skipped: dict[str, str] = {}
    for names in names_of:
        in_config = [name for name in names if name in owners] if len(names) > 1 else []
        if not in_config:
            continue
        out = next((name for name in names if name in excluded), None)
        first = next((name for name in in_config if owners[name][1]), in_config[0])
        for name in in_config:
            if is_default:
                skipped[name] = f"tied to {', '.join(repr(other) for other in names if other != name)}"
            elif out is not None and name != out:
                skipped[name] = f"tied to {out!r}, {excluded[out]}"
            elif out is None and name != first:
                skipped[name] = f"tied to {first!r}, which has the mask of both"
    return skipped
