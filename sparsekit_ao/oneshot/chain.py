"""The chain of a model's repeated blocks: how it is found, and how the inputs of a batch move through it.

The blocks of a model (a ModuleList, or a Sequential of equal modules) form a chain where each reads the first output
of the one before, and all other arguments are the same. The inputs of each block then follow from the outputs of the
one before, and the model as a whole runs on one batch only, to find the chain. Layers elsewhere are recorded by running
the model up to them.
"""

import copy
import dataclasses
import functools
import math
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..calibration import Target
from ..calibration.products import Place, Product
from ..calibration.recorder import Recording
from ..distributed import abandon_forward
from ..errors import SparsityError
from ..models.loading import Device, is_elsewhere, is_offloaded
from ..models.running import (
    Forward,
    TokenMask,
    call,
    check_batches,
    checked_list,
    eval_mode,
    output_error,
    seeded,
    token_mask_of,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(BaseException):  # not caught by `except Exception` in the user's forward
    """Raised by a hook when the rest of a forward pass is not needed."""


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """A model with its calibration data, and how it runs on them."""

    model: nn.Module
    batches: Sequence[Any]  # in a list, because the model runs on them several times
    forward: Forward | None  # None is `models.running.call`
    token_masks: Sequence[Tensor | None]  # the tokens that count in each batch, or None for all

    @classmethod
    def checked(
        cls, model: nn.Module, batches: Any, forward: Forward | None, token_mask: TokenMask, caller: str
    ) -> "CalibrationData":
        """Check the arguments of a user, and keep the batches in a list."""
        check_batches(batches, token_mask, forward, caller)
        kept = checked_list(batches, forward, caller)
        token_masks = [token_mask_of(batch, token_mask, caller) for batch in kept]
        return cls(model=model, batches=kept, forward=forward, token_masks=token_masks)

    def counted(self) -> str:
        """Return a text that says how many tokens count, or "" if all do."""
        masks = [mask for mask in self.token_masks if mask is not None]
        kept, total = sum(int(mask.bool().sum()) for mask in masks), sum(mask.numel() for mask in masks)
        return f"{kept:,} of {total:,} tokens count, by their mask" if kept < total else ""

    def output(self, index: int) -> Any:
        """Run the model on a copy of a batch, as it may change its inputs in place, with the batch's random numbers."""
        with seeded(self.model.parameters(), index):  # the dense model and the pruned one draw the same numbers
            return (self.forward or call)(self.model, copied_tensors(self.batches[index]))

    @torch.no_grad()
    def first_output(self) -> Any:
        """Return the output of the first batch in eval mode; None for a sharded model, which would stay gathered."""
        if is_elsewhere(self.model) and not is_offloaded(self.model):
            return None
        with eval_mode(self.model), seeded(self.model.parameters()):
            return self.output(0)

    def error_to(self, dense_output: Any) -> float:
        """Return the relative error of the first batch's output to that of the dense model; NaN if it has none."""
        return output_error(dense_output, self.first_output(), self.token_masks[0])

    def run(self, index: int) -> None:
        """Run the model on one batch, until a hook stops it."""
        try:
            self.output(index)
        except _Stop:
            abandon_forward(self.model)


def stop(*args: Any) -> None:
    """A forward hook after which the rest of the model does not run."""
    raise _Stop


@contextmanager
def _hooks(hooks: Iterable[tuple[nn.Module, Callable[..., None]]]) -> Iterator[None]:
    """Return a context in which each function `(module, args, kwargs)` is called before its module."""
    with ExitStack() as stack:
        for module, hook in hooks:
            # runs before hooks of FSDP2, which would leave weights gathered if this hook stops the forward pass
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        yield


def order(data: CalibrationData, targets: Sequence[Target]) -> tuple[list[tuple[Target, int]], list[Target], set[str]]:
    """Return (target, number of the tensor that it reads) in forward order, unreached targets, and repeated names."""
    reached: dict[str, tuple[Target, int]] = {}
    calls: Counter[str] = Counter()
    repeated: set[str] = set()
    last: tuple[Tensor, int] | None = None  # the tensor that the layer before has read, and its version
    reads = 0

    def reach(target: Target, x: Tensor) -> None:
        version = -1 if x.is_inference() else x._version  # a layer after a change in place reads something else
        nonlocal last, reads
        if last is None or last[0] is not x or last[1] != version or version < 0:
            last, reads = (x, version), reads + 1
        reached.setdefault(target.name, (target, reads))

    def take(target: Target, product: Product, place: Place) -> None:
        if target.adapter is not None and target.adapter.reads(product, place, target.shape) is not None:
            reach(target, product.read)
            repeated.add(target.name)  # nothing tells that no other product follows

    def hook(target: Target) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reach(
                target,
                next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), torch.empty(0, device="cpu")),
            )
            calls[target.name] += 1
            if calls[target.name] > 1:
                repeated.add(target.name)

        return before

    modules = [(t.adapter.module, hook(t)) for t in targets if t.adapter is not None]
    unread: Sequence[Target] = ()
    for _ in range(2):  # again where weights of layers that are not called may be read: `F.linear(x, self.fc.weight)`
        reached.clear()
        with _hooks(modules), Recording(unread, take=take):
            for index in range(len(data.batches)):
                data.run(index)
                calls.clear()
                if len(reached) == len(modules):
                    break
        unread = [replace(t, needs=("input_square",)) for t in targets if t.adapter and t.name not in reached]
        if not unread:
            break
    return list(reached.values()), [t for t in targets if t.name not in reached], repeated


def find_blocks(data: CalibrationData, layers: Sequence[nn.Module], name: str | None) -> list[nn.Module]:
    """Return the repeated blocks of a model if they form a chain, else an empty list."""
    blocks = _largest_list(data.model, layers, name)
    uses = Counter(id(m) for block in blocks for m in block.modules())
    uses.update(id(p) for block in blocks for p in block.parameters() if p.ndim > 1)  # may be tied between blocks
    used = [*layers, *(p for layer in layers for p in layer.parameters())]
    is_chain = bool(blocks) and not any(uses[id(one)] > 1 for one in used) and _is_chained(data, blocks)
    if name is not None and not is_chain:
        raise SparsityError(
            f"blocks={name!r} do not form a chain: each must be called once, in order, with the first output of the "
            "one before and otherwise the same arguments, and no layer may be part of two of them; leave blocks out "
            "to run the whole model instead"
        )
    return blocks if is_chain else []


def _largest_list(model: nn.Module, layers: Sequence[nn.Module], name: str | None) -> list[nn.Module]:
    """Return the blocks of the ModuleList or Sequential that holds most of the layers, or of the one called `name`."""
    if name is not None:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise SparsityError(f"blocks={name!r} is not a module of the model") from None
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            kind = type(module).__name__
            raise SparsityError(f"blocks={name!r} is a {kind}, not a ModuleList or Sequential")
        return list(module)
    ids = {id(layer) for layer in layers}
    lists: dict[int, list[nn.Module]] = {}  # {number of layers: the first list with that number}
    for m in model.modules():
        count = sum(id(x) in ids for x in m.modules())
        is_list = isinstance(m, nn.Sequential) and len({type(x) for x in m}) == 1 and 2 * count > len(ids)
        if (is_list or isinstance(m, nn.ModuleList)) and count > 1 and len(m) > 1:  # type: ignore[arg-type]
            lists.setdefault(count, list(m))  # type: ignore[call-overload]
    return lists[max(lists)] if lists else []


def _is_chained(data: CalibrationData, blocks: Sequence[nn.Module]) -> bool:
    """Return whether each batch calls each block once, in order, with the output before it and else equal arguments."""
    in_order, outputs = list(range(len(blocks))), _further_outputs_of_first_batch(data, blocks)
    if len(outputs) < len(blocks):
        return False

    called: list[int] = []
    common: Arguments = ((), {})  # what the first block gets beside the hidden states, and all others must get

    def add(k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal common
        own = next_arguments((args, kwargs), None)
        common = common if called else copied_tensors(own, objects=False)
        called.append(k if are_same(common, own) else -1)

    def hook(k: int) -> Callable[..., None]:
        return lambda module, args, kwargs: add(k, args, kwargs)

    def unchanged(k: int, *args: Any, **kwargs: Any) -> Any:
        add(k, args, kwargs)
        hidden = _hidden_of((args, kwargs))
        return hidden if outputs[k] is None else type(outputs[k])((hidden, *outputs[k]))

    # What blocks read is compared for the first batch only. Other batches run with blocks that return their input, if
    # that calls them in order, so that a model larger than memory is read once.
    for index in range(1, len(data.batches)):
        called.clear()
        with replaced(blocks, unchanged), suppress(Exception):
            data.run(index)
        if called != in_order:
            called.clear()
            with _hooks((block, hook(k)) for k, block in enumerate(blocks)):
                data.run(index)
        if called != in_order:
            return False
    return True


def _further_outputs_of_first_batch(data: CalibrationData, blocks: Sequence[nn.Module]) -> list[Any]:
    """Return each block's outputs after the first, or None without any. The list is shorter if they are not a chain."""
    outputs: list[Any] = []
    arguments: Arguments = ((), {})  # of the block that was called last, as copies
    expected: Arguments = ((), {})  # the same with the objects that the model passes, which are compared by identity
    called: list[int] = []
    is_running = is_broken = False

    # Each block runs twice: in the model, and here on copies of what the one before gave, as it will in the walk.
    def run(block: nn.Module) -> None:
        nonlocal arguments, expected, is_running
        is_running = True
        output, is_running = output_of(block, arguments), False
        outputs.append(output[1:] if type(output) in (tuple, list) else None)
        arguments, expected = (next_arguments(each, first_output(output)) for each in (arguments, expected))

    def before(k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal arguments, expected, is_broken
        if is_running or is_broken:
            return
        is_broken = k != len(called)
        called.append(k)
        if k == 0:
            arguments = copied_tensors((args, kwargs))
            expected = copied_tensors((args, kwargs), objects=False)
        elif not is_broken:
            run(blocks[k - 1])
            is_broken = not are_same(expected, (args, kwargs))

    def hook(k: int) -> Callable[..., None]:
        return lambda module, args, kwargs: before(k, args, kwargs)

    with _hooks((block, hook(k)) for k, block in enumerate(blocks)):
        data.run(0)
    if is_broken or len(called) < len(blocks):
        return []
    run(blocks[-1])
    return outputs


@contextmanager
def replaced(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which a call of block k is `forward(k, *args, **kwargs)`."""
    before = [vars(block).get("forward") for block in blocks]
    try:
        for k, block in enumerate(blocks):
            block.forward = functools.partial(forward, k)
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            del block.forward
            if own is not None:  # accelerate's
                block.forward = own


def captured(data: CalibrationData, block: nn.Module, index: int) -> Arguments:
    """Return what a block receives in the forward pass of one batch."""
    calls: list[Arguments] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(copied_tensors((args, kwargs)))
        raise _Stop

    with _hooks([(block, before)]):
        data.run(index)
    return calls[0]


@contextmanager
def calls_of(modules: Iterable[nn.Module], calls: list[Arguments]) -> Iterator[None]:
    """Return a context in which copies of the arguments of each module call are appended to `calls`."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(copied_tensors((args, kwargs), objects=False))

    with _hooks((module, before) for module in modules):
        yield


def output_of(block: nn.Module, arguments: Arguments) -> Any:
    """Run a block on copies of its arguments, which it may change in place (such as a cache of keys and values)."""
    args, kwargs = copied_tensors(arguments)
    return block(*args, **kwargs)


def copied_tensors(value: Any, device: Device = None, *, copies: bool = True, objects: bool = True) -> Any:
    """Return nested arguments with tensors on a device; `copies` copies tensors, and `objects` other objects too."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(leaf.device if device is None else device, copy=copies)
        return copy.deepcopy(leaf) if copies and objects and not isinstance(leaf, nn.Module) else leaf

    return _pytree.tree_map(copied, value)


def first_output(output: Any) -> Any:
    """Return what the next block reads of a block's output: the output itself, or the first of several."""
    return output[0] if isinstance(output, (tuple, list)) else output


def _hidden_of(arguments: Arguments) -> Any:
    """Return the first argument of a block, which is the output of the block before."""
    args, kwargs = arguments
    return args[0] if args else next(iter(kwargs.values()), None)


def next_arguments(arguments: Arguments, hidden: Any) -> Arguments:
    """Return the arguments of the next block: the first one is replaced by `hidden`."""
    args, kwargs = arguments
    if args:
        return (hidden, *args[1:]), kwargs
    first = next(iter(kwargs), None)
    return args, kwargs if first is None else {**kwargs, first: hidden}


class Kept:
    """Nested values by key, in memory (on `device` if given) or, beyond `limit` bytes, in temporary files."""

    def __init__(self, device: Device = None, limit: float | None = None) -> None:
        self._device, self._limit = device, math.inf if limit is None else limit
        self._values: dict[Hashable, Any] = {}
        self._bytes: dict[Hashable, int] = {}  # of those in memory
        self._used = 0  # the sum of these bytes
        self._files: dict[Hashable, str] = {}
        self._folder = ""

    def put(self, key: Hashable, value: Any) -> None:
        """Keep a value in place of the one before."""
        size = sum(leaf.nbytes for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))
        self._values.pop(key, None)
        self._used -= self._bytes.pop(key, 0)
        if self._used + size <= self._limit:
            self._values[key], self._bytes[key] = copied_tensors(value, self._device, copies=False), size
            self._used += size
            return
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="sparsekit_ao-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._files.setdefault(key, os.path.join(self._folder, str(len(self._files))))
        torch.save(value, path)

    def get(self, key: Hashable) -> Any:
        """The value of a key."""
        return self._values[key] if key in self._values else torch.load(self._files[key], weights_only=False)


class Stream:
    """The inputs of a block for every batch, at first those of `calls`; `advance` replaces them by the next block's.

    Blocks run on `device`, or with None where their inputs are.
    """

    def __init__(self, calls: Iterable[Arguments], kept: Kept, device: Device, like: "Stream | None" = None) -> None:
        self._kept, self._device = kept, device
        self._others: list[Hashable] = []  # the keys of the arguments that all blocks have in common
        for index, arguments in enumerate(calls):
            others = next_arguments(arguments, None)
            if like is not None and are_same(others, kept.get(like._others[index])):  # such as masks, kept once
                self._others.append(like._others[index])
            else:
                self._others.append((id(self), "others", index))
                kept.put(self._others[-1], others)
            self._put(index, _hidden_of(arguments))

    def __len__(self) -> int:
        return len(self._others)

    def _put(self, index: int, hidden: Any) -> None:
        self._kept.put((id(self), "hidden", index), hidden)

    def hidden(self, index: int) -> Any:
        """Return the output of the block before for a batch, on the device where blocks run."""
        return copied_tensors(self._kept.get((id(self), "hidden", index)), self._device, copies=False)

    def output(self, block: nn.Module, index: int) -> Any:
        """Return the output of a block for a batch. It runs on copies, as it may change inputs in place (a cache)."""
        others = self._kept.get(self._others[index])
        args, kwargs = copied_tensors(next_arguments(others, self.hidden(index)), self._device)
        return block(*args, **kwargs)

    def advance(self, block: nn.Module, is_last: bool = False) -> None:
        """Run a block on every batch, and take its outputs as the inputs of the next one."""
        for index in range(len(self)):
            output = self.output(block, index)
            self._put(index, copied_tensors(first_output(output)))  # a block may write all its outputs to one buffer
            if is_last:  # what follows may read any of its outputs
                self._kept.put((id(self), "outputs", index), output)

    def outputs(self, index: int) -> Any:
        """Return all outputs of the last block for a batch."""
        return copied_tensors(self._kept.get((id(self), "outputs", index)))


def are_same(a: Any, b: Any) -> bool:
    """Return whether nested arguments are equal: tensors and arrays by value, dataclasses by field, others by ==."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if any(isinstance(t, Tensor) and t.is_nested for t in (a, b)):
            return False
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(are_same, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(are_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a is b or bool(a == b)
