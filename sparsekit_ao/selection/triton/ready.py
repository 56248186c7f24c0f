"""Plans made ready: their tables in device memory, remembered by the tensors' addresses.

A step that repeats uploads nothing but numbers among its budgets that have changed, so that it can be captured in a
CUDA graph; what a graph may read again is kept for good. Nothing here waits for the device.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import SparsityError
from ..tiling import Blocks
from ..work import Update
from .device import MEMBER_FIELDS, PART_FIELDS
from .forms import Form, run
from .parts import power_of_two
from .plan import Batch, Family, Plan
from .table import first_programs, table_of

__all__ = ["Budget", "Launch", "Ready", "Rows", "budget_of", "key_of", "prepared"]

KEPT = 64 << 20  # bytes of device memory that remembered tables take at most: about 100,000 tensors

_plans: OrderedDict[tuple, "Ready"] = OrderedDict()
_captured: dict[int, "Ready"] = {}
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A batch made ready: its tables in device memory, and what its kernels are specialised on."""

    starts: Tensor
    row_starts: Tensor
    parts: Tensor
    members: Tensor
    programs: int
    rows: int
    length: int
    form: Form
    count: int

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel on all programs: the tables, `arguments`, compile-time `constants`."""
        tables = (self.starts, self.parts, self.members)
        run(kernel, self.programs, *tables, *arguments, form=self.form, PARTS=self.count, **constants)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A family of long rows made ready."""

    family: Family
    launches: tuple[Launch, ...]


@dataclass(kw_only=True, eq=False)
class Ready:
    """A plan made ready for one set of tensors; see `plan.Plan`.

    `memory` holds `numbers` (budgets given as such), then the tables; `written` is recorded on `stream` behind the
    last upload. Once `shared`, with a graph or another stream, its numbers stay: nobody knows when they are read.
    """

    slots: int
    fused: tuple[Launch, ...]
    scored: tuple[Launch, ...]
    rows: tuple[Launch, ...]
    wide: tuple[Rows, ...]
    memory: Tensor
    numbers: list[int] = field(default_factory=list)
    stream: Any = None
    written: Any = None
    shared: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """Blocks to keep: int64 in device memory, `step` from one scope to the next; or a number."""

    values: Tensor | None = None
    step: int = 0
    number: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What a table depends on: not on a number, which is written in place while nobody else reads it."""
        return self.step, 0 if self.values is None else self.values.data_ptr()


def budget_of(keep: int | Tensor, device: torch.device) -> Budget:
    """A budget as kernels read it; an int64 tensor on the device that lies evenly is taken as it is."""
    if not isinstance(keep, Tensor):
        return Budget(number=keep)
    values = keep.detach().to(device, torch.int64, non_blocking=True)
    if values.numel() == 1 or not any(values.stride()):
        return Budget(values=values)
    values = values.reshape(-1)
    return Budget(values=values, step=values.stride(0))


def key_of(update: Update, budget: Budget) -> tuple:
    """Everything that an update's tables depend on."""
    return (
        budget.key,
        update.norm,
        update.among_kept,
        tuple((g.shape, g.order, tuple(_member_key(m) for m in g.members)) for g in update.scopes),
    )


def prepared(key: tuple, budgets: Sequence[Budget], device: torch.device, make: Callable[[], Plan]) -> Ready:
    """The plan of this key with its tables and the budgets in device memory; made once.

    Raises:
        SparsityError: a CUDA graph is being captured, and there is none yet, or with other numbers for budgets.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    numbers = [b.number for b in budgets]
    with _lock:
        ready = _plans.get(key)
        if capturing:
            ready = _for_graph(ready, numbers)
            _captured[id(ready)] = ready
        elif ready is None or not _follow(ready, numbers):
            ready = _plans[key] = _made_ready(make(), budgets, device)
            _forget()
        _plans.move_to_end(key)
    return ready


def _forget() -> None:
    """Drop the tables that were not used for longest, until the rest takes no more than it may."""
    while len(_plans) > 1 and sum(8 * r.memory.numel() for r in _plans.values()) > KEPT:
        _plans.popitem(last=False)


def _for_graph(ready: Ready | None, numbers: list[int]) -> Ready:
    """The table as a graph reads it from now on; a capture can neither upload nor wait for what was launched before."""
    if ready is None:
        raise SparsityError(
            "a CUDA graph is being captured, but these tensors and budgets were never updated before, so "
            "their table is not in device memory. Update the same tensors once before the capture; give "
            "budgets that are to change as an int64 tensor on the device, and masks that lie like their "
            "parameters (torch.zeros_like): what is copied first lies elsewhere at every step."
        )
    if numbers != ready.numbers:
        raise SparsityError(
            "a CUDA graph is being captured with other numbers for budgets than those of the last update. Update "
            "with these once before the capture, or give budgets that are to change as an int64 tensor on the "
            "device."
        )
    ready.shared = True
    return ready


def _follow(ready: Ready, numbers: list[int]) -> bool:
    """Order this stream behind the last upload, and write numbers that have changed; False where others may read them.

    On one stream, a write stands behind all that was launched with the old numbers.
    """
    stream: Any = None if ready.stream is None else torch.cuda.current_stream(ready.memory.device)
    if numbers != ready.numbers and (ready.shared or stream != ready.stream):
        return False
    if stream != ready.stream:
        stream.wait_event(ready.written)
        ready.memory.record_stream(stream)
        ready.shared = True
    if numbers != ready.numbers:
        _upload(ready, numbers, numbers)
    return True


def _upload(ready: Ready, content: list[int], numbers: list[int]) -> None:
    """Copy to the front of the table's memory, in the order of the current stream."""
    memory = ready.memory
    host = torch.tensor(content, dtype=torch.int64, device="cpu")
    memory[: len(content)].copy_(host.pin_memory() if memory.is_cuda else host, non_blocking=True)
    ready.numbers = numbers
    if memory.is_cuda:
        ready.stream, ready.written = torch.cuda.current_stream(memory.device), torch.cuda.Event()
        ready.written.record(ready.stream)


def _made_ready(plan: Plan, budgets: Sequence[Budget], device: torch.device) -> Ready:
    """All tables in one upload, behind the budgets that are numbers."""
    batches = [*plan.fused, *plan.scored, *plan.rows, *(b for family in plan.wide for b in family.batches)]
    memory = torch.empty(len(budgets) + sum(map(_length, batches)), dtype=torch.int64, device=device)
    for place in (p for b in batches for p in b.places):
        own = budgets[place.update]
        at = memory.data_ptr() + 8 * place.update
        place.keep = (at, 0) if own.values is None else (own.values.data_ptr(), own.step)
    numbers = [b.number for b in budgets]
    content, launches = list(numbers), []
    for batch in batches:
        lines = _lines(batch)
        ends = list(accumulate(map(len, lines), initial=len(content)))
        content += [n for line in lines for n in line]
        launches.append(_launch(batch, [memory[a:b] for a, b in pairwise(ends)]))
    assert len(content) == memory.numel()
    left = iter(launches)

    def take(found: Sequence[Batch]) -> tuple[Launch, ...]:
        return tuple(next(left) for _ in found)

    ready = Ready(
        slots=plan.slots,
        fused=take(plan.fused),
        scored=take(plan.scored),
        rows=take(plan.rows),
        wide=tuple(Rows(family=family, launches=take(family.batches)) for family in plan.wide),
        memory=memory,
    )
    _upload(ready, content, numbers)
    return ready


def _length(batch: Batch) -> int:
    count = len(batch.places)
    lines = count * PART_FIELDS.value + sum(len(p.starts) for p in batch.places) * MEMBER_FIELDS.value
    return 2 * power_of_two(count) + lines


def _lines(batch: Batch) -> list[list[int]]:
    """Starts, starts by rows, part rows and member rows."""
    return [
        first_programs([batch.programs(p) for p in batch.places]),
        first_programs([p.part.rows for p in batch.places]),
        *table_of(batch.places),
    ]


def _launch(batch: Batch, memory: Sequence[Tensor]) -> Launch:
    return Launch(
        starts=memory[0],
        row_starts=memory[1],
        parts=memory[2],
        members=memory[3],
        programs=sum(batch.programs(p) for p in batch.places),
        rows=sum(p.part.rows for p in batch.places),
        length=batch.length,
        form=batch.form,
        count=power_of_two(len(batch.places)),
    )


def _member_key(m: Blocks) -> tuple:
    tensors = [t for t in (m.values, m.mask) if t is not None]
    return (m.shape, m.order, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
