"""Running a user's model on batches and example inputs, and finding tensors in nested arguments and outputs.

Tuples, lists, mappings and dataclasses are searched for tensors. Objects of other types (such as a cache) are not
inspected; `opaque_in` lists them.
"""

import contextlib
import copy
import dataclasses
import enum
import hashlib
import importlib
import inspect
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import SparsityError

Forward = Callable[[nn.Module, Any], Any]
TokenMask = str | Callable[[Any], Tensor] | Literal[False] | None  # a key or function of a batch; False: all count

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, torch.dtype, torch.device, torch.Size)


def check_example(model: nn.Module, example_inputs: Any, caller: str) -> None:
    """Raise where example inputs are several batches, or arguments that the model's forward does not take."""
    args, kwargs = arguments(example_inputs)
    is_of_dicts = isinstance(example_inputs, list) and all(isinstance(one, Mapping) for one in example_inputs)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as e:
        why: str | None = str(e)
    except ValueError:  # no signature is known
        why = None
    else:
        why = "a list of dicts" if is_of_dicts else None
    if why is not None:
        kind = type(example_inputs).__name__
        raise SparsityError(
            f"{caller}: example_inputs is one batch, a tensor, a tuple of positional arguments or a dict of keyword "
            f"arguments, and {type(model).__name__} does not take this {kind} of {len(args) + len(kwargs)} ({why}); "
            "if it is a list of batches, give the first, batches[0]; if it is one argument, give a tuple: (images,)"
        )


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a forward."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def call(model: nn.Module, batch: Any) -> Any:
    """Run the model on one batch: dicts are keyword arguments, tuples and lists positional ones."""
    args, kwargs = arguments(batch)
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs)  # an exported model is not a module
    except TypeError as e:  # such as where a data loader gives labels too
        how = f"the keyword arguments {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} positional arguments"
        raise SparsityError(
            f"calibration data: a batch (a {type(batch).__name__}) is passed to {type(model).__name__} as {how}, which "
            f"its forward does not take ({e}). Give forward, such as forward=lambda model, batch: model(batch[0])"
        ) from None
    except ValueError:  # no signature is known
        pass
    return model(*args, **kwargs)


def check_batches(batches: Any, token_mask: TokenMask, forward: object, caller: str) -> None:
    """Raise unless batches can be iterated over, and `token_mask` and `forward` are of the right kinds."""
    if isinstance(batches, Tensor):
        raise SparsityError(
            f"{caller}: batches must be a list of batches, got one tensor {tuple(batches.shape)}, whose rows would be "
            "taken one by one; give [batch]"
        )
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not is_iterable or isinstance(batches, (str, bytes, Mapping)):
        raise SparsityError(
            f"{caller}: batches must be a list of batches or a data loader, got {type(batches).__name__}"
        )
    is_switch = token_mask is None or token_mask is False
    if not is_switch and not isinstance(token_mask, str) and not callable(token_mask):
        raise SparsityError(
            f"{caller}: token_mask must be a key of the batches, a function, or False, got {token_mask!r}"
        )
    if forward is not None and not callable(forward):
        raise SparsityError(f"{caller}: forward must be a function (model, batch) -> output, got {forward!r}")


def checked_list(batches: Any, forward: Forward | None, caller: str, token_mask: TokenMask = None) -> list[Any]:
    """The batches in a list; raise where there are none, or one that has no rows."""
    check_batches(batches, token_mask, forward, caller)
    kept = list(batches)
    if not kept:
        raise SparsityError(f"{caller}: there are no batches; an iterator that was used up before gives none")
    return [checked_batch(batch, forward, caller) for batch in kept]


def checked_batch(batch: Any, forward: Forward | None, caller: str) -> Any:
    """The batch with decoder inputs that are no other inputs too; raise where it has no rows, or numbers only."""
    leaves = _pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise SparsityError(f"{caller}: a batch has no rows, only tensors of shape {shapes}; leave empty batches out")
    if forward is None and leaves and all(isinstance(leaf, (int, float)) for leaf in leaves):
        what = f"the number {batch}" if leaves == [batch] else f"a {type(batch).__name__} of numbers"
        raise SparsityError(
            f"{caller}: a batch must have tensors, got {what}; give token ids as "
            "batches=[torch.tensor([ids])], a tensor [batch, tokens] for each batch"
        )
    others = {id(x) for x in _inputs(batch, False).values()}
    shared = {key: x.view_as(x) for key, x in _inputs(batch, True).items() if id(x) in others}
    if shared:
        batch = copy.copy(batch)  # of its own class, whatever its constructor takes
        batch.update(shared)
    return batch


class TokenMasks:
    """The masks of tokens of an encoder and a decoder, bool [batch, tokens] (or [tokens]), or None where all count.

    Inputs of the decoder and what is computed from them, as `Products` follows it, hold tokens of the decoder. All
    other tensors hold those of the encoder, such as what keys and values of cross-attention are computed from.
    """

    def __init__(self, encoder: Tensor | None, decoder: Tensor | None, outputs: Tensor | None) -> None:
        self.masks = encoder, decoder, outputs  # the last is that of what the model returns
        self.marked = WeakTensorKeyDictionary()  # the tensors that hold tokens of the decoder

    def mark(self, value: Any) -> None:
        """Note that tensors hold tokens of the decoder."""
        for _, tensor in tensors_in("", value):
            self.marked[tensor] = True

    def of_decoder(self, value: Any) -> bool:
        """Return whether any tensor holds tokens of the decoder."""
        return bool(self.marked) and any(tensor in self.marked for _, tensor in tensors_in("", value))


def _inputs(batch: Any, of_decoder: bool) -> dict[str, Any]:
    """Return the tensors of a mapping that are inputs of a decoder beside an encoder, or all others."""
    items = [(str(k), x) for k, x in batch.items() if isinstance(x, Tensor)] if isinstance(batch, Mapping) else []
    return {k: x for k, x in items if (k == "labels" or k.startswith("decoder_")) == of_decoder}


def _attention_mask(inputs: Mapping[str, Tensor], key: str) -> Tensor | None:
    """Return the mask of zeros and ones of this key, if another input has its shape [batch, tokens]."""
    mask, shapes = inputs.get(key), [x.shape[:2] for name, x in inputs.items() if name != key]
    is_mask = mask is not None and mask.ndim == 2 and mask.shape in shapes and bool(((mask == 0) | (mask == 1)).all())
    return mask if is_mask else None


def token_masks_of(batch: Any, token_mask: TokenMask, caller: str) -> TokenMasks:
    """Return which tokens of a batch count; by default the attention masks say so."""
    others, of_decoder = _inputs(batch, False), _inputs(batch, True)
    mask = _attention_mask(others, "attention_mask") if token_mask is None else None
    if isinstance(token_mask, str):
        try:
            mask = batch[token_mask]
        except (KeyError, IndexError, TypeError):
            keys = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "and no dict"
            kind = type(batch).__name__
            raise SparsityError(
                f"{caller}: token_mask={token_mask!r} is a key of each batch, but a batch is a {kind} {keys}"
            ) from None
    elif callable(token_mask):
        mask = token_mask(batch)
    masks = TokenMasks(mask, mask, mask)
    if token_mask is None and of_decoder:
        decoder = _attention_mask(of_decoder, "decoder_attention_mask")
        masks = TokenMasks(mask, decoder, mask if [*of_decoder] == ["labels"] else decoder)
        masks.mark(of_decoder)
    for mask in masks.masks[:2]:
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim in (1, 2) and bool(mask.any())):
            what = f"one of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            empty = ", of which no token counts" if isinstance(mask, Tensor) and not mask.any() else ""
            raise SparsityError(
                f"{caller}: a token mask must be a tensor [batch, tokens], got {what}{empty}; leave such a batch "
                "out, or give token_mask=False to count all tokens"
            )
    return masks


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside, without caches of generation; afterwards every module is in the mode that it had.

    The fused attention of torch.nn is off too, whose blocks pass on nested tensors if there is padding.
    """
    modes = [(m, m.training) for m in model.modules()]
    owned = (getattr(m, "config", None) for m, _ in modes)
    configs: list[Any] = [config for config in owned if getattr(config, "use_cache", None) is True]
    try:
        model.eval()
        for config in configs:
            config.use_cache = False
        with unfused_attention():
            yield
    finally:
        for module, mode in modes:
            if type(module).train is not nn.Module.train:  # which may do more, such as take merged weights apart
                module.train(mode)
        for module, mode in modes:
            module.training = mode
        for config in configs:
            config.use_cache = True


@contextlib.contextmanager
def kept_states(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and plain attributes of all modules afterwards, such as counters of a forward.

    What a forward changes inside of lists, dicts and other objects stays, and so does what lazy modules become.
    """
    states = [(m, type(m), {**vars(m)}, dict(m._buffers.items())) for m in model.modules()]
    held = [value for _, _, *own in states for one in own for value in one.values() if isinstance(value, Tensor)]
    values = [(tensor, tensor.clone()) for tensor in held if not tensor.is_meta and not is_lazy(tensor)]
    try:
        yield
    finally:
        for tensor, value in values:
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
            if not torch.equal(tensor, value):
                tensor.copy_(value)
        for module, kind, attributes, own in states:
            if type(module) is not kind:
                continue
            for name in [name for name, _ in module._buffers.items() if name not in own]:
                del module._buffers[name]
            for name, kept in own.items():
                module._buffers[name] = kept
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the generators of torch (on all devices), numpy and Python."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def seeded(tensors: Iterable[Tensor], seed: int = 0) -> Iterator[None]:
    """Seed all generators, torch's of the CPU and of the tensors' GPUs; their states are restored afterwards."""
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with kept_generators():
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def import_dynamo() -> None:
    """Import what torch's optimizers and fake tensors import, which adds to the environment of the process."""
    was_set = "TORCHINDUCTOR_CACHE_DIR" in os.environ
    importlib.import_module("torch._dynamo")
    if not was_set:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """Run the single operations of torch.nn's attention inside, and no fused one of them all."""
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)


def tensors_in(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor, with its place: `output.a[0]`."""
    return ((at, leaf) for at, leaf in _leaves(place, value) if isinstance(leaf, Tensor))


def copied_tensors(value: Any, device: Any = None, *, copies: bool = True, objects: bool = True) -> Any:
    """Return nested arguments with tensors on a device; `copies` copies tensors, and `objects` other objects too.

    Objects that cannot be copied, such as those that hold a lock or a result of autograd, stay the same objects.
    """

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(leaf.device if device is None else device, copy=copies)
        if copies and objects and not isinstance(leaf, nn.Module):
            with contextlib.suppress(Exception):
                return copy.deepcopy(leaf)
        return leaf

    return _pytree.tree_map(copied, value)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor of nested arguments or outputs, or None where there is none."""
    return next((tensor for _, tensor in tensors_in("", value)), None)


def output_error(dense: Any, output: Any, token_mask: Tensor | None = None) -> float:
    """Return the relative error of a model's output Y, ||Y - Y_dense|| / ||Y_dense - its mean||.

    Y is the first output that differs, among the tensors of floats; losses, which have one element, do not count. The
    mean is over all rows, so outputs that are the same for every input have an error of 1; a single row is compared
    with 0. NaN if there is no such tensor. Rows that a mask [batch, tokens] leaves out do not count.

    >>> output_error(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[2.0, 5.0], [2.0, 5.0]]))
    1.0
    """
    both = zip(tensors_in("", dense), tensors_in("", output), strict=False)
    pairs = [(a, b) for (_, a), (_, b) in both if a.shape == b.shape and a.is_floating_point() and a.numel() > 1]
    errors = (_tensor_error(a, b, token_mask) for a, b in pairs)
    return next((error for error in errors if error != 0), 0.0 if pairs else math.nan)


def _tensor_error(wanted: Tensor, got: Tensor, token_mask: Tensor | None) -> float:
    if token_mask is not None and token_mask.shape == wanted.shape[: token_mask.ndim] and wanted.ndim > token_mask.ndim:
        wanted, got = (t[token_mask.to(t.device).bool()] for t in (wanted, got))
    features = 1 if wanted.ndim > 3 else wanted.ndim - 1  # channels of images, else the last dimension
    rows = [d for d in range(wanted.ndim) if d != features] or [0]
    is_single = math.prod(wanted.shape[d] for d in rows) == 1
    mean = 0.0 if is_single else wanted.mean(rows, keepdim=True, dtype=torch.float32)
    lost = spread = 0.0
    for k in range(len(wanted)):  # one by one, since logits are large
        lost += float((got[k : k + 1].float() - wanted[k : k + 1].float()).square().sum(dtype=torch.float64))
        spread += float((wanted[k : k + 1].float() - mean).square().sum(dtype=torch.float64))
    return math.sqrt(lost / spread) if spread else math.nan if lost else 0.0


def opaque_in(place: str, value: Any) -> list[str]:
    """Describe the objects that are not inspected and may contain tensors: `output[2], a list_iterator`."""
    leaves = ((at, leaf) for at, leaf in _leaves(place, value) if not isinstance(leaf, (Tensor, *_PLAIN)))
    return [f"{at}, a {type(leaf).__name__}" for at, leaf in leaves]


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{place}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for at, item in enumerate(value):
            yield from _leaves(f"{place}[{at}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _leaves(f"{place}.{f.name}", getattr(value, f.name))
    else:
        yield place, value


def keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator that depends on the key alone: all ranks draw the same numbers, and so does a resumed run.

    >>> a, b = keyed_generator(0, "fc.weight", 100), keyed_generator(0, "fc.weight", 100)
    >>> bool(torch.rand((), generator=a) == torch.rand((), generator=b))
    True
    """
    text = "\0".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number)
