"""Digests of values by which a call is known again, also in another process.

The digests of two values are equal if they have the same parts: tensors and arrays all of their elements, functions
their code and what it reads (constants, defaults, closure, global variables), modules what a deep copy of them keeps,
other objects their class and what pickle would save of them. What an installed package defines counts by its name.
"""

import contextlib
import copy
import copyreg
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..distributed import has_process_group, is_sharded
from ..errors import SparsityError

_PLAIN = (type(None), bool, int, float, complex, str)
_NO_PARTS = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "_abc_impl"}
_NO_PARTS |= {"__slotnames__"}  # pickle adds it to a class
# Attributes in which other libraries keep where a model was loaded from and lies, and caches; they differ by process.
_PASSING = re.compile(
    "_?name_or_path|hf_device_map|_hf_hook|__composable_api_state_key.*|_original_object_hash|.*_hooks_installed"
)
_OF_RANKS = re.compile("((local|global)_)?rank|device(_id)?")  # variables that differ by rank in a process group
_OF_MODULES = {*vars(nn.Module())} - {"_parameters", "_buffers", "_modules"}
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")  # on which autocast can be enabled
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # without their keys, which count all hooks of a process

# {how a call differs, if this setting of the process does: the setting}. Global hooks of modules are not among them.
SETTINGS: dict[str, Callable[[], object]] = {
    "another setting of autocast": lambda: [
        (device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)
    ],
    "another default dtype": torch.get_default_dtype,
    "another setting of deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "another precision of float32": lambda: [  # "none" is "ieee"
        getattr(torch.backends, name).matmul.fp32_precision.replace("none", "ieee") for name in ("cuda", "mkldnn")
    ],
}


def digest_of(value: object, what: str, refuses: bool = False) -> str:
    """Return a digest of a value; a part that cannot be told from others is refused, or counts by its class alone.

    >>> scales = [lambda x, k=k: x * k for k in (1, 1, 2)]
    >>> [digest_of(scale, "scale") == digest_of(scales[0], "scale") for scale in scales]
    [True, True, False]
    """
    return _Digests(what, refuses).of(value).hex()


class _Digests:
    """Digests of nested values. Each object is visited once, and one that contains itself ends there."""

    def __init__(self, what: str, refuses: bool) -> None:
        self._what, self._refuses = what, refuses
        self._known: dict[int, tuple[object, bytes]] = {}  # with the objects, whose ids are not given to others then
        self._above: list[int] = []

    def of(self, value: object) -> bytes:
        if type(value) in _PLAIN:
            return blake2b(f"{type(value)} {value!r}".encode(errors="replace")).digest()
        if isinstance(value, (bytes, memoryview)):
            return blake2b(value).digest()
        if id(value) in self._above:
            return b"%d above" % (len(self._above) - self._above.index(id(value)))
        if id(value) not in self._known:
            self._above.append(id(value))
            digests = [self.of(part) for part in self._parts(value)]
            kind = Tensor if isinstance(value, Tensor) else type(value)
            name = f"{kind.__module__}.{kind.__qualname__}" if not _is_own(kind.__module__) else kind.__qualname__
            digests = sorted(digests) if isinstance(value, (set, frozenset)) else digests
            self._known[id(value)] = value, blake2b(b"".join([name.encode(), *digests])).digest()
            self._above.pop()
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, np.ndarray):
            return str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()
        if isinstance(value, (types.FunctionType, types.CodeType)):
            return _of_function(value)
        if isinstance(value, type):
            return [part for kind in value.__mro__ for part in _of_class(kind)]
        if isinstance(value, types.ModuleType):
            return (value.__name__,)
        if isinstance(value, types.MethodType):
            return value.__func__, value.__self__
        if isinstance(value, property):
            return value.fget, value.fset
        if isinstance(value, torch.device):
            return (value.type,)  # each rank has an index of its own
        if isinstance(value, nn.Module):
            if "_orig_mod" in value._modules or type(value).__module__.startswith("torch.nn.parallel."):
                return value.children()  # the module that is compiled or distributed
            hooks = [[hook for hook in vars(value)[name].values() if _is_own(_module_of(hook))] for name in _HOOKS]
            return type(value), _state(_copied(value)), hooks
        if isinstance(value, Mapping) and not _is_own(type(value).__module__):
            return [*value.items(), getattr(value, "default_factory", None)]
        return value if type(value) in (list, tuple, set, frozenset) else self._reduced(value)

    def _reduced(self, value: Any) -> Iterable[Any]:
        """Return what pickle would save of an object."""
        try:
            reduced = copyreg.dispatch_table.get(type(value), type(value).__reduce_ex__)
            parts = reduced(value) if type(value) in copyreg.dispatch_table else reduced(value, 4)
        except Exception as error:
            if not self._refuses:
                return ()
            raise SparsityError(
                f"{self._what} uses a {type(value).__name__}, whose values cannot be read ({error}), so that a later "
                "call could not tell whether it is the same; do without it, or leave out checkpoint="
            ) from None
        if isinstance(parts, str):  # a name, such as that of a function in C
            owner = getattr(value, "__self__", None)
            return parts, getattr(value, "__module__", None), getattr(value, "__wrapped__", None), owner
        make, args, state, *items = (*parts, None)[: max(3, len(parts))]
        return make, args, _state(state), *(list(each) for each in items if hasattr(each, "__iter__"))


def _is_own(module: str | None) -> bool:
    """Return whether a module is neither of the standard library nor of an installed package."""
    top = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    is_known = top in sys.stdlib_module_names or top in ("torch", __name__.partition(".")[0])
    return not is_known and not {"site-packages", "dist-packages"}.intersection(Path(file).parts)


def _module_of(function: Any) -> str:
    """Return the name of the module that defines a function, also of a bound or partial one."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _copied(module: nn.Module) -> dict[str, Any]:
    """Return the own attributes of a module that a deep copy has too, without copying them: it may lack caches."""
    attributes = vars(module)
    # The class that parametrize makes for a module copies all attributes, whatever the module's own class does.
    kind: Any = type(module).__mro__[int(parametrize.is_parametrized(module))]
    with contextlib.suppress(Exception):  # a module that cannot be copied counts with all attributes
        alike = kind.__new__(kind)
        alike.__dict__.update(attributes)
        attributes = vars(copy.deepcopy(alike, {id(value): value for value in attributes.values()}))
    return {key: value for key, value in attributes.items() if key not in _OF_MODULES}


def _state(state: Any) -> Any:
    if type(state) is not dict:
        return state
    passing = (_PASSING, _OF_RANKS) if has_process_group() else (_PASSING,)
    return {k: v for k, v in state.items() if not (isinstance(k, str) and any(p.fullmatch(k) for p in passing))}


def _of_tensor(tensor: Tensor) -> Iterable[Any]:
    if tensor.is_nested:
        return tensor.unbind()
    attributes = {k: v for k, v in getattr(tensor, "__dict__", {}).items() if not k.startswith("_")}
    about = tuple(tensor.shape), str(tensor.dtype), *([attributes] if attributes else ())
    if tensor.is_meta or is_sharded(tensor):  # values that are not at hand
        return about
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return (*about, context, *(getattr(tensor, name) for name in names))
    if tensor.is_quantized:
        return (*about, tensor.dequantize())
    if tensor.layout != torch.strided:
        return (*about, *torch.Tensor.__reduce_ex__(tensor.detach(), 4)[1])
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # `Tensor.numpy` would fix the size of the storage, which FSDP2 frees when a gathered weight is sharded again.
    return (*about, np.from_dlpack(flat.view(torch.uint8)).data) if flat.numel() else about


def _of_function(function: Any) -> Iterable[Any]:
    """Return the code of a function and what it reads; only of one's own also global variables and what they read."""
    if isinstance(function, types.CodeType):
        flags = function.co_flags, function.co_argcount, function.co_kwonlyargcount
        return function.co_code, function.co_consts, function.co_names, function.co_exceptiontable, flags
    if "_torchdynamo_orig_callable" in vars(function):  # of a compiled function
        return (vars(function)["_torchdynamo_orig_callable"],)
    space, names = function.__globals__, _names(function.__code__)
    reads = {name: space[name] for name in names if name in space} if _is_own(space.get("__name__")) else {}
    modules = list(reads.values())
    for module in (m for m in modules if isinstance(m, types.ModuleType) and _is_own(m.__name__)):
        inside = {f"{module.__name__}.{name}": getattr(module, name) for name in names if hasattr(module, name)}
        modules += [value for key, value in inside.items() if key not in reads]  # the loop goes on with these
        reads |= inside
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            cells[name] = cell.cell_contents
    own = (_state(cells), vars(function), _state(reads))
    return function.__code__, function.__defaults__, function.__kwdefaults__, *own


def _names(code: types.CodeType) -> list[str]:
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names(c)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _of_class(kind: type) -> Iterable[Any]:
    """Return the name of a class, and of one's own what it defines."""
    if not _is_own(kind.__module__):
        return (f"{kind.__module__}.{kind.__qualname__}",)
    slots = (types.GetSetDescriptorType, types.MemberDescriptorType)
    own = {k: v for k, v in vars(kind).items() if k not in _NO_PARTS and not isinstance(v, slots)}
    return kind.__qualname__, {k: getattr(v, "__func__", v) for k, v in own.items()}
