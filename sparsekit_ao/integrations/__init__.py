"""Callbacks for trainers, in `integrations.transformers` and `integrations.lightning`; each imports its library."""

from collections.abc import Sequence

from ..errors import SparsityError, warn
from ..sparsifiers.base import MaskSparsifier, UpdateInterval
from ..torch_ao import BaseScheduler


class StepCallback:
    """Step a prepared sparsifier and its schedulers after optimizers; base class of the callbacks."""

    def __init__(
        self,
        sparsifier: MaskSparsifier,
        schedulers: Sequence[BaseScheduler] = (),
        *,
        update_every: int = 1,
        until: int | None = None,
    ) -> None:
        where = "SparsifierCallback: "
        if not isinstance(sparsifier, MaskSparsifier):
            kind = f"{type(sparsifier).__module__}.{type(sparsifier).__qualname__}"
            raise SparsityError(
                f"{where}sparsifier must be one of sparsekit_ao, got {kind}; those of torch.ao cannot attach an "
                "optimizer, and classes of sparsekit_ao with the same names take their arguments"
            )
        for one in schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]:
            if not isinstance(one, BaseScheduler) or not isinstance(schedulers, (list, tuple)):
                raise SparsityError(
                    f"{where}schedulers must be a list of schedulers, such as [ScheduleSL(sparsifier, "
                    f"schedules.cubic(0.0, 0.9, steps=1000))], got {type(one).__name__}"
                )
            if one.sparsifier is not sparsifier:
                raise SparsityError(f"{where}the {type(one).__name__} was made for another sparsifier")
        if hasattr(sparsifier, "settings") and (update_every, until) != (1, None):  # it counts steps itself
            raise SparsityError(
                f"{where}{type(sparsifier).__name__} must be called in every step; give update_every and until to the "
                "sparsifier itself"
            )
        self._interval = UpdateInterval(update_every, until)
        self.sparsifier, self.schedulers = sparsifier, list(schedulers)

    def _step(self, step: int) -> None:
        """Step the sparsifier, if an update is due after this optimizer step (counted from 1), and the schedulers."""
        if self._interval.is_due(step):
            self.sparsifier.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def _finish(self, warns: bool = True) -> None:
        """Choose the masks once more if schedulers have changed the levels since; masks after `until` stay."""
        if warns and (text := self.sparsifier.unfinished()):
            warn(f"SparsifierCallback: training ended, but {text}")
        chosen, levels = self.sparsifier.mask_levels, [g.get("sparsity_level") for g in self.sparsifier.groups]
        is_frozen = self.sparsifier.is_frozen or self._interval.until is not None
        if self.schedulers and chosen not in (None, levels) and not is_frozen:
            MaskSparsifier.step(self.sparsifier)
