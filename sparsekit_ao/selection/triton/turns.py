"""Updates in turns, one after the other, so that all of them use the same workspace; no update is split."""

from collections.abc import Sequence
from math import prod

from ..work import Update
from .forms import Limits
from .parts import power_of_two

SHARE = 16  # bytes of workspace are at most the number of elements divided by this
STORED = 5  # bytes of a stored score and of the decision on it
GATHERED = 2  # slots of a long row for each byte of gathered keys: four bytes for one slot in eight


def turns(updates: Sequence[Update], limits: Limits) -> list[Sequence[Update]]:
    """The updates in as few turns as the workspace allows, and in order; a single update, never split, may need more.

    Updates without workspace go with any turn, so that those of one kernel share a launch.
    """
    elements = sum(update.numel for update in updates)
    most = max(limits.workspace, elements // SHARE)
    sizes = [workspace_of(update, limits) for update in updates] if elements * (STORED + 1) > most else [0]
    if sum(sizes) <= most:
        return [updates]
    found: list[list[Update]] = [[]]
    held = 0
    for update, size in zip(updates, sizes, strict=True):
        if size and held and held + size > most:
            found.append([])
            held = 0
        found[-1 if size else 0].append(update)
        held += size
    return [*found]


def workspace_of(update: Update, limits: Limits) -> int:
    """Bytes that are allocated at most while an update is made."""
    first = update.scopes[0]
    width = sum(prod(scopes.shape) for scopes in update.scopes)
    slots = width * prod(first.scope_grid)
    elements = max(prod(m.shape) for m in first.members)
    if len(update.scopes) == 1 and 2 * power_of_two(width) * power_of_two(elements) <= limits.fused:
        return 0  # one kernel
    gathered = slots // GATHERED if width > limits.fused // 2 and slots >= limits.narrow else 0
    return gathered + (0 if elements == len(first.members) == 1 else STORED * slots)
