"""What FSDP2 (`fully_shard`) needs of whoever changes a module: the class it wrapped, the parameters it swaps.

Knows modules; asks `torch.distributed.fsdp` only where somebody has imported it. What FSDP2 keeps about a parameter
is private to it, and only `fsdp_records` and `move_record` look there.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from .placement import is_sharded

__all__ = [
    "fsdp_records",
    "has_process_group",
    "is_managed",
    "move_record",
    "refuse_gathered",
    "refuse_sharded_first",
    "refuse_wrapped_outside",
    "reshard",
    "without_fsdp_class",
]


def refuse_sharded_first(model: nn.Module, names: Sequence[tuple[str, str]]) -> None:
    """Raise if `fully_shard` manages one of the modules already.

    Args:
        model: looked through.
        names: (tensor, its module) by name.
    """
    wrapped = _wrapped_names(model)
    for tensor, module in names:
        inside = [name for name in _around(module) if name in wrapped]
        if inside or is_managed(model.get_submodule(module)):
            which = "a module around the model" if not inside else repr(inside[-1]) if inside[-1] else "the model"
            raise SparsityError(
                f"{tensor}: fully_shard was applied to {which} already, and it would not see the "
                "mask. Call prepare first, then fully_shard, then make the optimizer."
            )


def refuse_wrapped_outside(model: nn.Module, names: Sequence[tuple[str, str]]) -> None:
    """Raise if a parameter is in the hands of a module outside of the model, which cannot be told that it moves.

    Args:
        model: looked through.
        names: (tensor, its module) by name.
    """
    wrapped = _wrapped_names(model)
    for tensor, module in names:
        if is_managed(model.get_submodule(module)) and wrapped.isdisjoint(_around(module)):
            raise SparsityError(
                f"squash_mask: {tensor} was sharded by fully_shard on a module around the prepared model, which would "
                "lose it. Prepare the model that you wrap; this one can be squashed where it is not sharded: load its "
                "checkpoint there."
            )


def has_process_group() -> bool:
    """Whether there is a process group, without which nothing was sharded."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def reshard(model: nn.Module | None) -> None:
    """Give every module its sharded parameters back, which a forward pass may have left gathered."""
    if model is None or not has_process_group():
        return
    for module in () if _fsdp_class() is None else model.modules():
        if _is_wrapped(module):
            module.reshard()  # type: ignore[operator]


@contextmanager
def without_fsdp_class(module: nn.Module) -> Iterator[None]:
    """The module without the class that `fully_shard` put around its own; it is put around it again afterwards."""
    kind = type(module)
    if not _is_wrapped(module):
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
    """What FSDP2 keeps about each parameter of the model, by the id of its sharded Parameter; {} without FSDP2.

    Raises:
        SparsityError: this torch keeps it elsewhere.
    """
    found: dict[int, Any] = {}
    for module in () if model is None or _fsdp_class() is None else model.modules():
        if _is_wrapped(module):
            try:
                groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
                found |= {id(p.sharded_param): p for g in groups for p in g.fsdp_params if p._module_info}
            except AttributeError as e:
                raise SparsityError(
                    f"squash_mask: cannot find what fully_shard keeps about its parameters in this torch ({e}). Load "
                    "the checkpoint into a model that is not sharded, and squash that one."
                ) from None
    return found


def move_record(record: Any, module: nn.Module, name: str) -> None:
    """Tell FSDP2 that a parameter now hangs on the module itself: there it swaps it from now on.

    Args:
        record: from `fsdp_records`.
        module, name: where the parameter hangs now.
    """
    record._module_info.module, record._module_info.param_name = module, name
    record._post_load_hook_handle.remove()
    record._post_load_hook_handle = module.register_load_state_dict_post_hook(
        lambda *args, **kwargs: record.reset_sharded_param()
    )


def refuse_gathered(tensor: str, weight: Tensor, mask: Tensor) -> None:
    """Raise if the weight is gathered at the moment and its mask is not: there is nothing to choose from then."""
    if is_sharded(mask) and not is_sharded(weight):
        raise SparsityError(
            f"{tensor}: its parameter is gathered at the moment, by a module that fully_shard wrapped outside of the "
            "prepared model. Call reshard() on that module first."
        )


def is_managed(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module or to one around it; it leaves this mark for the compiler."""
    return getattr(module, "_is_fsdp_managed_module", False)


def _wrapped_names(model: nn.Module) -> set[str]:
    """The names of those of the model's modules that `fully_shard` wrapped."""
    return set() if _fsdp_class() is None else {name for name, m in model.named_modules() if _is_wrapped(m)}


def _around(module: str) -> list[str]:
    """A module's name and those of the modules that it lies in, outermost first.

    >>> _around("blocks.0")
    ['', 'blocks', 'blocks.0']
    """
    parts = module.split(".") if module else []
    return ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]


def _fsdp_class() -> type | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return getattr(fsdp, "FSDPModule", None)


def _is_wrapped(module: nn.Module) -> bool:
    kind = _fsdp_class()
    return kind is not None and isinstance(module, kind)
