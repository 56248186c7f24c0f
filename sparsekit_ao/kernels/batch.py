"""Many mask updates at once: on a GPU those of one kind share launches."""

from collections.abc import Sequence
from types import ModuleType

import torch

from .api import check_update, scope_mask
from .gpu import gpu_path
from .update import Update

__all__ = ["scope_masks"]


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
    for update in alone:
        scope_mask(update.groups, update.keep, update.norm, stage=update.stage, impl=impl)


def _path_of(update: Update, device: torch.device, impl: str) -> ModuleType | None:
    return gpu_path(impl, device, lambda path: path.reasons_of(update))
