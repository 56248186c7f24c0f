"""compact: make a masked model smaller and dense, with the same outputs; and its report."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..coupling import Coupling
from ..errors import SparsityError
from ..tables import Table
from .manifest import make_manifest
from .norms import fold_norms
from .remove import Removal, check_lists, drop_modules, find_removal, outside_dropped, remove_units
from .sizes import Change, apply_changes, assign_attrs, find_changes, fit_config, has_config, unlisted_sizes
from .verify import Comparison, Reference

UNLISTED = "possibly a removed size (list it in attrs): "


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model.

    Attributes:
        parameters: elements of all parameters; a shared one counts once.
        bytes: bytes of parameters and buffers.
        flops: FLOPs of a forward on the example inputs (`torch.utils.flop_counter`: a multiply-add is two).

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
        name: name of the coupling.
        kept, of: units of a scope after and before.
        scopes: number of independent sets of units.
        partly: kept units, over all scopes, where some members hold only zeros, but not all.

    >>> print(KeptUnits(name="heads", kept=2, of=4, scopes=3))
    2 of 4 units in each of 3 scopes
    """

    name: str
    kept: int
    of: int
    scopes: int = 1
    partly: int = 0

    def __str__(self) -> str:
        scopes = f" in each of {self.scopes} scopes" if self.scopes > 1 else ""
        partly = f" ({self.partly} of them zero in some members only)" if self.partly else ""
        return f"{self.kept} of {self.of} units{scopes}{partly}"


@dataclass(frozen=True, kw_only=True)
class Compaction(Table[KeptUnits]):
    """The result of `compact` as numbers; `print(report)` shows it as text.

    Attributes:
        couplings: one row a coupling.
        before, after: sizes of the model.
        difference: largest difference of an output on the example inputs, relative to the largest value that differs.
        in_float64: the same of float64 copies, where rounding explains why it is more than the tolerance.
        notes: descriptions of what is not exact.
        not_compared: objects in the output that were not inspected, so tensors in them were not compared.
        unlisted: integers that seem to hold a removed size and are in no coupling's `attrs`.
        changed: attributes of modules and configs with their old and new values.
        not_in_config: why a model constructed from the config of a transformers model differs from the smaller one, so
            that `from_pretrained` does not load it; "" if it does, None where this was not determined. Of `shrink`.
        left_out: couplings from which nothing was removed, with the reason; only of `shrink`.
        manifest: plain data for `cut_to`.

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
    not_compared: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    not_in_config: str | None = None
    left_out: tuple[str, ...] = ()
    manifest: Mapping[str, Any] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the manifest as JSON, for `cut_to` in another process."""
        Path(path).write_text(json.dumps(self.manifest, indent=1) + "\n")

    bars = ("of", "kept")

    @property
    def rows(self) -> tuple[KeptUnits, ...]:  # type: ignore[override]
        """The couplings."""
        return self.couplings

    def metrics(self) -> dict[str, float]:
        """{"kept/<coupling>": ..., "of/<coupling>": ..., "parameters", "bytes", "flops": of the smaller model}."""
        return super().metrics() | {name: float(size) for name, size in vars(self.after).items()}

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Head and rows as text."""
        return [("coupling", "kept"), *((row.name, str(row)) for row in self.couplings)]

    def below(self) -> list[str]:
        """Sizes, what was compared, changed and left out."""
        lines = []
        for what in ("parameters", "bytes", "flops"):
            was, now = getattr(self.before, what), getattr(self.after, what)
            lines.append(f"{what}: {was:,} -> {now:,}" + (f" ({now / was:.3f})" if was else ""))
        lines.append(f"largest relative difference on the example inputs: {self.difference:.1e}")
        lines += [] if self.in_float64 is None else [f"rounding: in float64 it is {self.in_float64:.1e}"]
        lines += [f"changed: {text}" for text in self.changed]
        lines += [f"not exact: {note}" for note in self.notes]
        lines += [f"not inspected, hence not compared: {text}" for text in self.not_compared]
        lines += [UNLISTED + text for text in self.unlisted]
        if self.not_in_config:
            how = "save and load it with export.save_pretrained and export.load_pretrained"
            lines.append(f"from_pretrained cannot load it, {how}: {self.not_in_config}")
        return [*lines, *(f"left out: {text}" for text in self.left_out)]


def compact(
    model: nn.Module,
    couplings: Coupling | Sequence[Coupling],
    example_inputs: Any,
    *,
    multiple_of: int | Mapping[str, int] = 1,
    attrs: Mapping[str, str] | None = None,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, Compaction]:
    """Remove the dropped units of couplings from every member, and check that outputs do not change.

    A unit is dropped where all weights of the coupling hold only zeros, as they do after pruning by `Coupling.entries`
    and `squash_mask`; a unit that is a module of a list, where all its parameters do.

    Args:
        model: squashed; neither it nor the inputs change, since copies run.
        couplings: one or several; a tensor may be in several.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments. The check is as good as they
            are, so use typical ones: sequences of more than one token, values that are not zero, attention masks with
            zeros. Outputs are compared in tuples, mappings and dataclasses; other objects (a cache) are reported.
        multiple_of: a number, or {name of a coupling: number}. The number of units kept in a scope is rounded up to a
            multiple, or to all, by keeping some dropped ones. At least one unit is kept.
        attrs: {integer attribute: the axes whose product it holds}, as `Coupling(attrs=)`; for the one coupling that
            has these axes.
        tolerance: largest difference of an output tensor, relative to the largest of its values that differ; integers
            must be equal. What is known not to be exact (a LayerNorm over a pruned axis) needs a larger one. Models of
            16-bit floats are compared as float32 copies; where the masked model differs as much from its own float64
            copy, float64 copies decide.

    Returns:
        The smaller model, and a `Compaction`.

    Raises:
        SparsityError: outputs differ (the message names the coupling that causes it), are all zero or contain nan; a
            tensor still has a mask; a name, axis or attribute that does not fit.
        CouplingError: scopes of a coupling keep different numbers, or what couplings keep of a tensor that they share
            is not rectangular.

    >>> from sparsekit_ao import ScopeSparsifier
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> hidden = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"}, name="hidden")
    >>> sparsifier = ScopeSparsifier()
    >>> sparsifier.prepare(model, hidden.entries(model, nnz=4))
    >>> sparsifier.step()
    >>> sparsifier.squash_mask()
    >>> small, report = compact(model, hidden, torch.randn(3, 8))
    >>> small[0], report.after.parameters
    (Linear(in_features=8, out_features=4, bias=True), 46)
    >>> print(report)  # doctest: +ELLIPSIS
    coupling  kept
    hidden    4 of 16 units
    parameters: 178 -> 46 (0.258)
    bytes: 712 -> 184 (0.258)
    flops: 960 -> 240 (0.250)
    largest relative difference on the example inputs: ...
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise SparsityError(f"tolerance must be a number >= 0, got {tolerance!r}")
    listed = [couplings] if isinstance(couplings, Coupling) else couplings
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(coupling, Coupling) for coupling in listed):
        raise SparsityError(f"couplings must be a Coupling or a list of them, got {couplings!r}")
    removals = find_removals(model, assign_attrs(listed, attrs or {}), multiple_of)
    return verified(model, removals, example_inputs, tolerance)


def verified(
    model: nn.Module, removals: Sequence[Removal], example_inputs: Any, tolerance: float, *, with_config: bool = False
) -> tuple[nn.Module, Compaction]:
    """Return a model without some units, if it gives the same outputs; see `compact` and `fit_config`."""
    small, changes, notes = without_units(model, removals)
    reference = Reference(model, example_inputs)
    comparison = compared(reference, small, tolerance)
    if isinstance(comparison, str):
        lines = []
        for removal in (removal for removal in removals if not removal.is_empty):
            alone = compared(reference, without_units(model, [removal])[0], tolerance, discarded=True)
            lines += [f"coupling {removal.coupling.name!r} by itself {alone}"] if isinstance(alone, str) else []
        lines = lines or ["each coupling by itself is right, so some of them contradict each other"]
        lines += [f"not exact: {note}" for note in notes]
        lines += [UNLISTED + text for text in unlisted_sizes(small, removals, changes)]
        raise SparsityError(
            f"the compacted model {comparison}. Look for a missing member, a wrong axis, an attribute that holds a "
            "removed size, or zeroed units that act on others (through a softmax or a norm).\n  " + "\n  ".join(lines)
        )
    not_in_config = None
    if with_config and has_config(model):
        config_changes, not_in_config = fit_config(model, small, removals, reference, tolerance)
        changes = [*changes, *config_changes]
    rows = [
        KeptUnits(
            name=removal.coupling.name,
            kept=removal.kept,
            of=removal.scope_units,
            scopes=removal.keep.numel() // removal.scope_units,
            partly=removal.partly,
        )
        for removal in removals
    ]
    numbers = re.compile(r"(?<![^.])\d+(?![^.])")  # of repeated layers, which become stars
    integers = [c for c in changes if isinstance(c.was, int) and c.was != c.now]
    report = Compaction(
        couplings=tuple(rows),
        before=_size(model, reference.flops),
        after=_size(small, comparison.flops),
        difference=comparison.difference,
        in_float64=comparison.in_float64,
        notes=tuple(notes),
        not_compared=tuple(reference.opaque),
        unlisted=tuple(unlisted_sizes(small, removals, changes)),
        changed=tuple(dict.fromkeys(f"{numbers.sub('*', c.path)}: {c.was} -> {c.now}" for c in integers)),
        not_in_config=not_in_config,
        manifest=make_manifest(model, removals, changes),
    )
    return small, report


def find_removals(
    model: nn.Module, couplings: Sequence[Coupling], multiple_of: int | Mapping[str, int]
) -> list[Removal]:
    """Find what each coupling of a masked model would remove, except in dropped modules; arguments as of `compact`."""
    check_names("", [coupling.name for coupling in couplings], multiple_of=multiple_of)
    removals = []
    for source, coupling in enumerate(couplings):
        multiple = multiple_of.get(coupling.name, 1) if isinstance(multiple_of, Mapping) else multiple_of
        removals += [find_removal(model, bound, multiple, source) for bound in coupling.bind(model)]
    return outside_dropped(removals)


def check_names(where: str, names: Sequence[str], **arguments: Any) -> None:
    """Raise if one of the arguments is a mapping with the name of another coupling."""
    for key, name in ((key, name) for key, value in arguments.items() if isinstance(value, Mapping) for name in value):
        if name not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise SparsityError(f"{where}{key} names {name!r}, but the couplings are {known}")


def without_units(model: nn.Module, removals: Sequence[Removal]) -> tuple[nn.Module, list[Change], list[str]]:
    """Return a copy of a masked model without some units, changes of its attributes, and notes on what is not exact.

    Raises:
        SparsityError: they cannot be removed.
    """
    check_lists(model, removals, "")
    changes, small = find_changes(model, removals), copy.deepcopy(model)
    remove_units(small, removals)
    apply_changes(small, changes)
    folded, notes = fold_norms(model, small, removals)
    drop_modules(small, removals)  # last, since it changes names
    return small, changes + folded, notes


def compared(reference: Reference, small: nn.Module, tolerance: float, *, discarded: bool = False) -> Comparison | str:
    """Compare a smaller model, or describe what is wrong with it; see `Reference.compare`."""
    try:
        comparison = reference.compare(small, tolerance, discarded=discarded)
    except Exception as e:
        return f"does not run: {e}"
    if comparison.decisive <= tolerance:
        return comparison
    if comparison.decisive == float("inf"):
        return "gives other outputs: other shapes, integers, inf or nan"
    return f"gives other outputs: a relative difference of {comparison.difference:.1e}"


def _size(model: nn.Module, flops: int) -> Size:
    tensors = [*model.parameters(), *model.buffers()]
    return Size(
        parameters=sum(p.numel() for p in model.parameters()), bytes=sum(t.nbytes for t in tensors), flops=flops
    )
