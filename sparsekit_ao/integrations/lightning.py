"""A callback for Lightning: calls `step` after every optimizer step; its state is part of the trainer's checkpoints."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback
from torch.ao.pruning import BaseScheduler

from ..dynamic.optimizers import training_optimizers
from ..sparsifiers.base import MaskSparsifier
from ..sparsifiers.usage import refuse_other_model

__all__ = ["SparsifierCallback"]


class SparsifierCallback(Callback):
    """Call a prepared sparsifier from a Lightning `Trainer`.

    After a batch in which optimizers stepped, the sparsifier steps once, then the schedulers. The trainer's optimizers
    are attached when fitting begins; a `DynamicSparsifier` masks dense gradients before Lightning clips them.

    Args:
        sparsifier: prepared on (a part of) the LightningModule before `fit`.
        schedulers: torch.ao schedulers (such as `ScheduleSL`) of this sparsifier.

    Raises:
        SparsityError: when training begins, if the sparsifier was prepared on another model.
    """

    def __init__(self, sparsifier: MaskSparsifier, schedulers: Sequence[BaseScheduler] = ()) -> None:
        self.sparsifier, self.schedulers = sparsifier, list(schedulers)
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the optimizers of sparsified parameters; Lightning has constructed and restored them by now."""
        refuse_other_model(self.sparsifier.groups, pl_module, "SparsifierCallback")
        self._steps = trainer.global_step
        self.sparsifier.attach(training_optimizers(trainer.optimizers, self.sparsifier.groups))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Read gradients after the last backward of a batch, before clipping."""
        self.sparsifier.take_gradients(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step the sparsifier and its schedulers once, unless the batch only accumulated gradients."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.sparsifier.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The sparsifier's and the schedulers' state."""
        return {"sparsifier": self.sparsifier.state_dict(), "schedulers": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sparsifier.load_state_dict(state_dict["sparsifier"])
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)
