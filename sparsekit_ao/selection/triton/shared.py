"""Selection in rows of which other processes hold other slots: counted a digit at a time, and marked at the end.

The caller sums the counts of each digit over the processes. Nothing here communicates, or waits for the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..work import Update
from . import radix
from .device_plan import Launch, budget_of, device_plan, key_of
from .forms import Limits
from .launch import _on
from .plan import make_plan


@dataclass(kw_only=True, eq=False)
class _Workspace:
    """What the launches of rows with equally many digits share; see `plan.RadixPlan`."""

    launches: Sequence[Launch]
    state: Tensor
    counts: Tensor
    spans: Tensor
    unused: tuple[Tensor, ...]  # in the place of stored scores, decisions and gathered keys

    @property
    def digits(self) -> int:
        """Passes that find the threshold."""
        return self.counts.shape[1]

    def run(self, kernel, *arguments, **constants) -> None:  # type: ignore[no-untyped-def]
        """Launch a kernel on all rows."""
        memory = (*self.unused[:2], self.state, self.spans)
        for launch in self.launches:
            launch.run(kernel, *memory, *arguments, launch.length, **constants)


class SharedRows:
    """Rows of scores of several updates, on one device.

    Args:
        updates: of single elements, each with one `Scopes`; `keep` is an int64 tensor with one budget for each row, of
            all processes together.
        device: of all of them.
        limits: sizes at which another kernel is chosen.
    """

    def __init__(self, updates: Sequence[Update], device: torch.device, limits: Limits | None = None) -> None:
        self._device = device
        self._workspaces: list[_Workspace] = []
        self._of: dict[int, tuple[int, slice]] = {}  # workspace and rows of each update
        if updates:
            self._prepare(updates, limits or Limits())

    def _prepare(self, updates: Sequence[Update], limits: Limits) -> None:
        limits = replace(limits, fused=0, narrow=1 << 62)  # each pass reads all of a row
        with _on(self._device):
            budgets = [budget_of(u.keep, self._device) for u in updates]
            key = (limits, self._device, tuple(key_of(u, b) for u, b in zip(updates, budgets, strict=True)))
            plan = device_plan(key, budgets, self._device, lambda: make_plan(updates, limits))
            for at, (rows, launches) in enumerate(plan.radix):
                self._workspaces.append(self._workspace(rows.rows, rows.spans, launches))
                for placed in (p for batch in rows.batches for p in batch.parts):
                    self._of[placed.update] = at, slice(placed.state, placed.state + placed.part.rows)

    def _workspace(self, rows: int, spans: int, launches: Sequence[Launch]) -> _Workspace:
        digits, device = -(-launches[0].form.bits // radix.DIGIT.value), self._device
        return _Workspace(
            launches=launches,
            state=torch.zeros(rows, radix.STATE_FIELDS.value, dtype=torch.int64, device=device),
            counts=torch.zeros(rows, digits, radix.BINS.value, dtype=torch.int64, device=device),
            spans=torch.empty(spans, radix.SPAN_FIELDS.value, dtype=torch.int32, device=device),
            unused=tuple(torch.empty(1, dtype=t, device=device) for t in (torch.float32, torch.uint8, torch.uint32)),
        )

    def count(self, digit: int) -> list[Tensor]:
        """The counts of a digit (0 is the highest): int64 [rows, 256] of each update; of its last where it has fewer.

        They are live: write their sums over the processes into them before the next call.
        """
        with _on(self._device):
            for workspace in self._workspaces:
                if digit < workspace.digits:
                    workspace.run(radix.histogram_kernel, workspace.unused[2], workspace.counts, PASS=digit)
        return [counts[:, min(digit, counts.shape[1] - 1)] for counts in self._each("counts")]

    def find_ties(self) -> list[Tensor]:
        """Of each update int64 [rows], live: how many slots that equal the threshold are kept, the first ones.

        At first it is their number over all processes; write this process's into it.
        """
        with _on(self._device):
            for workspace in self._workspaces:
                workspace.run(radix.tie_kernel, workspace.unused[2], workspace.counts)
        return [state[:, radix.NEED.value] for state in self._each("state")]

    def mark(self) -> None:
        """Fill the masks of the updates."""
        with _on(self._device):
            for workspace in self._workspaces:
                workspace.run(radix.mark_kernel)

    def _each(self, name: str) -> Iterator[Tensor]:
        for update in sorted(self._of):
            at, rows = self._of[update]
            yield getattr(self._workspaces[at], name)[rows]
