"""The order of launches: masks of updates, masks of rows of scores, scores of blocks, thresholding in place.

Nothing here waits for the device: sizes come from shapes, budgets are read by the kernels.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..finish import finished
from ..tiling import Blocks, Scopes
from ..work import Update
from . import narrow, radix
from .blocks import fill_kernel, fused_kernel, score_kernel
from .device_plan import DevicePlan, Launch, budget_of, device_plan, key_of
from .forms import Limits, run
from .parts import strided_part
from .plan import RadixPlan, make_plan, rows_plan, score_plan
from .reasons import score_reasons
from .shrink import condition_kernel, threshold_kernel
from .turns import turns

FINEST = 1e-6  # smallest tolerance that float32 reaches


def scope_masks(updates: Sequence[Update], limits: Limits | None = None) -> None:
    """Fill the masks of updates on one device, for which `reasons_of` is empty; parts of the same form share launches.

    Raises:
        SparsityError: a CUDA graph is being captured and these tensors were not updated before.
    """
    limits, device = limits or Limits(), updates[0].scopes[0].members[0].window.device
    with _on(device):
        for turn in turns(updates, limits):
            _fill_masks(turn, limits, device)
    _mark_changed(m.mask for update in updates for scopes in update.scopes for m in scopes.members)


def _fill_masks(updates: Sequence[Update], limits: Limits, device: torch.device) -> None:
    """Fill the masks of updates whose workspace is held at once."""
    budgets = [budget_of(u.keep, device) for u in updates]
    key = (limits, device, tuple(key_of(u, b) for u, b in zip(updates, budgets, strict=True)))
    plan = device_plan(key, budgets, device, lambda: make_plan(updates, limits))
    scores = torch.empty(max(plan.slots, 1), dtype=torch.float32, device=device)
    kept = torch.empty(max(plan.slots, 1), dtype=torch.uint8, device=device)
    for launch in plan.fused:
        launch.run(fused_kernel, scores, kept)
    for launch in plan.scored:
        launch.run(score_kernel, scores, kept)
    _select(plan, scores, kept)
    for launch in plan.scored:
        launch.run(fill_kernel, kept)


def keep_mask(
    scores: Tensor, keep: int | Tensor, candidates: Tensor | None, *, magnitude: bool, limits: Limits | None = None
) -> Tensor:
    """As `api.keep_mask`, on rows of scores of any strides."""
    limits, device = limits or Limits(), scores.device
    kept = torch.empty(scores.shape, dtype=torch.uint8, device=device)
    if candidates is not None:
        kept.copy_(candidates)
    if kept.numel():
        with _on(device):
            aligned, among_kept, budget = scores.data_ptr() % 16 == 0, candidates is not None, budget_of(keep, device)
            # all scores of this shape share the table, so a number must be part of the key
            own = (aligned, among_kept, magnitude, budget.key, budget.number)
            key = (limits, device, scores.shape, scores.stride(), scores.dtype, *own)
            rows, width = scores.shape
            part = strided_part(rows, width, scores.stride(), dtype=scores.dtype, big=limits.big, aligned=aligned)
            plan = device_plan(key, [budget], device, lambda: rows_plan(part, keep, among_kept, not magnitude, limits))
            _select(plan, scores, kept)
    return kept.view(torch.bool)


def block_scores(members: Sequence[Blocks], norm: float, ndim: int, limits: Limits | None = None) -> Tensor:
    """As `api.block_scores`: float32, of the aligned grid's shape."""
    limits, device = limits or Limits(), members[0].window.device
    grid = Scopes(members=tuple(members), shape=(1,) * ndim).grid
    out = torch.empty(grid, dtype=torch.float32, device=device)
    if out.numel():
        with _on(device):
            update = Update(scopes=(Scopes(members=tuple(members), shape=grid),), keep=0, norm=norm)
            budget = budget_of(0, device)
            key = (limits, device, "scores", key_of(update, budget))
            for launch in device_plan(key, [budget], device, lambda: score_plan(update, limits)).scored:
                launch.run(score_kernel, out, out)
    return out


def _select(plan: DevicePlan, scores: Tensor, kept: Tensor) -> None:
    """Select in rows of stored scores, and in long rows of any kind."""
    for launch in plan.rows:
        launch.run(fused_kernel, scores, kept)
    for long_rows, launches in plan.radix:
        memory = _radix_memory(long_rows, launches, scores, kept)
        select = partial(_radix_select, long_rows, launches, memory)
        if any(launch.form.gathers_in_mask for launch in launches):
            finished(select)  # so that Ctrl-C leaves no mask with gathered keys in it
        else:
            select()


@dataclass(frozen=True, kw_only=True)
class _RadixMemory:
    """What the launches of a radix select share, because an update may have parts in several.

    Attributes:
        scores, kept: stored scores and decisions of all updates.
        state, counts: of each row: see `narrow`; the histogram of each pass.
        spans, inside: of each span: its record, and its gathered keys where its mask does not hold them.
        samples: of each row.
    """

    scores: Tensor
    kept: Tensor
    state: Tensor
    counts: Tensor
    spans: Tensor
    inside: Tensor
    samples: Tensor

    @property
    def passes(self) -> int:
        """Digits of a key."""
        return self.counts.shape[1]


def _radix_memory(plan: RadixPlan, launches: Sequence[Launch], scores: Tensor, kept: Tensor) -> _RadixMemory:
    """Allocate the workspace of long rows; nothing is in it yet."""
    form, keys = launches[0].form, launches[0].length * (launches[0].form.tile // 8)
    empty = partial(torch.empty, device=scores.device)
    count_dtype = torch.int64 if plan.wide_counts else torch.int32
    return _RadixMemory(
        scores=scores,
        kept=kept,
        state=empty(plan.rows, narrow.STATE_FIELDS.value, dtype=torch.int64),
        counts=empty(plan.rows, -(-form.bits // radix.DIGIT.value), radix.BINS.value, dtype=count_dtype),
        spans=empty(plan.spans, narrow.SPAN_FIELDS.value, dtype=torch.int32),
        inside=empty(max(plan.buffers * keys, 1), dtype=torch.uint32),
        samples=empty(plan.rows if form.narrow else 0, plan.samples, dtype=torch.uint32),
    )


def _radix_select(plan: RadixPlan, launches: Sequence[Launch], m: _RadixMemory) -> None:
    """Sample, bracket and narrow where rows are long; then radix passes, ties and masks."""
    length, memory = launches[0].length, (m.scores, m.kept, m.state, m.spans, m.inside)
    m.state.zero_()
    m.counts.zero_()
    if launches[0].form.narrow:
        _bracket(plan, launches, m)
        for launch in launches:
            launch.run(narrow.narrow_kernel, *memory, length)
    for at in range(m.passes):
        for launch in launches:
            launch.run(radix.histogram_kernel, *memory, m.counts, length, PASS=at)
    for launch in launches:
        launch.run(radix.tie_kernel, *memory, m.counts, length)
    for launch in launches:
        launch.run(radix.mark_kernel, *memory[:4], length)


def _bracket(plan: RadixPlan, launches: Sequence[Launch], m: _RadixMemory) -> None:
    """Bracket each row's threshold from a sample."""
    capacity = plan.samples
    tiles = max(1, capacity // narrow.SAMPLE_TILE.value)
    for x in launches:
        _, *tables = x.tables  # these programs take rows, not spans
        constants = {"CAPACITY": capacity, "PARTS": x.count}
        memory = (m.scores, m.kept, m.samples)
        run(narrow.sample_kernel, x.rows, *tables, *memory, form=x.form, columns=tiles, **constants)
    for x in launches:
        constants = {"CAPACITY": capacity, "BITS": x.form.bits, "PARTS": x.count}
        run(narrow.bracket_kernel, x.rows, *x.tables[1:3], m.state, m.samples, form=x.form, **constants)


def threshold_reasons(scopes: Scopes, as_mean: bool | None = None) -> list[str]:
    """Why blocks are not for the threshold kernel."""
    partial = any(g % n for g, n in zip(scopes.grid, scopes.shape, strict=True))
    return score_reasons(scopes.members, 2, as_mean) + ["a scope at an edge is smaller than the others"] * partial


def condition_reasons(scopes: Scopes, atol: float) -> list[str]:
    """Why blocks with conditioners (in the place of masks) are not for the conditioned kernel."""
    found, held = threshold_reasons(scopes), Limits().held
    if len(scopes.members) > 1:
        found.append("conditioned thresholding of coupled blocks needs all of a block at once")
    elif math.prod(scopes.members[0].shape) > held:
        found.append(f"conditioned thresholding holds blocks of {held} elements at most")
    if atol < FINEST:
        found.append(f"conditioned thresholding reaches atol={FINEST:g} in float32, not {atol:g}")
    return found


def threshold(
    scopes: Scopes, thresholds: Tensor | float, *, soft: bool, factor: float = 1.0, limits: Limits | None = None
) -> None:
    """Shrink blocks by the prox of `thresholds * factor` times their 2-norm, or zero those strictly below, in place.

    Args:
        scopes: windows with values, nothing partial; the blocks of a scope share a threshold.
        thresholds: a number, or float32 with one element or one for each scope, in the order of the scope grid.
        soft: shrink; else zero.
        factor: multiplies the thresholds.
        limits: sizes at which another kernel is chosen.
    """
    plain = scopes.with_members([Blocks(shape=m.shape, values=m.values, order=m.order) for m in scopes.members])
    device, limits = scopes.members[0].window.device, limits or Limits()
    with _on(device):
        launch = _threshold_launch(plain, thresholds, limits, held=0)
        if launch is not None:
            launch.run(threshold_kernel, *_threshold_arguments(thresholds, factor), SOFT=soft)
            _mark_changed(m.values for m in scopes.members)


def condition(
    scopes: Scopes,
    thresholds: Tensor | float,
    *,
    factor: float,
    eps: float,
    atol: float,
    max_iter: int,
    limits: Limits | None = None,
) -> Tensor:
    """The soft variant under a positive diagonal, given in the place of masks.

    Args:
        scopes, thresholds, factor, limits: see `threshold`.
        eps: added to the diagonal.
        atol, max_iter: when Newton's method stops.

    Returns:
        One number per program: 0, or how far its worst block is from convergence; that block stays as it was.
    """
    device, limits = scopes.members[0].window.device, limits or Limits()
    with _on(device):
        launch = _threshold_launch(scopes, thresholds, limits, held=limits.held)
        if launch is None:
            return torch.zeros(1, device=device)
        misses = torch.empty(launch.programs, dtype=torch.float32, device=device)
        settings = (misses, eps, atol, max(max_iter, 0))
        launch.run(condition_kernel, *_threshold_arguments(thresholds, factor), *settings)
    _mark_changed(m.values for m in scopes.members)
    return misses


def _threshold_arguments(thresholds: Tensor | float, factor: float) -> tuple[Tensor | None, float, float]:
    """Thresholds as the kernels take them: a tensor, or None and a number; and their factor."""
    if isinstance(thresholds, Tensor):
        return thresholds.reshape(-1).contiguous(), 0.0, float(factor)
    return None, float(thresholds), float(factor)


def _threshold_launch(scopes: Scopes, thresholds: Tensor | float, limits: Limits, *, held: int) -> Launch | None:
    """The launch over all blocks, those of up to `held` elements in one chunk; None where there is no block."""
    if any(m.window.numel() == 0 for m in scopes.members):
        return None
    per_scope = isinstance(thresholds, Tensor) and thresholds.numel() > 1
    update, device = Update(scopes=(scopes,), keep=0), scopes.members[0].window.device
    budget = budget_of(0, device)
    key = (limits, device, "threshold", per_scope, held, key_of(update, budget))
    make = partial(score_plan, update, limits, contiguous=False, per_scope=per_scope, held=held)
    return device_plan(key, [budget], device, make).scored[0]


def _mark_changed(tensors: Iterable[Tensor | None]) -> None:
    """Tell autograd, which cannot see kernels write: a backward pass that saved the old values must raise an error."""
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the tensors' own device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
