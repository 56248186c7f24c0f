"""`WeightMask`, the parametrization that masks a weight, and how it is registered, removed and saved.

Masks are filled in place; only `.to()` and sharding replace the tensor. The gradient belongs to the mask that the
forward pass used, so autograd saves a copy of the mask, which a later `step` does not change. On a CPU the copy has the
weight's dtype and is kept for later forward passes, because allocating that memory costs more than masking the weight.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..distributed import is_placed_like, is_sharded, placed_like, refuse_gathered, without_fsdp_class
from ..errors import SparsityError, checked_model
from ..torch_ao import FakeSparsity

# On CPU in eager mode `where` with a bool mask takes five times as long as a product in these dtypes.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The lists of weights that masked recurrent modules keep, outside of the modules: see `_keep_list_outside`.
_LISTS: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def select(weight: Tensor, mask: Tensor) -> Tensor:
    """Return the weight where the mask is True (or positive) and exactly 0 elsewhere, differentiable in the weight.

    Elements are selected, not multiplied: a dropped one is exactly 0 in forward and backward, even where the weight is
    NaN or infinite. In eager mode the mask may be written before the backward pass, since autograd saves a copy of it.
    The copy lives as long as the graph; it takes one byte per element, or on a CPU as much as the weight. Compiled code
    saves the mask itself, and torch raises an error if it was written before the backward pass.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return _selected(weight, _converted(mask, weight.dtype) if _takes_floats(weight) else mask)


def _selected(weight: Tensor, mask: Tensor) -> Tensor:
    """Do as `select`, with a mask that is not written before backward, in the weight's dtype if `_takes_floats`."""
    if _takes_floats(weight):
        return torch.ops.aten.threshold_backward(weight, mask, 0)
    return torch.where(mask != 0, weight, 0)


def _takes_floats(weight: Tensor) -> bool:
    """Return whether a weight is selected by a mask of its own dtype, as on a CPU in eager mode."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not is_traced and weight.device.type == "cpu" and weight.dtype in FLOATS and not is_sharded(weight)


def _converted(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in a dtype, in fresh memory if autograd may save it."""
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)  # three times as fast to convert
    return mask.to(dtype, copy=torch.is_grad_enabled())


class _Kept(NamedTuple):
    """A contiguous copy of the mask of an earlier forward pass, and its conversion. Neither is ever written."""

    mask: Tensor
    converted: Tensor

    def is_of(self, mask: Tensor, dtype: torch.dtype) -> bool:
        """Return whether the mask still has these values. Its version misses some writes (through `.data`, say)."""
        if self.converted.dtype != dtype or self.mask.dtype != mask.dtype:
            return False
        pair = [mask, self.mask]
        size = mask.element_size()
        if mask.is_contiguous() and not (mask.numel() * size % 8 or mask.storage_offset() * size % 8):
            pair = [each.view(-1).view(torch.int64) for each in pair]  # eight bools are compared at once
        return torch.equal(*pair)


def marked(weight: Tensor) -> Tensor:
    """Return a masked weight. A leaf gets a mark, so that `structure` does not take it for a parameter."""
    if not torch.compiler.is_compiling() and weight.is_leaf:
        weight.is_masked_weight = True  # type: ignore[attr-defined]
    return weight


class WeightMask(FakeSparsity):
    """Mask a weight: a `torch_ao.FakeSparsity` that compiles, keeps dtypes and saves its mask.

    Args:
        mask: A tensor of the weight's shape, bool or 0 and 1 in the weight's dtype. It becomes the buffer `mask`, which
            is only ever filled in place.

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
    _kept: _Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight with dropped elements exactly zero, in its own shape and dtype."""
        return marked(_selected(x, self.mask_for(x)))

    def mask_for(self, x: Tensor) -> Tensor:
        """Return the mask in a form that autograd may save, placed like the weight; on a CPU, in the weight's dtype.

        Raises:
            SparsityError: The shapes of mask and weight differ.
        """
        if self.mask.shape != x.shape:
            raise SparsityError(f"mask {tuple(self.mask.shape)} does not fit the weight {tuple(x.shape)}")
        mask = placed_like(self.mask, x)
        if not _takes_floats(x):
            return mask
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by vmap or grad, say
        if type(mask) is not Tensor or is_transformed or (mask.dtype == x.dtype and not torch.is_grad_enabled()):
            return _converted(mask, x.dtype)
        kept = self._kept  # read once, since several threads may run the module
        if kept is None or not kept.is_of(mask, x.dtype):
            with torch.inference_mode(False), torch.no_grad():  # a later pass may save what is made in this one
                values = mask.clone(memory_format=torch.contiguous_format)
                kept = self._kept = _Kept(values, values if values.dtype == x.dtype else _converted(values, x.dtype))
        return kept.converted

    def __getstate__(self) -> dict[str, Any]:
        """Return everything except the copy that is kept for forward passes."""
        return {k: v for k, v in self.__dict__.items() if k != "_kept"}

    def _apply(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Apply as in any module. A mask from the meta device then keeps everything, since it had no values there."""
        was_meta, self._kept = self.mask.is_meta, None
        super()._apply(*args, **kwargs)
        if was_meta and not self.mask.is_meta:
            self.mask.fill_(True)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """Load as in any module. A whole mask can be loaded into a sharded one, and the reverse."""
        for name, own in self.named_buffers():
            saved = state_dict.get(f"{prefix}{name}")
            if isinstance(saved, Tensor) and saved.shape == own.shape:
                state_dict = {**state_dict, f"{prefix}{name}": placed_like(saved, own)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def shard_like(self, weight: Tensor) -> None:
        """Shard the mask over the ranks as its weight is."""
        self.mask = placed_like(self.mask, weight)

    def right_inverse(self, x: Tensor) -> Tensor:
        """Return the dense weight to store when a value is assigned to the masked weight: the value itself."""
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
    """Return the parametrized tensors of a module; a wrapper that passes on attributes of its module has none."""
    if isinstance(module, torch.jit.ScriptModule):  # it has other dicts
        return []
    found = module._modules.get("parametrizations")
    return list(found) if isinstance(found, nn.ModuleDict) else []


def under_all_names(
    model: nn.Module, masks: Sequence[tuple[nn.Module, str, WeightMask]]
) -> list[tuple[nn.Module, str, WeightMask]]:
    """Return the masks, (module, tensor name, mask) each, and entries for the other names of tied parameters."""
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
    """Return the other places of the masks of these tensors: (module, tensor name) of tied parameters."""
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
    """Register masks, (module, tensor name, mask) each, on top of other parametrizations of the tensors.

    If anything fails inside, none of them is registered.
    """
    order = [(module._parameters, list(module._parameters)) for module, _, _ in masks]
    try:
        for module, name, mask in masks:
            register(module, name, mask)
        yield
    except BaseException:
        for module, name, mask in masks:
            if find_mask(module, name) is mask:
                remove_mask(module, name)
        for parameters, names in order:
            for name in names:
                parameters[name] = parameters.pop(name)
        raise


def register(module: nn.Module, tensor_name: str, mask: WeightMask, at: int = -1) -> None:
    """Register a mask on top of all other parametrizations of the tensor, or after the first `at` of them."""
    if at >= 0 and parametrize.is_parametrized(module, tensor_name):
        _chain(module, tensor_name).insert(at, mask)
    else:
        parametrize.register_parametrization(module, tensor_name, mask, unsafe=True)
    _keep_list_outside(module)
    if not _dense_hooks(module):
        module.register_load_state_dict_pre_hook(_take_dense)


def live_mask(module: nn.Module, tensor_name: str, tensor_fqn: str) -> WeightMask | None:
    """Return the mask on a tensor, or None, to be read or written; it is first sharded like the tensor."""
    found = find_mask(module, tensor_name)
    if found is None:
        return None
    chain = _chain(module, tensor_name)
    weight: Any = chain.original if chain.is_tensor else chain.original0
    if is_sharded(found.mask):
        refuse_gathered(tensor_fqn, weight, found.mask)
    if weight.is_meta and not found.mask.is_meta:
        raise SparsityError(
            f"{tensor_fqn} has no values, since it was moved to the meta device or offloaded after prepare; load the "
            "weights without accelerate's offloading, or use prune(model, ..., inplace=True), without masks"
        )
    if is_sharded(weight) and not is_placed_like(found.mask, weight):
        if layers := below(module, tensor_name):
            raise SparsityError(
                f"{tensor_fqn}: {type(layers[0]).__name__} is below its mask, and its parameters are sharded "
                "over ranks. Remove that parametrization before fully_shard, or leave the tensor out."
            )
        found.shard_like(weight)
    return found


def dense_weight(module: nn.Module, tensor_name: str) -> Tensor:
    """Return the weight below the mask: the parameter itself, or the result of parametrizations below the mask."""
    chain = _chain(module, tensor_name)
    if isinstance(chain[0], WeightMask):
        return chain.original.detach()
    return through(below(module, tensor_name), parameters_under(module, tensor_name)).detach()


def parameters_under(module: nn.Module, tensor_name: str) -> list[Tensor]:
    """Return the parameters of a parametrized tensor; several only if parametrizations below the mask have them."""
    chain = _chain(module, tensor_name)
    return [chain.original] if chain.is_tensor else [getattr(chain, f"original{i}") for i in range(chain.ntensors)]


def used_weight(module: nn.Module, tensor_name: str) -> Tensor:
    """Return the values that the forward pass uses, after the mask and all parametrizations, without gradient."""
    if not parametrize.is_parametrized(module, tensor_name):
        return getattr(module, tensor_name).detach()
    return through(list(_chain(module, tensor_name)), parameters_under(module, tensor_name)).detach()


def shape_of(module: nn.Module, tensor_name: str) -> tuple[int, ...]:
    """Return the shape of a tensor, masked or not, without computing the tensor."""
    weight_mask = find_mask(module, tensor_name)
    return tuple((getattr(module, tensor_name) if weight_mask is None else weight_mask.mask).shape)


def parameter_under(module: nn.Module, tensor_name: str) -> Tensor:
    """Return the (first) parameter of a masked tensor."""
    return parameters_under(module, tensor_name)[0]


def below(module: nn.Module, tensor_name: str) -> list[nn.Module]:
    """Return the parametrizations below the mask of a tensor, the lowest first."""
    layers = list(_chain(module, tensor_name))
    return layers[: next(i for i, p in enumerate(layers) if isinstance(p, WeightMask))]


def is_on_parameter(module: nn.Module, tensor_name: str) -> bool:
    """Return whether the mask is on the parameter itself, with no other parametrization below it."""
    return not below(module, tensor_name)


def is_parameter(module: nn.Module, tensor_name: str) -> bool:
    """Return whether a tensor is a parameter with at most a mask on it."""
    if not parametrize.is_parametrized(module, tensor_name):
        return True
    return find_mask(module, tensor_name) is not None and is_on_parameter(module, tensor_name)


def remove_mask(module: nn.Module, tensor_name: str) -> None:
    """Take the mask away and leave the parameters as they are."""
    chain = _chain(module, tensor_name)
    if not any(find_mask(module, n) for n in list(module.parametrizations) if n != tensor_name):  # type: ignore[arg-type]
        for k in _dense_hooks(module):
            del module._load_state_dict_pre_hooks[k]
    if len(chain) > 1:
        del chain[len(below(module, tensor_name))]
        return
    # Deep copies share the class that parametrize made for the module, and removing edits it: copy the class first.
    with without_fsdp_class(module):
        kind = type(module)
        namespace = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, namespace)
        parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=False)
    _put_list_back(module)


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict that a masked model would have after `squash_mask`: plain names, masked values, no masks.

    A model without masks loads it, and so does `from_pretrained` after `save_pretrained(..., state_dict=...)`. A masked
    model loads a dense state dict too, even with `strict=True`; its masks stay as they are.

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
    """Return the `dense_state_dict` with values that a function computes from a weight and its mask."""
    masked: dict[int, Tensor] = {}

    def put(module: nn.Module, found: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in parametrized_names(module):
            mask = find_mask(module, name)
            if mask is None:
                continue
            if not is_on_parameter(module, name) or len(_chain(module, name)) > 1:
                raise SparsityError(
                    f"dense_state_dict: {prefix}{name} has another parametrization beside its mask; use "
                    "squash_mask(model=copy.deepcopy(model)) and save the copy"
                )
            original = found.pop(f"{prefix}parametrizations.{name}.original")
            for key in [k for k in found if k.startswith(f"{prefix}parametrizations.{name}.")]:
                del found[key]
            if id(mask) not in masked:  # a tied parameter has it under each of its names
                masked[id(mask)] = masked_weight(original, placed_like(mask.mask, original)).detach()
            found[f"{prefix}{name}"] = masked[id(mask)]

    # A module's hook knows the names in the state dict, which wrappers (activation checkpointing) change.
    owners = [m for m in checked_model(model, "dense_state_dict").modules() if parametrized_names(m)]
    handles = [m.register_state_dict_post_hook(put) for m in owners]
    try:
        return model.state_dict()
    finally:
        for handle in handles:
            handle.remove()


def _take_dense(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Let a masked module load the state dict of a dense one: the weight is loaded, the mask stays."""
    for name in parametrized_names(module):
        mask, key = find_mask(module, name), f"{prefix}parametrizations.{name}"
        if mask is None or f"{prefix}{name}" not in state_dict or len(_chain(module, name)) > 1:
            continue
        state_dict[f"{key}.original"] = state_dict.pop(f"{prefix}{name}")
        for buffer, value in mask.state_dict().items():
            state_dict.setdefault(f"{key}.0.{buffer}", value)


def _dense_hooks(module: nn.Module) -> list[int]:
    """Return the ids of this file's hooks among those that run before a state dict is loaded."""
    return [k for k, h in module._load_state_dict_pre_hooks.items() if getattr(h, "hook", h) is _take_dense]


def _chain(module: nn.Module, tensor_name: str) -> parametrize.ParametrizationList:
    chain = module.parametrizations[tensor_name]  # type: ignore[index]
    assert isinstance(chain, parametrize.ParametrizationList)
    return chain


def through(layers: list[nn.Module], originals: list[Tensor]) -> Tensor:
    """Return the result of parametrizations for parameters, in eval mode."""
    if not layers:
        return originals[0]
    training = [layer.training for layer in layers]
    try:  # eval mode, since spectral_norm changes its state in train mode
        with torch.no_grad():
            x: Tensor = layers[0].eval()(*originals)
            for layer in layers[1:]:
                x = layer.eval()(x)
    finally:
        for layer, mode in zip(layers, training, strict=True):
            layer.train(mode)
    return x


def _keep_list_outside(module: nn.Module) -> None:
    """Keep the list of weights of a parametrized recurrent module outside of it; other modules stay as they are.

    `nn.RNN`, `nn.LSTM` and `nn.GRU` fill it with the computed weights at each forward pass, and `copy.deepcopy` of a
    module that holds such tensors fails.
    """
    if isinstance(module, nn.RNNBase) and "_flat_weights" in vars(module):
        _LISTS[module] = vars(module).pop("_flat_weights")
        # a copy fills its own list at its first forward pass; this class belongs to the module alone
        type(module)._flat_weights = property(lambda m: _LISTS.get(m, []), _LISTS.__setitem__)  # type: ignore


def _put_list_back(module: nn.Module) -> None:
    """Give a recurrent module that is no longer parametrized its list of parameters; others stay as they are."""
    if isinstance(module, nn.RNNBase) and not hasattr(module, "_flat_weights"):
        _LISTS.pop(module, None)
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
