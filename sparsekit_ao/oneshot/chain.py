"""The chains of a model's repeated blocks: how they are found, and how the inputs of a batch move through one.

Blocks of a model (a ModuleList, or equal modules in a row of a Sequential) form a chain if each reads the first output
of the one before, and otherwise what the first block reads, or what it has made and the others pass on. The inputs of
each block then follow from the outputs of the one before, and the model runs once for each batch, to give the inputs of
the first one. Layers elsewhere are recorded by running the model up to them.
"""

import dataclasses
import functools
import itertools
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
from ..calibration.products import Place, Product, Products
from ..calibration.recorder import Recording
from ..distributed import abandon_forward
from ..errors import SparsityError
from ..models.loading import Device, is_elsewhere, is_offloaded
from ..models.running import (
    Forward,
    TokenMask,
    TokenMasks,
    call,
    checked_list,
    copied_tensors,
    eval_mode,
    output_error,
    seeded,
    tensors_in,
    token_masks_of,
)
from .identity import digest_of

_OF_ANY_MODULE = {*vars(nn.Module()), "forward"}  # names of attributes
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(BaseException):  # not caught by `except Exception` in the user's forward
    """Raised by a hook when the rest of a forward pass is not needed."""


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """A model with its calibration data, and how it runs on them."""

    model: nn.Module
    batches: Sequence[Any]  # in a list, because the model runs on them several times
    forward: Forward | None  # None is `models.running.call`
    token_masks: Sequence[TokenMasks]  # of each batch

    @classmethod
    def checked(
        cls, model: nn.Module, batches: Any, forward: Forward | None, token_mask: TokenMask, caller: str
    ) -> "CalibrationData":
        """Check the arguments of a user, and keep the batches in a list."""
        kept = checked_list(batches, forward, caller, token_mask)
        token_masks = [token_masks_of(batch, token_mask, caller) for batch in kept]
        return cls(model=model, batches=kept, forward=forward, token_masks=token_masks)

    def one_batch(self) -> tuple["CalibrationData", float, float]:
        """Return the data with the batch of median size alone; the size of all and of the largest, in such batches."""
        sizes = [sum(t.numel() for _, t in tensors_in("", batch)) or 1 for batch in self.batches]
        at = sorted(range(len(sizes)), key=sizes.__getitem__)[len(sizes) // 2]
        one = replace(self, batches=[self.batches[at]], token_masks=[self.token_masks[at]])
        return one, sum(sizes) / sizes[at], max(sizes) / sizes[at]

    def counted(self) -> str:
        """Return a text that says how many tokens count, or "" if all do."""
        masks = [mask for masks in self.token_masks for mask in {*masks.masks[:2]} if mask is not None]
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
        with eval_mode(self.model):
            return self.output(0)

    def error_to(self, dense_output: Any) -> float:
        """Return the relative error of the first batch's output to that of the dense model; NaN if it has none."""
        return output_error(dense_output, self.first_output(), self.token_masks[0].masks[2])

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

    def before(target: Target, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        reach(target, next(tensors, torch.empty(0, device="cpu")))
        calls[target.name] += 1
        if calls[target.name] > 1:
            repeated.add(target.name)

    modules = [(t.adapter.module, functools.partial(before, t)) for t in targets if t.adapter is not None]
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


def called_again(data: CalibrationData, targets: Sequence[Target]) -> set[str]:
    """Return the names of weights whose module some batch after the first calls more than once."""
    calls, found = Counter[str](), set[str]()

    def before(target: Target, *_: Any) -> None:
        calls[target.name] += 1
        found.update([target.name] if calls[target.name] > 1 else ())

    with _hooks((t.adapter.module, functools.partial(before, t)) for t in targets if t.adapter is not None):
        for index in range(1, len(data.batches) if targets else 0):
            calls.clear()
            data.run(index)
    return found


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Repeated blocks, each of which reads what the one before gave, and otherwise the same arguments as the first."""

    blocks: Sequence[nn.Module]
    # For each block after the first, {number of an argument: number of the output of the block before that it is}.
    links: Sequence[Mapping[int, int]]
    of_decoder: bool = False  # whether the hidden states are of a decoder's tokens, not of its encoder's


def find_chains(data: CalibrationData, layers: Sequence[nn.Module], name: str | None) -> list[Chain]:
    """Return the chains of blocks that have several of these layers, in forward order, or the one called `name`."""
    ids = {id(layer) for layer in layers}
    lists = _lists(data.model, ids) if name is None else [_list_of(data.model, name)]
    found = list[Chain]()
    while lists:  # lists inside of blocks are tried if the blocks around them are no chain
        tried = _linked(data, lists)
        found += [Chain(blocks=links.blocks, links=links.links) for links in tried if links.is_chain]
        broken = [block for links in tried if not links.is_chain and name is None for block in links.blocks]
        lists = [blocks for block in broken for blocks in _lists(block, ids)]
    uses = Counter(id(m) for chain in found for block in chain.blocks for m in block.modules())
    uses.update(id(p) for chain in found for block in chain.blocks for p in block.parameters() if p.ndim > 1)
    used = {id(one) for layer in layers for one in (layer, *layer.parameters()) if uses[id(one)] > 1}  # tied ones
    found = [c for c in found if used.isdisjoint(id(x) for b in c.blocks for x in (*b.modules(), *b.parameters()))]
    if name is not None and not found:
        raise SparsityError(
            f"layers={name!r} do not form a chain: each must be called once, in order, with outputs of the one before "
            "and otherwise the same arguments, and no layer may be part of two of them; leave layers out to run the "
            "whole model instead"
        )
    if not found or (len(found) < 2 and not data.token_masks[0].marked):
        return found
    masks = data.token_masks[0]
    with Products({}, lambda *_: None, lambda: masks):
        calls = captured(data, [chain.blocks[0] for chain in found], 0)
    return [replace(found[k], of_decoder=masks.of_decoder(_pytree.tree_leaves(of)[0])) for k, of in calls.items()]


def _list_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules of the ModuleList or Sequential of this name."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise SparsityError(f"layers={name!r} is not a module of the model") from None
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        raise SparsityError(f"layers={name!r} is a {type(module).__name__}, not a ModuleList or Sequential")
    return list(module)


def _lists(module: nn.Module, ids: set[int]) -> list[list[nn.Module]]:
    """Return the outermost ModuleLists, and rows in Sequentials with most of some layers, that have several layers."""
    blocks = [*module.children()]
    runs, least = [blocks] if isinstance(module, nn.ModuleList) else [], 1.0
    if isinstance(module, nn.Sequential):
        is_list, least = len({type(block) for block in blocks}) == 1, max(1.0, len(ids) / 2)
        # Blocks between others, such as an embedding and a head, have equal parts; a single layer is like no other one.
        kinds = {m: (type(m), *(p.shape for p in m.parameters())) if [*m.children()] else m for m in blocks}
        runs = [blocks] if is_list else [[*run] for _, run in itertools.groupby(blocks, kinds.__getitem__)]
    for run in runs:
        if len(run) > 1 and sum(id(x) in ids for block in run for x in block.modules()) > least:
            return [run]
    return [found for child in blocks for found in _lists(child, ids)]


class _Links:
    """Which arguments of each block of a list are outputs of the block before, found in one forward of the model.

    Each block runs once more after it, on copies of what the one before gave, as it will in the walk.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks, self.links = blocks, list[dict[int, int]]()
        self.outputs = list[tuple[list[Any], Any]]()  # of each block those after the first, and how they are nested
        self.digests = list[list[str]]()  # of all outputs of each block
        self.is_chain = True
        # For each block called so far, {number of an argument that the first block does not get: its digest}.
        self._read = list[dict[int, str]]()

    def before(self, k: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments with which the model calls block k."""
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        if k == 0 and not self._read:
            # The arguments of the first block, as copies to run on, and with the objects that are compared by identity.
            self._spec, self._copies = spec, copied_tensors(leaves)
            self._common = copied_tensors(leaves, objects=False)
        self.is_chain &= k == len(self._read) and spec == self._spec and bool(leaves)
        if self.is_chain:
            others = [at for at, leaf in enumerate(leaves) if not (at and are_same(self._common[at], leaf))]
            self.is_chain = all(isinstance(leaves[at], Tensor) for at in others)
            self._read.append({at: digest_of(leaves[at], "") for at in others} if self.is_chain else {})

    def find(self) -> None:
        """Run the blocks, each with outputs of the one before, and compare these with what it got in the model."""
        self.links, self.outputs, self.digests = [], [], []
        passed = dict[int, Any]()
        for k, block in enumerate(self.blocks):
            leaves = [passed.get(at, leaf) for at, leaf in enumerate(self._copies)]
            args, kwargs = copied_tensors(_pytree.tree_unflatten(leaves, self._spec))  # it may change them, as a cache
            outputs, spec = _pytree.tree_flatten(block(*args, **kwargs))
            self.outputs.append((outputs[1:], spec))
            self.digests.append([digest_of(output, "") for output in outputs])
            if k + 1 < len(self.blocks):
                self.links.append(links := self._linked(self.digests[-1], k + 1))
                if not links:
                    return
                passed = {at: outputs[j] for at, j in links.items()}

    def _linked(self, digests: Sequence[str], k: int) -> dict[int, int]:
        """Return the link of each argument of block k that the first block does not get, or {} if it is none."""
        # The first argument is the first output, the hidden states, to which blocks are trained. What else blocks pass
        # on, such as biases of positions, must be what the first one has made, so that it needs no training.
        links, before = {0: 0}, self._read[k - 1]
        for at, digest in self._read[k].items():
            if at and (digests.count(digest) != 1 or (k > 1 and before.get(at) != digest)):
                return {}
            links[at] = digests.index(digest) if at else 0
        return links if digests and digests[0] == self._read[k].get(0) else {}


def _linked(data: CalibrationData, lists: Sequence[Sequence[nn.Module]]) -> list[_Links]:
    """Return the links of lists of blocks, and whether each of them is a chain, which every batch calls in order."""
    tried = [_Links(blocks) for blocks in lists]

    with _hooks((block, functools.partial(links.before, k)) for links in tried for k, block in enumerate(links.blocks)):
        data.run(0)
    for links in tried:  # not in the forward of the model, which may record what blocks give
        links.is_chain &= len(links._read) == len(links.blocks)
        _find(links)
    checked = [] if is_elsewhere(data.model) else tried  # offloaded blocks would be loaded once more
    held = [_held_by(links.blocks) for links in checked]
    # What blocks read is compared for the first batch only. Other batches run with blocks that return their input, if
    # that calls them in order, so that a model larger than memory is read once. Where blocks pass on more than that,
    # their outputs are compared too.
    for index in range(1, len(data.batches)):
        chains = [links for links in tried if links.is_chain]
        checks = [all(len(row) == 1 for links in chains for row in links.links)]
        checks = _are_in_order(data, chains, index, replaces=True) if all(checks) else checks
        checks = checks if all(checks) else _are_in_order(data, chains, index, replaces=False)
        for links, is_in_order in zip(chains, checks, strict=True):
            links.is_chain = is_in_order
        # Blocks may read what the model has set for this batch.
        is_last = index == len(data.batches) - 1
        for at, links in enumerate(checked):
            if links.is_chain and (is_last or _held_by(links.blocks) != held[at]):
                digests = links.digests
                _find(links)
                links.is_chain &= links.digests == digests
                held[at] = _held_by(links.blocks)
    return tried


def _held_by(blocks: Sequence[nn.Module]) -> str:
    """Return a digest of the buffers of blocks and of their own attributes, which a model may set for each batch."""

    def digested(value: Any) -> list[Any]:  # objects count by identity, since they may hold the whole model
        leaves = _pytree.tree_leaves(value)
        return [
            leaf if isinstance(leaf, (Tensor, np.ndarray, int, float, complex, str)) else id(leaf) for leaf in leaves
        ]

    modules = [module for block in blocks for module in block.modules()]
    own = [[value for name, value in vars(m).items() if name not in _OF_ANY_MODULE] for m in modules]
    return digest_of([digested([*m._buffers.values(), *values]) for m, values in zip(modules, own, strict=True)], "")


def _find(links: _Links) -> None:
    """Run the blocks by themselves if they may be a chain, with the same random numbers each time."""
    try:
        with seeded(p for block in links.blocks for p in block.parameters()):
            if links.is_chain:
                links.find()
    except Exception:  # the blocks do not run by themselves
        links.is_chain = False
    links.is_chain &= all(links.links)


def _are_in_order(data: CalibrationData, chains: Sequence[_Links], index: int, replaces: bool) -> list[bool]:
    """Return whether a batch calls the blocks of each chain once, in order, with equal arguments beside the links.

    With `replaces`, each block returns its input in place of its first output.
    """
    blocks = [(n, k, block) for n, links in enumerate(chains) for k, block in enumerate(links.blocks)]
    called: list[list[int]] = [[] for _ in chains]
    common: list[list[Any]] = [[] for _ in chains]  # the arguments of each first block
    given: list[list[Any]] = [[] for _ in chains]  # the outputs of the block that ran last

    def add(place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        n, k, _ = blocks[place]
        leaves = _pytree.tree_leaves((args, kwargs))
        if not called[n]:
            common[n] = copied_tensors(leaves, objects=False)
        linked = chains[n].links[k - 1] if k else {0: 0}
        linked = {} if replaces else linked  # blocks that return their input get equal ones
        pairs = [(a, b) for at, (a, b) in enumerate(zip(common[n], leaves, strict=False)) if at not in linked]
        if k:
            pairs += [(given[n][j] if j < len(given[n]) else None, leaves[at]) for at, j in linked.items()]
        is_equal = len(leaves) == len(common[n]) and all(are_same(a, b) for a, b in pairs)
        called[n].append(k if is_equal else -1)

    def unchanged(place: int, *args: Any, **kwargs: Any) -> Any:
        n, k, block = blocks[place]
        add(place, block, args, kwargs)
        further, spec = chains[n].outputs[k]
        return _pytree.tree_unflatten([_pytree.tree_leaves((args, kwargs))[0], *further], spec)

    def give(n: int, module: nn.Module, args: Any, output: Any) -> None:
        given[n] = copied_tensors(_pytree.tree_leaves(output), objects=False)

    if replaces:
        with replaced([block for *_, block in blocks], unchanged), suppress(Exception):
            data.run(index)
    else:
        with ExitStack() as stack:
            for place, (n, _, block) in enumerate(blocks):
                stack.enter_context(block.register_forward_hook(functools.partial(give, n)))
                stack.enter_context(_hooks([(block, functools.partial(add, place))]))
            data.run(index)
    return [order == [*range(len(links.blocks))] for order, links in zip(called, chains, strict=True)]


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


def captured(data: CalibrationData, blocks: Sequence[nn.Module], index: int) -> dict[int, Arguments]:
    """Return what each of some blocks receives in the forward pass of one batch, by its number, in order of calls."""
    calls: dict[int, Arguments] = {}

    def before(k: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[k] = copied_tensors((args, kwargs))
        if len(calls) == len(blocks):
            raise _Stop

    with _hooks((block, functools.partial(before, k)) for k, block in enumerate(blocks)):
        data.run(index)
    return calls


@contextmanager
def calls_of(modules: Iterable[nn.Module], calls: list[Arguments]) -> Iterator[None]:
    """Return a context in which copies of the arguments of each module call are appended to `calls`."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(copied_tensors((args, kwargs), objects=False))

    with _hooks((module, before) for module in modules):
        yield


class Kept:
    """Nested values by key, in memory (on `device` if given) or, beyond `limit` bytes, in temporary files."""

    def __init__(self, device: Device = None, limit: float | None = None) -> None:
        self._device, self._limit = device, math.inf if limit is None else limit
        self._values: dict[Hashable, tuple[Any, int]] = {}  # of those in memory, with their bytes
        self.used = 0  # the sum of these bytes
        self._files: dict[Hashable, str] = {}
        self._folder = ""

    def put(self, key: Hashable, value: Any) -> None:
        """Keep a value in place of the one before."""
        size = sum(leaf.nbytes for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))
        self.used -= self._values.pop(key, (None, 0))[1]
        if self.used + size <= self._limit:
            self._values[key] = copied_tensors(value, self._device, copies=False), size
            self.used += size
            return
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="sparsekit_ao-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._files.setdefault(key, os.path.join(self._folder, str(len(self._files))))
        torch.save(value, path)

    def get(self, key: Hashable) -> Any:
        """The value of a key."""
        return self._values[key][0] if key in self._values else torch.load(self._files[key], weights_only=False)


class Stream:
    """The inputs of a block of a chain for every batch; `advance` moves on to the next one.

    What equals the inputs in the stream `like`, such as masks, is kept only once. Blocks run on `device`, or with None
    where their inputs are.
    """

    def __init__(self, chain: Chain, kept: Kept, device: Device, like: "Stream | None" = None) -> None:
        self._links, self._kept, self._device, self._like = chain.links or [{0: 0}], kept, device, like
        self.of_decoder = chain.of_decoder
        self.advanced, self.is_finished = 0, False  # how many blocks have run, and whether the last one has
        self._specs: list[Any] = []  # how the arguments are nested
        self._others: list[Hashable] = []  # the keys of the arguments that all blocks have in common

    def begin(self, arguments: Arguments) -> None:
        """Take the arguments of the first block for the next batch."""
        leaves, spec = _pytree.tree_flatten(arguments)
        index, others = len(self), [None, *leaves[1:]]
        self._specs.append(spec)
        if self._like is not None and are_same(others, self._kept.get(self._like._others[index])):  # kept only once
            self._others.append(self._like._others[index])
        else:
            self._others.append((id(self), "others", index))
            self._kept.put(self._others[-1], others)
        self._put(index, {0: leaves[0]})

    def __len__(self) -> int:
        return len(self._others)

    def _put(self, index: int, passed: dict[int, Any]) -> None:
        self._kept.put((id(self), "passed", index), passed)

    def hidden(self, index: int) -> Any:
        """Return the first output of the block before for a batch, on the device where blocks run."""
        passed = self._kept.get((id(self), "passed", index))
        return copied_tensors(passed[0], self._device, copies=False)

    def arguments(self, index: int) -> Arguments:
        """Return the arguments of the next block for a batch."""
        passed = self._kept.get((id(self), "passed", index))
        leaves = [passed.get(at, leaf) for at, leaf in enumerate(self._kept.get(self._others[index]))]
        arguments: Arguments = _pytree.tree_unflatten(leaves, self._specs[index])
        return arguments

    def output(self, block: nn.Module, index: int, masks: TokenMasks | None = None) -> Any:
        """Return the output of a block for a batch, with the batch's random numbers.

        It runs on copies, as it may change inputs in place, such as a cache.
        """
        args, kwargs = copied_tensors(self.arguments(index), self._device)
        if masks is not None and self.of_decoder:  # not what it reads beside these, such as the encoder's outputs
            masks.mark(_pytree.tree_leaves((args, kwargs))[0])
        with seeded(block.parameters(), index):
            return block(*args, **kwargs)

    def advance(self, block: nn.Module, is_last: bool = False) -> None:
        """Run a block on every batch, and take its outputs as the inputs of the next one."""
        links = self._links[min(self.advanced, len(self._links) - 1)]  # a dense chain may have more blocks
        for index in range(len(self)):
            output = self.output(block, index)
            leaves = _pytree.tree_leaves(output)
            # A block may write all its outputs to one buffer.
            self._put(index, {at: copied_tensors(leaves[j]) for at, j in links.items() if j < len(leaves)})
            if is_last:  # what follows may read any of its outputs
                self._kept.put((id(self), "outputs", index), copied_tensors(output, objects=False))
        self.advanced += 1
        self.is_finished = is_last

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
