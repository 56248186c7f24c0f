"""`WeightMask`, the parametrization that masks a weight, and how it is registered, removed and saved.

Masks are filled in place; only `.to()` and sharding replace the tensor. The gradient is computed with the mask that the
forward pass used, so autograd saves a copy of the mask, which a later `step` does not change. On a CPU the copy has the
weight's dtype and is kept for later forward passes, because allocating that memory costs more than masking the weight.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..distributed import is_placed_like, is_sharded, local, placed_like, refuse_gathered, without_fsdp_class
from ..errors import SparsityError, checked_model
from ..torch_ao import FakeSparsity

# Weights of these dtypes are selected by a mask of their own dtype: on a CPU in eager mode, `where` with a bool mask
# takes five times as long as a product.
_SELECTED_BY_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# {recurrent module: its list of weights}, which is not kept in the module: see `_keep_list_outside`.
_LISTS: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def select(weight: Tensor, mask: Tensor) -> Tensor:
    """Return the weight where the mask is True (or 1), and exactly 0 where it is False (or 0).

    The result is differentiable in the weight. Elements are selected, not multiplied: a dropped one is exactly 0 in
    forward and backward, even where the weight is NaN or infinite. In eager mode the mask may be written between the
    forward and the backward pass, since autograd saves a copy of it. The copy lives as long as the graph; it takes one
    byte per element, or on a CPU as much memory as the weight. Compiled code saves the mask itself, and torch raises an
    error if the mask was written before the backward pass.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return _selected(weight, _converted(mask, weight.dtype) if _takes_floats(weight) else mask)


def _selected(weight: Tensor, mask: Tensor) -> Tensor:
    """Do the same as `select`, with a mask that is in the weight's dtype if `_takes_floats(weight)`.

    The mask must not be written before the backward pass, because autograd may save it without a copy.
    """
    if _takes_floats(weight):
        # This backward of a threshold returns the first argument where the second is above 0, and 0 elsewhere.
        return torch.ops.aten.threshold_backward(weight, mask, 0)
    return torch.where(mask != 0, weight, 0)


def _takes_floats(weight: Tensor) -> bool:
    """Return whether a weight is selected by a mask of its own dtype, as on a CPU in eager mode."""
    if weight.dtype not in _SELECTED_BY_FLOATS or weight.device.type != "cpu" or is_sharded(weight):
        return False
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def _converted(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in a dtype, in memory of its own if autograd may save it."""
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)  # the conversion is then three times as fast
    return mask.to(dtype, copy=torch.is_grad_enabled())


class _ConvertedMask(NamedTuple):
    """A contiguous copy of the mask of an earlier forward pass, and its conversion. Neither is ever written."""

    mask: Tensor
    converted: Tensor

    def is_of(self, mask: Tensor, dtype: torch.dtype) -> bool:
        """Return whether this is the conversion to `dtype` of a mask that has the values of `mask`."""
        # Values are compared because the version counter of a tensor misses some writes, such as those to `.data`.
        if self.converted.dtype != dtype or self.mask.dtype != mask.dtype:
            return False
        itemsize = mask.element_size()
        if not mask.is_contiguous() or mask.numel() * itemsize % 8 or mask.storage_offset() * itemsize % 8:
            return torch.equal(mask, self.mask)
        # Eight bytes are compared at once, by NumPy, which takes half as long as torch for most layers.
        now, before = (each.view(-1).view(torch.int64).numpy() for each in (mask, self.mask))
        return np.array_equal(now, before)


def mark_masked(weight: Tensor) -> Tensor:
    """Return a masked weight; mark it if it is a leaf, so that `structure` does not take it for a parameter."""
    if not torch.compiler.is_compiling() and weight.is_leaf:
        weight.is_masked_weight = True  # type: ignore[attr-defined]
    return weight


class WeightMask(FakeSparsity):
    """Mask a weight, as `torch_ao.FakeSparsity` does.

    Unlike `FakeSparsity`, it compiles, keeps the weight's dtype and saves its mask in the state dict.

    Args:
        mask: A tensor of the weight's shape, bool or 0 and 1 in the weight's dtype. It becomes the buffer `mask`, which
            is filled in place; only `.to()` and the like, and `shard_like`, replace the tensor.

    >>> layer = nn.Linear(2, 1)
    >>> mask = WeightMask(torch.tensor([[True, False]]))
    >>> parametrize.register_parametrization(layer, "weight", mask)  # as prepare does
    ParametrizedLinear(
      in_features=2, out_features=1, bias=True
      (parametrizations): ModuleDict(
        (weight): ParametrizationList(
          (0): WeightMask()
        )
      )
    )
    >>> (layer.weight != 0).tolist()
    [[True, False]]
    """

    mask: Tensor
    _kept: _ConvertedMask | None = None  # of an earlier forward pass on a CPU
    _has_left_meta = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight with dropped elements exactly zero, in its own shape and dtype."""
        return mark_masked(_selected(x, self.mask_for(x)))

    def mask_for(self, x: Tensor) -> Tensor:
        """Return the mask for a weight of its shape, as `_selected` takes it: sharded alike, on a CPU in its dtype."""
        mask = self.mask
        if mask.shape != x.shape:
            raise SparsityError(f"mask {tuple(mask.shape)} does not fit the weight {tuple(x.shape)}")
        mask = placed_like(mask, x)
        if not _takes_floats(x):
            return mask
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # for example by vmap or grad
        if type(mask) is not Tensor or is_transformed or (mask.dtype == x.dtype and not torch.is_grad_enabled()):
            return _converted(mask, x.dtype)
        kept = self._kept  # read once, since several threads may run the module
        if kept is None or not kept.is_of(mask, x.dtype):
            # Autograd may save the conversion in a later pass, which it cannot do with a tensor of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                copied = mask.clone(memory_format=torch.contiguous_format)
                converted = copied if copied.dtype == x.dtype else _converted(copied, x.dtype)
                kept = self._kept = _ConvertedMask(copied, converted)
        return kept.converted

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle or copy, without the conversion that is kept."""
        return {k: v for k, v in self.__dict__.items() if k != "_kept"}

    def _apply(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Do as any module in `.to()` and the like; a mask that leaves the meta device, without values, is all True."""
        before, has_no_values, self._kept = self.mask, self.has_no_values, None
        super()._apply(*args, **kwargs)
        if has_no_values and self.mask is not before and not self.mask.is_meta:
            self.mask.fill_(True)
            self._has_left_meta = True
        return self

    @property
    def has_no_values(self) -> bool:
        """Whether the mask is on the meta device, or has left it and is all True still."""
        # `to_empty` calls `_apply` of a tied mask twice, and the second call replaces the values of the first.
        return self.mask.is_meta or (self._has_left_meta and bool(local(self.mask).all()))

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """Load as any module does. A whole mask can also be loaded into a sharded one, and a sharded into a whole."""
        vars(self).pop("_from_dense", None)
        for name, own in self.named_buffers():
            saved = state_dict.get(f"{prefix}{name}")
            if isinstance(saved, Tensor) and saved.shape == own.shape:
                state_dict = {**state_dict, f"{prefix}{name}": placed_like(saved, own)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def shard_like(self, weight: Tensor) -> None:
        """Shard the mask over the ranks as its weight is."""
        self.mask = placed_like(self.mask, weight)

    def right_inverse(self, x: Tensor) -> Tensor:
        """Return the value to store when `x` is assigned to the masked weight, which is `x` itself."""
        return x

    def state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Return the state with the mask, which `FakeSparsity` leaves out, so that it can be loaded strictly."""
        return nn.Module.state_dict(self, *args, **kwargs)


def find_mask(module: nn.Module, tensor_name: str) -> WeightMask | None:
    """Return the mask on a tensor, or None."""
    if not parametrize.is_parametrized(module, tensor_name):
        return None
    for layer in module.parametrizations[tensor_name]:  # type: ignore[index]
        if isinstance(layer, WeightMask):
            return layer
    return None


def parametrized_names(module: nn.Module) -> list[str]:
    """Return the names of the parametrized tensors of a module."""
    if isinstance(module, torch.jit.ScriptModule):  # its `_modules` is not a dict
        return []
    # A wrapper may pass on the attributes of the module inside it, so the module's own dict is read.
    parametrizations = module._modules.get("parametrizations")
    return list(parametrizations) if isinstance(parametrizations, nn.ModuleDict) else []


def under_all_names(
    model: nn.Module, masks: Sequence[tuple[nn.Module, str, WeightMask]]
) -> list[tuple[nn.Module, str, WeightMask]]:
    """Return the given tuples (module, tensor name, mask), and one for each other name of a tied parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            places.setdefault(id(parameter), []).append((module, name))
    entries = list(masks)
    for module, name, mask in masks:
        others = places.get(id(module._parameters[name]), []) if name in module._parameters else []
        entries += [(m, n, mask) for m, n in others if (m, n) != (module, name)]
    return entries


def other_names(model: nn.Module, tensors: Sequence[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    """Return every other tensor that has one of the masks of these tensors: other names of tied parameters."""
    own = {(id(module), name) for module, name in tensors}
    masks = {id(find_mask(*tensor)) for tensor in tensors}
    return [
        (module, name)
        for module in model.modules()
        for name in parametrized_names(module)
        if id(find_mask(module, name)) in masks and (id(module), name) not in own
    ]


@contextmanager
def installed(masks: Sequence[tuple[nn.Module, str, WeightMask]]) -> Iterator[None]:
    """Register masks on top of other parametrizations; if anything raises an error inside, none of them stays."""
    try:
        for module, name, mask in masks:
            register(module, name, mask)
        yield
    except BaseException:
        for module, name, mask in masks:
            if find_mask(module, name) is mask:
                remove_mask(module, name)
        raise


def register(module: nn.Module, tensor_name: str, mask: WeightMask, at: int = -1) -> None:
    """Register a mask on top of all other parametrizations of the tensor, or after the first `at` of them."""
    order = list(module._parameters)
    if at >= 0 and parametrize.is_parametrized(module, tensor_name):
        _chain(module, tensor_name).insert(at, mask)
    else:
        parametrize.register_parametrization(module, tensor_name, mask, unsafe=True)
    _keep_list_outside(module)
    if not _dense_hooks(module):  # the first mask of the module
        module.parametrizations._dense_order = order  # type: ignore[union-attr]
        module.register_load_state_dict_pre_hook(_take_dense)


def placed_mask(module: nn.Module, tensor_name: str, tensor_fqn: str) -> WeightMask | None:
    """Return the mask on a tensor, sharded like the tensor, so that it can be read and written; None without a mask."""
    weight_mask = find_mask(module, tensor_name)
    if weight_mask is None:
        return None
    chain = _chain(module, tensor_name)
    weight: Any = chain.original if chain.is_tensor else chain.original0
    refuse_gathered(tensor_fqn, weight, weight_mask.mask)
    if weight.is_meta and not weight_mask.mask.is_meta:
        raise SparsityError(
            f"{tensor_fqn} has no values, since it was moved to the meta device or offloaded after prepare; load the "
            "weights without accelerate's offloading, or use prune(model, ..., inplace=True), without masks"
        )
    if is_sharded(weight) and not is_placed_like(weight_mask.mask, weight):
        if layers := below(module, tensor_name):
            raise SparsityError(
                f"{tensor_fqn}: {type(layers[0]).__name__} is below its mask, and its parameters are sharded "
                "over ranks. Remove that parametrization before fully_shard, or leave the tensor out."
            )
        weight_mask.shard_like(weight)
    return weight_mask


def dense_weight(module: nn.Module, tensor_name: str) -> Tensor:
    """Return the weight below the mask: the parameter, or what parametrizations compute; without a mask the tensor."""
    if find_mask(module, tensor_name) is None:
        return getattr(module, tensor_name).detach()
    chain = _chain(module, tensor_name)
    if isinstance(chain[0], WeightMask):
        return chain.original.detach()
    return apply_parametrizations(below(module, tensor_name), parameters_under(module, tensor_name)).detach()


def parameters_under(module: nn.Module, tensor_name: str) -> list[Tensor]:
    """Return the parameters of a parametrized tensor. Some parametrizations, such as weight_norm, have several."""
    chain = _chain(module, tensor_name)
    return [chain.original] if chain.is_tensor else [getattr(chain, f"original{i}") for i in range(chain.ntensors)]


def used_weight(module: nn.Module, tensor_name: str) -> Tensor:
    """Return a tensor as the forward pass uses it, after the mask and all other parametrizations, without gradient."""
    if not parametrize.is_parametrized(module, tensor_name):
        return getattr(module, tensor_name).detach()
    chain = list(_chain(module, tensor_name))
    return apply_parametrizations(chain, parameters_under(module, tensor_name)).detach()


def shape_of(module: nn.Module, tensor_name: str) -> tuple[int, ...]:
    """Return the shape of a tensor, masked or not, without computing the tensor."""
    weight_mask = find_mask(module, tensor_name)
    return tuple((getattr(module, tensor_name) if weight_mask is None else weight_mask.mask).shape)


def below(module: nn.Module, tensor_name: str) -> list[nn.Module]:
    """Return the parametrizations below the mask of a tensor, the lowest first."""
    layers = list(_chain(module, tensor_name))
    return layers[: next(i for i, p in enumerate(layers) if isinstance(p, WeightMask))]


def is_parameter(module: nn.Module, tensor_name: str) -> bool:
    """Return whether a tensor is a parameter with no parametrization on it, or with a mask directly on it."""
    if not parametrize.is_parametrized(module, tensor_name):
        return True
    return isinstance(_chain(module, tensor_name)[0], WeightMask)


def remove_mask(module: nn.Module, tensor_name: str) -> None:
    """Remove the mask of a tensor and leave the parameters as they are."""
    chain = _chain(module, tensor_name)
    if not any(find_mask(module, n) for n in list(module.parametrizations) if n != tensor_name):  # type: ignore[arg-type]
        for k in _dense_hooks(module):  # the last mask of the module goes
            del module._load_state_dict_pre_hooks[k]
    if len(chain) > 1:  # other parametrizations stay
        del chain[len(below(module, tensor_name))]
        return
    order = list(getattr(module.parametrizations, "_dense_order", ()))
    # Deep copies share the class that parametrize made for the module. `remove_parametrizations` edits this class, so
    # the module first gets a copy of it.
    with without_fsdp_class(module):
        kind = type(module)
        namespace = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, namespace)
        parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=False)
    parameters = module._parameters  # in which the tensor is the last one now
    for name in sorted(parameters, key=lambda name: order.index(name) if name in order else len(order)):
        parameters[name] = parameters.pop(name)
    _put_list_back(module)


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict that a masked model would have after `squash_mask`: plain names, masked values, no masks.

    A model without masks loads this state dict, and `from_pretrained` loads what `save_pretrained(...,
    state_dict=...)` writes of it. A masked model loads a dense state dict too, even with `strict=True`; its masks stay
    as they are.

    Raises:
        SparsityError: A mask is on top of another parametrization. Squash a deep copy of the model instead.

    >>> from sparsekit_ao import ScopeSparsifier, export
    >>> model = nn.Sequential(nn.Linear(8, 4))
    >>> sparsifier = ScopeSparsifier(0.5)
    >>> sparsifier.prepare(model)
    >>> sparsifier.step()
    >>> sorted(export.dense_state_dict(model)), int((export.dense_state_dict(model)["0.weight"] == 0).sum())
    (['0.bias', '0.weight'], 16)
    """
    return dense_state_dict_of(model, select)


def dense_state_dict_of(model: nn.Module, masked_weight: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Return the `dense_state_dict` of a model, with the values that `masked_weight(weight, mask)` computes."""
    masked: dict[int, Tensor] = {}

    def make_dense(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in parametrized_names(module):
            mask = find_mask(module, name)
            if mask is None:
                continue
            if len(_chain(module, name)) > 1:
                raise SparsityError(
                    f"dense_state_dict: {prefix}{name} has another parametrization beside its mask; use "
                    "squash_mask(model=copy.deepcopy(model)) and save the copy"
                )
            original = state.pop(f"{prefix}parametrizations.{name}.original")
            for buffer in mask.state_dict():
                state.pop(f"{prefix}parametrizations.{name}.0.{buffer}", None)
            if id(mask) not in masked:  # a tied parameter has one mask under all of its names
                masked[id(mask)] = masked_weight(original, placed_like(mask.mask, original)).detach()
            state[f"{prefix}{name}"] = masked[id(mask)]

    # The hook of a module gets the names of the state dict, which wrappers (activation checkpointing) change.
    owners = [m for m in checked_model(model, "dense_state_dict").modules() if parametrized_names(m)]
    handles = [m.register_state_dict_post_hook(make_dense) for m in owners]
    try:
        return model.state_dict()
    finally:
        for handle in handles:
            handle.remove()


def _take_dense(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Rename the entries of a dense state dict, so that a masked module loads its weight and keeps its mask."""
    for name in parametrized_names(module):
        mask, key = find_mask(module, name), f"{prefix}parametrizations.{name}"
        if mask is None or f"{prefix}{name}" not in state_dict or len(_chain(module, name)) > 1:
            continue
        state_dict[f"{key}.original"] = weight = state_dict.pop(f"{prefix}{name}")
        vars(mask)["_from_dense"] = f"{key}.0.mask" not in state_dict  # then the mask is not loaded
        for buffer, value in mask.state_dict().items():
            if value.is_meta and not weight.is_meta:  # `assign=True` brings the weight, and no `_apply` follows
                value = torch.ones(value.shape, dtype=value.dtype, device=weight.device)
            state_dict.setdefault(f"{key}.0.{buffer}", value)


def _dense_hooks(module: nn.Module) -> list[int]:
    """Return the ids of the `_take_dense` hooks among the hooks that run before a state dict is loaded."""
    return [k for k, h in module._load_state_dict_pre_hooks.items() if getattr(h, "hook", h) is _take_dense]


def _chain(module: nn.Module, tensor_name: str) -> parametrize.ParametrizationList:
    """Return the parametrizations of a tensor, the lowest first."""
    chain = module.parametrizations[tensor_name]  # type: ignore[index]
    assert isinstance(chain, parametrize.ParametrizationList)
    return chain


def apply_parametrizations(layers: list[nn.Module], originals: list[Tensor]) -> Tensor:
    """Return what parametrizations compute from parameters, in eval mode and without gradient."""
    if not layers:
        return originals[0]
    training = [layer.training for layer in layers]
    try:  # eval mode, because spectral_norm changes its state in train mode
        with torch.no_grad():
            x: Tensor = layers[0].eval()(*originals)
            for layer in layers[1:]:
                x = layer.eval()(x)
    finally:
        for layer, mode in zip(layers, training, strict=True):
            layer.train(mode)
    return x


def _keep_list_outside(module: nn.Module) -> None:
    """Keep the list of weights of a parametrized recurrent module outside of the module."""
    # They fill it with the computed weights at each forward pass, and `copy.deepcopy` of such tensors fails.
    if isinstance(module, nn.RNNBase) and "_flat_weights" in vars(module):
        _LISTS[module] = vars(module).pop("_flat_weights")
        # parametrize made this class for the module, and only its deep copies share it. A copy fills a list of its own
        # at its first forward pass.
        type(module)._flat_weights = property(lambda m: _LISTS.get(m, []), _LISTS.__setitem__)  # type: ignore


def _put_list_back(module: nn.Module) -> None:
    """Give a recurrent module that is no longer parametrized its list of parameters; leave other modules alone."""
    if isinstance(module, nn.RNNBase) and not hasattr(module, "_flat_weights"):
        _LISTS.pop(module, None)
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
