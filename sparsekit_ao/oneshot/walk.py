"""Visits the layers of a model in the order of its forward pass, with statistics from the layers already pruned.

A model of repeated blocks is walked block by block with the inputs of the block kept, so that each block runs twice and
the whole model only once. Elsewhere the model runs once for each layer, up to that layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Calibration, Statistics, Target, call
from ..errors import SparsityError

Forward = Callable[[nn.Module, Any], Any]


class _Stop(Exception):
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
        self._order, self.unreached = _order(model, data, targets)
        self._blocks = _chained_blocks(model, data, _find_blocks(model, self._order, blocks), blocks)
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def units(self) -> list[Unit]:
        """Blocks, and single layers (those that read one tensor together) before, between and after them."""
        found: list[Unit] = []
        owner = {id(m): k for k, block in enumerate(self._blocks) for m in block.modules()}
        for target, read in self._order:
            block = owner.get(id(target.module))
            joins = found and found[-1].block == block and (block is not None or read == self._read)
            if joins:
                found[-1] = Unit(targets=(*found[-1].targets, target), block=block)
            else:
                found.append(Unit(targets=(target,), block=block))
            self._read = read
        return found

    _read: int | None = None

    def visit(self, unit: Unit) -> Iterator[dict[str, Statistics]]:
        """Statistics of a unit's layers; what the caller changes before it goes on shows in the units that follow."""
        if unit.block is None:
            with Calibration(unit.targets) as calibration:
                last = [t.form.module for t in unit.targets if t.form is not None][-1]
                handle = last.register_forward_hook(_stop)
                try:
                    for at in range(len(self._data.batches)):
                        calibration.where = self._data.where[at]
                        self._data.run(self._model, at)
                finally:
                    handle.remove()
            yield calibration.statistics
            return
        block = self._blocks[unit.block]
        if not self._inputs:
            self._inputs = [_captured(self._model, self._data, block, at) for at in range(len(self._data.batches))]
        with Calibration(unit.targets) as calibration:
            for at, (args, kwargs) in enumerate(self._inputs):
                calibration.where = self._data.where[at]
                block(*args, **kwargs)
        yield calibration.statistics
        if unit.block + 1 < len(self._blocks):
            self._inputs = [_next(args, kwargs, block(*args, **kwargs)) for args, kwargs in self._inputs]
        else:
            self._inputs = []


def _stop(*args: Any) -> None:
    raise _Stop


def _order(model: nn.Module, data: Batches, targets: Sequence[Target]) -> tuple[list[tuple[Target, int]], list[Target]]:
    """Targets in the order of the forward pass, each with a number for the tensor that it reads; those not reached.

    A layer that the first batch does not reach (an expert, say) is looked for in the others.
    """
    found: dict[str, int] = {}
    read: list[Tensor] = []
    handles = []

    def hook(target: Target) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), torch.empty(0))
            if not read or read[-1] is not x:
                read.append(x)
            found.setdefault(target.name, len(read))

        return before

    try:
        for target in targets:
            if target.form is not None:
                handles.append(target.form.module.register_forward_pre_hook(hook(target), with_kwargs=True))
        for at in range(len(data.batches)):
            data.run(model, at)
            del read[:-1]
            if len(found) == len(handles):
                break
    finally:
        for handle in handles:
            handle.remove()
    reached = sorted((t for t in targets if t.name in found), key=lambda t: list(found).index(t.name))
    return [(t, found[t.name]) for t in reached], [t for t in targets if t.name not in found]


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


def _chained_blocks(model: nn.Module, data: Batches, blocks: Sequence[nn.Module], name: str | None) -> list[nn.Module]:
    """The blocks, if on the first batch each one's input is the output of the one before; else none of them."""
    if not blocks:
        return []
    calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
    handles = [
        block.register_forward_pre_hook(
            lambda module, args, kwargs, k=k: calls.append((k, args, dict(kwargs))), with_kwargs=True
        )
        for k, block in enumerate(blocks)
    ]
    try:
        data.run(model, 0)
    finally:
        for handle in handles:
            handle.remove()
    if [k for k, _, _ in calls] == list(range(len(blocks))):
        args, kwargs = calls[0][1:]
        for k, block in enumerate(blocks):
            if not _are_same((args, kwargs), calls[k][1:]):
                break
            if k + 1 < len(blocks):
                args, kwargs = _next(args, kwargs, block(*args, **kwargs))
        else:
            return list(blocks)
    if name is not None:
        raise SparsityError(
            f"one_shot: blocks={name!r} do not form a chain: each must be called once, in order, with the first output "
            "of the one before and otherwise the same arguments; leave blocks out to run the model once for each layer"
        )
    return []


def _captured(model: nn.Module, data: Batches, block: nn.Module, at: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block receives in the forward pass of one batch."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, dict(kwargs)))
        raise _Stop

    handle = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        data.run(model, at)
    finally:
        handle.remove()
    return found[0]


def _next(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the next block: the first one is replaced by the first output."""
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if args:
        return (hidden, *args[1:]), kwargs
    first = next(iter(kwargs), None)
    return args, kwargs if first is None else {**kwargs, first: hidden}


def _are_same(one: Any, other: Any) -> bool:
    """Whether nested arguments are equal; tensors by value, other objects by identity or ==."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_same(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one is other or bool(one == other)
