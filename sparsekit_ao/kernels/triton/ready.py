"""Plans made ready: their tables in device memory, remembered by the tensors' addresses.

A step that repeats uploads nothing, so that it can be captured in a CUDA graph; what a graph may read again is kept
for good. Nothing here waits for the device.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...errors import SparsityError
from ..tiling import Blocks
from ..update import Update
from .parts import power_of_two
from .plan import Batch, Plan
from .table import starts_of, table_of

__all__ = ["Budget", "Launch", "Ready", "budget_of", "key_of", "prepared"]

KEPT = 1024  # plans remembered: more than a model has tensors
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8}

_plans: OrderedDict[tuple, "Ready"] = OrderedDict()
_captured: dict[int, "Ready"] = {}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A batch made ready: its tables in device memory, and what kernels are specialised on."""

    starts: Tensor
    row_starts: Tensor
    parts: Tensor
    members: Tensor
    programs: int
    rows: int
    traits: dict[str, Any]
    batch: Batch

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """As every kernel takes them: the first program of each part, part rows, member rows."""
        return self.starts, self.parts, self.members

    def traits_but(self, *names: str) -> dict[str, Any]:
        """What a kernel that knows nothing of `names` is specialised on."""
        return {k: v for k, v in self.traits.items() if k not in names}


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A plan made ready for one set of tensors; see `plan.Plan`."""

    plan: Plan
    fused: tuple[Launch, ...]
    scored: tuple[Launch, ...]
    rows: tuple[Launch, ...]
    wide: tuple[tuple[Launch, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """Blocks to keep: int64 in device memory, `step` from one scope to the next; or a number."""

    values: Tensor | None = None
    step: int = 0
    number: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """What a table depends on."""
        return self.number, self.step, 0 if self.values is None else self.values.data_ptr()


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
        update.stage,
        tuple((g.shape, g.order, tuple(_member_key(m) for m in g.members)) for g in update.groups),
    )


def prepared(key: tuple, budgets: Sequence[Budget], device: torch.device, make: Callable[[], Plan]) -> Ready:
    """The plan of this key with its tables in device memory, made once.

    Raises:
        SparsityError: a CUDA graph is being captured and there is none yet.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    ready = _plans.get(key)
    if ready is None:
        if capturing:
            raise SparsityError(
                "a CUDA graph is being captured, but these tensors and budgets were never updated before, so their "
                "table is not in device memory. Update the same tensors once before the capture; give budgets that "
                "are to change as an int64 tensor on the device."
            )
        ready = _plans[key] = _made_ready(make(), budgets, device)
        while len(_plans) > KEPT:
            _plans.popitem(last=False)
    _plans.move_to_end(key)
    if capturing:
        _captured[id(ready)] = ready
    return ready


def _made_ready(plan: Plan, budgets: Sequence[Budget], device: torch.device) -> Ready:
    """All tables in one upload, behind the budgets that are numbers."""
    batches = [*plan.fused, *plan.scored, *plan.rows, *(b for family in plan.wide for b in family)]
    size = len(budgets) + sum(_length(b) for b in batches)
    memory = torch.empty(size, dtype=torch.int64, device=device)
    for place in (p for b in batches for p in b.places):
        own = budgets[place.update]
        at = memory.data_ptr() + 8 * place.update
        place.keep = (at, 0) if own.values is None else (own.values.data_ptr(), own.step)
    content, launches = [b.number for b in budgets], []
    for batch in batches:
        lines = _lines(batch)
        begins = [len(content) + sum(map(len, lines[:k])) for k in range(4)]
        content += [n for line in lines for n in line]
        launches.append(_launch(batch, [memory[b : b + len(line)] for b, line in zip(begins, lines, strict=True)]))
    host = torch.tensor(content, dtype=torch.int64, device="cpu")
    memory.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
    ready = iter(launches)

    def take(found: Sequence[Batch]) -> tuple[Launch, ...]:
        return tuple(next(ready) for _ in found)

    return Ready(
        plan=plan,
        fused=take(plan.fused),
        scored=take(plan.scored),
        rows=take(plan.rows),
        wide=tuple(take(family) for family in plan.wide),
    )


def _length(batch: Batch) -> int:
    return sum(map(len, _lines(batch)))


def _lines(batch: Batch) -> list[list[int]]:
    """Starts, starts by rows, part rows and member rows."""
    return [
        starts_of([batch.programs(p) for p in batch.places]),
        starts_of([p.part.rows for p in batch.places]),
        *table_of(batch.places),
    ]


def _launch(batch: Batch, memory: Sequence[Tensor]) -> Launch:
    traits = {k: TYPES.get(v, v) if isinstance(v, torch.dtype) else v for k, v in batch.traits}
    return Launch(
        starts=memory[0],
        row_starts=memory[1],
        parts=memory[2],
        members=memory[3],
        programs=sum(batch.programs(p) for p in batch.places),
        rows=sum(p.part.rows for p in batch.places),
        traits={**traits, "PARTS": power_of_two(len(batch.places))},
        batch=batch,
    )


def _member_key(m: Blocks) -> tuple:
    tensors = [t for t in (m.values, m.mask) if t is not None]
    return (m.shape, m.order, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
