"""Radix selection over ranks: every pass sums the histograms of all selections by one all-reduce.

A `Piece` is the blocks of one tensor that this rank holds, as rows of keys, made of windows on values and masks. It
gives the keys of its blocks, the scopes that they belong to and their indices in those scopes over all ranks, and fills
its masks from thresholds, without communication.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..selection import Blocks, Scopes, block_scores, fill_mask, from_scopes, to_scopes
from ..selection.keys import KEY_DTYPES, absent, key_bits, order_keys
from ..selection.radix import CHUNK, Passes, threshold_passes
from ..selection.reference import candidates_of
from ..selection.strides import Shape, row_major
from ..structure import MaskUpdate, ScopeMember


class Piece:
    """What this rank holds of one member of an update's scope.

    Args:
        windows: on values and masks; several for coupled blocks, which are whole on every rank.
        update: for its norm and `among_kept`.
        member: whose blocks these are.
        start: the first block's place in the member's block grid.
        base: index that the member's first block has in a scope (those of members before it come first).
        counts: whether this rank counts the piece; of replicas only one does.

    Attributes:
        rows: scores [rows, slots].
        candidates: bool of the same shape, which of them may be kept; None where all may.
        row_shape: slots of a row along each dimension.
        shift: index of a row's first slot in its scope along each dimension.
        scopes: the scope of each row.
    """

    def __init__(
        self,
        windows: Sequence[Blocks],
        update: MaskUpdate,
        member: ScopeMember,
        *,
        start: Shape,
        base: int,
        counts: bool,
    ) -> None:
        self.counts, self._base, self._tile, self._order = counts, base, member.shape, member.order
        self._windows, self._among_kept = tuple(windows), update.among_kept
        self._magnitude = update.norm is not None
        self._grid = Scopes(members=self._windows, shape=self._tile).grid
        first = [at // g for at, g in zip(start, self._tile, strict=True)]  # scope along each dimension
        last = [(at + n - 1) // g for at, n, g in zip(start, self._grid, self._tile, strict=True)]
        inner = [a == b for a, b in zip(first, last, strict=True)]  # this rank's blocks are in one scope along it
        into = [at % g for at, g in zip(start, self._tile, strict=True)]  # place of the first block in its scope
        self.row_shape = tuple(n if one else g for n, g, one in zip(self._grid, self._tile, inner, strict=True))
        padding = [0 if one else at for one, at in zip(inner, into, strict=True)]  # slots before the blocks
        self._padded = tuple(a + n for a, n in zip(padding, self._grid, strict=True))
        self._blocks = tuple(slice(a, None) for a in padding)
        self.shift = tuple(at if one else 0 for one, at in zip(inner, into, strict=True))  # of a row in its scope
        self.scopes = _scope_ids(member.grid_shape, self._order, first, last)
        values, candidates = _scored(self._windows, update)
        self.rows = self._in_rows(values, 0)
        if candidates is None and self.rows.numel() > values.numel():  # padded
            candidates = torch.ones(self._grid, dtype=torch.bool, device=values.device)
        self.candidates = None if candidates is None else self._in_rows(candidates, False).bool()

    @property
    def width(self) -> int:
        """Slots of a row."""
        return self.rows.shape[1]

    def keys(self, row: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Keys of slots start .. stop of one of its rows, as scores of `dtype` have them."""
        keys = order_keys(self.rows[row, start:stop].to(dtype), magnitude=self._magnitude)
        if self.candidates is not None:
            keys.masked_fill_(~self.candidates[row, start:stop], absent(dtype))
        return keys

    def indices(self, slots: Tensor) -> Tensor:
        """The index of every slot in its scope over all ranks; int64."""
        out = torch.full_like(slots, self._base)
        for own, shift, step in zip(row_major(self.row_shape), self.shift, row_major(self._tile), strict=True):
            out += (slots // own + shift) * step
            slots = slots % own
        return out

    def tied(self, row: int, start: int, stop: int, limit: int, dtype: torch.dtype) -> Tensor:
        """Slots from start .. stop with exactly this key."""
        return (self.keys(row, start, stop, dtype) == limit).nonzero()[:, 0] + start

    def fill(self, limits: Tensor, last: Tensor, dtype: torch.dtype) -> None:
        """Write the masks: keys above their scope's limit stay, and of those equal to it indices up to `last`."""
        kept = torch.empty(self.rows.shape, dtype=torch.bool, device=self.rows.device)
        for row, scope in enumerate(self.scopes):
            limit = int(limits[scope])
            for start in range(0, self.width, CHUNK):
                stop = min(start + CHUNK, self.width)
                part = torch.gt(self.keys(row, start, stop, dtype), limit, out=kept[row, start:stop])
                ties = self.tied(row, start, stop, limit, dtype)
                part[ties - start] = self.indices(ties) <= int(last[scope])
        self.write(kept if self.candidates is None else kept & self.candidates)

    def write(self, kept: Tensor) -> None:
        """Write the masks from bool rows."""
        padded = from_scopes(kept, self._layout(kept.new_empty(self._padded)))
        fill_mask(self._windows, padded[self._blocks], among_kept=self._among_kept)

    def _layout(self, grid: Tensor) -> Scopes:
        return Scopes(members=(Blocks(shape=(1,) * grid.ndim, values=grid),), shape=self.row_shape, order=self._order)

    def _in_rows(self, grid: Tensor, blank: float | bool) -> Tensor:
        padded = grid.new_full(self._padded, blank) if self._padded != self._grid else grid
        if padded is not grid:
            padded[self._blocks] = grid
        return to_scopes(padded, self._layout(padded), blank)


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The scopes of one update over all ranks, and this rank's pieces of them.

    Attributes:
        pieces: (index of its member in the scope, the piece).
        keep: int64 [scopes] on the CPU, at most the blocks that a scope has.
        tiles: blocks of a scope along each dimension, of each member.
        dtype: of the scores that are compared, on all ranks.
        signed: whether they are saliencies; else their magnitudes are compared.
    """

    pieces: Sequence[tuple[int, Piece]]
    keep: Tensor
    tiles: Sequence[Shape]
    dtype: torch.dtype
    signed: bool

    @property
    def counted(self) -> list[Piece]:
        """The pieces that this rank counts."""
        return [piece for _, piece in self.pieces if piece.counts]


def dtype_of(update: MaskUpdate) -> torch.dtype:
    """The dtype in which an update's scores are compared, the same on every rank."""
    single = not update.scope.as_mean and all(n == 1 for spec in update.scope.blocks() for n in spec.shape)
    dtypes = {update.value_of(spec).dtype for spec in update.scope.blocks()}
    if torch.float64 in dtypes:
        return torch.float64
    return dtypes.pop() if single and len(dtypes) == 1 else torch.float32


class PieceRows:
    """The keys of all scopes on this rank, piece after piece; a `selection.radix.KeyRows`."""

    def __init__(self, pieces: Sequence[Piece], rows: int, dtype: torch.dtype) -> None:
        self.rows, self.bits, self.dtype = rows, key_bits(dtype), dtype
        self._of: list[list[tuple[Piece, int]]] = [[] for _ in range(rows)]
        for piece in pieces:
            for at, scope in enumerate(piece.scopes):
                self._of[scope].append((piece, at))
        self.width = max((sum(p.width for p, _ in found) for found in self._of), default=0)

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        """Keys of slots start .. stop of a scope, as far as it has them."""
        found = [p.keys(at, a, b, self.dtype) for p, at, a, b in self.spans(row, start, stop)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int32, device="cpu")

    def spans(self, row: int, start: int, stop: int) -> list[tuple[Piece, int, int, int]]:
        """Which slots of which pieces are slots start .. stop of a scope: (piece, its row, from, to)."""
        out, before = [], 0
        for piece, at in self._of[row]:
            a, b = max(start - before, 0), min(stop - before, piece.width)
            if a < b:
                out.append((piece, at, a, b))
            before += piece.width
        return out


class TiedRows:
    """The indices of tied blocks as keys: the lower the index, the higher the key; the others are left out."""

    def __init__(self, source: PieceRows, limits: Tensor, members: int) -> None:
        self.rows, self.width, self.bits = source.rows, source.width, members.bit_length() + 1
        self._source, self._limits = source, limits

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        """Keys of the tied ones among slots start .. stop; at most that many."""
        limit, dtype = int(self._limits[row]), self._source.dtype
        spans = self._source.spans(row, start, stop)
        found = [-p.indices(p.tied(at, a, b, limit, dtype)) for p, at, a, b in spans]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")


def choose_passes(selection: Selection) -> Passes[None]:
    """Choose the blocks of scopes that are spread over ranks, and fill the masks of this rank's pieces.

    Yields histograms, for their sums over the ranks.
    """
    keep, dtype = selection.keep, torch.promote_types(selection.dtype, torch.float32)
    members = sum(map(math.prod, selection.tiles))
    source = PieceRows(selection.counted, len(keep), dtype)
    limits, need, ties = yield from threshold_passes(source, keep)
    last = torch.full_like(need, members)
    if not torch.equal(need, ties):
        place, _, _ = yield from threshold_passes(TiedRows(source, limits, members), need)
        last = torch.where(need > 0, -place, -1)
    for _, piece in selection.pieces:
        piece.fill(limits, last, dtype)


def run_together(selections: Sequence[Passes[None]], sum_of: Callable[[Tensor], Tensor]) -> None:
    """Run all selections, the same on every rank, to their end; one sum of int64 counts serves a pass of all of them.

    >>> def passes(counts):
    ...     print((yield torch.tensor([[counts]])).tolist())
    >>> run_together([passes(1), passes(5)], lambda counts: counts * 2)
    [[2]]
    [[10]]
    """
    waiting = [(p, next(p)) for p in selections]
    while waiting:
        summed = sum_of(torch.cat([counts.reshape(-1) for _, counts in waiting]))
        parts = summed.split([counts.numel() for _, counts in waiting])
        before, waiting = waiting, []
        for (p, counts), part in zip(before, parts, strict=True):
            with suppress(StopIteration):  # the selection has ended
                waiting.append((p, p.send(part.reshape(counts.shape))))


def sum_over(mesh: Any, dims: Sequence[int], most: int) -> Callable[[Tensor], Tensor]:
    """A sum of int64 vectors over dimensions of a mesh; sent as int32 where no sum, at most `most`, is larger."""
    dtype = torch.int32 if most < 2**31 else torch.int64

    def summed(counts: Tensor) -> Tensor:
        sent = counts.to(mesh.device_type, dtype)
        for dim in dims:
            torch.distributed.all_reduce(sent, group=mesh.get_group(dim))
        return sent.to(counts.device, torch.int64)

    return summed


def _scope_ids(scope_grid: Shape, order: Shape, first: Sequence[int], last: Sequence[int]) -> list[int]:
    """The scopes from `first` to `last` along each dimension of a member's grid, in the order of its rows."""
    if not first:
        return [0]
    aligned = order or tuple(range(len(first)))
    steps = row_major([scope_grid[k] for k in aligned])
    ids = torch.zeros((), dtype=torch.int64, device="cpu")
    for k, step in zip(aligned, steps, strict=True):
        ids = ids[..., None] + torch.arange(first[k], last[k] + 1, device="cpu") * step
    return ids.reshape(-1).tolist()


def _scored(windows: Sequence[Blocks], update: MaskUpdate) -> tuple[Tensor, Tensor | None]:
    """Scores of the grid, and with `among_kept` which blocks the masks still keep; single elements as they are."""
    first, ndim = windows[0], max(m.window.ndim for m in windows)
    candidates = candidates_of(windows, ndim) if update.among_kept else None
    if update.among_kept or update.masked:
        windows = [replace(m, values=torch.where(m.mask != 0, m.values, 0)) for m in windows]  # type: ignore[arg-type]
    as_mean = update.scope.as_mean
    single = len(windows) == 1 and not as_mean and all(b == 1 for b in first.shape)
    if single and first.window.dtype in KEY_DTYPES:
        return windows[0].window, candidates
    return block_scores(windows, update.norm, ndim=ndim, as_mean=as_mean), candidates
