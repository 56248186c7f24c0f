"""`Conversion`: what an export did, as functions that write or convert return it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What an export did to the weights of a model; prints as text.

    Attributes:
        target: The name of the function that converted.
        converted: The names of the tensors that are now stored or run sparse.
        left: {tensor: why it was not converted} for all other weights.
        before, after: The bytes of what was converted, before and after, or of whole files if files are written.
        difference: The largest difference of an output, relative to the largest value that differs; None if values are
            equal bit for bit, or were not compared.
        notes: What else you should know, as texts.

    >>> print(Conversion(target="to_2_4", converted=("0.weight",), before=200, after=120))
    to_2_4: 1 of 1 weights
    bytes: 200 -> 120 (0.600)
    """

    target: str
    converted: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    before: int
    after: int
    difference: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        weights = len(self.converted) + len(self.left)  # a compacted model has none
        lines = [f"{self.target}: {len(self.converted)} of {weights} weights" if weights else self.target]
        lines += [f"bytes: {self.before:,} -> {self.after:,} ({self.after / max(self.before, 1):.3f})"]
        lines += [] if self.difference is None else [f"largest relative difference of outputs: {self.difference:.1e}"]
        lines += [f"left: {name} ({why})" for name, why in self.left.items()]
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])
