"""One pass over the layers of a model in the order of its forward pass, with statistics from the layers already pruned.

A model of repeated blocks is recorded block by block with the inputs of the block kept. Each block then runs twice, and
the whole model once to find the blocks. Elsewhere the model runs once for each group of layers, up to that group.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..calibration import SAMPLED, Recording, Statistics, Target
from ..errors import SparsityError
from ..models.running import Forward, TokenMask, call, check_batch, check_batches, token_mask_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(BaseException):  # not caught by `except Exception` in the user's forward
    """Raised by a hook when the rest of a forward pass is not needed."""


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """A model with its calibration data, and how it runs on them.

    Attributes:
        model: To be pruned.
        batches: Kept in a list, because the model runs on them several times.
        forward: `(model, batch) -> anything`, or None; see `models.running.call`.
        token_masks: The tokens that count in each batch, or None for all.
    """

    model: nn.Module
    batches: Sequence[Any]
    forward: Forward | None
    token_masks: Sequence[Tensor | None]

    @classmethod
    def checked(
        cls, model: nn.Module, batches: Any, forward: Forward | None, token_mask: TokenMask, caller: str
    ) -> "CalibrationData":
        """Check what a user gave, and keep the batches in a list."""
        check_batches(batches, token_mask, forward, caller)
        kept = list(batches)
        if not kept:
            raise SparsityError(f"{caller}: there are no batches; an iterator that was used up before gives none")
        for batch in kept:
            check_batch(batch, forward, caller)
        token_masks = [token_mask_of(batch, token_mask, caller) for batch in kept]
        return cls(model=model, batches=kept, forward=forward, token_masks=token_masks)

    def counted(self) -> str:
        """Say how many tokens count, where some do not."""
        masks = [mask for mask in self.token_masks if mask is not None]
        kept, total = sum(int(mask.bool().sum()) for mask in masks), sum(mask.numel() for mask in masks)
        return f"{kept:,} of {total:,} tokens count, by their mask" if kept < total else ""

    def output(self, index: int) -> Any:
        """Run the model on a copy of one batch, which it may change in place."""
        return (self.forward or call)(self.model, copied_tensors(self.batches[index]))

    def run(self, index: int) -> None:
        """Run the model on one batch, until a hook stops it."""
        with suppress(_Stop):
            self.output(index)


class SequentialPass:
    """One pass over the model's layers.

    Args:
        blocks: The name of the module list of repeated blocks; None finds it.

    Attributes:
        groups: Weights that are recorded together, in the order of the forward pass: those of a block, or those that
            read one tensor. Keys are the index of the block (None outside of blocks) and a number for the tensor.
        unreached: Targets that no batch reaches.
        blocks: The repeated blocks; none where the model runs once for each layer.
    """

    def __init__(self, data: CalibrationData, targets: Sequence[Target], blocks: str | None = None) -> None:
        self._data = data
        targets = [dataclasses.replace(target, adapter=copy.copy(target.adapter)) for target in targets]  # `sampled`
        for target in targets:
            if target.adapter is not None:
                inputs = target.adapter.matrix(torch.empty(target.shape, device="meta")).shape[2]
                target.adapter.sampled = max(1, SAMPLED // (inputs * len(data.batches)))
        order, self.unreached, self._repeated = _order(data, targets)
        self.blocks = find_blocks(data, [target.module for target, _ in order], blocks)
        block_of = {id(m): k for k, block in enumerate(self.blocks) for m in block.modules()}
        self.groups: dict[tuple[int | None, int], list[Target]] = {}
        for target, read in order:
            block = block_of.get(id(target.module))
            self.groups.setdefault((block, read if block is None else 0), []).append(target)
        self._inputs: list[Arguments] = []
        self._inputs_of = 0  # the block whose inputs these are

    def record(self) -> Iterator[tuple[list[Target], dict[str, Statistics]]]:
        """Yield every group with its statistics; what the caller changes in the model shows in the groups after it."""
        for (block, _), targets in self.groups.items():
            if block is None:
                yield targets, self._statistics_of_model(targets)
                continue
            self._go_to(block)
            with Recording(targets, keep_rows=True) as calibration:
                for arguments, mask in zip(self._inputs, self._data.token_masks, strict=True):
                    calibration.token_mask = mask
                    output_of(self.blocks[block], arguments)
            yield targets, calibration.statistics
            if block + 1 < len(self.blocks):
                self._go_to(block + 1)
            else:
                self._inputs = []

    def _statistics_of_model(self, targets: Sequence[Target]) -> dict[str, Statistics]:
        """Run the model on all batches, up to the last of these layers if that is called only once."""
        modules = [t.adapter.module for t in targets if t.adapter is not None]
        can_stop = not any(id(m) in self._repeated for m in modules)
        stop = modules[-1].register_forward_hook(_stop) if can_stop else nullcontext()
        with stop, Recording(targets, keep_rows=True) as calibration:
            for index, mask in enumerate(self._data.token_masks):
                calibration.token_mask = mask
                self._data.run(index)
        return calibration.statistics

    def _go_to(self, block: int) -> None:
        """Make `_inputs` those of a block: from the blocks before it, or by running the model up to it."""
        if not self._inputs or self._inputs_of > block:
            counts = range(len(self._data.batches))
            self._inputs = [captured(self._data, self.blocks[block], index) for index in counts]
            self._inputs_of = block
        while self._inputs_of < block:
            before = self.blocks[self._inputs_of]
            for index, arguments in enumerate(self._inputs):
                self._inputs[index] = next_arguments(arguments, output_of(before, arguments))
            self._inputs_of += 1


def _stop(*args: Any) -> None:
    raise _Stop


@contextmanager
def _hooks(hooks: Iterable[tuple[nn.Module, Callable[..., None]]]) -> Iterator[None]:
    """Call functions `(module, args, kwargs)` before their modules."""
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _order(data: CalibrationData, targets: Sequence[Target]) -> tuple[list[tuple[Target, int]], list[Target], set[int]]:
    """Find the order of the forward pass; later batches are run for layers that the first one does not reach.

    Returns:
        The reached targets in that order, each with a number for the tensor that it reads. The targets that no batch
        reaches. The ids of the modules that a forward pass calls more than once.
    """
    reached: dict[str, tuple[Target, int]] = {}
    calls: Counter[str] = Counter()
    repeated: set[int] = set()
    reads: list[tuple[Tensor, int]] = []

    def hook(target: Target) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), torch.empty(0, device="cpu"))
            version = -1 if x.is_inference() else x._version  # a layer after a change in place reads something else
            if not reads or reads[-1][0] is not x or reads[-1][1] != version or version < 0:
                reads.append((x, version))
            reached.setdefault(target.name, (target, len(reads)))
            calls[target.name] += 1
            if calls[target.name] > 1:
                repeated.add(id(module))

        return before

    modules = [(t.adapter.module, hook(t)) for t in targets if t.adapter is not None]
    with _hooks(modules):
        for index in range(len(data.batches)):
            data.run(index)
            calls.clear()
            if len(reached) == len(modules):
                break
    return list(reached.values()), [t for t in targets if t.name not in reached], repeated


def find_blocks(data: CalibrationData, layers: Sequence[nn.Module], name: str | None) -> list[nn.Module]:
    """Return the repeated blocks of a model if their inputs can be computed from each other, else none of them."""
    blocks = _largest_list(data.model, layers, name)
    uses = Counter(id(m) for block in blocks for m in block.modules())
    uses.update(id(p) for block in blocks for p in block.parameters() if p.ndim > 1)  # may be tied between blocks
    used = [*layers, *(p for layer in layers for p in layer.parameters())]
    is_chain = bool(blocks) and not any(uses[id(one)] > 1 for one in used)
    for index in range(len(data.batches)):
        is_chain = is_chain and _is_chained(data, blocks, index)
    if name is not None and not is_chain:
        raise SparsityError(
            f"blocks={name!r} do not form a chain: each must be called once, in order, with the first output of the "
            "one before and otherwise the same arguments, and no layer may be part of two of them; leave blocks out "
            "to run the whole model instead"
        )
    return blocks if is_chain else []


def _largest_list(model: nn.Module, layers: Sequence[nn.Module], name: str | None) -> list[nn.Module]:
    """Return the blocks of the list that holds most of the layers, or of the one that is named.

    A list is a ModuleList, or a Sequential of modules of one class that has more than half of the layers.
    """
    if name is not None:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise SparsityError(f"blocks={name!r} is no module of the model") from None
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            kind = type(module).__name__
            raise SparsityError(f"blocks={name!r} is a {kind}, not a ModuleList or Sequential")
        return list(module)
    ids = {id(layer) for layer in layers}
    lists: dict[int, list[nn.Module]] = {}  # the first of those with so many layers
    for m in model.modules():
        count = sum(id(x) in ids for x in m.modules())
        is_list = isinstance(m, nn.Sequential) and len({type(x) for x in m}) == 1 and 2 * count > len(ids)
        if (is_list or isinstance(m, nn.ModuleList)) and count > 1 and len(m) > 1:  # type: ignore[arg-type]
            lists.setdefault(count, list(m))  # type: ignore[call-overload]
    return lists[max(lists)] if lists else []


def _is_chained(data: CalibrationData, blocks: Sequence[nn.Module], index: int) -> bool:
    """Whether a batch calls each block once, in order, and in the first batch each with the output of the one before.

    All other arguments must be the same.
    """
    calls: list[tuple[int, Arguments]] = []

    def hook(k: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((k, copied_tensors((args, kwargs), objects=False) if index == 0 else ((), {})))

        return before

    with _hooks((block, hook(k)) for k, block in enumerate(blocks)):
        data.run(index)
    if [k for k, _ in calls] != list(range(len(blocks))):
        return False
    if index > 0:
        return True
    arguments, expected = captured(data, blocks[0], 0), calls[0][1]
    for block, (_, actual) in zip(blocks[:-1], calls[1:], strict=True):
        output = output_of(block, arguments)
        arguments, expected = next_arguments(arguments, output), next_arguments(expected, output)
        if not _are_same(expected, actual):
            return False
    return True


def captured(data: CalibrationData, block: nn.Module, index: int) -> Arguments:
    """Return what a block receives in the forward pass of one batch."""
    calls: list[Arguments] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(copied_tensors((args, kwargs)))
        raise _Stop

    with _hooks([(block, before)]):
        data.run(index)
    return calls[0]


def output_of(block: nn.Module, arguments: Arguments) -> Any:
    """Run a block on copies of its arguments, which it may change in place (a cache of keys and values, say)."""
    args, kwargs = copied_tensors(arguments)
    return block(*args, **kwargs)


def copied_tensors(value: Any, objects: bool = True) -> Any:
    """Nested arguments with copies of their tensors, and of other objects if wanted."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        return copy.deepcopy(leaf) if objects and not isinstance(leaf, nn.Module) else leaf

    return _pytree.tree_map(copied, value)


def next_arguments(arguments: Arguments, output: Any) -> Arguments:
    """The arguments of the next block: the first one is replaced by the first output."""
    args, kwargs = arguments
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if args:
        return (hidden, *args[1:]), kwargs
    first = next(iter(kwargs), None)
    return args, kwargs if first is None else {**kwargs, first: hidden}


def _are_same(a: Any, b: Any) -> bool:
    """Whether nested arguments are equal; tensors and arrays by value, objects by attributes, or by identity or ==."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if any(isinstance(t, Tensor) and t.is_nested for t in (a, b)):
            return False
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_are_same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_are_same, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(_are_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a is b or bool(a == b)
