"""Mask updates on CPU: the reference's masks in a few passes over memory, a cache-sized part of a window at a time.

How blocks are chosen depends on how many compete (`rows.py`, `long.py`). Scores of single elements are never stored:
their keys are made from the weight itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..keys import KEY_DTYPES, absent, order_keys
from ..radix import CHUNK
from ..threads import run_apart
from ..tiling import Blocks, Scopes, cut_parts, from_aligned, from_scopes, split, to_scopes
from ..work import Norm, Update
from .long import KeysOf, keep_digits, keep_row
from .rows import PAIRS, PART, SORTED, keep_rows, keep_slots

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by how many mask elements they hold
SCORES = 1 << 22  # scores that are stored at once
WIDE = 1 << 15  # from here on a row is read in chunks


def keep_mask(
    scores: Tensor,
    keep: int | Tensor,
    candidates: Tensor | None = None,
    *,
    magnitude: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Exactly `keep` of each row of scores, by the fastest method for its width; `out` receives the mask."""
    out = torch.empty(scores.shape, dtype=torch.bool, device="cpu") if out is None else out
    if out.numel() == 0:
        return out
    source = KeysOf(scores, candidates, magnitude)
    if source.width >= WIDE:
        budget = torch.as_tensor(keep, dtype=torch.int64, device="cpu").expand(source.rows)
        for row in range(source.rows):
            one = slice(row, row + 1)
            own = KeysOf(scores[one], None if candidates is None else candidates[one], magnitude)
            if not keep_row([out[row]], [own], int(budget[row])):
                keep_digits(out[one], own, budget[one])
    else:
        step = max(1, (CHUNK if source.width <= SORTED else PART) // source.width)
        for start in range(0, source.rows, step):
            part = slice(start, start + step)
            keep_rows(out[part], source.block(part), keep[part] if isinstance(keep, Tensor) else keep)
    return out if candidates is None else out.logical_and_(candidates)


def block_scores(
    members: Sequence[Blocks], norm: Norm, ndim: int, as_mean: bool | None = None, *, out: Tensor | None = None
) -> Tensor:
    """As the reference, computed a part of the blocks at a time; the same bits, since no sum crosses a part.

    `out`, of the aligned grid's shape, receives the scores.
    """
    first = members[0]
    if len(members) > 1 or first.window.numel() <= CHUNK:
        found = reference.block_scores(members, norm, ndim, as_mean)
        return found if out is None else out.copy_(found)
    as_mean = first.is_partial if as_mean is None else as_mean
    own = replace(first, order=(), mask=None)
    if out is None:
        grid = torch.empty(first.grid, dtype=torch.promote_types(first.window.dtype, torch.float32), device="cpu")
    else:
        grid = from_aligned(out, first.order, first.grid)
    for place in _places(own):
        grid[place].copy_(reference.block_scores((_at(own, place),), norm, len(first.grid), as_mean))
    return reference.to_aligned(grid, first.order, ndim)


def _places(whole: Blocks) -> Iterator[tuple[slice, ...]]:
    """Parts of a window's grid, PART elements if they can be; smaller last blocks are parts of their own."""
    counts = [s // b for s, b in zip(whole.window.shape, whole.shape, strict=True)]
    inner = whole.window[tuple(slice(0, c * b) for c, b in zip(counts, whole.shape, strict=True))]
    if inner.numel():
        yield from (place for place, _ in cut_parts(inner, whole.shape, PART))
    for k, count in enumerate(counts):
        if whole.window.shape[k] % whole.shape[k]:
            before, after = counts[:k], whole.grid[k + 1 :]
            yield (*(slice(0, c) for c in before), slice(count, count + 1), *(slice(0, c) for c in after))


def _at(whole: Blocks, place: tuple[slice, ...]) -> Blocks:
    """The blocks of a part of the grid."""
    inside = tuple(slice(p.start * b, p.stop * b) for p, b in zip(place, whole.shape, strict=True))
    cut = [None if t is None else t[inside] for t in (whole.values, whole.mask, whole.under)]
    return replace(whole, values=cut[0], mask=cut[1], under=cut[2])


def fill(update: Update) -> None:
    """Score, select and fill: in one pass where windows are simple, else in the reference's three steps."""
    if not _fill_plain(update):
        reference.update_in_steps(update, block_scores, keep_mask)


def _fill_plain(update: Update) -> bool:
    """Fill the masks if every scope evenly cuts the grid of one window; whether they do."""
    keep, norm = update.budget, update.norm
    if not all(_plain(scopes) for scopes in update.scopes):
        return False
    long = sum(math.prod(scopes.shape) for scopes in update.scopes) >= WIDE
    if long and not update.among_kept and all(math.prod(scopes.scope_grid) == 1 for scopes in update.scopes):
        return _mask_together(update.scopes, int(keep), norm)
    if len(update.scopes) > 1:
        return False
    scopes, only = update.scopes[0], update.members[0]
    if update.among_kept and not only.is_partial:
        run_apart([partial(_mask_among_kept, *part, norm) for part in _cut(scopes, keep, _part_size(scopes))])
    elif not update.among_kept and _single(only):
        run_apart([partial(_mask_part, *part, norm) for part in _cut(scopes, keep, _part_size(scopes))])
    elif not update.among_kept:
        for part, own in [(scopes, keep)] if only.is_partial else _cut(scopes, keep, _scored_size(only)):
            _mask_blocks(part, own, norm)
    else:
        return False
    return True


def _cut(scopes: Scopes, keep: int | Tensor, most: int) -> Iterator[tuple[Scopes, int | Tensor]]:
    """Cut scopes into parts of `most` elements if they can be, each with its budget."""
    only = scopes.members[0]
    unit = tuple(b * g for b, g in zip(only.shape, scopes.shape, strict=True))
    for place, _ in cut_parts(only.window, unit, most):
        grid = tuple(slice(p.start * n, p.stop * n) for p, n in zip(place, scopes.shape, strict=True))
        yield scopes.with_members([_at(only, grid)]), keep[place] if isinstance(keep, Tensor) else keep


def _plain(scopes: Scopes) -> bool:
    """Whether scopes cut the grid of one window evenly, in its own order."""
    only = scopes.members[0]
    if len(scopes.members) > 1 or only.order or scopes.order or len(scopes.shape) != len(only.shape):
        return False
    if only.values is None or only.mask is None or only.mask.dtype != torch.bool or only.values.numel() == 0:
        return False
    return not any(g % n for g, n in zip(only.grid, scopes.shape, strict=True))


def _part_size(scopes: Scopes) -> int:
    """Elements of a part: more if its method takes many small steps besides its passes over the keys."""
    width, numel = math.prod(scopes.shape), scopes.members[0].window.numel()
    if PAIRS < width <= SORTED or width >= WIDE:
        return CHUNK
    return min(max(CHUNK, numel // (4 * torch.get_num_threads())), PART)


def _scored_size(blocks: Blocks) -> int:
    """Elements whose scores are SCORES at most, and take half the window's bytes at most."""
    size = math.prod(blocks.shape)
    return max(CHUNK, min(SCORES * size, blocks.window.numel() * size * blocks.window.element_size() // 8))


def _mask_among_kept(scopes: Scopes, keep: int | Tensor, norm: Norm) -> None:
    """Choose among what the mask of a part still keeps, scored by the values that it keeps."""
    part, n = scopes.members[0], len(scopes.shape)
    assert part.values is not None and part.mask is not None
    if _single(part) and math.prod(scopes.shape) < WIDE:
        if norm is None:
            keys = order_keys(part.values).masked_fill_(~part.mask, absent(part.values.dtype))
        else:  # what is dropped gets the key -1, below every magnitude
            keys = order_keys(part.values, magnitude=True).bitwise_or_(part.mask.view(torch.int8) - 1)
        kept = torch.empty_like(part.mask)
        _keep_grid(kept, keys, scopes, keep)
        part.mask.logical_and_(kept)
        return
    left = replace(part, values=torch.where(part.mask, part.values, 0))
    rows = to_scopes(reference.block_scores((left,), norm, n), scopes, 0.0)
    candidates = to_scopes(reference.candidates_of((part,), n), scopes, False)
    budget = keep.reshape(-1) if isinstance(keep, Tensor) else keep
    chosen = keep_mask(rows, budget, candidates, magnitude=norm is not None)
    reference.fill_mask((part,), from_scopes(chosen, scopes), among_kept=True)


def _mask_blocks(scopes: Scopes, keep: int | Tensor, norm: Norm) -> None:
    """Choose among the scores of whole blocks as among single elements."""
    only = scopes.members[0]
    scores = block_scores((only,), norm, only.window.ndim)
    kept = torch.empty(scores.shape, dtype=torch.bool, device="cpu")
    elements = scopes.with_members([Blocks(shape=(1,) * scores.ndim, values=scores, mask=kept)])
    fill(Update(scopes=(elements,), keep=keep, norm=norm))
    _fill(only, kept)


def _mask_part(scopes: Scopes, keep: int | Tensor, norm: Norm) -> None:
    """Choose among single elements."""
    part = scopes.members[0]
    assert part.mask is not None
    magnitude, values = norm is not None, reference.scored(part)
    if math.prod(scopes.shape) < WIDE:
        _keep_grid(part.mask, order_keys(values, magnitude=magnitude), scopes, keep)
        return
    budget, rows = keep.reshape(-1) if isinstance(keep, Tensor) else keep, to_scopes(part.mask, scopes, False)
    values = to_scopes(values, scopes, 0.0)
    if rows.data_ptr() == part.mask.data_ptr():
        keep_mask(values, budget, magnitude=magnitude, out=rows)
    else:
        part.mask.copy_(from_scopes(keep_mask(values, budget, magnitude=magnitude), scopes))


def _keep_grid(kept: Tensor, keys: Tensor, scopes: Scopes, keep: int | Tensor) -> None:
    """Write which blocks are kept, both of the grid's shape, where all keys of a scope are in memory."""
    if math.prod(scopes.shape) <= PAIRS:
        keep_slots(_slots(kept, scopes), _slots(keys, scopes), keep, kept.ndim)
        return
    budget = keep.reshape(-1) if isinstance(keep, Tensor) else keep
    rows, slots = to_scopes(kept, scopes, False), to_scopes(keys, scopes, 0)
    if rows.data_ptr() == kept.data_ptr() and (rows.stride(1) == 1 or slots.shape[1] > SORTED):
        keep_rows(rows, slots, budget)
        return
    rows = torch.empty(rows.shape, dtype=torch.bool, device="cpu")
    keep_rows(rows, slots, budget)
    kept.copy_(from_scopes(rows, scopes).contiguous())  # transposed in a buffer, which is faster


def _slots(grid: Tensor, scopes: Scopes) -> Tensor:
    """The grid seen as [*scope shape, *scope grid]."""
    n = grid.ndim
    return split(grid, scopes.shape).permute([*range(1, 2 * n, 2), *range(0, 2 * n, 2)])


def _mask_together(scopes: Sequence[Scopes], keep: int, norm: Norm) -> bool:
    """The blocks of all scopes make up one long row; False if their weights differ in dtype."""
    members = [one.members[0] for one in scopes]
    if len({m.window.dtype for m in members}) > 1:
        return False
    as_mean = any(m.is_partial for m in members)  # all competitors are scored in the same way
    single = not as_mean and all(_single(m) for m in members)
    grids = [m.window if single else block_scores((m,), norm, m.window.ndim, as_mean) for m in members]
    # a mask with the memory layout of its row is written directly
    inside = [m.mask is not None and single and m.mask.is_contiguous() for m in members]
    grids_kept = [
        m.mask if m.mask is not None and here else torch.empty(grid.shape, dtype=torch.bool, device="cpu")
        for m, grid, here in zip(members, grids, inside, strict=True)
    ]
    under = [m.under.reshape(1, -1) if m.under is not None and single else None for m in members]
    rows = [KeysOf(grid.reshape(1, -1), None, norm is not None, u) for grid, u in zip(grids, under, strict=True)]
    _keep_together([kept.view(-1) for kept in grids_kept], rows, keep)
    for m, kept, here in zip(members, grids_kept, inside, strict=True):
        if not here:
            _fill(m, kept)
    return True


def _keep_together(outs: Sequence[Tensor], rows: Sequence[KeysOf], keep: int) -> None:
    """Choose among the keys of several single rows as if they were one."""
    if keep_row(outs, rows, keep):
        return
    widths = [row.width for row in rows]
    chosen = torch.empty(1, sum(widths), dtype=torch.bool, device="cpu")
    keep_digits(chosen, KeysOf.joined(rows), torch.tensor([keep], device="cpu"))
    for own, part in zip(outs, chosen[0].split(widths), strict=True):
        own.copy_(part)


def _fill(m: Blocks, kept: Tensor) -> None:
    """Write which blocks are kept to the mask, whole words at a time where the last dimension of blocks is words."""
    mask, word = m.mask, math.gcd(m.shape[-1], 8)
    assert mask is not None
    dense = mask.stride(-1) == 1 and not any(
        n % word for n in (mask.shape[-1], *mask.stride()[:-1], mask.storage_offset())
    )
    if word > 1 and dense:
        m = Blocks(shape=(*m.shape[:-1], m.shape[-1] // word), mask=mask.view(WORDS[word]))
        kept = kept.to(WORDS[word]).mul_(int.from_bytes(b"\1" * word))
    for place in _places(m):
        reference.fill_mask((_at(m, place),), kept[place])


def _single(part: Blocks) -> bool:
    """Whether blocks are single elements whose own bits rank them."""
    return all(b == 1 for b in part.shape) and part.window.dtype in KEY_DTYPES
