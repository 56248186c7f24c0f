"""A dry run of `prune`: what it would do and cost, from one block that is pruned on one batch and put back."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Statistics
from ..distributed import abandon_forward
from ..models.flops import flop_counter
from ..models.loading import is_elsewhere, loaded
from ..models.names import by_pattern, weights_by_name
from ..models.running import eval_mode, import_dynamo, unfused_attention
from .chain import CalibrationData
from .matching import EVERY, MEASURED, PASSES, Teacher
from .solving import CoverageTable, Layers
from .walk import Step, Walk, steps_of, without_autocast_cache

# Copies of a block in float32 that are in memory: if weights are only dropped, and if they are computed or trained
# (examples/benchmarks/walk_memory.py).
DROPPED, TRAINED = 2, 8


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """A row of a `DryRun`: what would be done to one tensor.

    Attributes:
        tensor: The name of the weight.
        pattern: The shapes of its blocks and scopes.
        density: The fraction of elements that its mask would keep.
        compensated: "yes" if kept weights would be adjusted, or why they would not.

    >>> PlannedRow(tensor="fc.weight", pattern="block 1x1 scope 1x4", density=0.5, compensated="yes").density
    0.5
    """

    tensor: str
    pattern: str
    density: float
    compensated: str


@dataclass(frozen=True, kw_only=True)
class DryRun(CoverageTable[PlannedRow]):
    """What `prune` would do, as `prune(..., dry_run=True)` returns it; prints as a table.

    Attributes:
        rows: A row for each tensor that would be pruned.
        left_out, weights: As for `OneShotReport`.
        chains: The names of the blocks of each chain of repeated blocks; empty if the model has none.
        parameters: The number of parameters, and how many of them would not be set to zero.
        flops: The FLOPs of a forward pass on one batch (a multiply-add is two), and how many of them would be left
            without the products of zeros in Linear layers and convolutions. (0, 0) without batches.
        model_runs, block_runs: How many forward passes of the whole model, or of a part of it, and of each block would
            be made for each batch. Training is included, but not the passes that measure its error.
        memory: The bytes that would be in memory at the peak beside what is there now, estimated. For a block on a GPU,
            they are divided between its memory and that of the CPU.
        seconds: The time that it would take, in seconds, estimated. Checkpoints are not included.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> same, report = sparsekit_ao.prune(model, "2:4", batches=[torch.randn(64, 16)], dry_run=True)
    >>> same is model, report.parameters, report["0.weight"].density
    (True, (808, 424), 0.5)
    """

    rows: tuple[PlannedRow, ...]
    chains: tuple[tuple[str, ...], ...] = ()
    parameters: tuple[int, int]
    flops: tuple[int, int] = (0, 0)
    model_runs: int = 0
    block_runs: int = 0
    memory: int
    seconds: float
    bars = ("density",)

    def above(self) -> list[str]:
        """Return what the call would take."""
        return [
            "dry run: nothing was changed",
            f"it would take about {self.seconds / 60:.1f} minutes, and {self.memory / 2**30:.2f} GiB of memory beside "
            "what is in use now",
        ]

    def below(self) -> list[str]:
        """Return the lines below the table: sizes, runs, blocks, and what stays dense."""
        sizes = zip(("parameters that are not zero", "FLOPs"), (self.parameters, self.flops), strict=True)
        lines = [f"{what}: {was:,} -> {now:,} ({now / was:.3f})" for what, (was, now) in sizes if was]
        blocks = f", and {self.block_runs} of each block" if self.chains else ""
        lines.append(f"forward passes for each batch: {self.model_runs} of the model or a part of it{blocks}")
        lines += [f"chain of {len(chain)} blocks: {', '.join(by_pattern(chain))}" for chain in self.chains]
        return [*lines, *self.lines_of_coverage(), *self.lines_left_out()]

    def metrics(self) -> dict[str, float]:
        """Return {"density/<tensor>": ..., "parameters": ..., "flops": ..., "memory": ..., "seconds": ...}."""
        sizes = {"parameters": self.parameters[1], "flops": self.flops[1], "memory": self.memory}
        return {**super().metrics(), **{name: float(n) for name, n in sizes.items()}, "seconds": self.seconds}


def planned_run(
    layers: Layers,
    walk: Walk,
    rest: Sequence[str],
    all_data: CalibrationData,
    recover: bool,
    copies: bool,
    start: float,
) -> DryRun:
    """Return what `prune` would do with `all_data`; the `walk` has one of its batches, and `rest` no statistics."""
    model, has_data = walk.data.model, bool(all_data.batches)
    steps = steps_of(walk, rest, recover)
    rows = tuple(_planned(layers, name) for step in steps for name in step.tensors)
    numel = {row.tensor: math.prod(layers.recorder.target(row.tensor, ()).shape) for row in rows}
    dropped = sum(round(numel[row.tensor] * (1 - row.density)) for row in rows)
    tensors = [*model.parameters(), *model.buffers()]
    total = sum(p.numel() for p in model.parameters())
    chains = tuple(
        tuple(name for name, of in zip(walk.names, walk.chain_of, strict=True) if of == at)
        for at in range(len(walk.chains))
    )
    outside = sum(step.is_recorded and step.block is None for step in steps)
    of_blocks = [sum(p.numel() for p in block.parameters()) for block in walk.blocks]
    of_steps = [sum(numel[name] for name in step.tensors) for step in steps if step.block is None]
    largest = total if recover and not of_blocks else max(of_blocks + of_steps, default=0)
    memory = (DROPPED if layers.method is None and not recover else TRAINED) * 4 * largest
    if copies:
        memory += sum(t.nbytes for t in tensors)
    elif is_elsewhere(model):  # what is outside of blocks is read, too
        inside = {id(p) for block in walk.blocks for p in block.parameters()}
        memory += sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    seconds, flops = time.perf_counter() - start, (0, 0)
    if has_data:
        seconds *= len(all_data.batches) if layers.gradients() else 1
        with eval_mode(model), without_autocast_cache():
            try:
                flops = _flops(walk.data, layers, rows)
                more, held = _measured(layers, walk, steps, all_data, recover, numel, of_blocks)
            finally:
                abandon_forward(model)
        seconds, memory = seconds + more, memory + held
    return DryRun(
        rows=rows,
        chains=chains,
        parameters=(total, total - dropped),
        flops=flops,
        model_runs=(1 + len(chains) + outside + (1 + PASSES) * (recover and not chains)) if has_data else 0,
        block_runs=(2 + (1 + PASSES) * recover) if chains else 0,
        memory=memory,
        seconds=seconds,
        weights=weights_by_name(model),
    )


def _planned(layers: Layers, name: str) -> PlannedRow:
    pattern, density = layers.planned(name)
    why_not = layers.notes.get(name) or ("compensate is None" if layers.method is None else "yes")
    return PlannedRow(tensor=name, pattern=pattern, density=density, compensated=why_not)


def _flops(data: CalibrationData, layers: Layers, rows: Sequence[PlannedRow]) -> tuple[int, int]:
    """Return the FLOPs of a forward pass, and those without the products of zeros in leaf modules."""
    names = {id(module): name for name, module in data.model.named_modules()}
    with flop_counter() as counter, unfused_attention():
        data.output(0)
    of_modules = {name.partition(".")[2]: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    saved = 0.0
    for row in rows:
        module = layers.groups[row.tensor]["module"]
        if not [*module.children()] and len([*module.parameters(recurse=False)]) < 3:  # it has no other products
            saved += of_modules.get(names[id(module)], 0) * (1 - row.density)
    return counter.get_total_flops(), counter.get_total_flops() - round(saved)


def _measured(
    layers: Layers,
    walk: Walk,
    steps: Sequence[Step],
    all_data: CalibrationData,
    recover: bool,
    numel: dict[str, int],
    of_blocks: Sequence[int],
) -> tuple[float, int]:
    """Prune one block or layer on one batch, and put it back; return seconds and bytes of all batches and blocks."""
    model, (_, total, largest) = walk.data.model, all_data.one_batch()
    steps = [step for step in steps if step.tensors and step.is_recorded]
    of_block = [step for step in steps if step.block is not None]
    if not steps:
        return 0.0, 0
    # Blocks of a chain are alike. Of layers without blocks, the one in the middle stands for all.
    step = of_block[0] if of_block else steps[len(steps) // 2]
    block = None if step.block is None else walk.blocks[step.block]
    teacher = Teacher(None, walk.data, passes=1) if recover and (block is not None or not walk.blocks) else None
    if teacher is not None:
        import_dynamo()  # now, since this takes time
        teacher.start(walk)
    for chain in () if step.block is None else range(walk.chain_of[step.block] + 1):
        walk.begin_stream(chain, None if teacher is None else teacher.streams[chain])
    modules = [model] if teacher is not None and block is None else walk._modules(step)
    held, start = dict[int, int](), time.perf_counter()

    def recorded() -> dict[str, Statistics]:
        statistics = walk._statistics(step, layers)
        for one in statistics.values():  # rows are summed if all batches together have enough of them
            if one.rows and one.tokens * total >= one.rows[0].shape[2]:
                one.sum_rows()
        return statistics

    def ran() -> Any:
        return walk.data.output(0) if block is None else walk.streams[-1].output(block, 0)

    def matched() -> Any:
        if teacher is not None:
            return teacher.finish([]) if block is None else teacher.match(step.block or 0, block, walk.streams[-1])

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with loaded(model, modules, None if block is None else walk.device), _undone(modules):
        loading = time.perf_counter() - start
        if teacher is not None and step.block is not None and block is not None:
            teacher.advance(step.block, block)
        _, statistics = recorded(), recorded()  # each is done twice, as the first time is slower
        recording = _seconds(recorded)
        solving = _seconds(lambda: layers.solve(step.tensors, statistics))
        _, forward = ran(), _seconds(ran)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            matched()
        matching = _seconds(matched)
        for p in itertools.chain(*(module.parameters() for module in modules)):
            held.pop(p.untyped_storage().data_ptr(), None)
    alike = sum(of_blocks) / of_blocks[step.block] if step.block is not None else 1.0
    runs = (alike * total if step.block is not None else len(steps) * total) * recording
    seconds = solving * sum(numel.values()) / sum(numel[name] for name in step.tensors) + runs + 2 * alike * loading
    if block is not None:
        seconds += alike * total * forward * (2 if recover else 1)
    if teacher is not None:  # a pass trains, after two runs and before one that measure the error
        training = total * PASSES * max(matching - 3 * forward, 0.0)
        measuring = total * min(1.0, MEASURED / len(all_data.batches)) * (PASSES // EVERY + 2) * forward
        seconds += alike * (training + measuring)
    streams = min(walk.kept.used * total, math.inf if walk.stream_memory is None else walk.stream_memory)
    return seconds, round(streams + sum(held.values()) * largest)


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def _undone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context at whose end the parameters have the values again that they had before."""
    before = [(p, p.clone()) for module in modules for p in module.parameters()]
    try:
        yield
    finally:
        for p, value in before:
            p.copy_(value)
