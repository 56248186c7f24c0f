"""Many mask updates at once: on a GPU those of one kind share launches, on CPU small ones run side by side."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import torch

from .api import carry_out, check_update
from .gpu import gpu_path
from .threads import run_apart
from .update import Update

__all__ = ["scope_masks"]

EACH = 2  # windows a thread, from which on they are not cut
APART = 1 << 17  # elements of the smallest: with less to do threads would wait for the interpreter's lock


def scope_masks(updates: Sequence[Update], *, impl: str = "auto") -> None:
    """Fill the masks of updates that do not depend on each other; as `api.scope_mask` for each.

    All updates are checked before any mask changes.

    Args:
        updates: see `Update`; a tensor appears in one of them at most.
        impl: one of `IMPLS`.
    """
    together: dict[torch.device, list[Update]] = {}
    alone: list[Update] = []
    for update in updates:
        check_update(update, impl)
        device = update.groups[0].members[0].window.device
        if _path_of(update, device, impl) is None:
            alone.append(update)
        else:
            together.setdefault(device, []).append(update)
    for device, found in together.items():
        path = _path_of(found[0], device, impl)
        assert path is not None
        path.scope_masks(found)
    small = _side_by_side(alone)
    run_apart([partial(carry_out, update, impl) for update in small])
    done = set(small)
    for update in alone:
        if update not in done:
            carry_out(update, impl)


def _side_by_side(updates: Sequence[Update]) -> list[Update]:
    """Those that are better done whole, a thread each, than one after the other, each cut over all threads.

    Largest first, so that threads end at about the same time. Callables stay on this thread, as one would expect.
    """
    sizes = {u: n for u in updates if _is_plain(u) and (n := _elements(u)) >= APART}
    small = sorted(sizes, key=lambda u: -sizes[u])
    left, threads = sum(sizes.values()), torch.get_num_threads()
    while small and sizes[small[0]] * threads * EACH > left:
        left -= sizes[small.pop(0)]
    return small


def _is_plain(update: Update) -> bool:
    return not callable(update.norm) and update.groups[0].members[0].window.device.type == "cpu"


def _elements(update: Update) -> int:
    return sum(m.window.numel() for g in update.groups for m in g.members)


def _path_of(update: Update, device: torch.device, impl: str) -> ModuleType | None:
    return gpu_path(impl, device, lambda path: path.reasons_of(update))
