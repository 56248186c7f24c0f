"""A callback for Lightning: calls `step` after every optimizer step; its state is part of the trainer's checkpoints."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback
from torch.ao.pruning import BaseScheduler

from ..errors import SparsityError
from ..sparsifiers.base import MaskSparsifier
from ..sparsifiers.optimizer_state import groups_trained_by, unwrap_optimizer
from ..sparsifiers.usage import checked_schedulers, refuse_other_model, update_interval_of

__all__ = ["SparsifierCallback"]


class SparsifierCallback(Callback):
    """Call a prepared sparsifier from a Lightning `Trainer`.

    After a batch in which optimizers stepped, the sparsifier steps once, then the schedulers. The trainer's optimizers
    are attached when fitting begins; a `DynamicSparsifier` masks dense gradients before Lightning clips them.

    Args:
        sparsifier: prepared on (a part of) the LightningModule before `fit`.
        schedulers: torch.ao schedulers (such as `ScheduleSL`) of this sparsifier.
        update_every: masks are updated after the first step and every such step after it.
        until: steps after which masks stay as they are; None updates them until the end.

    Raises:
        SparsityError: when training begins, if the sparsifier was prepared on another model or not at all, or another
            callback averages the masks.
    """

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
        self._global_step = self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the optimizers of sparsified parameters; Lightning has constructed and restored them by now."""
        refuse_other_model(self.sparsifier.groups, pl_module, "SparsifierCallback")
        _refuse_averaged_masks(trainer)
        self._global_step = trainer.global_step
        groups = self.sparsifier.groups
        self.sparsifier.attach([o for o in trainer.optimizers if groups_trained_by([unwrap_optimizer(o)], groups)])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Read gradients after the last backward of a batch, before clipping."""
        self.sparsifier.take_gradients(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step the sparsifier and its schedulers once, unless the batch only accumulated gradients."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        if self._interval.is_due(self._steps):
            self.sparsifier.step()
        self._steps += 1
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The sparsifier's and the schedulers' state, and the number of steps."""
        schedulers = [s.state_dict() for s in self.schedulers]
        return {"sparsifier": self.sparsifier.state_dict(), "schedulers": schedulers, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sparsifier.load_state_dict(state_dict["sparsifier"])
        self._steps = state_dict.get("steps", 0)
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)


def _refuse_averaged_masks(trainer: Any) -> None:
    """Raise if a callback averages buffers: masks are buffers, and an average keeps whatever was ever kept."""
    for callback in trainer.callbacks:
        if getattr(callback, "_use_buffers", False):
            raise SparsityError(
                f"SparsifierCallback: {type(callback).__name__} averages buffers, and so masks, which then keep too "
                "much. Give it use_buffers=False."
            )
