"""A callback for Lightning that calls `step` after every optimizer step; trainer checkpoints contain its state."""

from typing import Any

from lightning.pytorch import Callback

from ..errors import SparsityError
from ..sparsifiers.optimizer_state import groups_trained_by, unwrap_optimizer
from ..sparsifiers.usage import refuse_other_model
from . import StepCallback

__all__ = ["SparsifierCallback"]


class SparsifierCallback(StepCallback, Callback):
    """Call a prepared sparsifier from a Lightning `Trainer`.

    After a batch in which optimizers stepped, the sparsifier steps once, then the schedulers. When training ends, the
    sparsifier steps once more to apply the last level. The trainer's optimizers are attached when fitting begins; a
    `DynamicSparsifier` masks dense gradients before Lightning clips them.

    Args:
        sparsifier: A sparsifier that was prepared on the LightningModule, or a part of it, before `fit`.
        schedulers: A list of schedulers of this sparsifier, such as `ScheduleSL`.
        update_every: Masks are updated after those optimizer steps whose number is a multiple of this; 1 by default.
        until: The last optimizer step after which masks are updated; None (default) sets no end.

    Raises:
        SparsityError: Raised when training begins, if the sparsifier was prepared on another model or not at all, or if
            another callback averages the masks.
    """

    _global_step = _steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the optimizers of sparsified parameters; Lightning has constructed and restored them by now."""
        refuse_other_model(self.sparsifier.groups, pl_module, "SparsifierCallback")
        for callback in trainer.callbacks:
            if getattr(callback, "_use_buffers", False):  # an average of masks keeps whatever was ever kept
                raise SparsityError(
                    f"SparsifierCallback: {type(callback).__name__} averages buffers, and so masks, which then keep "
                    "too much. Give it use_buffers=False."
                )
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
        self._steps += 1
        self._step(self._steps)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Apply the last level."""
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sparsifier and the schedulers, and the number of steps."""
        schedulers = [s.state_dict() for s in self.schedulers]
        return {"sparsifier": self.sparsifier.state_dict(), "schedulers": schedulers, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sparsifier.load_state_dict(state_dict["sparsifier"])
        self._steps = state_dict.get("steps", 0)
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)
