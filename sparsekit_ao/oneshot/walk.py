"""Visits the layers of a model in the order of its forward pass, with statistics from the layers already pruned.

A model of repeated blocks is walked block by block with the inputs of the block kept, so that each block runs twice and
the whole model only once. Elsewhere the model runs once for each layer, up to that layer.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..calibration import Calibration, Statistics, Target, call
from ..errors import SparsityError

Forward = Callable[[nn.Module, Any], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(BaseException):  # not caught by `except Exception` in the user's forward
    """Raised by a hook when the rest of a forward pass is not needed."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The calibration data, and how the model runs on it.

    Attributes:
        batches: kept in a list, because the model runs on them several times.
        forward: `(model, batch) -> anything`, or None; see `calibration.call`.
        where: the tokens that count in each batch, or None for all.
    """

    batches: Sequence[Any]
    forward: Forward | None = None
    where: Sequence[Tensor | None] = field(default=())

    def run(self, model: nn.Module, at: int) -> None:
        """One forward pass, until a hook stops it."""
        try:
            if self.forward is None:
                call(model, self.batches[at])
            else:
                self.forward(model, self.batches[at])
        except _Stop:
            pass


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers that are recorded together.

    Attributes:
        targets: their weights, in the order of the forward pass.
        block: the index of the block that holds them, or None.
    """

    targets: tuple[Target, ...]
    block: int | None


class Walk:
    """One pass over the model's layers; iterate over `units()`."""

    def __init__(self, model: nn.Module, data: Batches, targets: Sequence[Target], blocks: str | None) -> None:
        self._model, self._data = model, data
        self._order, self.unreached, self._repeated = _order(model, data, targets)
        self._blocks = _chained_blocks(model, data, _find_blocks(model, self._order, blocks), self._order, blocks)
        self._inputs: list[Arguments] = []
        self._at = 0  # the block whose inputs these are

    @property
    def blocks(self) -> int:
        """The number of blocks that are walked; 0 where the model runs once for each layer."""
        return len(self._blocks)

    def units(self) -> list[Unit]:
        """Blocks, and single layers (those that read one tensor together) before, between and after them."""
        found: dict[tuple[str, int], Unit] = {}
        owner = {id(m): k for k, block in enumerate(self._blocks) for m in block.modules()}
        for target, read in self._order:
            block = owner.get(id(target.module))
            key = ("read", read) if block is None else ("block", block)
            before = found[key].targets if key in found else ()
            found[key] = Unit(targets=(*before, target), block=block)
        return list(found.values())

    def visit(self, unit: Unit) -> Iterator[dict[str, Statistics]]:
        """Statistics of a unit's layers; what the caller changes before it goes on shows in the units that follow."""
        if unit.block is None:
            with Calibration(unit.targets) as calibration:
                modules = [t.form.module for t in unit.targets if t.form is not None]
                can_stop = not any(id(m) in self._repeated for m in modules)
                handle = modules[-1].register_forward_hook(_stop) if can_stop else None
                try:
                    for at in range(len(self._data.batches)):
                        calibration.where = self._data.where[at]
                        self._data.run(self._model, at)
                finally:
                    if handle is not None:
                        handle.remove()
            yield calibration.statistics
            return
        self._go_to(unit.block)
        block = self._blocks[unit.block]
        with Calibration(unit.targets) as calibration:
            for at, given in enumerate(self._inputs):
                calibration.where = self._data.where[at]
                _output(block, given)
        yield calibration.statistics
        if unit.block + 1 < len(self._blocks):
            self._go_to(unit.block + 1)
        else:
            self._inputs = []

    def _go_to(self, block: int) -> None:
        """Make `_inputs` those of a block: from the blocks before it, or by running the model up to it."""
        if not self._inputs or self._at > block:
            own = self._blocks[block]
            self._inputs = [_captured(self._model, self._data, own, at) for at in range(len(self._data.batches))]
            self._at = block
        while self._at < block:
            own = self._blocks[self._at]
            self._inputs = [_next(given, _output(own, given)) for given in self._inputs]
            self._at += 1


def _stop(*args: Any) -> None:
    raise _Stop


def _order(
    model: nn.Module, data: Batches, targets: Sequence[Target]
) -> tuple[list[tuple[Target, int]], list[Target], set[int]]:
    """Targets in the order of the forward pass, each with a number for the tensor that it reads.

    A layer that the first batch does not reach (an expert, say) is looked for in the others.

    Returns:
        They, those not reached, and ids of the modules that a forward pass calls more than once.
    """
    found: dict[str, int] = {}
    calls: dict[str, int] = {}
    repeated: set[int] = set()
    read: list[tuple[Tensor, int]] = []
    handles = []

    def hook(target: Target) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), torch.empty(0, device="cpu"))
            version = -1 if x.is_inference() else x._version  # a layer after a change in place reads something else
            if not read or read[-1][0] is not x or read[-1][1] != version or version < 0:
                read.append((x, version))
            found.setdefault(target.name, len(read))
            calls[target.name] = calls.get(target.name, 0) + 1
            if calls[target.name] > 1:
                repeated.add(id(module))

        return before

    try:
        for target in targets:
            if target.form is not None:
                handles.append(target.form.module.register_forward_pre_hook(hook(target), with_kwargs=True))
        for at in range(len(data.batches)):
            data.run(model, at)
            calls.clear()
            if len(found) == len(handles):
                break
    finally:
        for handle in handles:
            handle.remove()
    reached = sorted((t for t in targets if t.name in found), key=lambda t: list(found).index(t.name))
    return [(t, found[t.name]) for t in reached], [t for t in targets if t.name not in found], repeated


def _find_blocks(model: nn.Module, order: Sequence[tuple[Target, int]], name: str | None) -> list[nn.Module]:
    """The blocks of the ModuleList (or Sequential, if it is named) that holds most of the layers."""
    if name is not None:
        try:
            found = model.get_submodule(name)
        except AttributeError:
            raise SparsityError(f"one_shot: blocks={name!r} is no module of the model") from None
        if not isinstance(found, (nn.ModuleList, nn.Sequential)):
            raise SparsityError(
                f"one_shot: blocks={name!r} is a {type(found).__name__}, not a ModuleList or Sequential"
            )
        return list(found)
    own = {id(t.module) for t, _ in order}
    held = [(sum(id(x) in own for x in m.modules()), m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    most = max((n for n, _ in held), default=0)
    return next((list(m) for n, m in held if n == most and n > 1 and len(m) > 1), [])


def _chained_blocks(
    model: nn.Module,
    data: Batches,
    blocks: Sequence[nn.Module],
    order: Sequence[tuple[Target, int]],
    name: str | None,
) -> list[nn.Module]:
    """The blocks, if on the first batch each one's input is the output of the one before; else none of them.

    None either if some batch skips a block.

    None either if a layer is part of several blocks, whose inputs are not known together.
    """
    if not blocks:
        return []
    calls: list[tuple[int, Arguments]] = []
    own: list[Arguments] = []  # of the first block, to run on
    held = Counter(id(m) for block in blocks for m in block.modules())
    shares = any(held[id(target.module)] > 1 for target, _ in order)

    def hook(k: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((k, _copied((args, kwargs), objects=False)))
            if not own:
                own.append(_copied((args, kwargs)))

        return before

    handles = [block.register_forward_pre_hook(hook(k), with_kwargs=True) for k, block in enumerate(blocks)]
    try:
        data.run(model, 0)
    finally:
        for handle in handles:
            handle.remove()
    if [k for k, _ in calls] == list(range(len(blocks))) and not shares:
        given, shown = own[0], calls[0][1]
        for k, block in enumerate(blocks):
            if not _are_same(shown, calls[k][1]):
                break
            if k + 1 < len(blocks):
                output = _output(block, given)
                given, shown = _next(given, output), _next(shown, output)
        else:
            if all(_called(model, data, blocks, at) == list(range(len(blocks))) for at in range(1, len(data.batches))):
                return list(blocks)
    if name is not None:
        raise SparsityError(
            f"one_shot: blocks={name!r} do not form a chain: each must be called once, in order, with the first output "
            "of the one before and otherwise the same arguments, and no layer may be part of two of them; leave blocks "
            "out to run the model once for each layer"
        )
    return []


def _called(model: nn.Module, data: Batches, blocks: Sequence[nn.Module], at: int) -> list[int]:
    """The blocks that the forward pass of one batch calls, in order."""
    found: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda module, args, k=k: found.append(k)) for k, block in enumerate(blocks)
    ]
    try:
        data.run(model, at)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _captured(model: nn.Module, data: Batches, block: nn.Module, at: int) -> Arguments:
    """What a block receives in the forward pass of one batch."""
    found: list[Arguments] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, dict(kwargs)))
        raise _Stop

    handle = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        data.run(model, at)
    finally:
        handle.remove()
    return _copied(found[0])


def _output(block: nn.Module, given: Arguments) -> Any:
    """What a block returns; it may change its arguments in place, such as a cache of keys and values."""
    args, kwargs = _copied(given)
    return block(*args, **kwargs)


def _copied(value: Any, objects: bool = True) -> Any:
    """Nested arguments with copies of their tensors, and of other objects if wanted."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(v, objects) for v in value)
    if type(value) is dict:
        return {k: _copied(v, objects) for k, v in value.items()}
    return copy.deepcopy(value) if objects and not isinstance(value, nn.Module) else value


def _next(given: Arguments, output: Any) -> Arguments:
    """The arguments of the next block: the first one is replaced by the first output."""
    args, kwargs = given
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if args:
        return (hidden, *args[1:]), kwargs
    first = next(iter(kwargs), None)
    return args, kwargs if first is None else {**kwargs, first: hidden}


def _are_same(one: Any, other: Any) -> bool:
    """Whether nested arguments are equal; tensors and arrays by value, objects by attributes, or by identity or ==."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_same(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return all(_are_same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return one is other or bool(one == other)
