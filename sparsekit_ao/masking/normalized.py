"""Weights of weight_norm (Salimans and Kingma 2016), old or new: made plain parameters, and normalized anew."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import SparsityError, checked_model

# Names of a module and its tensor, the dimension, whether it is parametrized, and whether lengths and directions train.
Normed = Sequence[tuple[str, str, int, bool, tuple[bool, bool]]]


def computed_tensors(model: nn.Module) -> list[Tensor]:
    """Return attributes that `copy.deepcopy` refuses: weights that torch.nn.utils.weight_norm has computed."""
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, Tensor) and not value.is_leaf]


def refuse_uncopyable(model: nn.Module, where: str) -> None:
    """Raise an error unless the model is plain: a module with weights of torch that can be copied."""
    if isinstance(checked_model(model, where), nn.parallel.DistributedDataParallel):
        raise SparsityError(f"{where}: model is a DistributedDataParallel; give its .module, and wrap the result again")
    # What is in `memo` counts as copied: neither weights nor other modules are.
    memo: dict[int, Any] = {
        id(t): t.detach() for t in (*model.parameters(), *model.buffers(), *computed_tensors(model))
    }
    memo |= {id(module): module for module in model.modules()}
    for name, p in model.named_parameters():
        if type(p.data).__module__.startswith("torchao"):
            raise SparsityError(f"{where}: {name} is a {type(p.data).__name__}; quantize the model after {where}")
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value, memo)
            except (TypeError, RuntimeError) as e:  # such as a lock, or a tensor of an earlier forward
                raise SparsityError(
                    f"{where}: the model cannot be copied, because of {f'{path}.{key}'.strip('.')} ({e}). Delete "
                    "this attribute and set it again afterwards; prune can also change the model itself, inplace=True"
                ) from None


def copy_of(model: nn.Module) -> nn.Module:
    """Return a deep copy, also where `torch.nn.utils.weight_norm` has computed weights."""
    return copy.deepcopy(model, {id(tensor): tensor.detach() for tensor in computed_tensors(model)})


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy where weights are normalized or computed; the model itself without those."""
    is_plain = not any(_normed_weight(module) for module in model.modules()) and not computed_tensors(model)
    return model if is_plain else copy_of(model)


@torch.no_grad()
def undo_weight_norms(model: nn.Module) -> Normed:
    """Make weights of weight_norm, old or new, plain parameters in place; what `redo_weight_norms` needs."""
    normed = list[tuple[str, str, int, bool, tuple[bool, bool]]]()
    for path, module in list(model.named_modules()):
        if not (found := _normed_weight(module)):
            continue
        name, norm, key = found
        if isinstance(norm, WeightNorm):
            g, v = getattr(module, f"{name}_g"), getattr(module, f"{name}_v")
            weight = norm.compute_weight(module)
            del module._forward_pre_hooks[key], module._parameters[f"{name}_g"], module._parameters[f"{name}_v"]
            vars(module).pop(name, None)
        else:  # not by remove_parametrizations, which changes a class that copies share
            (g, v), weight = module.parametrizations[name].parameters(), getattr(module, name)
            del module._modules["parametrizations"]
            module.__class__ = type(module).__bases__[0]
        others = dict(module._parameters)
        module._parameters.clear()
        trains, is_new = (g.requires_grad, v.requires_grad), not isinstance(norm, WeightNorm)
        module._parameters |= {name: nn.Parameter(weight.clone(), any(trains)), **others}
        normed.append((path, name, norm.dim, is_new, trains))  # type: ignore[arg-type]
    return normed


@torch.no_grad()
def redo_weight_norms(model: nn.Module, normed: Normed) -> dict[str, Tensor]:
    """Normalize again, in place (zeros get a direction of ones); return {parameter of lengths: its exact values}."""
    exact = dict[str, Tensor]()
    for path, name, dim, is_new, trains in normed:
        module = model.get_submodule(path)
        if is_new:
            parametrizations.weight_norm(module, name, dim)
            module.train(module.training)  # the modules that this registers, too
            chain = module.parametrizations[name]  # type: ignore[index]
            g, v = chain.original0, chain.original1  # type: ignore[union-attr]
        else:
            weight, norm = module._parameters.pop(name), WeightNorm(name, dim)
            assert weight is not None
            g, v = nn.Parameter(torch.norm_except_dim(weight, 2, dim)), weight
            module.register_parameter(f"{name}_g", g)
            module.register_parameter(f"{name}_v", v)
            module.register_forward_pre_hook(norm)
        for part, is_trained in zip((g, v), trains, strict=True):
            part.requires_grad_(is_trained)
        key = f"parametrizations.{name}.original0" if is_new else f"{name}_g"
        exact[f"{path}.{key}".lstrip(".")] = torch.norm_except_dim(v.double(), 2, dim)
        v.masked_fill_((g == 0).expand_as(v), 1.0)
        if not is_new:
            setattr(module, name, norm.compute_weight(module))
    return exact


def _normed_weight(module: nn.Module) -> tuple[str, WeightNorm | nn.Module, int] | None:
    """The one tensor of a module that weight_norm computes, with its norm and the key of its hook; None otherwise."""
    hooks = [(key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, WeightNorm)]
    if isinstance(module, nn.RNNBase):
        return None
    if len(hooks) == 1 and not parametrize.is_parametrized(module):
        return hooks[0][1].name, hooks[0][1], hooks[0][0]
    if hooks or not parametrize.is_parametrized(module):
        return None
    (name, chain), *more = module.parametrizations.items()  # type: ignore[union-attr, operator]
    is_norm = isinstance(chain[0], parametrizations._WeightNorm)
    return (name, chain[0], 0) if is_norm and not more and len(chain) == 1 else None
