"""Where the weights of a model lie, and modules whose weights are on the device that computes.

Weights lie in the model, or accelerate has offloaded them to the CPU or to disk (`device_map`, `cpu_offload`,
`disk_offload`, `load_checkpoint_and_dispatch`), or FSDP2 has sharded them over ranks. Inside `loaded`, a module's
parameters are plain tensors in all these cases.
"""

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..distributed import gathered, is_managed, is_sharded
from ..errors import SparsityError

Device = torch.device | str | int | None


class _Offloaded(NamedTuple):
    """A tensor that accelerate keeps outside of the model."""

    owner: nn.Module  # the module that has it
    name: str  # its name there
    placeholder: Tensor  # the tensor on the meta device that stands for it
    values: Any  # the mapping that has its values: names in the model, or in the owner, to tensors
    key: str  # its name in `values`
    device: Any  # where accelerate would load it


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate keeps weights of the model outside of it."""
    return any(True for _ in _offloaded(model))


def offloaded_values(model: nn.Module) -> dict[int, Callable[[], Tensor]]:
    """{id of a placeholder: a function that reads the values} of all tensors that accelerate keeps elsewhere."""
    return {id(each.placeholder): functools.partial(each.values.__getitem__, each.key) for each in _offloaded(model)}


def is_elsewhere(model: nn.Module) -> bool:
    """Whether weights of the model are offloaded or sharded, so that a copy of it does not hold them."""
    is_any_sharded = any(map(is_sharded, model.parameters())) or any(map(is_managed, model.modules()))
    return is_any_sharded or is_offloaded(model)  # FSDP2 may have left weights gathered after a forward pass


def refuse_valueless(model: nn.Module, caller: str) -> None:
    """Raise where parameters are on the meta device, and accelerate does not have their values either."""
    known = {id(each.placeholder) for each in _offloaded(model)}
    for name, p in model.named_parameters():
        if p.is_meta and id(p) not in known:
            raise SparsityError(
                f"{caller}: {name} has no values: it is on the meta device, and accelerate does not know where its "
                "values are; load the model with from_pretrained(folder), for a model that is larger than memory with "
                "device_map= and offload_folder="
            )


def refuse_unloadable(model: nn.Module, caller: str) -> None:
    """Raise where parameters of the model have no values, or values that cannot be changed where they are."""
    refuse_valueless(model, caller)
    for module in model.modules():
        is_whole = any(one.place_submodules for one in _offloading_hooks(module))
        if is_whole and any(isinstance(m, nn.ModuleList) for m in module.modules()):
            raise SparsityError(
                f"{caller}: accelerate loads all of {type(module).__name__} at once, with all of its blocks; offload "
                "the model without naming this class in preload_module_classes"
            )
    for each in _offloaded(model):
        if each.key in getattr(each.values, "index", ()) and each.values.save_folder is None:
            raise SparsityError(
                f"{caller}: accelerate reads {each.key} from the model's own files and has no folder for changed "
                "weights; load the model with from_pretrained(folder, device_map=..., offload_folder='offloaded')"
            )


def refuse_tied(model: nn.Module, names: Collection[str], caller: str) -> None:
    """Raise where two tensors are one of the values that accelerate keeps on the CPU, which it does not tell itself."""
    paths, found = {id(module): name for name, module in model.named_modules()}, dict[int, str]()
    for each in _offloaded(model):
        name = f"{paths[id(each.owner)]}.{each.name}".removeprefix(".")
        if name in names and each.key not in getattr(each.values, "index", ()):
            first = found.setdefault(each.values[each.key].data_ptr(), name)
            if first != name:
                raise SparsityError(
                    f"{caller}: {first} and {name} were one tensor before accelerate offloaded the model; prune it "
                    f"before that, or leave both out (exclude=[{first!r}, {name!r}])"
                )


@contextmanager
def loaded(
    model: nn.Module, modules: Sequence[nn.Module], device: Device = None, *, writes: bool = False
) -> Iterator[None]:
    """Inside, the parameters of modules and of all inside them are plain tensors, on `device` if one is given.

    With `writes`, changed values are afterwards written to where they came from, but not after an error inside.
    """
    with ExitStack() as stack:
        stack.enter_context(gathered(model, modules, writes))
        for module in modules:
            stack.enter_context(_from_offload(model, module, device, writes))
            stack.enter_context(_moved(module, device))
            stack.enter_context(_widened(module))
        yield


@contextmanager
def _moved(module: nn.Module, device: Device) -> Iterator[None]:
    """Move parameters and buffers to a device, and back."""
    places = [] if device is None else [(t, t.device) for t in itertools.chain(module.parameters(), module.buffers())]
    try:
        for tensor, _ in places:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, place in places:
            tensor.data = tensor.data.to(place)


@contextmanager
def _widened(module: nn.Module) -> Iterator[None]:
    """Compute in float32 on a CPU without instructions for the 16-bit dtype of a module; it gets and gives 16 bits.

    Products then take a fraction of the time. Values are rounded to 16 bits at the end.
    """
    tensors = [t for t in itertools.chain(module.parameters(), module.buffers()) if t.is_floating_point()]
    kinds = {(t.device.type, t.dtype) for t in tensors}
    dtype = next(iter(kinds), ("", torch.float32))[1]
    if kinds != {("cpu", dtype)} or dtype not in _emulated():
        yield
        return

    def cast(values: Any, before: torch.dtype, after: torch.dtype) -> Any:
        return _pytree.tree_map_only(Tensor, lambda x: x.to(after) if x.dtype == before else x, values)

    narrow = [t.data for t in tensors]
    hooks = (
        module.register_forward_pre_hook(lambda _, *given: cast(given, dtype, torch.float32), with_kwargs=True),
        module.register_forward_hook(lambda _, given, output: cast(output, torch.float32, dtype)),
    )
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, values in zip(tensors, narrow, strict=True):
            tensor.data = values.copy_(tensor.data)
        for hook in hooks:
            hook.remove()


@functools.cache
def _emulated() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes for whose products the CPU has no instructions."""
    has: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if has.get("architecture") != "x86_64":
        return frozenset()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return frozenset(dtype for dtype, ones in names.items() if not any(has.get(one) for one in ones))


@contextmanager
def _from_offload(model: nn.Module, module: nn.Module, device: Device, writes: bool) -> Iterator[None]:
    """Load what accelerate offloaded. Its hooks would load the old values again, so they do not run meanwhile."""
    inside = {*module.modules()}
    hooked = [m for m in inside if hasattr(m, "_hf_hook") and "forward" in vars(m)]
    forwards = [m.forward for m in hooked]
    has_placeholders = any(t.is_meta for t in itertools.chain(module.parameters(), module.buffers()))
    every = _offloaded(model) if has_placeholders else ()  # of the whole model, since a hook may be around the module
    tensors = [each for each in every if each.owner in inside]
    try:
        for m in hooked:
            m.forward = m._old_forward  # type: ignore[assignment]
        for each in tensors:
            place = each.device if device is None else device
            _set(each, each.values[each.key].to(place, copy=True))  # a map on the CPU gives its own tensor
        yield
        for each in tensors if writes else ():
            _write(each, getattr(each.owner, each.name).detach().cpu())
    finally:
        for each in tensors:
            _set(each, each.placeholder)
        for m, forward in zip(hooked, forwards, strict=True):
            m.forward = forward


def _offloaded(module: nn.Module) -> Iterator[_Offloaded]:
    """The tensors of a module that accelerate keeps elsewhere, by the hooks that would load them."""
    for parent in module.modules():
        for one in _offloading_hooks(parent):
            named: list[tuple[str, Tensor]] = [*parent.named_parameters(recurse=one.place_submodules)]
            named += parent.named_buffers(recurse=one.place_submodules) if one.offload_buffers else []
            for path, tensor in named:
                if tensor.is_meta:
                    owner, _, name = path.rpartition(".")
                    values, key = one.weights_map, path
                    while hasattr(values, "prefix"):
                        values, key = values.dataset, values.prefix + key
                    yield _Offloaded(parent.get_submodule(owner), name, tensor, values, key, one.execution_device)


def _offloading_hooks(module: nn.Module) -> list[Any]:
    """The hooks of accelerate on a module that load weights from elsewhere; a SequentialHook has several."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return [one for one in hooks if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None]


def _set(each: _Offloaded, value: Tensor) -> None:
    """Put a value, or the placeholder again, where the module looks for the tensor."""
    if each.name in each.owner._buffers:
        each.owner._buffers[each.name] = value
    elif isinstance(value, nn.Parameter):
        each.owner._parameters[each.name] = value
    else:
        each.owner._parameters[each.name] = nn.Parameter(value, each.placeholder.requires_grad)


def _write(each: _Offloaded, value: Tensor) -> None:
    """Write a value to where accelerate reads it; a file only where it changed."""
    if each.key not in getattr(each.values, "index", ()) or each.key in each.values.state_dict:
        values = getattr(each.values, "state_dict", each.values)
        values[each.key] = value
    elif not torch.equal(value, each.values[each.key]):
        from accelerate.utils import offload_weight

        Path(each.values.save_folder, f"{each.key}.dat").unlink(missing_ok=True)  # which copies may read
        index = offload_weight(value, each.key, each.values.save_folder, index={})
        each.values.index[each.key] = index[each.key]


def remove_copied_values(copied: nn.Module, model: nn.Module) -> None:
    """Remove the folders that `replace_offloaded` gave a copy of a model."""
    used = {str(getattr(each.values, "save_folder", "")) for each in _offloaded(model)}
    for folder in {str(getattr(each.values, "save_folder", "")) for each in _offloaded(copied)} - used:
        shutil.rmtree(folder)


def replace_offloaded(model: nn.Module, changes: Mapping[int, Callable[[Tensor], Tensor]]) -> None:
    """Replace offloaded values of a copy by `changes[id of a placeholder](value)`, in a folder that the copy gets."""
    offloaded = [*_offloaded(model)]
    for values in {id(each.values): each.values for each in offloaded}.values():
        if getattr(values, "save_folder", None) is not None:
            before, values.save_folder = values.save_folder, tempfile.mkdtemp(prefix="copy-", dir=values.save_folder)
            for file in Path(before).glob("*.dat"):
                os.link(file, Path(values.save_folder, file.name))
    for each in offloaded:
        if id(each.placeholder) in changes:
            _write(each, changes[id(each.placeholder)](each.values[each.key]).contiguous())
