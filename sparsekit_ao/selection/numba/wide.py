"""One long scope, over one or more tensors: the parts of `cpu.long.keep_parts`, written by compiled loops."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.long import Capacity, keep_parts
from ..sample import ROOM
from ..threads import pieces
from .scopes import choose, emit_mask, place, sample
from .window import Window


def select_wide(windows: Sequence[Window], blocks: Sequence[int], scope: int, budget: int) -> bool:
    """Keep `budget` blocks of one scope, which are those of all windows, in their order.

    Returns:
        Whether the mask is complete; False if the sample misled, or too many keys are equal.
    """
    work = [
        Stretch(window, scope, start, stop)
        for window, count in zip(windows, blocks, strict=True)
        for start, stop in pieces(count, window.elements.shape[1])
    ]
    return keep_parts(work, budget, _choose)


def _choose(out: Tensor, keys: Tensor, budget: int) -> None:
    choose(keys[0].numpy(), budget, out[0].numpy().view(np.uint8))


class Stretch:
    """Blocks start .. stop of one scope in one window; see `cpu.long.Part`."""

    def __init__(self, window: Window, scope: int, start: int, stop: int) -> None:
        self.size, self.above = stop - start, 0
        self.undecided = torch.empty(0, dtype=torch.int32, device="cpu")
        self._window, self._scope, self._start, self._stop = window, scope, start, stop
        self._slots = np.empty(0, np.int32)

    def sample(self, slots: np.ndarray[Any, Any]) -> Tensor:
        """Keys of some blocks, counted from the start of the piece."""
        keys = np.empty(slots.size, np.int32)
        sample(self._window, self._scope, self._start + slots, keys)
        return torch.from_numpy(keys)

    def decide(self, least: int, most: int, capacity: Capacity) -> None:
        """Write the mask as far as the bracket decides it, and record the other blocks."""
        slots, keys = (np.empty(self.size // ROOM + 1, np.int32) for _ in range(2))
        arguments = self._window, self._scope, self._start, self._stop, least, most, slots, keys
        self.above, found = emit_mask(*arguments)
        capacity.take(found if found <= slots.size else capacity.left + 1)
        self._slots, self.undecided = slots[:found], torch.from_numpy(keys[:found])

    def place(self, kept: Tensor) -> None:
        """Keep those of the undecided blocks whose flag is set."""
        place(self._window, self._scope, self._start, self._slots, kept.numpy().view(np.uint8))
