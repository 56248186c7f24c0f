"""The reports of `one_shot` and `prune`, of `recover`, and of a dry run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import SparsityError, by_reason, folded
from ..models.names import by_pattern
from ..tables import Table, lines_of_dry_run, lines_of_error
from .solving import LayerRow

SHOWN = 6  # names of dense weights in a report


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """A row of a `RecoverReport`: what training did to one block.

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
        renewed: The same number for the old weights with new running statistics of batch norms, if a whole model was
            trained and they reduced the error; otherwise NaN.

    >>> BlockRow(block="layers.0", before=0.3, after=0.1, passes=4, seconds=2.5).after
    0.1
    """

    block: str
    before: float
    after: float
    passes: int
    seconds: float
    renewed: float = field(default=math.nan, repr=False)


@dataclass(frozen=True, kw_only=True)
class RecoverReport(Table[BlockRow]):
    """What `recover` did to each block; prints as a table.

    Attributes:
        rows: A `BlockRow` for each block, in order.
        tokens: How many tokens counted, as text; "" if all did.
        untrained: The pruned layers outside of all chains of blocks, which are not trained.
        error_to_dense: The relative error of the model's outputs Y (the first tensor of floats that differs, of those
            that the model or `forward` returns) on the first batch, ||Y - Y_dense|| / ||Y_dense - mean of Y_dense over
            all rows||. Outputs that are the same for every input have an error of about 1. NaN if it is not known.

    >>> print(RecoverReport(rows=(BlockRow(block="layers.0", before=0.3, after=0.1, passes=4, seconds=2.5),)))
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
        """Return what counted, what new statistics did, which blocks keep their weights, and what was not trained."""
        names = ", ".join(by_pattern(self.untrained))
        lines = [self.tokens] * bool(self.tokens) + [f"in no chain of blocks, hence not trained: {names}"] * bool(names)
        new = [row.renewed for row in self.rows if not math.isnan(row.renewed)]
        lines += [f"new running statistics of batch norms alone reduced the error to {error:.4f}" for error in new]
        if kept := sum(row.passes == 0 for row in self.rows):
            lines.append(
                f"no pass reduced the error of {kept} of {len(self.rows)}, which keep their weights; give more data"
            )
        return lines

    def metrics(self) -> dict[str, float]:
        """Return {"recovered_error/<block>": ...} for any logger."""
        return {f"recovered_error/{r.block or 'model'}": r.after for r in self.rows}


@dataclass(frozen=True, kw_only=True)
class PruneReport(Table[LayerRow]):
    """What `one_shot` or `prune` did to each layer; prints as a table, and `plot` draws it.

    Attributes:
        rows: A row for each layer, in the order of the forward pass.
        seconds: The time of the whole call, in seconds.
        blocks: The number of blocks (repeated modules) that were pruned in order. 0 if the model had none and ran once
            for each layer, None if there were no batches.
        recovery: The `RecoverReport` of `recover=True`, or None.
        left_out: {tensor: why `prune` left it out}.
        weights: {tensor: number of elements} of all weights that layers multiply by, except embeddings. The report says
            what share of them was pruned, and which are dense.
        tokens: How many tokens counted, as text; "" if all did.
        error_to_dense: The relative error of the pruned model's outputs on the first batch to those of the dense model;
            see `RecoverReport`.
        call: The call of `prune` as text, for a model card.

    >>> rows = (LayerRow(tensor="fc.weight", before=0.3, after=0.1, density=0.5, seconds=0.2),)
    >>> print(PruneReport(rows=rows, seconds=0.25))
    tensor     before   after  density  seconds  note
    fc.weight  0.3000  0.1000   0.5000     0.20
    1 layers in 0.2 s, no blocks
    """

    rows: tuple[LayerRow, ...]
    seconds: float
    blocks: int | None = 0
    recovery: RecoverReport | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    tokens: str = ""
    error_to_dense: float = math.nan
    call: str = ""
    bars = ("before", "after")

    @property
    def dense(self) -> list[str]:
        """The names of the weights that have no row in the report."""
        pruned = {row.tensor for row in self.rows}
        return [name for name in self.weights if name not in pruned]

    @property
    def coverage(self) -> float:
        """The fraction of the elements of `weights` that have a row in the report; NaN if `weights` is empty."""
        dense = set(self.dense)
        covered = sum(numel for name, numel in self.weights.items() if name not in dense)
        return covered / sum(self.weights.values()) if self.weights else math.nan

    def worst(self, count: int) -> list[str]:
        """Return the names of the layers with the largest errors `after`, as `exclude` of `prune` takes them."""
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise SparsityError(f"worst: count must be a whole number of layers, 0 or more, got {count!r}")
        known = [row for row in self.rows if not math.isnan(row.after)]
        return [row.tensor for row in sorted(known, key=lambda row: -row.after)[:count]]

    def metrics(self) -> dict[str, float]:
        """Return {"output_error/<tensor>": ..., "seconds": ...} for any logger."""
        return {
            **{f"output_error/{r.tensor}": r.after for r in self.rows if r.after == r.after},
            **({} if math.isnan(self.error_to_dense) else {"error_to_dense": self.error_to_dense}),
            "seconds": self.seconds,
        }

    def above(self) -> list[str]:
        """Return how many zeros returned, if any did, and how far the outputs are from those of the dense model."""
        returned = sum(row.returned for row in self.rows)
        zeros = f"{returned:,} weights that were zero before are not zero now; prune(keep_zeros=True) keeps such zeros"
        return [zeros] * bool(returned) + lines_of_error(self.error_to_dense)

    def below(self) -> list[str]:
        """Return the lines below the table: the time, what was recovered, and what was left out."""
        how = f"{self.blocks} blocks" if self.blocks else "no blocks"
        how = "without batches" if self.blocks is None else how
        notes = self._about_run(f"{len(self.rows)} layers in {self.seconds:.1f} s, {how}")
        if self.weights:
            dense = by_pattern(self.dense)
            shown = [*dense[:SHOWN], *([f"{len(dense) - SHOWN} more"] if len(dense) > SHOWN else [])]
            left = f"; left dense: {', '.join(shown)}" if dense else ""
            notes.append(f"covers {self.coverage:.1%} of the weights{left}")
        notes += [self.tokens] if self.tokens and self.recovery is None else []
        notes += [] if self.recovery is None else [str(self.recovery)]
        return [*notes, *(f"left out: {names}: {why}" for names, why in by_reason(self.left_out))]

    def _about_run(self, time: str) -> list[str]:
        return [time]


@dataclass(frozen=True, kw_only=True)
class DryRun(PruneReport):
    """What `prune` would do, as `prune(..., dry_run=True)` returns it; prints as a table.

    Attributes:
        rows: A row for each tensor that would be pruned, with its density. The note has the shapes of its blocks and
            scopes, and whether kept weights would be compensated, or why not.
        seconds: The time that the call would take, in seconds, estimated without that of a checkpoint.
        memory: The bytes that the call would need at the peak beside what is in memory now, estimated; with a device,
            on the CPU and there together.
        chains: The names of the blocks of each chain of repeated blocks; empty if the model has none.
        parameters: The number of parameters, and how many of them would not be set to zero.
        flops: The FLOPs of a forward pass on one batch (a multiply-add is two), and how many of them would be left
            without the products of zeros in Linear layers and convolutions. (0, 0) without batches.
        runs: How many forward passes of the model, or of a part of it, and of each block there would be for each batch.
            Training is included, but not the passes that measure its error.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> same, report = sparsekit_ao.prune(model, "2:4", batches=[torch.randn(64, 16)], dry_run=True)
    >>> same is model, report.parameters, report["0.weight"].note
    (True, (808, 424), 'block 1x1 scope 1x4; compensated')
    """

    memory: int
    chains: tuple[tuple[str, ...], ...]
    parameters: tuple[int, int]
    flops: tuple[int, int]
    runs: tuple[int, int]
    bars = ("density",)  # type: ignore[assignment]

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Return the head and the rows as text, without errors and times; with `folds`, equal rows share a line."""
        lines = [(tensor, density, note) for tensor, _, _, density, _, note in super().cells()]
        return folded(lines) if folds else [*lines]

    def above(self) -> list[str]:
        """Return what the call would take."""
        return lines_of_dry_run("changed", self.seconds, self.memory)

    def _about_run(self, time: str) -> list[str]:
        sizes = zip(("parameters that are not dropped", "FLOPs"), (self.parameters, self.flops), strict=True)
        lines = [f"{what}: {was:,} -> {now:,} ({now / was:.3f})" for what, (was, now) in sizes if was]
        blocks = f", and {self.runs[1]} of each block" if self.chains else ""
        lines.append(f"forward passes for each batch: {self.runs[0]} of the model or a part of it{blocks}")
        return lines + [f"chain of {len(chain)} blocks: {chain[0]} to {chain[-1]}" for chain in self.chains]
