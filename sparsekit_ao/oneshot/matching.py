"""`recover` trains the blocks of a pruned model to give the outputs of the dense model's blocks, without labels.

3BASiL (arXiv 2603.01376) and "A Free Lunch in LLM Compression" (arXiv 2510.14444) do this with language models.
"""

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils import _pytree

from .. import masking
from ..calibration import token_rows
from ..calibration.gram import is_finite
from ..distributed import full_tensor, has_process_group, is_sharded, of_all_ranks, rank
from ..errors import SparsityError, checked_model, is_number, with_hints
from ..models.loading import Device, is_elsewhere, loaded, refuse_unloadable
from ..models.names import by_pattern, named_tensors, owner_of
from ..models.progress import steps
from ..models.running import TokenMask, eval_mode, first_tensor, import_dynamo, keyed_generator
from ..tables import Table, lines_of_error
from .chain import CalibrationData, Stream, captured
from .solving import may_change
from .walk import Walk, check_options, checkpoint_of, without_autocast_cache

PASSES = 4  # passes over all batches for each block
RATE = 0.02  # the highest learning rate, as a fraction of the root mean square of a block's kept weights
WHOLE = 0.5  # a factor of the learning rate if the whole model is trained
WARM = 0.1  # the fraction of the steps in which the learning rate rises
LAST = 0.2  # the learning rate at the end, after a cosine, as a fraction of the highest one
MEASURED = 8  # the number of batches on which passes are compared
HELD_OUT = 8  # one in HELD_OUT rows of these batches is held out from training if they have at least ENOUGH rows
ENOUGH = 2048  # with fewer rows, an eighth is too few to measure an error, so none is held out
LARGE = 2  # rows of dense outputs with more than LARGE times the typical norm count as if they had no more
EVERY = 2  # errors are measured after the last pass and every EVERY passes before it
PATIENCE = 4  # training ends if the error has not become smaller in PATIENCE passes


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """A row of a `RecoveryReport`: what training did to one block.

    Attributes:
        block: The name of the block; "" is the whole model.
        before: The relative error of the block's output, ||B(x~) - B_dense(x)|| / ||B_dense(x)||, on the rows on which
            passes are compared (see `recover`). Rows of B_dense(x) with more than twice the typical norm, the geometric
            mean, are first scaled down to it, and those of B(x~) with them. With `outputs="kl"`, the row of the whole
            model has the divergence of the logits, in nats per row of logits.
        after: The same number for the recovered weights.
        passes: The number of passes over the batches until the weights were reached that the model now has; 0 if no
            pass reduced the error.
        seconds: The time spent on this block, in seconds.

    >>> BlockRow(block="layers.0", before=0.3, after=0.1, passes=4, seconds=2.5).after
    0.1
    """

    block: str
    before: float
    after: float
    passes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RecoveryReport(Table[BlockRow]):
    """What `recover` did to each block; prints as a table.

    Attributes:
        rows: A `BlockRow` for each block, in order.
        tokens: How many tokens counted, as text; "" if all did.
        untrained: The pruned layers outside of all chains of blocks, which are not trained.
        error_to_dense: The relative error of the model's outputs Y (the first tensor that the model or `forward`
            returns) on the first batch, ||Y - Y_dense|| / ||Y_dense - mean of Y_dense over all rows||. Outputs that are
            the same for every input have an error of about 1. NaN if it is not known.

    >>> print(RecoveryReport(rows=(BlockRow(block="layers.0", before=0.3, after=0.1, passes=4, seconds=2.5),)))
    block     before   after  passes  seconds
    layers.0  0.3000  0.1000       4     2.50
    """

    rows: tuple[BlockRow, ...]
    tokens: str = ""
    untrained: tuple[str, ...] = ()
    error_to_dense: float = math.nan
    bars = ("before", "after")

    def above(self) -> list[str]:
        """Return how far the outputs are from those of the dense model."""
        return lines_of_error(self.error_to_dense)

    def below(self) -> list[str]:
        """Return what counted, which blocks keep their weights, and the layers that were not trained."""
        names = ", ".join(by_pattern(self.untrained))
        lines = [self.tokens] * bool(self.tokens) + [f"in no chain of blocks, hence not trained: {names}"] * bool(names)
        if kept := sum(row.passes == 0 for row in self.rows):
            lines.append(
                f"no pass reduced the error of {kept} of {len(self.rows)}, which keep their weights; give more data"
            )
        return lines

    def metrics(self) -> dict[str, float]:
        """Return {"recovered_error/<block>": ...} for any logger."""
        return {f"recovered_error/{r.block or 'model'}": r.after for r in self.rows}


@with_hints
def recover(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    passes: int = PASSES,
    rate: float = RATE,
    outputs: str | None = None,
    blocks: str | None = None,
    token_mask: TokenMask = None,
    seed: int = 0,
    device: Device = None,
    stream_memory: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> RecoveryReport:
    """Train the repeated blocks of a pruned model, in order, to give the outputs of the dense model's blocks.

    For a block B with input x in the dense model and x~ in the pruned one, the mean of ||B(x~) - B_dense(x)||^2 over
    all tokens is minimized by Adam. A token whose dense output has more than twice the typical norm, as the first one
    of a text often has, counts by its relative error. Kept weights, biases and norm parameters change, whether they
    require gradients or not. Masks stay, and so do zeros: in tensors of two or more dimensions, elements that are
    exactly 0 remain 0. A model without repeated blocks is trained as one block.

    Both models run in eval mode. Weights in 16 bits are trained as float32 copies. Besides the models, memory holds the
    inputs of a block in both models for all batches, and five times the weights of one block in float32. Either model
    may be offloaded by accelerate (its blocks are then read one by one) or sharded by `fully_shard`. All chains of
    blocks are trained, such as an encoder and a decoder; the report says which pruned layers are in none of them.

    In distributed training all ranks pass the same models and the same number of batches. A step takes a part of one
    batch of each rank, so that steps are those of one process with all batches, and gradients are summed over ranks.

    Args:
        model: The pruned model, which is changed in place. It may be masked, squashed, or made smaller by `shrink` or
            `shrink_layers`. A block that remains after `shrink_layers` also learns what the removed blocks after it
            did.
        dense: The dense model that `model` was made from. Blocks have the same names and outputs of the same shapes in
            both models.
        batches: Calibration data without labels, as for `one_shot`. More data helps more than more passes.
        forward: A function `(model, batch) -> outputs` that is called instead of the models.
        passes: The number of passes over all batches for each block, 4 by default. The error is measured on eight
            batches: before the first pass, after the last one, and after every second one before that, counted from
            the end. The weights with the smallest error are taken. Training of a block ends early if four passes have
            not made its error smaller. An eighth of the rows of the eight batches is held out from training to measure
            the error; if these batches have fewer than 2,048 rows, it is measured on all of their rows.
        rate: The highest learning rate, as a fraction of the root mean square of a block's kept weights; 0.02 by
            default. A whole model is trained with half of it.
        outputs: If given, the whole model is trained at once and not block by block, to give the dense model's outputs
            (the first tensor that the model or `forward` returns), by the mean squared error (`"mse"`) or the
            divergence of logits (`"kl"`). This takes more time and memory. It is for a last call, after the blocks, at
            a far lower `rate`, such as 0.0005.
        blocks: The name of a list of repeated blocks, a ModuleList or Sequential. None (default) finds all lists.
        token_mask: Which tokens count, as for `one_shot`.
        seed: An int that determines the order of batches.
        device, stream_memory, checkpoint, progress: As for `one_shot`.

    Returns:
        A `RecoveryReport` with a row for each block that was trained: its relative output error before and after.

    Raises:
        SparsityError: An argument does not fit, there are no batches, blocks of the models do not fit each other, or
            values are not finite. After an error or an interruption, blocks that were finished keep their new weights,
            the block that was being trained has the weights of its best pass so far (if it is offloaded, its weights
            are as they were), and later blocks are as they were.

    >>> import copy
    >>> from sparsekit_ao import ScopeSparsifier, one_shot, recover
    >>> dense = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    >>> model, batches = copy.deepcopy(dense), [torch.randn(64, 16) for _ in range(8)]
    >>> sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))  # 2:4
    >>> sparsifier.prepare(model)
    >>> report = one_shot(sparsifier, batches)
    >>> (row,) = recover(model, dense, batches)
    >>> row.after < row.before, sparsifier.check()
    (True, 256)
    """
    for value, what, least in ((passes, "passes", 1), (seed, "seed", 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SparsityError(f"recover: {what} must be an int >= {least}, got {value!r}")
    if not is_number(rate) or not 0 < float(rate) < math.inf:
        raise SparsityError(f"recover: rate must be a positive number, got {rate!r}")
    if outputs not in (None, "mse", "kl"):
        raise SparsityError(f"recover: outputs must be 'mse', 'kl' or None, got {outputs!r}")
    check_options("recover", device, stream_memory, checkpoint)
    data = CalibrationData.checked(model, batches, forward, token_mask, "recover")
    teacher = Teacher(dense, data, passes=passes, rate=rate, seed=seed, outputs=outputs)
    layers = _changed_layers(model, dense) if outputs is None else ()  # without layers there are no blocks
    listed = blocks if outputs is None else None
    walk = Walk(data, (), blocks=listed, layers=layers, device=device, stream_memory=stream_memory)
    of_blocks = {"blocks": blocks, "device": device, "stream_memory": stream_memory, "checkpoint": checkpoint}
    if not walk.blocks and (given := [name for name, value in of_blocks.items() if value is not None]):
        why = "has no repeated blocks" if outputs is None else "is trained on its outputs"
        raise SparsityError(f"recover: the model {why}, so it is trained as a whole; leave out {', '.join(given)}")
    saved = checkpoint_of(data, checkpoint, "recover", teacher.described(), blocks, device)
    report = teacher.finish(walk.run("recover", None, teacher, checkpoint=saved, progress=progress)[1], progress)
    return replace(report, error_to_dense=data.error_to(replace(data, model=dense).first_output()))


def _check_models(model: nn.Module, dense: nn.Module | None) -> None:
    """Raise an error unless a model can be trained to match the dense one (None: the model itself as it is now)."""
    if checked_model(model, "recover") is dense:
        raise SparsityError("recover: model and dense are the same object; keep a deep copy before pruning")
    if torch.is_inference_mode_enabled():
        raise SparsityError("recover: weights cannot be trained in inference mode; call it outside, or use no_grad")
    dense_addresses: set[int] = set()  # of the dense model's values, which the loop visits first
    models = {"": model} if dense is None else {"the dense model's ": checked_model(dense, "recover"), "": model}
    for whose, one in models.items():
        refuse_unloadable(one, "recover")
        for name, p in one.named_parameters():
            if p.is_inference():
                raise SparsityError(
                    f"recover: {whose}{name} was made in inference mode, and such weights cannot be trained; load the "
                    "model outside of torch.inference_mode(), or clone its weights there"
                )
            if p.is_meta or is_sharded(p):  # values that cannot be read here
                continue
            if not is_finite(p):
                raise SparsityError(f"recover: {whose}{name} has values that are not finite")
            if one is dense:
                dense_addresses.add(p.data_ptr())
            elif p.numel() and p.data_ptr() in dense_addresses:
                raise SparsityError(f"recover: both models share the values of {name}; keep a deep copy before pruning")
    if dense is None:
        return
    modules, named = dict(dense.named_modules()), dict(model.named_modules())
    for (name, module), dense_name in zip(named.items(), _names_in_dense(model, dense, named), strict=True):
        is_of_mask = isinstance(module, parametrize.ParametrizationList) or ".parametrizations" in f".{name}"
        if dense_name not in modules and not is_of_mask:
            raise SparsityError(
                f"recover: the dense model has no module {dense_name!r}; give the model as it was before pruning. If "
                "shrink_layers removed blocks, the pruned model must be the one that it returned, or a copy of it"
            )
    _refuse_exchanged(model, dense)


def _refuse_exchanged(model: nn.Module, dense: nn.Module) -> None:
    """Raise an error if the dense model is zero wherever the model is, and elsewhere too, as if exchanged."""
    if is_elsewhere(model) or is_elsewhere(dense):
        return  # the values of offloaded and sharded weights cannot be compared here
    if {name for name, _ in named_tensors(dense)} != {name for name, _ in named_tensors(model)}:
        return  # the model was made smaller, so it is not the dense one
    zeros = dense_zeros = 0
    for name, p in named_tensors(model):
        if p.ndim > 1:
            is_zero, is_dense_zero = (masking.used_weight(*owner_of(one, name)) == 0 for one in (model, dense))
            if is_zero.shape != is_dense_zero.shape or bool((is_zero & ~is_dense_zero.to(is_zero.device)).any()):
                return
            zeros += int(is_zero.count_nonzero())
            dense_zeros += int(is_dense_zero.count_nonzero())
    if dense_zeros > zeros:
        raise SparsityError(
            f"recover: the dense model has {dense_zeros:,} weights that are zero, but the pruned one only "
            f"{zeros:,}; check the order of the arguments, recover(pruned, dense, batches)"
        )


def passes_of(recover: object, caller: str) -> int:
    """Return the number of passes over the batches that `recover` of `prune` or `shrink` asks for, 0 for False."""
    if not isinstance(recover, int) or recover < 0:
        raise SparsityError(f"{caller}: recover must be True, False or a number of passes, got {recover!r}")
    return PASSES if recover is True else int(recover)


def check_ranks(data: CalibrationData) -> None:
    """Raise an error unless every rank has the same number of batches."""
    counts = of_all_ranks(len(data.batches))
    if len(set(counts)) > 1:
        text = " and ".join(map(str, counts))
        raise SparsityError(f"recover: every rank needs the same number of batches, got {text}")


def _changed_layers(model: nn.Module, dense: nn.Module) -> list[nn.Module]:
    """Return the modules whose matrices differ in the dense model; if none do, return all modules with matrices."""
    names = [name for name, p in named_tensors(model) if p.ndim > 1]
    layers, changed, dense_tensors = [owner_of(model, name)[0] for name in names], [], dict(named_tensors(dense))
    if is_elsewhere(model) or is_elsewhere(dense):
        return layers  # the values of offloaded and sharded weights cannot be compared here
    for name, dense_name in zip(names, _names_in_dense(model, dense, names), strict=True):
        module, tensor = owner_of(model, name)
        other = dense_tensors.get(dense_name)
        weight = masking.used_weight(module, tensor)
        if other is None or weight.shape != other.shape or not torch.equal(weight, other.to(weight.device)):
            changed.append(module)
    return changed or layers


class Teacher:
    """The dense model in a walk; it trains blocks of the pruned model to match its own blocks (`walk.Matching`).

    `data` is of the pruned model; with `dense=None` that model is the dense one, until the walk reaches its blocks.
    """

    row = BlockRow

    def __init__(
        self,
        dense: nn.Module | None,
        data: CalibrationData,
        *,
        passes: int = PASSES,
        rate: float = RATE,
        seed: int = 0,
        outputs: str | None = None,
    ) -> None:
        _check_models(data.model, dense)
        check_ranks(data)
        self.dense, self.data = dense, data
        self.passes, self.rate, self.seed, self.outputs = passes, rate, seed, outputs
        self.streams: list[Stream] = []  # of the dense model, one for each chain; empty before `start`

    def described(self) -> tuple[object, ...]:
        """Return values that identify this teacher."""
        return self.dense, self.passes, self.rate, self.seed, self.outputs

    def start(self, walk: Walk) -> None:
        """Begin the dense stream; if the model itself is the dense one and has no blocks, keep its outputs instead."""
        self._walk, dense = walk, walk.data.model if self.dense is None else self.dense
        if is_elsewhere(walk.data.model) and not walk.blocks:
            raise SparsityError(
                "recover: a model without repeated blocks, or with outputs=, is trained as a whole, so its weights "
                "must be in memory; load it without offloading, and recover before fully_shard"
            )
        data = replace(self.data, model=dense)
        with eval_mode(dense):
            if walk.blocks:
                self._begin_streams(walk, data)
                return
            refuse_unfit(walk.data.output(0), data.output(0), "the model")
            if self.dense is None:
                for k in range(len(data.batches)):
                    walk.kept.put(("outputs", k), _output_tensor(data.output(k)))

    def _begin_streams(self, walk: Walk, dense: CalibrationData) -> None:
        """Begin the dense streams of all chains, since a model that is its own dense model changes from now on."""
        # For each chain the dense blocks and, for each block in the walk, the last of these that it stands for.
        paired = [_paired(walk.data.model, dense.model, names) for names in walk.names_of_chains]
        self._dense_blocks = [blocks for blocks, _ in paired]
        self._last = [last for _, lasts in paired for last in lasts]
        self._check_blocks(walk, dense)
        first = [blocks[0] for blocks in self._dense_blocks]
        self.streams = [Stream(chain, walk.kept, walk.device) for chain in walk.chains]
        for index in range(len(dense.batches)):
            for chain, arguments in captured(dense, first, index).items():
                self.streams[chain].begin(arguments)

    def _check_blocks(self, walk: Walk, dense: CalibrationData) -> None:
        """Raise an error unless the blocks of a smaller model have outputs of the dense blocks' shapes."""
        places = zip(walk.blocks, walk.chain_of, self._last, strict=True)
        pairs = [(block, self._dense_blocks[chain][at]) for block, chain, at in places]
        sizes = [[Counter(p.shape for p in block.parameters()) for block in each] for each in zip(*pairs, strict=True)]
        if sizes[0] == sizes[1]:
            return
        outputs: dict[nn.Module, Any] = {}
        with ExitStack() as hooks:
            for block in itertools.chain(*pairs):
                hooks.enter_context(
                    block.register_forward_hook(lambda block, _, output: outputs.update({block: output}))
                )
            for data in (walk.data, dense):
                data.output(0)
        for (block, dense_block), name in zip(pairs, walk.names, strict=True):
            if _has_weights(block):
                refuse_unfit(outputs[block], outputs[dense_block], name)

    def advance(self, at: int) -> None:
        """Move the dense stream on through the dense block, and through the removed blocks that followed it."""
        chain = self._walk.chain_of[at]
        stream = self.streams[chain]
        if self.dense is None:
            stream.advance(self._walk.blocks[at])
            return
        for dense_block in self._dense_blocks[chain][stream.advanced : self._last[at] + 1]:
            with loaded(self.dense, [dense_block], self._walk.device), eval_mode(self.dense):
                stream.advance(dense_block)

    def match(self, at: int) -> BlockRow | None:
        """Train a block, with its inputs in the pruned model, to give the dense outputs; None if it has no weights."""
        block, dense = self._walk.blocks[at], self.streams[self._walk.chain_of[at]]
        if not _has_weights(block):
            return None
        student = _Student(block, self._walk.streams[-1].output)
        # The dense stream has advanced already, so its next inputs are the outputs of the dense block.
        name = self._walk.names[at]
        return _Training(self, student, lambda k: _output_tensor(dense.hidden(k)), "mse", at, name).run()

    @torch.no_grad()
    def finish(self, rows: Sequence[BlockRow], progress: bool = True) -> RecoveryReport:
        """Train the whole model if the walk had no blocks; return the report of these rows and the whole model's."""
        rows, model, dense = [*rows], self.data.model, self.dense
        if not self._walk.blocks:
            whole = _Student(model, lambda _, k: self.data.output(k))
            targets = replace(self.data, model=dense) if dense is not None else None

            def target(k: int) -> Tensor:
                return _output_tensor(self._walk.kept.get(("outputs", k)) if targets is None else targets.output(k))

            with eval_mode(model), eval_mode(model if dense is None else dense), without_autocast_cache():
                rows.append(_Training(self, whole, target, self.outputs or "mse", 0, "").run(progress))
        outside = self._walk.outside if self._walk.blocks else ()
        return RecoveryReport(rows=tuple(rows), tokens=self.data.counted(), untrained=tuple(outside))


class _Training:
    """The training of a block, or the whole model (named ""), to give `target(k)` for batch k.

    Steps are those of one process that has all batches, each of which is a step: batch k of rank r is its batch
    k * ranks + r. Sequences of a batch are divided into a part for each rank.
    """

    def __init__(
        self, teacher: Teacher, student: "_Student", target: Callable[[int], Tensor], metric: str, at: int, name: str
    ) -> None:
        self.student, self.target, self.metric, self.name = student, target, metric, name
        self.seed, self.passes, walk = teacher.seed, teacher.passes, teacher._walk
        of = walk.chains[walk.chain_of[at]].of_decoder if name else 2  # of the model's outputs
        self.masks = [masks.masks[of] for masks in teacher.data.token_masks]
        self.batches, self.draws = len(self.masks), torch.Generator().manual_seed(teacher.seed + at)
        self.own, self.ranks = rank(), torch.distributed.get_world_size() if has_process_group() else 1
        whole = self.batches * self.ranks
        # The middles of MEASURED equal parts of the batches; some of their rows are held out if they have enough.
        middles = {(2 * k + 1) * whole // (2 * MEASURED) for k in range(MEASURED)}
        self.compared = sorted(k // self.ranks for k in middles if k % self.ranks == self.own)
        self.device, self.orders = target(0).device, set[bool]()
        counted, self.typical = self._counted()
        self.holds_out = counted >= ENOUGH
        self.rate, scaled = teacher.rate, teacher.rate * student.weight_rms() * (1 if name else WHOLE)
        self.optimizer, self.schedule = _optimizer(student, scaled, self.passes * whole)

    def _counted(self) -> tuple[float, float]:
        """Return how many rows are compared, and the typical squared norm of a row."""
        norms = torch.zeros(3, dtype=torch.float64, device=self.device)
        for k in dict.fromkeys((0, *self.compared)):  # the first batch may tell the order of dimensions
            expected = self.target(k)
            rows = token_rows(expected, self.masks[k], self.orders) if expected.ndim else norms[:0, None]
            squares = rows.double().square().sum(-1)
            if k in self.compared:
                logs = squares[squares > 0].log()
                norms += torch.stack((norms.new_tensor(len(squares)), norms.new_tensor(len(logs)), logs.sum()))
        counted, nonzero, total = _over_ranks(norms).tolist()
        return counted, math.exp(total / max(nonzero, 1))

    def error(self, k: int, held_out: bool, part: int | None = None) -> tuple[Tensor, Tensor]:
        """As `_error`, of the rows of batch k that are held out or not, or of those in a part of it."""
        with torch.no_grad():
            expected = self.target(k)
        kept = slice(part, None, self.ranks)
        actual = None if part is None else self.student.part(k, kept, expected)
        is_divided = actual is not None
        actual = self.student.output(k) if actual is None else actual
        refuse_unfit(actual, expected[kept] if is_divided else expected, self.name or "the model")
        places = torch.arange(expected[..., 0].numel(), device=self.device).view(*expected.shape[:-1], 1)
        places = token_rows(places, self.masks[k], self.orders)[:, 0]  # of the rows that count
        if k in self.compared and self.holds_out:
            generator = keyed_generator(self.seed, k * self.ranks + self.own)
            order = torch.randperm(len(places), generator=generator, device="cpu").to(self.device)
            places = places[order[: len(order) // HELD_OUT] if held_out else order[len(order) // HELD_OUT :]]
        if part is not None and not is_divided:
            places = places[kept]
        counts = torch.zeros(expected.shape[:-1], dtype=torch.bool, device=self.device)
        counts.view(-1)[places] = True
        if is_divided:
            expected, counts = expected[kept], counts[kept]
        return _error(actual[counts], expected[counts], self.metric, self.typical)

    def measured(self) -> float:
        """Return the error of all compared batches and ranks, as `BlockRow` has it."""
        errors = torch.zeros(2, dtype=torch.float64, device=self.device)
        for k in self.compared:
            errors += torch.stack(self.error(k, held_out=True))
        loss, divisor = _over_ranks(errors).tolist()
        if not math.isfinite(loss):
            lower = f"; call recover(pruned, dense, batches, rate=r) with r below {self.rate:g}"
            raise SparsityError(
                f"recover: the outputs of {self.name or 'the model'} are not finite"
                f"{lower if self.optimizer.state else ' before it is trained'}"
            )
        return (math.sqrt if self.metric == "mse" else float)(loss / (divisor or 1))

    def step(self, k: int, scale: float) -> None:
        """Change the weights by the gradients of a part of a batch."""
        self.optimizer.zero_grad()
        with torch.enable_grad():
            part = (k + self.own) % self.ranks if self.ranks > 1 else None
            loss = self.error(k // self.ranks, False, part)[0] / scale
        self.student.set_gradients(loss)
        self.optimizer.step()
        self.schedule.step()

    def run(self, progress: bool = False) -> BlockRow:
        """Train, and keep the best weights."""
        start, before = time.perf_counter(), self.measured()
        best, best_pass = before, 0
        # A loss is a sum over the rows of a batch. It is divided by the initial loss of one row, so that gradients are
        # in the range of 16 bits.
        first = self.error(0, held_out=False)[0]
        total, rows = _over_ranks(torch.stack((first, first.new_tensor(self.target(0).shape[:-1].numel()))))
        scale = float(total / rows.clamp(min=1)) or 1.0
        whole, after = self.batches * self.ranks, before
        try:
            with steps("recover", "step", self.passes * whole, progress and rank() == 0) as done:
                for number in range(1, self.passes + 1):
                    for k in torch.randperm(whole, generator=self.draws, device="cpu").tolist():
                        self.step(k, scale)
                        done(f"pass {number}", after)
                    if (self.passes - number) % EVERY:  # counted from the end, so that the last pass is measured
                        continue
                    after = self.measured()
                    if after < best:
                        best, best_pass = after, number
                        self.student.save()
                    elif number - best_pass >= PATIENCE:
                        break
        finally:  # also after an error: write the best weights so far
            self.student.write()
            # Schedules make a reference cycle with the optimizer, which would keep all of its memory for a while.
            self.optimizer.zero_grad()
            self.optimizer.state.clear()
            self.optimizer.param_groups.clear()
        seconds = time.perf_counter() - start
        return BlockRow(block=self.name, before=before, after=best, passes=best_pass, seconds=seconds)


def _optimizer(student: "_Student", rate: float, count: int) -> tuple[torch.optim.Optimizer, Any]:
    """Return Adam and its schedule, in which the learning rate rises linearly and then falls to `LAST` by a cosine."""
    import_dynamo()
    weights = list(student.weights.values())
    # The fused optimizer takes a fraction of the time, but on a CPU it reads weights without gaps in their memory.
    has_gaps = any(torch.empty_like(w, device="meta").stride() != w.stride() for w in weights)
    is_fused = not has_gaps and all(w.device.type in ("cpu", "cuda") for w in weights)
    optimizer = torch.optim.Adam(weights, lr=rate, fused=is_fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1, (k + 1) / (WARM * count)) * (LAST + (1 - LAST) * (1 + math.cos(math.pi * k / count)) / 2),
    )
    return optimizer, schedule


def _paired(model: nn.Module, dense: nn.Module, names: Sequence[str]) -> tuple[list[nn.Module], list[int]]:
    """Return the dense model's blocks and, for each block of the model, the index of the dense one that it matches."""
    path, _, first = names[0].rpartition(".")
    dense_blocks: list[nn.Module] = [*dense.get_submodule(path).children()]
    children = [name for name, _ in model.get_submodule(path).named_children()]
    indices = _numbers_in_dense(model.get_submodule(path), dense.get_submodule(path))
    if len(indices) != len(children):
        raise SparsityError(
            f"recover: the model has {len(children)} blocks in {path!r}, but the dense model has "
            f"{len(dense_blocks)}. Only the model that shrink_layers returned knows which ones were removed; give that "
            "model, or a copy of it"
        )
    # A block that remains after `shrink_layers` also takes the place of the removed blocks that follow it (the first
    # one also of those before it), so the last of these is the one that it matches.
    ends, at = [0, *indices[1:], len(dense_blocks)], children.index(first)  # other modules may come before the blocks
    return dense_blocks[ends[at] :], [end - ends[at] - 1 for end in ends[at + 1 : at + 1 + len(names)]]


def _numbers_in_dense(blocks: nn.Module, dense_blocks: nn.Module) -> list[int]:
    """Return the numbers that the blocks of a list have in the same list of the dense model."""
    # `shrink_layers` notes on a list which blocks of the whole model remain. The dense model may have lost some too.
    in_dense = [*getattr(dense_blocks, "_dense_indices", range(len([*dense_blocks.children()])))]
    return [in_dense.index(at) for at in getattr(blocks, "_dense_indices", in_dense) if at in in_dense]


def _names_in_dense(model: nn.Module, dense: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names that tensors or modules have in the dense model, where blocks may have other numbers."""
    lists = {path: module for path, module in model.named_modules() if "_dense_indices" in vars(module)}
    dense_lists = {path: module for path, module in dense.named_modules() if path in lists}
    numbers = {path: _numbers_in_dense(lists[path], dense_list) for path, dense_list in dense_lists.items()}

    def in_dense(name: str) -> str:
        for path, of_blocks in numbers.items():
            if name.startswith(f"{path}."):
                at, dot, rest = name[len(path) + 1 :].partition(".")
                return f"{path}.{of_blocks[int(at)]}{dot}{rest}" if int(at) < len(of_blocks) else name
        return name

    return [in_dense(name) for name in names]


class _Student(nn.Module):
    """A module whose weights are trained: those of 16 bits as float32 copies, and others in their own memory."""

    def __init__(self, module: nn.Module, run: Callable[[nn.Module, int], Any]) -> None:
        super().__init__()
        # `functional_call` can only replace parameters of the module that it calls, so the trained one is a child.
        self.module, self.run = module, run
        # Whether some sequences of a batch alone have the same outputs, and for which arguments this was checked.
        self.is_divisible, self.checked = True, set[tuple[bool, ...]]()
        embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        parameters = [(n, p) for n, p in self.named_parameters() if p.is_floating_point() and id(p) not in embeddings]
        masks = {
            id(masking.parameters_under(m, name)[0]): full_tensor(mask.mask) != 0
            for m in module.modules()
            for name in masking.parametrized_names(m)
            if (mask := masking.find_mask(m, name)) is not None and masking.is_parameter(m, name)
        }
        # By name: the parameters, the tensors that are trained for them (which may share their memory), bool masks of
        # the elements that may change, and copies of the trained tensors after the best pass so far.
        self.originals, self.weights, self.kept, self.saved = dict(parameters), {}, {}, {}
        for name, p in parameters:
            self.weights[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32)).requires_grad_()
            self.saved[name] = self.weights[name].detach().clone()
            if p.ndim > 1:
                self.kept[name] = may_change(p) & masks.get(id(p), True)

    def forward(self, k: int) -> Tensor:
        return _output_tensor(self.run(self.module, k))

    def output(self, k: int) -> Tensor:
        """Return the output for a batch, computed with the trained weights in the dtypes of the parameters."""
        weights = {name: weight.to(self.originals[name].dtype) for name, weight in self.weights.items()}
        return functional_call(self, weights, (k,))

    def part(self, k: int, kept: slice, expected: Tensor) -> Tensor | None:
        """Return the output for some sequences of a batch; None if it cannot be divided into sequences."""
        if not self.is_divisible or expected.ndim < 2 or len(expected) < kept.step:
            return None
        cuts: list[bool] = []  # which of the arguments have a row for each sequence

        def cut(module: nn.Module, args: Any, kwargs: Any) -> Any:
            leaves, tree = _pytree.tree_flatten((args, kwargs))
            cuts.extend(isinstance(x, Tensor) and x.ndim > 0 and len(x) == len(expected) for x in leaves)
            leaves = [x[kept] if is_cut else x for x, is_cut in zip(leaves, cuts[-len(leaves) :], strict=True)]
            return _pytree.tree_unflatten(leaves, tree)

        try:
            with self.module.register_forward_pre_hook(cut, with_kwargs=True):
                actual = self.output(k)
            if tuple(cuts) not in self.checked:
                with torch.no_grad():
                    whole = self.output(k)[kept].float()
                most = torch.finfo(actual.dtype).eps ** 0.5 * whole.norm()
                self.is_divisible = actual.shape == whole.shape and bool((actual - whole).norm() <= most)
                self.checked.add(tuple(cuts))
        except Exception:  # such as one of shapes that do not fit
            self.is_divisible = False
        return actual if self.is_divisible else None

    def weight_rms(self) -> float:
        """Return the root mean square of the kept elements of weights with two or more dimensions, or 1 if it is 0."""
        count = sum(int(kept.count_nonzero()) for kept in self.kept.values())
        squares = sum(float(self.weights[name].detach().mul(kept).square().sum()) for name, kept in self.kept.items())
        return math.sqrt(squares / max(count, 1)) or 1.0

    def set_gradients(self, loss: Tensor) -> None:
        """Set the gradients of a loss, summed over ranks and zero for dropped elements, unless one is not finite."""
        if not loss.requires_grad:
            raise SparsityError("recover: forward runs without gradients; leave out no_grad and detach")
        found = list(torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True))
        gradients = list[Tensor]()
        for name, weight in self.weights.items():
            # In the memory format of the weight, as fused optimizers require; zeros, since every rank must reduce it.
            gradients.append(torch.zeros_like(weight))
            if (gradient := found.pop(0)) is not None:  # popped, so that its memory is freed in this iteration
                gradients[-1].copy_(gradient * self.kept[name] if name in self.kept else gradient)
        if has_process_group():  # one message takes a fraction of the time of one for each weight
            for device in dict.fromkeys(gradient.device for gradient in gradients):
                own = [gradient for gradient in gradients if gradient.device == device]
                summed = _over_ranks(torch.cat([gradient.flatten() for gradient in own]))
                for gradient, part in zip(own, summed.split([g.numel() for g in own]), strict=True):
                    gradient.copy_(part.view_as(gradient))
        if all(map(is_finite, gradients)):  # otherwise beyond the range of 16 bits: the step changes nothing
            for weight, gradient in zip(self.weights.values(), gradients, strict=True):
                weight.grad = gradient

    def save(self) -> None:
        """Keep a copy of the trained weights as the best so far."""
        for name, weight in self.weights.items():
            self.saved[name].copy_(weight)

    def write(self) -> None:
        """Write the best weights so far into the parameters."""
        for name, weight in self.saved.items():
            self.originals[name].detach().copy_(weight)


def _has_weights(block: nn.Module) -> bool:
    """Return whether a block has parameters that can be trained."""
    return any(p.is_floating_point() for p in block.parameters())


def _output_tensor(output: Any) -> Tensor:
    """Return the first tensor of nested outputs."""
    if (tensor := first_tensor(output)) is None:
        raise SparsityError(f"recover: the model or forward must return a tensor, got {type(output).__name__}")
    return tensor


def refuse_unfit(output: Any, dense_output: Any, name: str) -> None:
    """Raise an error unless an output can be matched to the dense model's output."""
    actual, expected = _output_tensor(output), _output_tensor(dense_output)
    if not actual.is_floating_point() or actual.ndim == 0:
        raise SparsityError(
            f"recover: the first output of {name} is {actual.dtype} of shape {tuple(actual.shape)}, which has no rows "
            "to match; give forward=lambda model, batch: ... that returns floating-point outputs, such as logits"
        )
    if actual.shape != expected.shape:
        raise SparsityError(
            f"recover: {name} returns {tuple(actual.shape)}, but the dense model returns {tuple(expected.shape)}; "
            "only outputs of the same shape can be matched. Call shrink with recover=True, or with "
            "exclude=['width'], which both keep what passes between blocks"
        )


def _error(actual: Tensor, expected: Tensor, metric: str, typical: float) -> tuple[Tensor, Tensor]:
    """Return the loss summed over some rows, in nats for "kl", and the number that it is divided by in reports.

    Of rows with far more than the typical squared norm the relative error counts, so that no single token rules, as the
    first one of a text does in many language models.
    """
    actual, expected = actual.float(), expected.float()
    if metric == "mse":
        squares, most = expected.square().sum(-1), LARGE**2 * typical
        weights = most / squares.clamp(min=most)
        return ((actual - expected).square().sum(-1) * weights).sum(), (squares * weights).sum()
    nats = nn.functional.kl_div(actual.log_softmax(-1), expected.log_softmax(-1), reduction="sum", log_target=True)
    return nats, torch.tensor(float(len(actual)), device=actual.device)


def _over_ranks(total: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if has_process_group():
        torch.distributed.all_reduce(total)
    return total
