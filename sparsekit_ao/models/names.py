"""Names of a model's tensors: listing, looking up and excluding them, by globs and regular expressions too."""

import difflib
import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..distributed import local
from ..errors import SparsityError, folded
from ..masking import parameters_under, parametrized_names

T = TypeVar("T")
Exclusion = str | type[nn.Module] | nn.Module  # an entry of `exclude`
_WRAPPED = "_checkpoint_wrapped_module"  # as torch names it
_SHOWN = 5  # names in an error
_QUANTIZED = (torch.int8, torch.uint8)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by its name without parametrizations (`fc.weight`), parametrized ones included."""
    for prefix, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) or ".parametrizations." in f".{prefix}.":
            continue
        dotted = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dotted + name, parameter
        for name in parametrized_names(module):
            yield dotted + name, parameter_of(module, name)


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """The (first) parameter behind a tensor name."""
    if parametrize.is_parametrized(module, name):
        return parameters_under(module, name)[0]
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def sharing_memory(model: nn.Module) -> dict[int, str]:
    """{id of a parameter or buffer: the name of another one that has some of its elements}.

    >>> layers = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
    >>> layers[1].weight = nn.Parameter(layers[0].weight.data.t())
    >>> sharing_memory(layers)[id(layers[0].weight)]
    '1.weight'
    """
    spans: list[Any] = []  # (where memory is, first byte, byte after the last, name, tensor)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
            continue
        part = local(tensor)
        if part.numel() and not is_traceable_wrapper_subclass(part):  # whose storage is not where its values are
            memory, size = part.untyped_storage(), part.element_size()
            address = 0 if part.is_meta else memory.data_ptr()
            place, start = (str(part.device), 0 if address else memory._cdata), address + part.storage_offset() * size
            end = start + size * (1 + sum((n - 1) * d for n, d in zip(part.shape, part.stride(), strict=True)))
            spans.append((place, start, end, name, tensor))
    spans.sort(key=lambda span: span[:3])
    sharing: dict[int, str] = {}
    first = 0
    while first < len(spans):  # first:last are tensors whose spans are connected
        place, start, end, *_ = spans[first]
        last = first + 1
        while last < len(spans) and spans[last][0] == place and spans[last][1] < end:
            end, last = max(end, spans[last][2]), last + 1
        if last > first + 1:
            sharing |= _sharing([(at - start, name, t) for _, at, _, name, t in spans[first:last]], end - start)
        first = last
    return sharing


def _sharing(tensors: list[tuple[int, str, Tensor]], length: int) -> dict[int, str]:
    """`sharing_memory` for (first byte, name, tensor) in one piece of memory of this many bytes."""
    unit = min(t.element_size() for _, _, t in tensors)
    owners, sharing = torch.full((length // unit,), -1, dtype=torch.int32, device="cpu"), dict[int, str]()
    for at, (start, name, tensor) in enumerate(tensors):
        part, ratio = local(tensor), tensor.element_size() // unit
        dims = [(n, d * ratio) for n, d in zip(part.shape, part.stride(), strict=True) if d]  # not expanded ones
        own = owners.as_strided([*(n for n, _ in dims), ratio], [*(d for _, d in dims), 1], start // unit)
        for other in own.unique().tolist():
            if other >= 0:
                sharing |= {id(tensor): tensors[other][1], id(tensors[other][2]): name}
        own.fill_(at)
    return sharing


def weights_by_name(model: nn.Module) -> dict[str, int]:
    """{name: elements} of the weights that layers multiply by: of two or more dimensions, no embeddings, no biases."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("weight"))
    return {
        name: p.numel()
        for name, p in itertools.chain(named_tensors(model), buffers)
        if p.ndim > 1 and id(p) not in embeddings and not name.endswith("bias")  # of experts
        # complex and quantized weights count, also where a buffer `weight` has them; other integers are indices
        if p.dtype.is_floating_point or p.dtype.is_complex or name.endswith("weight") or p.dtype in _QUANTIZED
    }


def by_pattern(names: Iterable[str]) -> list[str]:
    """Names with `*` in place of numbers, each once and with its count where there are several.

    >>> by_pattern(["layers.0.gate", "layers.1.gate", "head"])
    ['layers.*.gate (2)', 'head']
    """
    return [name for (name,) in folded([(name,) for name in names], 1)]


def owner_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name in it."""
    prefix, _, name = fqn.rpartition(".")
    return model.get_submodule(prefix), name


def plain_name(name: str) -> str:
    """A name of `named_modules` as state dicts have it: without torch's checkpoint wrappers.

    >>> plain_name("layers.0._checkpoint_wrapped_module.fc")
    'layers.0.fc'
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def uncompiled_name(name: str) -> str:
    """A name as it is without wrappers of `torch.compile`."""
    return name.replace("_orig_mod.", "")


def module_in_copy(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a copy that has this name in the original, or raise an AttributeError."""
    # `copy.deepcopy` leaves out checkpoint wrappers of masked layers
    if plain_name(name) != name and not any(n.endswith(_WRAPPED) for n, _ in model.named_modules()):
        name = plain_name(name)
    return model.get_submodule(name)


def exists(model: nn.Module, fqn: str) -> bool:
    """Whether there is a tensor of this name, be it a second name that `named_modules` does not list."""
    try:
        module, name = owner_of(model, fqn)
    except AttributeError:
        return False
    return isinstance(dict(module._parameters.items()).get(name), Tensor) or parametrize.is_parametrized(module, name)


def computed_names(model: nn.Module) -> list[str]:
    """Names of plain attributes that hooks compute from parameters before a forward, as old spectral_norm does."""
    hooked = ((prefix, module) for prefix, module in model.named_modules() if module._forward_pre_hooks)
    attributes = ((f"{prefix}.{name}", value) for prefix, module in hooked for name, value in vars(module).items())
    return [name.lstrip(".") for name, value in attributes if isinstance(value, Tensor)]


def hint_of(model: nn.Module, fqn: str, names: Collection[str]) -> str:
    """What may have been meant by a name that no tensor has, as a sentence for an error."""
    module, _, tensor = fqn.rpartition(".")
    if f"{fqn}.weight" in names:
        return f" It is a module; did you mean '{fqn}.weight'?"
    owner = dict(model.named_modules(remove_duplicate=False)).get(module)
    is_plain = owner is not None and isinstance(vars(owner).get(tensor), Tensor)
    hooks = [*owner._forward_pre_hooks.values()] if owner is not None and is_plain else []
    if any(isinstance(hook, SpectralNorm) for hook in hooks):
        return (
            f" torch.nn.utils.spectral_norm computes it. Call torch.nn.utils.remove_spectral_norm(model.get_submodule"
            f"({module!r}), {tensor!r}) first, or leave it out (exclude=[{fqn!r}])."
        )
    if f"{fqn}_g" in names and f"{fqn}_v" in names:
        return f" {fqn!r} is computed by torch.nn.utils.weight_norm; use torch.nn.utils.parametrizations.weight_norm."
    if hooks and f"{fqn}_orig" in names:
        return (
            f" {fqn!r} is masked by torch.nn.utils.prune; make that permanent first, by "
            f"torch.nn.utils.prune.remove(model.{module}, {tensor!r})."
        )
    if hooks:
        return f" A hook computes it; make it a parameter and remove the hook, or leave it out (exclude=[{fqn!r}])."
    if fqn in dict(model.named_buffers()):
        return " It is a buffer; only parameters can be sparsified."
    close = difflib.get_close_matches(fqn, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    shown = ", ".join(list(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f" Its parameters are {shown}." if names else " It has no parameters."


def matcher(rule: str, where: str) -> Callable[[str], bool]:
    """Whether a whole name matches a rule: a name, a glob in which `*` crosses dots, or `re:` and an expression.

    >>> [name for name in ("a.b.weight", "a.bias") if matcher("a.*.weight", "")(name)]
    ['a.b.weight']
    """
    try:
        pattern = re.compile(rule[3:] if rule.startswith("re:") else fnmatch.translate(rule.removeprefix(".")))
    except (re.error, OverflowError, RecursionError) as e:
        raise SparsityError(f"{where}{rule!r} is not a regular expression: {e}") from None
    return lambda name: pattern.fullmatch(name) is not None


def names_in_place_of_modules(model: nn.Module, exclude: Sequence[Exclusion]) -> tuple[Exclusion, ...]:
    """Return `exclude` with the names of modules in place of modules, so that it also holds for a copy of the model."""
    if isinstance(exclude, str) or not isinstance(exclude, Sequence):
        raise SparsityError(f"exclude must be a list of names, globs, modules and module classes, got {exclude!r}")
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    return tuple(names.get(entry) or entry if isinstance(entry, nn.Module) else entry for entry in exclude)


def excluded_names(
    model: nn.Module, exclude: Sequence[Exclusion], names: Collection[str], kinds: Collection[str] = ()
) -> dict[str, str]:
    """Return {tensor_fqn or kind: reason} of what is excluded. A module is excluded with everything inside it."""
    exclude = names_in_place_of_modules(model, exclude)
    reasons: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False)) if exclude else {}
    paths: dict[int, list[str]] = {}
    for name, module in modules.items():
        paths.setdefault(id(module), []).append(name)
    around = {n: _around(n, paths[id(modules[n.rpartition(".")[0]])]) for n in names} if exclude else {}
    for at, excluded in enumerate(exclude):
        where = f"exclude[{at}]"
        if isinstance(excluded, nn.Module):  # the model itself, or a module of another one
            left_out = [*names] if excluded is model else []
            if not left_out:
                raise SparsityError(f"{where}, a {type(excluded).__name__}, is not in the model, or has no parameters")
        elif isinstance(excluded, type) and issubclass(excluded, nn.Module):
            left_out = [n for n in names if any(isinstance(modules.get(name), excluded) for name in ("", *around[n]))]
        elif isinstance(excluded, str) and excluded:
            is_name = any(excluded in names for names in around.values())  # keys of a ModuleDict may have "*" and "[0]"
            is_match = excluded.__eq__ if is_name else matcher(excluded, f"{where} ")
            left_out = [n for n in names if any(map(is_match, around[n]))] + [n for n in kinds if n == excluded]
            if not left_out:
                raise SparsityError(f"{where} {excluded!r} matches no parameter or module of the model")
        else:
            raise SparsityError(
                f"{where} must be a name, a glob, 're:...', a module or a module class, got {excluded!r}"
            )
        reasons |= dict.fromkeys(left_out, f"left out by {where} ({describe((excluded,))})")
    return reasons


def _around(fqn: str, paths: Iterable[str]) -> list[str]:
    """Return the names of a tensor and of the modules that contain it; `paths` are the names of its module."""
    names = []
    for path in paths:
        parts = f"{path}.{fqn.rpartition('.')[2]}".removeprefix(".").split(".")
        names += [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return names


def describe(exclusions: Iterable[Exclusion]) -> str:
    """Return names, modules and module classes as text."""
    return ", ".join(repr(r) if isinstance(r, str) else getattr(r, "__name__", type(r).__name__) for r in exclusions)


def adapters(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """{tensor_fqn: why} of those names that belong to adapters, which peft's layers list in `adapter_layer_names`."""
    listed = ((prefix, getattr(module, "adapter_layer_names", ())) for prefix, module in model.named_modules())
    inside = tuple(f"{prefix}.{attribute}.".lstrip(".") for prefix, attributes in listed for attribute in attributes)
    return {name: "part of an adapter" for name in names if name.startswith(inside)}


def is_of_transformers(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class of transformers with this name, or derived from it; without importing it."""
    return any(c.__name__ == name and c.__module__.startswith("transformers") for c in type(module).__mro__)


def connected(names_of: Mapping[T, Iterable[Hashable]]) -> list[list[T]]:
    """Divide items into lists: in one list those that have a name in common, also by way of others.

    >>> connected({"a": [1], "b": [2], "c": [1, 3], "d": [3]})
    [['a', 'c', 'd'], ['b']]
    """
    parents: dict[Hashable, Hashable] = {}

    def root(name: Hashable) -> Hashable:
        while parents.setdefault(name, name) != name:
            parents[name] = name = parents[parents[name]]
        return name

    for names in names_of.values():
        first, *others = map(root, names) if names else (object(),)
        parents.update(dict.fromkeys(others, first))
    lists: dict[Hashable, list[T]] = {}
    for item, names in names_of.items():
        lists.setdefault(next((root(name) for name in names), object()), []).append(item)
    return list(lists.values())
