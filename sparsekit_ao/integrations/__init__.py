"""Callbacks for trainers: `integrations.transformers`, `integrations.lightning`; each imports its library."""

from collections.abc import Sequence

from ..sparsifiers.base import MaskSparsifier
from ..sparsifiers.usage import checked_schedulers, update_interval_of
from ..torch_ao import BaseScheduler


class StepCallback:
    """A prepared sparsifier and its schedulers, which step after optimizers."""

    def __init__(
        self,
        sparsifier: MaskSparsifier,
        schedulers: Sequence[BaseScheduler] = (),
        *,
        update_every: int = 1,
        until: int | None = None,
    ) -> None:
        self._interval = update_interval_of(sparsifier, update_every, until)
        self.sparsifier, self.schedulers = sparsifier, checked_schedulers(sparsifier, schedulers)

    def _step(self, step: int) -> None:
        """Step the sparsifier, if an update is due after this optimizer step (counted from 1), and the schedulers."""
        if self._interval.is_due(step - 1):
            self.sparsifier.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def _finish(self) -> None:
        """Choose the masks once more if schedulers have changed the levels since; masks after `until` stay."""
        chosen, levels = self.sparsifier._chosen_at, [g.get("sparsity_level") for g in self.sparsifier.groups]
        is_frozen = self.sparsifier._is_frozen or self._interval.until is not None
        if self.schedulers and chosen not in (None, levels) and not is_frozen:
            MaskSparsifier.step(self.sparsifier)
