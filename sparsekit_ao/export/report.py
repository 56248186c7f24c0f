"""What compaction did, as numbers and as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import manifest as manifests

__all__ = ["Compaction", "KeptUnits", "Size"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model is.

    Attributes:
        parameters: elements of all parameters; a shared one counts once.
        bytes: of parameters and buffers.
        flops: of one forward on the example inputs (`torch.utils.flop_counter`: a multiply-add is two).
    """

    parameters: int
    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class KeptUnits:
    """One coupled group: how many units are left.

    Attributes:
        name: of the group.
        kept, of: units of a scope after and before.
        scopes: independent sets of units.
        partly: units, over all scopes, that stay although some member holds zeros only: another one does not.
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
    """What `compact` did; `print(report)` reads well.

    Attributes:
        groups: one row a coupled group.
        before, after: sizes of the model.
        difference: largest difference of an output on the example inputs, relative to the largest value that differs.
        in_float64: the same of float64 copies, where rounding explains why it is more than the tolerance.
        notes: what is not exact, in words.
        not_compared: objects in the output that were not looked into, so tensors in them were not compared.
        likely: integers that seem to hold a removed size and are in no group's `attrs`.
        manifest: what `cut_to` needs, plain data.
    """

    groups: tuple[KeptUnits, ...]
    before: Size
    after: Size
    difference: float
    in_float64: float | None = None
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    likely: tuple[str, ...] = ()
    manifest: Mapping[str, Any] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the manifest as JSON, for `cut_to` in another process."""
        manifests.save(self.manifest, path)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.groups), default=0)
        lines = [f"{row.name:<{width}}  {row}" for row in self.groups]
        for what in ("parameters", "bytes", "flops"):
            was, now = getattr(self.before, what), getattr(self.after, what)
            lines.append(f"{what}: {was:,} -> {now:,}" + (f" ({now / was:.3f})" if was else ""))
        lines.append(f"largest relative difference on the example inputs: {self.difference:.1e}")
        lines += [] if self.in_float64 is None else [f"rounding: in float64 it is {self.in_float64:.1e}"]
        lines += [f"not exact: {note}" for note in self.notes]
        lines += [f"not looked into, hence not compared: {text}" for text in self.not_compared]
        lines += [f"likely a size that is gone (list it in attrs): {text}" for text in self.likely]
        return "\n".join(lines)
