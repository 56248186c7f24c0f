"""The public functions of selection: they check their arguments, choose a backend and hand the work to it.

`impl="auto"` uses the first backend of `backend.ORDER` that takes the work; an implementation requested by name is
used, or an error lists its reasons. Every implementation writes the same masks, bit for bit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SparsityError
from . import reference
from .backend import Backend, check_impl, choose, find
from .keys import KEY_DTYPES
from .tiling import Blocks, Scopes, aligned_grid, to_scopes
from .work import Norm, Scores, Threshold, Update


def keep_mask(
    scores: Tensor,
    keep: int | Tensor,
    *,
    candidates: Tensor | None = None,
    magnitude: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Choose exactly `keep` members of every scope: the one selection rule of the library.

    The highest scores are kept; among equal scores the lower index wins; NaN ranks highest, so that pruning never
    hides a diverged weight; -0.0 equals 0.0. Every implementation returns the same bits.

    Args:
        scores: [scopes, members], float16, bfloat16, float32 or float64.
        keep: members kept in each scope, 0 <= keep <= members: an int, or an integer tensor [scopes].
        candidates: bool [scopes, members]; a False member is never kept, and a scope with fewer candidates than
            `keep` keeps them all.
        magnitude: rank by |score|: the same for scores that are never negative, and faster.
        impl: `"auto"`, or the name of a backend: `"reference"`, `"cpu"`, `"triton"`.

    Returns:
        bool [scopes, members], True = keep.

    Raises:
        SparsityError: wrong rank, dtype, budget or implementation.

    >>> keep_mask(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 1)
    tensor([[False,  True, False, False]])
    """
    (mask,) = keep_masks([(scores, keep, candidates)], magnitude=magnitude, impl=impl)
    return mask


def keep_masks(
    rows: Sequence[tuple[Tensor, int | Tensor, Tensor | None]], *, magnitude: bool = False, impl: str = "auto"
) -> list[Tensor]:
    """`keep_mask` of each (scores, keep, candidates); on a GPU those of one dtype share launches.

    All of them are checked before anything is selected.
    """
    check_impl(impl)
    masks, updates = [], []
    for scores, keep, candidates in rows:
        _check_rows(scores, keep, candidates)
        masks.append(torch.empty(scores.shape, dtype=torch.bool, device=scores.device))
    for (scores, keep, candidates), mask in zip(rows, masks, strict=True):
        if candidates is not None:
            mask.copy_(candidates)
        if mask.numel():
            updates.append(_update_of_rows(scores.detach(), keep, mask, candidates is not None, magnitude))
    for backend, found in _by_backend(updates, impl):
        backend.run(found)
    return masks


def _check_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None) -> None:
    if not isinstance(scores, Tensor):
        raise SparsityError(f"keep_mask: scores must be a tensor [scopes, members], got {type(scores).__name__}")
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
    _check_budget(keep, (scores.shape[0],), scores.shape[1])


def _update_of_rows(scores: Tensor, keep: int | Tensor, mask: Tensor, among_kept: bool, magnitude: bool) -> Update:
    """Rows of scores as the windows of an update."""
    count, members = scores.shape
    if isinstance(keep, Tensor):
        keep = keep.to(scores.device, torch.int64, non_blocking=True).reshape(-1).expand(count).reshape(count, 1)
    row = Scopes(members=(Blocks(shape=(1, 1), values=scores, mask=mask),), shape=(1, members))
    return Update(scopes=(row,), keep=keep, norm=1 if magnitude else None, among_kept=among_kept)


def block_scores(
    members: Sequence[Blocks],
    norm: Norm = 2,
    *,
    ndim: int | None = None,
    as_mean: bool | None = None,
    impl: str = "auto",
) -> Tensor:
    """One score for each block: the p-norm over the union of the members' blocks at each aligned grid index.

    Args:
        members: windows with values, whose aligned grids agree.
        norm: 1, 2 or inf; None: values are saliencies, and a score is their signed sum.
        ndim: dimensions of the aligned grid; the widest member's by default.
        as_mean: score by the (power) mean over the elements of a block; by default where some block is partial.
        impl: as in `keep_mask`.

    Returns:
        float32 (float64 for float64 weights), of the aligned grid's shape. Single elements score exactly |x|.
    """
    _check_norm(norm)
    first = members[0]
    grid = aligned_grid(first.grid, first.order, max(m.window.ndim for m in members) if ndim is None else ndim)
    dtype = torch.float64 if any(m.window.dtype == torch.float64 for m in members) else torch.float32
    out = torch.empty(grid, dtype=dtype, device=first.window.device)
    work = Scores(members=tuple(members), out=out, norm=norm, as_mean=as_mean)
    choose(work, impl).run([work])
    return out


def scope_scores(scopes: Scopes, norm: Norm = 2, *, as_mean: bool | None = None, impl: str = "auto") -> Tensor:
    """Block scores as rows [scopes, blocks of a scope]; slots beyond a partial scope hold 0."""
    scores = block_scores(scopes.members, norm, ndim=len(scopes.shape), as_mean=as_mean, impl=impl)
    return to_scopes(scores, scopes, 0.0)


def fill_mask(members: Sequence[Blocks], keep: Tensor, *, among_kept: bool = False) -> None:
    """Write the keep grid (True = keep, of the aligned grid's shape) to every member's mask, in place.

    With `among_kept`, blocks are only removed: what the masks drop already stays dropped.
    """
    reference.fill_mask(members, keep, among_kept=among_kept)


def scope_mask(
    scopes: Sequence[Scopes],
    keep: int | Tensor,
    norm: Norm = 2,
    *,
    among_kept: bool = False,
    masked: bool = False,
    impl: str = "auto",
) -> None:
    """Score, select and fill: the whole mask update of scopes that share budgets.

    Args:
        scopes: windows with values and masks; at one aligned scope index the blocks of all entries compete.
        keep: blocks kept in each scope: an int, or an integer tensor of the shape of the aligned scope grid. A scope
            with fewer blocks than its budget keeps all.
        norm: see `block_scores`.
        among_kept: choose only among blocks that the masks still keep, scored by the values that the masks keep.
        masked: score by the values that the masks keep, but choose among all blocks.
        impl: as in `keep_mask`.
    """
    update = Update(scopes=tuple(scopes), keep=keep, norm=norm, among_kept=among_kept, masked=masked)
    scope_masks([update], impl=impl)


def scope_masks(updates: Sequence[Update], *, impl: str = "auto") -> None:
    """Fill the masks of updates that do not depend on each other; as `scope_mask` for each.

    All updates are checked before any mask changes.

    Args:
        updates: see `Update`; a tensor appears in one of them at most.
        impl: as in `keep_mask`.
    """
    check_impl(impl)
    for update in updates:
        _check_norm(update.norm)
        _check_windows(update.scopes)
        _check_budget(update.keep, update.scopes[0].scope_grid, sum(math.prod(s.shape) for s in update.scopes))
    for backend, found in _by_backend(updates, impl):
        if impl == "auto" and backend.name == reference.name:  # others may still take the single steps
            for update in found:
                reference.update_in_steps(update, block_scores, keep_mask)
        else:
            backend.run(found)


def _by_backend(updates: Sequence[Update], impl: str) -> list[tuple[Backend, list[Update]]]:
    """Each backend with the updates that it is chosen for, on one device."""
    shared: dict[tuple[str, torch.device], tuple[Backend, list[Update]]] = {}
    for update in updates:
        backend = choose(update, impl)
        shared.setdefault((backend.name, update.device), (backend, []))[1].append(update)
    return list(shared.values())


def threshold_backend(work: Sequence[Threshold], impl: str = "auto") -> Backend | None:
    """The backend that thresholds all these blocks in place; None where the caller does it in plain torch.

    Args:
        work: on one device.
        impl: `"auto"`; `"reference"` for None; else the name of a backend.

    Raises:
        SparsityError: `impl` names a backend that cannot take the work, or none at all.
    """
    check_impl(impl)
    found = [None if impl == "reference" else find(one, impl) for one in work]
    return found[0] if all(backend is found[0] for backend in found) else None


def _check_norm(norm: Norm) -> None:
    if norm is not None and (isinstance(norm, (bool, str)) or norm not in (1, 2, math.inf)):
        raise SparsityError(f"norm must be 1, 2, inf, or None for values that are saliencies, got {norm!r}")


def _check_windows(scopes: Sequence[Scopes]) -> None:
    """Values and masks must fit each other, and scope grids agree, before anything is written."""
    for at, one in enumerate(scopes):
        for m in one.members:
            if m.values is None or m.mask is None:
                raise SparsityError(f"scopes[{at}]: scope_mask needs values and masks of every member")
            if m.values.shape != m.mask.shape:
                raise SparsityError(
                    f"scopes[{at}]: values are {tuple(m.values.shape)}, but their mask is {tuple(m.mask.shape)}"
                )
            if any(n > 1 and d == 0 for n, d in zip(m.mask.shape, m.mask.stride(), strict=True)):
                raise SparsityError(
                    f"scopes[{at}]: the mask is expanded, so its elements share memory. Clone it first."
                )
        if at and _without_ones(one.scope_grid) != _without_ones(scopes[0].scope_grid):
            raise SparsityError(
                f"scopes[{at}]: scopes form a grid {list(one.scope_grid)}, but those of scopes[0] "
                f"{list(scopes[0].scope_grid)}; scopes that share budgets must have the same grid"
            )


def _without_ones(grid: tuple[int, ...]) -> list[int]:
    """Without dimensions of one scope, which some members lack."""
    return [n for n in grid if n != 1]


def _check_budget(keep: int | Tensor, grid: tuple[int, ...], members: int) -> None:
    """Refuse a budget of a wrong kind, shape or size (where reading it needs no wait for a device)."""
    shape = list(grid)
    if isinstance(keep, Tensor):
        fits = keep.ndim == 0 or _without_ones(tuple(keep.shape)) == _without_ones(grid)
        if not fits or keep.is_floating_point() or keep.dtype == torch.bool:
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
