"""What FSDP2 (`fully_shard`) changes in a model: the class of a module, and the parameters that it swaps.

`torch.distributed.fsdp` is not imported here, only looked up. FSDP2's records of a parameter are private to it; only
`fsdp_records` and `move_record` read or write them.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError
from .placement import has_process_group, is_sharded
from .tensors import copy_values


def refuse_sharded_first(model: nn.Module, names: Sequence[tuple[str, str]]) -> None:
    """Raise if `fully_shard` was applied before `prepare` to a module of `names` (tensor, module), or around it."""
    wrapped = {name for name, _ in _wrapped(model)}
    for tensor, module in names:
        inside = [name for name in _ancestors(module) if name in wrapped]
        if inside or is_managed(model.get_submodule(module)):
            which = "a module around the model" if not inside else repr(inside[-1]) if inside[-1] else "the model"
            raise SparsityError(
                f"{tensor}: fully_shard was applied to {which} already, and it would not use the "
                "mask. Call prepare first, then fully_shard, then make the optimizer."
            )


def refuse_wrapped_outside(model: nn.Module, places: Sequence[tuple[str, str, nn.Module]]) -> None:
    """Raise if FSDP2 manages a parameter, of `places` (its name, its module's name, module), from outside the model."""
    wrapped = {name for name, _ in _wrapped(model)}
    for tensor, name, module in places:
        if is_managed(module) and wrapped.isdisjoint(_ancestors(name)):
            raise SparsityError(
                f"squash_mask: {tensor} was sharded by fully_shard on a module around the prepared model, which cannot "
                "be updated. Prepare the model that you wrap; to squash this one, load its checkpoint into a model "
                "that is not sharded."
            )


def reshard(model: nn.Module | None) -> None:
    """Reshard every FSDP2 module of the model; a forward pass may have left its parameters gathered."""
    for _, module in _wrapped(model) if has_process_group() else ():
        module.reshard()


def abandon_forward(model: nn.Module) -> None:
    """Shard every FSDP2 module of a model again after an exception that ended a forward pass in the middle."""
    for _, module in _wrapped(model) if has_process_group() else ():
        if module._get_fsdp_state()._is_root and hasattr(module, "reset_iter_state"):  # since torch 2.13
            module.reset_iter_state()
    reshard(model)


@contextmanager
def gathered(model: nn.Module, modules: Sequence[nn.Module], writes: bool) -> Iterator[None]:
    """Inside, all parameters of some modules of a model are whole on every rank, and their FSDP2 hooks do not run.

    If `writes`, each rank keeps its part of the changed values, but not after an error inside.
    """
    abandon_forward(model)
    sharded = [(module, name, p) for module in modules for name, p in module.named_parameters() if is_sharded(p)]
    if not sharded:
        yield
        return
    names, inside = {id(m): name for name, m in model.named_modules()}, {m for one in modules for m in one.modules()}
    around = {name for one in modules for name in _ancestors(names[id(one)])}
    wrapped = [m for name, m in _wrapped(model) if name in around or m in inside]
    hooks: list[tuple[Any, int, Any, set[int]]] = []  # where each was registered, and which hooks came before it
    whole: list[Tensor] = []
    try:
        for m in wrapped:
            m.unshard()
            state = m._get_fsdp_state()
            before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
            for registered, key in ((m._forward_pre_hooks, before), (m._forward_hooks, after)):
                if key in registered:
                    earlier = set(takewhile(key.__ne__, registered))
                    hooks.append((registered, key, registered.pop(key), earlier))
        for module, name, _ in sharded:
            if is_sharded(module.get_parameter(name)):
                raise SparsityError(f"{name} is sharded, but not by fully_shard; prune before parallelize_module")
        yield
        whole = [module.get_parameter(name).detach().clone() for module, name, _ in sharded] if writes else []
    finally:
        for registered, key, hook, earlier in hooks:  # others may have been added or removed meanwhile
            at = max((n for n, other in enumerate(registered, 1) if other in earlier), default=0)
            later = list(registered)[at:]
            registered[key] = hook
            for other in later:
                registered.move_to_end(other)
        reshard(model)
    for (_, _, p), value in zip(sharded, whole, strict=bool(whole)):
        copy_values(p.detach(), value)


@contextmanager
def without_fsdp_class(module: nn.Module) -> Iterator[None]:
    """The module with its own class instead of the one that `fully_shard` derived from it, which is restored after."""
    kind, fsdp = type(module), _fsdp_class()
    if fsdp is None or not isinstance(module, fsdp):
        yield
        return
    module.__class__ = kind.__bases__[1]
    try:
        yield
    finally:
        inner = type(module)
        copying = {k: v for k, v in vars(kind).items() if k == "__deepcopy__"}
        module.__class__ = type(f"FSDP{inner.__name__}", (kind.__bases__[0], inner), copying)


def fsdp_records(model: nn.Module | None) -> dict[int, Any]:
    """FSDP2's record of each parameter of the model, by the id of its sharded Parameter; {} without FSDP2."""
    records: dict[int, Any] = {}
    for _, module in _wrapped(model):
        try:
            groups = module._get_fsdp_state()._fsdp_param_groups
            records |= {id(p.sharded_param): p for g in groups for p in g.fsdp_params if p._module_info}
        except AttributeError as e:
            raise SparsityError(
                f"squash_mask: cannot find fully_shard's records of its parameters in this version of torch ({e}). "
                "Load the checkpoint into a model that is not sharded, and squash that one."
            ) from None
    return records


def move_record(record: Any, module: nn.Module, name: str) -> None:
    """Tell FSDP2 that the parameter of a record (of `fsdp_records`) is now `module.name`, so that it swaps it there."""
    record._module_info.module, record._module_info.param_name = module, name
    record._post_load_hook_handle.remove()
    record._post_load_hook_handle = module.register_load_state_dict_post_hook(
        lambda *args, **kwargs: record.reset_sharded_param()
    )


def refuse_gathered(tensor: str, weight: Tensor, mask: Tensor) -> None:
    """Raise if the weight is gathered and its mask is sharded."""
    if is_sharded(mask) and not is_sharded(weight):
        raise SparsityError(
            f"{tensor}: its parameter is gathered, by a module around the prepared model that fully_shard was applied "
            "to. Call reshard() on that module first."
        )


def is_managed(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module or to one around it; it sets this attribute for the compiler."""
    return getattr(module, "_is_fsdp_managed_module", False)


def _wrapped(model: nn.Module | None) -> list[tuple[str, Any]]:
    """(name, module) of the model's modules that `fully_shard` was applied to."""
    fsdp = _fsdp_class()
    return [] if model is None or fsdp is None else [(n, m) for n, m in model.named_modules() if isinstance(m, fsdp)]


def _ancestors(module: str) -> list[str]:
    """Return the names of the modules that contain a module, outermost first, and its own: '', 'blocks', 'blocks.0'."""
    return ["", *(accumulate(module.split("."), "{}.{}".format) if module else ())]


def _fsdp_class() -> type | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return getattr(fsdp, "FSDPModule", None)
