"""`ShrinkReport`, the report of a removal, with the sizes of both models and the kept units."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..coupling import Discovery
from ..errors import SparsityError, folded
from ..models.names import by_pattern
from ..oneshot.prune_report import RecoverReport
from ..oneshot.solving import LayerRow
from ..tables import Table, lines_of_dry_run, lines_of_error
from .modules import WIDTH
from .plan import NOT_TRIED, PREFERRED_MULTIPLE, Plan, active

_FEW = 3  # at most this many couplings that are left out for the same reason are named one by one


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model.

    Attributes:
        parameters: Elements of all parameters; a shared one counts once.
        bytes: Bytes of parameters and buffers.
        flops: FLOPs of a forward on the example inputs (`torch.utils.flop_counter`: a multiply-add is two), without
            operators that have no formula (`ShrinkReport.uncounted`).

    >>> Size(parameters=10, bytes=40, flops=16).bytes
    40
    """

    parameters: int
    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class KeptUnits:
    """How many units of one coupling are kept.

    Attributes:
        name: Name of the coupling.
        kind: What the units are (`Coupling.kind`): "heads", "mlp".
        kept, of: The number of units of a scope after and before removal.
        scopes: Number of independent sets of units.
        partly: The number of kept units, over all scopes, that are zero in some members, but not in all.

    >>> print(KeptUnits(name="heads", kept=2, of=4, scopes=3))
    2 of 4 units in each of 3 scopes
    """

    name: str
    kind: str = ""
    kept: int
    of: int
    scopes: int = 1
    partly: int = 0

    def __str__(self) -> str:
        scopes = f" in each of {self.scopes} scopes" if self.scopes > 1 else ""
        partly = f" ({self.partly} of them zero in some members only)" if self.partly else ""
        return f"{self.kept} of {self.of} units{scopes}{partly}"


@dataclass(frozen=True, kw_only=True)
class ShrinkReport(Table[KeptUnits]):
    """The result of `compact` as numbers; `print(report)` shows it as text.

    Attributes:
        couplings: A row for each coupling.
        before, after: Sizes of the model.
        difference: Largest difference of an output on the example inputs, relative to the largest value that differs.
            NaN after a dry run, which compares nothing.
        in_float64: The difference of float64 copies, if rounding explains why `difference` is above the tolerance.
        notes: Descriptions of what is not exact.
        uncounted: Operators from outside of torch, and matrix products, whose FLOPs the sizes leave out.
        not_compared: Objects in the output that were not inspected, so tensors in them were not compared.
        unlisted: Integers that seem to hold a removed size and are in no coupling's `attrs`.
        changed: Attributes of modules and configs with their old and new values.
        not_in_config: Why a model constructed from the config of a transformers model differs from the smaller one, and
            `from_pretrained` does not load it. Empty if it does, None if this was not determined. Set by `shrink`.
        multiples: Couplings that keep a multiple of 32 units, as large MLPs do by default; set by `shrink`.
        left_out: Couplings and blocks that keep more than was asked for, blocks that were not fitted, and modules that
            were never called, with the reason.
        frozen: Axes, except inputs and outputs, from which nothing may be removed, and why; set by `shrink`.
        values: What the forward read from values of the example inputs, as in `Discovery`; set by `shrink`.
        compensation: Output errors before and after of the layers that make up for what was removed: those that read
            removed units (`shrink` with batches), or the last one of a block, whose output counts (`shrink_layers`).
        recovery: What `recover` did; set by `shrink(recover=True)`.
        error_to_dense: The relative error of the smaller model's outputs to those of the dense model, on the first
            batch or the example inputs; set by `shrink` and `shrink_layers`. See `RecoverReport`.
        zeros: How many weights were zero and are zero now, as text; "" for a dense model. Set by them too.
        call: The call of `shrink` as text, for a model card.
        seconds, memory: How many seconds the call would take, and how many bytes it would need at the peak beside what
            is in memory, as a dry run of `shrink` or `shrink_vocabulary` estimates it.
        new_ids: {id of a kept token: its id now}; set by `shrink_vocabulary`.
        manifest: Plain data for `cut_to`; empty after a dry run, and of `shrink_vocabulary`, whose config says it all.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4, bias=False), torch.nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[1:].zero_(), model[1].weight[:, 1:].zero_()
    >>> hidden = sparsekit_ao.Coupling({"0.weight": "u i", "1.weight": "o u"})
    >>> report = sparsekit_ao.removal.compact(model, hidden, torch.ones(1, 2))[1]
    >>> report.before.parameters, report.after.parameters, str(report.couplings[0])
    (18, 6, '1 of 4 units')
    """

    couplings: tuple[KeptUnits, ...]
    before: Size
    after: Size
    difference: float
    in_float64: float | None = None
    notes: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    not_in_config: str | None = None
    multiples: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    compensation: tuple[LayerRow, ...] = ()
    recovery: RecoverReport | None = None
    error_to_dense: float = math.nan
    zeros: str = ""
    call: str = ""
    seconds: float = math.nan
    memory: int = 0
    new_ids: Mapping[int, int] = field(default_factory=dict, repr=False)
    manifest: Mapping[str, Any] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the manifest as JSON, for `cut_to` in another process; it is an error if there is none."""
        if not self.manifest:
            raise SparsityError(
                "ShrinkReport.save: this report is of a dry run, which removed nothing, or of shrink_vocabulary, whose "
                "config describes the model, so there is no manifest to write; call shrink without dry_run=True, and "
                "save the report of that call"
            )
        Path(path).write_text(json.dumps(self.manifest, indent=1) + "\n")

    bars = ("of", "kept")

    @property
    def rows(self) -> tuple[KeptUnits, ...]:  # type: ignore[override]
        """The couplings."""
        return self.couplings

    def metrics(self) -> dict[str, float]:
        """Return {"kept/<coupling>": ..., "of/<coupling>": ...} with "parameters", "bytes", "flops" of the result."""
        return super().metrics() | {name: float(size) for name, size in vars(self.after).items()}

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Return the head and the rows as text; with `folds`, equal rows share a line."""
        lines = [("coupling", "kind", "kept"), *((row.name, row.kind, str(row)) for row in self.couplings)]
        return folded(lines) if folds else [*lines]

    def above(self) -> list[str]:
        """Return that the config allows little, if so, how many zeros there are, and the error to the dense model."""
        removed = 1 - self.after.parameters / max(self.before.parameters, 1)
        is_little = removed < 0.25 and any("keep_config=False removes it" in text for text in self.left_out)
        more = "keep_config=False also removes what the config cannot hold"
        little = [f"{removed:.1%} of the parameters are removed; {more}"] if is_little else []
        dry = [] if math.isnan(self.seconds) else lines_of_dry_run("removed", self.seconds, self.memory)
        return dry + little + [self.zeros] * bool(self.zeros) + lines_of_error(self.error_to_dense)

    def below(self) -> list[str]:
        """Return the lines below the table: sizes, and what was compared, changed and left out."""
        lines = []
        for what in ("parameters", "bytes", "flops"):
            was, now = getattr(self.before, what), getattr(self.after, what)
            lines.append(f"{what}: {was:,} -> {now:,}" + (f" ({now / was:.3f})" if was else ""))
        lines += [f"flops leave out {', '.join(self.uncounted)}, without a formula"] if self.uncounted else []
        if not math.isnan(self.difference):
            lines.append(f"largest relative difference on the example inputs: {self.difference:.1e}")
        lines += [] if self.in_float64 is None else [f"rounding: in float64 it is {self.in_float64:.1e}"]
        lines += [f"changed: {text}" for text in by_pattern(self.changed)]
        if any(f"{WIDTH}:" in text for text in self.changed):
            lines.append(f"attention reads {WIDTH}: torch.export.export needs strict=True, torch.load sparsekit_ao")
        lines += [f"not exact: {note}" for note in self.notes]
        lines += [f"not inspected, hence not compared: {text}" for text in self.not_compared]
        if count := len(self.unlisted):
            names = f"{count} integers equal a removed size" if count > 1 else self.unlisted[0]
            lines.append(f"unchanged, and outputs are the same: {names} (report.unlisted)")
        if self.not_in_config:
            how = "save and load it with export.save_pretrained and export.load_pretrained"
            lines.append(f"from_pretrained cannot load it, {how}: {self.not_in_config}")
        lines += [f"rounded: {text}" for text in by_pattern(self.multiples)]
        lines += [f"left out: {text}" for text in by_pattern(self.left_out)]
        lines += [f"frozen: {text}" for text in by_pattern(self.frozen)]
        lines += [f"decided by values of the example inputs: {text}" for text in self.values]
        if rows := self.compensation:
            before, after = (sum(getattr(row, when) for row in rows) / len(rows) for when in ("before", "after"))
            what = f"mean output error of what makes up for the removed parts ({len(rows)} layers)"
            lines.append(f"{what}: {before:.4f} before, {after:.4f} after")
        recovered = [] if self.recovery is None else [self.recovery.table(folds=True), *self.recovery.below()]
        return [*lines, *recovered]


def size_of(model: nn.Module, flops: int) -> Size:
    """Return the size of a model whose forward takes `flops` FLOPs."""
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    count, size = sum(p.numel() for p in parameters), sum(t.nbytes for t in (*parameters, *buffers))
    return Size(parameters=count, bytes=size, flops=flops)


def text_of_zeros(*models: nn.Module) -> str:
    """Return how many weights of two or more dimensions are zero in two models; "" for up to 1 % in the first one."""
    weights = [[p for p in model.parameters() if p.ndim > 1] for model in models]
    (was, n), (now, m) = ((sum(int((p == 0).sum()) for p in ps), sum(p.numel() for p in ps)) for ps in weights)
    return f"weights that are zero: {was:,} of {n:,} before, {now:,} of {m:,} now" if was > n / 100 else ""


def add_reasons(
    report: ShrinkReport, whole: nn.Module, discovery: Discovery, plans: Sequence[Plan], has_one_budget: bool
) -> ShrinkReport:
    """Return the report with what was left out, what is frozen, and the reasons."""
    left_out = [(plan.name, plan.left_out) for plan in plans if plan.left_out]
    left_out += [(plan.name, why) for plan in active(plans) if (why := _why_kept(plan, has_one_budget))]
    how = "of its units; multiple_of=1 keeps any number"
    rounded = [plan for plan in active(plans) if plan.multiple % PREFERRED_MULTIPLE == 0]
    even = [(plan.name, f"keeps a multiple of {plan.multiple} {how}") for plan in rounded]
    uncalled = (f"{name}: never called with these example inputs" for name in discovery.uncalled)
    # Inputs and outputs keep their sizes in every model, so their axes are not listed.
    inside = [(axis, *axis.places[0]) for axis, _ in discovery.frozen if not axis.why.startswith(("input", "output"))]
    return replace(
        report,
        before=size_of(whole, report.before.flops),
        multiples=_as_lines(even),
        left_out=(*_as_lines(left_out), *uncalled),
        frozen=tuple(f"{axis.size} in {name}[{d}]: {axis.why}" for axis, name, d in inside),
        values=discovery.values,
    )


def _why_kept(plan: Plan, has_one_budget: bool) -> str:
    """Return why a plan keeps all units or, where all were to be dropped, the fewest possible; or ""."""
    units, kept = plan.scope_units, plan.removals[0].kept
    if kept == units and has_one_budget:
        return f"the budget is met although it keeps all of its {units} units, since others matter less"
    if kept == units and plan.multiple > 1:
        return f"a multiple of {plan.multiple} keeps all of its {units} units"
    if kept == units:
        return f"a ratio of {plan.level} drops none of its units: {units} in each scope"
    if kept == min(plan.multiple, units) and plan.level == 1:
        return f"a layer needs a unit, so {kept} of {units} are kept in each scope"
    return ""


def _as_lines(left_out: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return (name, reason) as lines of text; names of one reason share a line if they are many, or were not tried."""
    names: dict[str, list[str]] = {}
    for name, why in left_out:
        names.setdefault(why, []).append(name)
    lines = list[str]()
    for why, alike in names.items():
        alike = by_pattern(alike) if len(alike) > _FEW else alike
        more = len(alike) - 1 if why.startswith(NOT_TRIED) or len(alike) > _FEW else 0
        lines += [f"{alike[0]} and {more} more: {why}"] if more else [f"{name}: {why}" for name in alike]
    return tuple(lines)
