"""The only door to the kernels: checks the arguments, chooses the implementation, and hands over.

`impl="auto"` takes the CPU path for CPU tensors (its JIT tier where numba is installed and the work is large enough);
on CUDA the Triton kernels where triton is installed and they take the work, else the reference. An implementation
asked for by name is used or an error says why not; it never falls back.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import SparsityError
from . import numba as jit
from . import reference
from .cpu import masks as cpu
from .gpu import gpu_path
from .keys import KEY_DTYPES
from .reference import Norm
from .tiling import Blocks, Scopes, from_scopes, real_slots, to_scopes
from .update import Update

__all__ = ["IMPLS", "block_scores", "carry_out", "check_update", "fill_mask", "keep_mask", "scope_mask", "scope_scores"]

IMPLS = ("auto", "reference", "cpu", "jit", "triton")
JIT_FROM = 1 << 16  # elements from which the JIT tier is worth its start


def keep_mask(
    scores: Tensor,
    keep: int | Tensor,
    *,
    candidates: Tensor | None = None,
    magnitude: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Choose exactly `keep` members of every scope: the one selection rule of the library.

    The highest scores are kept; among equal scores the lower index wins; NaN ranks highest, so that a diverged weight
    is never hidden by pruning it; -0.0 equals 0.0. Every implementation returns the same bits.

    Args:
        scores: [scopes, members], float16, bfloat16, float32 or float64.
        keep: members kept in each scope, 0 <= keep <= members: an int, or an integer tensor [scopes].
        candidates: bool [scopes, members]; a False member is never kept, and a scope with fewer candidates than
            `keep` keeps them all.
        magnitude: rank by |score|: the same for scores that are never negative, and quicker.
        impl: one of `IMPLS`.

    Returns:
        bool [scopes, members], True = keep.

    Raises:
        SparsityError: wrong rank, dtype, budget or implementation.

    >>> keep_mask(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 1)
    tensor([[False,  True, False, False]])
    """
    if scores.ndim != 2 or scores.dtype not in KEY_DTYPES:
        raise SparsityError(
            f"keep_mask: scores must be float16, bfloat16, float32 or float64 [scopes, members], "
            f"got {scores.dtype} {tuple(scores.shape)}"
        )
    if candidates is not None and (candidates.shape != scores.shape or candidates.dtype != torch.bool):
        raise SparsityError(
            f"keep_mask: candidates must be bool {tuple(scores.shape)}, "
            f"got {candidates.dtype} {tuple(candidates.shape)}"
        )
    chosen = _choose(impl, scores.device)
    scopes, members = scores.shape
    _check_budget(keep, (scopes,), members)
    budget = keep.to(scores.device, torch.int64, non_blocking=True).expand(scopes) if isinstance(keep, Tensor) else keep
    if _takes_jit(impl, chosen, scores.numel(), lambda: jit.scores_refusal(scores)):
        return jit.keep_mask(scores, budget, candidates, magnitude=magnitude)
    gpu = gpu_path(impl, scores.device, lambda path: path.rows_reasons(scores))
    if gpu is not None:
        return gpu.keep_mask(scores, budget, candidates, magnitude=magnitude)
    if chosen == "cpu":
        return cpu.keep_mask(scores, budget, candidates, magnitude=magnitude)
    return reference.keep_mask(scores.abs() if magnitude else scores, budget, candidates)


def block_scores(
    members: Sequence[Blocks],
    norm: Norm = 2,
    *,
    ndim: int | None = None,
    as_mean: bool | None = None,
    impl: str = "auto",
) -> Tensor:
    """One score a block: the p-norm over the union of the members' blocks at each aligned grid index.

    Args:
        members: windows with values, whose aligned grids agree.
        norm: 1, 2, inf, or a callable giving a saliency per element, of which a block's score is the mean.
        ndim: dimensions of the aligned grid; the widest member's by default.
        as_mean: score by the power mean over the elements that a block has; by default where some block is partial.

    Returns:
        float32 (float64 for float64 weights), of the aligned grid's shape. Single elements score exactly |x|.
    """
    _check_norm(norm)
    ndim = max(m.window.ndim for m in members) if ndim is None else ndim
    if impl == "jit":
        raise SparsityError('block_scores has no impl="jit", which scores inside scope_mask. Use impl="auto".')
    device = members[0].window.device
    chosen = _choose(impl, device)
    gpu = gpu_path(impl, device, lambda path: path.score_reasons(members, norm, as_mean))
    if gpu is not None:
        return gpu.block_scores(members, norm, ndim)
    if chosen == "cpu":
        return cpu.block_scores(tuple(members), norm, ndim, as_mean)
    return reference.block_scores(members, norm, ndim, as_mean)


def fill_mask(members: Sequence[Blocks], keep: Tensor, *, among_kept: bool = False) -> None:
    """Write the keep grid (True = keep, of the aligned grid's shape) to every member's mask, in place.

    With `stage`, blocks are only removed: an earlier stage's choice stands.
    """
    reference.fill_mask(members, keep, among_kept=among_kept)


def scope_scores(group: Scopes, norm: Norm = 2, *, as_mean: bool | None = None, impl: str = "auto") -> Tensor:
    """Block scores as rows [scopes, blocks of a scope]; slots beyond a partial scope hold 0."""
    return to_scopes(block_scores(group.members, norm, ndim=len(group.shape), as_mean=as_mean, impl=impl), group, 0.0)


def scope_mask(
    groups: Sequence[Scopes], keep: int | Tensor, norm: Norm = 2, *, among_kept: bool = False, impl: str = "auto"
) -> None:
    """Score, select and fill: the whole mask update of the scopes that share budgets.

    Args:
        groups: scopes with values and masks; at one aligned scope index the blocks of all groups compete.
        keep: blocks kept in each scope: an int, or int64 of the shape of the aligned scope grid. A scope smaller
            than its budget keeps all.
        norm: see `block_scores`.
        stage: choose only among blocks that the masks still hold, scored by what the masks left of them.
        impl: one of `IMPLS`.
    """
    update = Update(groups=tuple(groups), keep=keep, norm=norm, among_kept=among_kept)
    check_update(update, impl)
    carry_out(update, impl)


def carry_out(update: Update, impl: str = "auto") -> None:
    """`scope_mask` of an update that `check_update` has passed."""
    groups, keep, norm, among_kept = update.groups, update.keep, update.norm, update.among_kept
    device = groups[0].members[0].window.device
    gpu = gpu_path(impl, device, lambda path: path.reasons_of(update))
    if gpu is not None:
        gpu.scope_masks([update])
        return
    keep = keep.expand(groups[0].scope_grid) if isinstance(keep, Tensor) else keep
    chosen = _choose(impl, device)
    numel = sum(g.members[0].window.numel() for g in groups)
    if _takes_jit(impl, chosen, numel, lambda: jit.refusal(groups, norm)):
        jit.scope_mask(groups, keep, norm, among_kept=among_kept)
        return
    if chosen == "cpu" and cpu.scope_mask(groups, keep, norm, among_kept=among_kept):
        return
    scored = [g.with_members([_left(m) for m in g.members]) for g in groups] if among_kept else groups
    as_mean = any(m.is_partial for g in groups for m in g.members)  # competitors are scored alike
    scores = torch.cat([scope_scores(g, norm, as_mean=as_mean, impl=impl) for g in scored], dim=1)
    candidates = real_slots(groups)
    if among_kept:
        alive = [to_scopes(reference.candidates_of(g.members, len(g.shape)), g, False) for g in groups]
        candidates = torch.cat(alive, dim=1)
    budget = keep.reshape(-1) if isinstance(keep, Tensor) else keep
    rows = keep_mask(scores, budget, candidates=candidates, magnitude=not callable(norm), impl=impl)
    for group, kept in zip(groups, rows.split([math.prod(g.shape) for g in groups], dim=1), strict=True):
        fill_mask(group.members, from_scopes(kept, group), among_kept=among_kept)


def check_update(update: Update, impl: str = "auto") -> None:
    """Refuse a norm, windows, a budget or an implementation that cannot be."""
    _check_norm(update.norm)
    _check_windows(update.groups)
    _check_budget(update.keep, update.groups[0].scope_grid, sum(math.prod(g.shape) for g in update.groups))
    _choose(impl, update.groups[0].members[0].window.device)


def _check_norm(norm: Norm) -> None:
    if not callable(norm) and (isinstance(norm, (bool, str)) or norm not in (1, 2, math.inf)):
        raise SparsityError(f"norm must be 1, 2, inf or a callable (weight -> saliency), got {norm!r}")


def _left(m: Blocks) -> Blocks:
    """The member with its values as the earlier stages left them."""
    assert m.values is not None and m.mask is not None
    return Blocks(shape=m.shape, order=m.order, values=torch.where(m.mask != 0, m.values, 0), mask=m.mask)


def _check_windows(groups: Sequence[Scopes]) -> None:
    """Values and masks must fit each other, and scopes line up, before anything is written."""
    for at, group in enumerate(groups):
        for m in group.members:
            if m.values is None or m.mask is None:
                raise SparsityError(f"groups[{at}]: scope_mask needs values and masks of every member")
            if m.values.shape != m.mask.shape:
                raise SparsityError(
                    f"groups[{at}]: values are {tuple(m.values.shape)}, but their mask is {tuple(m.mask.shape)}"
                )
            if any(n > 1 and d == 0 for n, d in zip(m.mask.shape, m.mask.stride(), strict=True)):
                raise SparsityError(
                    f"groups[{at}]: the mask is expanded, so its elements share memory. Clone it first."
                )
        if at and _longer(group.scope_grid) != _longer(groups[0].scope_grid):
            raise SparsityError(
                f"groups[{at}]: scopes form a grid {list(group.scope_grid)}, but those of groups[0] "
                f"{list(groups[0].scope_grid)}; scopes that share budgets must line up"
            )


def _longer(grid: tuple[int, ...]) -> list[int]:
    """Without dimensions of one scope, which some members lack."""
    return [n for n in grid if n != 1]


def _check_budget(keep: int | Tensor, grid: tuple[int, ...], members: int) -> None:
    """Refuse a budget of a wrong kind, shape or size (where looking at it needs no wait for a device)."""
    shape = list(grid)
    if isinstance(keep, Tensor):
        if tuple(keep.shape) not in ((), grid) or keep.is_floating_point() or keep.dtype == torch.bool:
            raise SparsityError(
                f"keep must be an int or an integer tensor {shape}, got {keep.dtype} {tuple(keep.shape)}"
            )
        low, high = (0, 0) if keep.device.type != "cpu" or not keep.numel() else map(int, keep.aminmax())
    elif isinstance(keep, bool) or not isinstance(keep, int):
        raise SparsityError(f"keep must be an int or an integer tensor {shape}, got {keep!r}")
    else:
        low = high = keep
    if low < 0 or high > members:
        raise SparsityError(f"keep must be in 0 .. {members} (the members of a scope), got {low} .. {high}")


def _choose(impl: str, device: torch.device) -> str:
    if impl not in IMPLS:
        raise SparsityError(f"impl must be one of {IMPLS}, got {impl!r}")
    if impl == "auto":
        return "cpu" if device.type == "cpu" else "reference"
    if impl in ("cpu", "jit") and device.type != "cpu":
        raise SparsityError(f'impl="{impl}" works on CPU tensors, got {device}. Use impl="auto".')
    return impl


def _takes_jit(impl: str, chosen: str, numel: int, refusal: Callable[[], str | None]) -> bool:
    """Whether the JIT tier does the work; an error where it was asked for by name and cannot."""
    if impl == "jit":
        why = refusal()
        if why is not None:
            raise SparsityError(f'impl="jit" cannot do this: {why}. Use impl="auto".')
        return True
    return impl == "auto" and chosen == "cpu" and numel >= JIT_FROM and refusal() is None
