"""Reports of a compaction and of a conversion to another format, as numbers and as text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNLISTED = "possibly a removed size (list it in attrs): "


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model.

    Attributes:
        parameters: elements of all parameters; a shared one counts once.
        bytes: of parameters and buffers.
        flops: of one forward on the example inputs (`torch.utils.flop_counter`: a multiply-add is two).

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
        name: of the coupling.
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
class Compaction:
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

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.couplings), default=0)
        lines = [f"{row.name:<{width}}  {row}" for row in self.couplings]
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
        lines += [f"left out: {text}" for text in self.left_out]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What an export did; `print(report)` shows it as text.

    Attributes:
        target: the function that converted.
        converted: names of the tensors that are stored, or run, sparse.
        left: {tensor: why} of all other weights.
        before, after: bytes of what was converted; of the whole files where files are written.
        difference: largest difference of an output on the user's inputs, relative to the largest value that differs;
            None where no model is run, because values are equal bit for bit.
        notes: what else a user must know.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:, 16:].zero_()
    >>> report = sparsekit_ao.export.coreml_metadata(model)[1]
    >>> report.target, report.converted
    ('coreml_metadata', ('0.weight',))
    """

    target: str
    converted: tuple[str, ...]
    left: Mapping[str, str]
    before: int
    after: int
    difference: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.target}: {len(self.converted)} of {len(self.converted) + len(self.left)} weights"]
        lines += [f"bytes: {self.before:,} -> {self.after:,} ({self.after / max(self.before, 1):.3f})"]
        lines += [] if self.difference is None else [f"largest relative difference of outputs: {self.difference:.1e}"]
        lines += [f"left: {name} ({why})" for name, why in self.left.items()]
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])
