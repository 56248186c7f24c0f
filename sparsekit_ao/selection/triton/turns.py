"""Updates in turns, one after the other, so that all of them use the same workspace.

An update of many scopes is cut into several where it needs more than a turn has; a single scope never is.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

from torch import Tensor

from ..tiling import Scopes
from ..work import Update
from .forms import Limits
from .parts import power_of_two

SHARE = 16  # bytes of workspace are at most the number of elements divided by this
STORED = 5  # bytes of a stored score and of the decision on it
GATHERED = 2  # slots of a long row for each byte of gathered keys: four bytes for one slot in eight
KEY = 4  # bytes of a sample
PASS = 1024  # bytes of the counts of one pass over a row
ALIGNED = 16  # scopes; so that a cut leaves addresses multiples of 16 bytes


def turns(updates: Sequence[Update], limits: Limits) -> list[Sequence[Update]]:
    """The updates in as few turns as the workspace allows, and in order; a single scope may need more.

    Updates without workspace go with any turn, so that those of one kernel share a launch.
    """
    elements = sum(update.numel for update in updates)
    most = max(limits.workspace, elements // SHARE)
    sizes = [workspace_of(update, limits) for update in updates] if elements * (STORED + 1) > most else [0]
    if sum(sizes) <= most:
        return [updates]
    found: list[list[Update]] = [[]]
    held = 0
    for update, whole in zip(updates, sizes, strict=True):
        pieces = _cut(update, ceil(whole / most)) if whole > most else [update]
        size = whole // len(pieces)
        for piece in pieces:
            if size and held and held + size > most:
                found.append([])
                held = 0
            found[-1 if size else 0].append(piece)
            held += size
    return [*found]


def workspace_of(update: Update, limits: Limits) -> int:
    """Bytes that are allocated at most while an update is made; a few hundred more for each turn and scope."""
    first = update.scopes[0]
    width, rows = sum(prod(scopes.shape) for scopes in update.scopes), prod(first.scope_grid)
    elements = max(prod(m.shape) for m in first.members)
    if len(update.scopes) == 1 and 2 * power_of_two(width) * power_of_two(elements) <= limits.fused:
        return 0  # one kernel
    is_stored = not elements == len(first.members) == 1
    stored = STORED * width * rows if is_stored else 0
    if width <= limits.fused // 2 or width * rows < limits.narrow:
        return stored
    is_free, gathered = not update.scores_masked, width
    if is_free and not is_stored:
        gathered = sum(prod(s.shape) for s in update.scopes if not _are_contiguous(s))
    elif is_free and width % KEY == 0:
        gathered = 0  # decisions, written last, hold the keys
    passes = PASS * (KEY if is_stored else first.members[0].window.element_size())
    samples = KEY * power_of_two(min(limits.samples, width // 4))
    return stored + (gathered // GATHERED + samples + passes) * rows


def _are_contiguous(scopes: Scopes) -> bool:
    """Whether every scope is contiguous in values and mask, so that its mask holds gathered keys; see `forms`."""
    m, *coupled = scopes.members
    assert m.mask is not None and m.values is not None
    inner = next((k for k, n in enumerate(scopes.shape) if n > 1), 0) + 1
    is_run = not coupled and not m.order and scopes.shape[inner:] == tuple(m.window.shape[inner:])
    is_spaced = prod(scopes.shape) % ALIGNED == 0 or prod(scopes.scope_grid) == 1
    is_whole = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (m.values, m.mask))
    return is_run and is_spaced and is_whole and m.mask.element_size() == 1


def _cut(update: Update, count: int) -> list[Update]:
    """About so many updates of fewer scopes each, cut in the first dimension of the scope grid; else the update."""
    (scopes, *others), n = update.scopes, update.scopes[0].scope_grid[0]
    (m, *coupled) = scopes.members
    if others or coupled or m.order or scopes.order or len(scopes.shape) != m.window.ndim or n == 1:
        return [update]
    step = max(1, n // count)
    step -= step % ALIGNED if step > ALIGNED else 0
    return [_scopes_of(update, slice(at, min(at + step, n))) for at in range(0, n, step)]


def _scopes_of(update: Update, chosen: slice) -> Update:
    """An update of these scopes only, counted in the first dimension of the scope grid."""
    (scopes,), keep = update.scopes, update.keep
    (m,) = scopes.members
    unit = m.shape[0] * scopes.shape[0]
    rows = slice(unit * chosen.start, unit * chosen.stop)
    assert m.values is not None and m.mask is not None
    if isinstance(keep, Tensor) and keep.numel() > 1:
        keep = keep[chosen]
    member = replace(m, values=m.values[rows], mask=m.mask[rows])
    return replace(update, scopes=(scopes.with_members([member]),), keep=keep)
