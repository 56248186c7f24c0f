"""The dense model in a walk: it gives the outputs that blocks of the pruned model are to match."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from .. import masking
from ..calibration.gram import is_finite
from ..distributed import is_sharded, of_all_ranks
from ..errors import SparsityError, checked_model
from ..models.loading import is_elsewhere, loaded, refuse_unloadable
from ..models.names import named_tensors, owner_of
from ..models.running import eval_mode
from .chain import CalibrationData, Stream, captured
from .prune_report import BlockRow, RecoverReport
from .training import PASSES, RATE, Student, Training, output_tensor, refuse_unfit
from .walk import Walk, without_autocast_cache


class DenseStreams:
    """The hidden states of the dense model in a walk, which blocks of the pruned model are to give (`walk.Matching`).

    `data` is of the pruned model; with `dense=None` that model is the dense one, until the walk reaches its blocks.
    """

    caller = "recover"

    def __init__(self, dense: nn.Module | None, data: CalibrationData) -> None:
        _check_models(data.model, dense, self.caller)
        check_ranks(data, self.caller)
        self.dense, self.data = dense, data
        self.streams: list[Stream] = []  # of the dense model, one for each chain; empty before `start`

    def start(self, walk: Walk) -> None:
        """Begin the dense streams of all chains, since a model that is its own dense model changes from now on."""
        self.walk, dense = walk, replace(self.data, model=walk.data.model if self.dense is None else self.dense)
        # For each chain the dense blocks and, for each block in the walk, the last of these that it stands for.
        paired = [_paired(walk.data.model, dense.model, names) for names in walk.names_of_chains]
        self._dense_blocks = [blocks for blocks, _ in paired]
        self._last = [last for _, lasts in paired for last in lasts]
        self._check_blocks(walk, dense)
        first = [blocks[0] for blocks in self._dense_blocks]
        self.streams = [Stream(chain, walk.kept, walk.device) for chain in walk.chains]
        with eval_mode(dense.model):
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
                with eval_mode(data.model):
                    data.output(0)
        for (block, dense_block), name in zip(pairs, walk.names, strict=True):
            if _has_weights(block):
                refuse_unfit(outputs[block], outputs[dense_block], name)

    def advance(self, at: int) -> None:
        """Move the dense stream on through the dense block, and through the removed blocks that followed it."""
        chain = self.walk.chain_of[at]
        stream = self.streams[chain]
        if self.dense is None:
            stream.advance(self.walk.blocks[at])
            return
        for dense_block in self._dense_blocks[chain][stream.advanced : self._last[at] + 1]:
            with loaded(self.dense, [dense_block], self.walk.device), eval_mode(self.dense):
                stream.advance(dense_block)


class Teacher(DenseStreams):
    """The dense model in a walk; it trains blocks of the pruned model to match its own blocks."""

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
        super().__init__(dense, data)
        self.passes, self.rate, self.seed, self.outputs = passes, rate, seed, outputs

    def described(self) -> tuple[object, ...]:
        """Return values that identify this teacher."""
        return self.dense, self.passes, self.rate, self.seed, self.outputs

    def start(self, walk: Walk) -> None:
        """Begin the dense streams; if the model itself is the dense one and has no blocks, keep its outputs instead."""
        if walk.blocks:
            super().start(walk)
            return
        self.walk, dense = walk, walk.data.model if self.dense is None else self.dense
        if is_elsewhere(walk.data.model):
            raise SparsityError(
                "recover: a model without repeated blocks, or with outputs=, is trained as a whole, so its weights "
                "must be in memory; load it without offloading, and recover before fully_shard"
            )
        data = replace(self.data, model=dense)
        with eval_mode(dense):
            refuse_unfit(walk.data.output(0), data.output(0), "the model")
            if self.dense is None:
                for k in range(len(data.batches)):
                    walk.kept.put(("outputs", k), output_tensor(data.output(k)))

    def match(self, at: int) -> BlockRow | None:
        """Train a block, with its inputs in the pruned model, to give the dense outputs; None if it has no weights."""
        block, dense = self.walk.blocks[at], self.streams[self.walk.chain_of[at]]
        if not _has_weights(block):
            return None
        student = Student(block, self.walk.streams[-1].output)
        # The dense stream has advanced already, so its next inputs are the outputs of the dense block.
        return self._train(self.walk.names[at], student, lambda k: output_tensor(dense.hidden(k)), "mse", at)

    @torch.no_grad()
    def finish(self, rows: Sequence[BlockRow]) -> RecoverReport:
        """Train the whole model if the walk had no blocks; return the report of these rows and the whole model's."""
        rows, model, dense = [*rows], self.data.model, self.dense
        if not self.walk.blocks:
            whole = Student(model, lambda _, k: self.data.output(k))
            targets = replace(self.data, model=dense) if dense is not None else None

            def target(k: int) -> Tensor:
                return output_tensor(self.walk.kept.get(("outputs", k)) if targets is None else targets.output(k))

            with eval_mode(model), eval_mode(model if dense is None else dense), without_autocast_cache():
                rows.append(self._train("", whole, target, self.outputs or "mse", 0))
        outside = self.walk.outside if self.walk.blocks else ()
        return RecoverReport(rows=tuple(rows), tokens=self.data.counted(), untrained=tuple(outside))

    def _train(self, name: str, student: Student, target: Callable[[int], Tensor], metric: str, at: int) -> BlockRow:
        """Train the block of this number, or the whole model (named "")."""
        of = self.walk.chains[self.walk.chain_of[at]].of_decoder if name else 2  # of the model's outputs
        masks = [masks.masks[of] for masks in self.data.token_masks]
        settings: dict[str, Any] = {"passes": self.passes, "rate": self.rate, "seed": self.seed, "at": at}
        return Training(name, student, target, masks, metric, **settings).run()


def _check_models(model: nn.Module, dense: nn.Module | None, caller: str) -> None:
    """Raise an error unless a model can be trained to match the dense one (None: the model itself as it is now)."""
    if checked_model(model, caller) is dense:
        raise SparsityError(f"{caller}: model and dense are the same object; keep a deep copy before pruning")
    if torch.is_inference_mode_enabled():
        raise SparsityError(f"{caller}: weights cannot be trained in inference mode; call it outside, or use no_grad")
    dense_addresses: set[int] = set()  # of the dense model's values, which the loop visits first
    models = {"": model} if dense is None else {"the dense model's ": checked_model(dense, caller), "": model}
    for whose, one in models.items():
        refuse_unloadable(one, caller)
        norms = ((name, module) for name, module in one.named_modules() if isinstance(module, _BatchNorm))
        statistics = ((f"{name}.{key}", t) for name, norm in norms for key, t in norm.named_buffers(recurse=False))
        for name, p in itertools.chain(one.named_parameters(), statistics):
            if p.is_inference():
                raise SparsityError(
                    f"{caller}: {whose}{name} was made in inference mode, and such tensors cannot be trained; load the "
                    "model outside of torch.inference_mode(), or clone its tensors there"
                )
            if p.is_meta or is_sharded(p):  # values that cannot be read here
                continue
            if isinstance(p, nn.Parameter) and not is_finite(p):
                raise SparsityError(f"{caller}: {whose}{name} has values that are not finite")
            if one is dense:
                dense_addresses.add(p.data_ptr())
            elif p.numel() and p.data_ptr() in dense_addresses:
                raise SparsityError(
                    f"{caller}: both models share the values of {name}; keep a deep copy before pruning"
                )
    if dense is None:
        return
    modules, named = dict(dense.named_modules()), dict(model.named_modules())
    for (name, module), dense_name in zip(named.items(), names_in_dense(model, dense, named), strict=True):
        is_of_mask = isinstance(module, parametrize.ParametrizationList) or ".parametrizations" in f".{name}"
        if dense_name not in modules and not is_of_mask:
            raise SparsityError(
                f"{caller}: the dense model has no module {dense_name!r}; give the model as it was before pruning. If "
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


def check_ranks(data: CalibrationData, caller: str = "recover") -> None:
    """Raise an error unless every rank has the same number of batches."""
    counts = of_all_ranks(len(data.batches))
    if len(set(counts)) > 1:
        text = " and ".join(map(str, counts))
        raise SparsityError(f"{caller}: every rank needs the same number of batches, got {text}")


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


def names_in_dense(model: nn.Module, dense: nn.Module, names: Iterable[str]) -> list[str]:
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


def _has_weights(block: nn.Module) -> bool:
    """Return whether a block has parameters that can be trained."""
    return any(p.is_floating_point() for p in block.parameters())
