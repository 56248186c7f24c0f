"""The walk over a model: each block is loaded, pruned, matched to its dense self and stored before the next one.

Blocks form chains (`chain.Chain`), such as an encoder and a decoder, which are visited in the order of the forward
pass. Once a chain is finished its blocks run no more: what comes later reads what the last of them gave.

Below, x stands for the inputs of the next block in the dense model, for all batches, and x~ for those in the pruned
model. Each is kept in a stream (`chain.Stream`), one for each chain.

    for visit in the order of the forward pass (`visits_of`):
        if the visit is a block:
            load        its weights, on the device that computes (`loaded`)
            advance x   run the dense block: its outputs are the new x, and the targets of `match` (`Matching.advance`)
            record      statistics of its layers for the inputs x~ (`record`)
            solve       masks and kept weights of its layers (`Solving.solve`)
            match       train the kept weights so that the block gives the new x for x~ (`Matching.match`)
            advance x~  run the pruned block: its outputs are the new x~ (`Stream.advance`)
        if it is layers outside of blocks, which read the same tensor:
            record      their statistics, by running the model up to them
            load        their weights
            solve       their masks and kept weights
        save            the weights in the checkpoint, if there is one (`Checkpoint.write`)
        store           the weights where they came from (the end of `loaded`)

`prune`, `one_shot` and `recover` run this walk. Besides the model, memory holds the weights and statistics of one block
and the two streams. A resumed walk runs finished blocks again to move the streams on, and its results are bit-identical
to those of an uninterrupted one.
"""

import copy
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..calibration import SAMPLED, Recording, Statistics, Target
from ..distributed import abandon_forward, has_process_group, of_all_ranks, rank
from ..errors import SparsityError, check_writable, is_number, warn
from ..models.loading import Device, is_elsewhere, loaded
from ..models.progress import say, signs_of_life
from ..models.running import eval_mode, kept_generators
from .chain import (
    CalibrationData,
    Kept,
    Stream,
    are_same,
    called_again,
    calls_of,
    captured,
    find_chains,
    order,
    replaced,
    stop,
)
from .identity import SETTINGS, digest_of
from .solving import METHODS, LayerRow, Layers, Scoring, alike

# For each line of `call.txt`: what has changed since the earlier call if this line is different now.
_DIFFERENCES = ("another model", "other arguments", "other batches, forward or token_mask", *SETTINGS)
Solving = Layers | Scoring  # what a walk calls to prune layers


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A part of the model that is finished before the next: a block, or layers outside of blocks with one input."""

    name: str  # of the block, or of the first tensor
    block: int | None  # its number; None for layers outside of blocks
    tensors: tuple[str, ...]  # those that are pruned
    is_recorded: bool = True  # whether the inputs of the tensors are recorded


class Matching(Protocol):
    """What a walk calls, with the number of a block, to match it to that of the dense model."""

    row: Any  # the class of the rows that `match` returns
    dense: nn.Module | None  # None if the model that is walked is itself the dense one, until it changes
    streams: list[Stream]  # the dense stream of each chain; empty before `start`

    def start(self, walk: "Walk") -> None:
        """Begin the dense stream; this is called before anything changes."""

    def advance(self, at: int) -> None:
        """Move the dense stream on; this is called before the block is pruned."""

    def match(self, at: int) -> Any:
        """Train a block for its inputs in the pruned model; return a row of the report, or None."""


class Walk:
    """A walk over the blocks of a model and over the layers outside of them."""

    def __init__(
        self,
        data: CalibrationData,
        targets: Sequence[Target],  # whose inputs are recorded
        *,
        blocks: str | None = None,  # the name of their list; None finds all lists that have several of `layers`
        layers: Sequence[nn.Module] | None = None,  # None counts those of the targets
        device: Device = None,  # where blocks run; None is where their weights are
        stream_memory: float | None = None,  # bytes of the streams in memory, the rest is in files; None is no limit
    ) -> None:
        self.data, self.device = data, device
        with eval_mode(data.model), torch.no_grad():
            self.reached, self.unreached, self._repeated = order(data, targets) if targets else ([], [], set())
            layers = [target.module for target, _ in self.reached] if layers is None else layers
            # without blocks there is no stream, and the whole model runs anew in each visit
            self.chains = find_chains(data, layers, blocks)
            if not self.chains:  # the model runs anew for each layer, up to its only call
                self._repeated |= called_again(data, [target for target, _ in self.reached])
        names = {id(module): name for name, module in data.model.named_modules()}
        if has_process_group():
            self._agree(targets, names)
        self.blocks = [block for chain in self.chains for block in chain.blocks]
        self.chain_of = [c for c, chain in enumerate(self.chains) for _ in chain.blocks]  # by the number of the block
        self.names_of_chains = [tuple(names[id(block)] for block in chain.blocks) for chain in self.chains]
        self.names = [name for of_chain in self.names_of_chains for name in of_chain]
        inside = {id(module) for block in self.blocks for module in block.modules()}
        self.outside = [names[id(layer)] for layer in dict.fromkeys(layers) if id(layer) not in inside]
        # With a device, streams are kept on the CPU, so that the device has room for one block and one batch.
        self.stream_memory = stream_memory
        self._kept_options = None if device is None else "cpu", stream_memory
        self.kept = Kept(*self._kept_options)
        # Whether weights are changed where they are, so that an error must put them back.
        self._is_in_place = not is_elsewhere(data.model)
        self.streams: list[Stream] = []  # of the pruned model, one for each chain that has been begun
        self.rest: list[str] = []  # tensors that are pruned without statistics

    def _agree(self, targets: Sequence[Target], names: Mapping[int, str]) -> None:
        """Make all ranks visit the same targets in one order, and use chains only if every rank has found them."""
        firsts = [names[id(chain.blocks[0])] for chain in self.chains]
        own = [(target.name, read) for target, read in self.reached], [*self._repeated], firsts
        ranks = of_all_ranks(own)
        reads: dict[str, int] = {}
        for reached, _, _ in ranks:
            for name, read in reached:
                reads.setdefault(name, read)
        target_of = {target.name: target for target in targets}
        self.reached = [(target_of[name], read) for name, read in reads.items()]
        self.unreached = [target for target in targets if target.name not in reads]
        self._repeated = {name for _, repeated, _ in ranks for name in repeated}
        found = dict(zip(firsts, self.chains, strict=True))
        self.chains = [found[name] for name in ranks[0][2] if all(name in of_rank for *_, of_rank in ranks)]

    def begin_stream(self, chain: int, like: Stream | None = None, is_same: bool = False) -> None:
        """Begin the stream of a chain; what is equal in the stream `like`, all with `is_same`, is kept only once."""
        first = self.chains[chain].blocks[0]
        skips = self._may_skip_blocks([first])
        stream = Stream(self.chains[chain], self.kept, self.device, like)
        for index in range(len(self.data.batches)):
            if like is not None and is_same:
                stream.begin(like.arguments(index))
            else:
                with self._skipping_blocks(index) if skips else nullcontext():
                    stream.begin(captured(self.data, [first], index)[0])
        self.streams.append(stream)

    def advance(self, at: int) -> None:
        """Move the stream of a chain on through the block of this number."""
        is_last = at + 1 == len(self.blocks) or self.chain_of[at + 1] > self.chain_of[at]
        self.streams[self.chain_of[at]].advance(self.blocks[at], is_last)

    def run(
        self,
        caller: str,
        solving: Solving | None,  # None prunes no layers
        matching: Matching | None = None,  # None matches no blocks
        *,
        checkpoint: "Checkpoint | None" = None,
    ) -> tuple[list[Any], list[Any]]:
        """Visit all steps, and return the rows of pruned tensors and the rows of matched blocks."""
        self.streams, self.kept = [], Kept(*self._kept_options)
        visits = visits_of(self, matching is not None)
        solved: list[Any] = []
        matched: list[Any] = []
        finished = 0
        what = "block" if any(True for block in self.blocks for _ in block.children()) else "layer"
        is_shown = rank() == 0 and bool(visits)
        if checkpoint is not None and checkpoint.count and is_shown:
            say(f"{caller}: continues an earlier call, of which {checkpoint.count} of {len(visits)} steps are finished")
        with (
            eval_mode(self.data.model),
            torch.no_grad(),
            without_autocast_cache(),
            signs_of_life(caller, what, len(visits), is_shown) as done,
        ):
            try:
                if matching is not None:  # the dense model may be this one, whose masks must then keep everything
                    names = [name for visit in visits for name in visit.tensors]
                    with nullcontext() if solving is None else solving.masks(names):
                        matching.start(self)
                for visit in visits:
                    rows, row = self._visit(visit, visits[-1], finished, solving, matching, checkpoint)
                    solved += rows
                    matched += [] if row is None else [row]
                    finished += 1
                    errors = [r.after for r in rows if not math.isnan(r.after)] if row is None else [row.after]
                    done(visit.name, sum(errors) / len(errors) if errors else math.nan)
            except BaseException as error:
                if finished:
                    again = "Load the model as it was before and make the same call again, which goes on from there"
                    text = again if checkpoint else "With checkpoint=folder, the same call would go on from there"
                    error.add_note(f"{caller}: {finished} of {len(visits)} steps are finished. {text}.")
                raise
            finally:
                abandon_forward(self.data.model)  # an error may have interrupted a forward pass
        return solved, matched

    def _visit(
        self,
        visit: Visit,
        last: Visit,
        number: int,
        solving: Solving | None,
        matching: Matching | None,
        checkpoint: "Checkpoint | None",
    ) -> tuple[list[Any], Any]:
        """Load the weights of the visit of this number, finish it, and return the rows of its tensors and its block."""
        with ExitStack() as stack:
            if solving is not None:
                stack.enter_context(solving.masks(visit.tensors))
            modules, device = self.modules_of(visit), self.device
            recorded: dict[str, Statistics] | None = None
            if visit.block is None:  # the model runs as it is, offloaded or sharded, before weights are loaded
                is_saved = checkpoint is not None and number < checkpoint.count
                recorded = {} if solving is None or is_saved else self.record(visit, solving)
                device = None
            elif (chain := self.chain_of[visit.block]) == len(self.streams):
                like = None if matching is None else matching.streams[chain]
                # Nothing has changed before the first visit of a model without masks, and so both streams begin alike.
                is_masked = any(map(parametrize.is_parametrized, self.data.model.modules()))
                is_same = matching is not None and matching.dense is None and number == 0 and not is_masked
                self.begin_stream(chain, like, is_same)
            stack.enter_context(loaded(self.data.model, modules, device, writes=not isinstance(solving, Scoring)))
            if matching is not None and visit.block is not None:
                matching.advance(visit.block)
            return self._finish(visit, number, modules, solving, matching, checkpoint, recorded, visit is not last)

    def modules_of(self, visit: Visit) -> list[nn.Module]:
        """Return the modules whose weights a visit reads and writes."""
        if visit.block is not None:
            return [self.blocks[visit.block]]
        owners = [self.data.model.get_submodule(name.rpartition(".")[0]) for name in visit.tensors]
        return list(dict.fromkeys(owners))

    def _finish(
        self,
        visit: Visit,
        number: int,
        modules: Sequence[nn.Module],
        solving: Solving | None,
        matching: Matching | None,
        checkpoint: "Checkpoint | None",
        recorded: dict[str, Statistics] | None,
        moves_on: bool,
    ) -> tuple[list[Any], Any]:
        """Prune and match what a visit has loaded, or restore what an interrupted walk saved of the visit."""
        parts = enumerate(modules)
        named: dict[str, Tensor] = {f"{at}.{name}": p for at, part in parts for name, p in part.named_parameters()}
        was = "" if checkpoint is None else digest_of(named, visit.name)
        saved = None if checkpoint is None else checkpoint.read(number, visit.name, was)
        # Without `solving`, the caller is `recover`, which keeps what it has improved before an error.
        is_undone = self._is_in_place and solving is not None
        before = {name: p.clone() for name, p in named.items()} if is_undone else {}
        rows, row = [], None
        try:
            if saved is None:
                if solving is not None and visit.tensors:
                    rows = solving.solve(visit.tensors, self.record(visit, solving) if recorded is None else recorded)
                if matching is not None and visit.block is not None:
                    row = matching.match(visit.block)
            else:
                for name, p in named.items():
                    p.copy_(saved["weights"][name])
                if solving is not None:
                    solving.chosen.update(saved["masks"])
                    rows = [LayerRow(**one) for one in saved["solved"]]
                if matching is not None and saved["matched"]:
                    row = matching.row(**saved["matched"])
            if moves_on and visit.block is not None:  # inside `try`, so that an error here restores the weights too
                self.advance(visit.block)
            if checkpoint is not None and saved is None:
                masks = {} if solving is None else {n: solving.chosen[n] for n in visit.tensors if n in solving.chosen}
                state = {"was": was, "weights": dict(named), "masks": masks, "solved": [asdict(r) for r in rows]}
                checkpoint.write(number, {**state, "matched": None if row is None else asdict(row)})
        except BaseException:
            for name, p in before.items():
                named[name].copy_(p)
            raise
        return rows, row

    def record(self, visit: Visit, solving: Solving) -> dict[str, Statistics]:
        """Record the inputs of all tensors of a visit together, in the model as it is now."""
        targets = [solving.target(name) for name in visit.tensors] if visit.is_recorded else []
        targets = [self._sampled(target) for target in targets if target.needs and target.adapter is not None]
        if not targets:
            return {}
        pending: set[nn.Module] = set()  # layers outside of blocks that the present batch has not called yet

        def finish(module: nn.Module, *_: Any) -> None:
            pending.discard(module)
            if not pending:
                stop()

        with ExitStack() as stack:
            layers, skips = list[nn.Module](), False
            if visit.block is None:
                layers = [target.adapter.module for target in targets if target.adapter is not None]
                if not self._repeated.intersection(visit.tensors):  # otherwise a layer may be called again later
                    for module in layers:
                        stack.enter_context(module.register_forward_hook(finish))
                    skips = self._may_skip_blocks(layers)
            recording = stack.enter_context(Recording(targets, keep_rows=True))
            for index, masks in enumerate(self.data.token_masks):
                recording.token_mask = masks
                pending.update(layers)
                if visit.block is not None:
                    self.streams[-1].output(self.blocks[visit.block], index, masks)
                else:
                    with self._skipping_blocks(index) if skips else nullcontext():
                        self.data.run(index)
        return recording.statistics

    def _sampled(self, target: Target) -> Target:
        """Return the target with fewer sampled positions of a convolution per batch."""
        adapter: Any = copy.copy(target.adapter)
        inputs = adapter.matrix(torch.empty(target.shape, device="meta")).shape[2]
        # at most SAMPLED input values of all batches for each group of the convolution
        adapter.sampled = max(1, SAMPLED // (inputs * len(self.data.batches)))
        return replace(target, adapter=adapter)

    @contextmanager
    def _skipping_blocks(self, index: int) -> Iterator[None]:
        """Return a context in which no block of a finished chain runs: each returns what the last of them gave."""
        begun = zip(self.chains, self.streams, strict=False)  # later chains have no streams yet
        finished = [(block, stream) for chain, stream in begun if stream.is_finished for block in chain.blocks]

        def outputs(k: int, *args: Any, **kwargs: Any) -> Any:
            outputs = finished[k][1].outputs(index)
            self.data.token_masks[index].mark(outputs if finished[k][1].of_decoder else ())
            return outputs

        with replaced([block for block, _ in finished], outputs):
            yield

    def _may_skip_blocks(self, layers: Sequence[nn.Module]) -> bool:
        """Return whether layers get the same inputs from the first batch if blocks of finished chains do not run."""
        if not any(stream.is_finished for stream in self.streams):
            return False
        inputs: list[list[Any]] = []
        for skips in (False, True):
            inputs.append([])
            with calls_of(layers, inputs[-1]), self._skipping_blocks(0) if skips else nullcontext():
                try:
                    self.data.run(0)
                except Exception:
                    if not skips:
                        raise
                    return False
        return are_same(*inputs)  # not if a layer also reads what another block than the last one gave


def walk_of(layers: Layers, data: CalibrationData, options: dict[str, Any]) -> Walk:
    """Return a walk over layers; `layers.notes` and warnings say why it records no inputs of those in `rest`."""
    targets = [layers.target(name) for name in layers.groups] if data.batches else []
    walk = Walk(data, [target for target in targets if target.needs], **options)
    caller, how = layers.caller, "pruned without statistics (by magnitude where the score needs inputs)"
    if without_adapter := [target for target in walk.unreached if target.adapter is None]:
        kinds = dict.fromkeys(type(t.module).__name__.removeprefix("Parametrized") for t in without_adapter)
        names = ", ".join(target.name for target in without_adapter)
        warn(f"{caller}: inputs of {', '.join(kinds)} are not recorded, so {names} are {how}")
    unreached = dict.fromkeys(target.name for target in walk.unreached if target.adapter is not None)
    if names := ", ".join(unreached):
        warn(f"{caller}: no batch reached {names}; they are {how}, not compensated")
    recorded = {target.name for target, _ in walk.reached}
    walk.rest = [name for name in layers.groups if name not in recorded]
    for name in walk.rest:
        note = "" if layers.method is None else "no inputs recorded: not compensated"
        note = "not reached by any batch" if name in unreached else note
        layers.notes[name] = note if data.batches else "no batches"
    return walk


def visits_of(walk: Walk, visits_all: bool) -> list[Visit]:
    """Return the visits of the walk, in order: those that have tensors, and the blocks between them, or all blocks."""
    block_of = {id(m): k for k, block in enumerate(walk.blocks) for m in block.modules()}
    inside: dict[int, list[str]] = {}  # {block: names}
    outside: dict[int, tuple[int, list[str]]] = {}  # {number of the tensor they read: (last block before them, names)}
    reached = -1  # the last block in which a layer was reached so far; -1 if there is none
    for target, read in walk.reached:
        block = block_of.get(id(target.module))
        if block is None:
            outside.setdefault(read, (reached, []))[1].append(target.name)
        else:
            inside.setdefault(block, []).append(target.name)
            reached = max(reached, block)
    alone: list[str] = []
    for name in walk.rest:  # tensors inside a block are pruned before it is matched
        block = block_of.get(id(walk.data.model.get_submodule(name.rpartition(".")[0])))
        (alone if block is None else inside.setdefault(block, [])).append(name)
    # Layers that come after the last block in which a layer was reached may read what any later block gives, so all
    # blocks come before them.
    visits_all |= any(after == reached >= 0 for after, _ in outside.values())
    count = len(walk.blocks) if visits_all else max(inside, default=-1) + 1
    places = [(after if after < reached or reached < 0 else count - 1, names) for after, names in outside.values()]
    visits: list[Visit] = []
    for k in range(-1, count):  # place -1 is before the first block
        if k >= 0:
            visits.append(Visit(name=walk.names[k], block=k, tensors=tuple(inside.get(k, ()))))
        visits += [Visit(name=names[0], block=None, tensors=tuple(names)) for place, names in places if place == k]
    return [*visits, *(Visit(name=name, block=None, tensors=(name,), is_recorded=False) for name in alone)]


class Checkpoint:
    """A folder with a file for each finished visit of a walk, which rank 0 writes and the same call restores.

    `call` are digests that identify this call, one for each of `_DIFFERENCES`.
    """

    def __init__(self, folder: str | os.PathLike[str], call: Sequence[str], caller: str) -> None:
        self._folder, self._caller = Path(folder), caller
        self._writes = rank() == 0
        with alike():
            count = self._begin(call, f"{caller}: checkpoint={str(folder)!r}") if self._writes else 0
        self.count: int = of_all_ranks(count)[0]  # visits that an earlier call finished

    def _begin(self, call: Sequence[str], where: str) -> int:
        """Return how many visits an earlier call finished, and write the digests of the call if there is none."""
        call_file, count = self._folder / "call.txt", 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not call_file.exists():
                _write_whole(call_file, lambda path: path.write_text("\n".join(call)))
                return 0
            saved = call_file.read_text("ascii", "replace").split("\n")
            while self._path(count).exists():
                count += 1
        except (OSError, ValueError) as error:
            raise SparsityError(f"{where} is not a folder that can be written: {error}") from None
        if saved != list(call):
            is_known = len(saved) == len(call) and all(map(re.compile("[0-9a-f]{128}").fullmatch, saved))
            differing = [what for what, *pair in zip(_DIFFERENCES, saved, call, strict=False) if len({*pair}) > 1]
            differing = differing if is_known else ["another version, or its call.txt is damaged"]
            raise SparsityError(
                f"{where} was written by a call with {' and '.join(differing)}; to continue that call, load the model "
                "as it was and make the same call under the same settings; to begin a new one, give another folder"
            )
        return count

    def read(self, number: int, name: str, was: str) -> dict[str, Any] | None:
        """Return what an earlier call saved of a visit, or None; refuse it unless it began with the digest `was`."""
        if number >= self.count:
            return None
        path = self._path(number)
        with alike():
            try:
                saved: dict[str, Any] = torch.load(path, map_location="cpu")
                if saved.pop("digest") != digest_of(saved, "the file"):
                    raise SparsityError("its content is not what was saved")
            except Exception as error:  # damaged files raise errors of many classes
                reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
                raise SparsityError(
                    f"{self._caller}: the file {str(path)!r} of the checkpoint cannot be read ({reason}). If it is "
                    "damaged, delete it, load the model as it was before, and make the call again"
                ) from error
            if saved["was"] != was:
                raise SparsityError(
                    f"{self._caller}: {name} has other weights than when the interrupted call began; load the "
                    "model as it was before that call"
                )
        return saved

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Save a finished visit."""
        with alike():
            try:
                if self._writes:
                    whole = {**state, "digest": digest_of(state, "the file")}
                    _write_whole(self._path(number), lambda path: torch.save(whole, path))
            except (OSError, RuntimeError) as error:  # PyTorch raises a RuntimeError if the disk is full
                raise SparsityError(
                    f"{self._caller}: a finished step cannot be saved as {str(self._path(number))!r}: {error}; see "
                    "whether the disk is full"
                ) from error

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05}.pt"


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a name of its own and then rename it, so that a file called `path` is always complete."""
    unfinished = path.with_suffix(f".{os.urandom(4).hex()}.unfinished")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def checkpoint_of(
    data: CalibrationData, folder: str | os.PathLike[str] | None, caller: str, *arguments: object
) -> Checkpoint | None:
    """Return the checkpoint of a call, or None without a folder; raise an error unless all ranks make the same call."""
    if folder is None and not has_process_group():
        return None
    refuses = folder is not None
    with alike(), kept_generators():  # a module that makes its own copy may draw numbers for it
        call = [
            digest_of(data.model, caller),
            digest_of(arguments, f"{caller}: an argument, such as the score,", refuses),
            digest_of(data.forward, f"{caller}: forward", refuses),
        ]
    calls = of_all_ranks((*call, folder is None))
    if len({is_none for *_, is_none in calls}) > 1:
        raise SparsityError(f"{caller}: some ranks have a checkpoint= and others have none; give it on every rank")
    if len(set(calls)) > 1:
        raise SparsityError(
            f"{caller}: the ranks have different models or arguments; load the same weights on every rank, and "
            "give the same arguments except for the batches"
        )
    if folder is None:
        return None
    call[2] += digest_of((data.batches, [one.masks for one in data.token_masks]), f"{caller}: a batch", True)
    settings = [digest_of(setting(), caller) for setting in SETTINGS.values()]
    return Checkpoint(folder, [*call[:2], digest_of(call[2], ""), *settings], caller)


def check_options(
    caller: str, device: object, stream_memory: object, checkpoint: object = None, compensate: object = None
) -> None:
    """Raise an error if an argument that `prune`, `one_shot` and `recover` pass on to the walk is invalid."""
    if compensate not in METHODS:
        raise SparsityError(f"{caller}: compensate must be one of {', '.join(map(repr, METHODS))}, got {compensate!r}")
    if stream_memory is not None and (not is_number(stream_memory) or not float(stream_memory) >= 0):
        raise SparsityError(f"{caller}: stream_memory must be a number of bytes, or None, got {stream_memory!r}")
    if checkpoint is not None and (not isinstance(checkpoint, (str, os.PathLike)) or not str(checkpoint)):
        raise SparsityError(f"{caller}: checkpoint must be a folder, or None, got {checkpoint!r}")
    if checkpoint is not None and not has_process_group():  # else `Checkpoint` raises the error on all ranks
        check_writable(checkpoint, f"{caller}: checkpoint={str(checkpoint)!r}")
    if device is None:
        return
    try:
        if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
            raise TypeError(f"a {type(device).__name__}")
        if torch.empty(1, device=device).is_meta:
            raise TypeError("the meta device has no values")
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SparsityError(f"{caller}: device={device!r} is not a device that blocks can run on: {reason}") from None


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Return a context in which autocast converts weights at each use; cached conversions would be outdated."""
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)
        torch.clear_autocast_cache()
