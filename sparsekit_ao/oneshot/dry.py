"""A dry run of `prune`: what it would do and cost, from one block that is pruned on one batch and put back."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calibration import Statistics
from ..calibration.adapters import CONVOLUTIONS
from ..distributed import abandon_forward
from ..models.flops import flop_counter
from ..models.loading import is_elsewhere, loaded
from ..models.names import weights_by_name
from ..models.progress import hidden
from ..models.running import eval_mode, import_dynamo, tensors_in
from .chain import CalibrationData
from .prune_report import DryRun
from .solving import LayerRow, Layers
from .teacher import Teacher
from .training import EVERY, MEASURED, batch_norms
from .walk import Visit, Walk, visits_of, walk_of, without_autocast_cache

# Copies of a block in float32 in memory if weights are only dropped, or computed (examples/benchmarks/walk_memory.py).
DROPPED, TRAINED = 2, 8


@torch.no_grad()
def planned_run(
    layers: Layers,
    data: CalibrationData,  # of one batch
    all_data: CalibrationData,
    options: dict[str, Any],
    passes: int,  # of recovery
    copies: bool,  # whether `prune` would prune a copy
    start: float,
) -> DryRun:
    """Return what `prune` would do with all data."""
    walk = walk_of(layers, data, options)
    model, visits, chains = data.model, visits_of(walk, passes > 0), walk.names_of_chains
    rows = [layers.planned(name) for visit in visits for name in visit.tensors]
    total = sum(p.numel() for p in model.parameters())
    dropped = sum(round(_numel(layers, row.tensor) * (1 - row.density)) for row in rows)
    memory = outputs = 0
    if copies or is_elsewhere(model):  # a copy of all; or what is outside of blocks is read, too
        inside = {id(p) for block in walk.blocks for p in block.parameters()}
        memory = sum(p.nbytes for p in model.parameters() if copies or id(p) not in inside)
    seconds, flops, runs = time.perf_counter() - start, (0, 0), 0
    more, of_walk = estimated_walk(layers, walk, all_data, passes)
    if all_data.batches:
        seconds *= all_data.one_batch()[1] if layers.gradients() else 1
        runs = 1 + len(chains) + sum(visit.is_recorded for visit in visits if visit.block is None)
        runs += (passes and 1 + passes + bool(batch_norms(model))) * (not chains)
        with hidden():
            flops, outputs = _flops(data, layers, rows)
    memory += outputs + max(of_walk, outputs)  # the dense outputs are kept, and compared with those after the walk
    return DryRun(
        rows=tuple(rows),
        chains=tuple(chains),
        parameters=(total, total - dropped),
        flops=flops,
        runs=(runs, 2 + (passes and 1 + passes) if chains else 0),
        memory=memory,
        seconds=seconds + more,
        weights=weights_by_name(model),
    )


def estimated_walk(layers: Layers, walk: Walk, all_data: CalibrationData, passes: int) -> tuple[float, int]:
    """Return the seconds and bytes of a walk over all data; one block or layer is pruned on one batch, and put back."""
    visits, model = visits_of(walk, passes > 0), walk.data.model
    sizes = [sum(p.numel() for p in block.parameters()) for block in walk.blocks]
    sizes += [sum(_numel(layers, name) for name in visit.tensors) for visit in visits if visit.block is None]
    total = sum(p.numel() for p in model.parameters())
    largest = total if passes and not walk.blocks else max(sizes, default=0)
    memory = (DROPPED if layers.method is None and not passes else TRAINED) * 4 * largest
    if not all_data.batches:
        return 0.0, memory
    with eval_mode(model), without_autocast_cache(), hidden():
        try:
            seconds, held = _measured(layers, walk, visits, all_data, passes)
        finally:
            abandon_forward(model)
    return seconds, memory + held


def _numel(layers: Layers, name: str) -> int:
    return math.prod(layers.recorder.target(name, ()).shape)


def _flops(data: CalibrationData, layers: Layers, rows: Sequence[LayerRow]) -> tuple[tuple[int, int], int]:
    """Return the FLOPs of a forward pass, those without zeros in Linear and convolutions, and the bytes of outputs."""
    saved, started = 0.0, 0
    with flop_counter() as counter, eval_mode(data.model), ExitStack() as hooks:
        hooks.callback(abandon_forward, data.model)
        hooks.enter_context(without_autocast_cache())

        def begin(*_: Any) -> None:
            nonlocal started
            started = counter.get_total_flops()

        for row in rows:  # other modules have more products than those of a weight
            module = layers.groups[row.tensor]["module"]
            if not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                continue

            def end(*_: Any, dropped: float = 1 - row.density) -> None:
                nonlocal saved
                saved += (counter.get_total_flops() - started) * dropped

            hooks.enter_context(module.register_forward_pre_hook(begin))
            hooks.enter_context(module.register_forward_hook(end))
        outputs = sum(tensor.nbytes for _, tensor in tensors_in("", data.output(0)))
    return (counter.get_total_flops(), counter.get_total_flops() - round(saved)), outputs


class Times(NamedTuple):
    """How long the parts of the work on one block or layer take for one batch, in seconds."""

    loading: float
    recording: float
    solving: float
    forward: float
    matching: float  # a pass of recovery, which measures errors, too
    held: int  # bytes of activations that training keeps


def _measured(
    layers: Layers,
    walk: Walk,
    visits: Sequence[Visit],
    all_data: CalibrationData,
    passes: int,
) -> tuple[float, int]:
    """Prune one block or layer on one batch, and put it back; return seconds and bytes for all batches and blocks."""
    numel = {name: _numel(layers, name) for visit in visits for name in visit.tensors}
    _, total, largest = all_data.one_batch()
    visits = [visit for visit in visits if visit.tensors and visit.is_recorded]
    visits = [visit for visit in visits if visit.block is not None] or visits
    if not visits:
        return 0.0, 0
    visit = visits[0 if walk.blocks else len(visits) // 2]  # blocks are alike; of layers, the one in the middle
    is_matched = passes > 0 and (visit.block is not None or not walk.blocks)
    times = _timed(layers, walk, visit, Teacher(None, walk.data, passes=1) if is_matched else None, total)
    counts = [sum(p.numel() for p in b.parameters()) for b in walk.blocks] or [1]
    alike = sum(counts) / counts[-1 if visit.block is None else visit.block]
    seconds = times.solving * sum(numel.values()) / sum(numel[name] for name in visit.tensors)
    if visit.block is None:
        seconds += len(visits) * (total * times.recording + 2 * times.loading)
    else:
        seconds += alike * (total * (times.recording + times.forward * (2 if passes else 1)) + 2 * times.loading)
    if is_matched:  # one pass: a step, two runs before it and one after it, which measure the error
        # New statistics take one run of all batches, and one to measure the error.
        renews = visit.block is None and bool(batch_norms(walk.data.model))
        measured = (passes // EVERY + 2 + renews) * min(1.0, MEASURED / len(all_data.batches)) + renews
        step = max(times.matching - (3 + 2 * renews) * times.forward, 0.0)
        seconds += alike * total * (passes * step + measured * times.forward)
    streams = min(walk.kept.used * total, math.inf if walk.stream_memory is None else walk.stream_memory)
    return seconds, round(streams + times.held * largest)


def _timed(layers: Layers, walk: Walk, visit: Visit, teacher: Teacher | None, total: float) -> Times:
    """Prune and train one block or layer on one of `total` batches, and put it back; return how long each part took."""
    at, block = (-1, None) if visit.block is None else (visit.block, walk.blocks[visit.block])
    modules = [walk.data.model] if teacher is not None and block is None else walk.modules_of(visit)
    if teacher is not None:
        import_dynamo()  # not when training is timed
        teacher.start(walk)
    for chain in range(walk.chain_of[at] + 1) if block is not None else ():
        walk.begin_stream(chain, None if teacher is None else teacher.streams[chain])
    held, start = dict[int, int](), time.perf_counter()

    def record() -> dict[str, Statistics]:
        statistics = walk.record(visit, layers)
        for one in statistics.values():  # rows are summed if all batches together have enough of them
            if one.rows and one.tokens * total >= one.rows[0].shape[2]:
                one.sum_rows()
        return statistics

    def run() -> Any:
        return walk.data.output(0) if block is None else walk.streams[-1].output(block, 0)

    def match() -> Any:
        if teacher is not None:
            return teacher.finish([]) if block is None else teacher.match(at)

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with loaded(walk.data.model, modules, None if block is None else walk.device), ExitStack() as undone:
        for p in itertools.chain(*(module.parameters() for module in modules)):
            undone.callback(p.copy_, p.clone())
        loading = time.perf_counter() - start
        if teacher is not None and block is not None:
            teacher.advance(at)
        statistics = record()  # everything but solving is done twice, as the first time is slower
        recording, solving = seconds_of(record), seconds_of(lambda: layers.solve(visit.tensors, statistics))
        run()
        forward = seconds_of(run)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            match()
        matching = seconds_of(match)
        for p in itertools.chain(*(module.parameters() for module in modules)):
            held.pop(p.untyped_storage().data_ptr(), None)  # what remains are the activations that training keeps
    return Times(loading, recording, solving, forward, matching, sum(held.values()))


def seconds_of(function: Callable[[], Any]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start
