"""A callback for `transformers.Trainer`: calls `step` where the trainer's loop would, and travels with checkpoints.

Masks are buffers of the model, so they are in the trainer's own checkpoints; what else a sparsifier has to remember
goes into `trainer_state.json`.
"""

from collections.abc import Sequence
from typing import Any

from torch.ao.pruning import BaseScheduler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..dynamic import DynamicSparsifier, StraightThrough
from ..errors import SparsityError
from ..sparsifiers.base import MaskSparsifier

__all__ = ["SparsifierCallback"]


class SparsifierCallback(TrainerCallback, ExportableState):
    """Drive a prepared sparsifier from a `transformers.Trainer`.

    After every optimizer step the sparsifier steps, then the schedulers do. A `DynamicSparsifier` gets the trainer's
    optimizer when training begins. Resuming needs no more than `resume_from_checkpoint`; leave
    `restore_callback_states_from_checkpoint` off, which would make the callback anew without its sparsifier.

    Args:
        sparsifier: prepared on the trainer's model before the trainer is made.
        schedulers: torch.ao schedulers (such as `ScheduleSL`) of this sparsifier.

    Raises:
        SparsityError: when training begins, if gradients are clipped unseen; see `watch_clipping`.
    """

    def __init__(self, sparsifier: MaskSparsifier, schedulers: Sequence[BaseScheduler] = ()) -> None:
        self.sparsifier, self.schedulers = sparsifier, list(schedulers)
        self._watched: Any = None

    def watch_clipping(self, trainer: Any) -> "SparsifierCallback":
        """Mask dense gradients before the trainer clips them, which it does before it calls any callback.

        Needed once for each trainer with `max_grad_norm > 0`, after it is made, if the sparsifier looks at gradients.
        """
        if trainer is self._watched or not isinstance(self.sparsifier, DynamicSparsifier):
            return self
        clip = trainer.accelerator.clip_grad_norm_

        def clip_masked(*args: Any, **kwargs: Any) -> Any:
            trainer.accelerator.unscale_gradients()
            self.sparsifier.take_gradients()  # type: ignore[attr-defined]
            return clip(*args, **kwargs)

        trainer.accelerator.clip_grad_norm_ = clip_masked
        self._watched = trainer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the optimizer; resuming, put back what the checkpoint says."""
        found = self.sparsifier
        if isinstance(found, DynamicSparsifier):
            looks = found.settings.updates and (found.settings.needs_gradient or found.settings.needs_momentum)
            if looks and args.max_grad_norm and getattr(self._watched, "args", None) is not args:
                raise SparsityError(
                    "SparsifierCallback: the trainer clips gradients before it calls back, so it would clip by the "
                    "norm of dense ones. Call callback.watch_clipping(trainer), or set max_grad_norm=0."
                )
        if isinstance(found, DynamicSparsifier | StraightThrough):
            found.attach(kwargs["optimizer"])
        if state.global_step:
            self._load(self._saved(state.stateful_callbacks.get(type(self).__name__)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One step of the sparsifier and of its schedulers for each of the optimizer."""
        self.sparsifier.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def state(self) -> dict[str, Any]:
        """What `trainer_state.json` keeps: everything but the masks, which are in the model."""
        if not self.sparsifier.groups:
            return {"args": {}, "attributes": {}}
        saved = {k: v for k, v in self.sparsifier.state_dict().items() if k != "state"}
        return {
            "args": {},
            "attributes": {"sparsifier": saved, "schedulers": [s.state_dict() for s in self.schedulers]},
        }

    def _saved(self, found: Any) -> dict[str, Any]:
        """This callback's part of a checkpoint, which lists several where the trainer has several of this class."""
        if isinstance(found, list):
            names = {g["tensor_fqn"] for g in self.sparsifier.groups}
            own = [s for s in found if {g["tensor_fqn"] for g in s["attributes"]["sparsifier"]["groups"]} == names]
            if len(own) != 1:
                raise SparsityError(
                    f"SparsifierCallback: of {len(found)} sparsifiers in the checkpoint {len(own)} have the tensors of "
                    "this one, so which is meant is not clear; prepare one model with names that differ"
                )
            found = own[0]
        if not found or not found["attributes"]:
            raise SparsityError("SparsifierCallback: the checkpoint that training resumes from holds no sparsifier")
        return found["attributes"]

    def _load(self, saved: dict[str, Any]) -> None:
        """The trainer has loaded the model by now, masks included."""
        masks = {fqn: {"mask": s["mask"].clone()} for fqn, s in self.sparsifier.state.items()}
        self.sparsifier.load_state_dict({**saved["sparsifier"], "state": masks})
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
