"""Pieces of scopes: the blocks of one tensor that this rank holds, as rows of keys with their places in the scopes.

A piece knows its scores, which scopes it takes part in, and the index that each of its blocks has there over all
ranks; it does not know that there are ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..selection import Blocks, Norm, Scopes, block_scores, fill_mask, from_scopes, to_scopes
from ..selection.keys import KEY_DTYPES, absent, key_bits, order_keys
from ..selection.radix import CHUNK
from ..selection.reference import candidates_of
from ..selection.strides import Shape, row_major

__all__ = ["Piece", "PieceRows", "TiedRows"]


class Piece:
    """What this rank holds of a scope spec.

    Args:
        members: windows on values and masks; several for coupled blocks, which are whole on every rank.
        start: the first block's place in the spec's grid.
        tile: blocks of a scope along each dimension of that grid.
        order: as in `Scopes`.
        scope_grid: scopes along each dimension of that grid.
        base: index that the spec's first block has in a scope (those of specs before it come first).
        counts: whether this rank counts the piece; of replicas only one does.
        norm, as_mean, stage: as in `kernels.scope_mask`.
    """

    def __init__(
        self,
        members: Sequence[Blocks],
        *,
        start: Shape,
        tile: Shape,
        order: Shape,
        scope_grid: Shape,
        base: int,
        counts: bool,
        norm: Norm,
        as_mean: bool,
        among_kept: bool,
    ) -> None:
        self.counts, self._stage, self._base, self._tile = counts, among_kept, base, tile
        self._magnitude = norm is not None
        self._members = tuple(members)
        grid = Scopes(members=self._members, shape=tile).grid
        first = [at // g for at, g in zip(start, tile, strict=True)]
        last = [(at + n - 1) // g for at, n, g in zip(start, grid, tile, strict=True)]
        inner = [a == b for a, b in zip(first, last, strict=True)]  # the rank's blocks lie in one scope along it
        own = tuple(n if one else g for n, g, one in zip(grid, tile, inner, strict=True))
        into = [at - f * g for at, f, g in zip(start, first, tile, strict=True)]  # the first block, from its scope's
        self._lead = tuple(0 if one else at for one, at in zip(inner, into, strict=True))  # padding before the blocks
        self._shift = tuple(at if one else 0 for one, at in zip(inner, into, strict=True))
        self._own, self._grid, self._order = own, grid, order
        self.scopes = _scope_ids(scope_grid, order, first, last)
        values, candidates = _scored(self._members, norm, as_mean, among_kept)
        self._rows = self._in_rows(values, 0)
        alive = candidates if candidates is not None or not self._is_padded else torch.ones(grid, dtype=torch.bool)
        self._alive = None if alive is None else self._in_rows(alive.to(values.device), False).bool()

    @property
    def _is_padded(self) -> bool:
        return any(self._lead) or any((a + n) % g for a, n, g in zip(self._lead, self._grid, self._own, strict=True))

    @property
    def width(self) -> int:
        """Slots of a row."""
        return self._rows.shape[1]

    def keys(self, row: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Keys of slots start .. stop of one of its rows, as scores of `dtype` have them."""
        keys = order_keys(self._rows[row, start:stop].to(dtype), magnitude=self._magnitude)
        return keys if self._alive is None else keys.masked_fill_(~self._alive[row, start:stop], absent(dtype))

    def indices(self, slots: Tensor) -> Tensor:
        """The index in its whole scope of every slot; int64."""
        out = torch.full_like(slots, self._base)
        for own, shift, step in zip(row_major(self._own), self._shift, row_major(self._tile), strict=True):
            out += (slots // own + shift) * step
            slots = slots % own
        return out

    def tied(self, row: int, start: int, stop: int, limit: int, dtype: torch.dtype) -> Tensor:
        """Slots from start .. stop with exactly this key."""
        return (self.keys(row, start, stop, dtype) == limit).nonzero()[:, 0] + start

    def fill(self, limits: Tensor, last: Tensor, dtype: torch.dtype) -> None:
        """Write the masks: keys above their scope's limit stay, and of those equal to it indices up to `last`."""
        kept = torch.empty(self._rows.shape, dtype=torch.bool, device=self._rows.device)
        for row, scope in enumerate(self.scopes):
            limit = int(limits[scope])
            for start in range(0, self.width, CHUNK):
                stop = min(start + CHUNK, self.width)
                part = torch.gt(self.keys(row, start, stop, dtype), limit, out=kept[row, start:stop])
                ties = self.tied(row, start, stop, limit, dtype)
                part[ties - start] = self.indices(ties) <= int(last[scope])
        if self._alive is not None:
            kept &= self._alive
        fill_mask(self._members, self._from_rows(kept), among_kept=self._stage)

    def _layout(self, grid: Tensor) -> Scopes:
        return Scopes(members=(Blocks(shape=(1,) * grid.ndim, values=grid),), shape=self._own, order=self._order)

    def _in_rows(self, grid: Tensor, blank: float | bool) -> Tensor:
        if any(self._lead):
            sizes = [a + n for a, n in zip(self._lead, self._grid, strict=True)]
            led = grid.new_full(sizes, blank)
            led[tuple(slice(a, None) for a in self._lead)] = grid
            grid = led
        return to_scopes(grid, self._layout(grid), blank)

    def _from_rows(self, rows: Tensor) -> Tensor:
        sizes = [a + n for a, n in zip(self._lead, self._grid, strict=True)]
        whole = from_scopes(rows, self._layout(rows.new_empty(sizes)))
        return whole[tuple(slice(a, None) for a in self._lead)]


class PieceRows:
    """The keys of all scopes on this rank, piece after piece (see `kernels.radix.KeyRows`)."""

    def __init__(self, pieces: Sequence[Piece], rows: int, dtype: torch.dtype) -> None:
        self.rows, self.bits = rows, key_bits(dtype)
        self.dtype = dtype
        self._of: list[list[tuple[Piece, int]]] = [[] for _ in range(rows)]
        for piece in pieces:
            for at, scope in enumerate(piece.scopes):
                self._of[scope].append((piece, at))
        self.width = max((sum(p.width for p, _ in found) for found in self._of), default=0)

    def keys(self, row: int, start: int, stop: int) -> Tensor:
        """Keys of slots start .. stop of a scope, as far as it has them."""
        found = [p.keys(at, a, b, self.dtype) for p, at, a, b in self.spans(row, start, stop)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int32)

    def spans(self, row: int, start: int, stop: int) -> list[tuple[Piece, int, int, int]]:
        """Which slots of which pieces stand at start .. stop of a scope: (piece, its row, from, to)."""
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
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _scope_ids(scope_grid: Shape, order: Shape, first: Sequence[int], last: Sequence[int]) -> list[int]:
    """The scopes from `first` to `last` along each of a spec's own dimensions, in the order of its rows."""
    if not first:
        return [0]
    aligned = order or tuple(range(len(first)))
    steps = row_major([scope_grid[k] for k in aligned])
    ids = torch.zeros((), dtype=torch.int64)
    for k, step in zip(aligned, steps, strict=True):
        ids = ids[..., None] + torch.arange(first[k], last[k] + 1) * step
    return ids.reshape(-1).tolist()


def _scored(members: Sequence[Blocks], norm: Norm, as_mean: bool, among_kept: bool) -> tuple[Tensor, Tensor | None]:
    """Scores of the grid, and which blocks an earlier stage left; single elements stand for their own scores."""
    first, ndim = members[0], max(m.window.ndim for m in members)
    candidates = candidates_of(members, ndim) if among_kept else None
    if among_kept:
        members = [replace(m, values=torch.where(m.mask != 0, m.values, 0)) for m in members]  # type: ignore[arg-type]
    single = len(members) == 1 and not as_mean and all(b == 1 for b in first.shape)
    if single and first.window.dtype in KEY_DTYPES:
        return members[0].window, candidates
    return block_scores(members, norm, ndim=ndim, as_mean=as_mean), candidates
