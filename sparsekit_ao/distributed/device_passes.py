"""Radix selection over ranks on GPUs: kernels count the keys that a rank holds, one all-reduce a digit sums the counts.

The masks are those of `pieces.choose_passes`. The host reads one number for all selections: whether ties are cut.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..selection import Blocks, Scopes, Update
from ..selection.backend import choose
from ..selection.keys import key_bits, order_keys
from ..selection.radix import Passes
from .pieces import Piece, Selection, run_together

DIGIT, BINS = 8, 256  # of the kernels
SumOf = Callable[[Tensor], Tensor]


def kernels_take(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels select among rows of scores of this dtype on a device."""
    row = torch.empty(1, 1, dtype=dtype, device=device)
    member = Blocks(shape=(1, 1), values=row, mask=torch.empty_like(row, dtype=torch.bool))
    return choose(Update(scopes=(Scopes(members=(member,), shape=(1, 1)),), keep=1, norm=None)).name == "triton"


class _Held:
    """A piece with its rows on the device: scores, what may be kept, and the mask that is made of them."""

    def __init__(self, selection: Selection, member: int, piece: Piece, keep: Tensor) -> None:
        self.piece, self.member, self.selection = piece, member, selection
        self.scores = piece.rows.to(selection.dtype)
        self.ids = torch.as_tensor(piece.scopes, device="cpu").to(keep.device, non_blocking=True)
        allowed = piece.candidates
        self.mask = torch.empty_like(self.scores, dtype=torch.bool) if allowed is None else allowed.clone()
        windows = Blocks(shape=(1, 1), values=self.scores, mask=self.mask)
        self.update = Update(
            scopes=(Scopes(members=(windows,), shape=(1, piece.width)),),
            keep=keep[self.ids][:, None],
            norm=None if selection.signed else 1,
            among_kept=allowed is not None,
        )

    @property
    def depth(self) -> int:
        """Dimensions of a scope."""
        return len(self.piece.row_shape)

    def tied(self, limits: Tensor) -> Tensor:
        """Which slots equal their scope's threshold, a key of `order_keys`; [rows, *row_shape]."""
        keys = order_keys(self.scores, magnitude=not self.selection.signed)
        found = keys == limits[self.ids].to(keys.dtype)[:, None]
        if self.piece.candidates is not None:
            found &= self.piece.candidates
        return found.view(-1, *self.piece.row_shape)


class _Counted:
    """The state of one selection between the all-reduces."""

    def __init__(self, selection: Selection, device: torch.device) -> None:
        self.selection, self.device = selection, device
        self.need = selection.keep.to(device, non_blocking=True)
        self.prefix, self.ties = torch.zeros_like(self.need), torch.zeros_like(self.need)
        self.held = [_Held(selection, k, piece, self.need) for k, piece in selection.pieces]
        self.bits = key_bits(selection.dtype) - (not selection.signed)

    @property
    def digits(self) -> int:
        """Passes that find the threshold."""
        return -(-self.bits // DIGIT)

    @property
    def limits(self) -> Tensor:
        """The threshold of each scope as a key of `order_keys`; the kernels' keys are larger: their 0 is no block's."""
        return self.prefix - (1 << (self.bits - 1) if self.selection.signed else 1)

    def total(self, counts: Sequence[Tensor]) -> Tensor:
        """This rank's counts of each scope, from those of the rows of each piece."""
        found = torch.zeros(len(self.need), BINS, dtype=torch.int64, device=self.device)
        for held, own in zip(self.held, counts, strict=True):
            if held.piece.counts:
                found.index_add_(0, held.ids, own)
        return found

    def find_digit(self, summed: Tensor, counts: Sequence[Tensor]) -> None:
        """Find the digit from its counts over all ranks, and give these to the rows."""
        for held, own in zip(self.held, counts, strict=True):
            own.copy_(summed[held.ids])
        from_top = summed.flip(1).cumsum(1).flip(1)
        digit = ((from_top >= self.need[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        self.ties = summed.gather(1, digit)[:, 0]
        self.need = self.need - (from_top.gather(1, digit)[:, 0] - self.ties)
        self.prefix = (self.prefix << DIGIT) + digit[:, 0]

    def cut_ties(self, needs: Sequence[Tensor]) -> Passes[None]:
        """Write into `needs` how many ties each piece keeps: those with the lowest indices over all ranks.

        The index of the last one is found a dimension of the scope at a time, the member first; each yields how many
        ties there are at each coordinate. Slots of a piece are in the order of these indices.
        """
        tied = [held.tied(self.limits) for held in self.held]
        own = [torch.zeros_like(n) for n in needs]
        left, depth = self.need, max(map(len, self.selection.tiles))
        for k in range(max(depth, 1)):
            sizes = [tile[k] if k < len(tile) else 1 for tile in self.selection.tiles]
            if k > 0 and max(sizes) == 1:
                tied = [t.squeeze(1) if k < held.depth else t for t, held in zip(tied, self.held, strict=True)]
                continue
            firsts = [0, *accumulate(sizes)] if k == 0 else [0] * (len(sizes) + 1)  # members one after the other
            along = [_along(t, k, held, firsts) for t, held in zip(tied, self.held, strict=True)]
            found = torch.zeros(len(left), firsts[-1] or max(sizes), dtype=torch.int64, device=self.device)
            for held, (first, counts) in zip(self.held, along, strict=True):
                if held.piece.counts:
                    found[:, first : first + counts.shape[1]].index_add_(0, held.ids, counts)
            before = (yield found).cumsum(1)
            at = (before < left[:, None]).sum(1).clamp(max=before.shape[1] - 1)
            left = left - torch.where(at > 0, before.gather(1, (at - 1).clamp(min=0)[:, None])[:, 0], 0)
            for i, (held, (first, counts)) in enumerate(zip(self.held, along, strict=True)):
                place = (at[held.ids] - first)[:, None]
                own[i] += torch.where(torch.arange(counts.shape[1], device=self.device) < place, counts, 0).sum(1)
                tied[i] = _selected(tied[i], place[:, 0], k < held.depth)
        for n, count, last, held in zip(needs, own, tied, self.held, strict=True):
            n.copy_(torch.where(self.need[held.ids] > 0, count + last.reshape(-1), 0))


def _along(tied: Tensor, k: int, held: _Held, firsts: Sequence[int]) -> tuple[int, Tensor]:
    """How many ties of each row are at each coordinate k, and which coordinate of all members is the first of them."""
    if k >= held.depth:
        return firsts[held.member], tied.reshape(-1, 1).long()
    return firsts[held.member] + held.piece.shift[k], tied.flatten(2).sum(2) if tied.ndim > 2 else tied.long()


def _selected(tied: Tensor, place: Tensor, is_dimension: bool) -> Tensor:
    """Those at a place of the first dimension after the rows, one for each row; none where it is out of range."""
    if not is_dimension:
        return tied & (place == 0)
    size = tied.shape[1]
    found = tied[torch.arange(len(tied), device=tied.device), place.clamp(0, size - 1)]
    return found & ((place >= 0) & (place < size)).reshape(-1, *(1,) * (found.ndim - 1))


def _by_state(states: Sequence[_Counted], found: Sequence[Tensor]) -> list[tuple[_Counted, list[Tensor]]]:
    """Each state with what belongs to its pieces."""
    left = iter(found)
    return [(state, [next(left) for _ in state.held]) for state in states]


def choose_on_device(selections: Sequence[Selection], device: torch.device, sum_of: SumOf) -> None:
    """Choose the blocks of scopes that are spread over ranks, and fill the masks of this rank's pieces."""
    from ..selection.triton import SharedRows

    states = [_Counted(s, device) for s in selections]
    rows = SharedRows([held.update for state in states for held in state.held], device)
    for digit in range(max(state.digits for state in states)):
        counted = _by_state(states, rows.count(digit))
        active = [(state, counts) for state, counts in counted if digit < state.digits]
        totals = [state.total(counts) for state, counts in active]
        summed = sum_of(torch.cat([t.reshape(-1) for t in totals]))
        for (state, counts), part in zip(active, summed.split([t.numel() for t in totals]), strict=True):
            state.find_digit(part.view(-1, BINS), counts)
    needs = _by_state(states, rows.find_ties())
    if bool(torch.cat([(state.need != state.ties) & (state.need > 0) for state in states]).any()):
        run_together([state.cut_ties(own) for state, own in needs], sum_of)
    rows.mark()
    for held in (held for state in states for held in state.held):
        held.piece.write(held.mask)
