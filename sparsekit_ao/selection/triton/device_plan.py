"""Plans with their tables in device memory, cached by the tensors' addresses.

A step that repeats uploads nothing but the budgets that are numbers and have changed, so that it can be captured in a
CUDA graph; what a graph may read again is never freed. Nothing here waits for the device.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from ...errors import SparsityError
from ..nests import tensors_of
from ..tiling import Blocks
from ..work import Update
from .forms import Form, run
from .plan import Plan, RadixPlan

CACHE_BYTES = 64 << 20  # of device memory that cached tables take at most: about 100,000 tensors
ALIGNED = 2  # int64s in 16 bytes: kernels are compiled anew for pointers that are not multiples of 16 bytes

_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A batch with its tables in device memory; see `plan.Batch`."""

    tables: tuple[Tensor, ...]
    programs: int
    rows: int
    length: int
    form: Form

    @property
    def count(self) -> int:
        """Parts, padded to one of `plan.PART_COUNTS`."""
        return self.tables[0].numel()

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel on all programs: the tables, `arguments`, compile-time `constants`."""
        starts, _, parts, members = self.tables
        run(kernel, self.programs, starts, parts, members, *arguments, form=self.form, PARTS=self.count, **constants)


@dataclass(kw_only=True, eq=False)
class DevicePlan:
    """A plan for one set of tensors; see `plan.Plan`.

    `memory` holds `numbers` (the budgets that are numbers), then the tables; `written` is recorded on `stream` after
    the last upload. Once `shared`, with a graph or another stream, its numbers stay: nobody knows when they are read.
    """

    slots: int
    fused: tuple[Launch, ...]
    scored: tuple[Launch, ...]
    rows: tuple[Launch, ...]
    radix: tuple[tuple[RadixPlan, tuple[Launch, ...]], ...]
    memory: Tensor
    numbers: list[int] = field(default_factory=list)
    stream: Any = None
    written: Any = None
    shared: bool = False

    @property
    def bytes(self) -> int:
        """Device memory that it takes."""
        return self.memory.numel() * self.memory.element_size()


class PlanCache(OrderedDict[tuple, DevicePlan]):
    """Plans by their keys, the least recently used one first, of `CACHE_BYTES` at most (but for one larger plan)."""

    bytes = 0

    def insert(self, key: tuple, plan: DevicePlan) -> None:
        """Add a plan, in the place of one with the same key, and drop the least recently used ones."""
        if key in self:
            self.bytes -= self.pop(key).bytes
        self[key] = plan
        self.bytes += plan.bytes
        while len(self) > 1 and self.bytes > CACHE_BYTES:
            self.bytes -= self.popitem(last=False)[1].bytes


_plans = PlanCache()
_captured: dict[int, DevicePlan] = {}


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
    """A budget as kernels read it; an evenly strided int64 tensor on the device is not copied."""
    if not isinstance(keep, Tensor):
        return Budget(number=keep)
    values = keep.detach().to(device, torch.int64, non_blocking=True)
    if values.numel() == 1 or not any(values.stride()):
        return Budget(values=values)
    values = values.reshape(-1)
    return Budget(values=values, step=values.stride(0))


def key_of(update: Update, budget: Budget) -> tuple:
    """Everything that an update's tables depend on."""
    scopes = tuple((s.shape, s.order, tuple(_member_key(m) for m in s.members)) for s in update.scopes)
    return budget.key, update.norm, update.among_kept, update.masked, scopes


def _member_key(m: Blocks) -> tuple:
    return (m.shape, m.order, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors_of(m)))


def device_plan(key: tuple, budgets: Sequence[Budget], device: torch.device, make: Callable[[], Plan]) -> DevicePlan:
    """The plan of this key with its tables and budgets in device memory; made once.

    Raises:
        SparsityError: a CUDA graph is being captured, and there is none yet, or one with other numbers for budgets.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    numbers = [b.number for b in budgets]
    with _lock:
        plan = _plans.get(key)
        if capturing:
            plan = _for_graph(plan, numbers)
            _captured[id(plan)] = plan
        elif plan is None or not _set_numbers(plan, numbers):
            plan = _on_device(make(), budgets, device)
            _plans.insert(key, plan)
        _plans.move_to_end(key)
    return plan


def _for_graph(plan: DevicePlan | None, numbers: list[int]) -> DevicePlan:
    """The plan as a graph reads it from now on; a capture can neither upload nor wait for what was launched before."""
    if plan is None:
        raise SparsityError(
            "a CUDA graph is being captured, but these tensors and budgets were never updated before, so their table "
            "is not in device memory. Update the same tensors once before the capture; give budgets that are to change "
            "as an int64 tensor on the device, and masks with the strides of their parameters (torch.zeros_like): what "
            "is copied first has another address at every step."
        )
    if numbers != plan.numbers:
        raise SparsityError(
            "a CUDA graph is being captured with other numbers for budgets than those of the last update. Update "
            "with these once before the capture, or give budgets that are to change as an int64 tensor on the device."
        )
    plan.shared = True
    return plan


def _set_numbers(plan: DevicePlan, numbers: list[int]) -> bool:
    """Order this stream after the last upload, and write changed numbers; False where others may read the old ones.

    On one stream, a write comes after all that was launched with the old numbers.
    """
    stream: Any = None if plan.stream is None else torch.cuda.current_stream(plan.memory.device)
    if numbers != plan.numbers and (plan.shared or stream != plan.stream):
        return False
    if stream != plan.stream:
        stream.wait_event(plan.written)
        plan.memory.record_stream(stream)
        plan.shared = True
    if numbers != plan.numbers:
        _upload(plan, numbers, numbers)
    return True


def _upload(plan: DevicePlan, content: list[int], numbers: list[int]) -> None:
    """Copy to the front of the plan's memory, in the order of the current stream."""
    memory = plan.memory
    host = torch.tensor(content, dtype=torch.int64, device="cpu")
    memory[: len(content)].copy_(host.pin_memory() if memory.is_cuda else host, non_blocking=True)
    plan.numbers = numbers
    if memory.is_cuda:
        plan.stream, plan.written = torch.cuda.current_stream(memory.device), torch.cuda.Event()
        plan.written.record(plan.stream)


def _on_device(plan: Plan, budgets: Sequence[Budget], device: torch.device) -> DevicePlan:
    """All tables in one upload, after the budgets that are numbers; each starts at a multiple of 16 bytes."""
    batches = [*plan.fused, *plan.scored, *plan.rows, *(b for radix in plan.radix for b in radix.batches)]
    sizes = [len(budgets), *(n for b in batches for n in b.table_sizes)]
    memory = torch.empty(sum(map(_aligned, sizes)), dtype=torch.int64, device=device)
    for placed in (p for b in batches for p in b.parts):
        own = budgets[placed.update]
        number = memory.data_ptr() + 8 * placed.update
        placed.keep = (number, 0) if own.values is None else (own.values.data_ptr(), own.step)
    numbers = [b.number for b in budgets]
    content, launches = _padded(numbers), []
    for batch in batches:
        tables = batch.tables()
        starts = accumulate((_aligned(len(table)) for table in tables), initial=len(content))
        content += [n for table in tables for n in _padded(table)]
        launch = Launch(
            tables=tuple(memory[a : a + len(table)] for a, table in zip(starts, tables, strict=False)),
            programs=sum(batch.programs(p) for p in batch.parts),
            rows=sum(p.part.rows for p in batch.parts),
            length=batch.length,
            form=batch.form,
        )
        launches.append(launch)
    assert len(content) == memory.numel()
    left = iter(launches)
    fused, scored, stored = (tuple(islice(left, len(found))) for found in (plan.fused, plan.scored, plan.rows))
    radix = tuple((r, tuple(islice(left, len(r.batches)))) for r in plan.radix)
    found = DevicePlan(slots=plan.slots, fused=fused, scored=scored, rows=stored, radix=radix, memory=memory)
    _upload(found, content, numbers)
    return found


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _padded(table: list[int]) -> list[int]:
    return table + [0] * (_aligned(len(table)) - len(table))
