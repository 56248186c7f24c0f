"""A callback for `transformers.Trainer`: calls `step` after every optimizer step; its state is part of checkpoints.

Masks are buffers of the model, so they are in the trainer's own checkpoints; the rest of a sparsifier's state is saved
in `trainer_state.json`.
"""

import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from ..distributed import is_sharded
from ..errors import SparsityError
from ..masking import dense_state_dict
from ..sparsifiers.usage import refuse_other_model
from . import StepCallback

__all__ = ["SparsifierCallback"]


class SparsifierCallback(StepCallback, TrainerCallback, ExportableState):
    """Call a prepared sparsifier from a `transformers.Trainer`.

    After every optimizer step the sparsifier steps, then the schedulers. The trainer's optimizer is attached when
    training begins. Resuming needs only `resume_from_checkpoint`; leave `restore_callback_states_from_checkpoint` off,
    which would construct another callback without its sparsifier.

    Args:
        sparsifier: prepared on the trainer's model before the trainer is constructed.
        schedulers: torch.ao schedulers (such as `ScheduleSL`) of this sparsifier.
        update_every: masks are updated after the first step and every such step after it.
        until: steps after which masks stay as they are; None updates them until the end.

    Raises:
        SparsityError: when training begins, if the sparsifier was prepared on another model, or the trainer clips
            gradients that an update reads; see `watch_clipping`.
    """

    _watched: Any = None  # the trainer whose clipping is watched

    def watch_clipping(self, trainer: Any) -> "SparsifierCallback":
        """Mask dense gradients before the trainer clips them, which it does before it calls any callback.

        Call it for each trainer with `max_grad_norm > 0`, after it is constructed, if the sparsifier uses gradients.
        """
        if trainer is self._watched:
            return self
        accelerator, clip = trainer.accelerator, trainer.accelerator.clip_grad_norm_

        def clip_masked(*args: Any, **kwargs: Any) -> Any:
            unscale = accelerator.unscale_gradients
            unscale()
            self.sparsifier.take_gradients()
            accelerator.unscale_gradients = lambda: None  # clip unscales too, but GradScaler allows it once
            try:
                return clip(*args, **kwargs)
            finally:
                accelerator.unscale_gradients = unscale

        accelerator.clip_grad_norm_ = clip_masked
        self._watched = trainer
        return self

    def watch_saving(self, trainer: Any, folder: str = "squashed") -> "SparsifierCallback":
        """Save a plain, squashed model beside each checkpoint that the trainer saves, `save_model` included.

        A checkpoint holds dense weights and masks, so that training can resume from it; `from_pretrained` of the plain
        model in `<checkpoint>/<folder>` needs nothing of this library.

        Args:
            trainer: the one that has this callback.
            folder: name of the folder inside of a checkpoint.

        Raises:
            SparsityError: when a checkpoint is saved, if the model is sharded.
        """
        save = trainer._save

        def save_both(output_dir: str | None = None, state_dict: Any = None) -> None:
            save(output_dir, state_dict)
            if not trainer.args.should_save:
                return
            model = trainer.accelerator.unwrap_model(trainer.model)
            if any(is_sharded(p) for p in model.parameters()):
                raise SparsityError(
                    "SparsifierCallback: the model is sharded, so no plain one can be saved beside its checkpoint; "
                    "load the checkpoint into a model that is not sharded, and call squash_mask"
                )
            save(str(Path(output_dir or trainer.args.output_dir) / folder), dense_state_dict(model))

        trainer._save = save_both
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the optimizer; when resuming, restore the state of the checkpoint."""
        if kwargs.get("model") is not None:
            refuse_other_model(self.sparsifier.groups, kwargs["model"], "SparsifierCallback")
        is_watched = getattr(self._watched, "args", None) is args
        if self.sparsifier.uses_gradients and args.max_grad_norm and not is_watched:
            raise SparsityError(
                "SparsifierCallback: the trainer clips gradients before it calls this callback, so it would clip by "
                "the norm of dense ones. Call callback.watch_clipping(trainer), or set max_grad_norm=0."
            )
        self.sparsifier.attach(kwargs["optimizer"])
        if state.global_step:
            self._load(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step the sparsifier and its schedulers."""
        self._step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where the trainer went back to its best checkpoint, restore the sparsifier's state of that one too.

        Warns if its sparsity levels are not the last ones, since the model then has fewer zeros than the schedule says.
        """
        best = args.load_best_model_at_end and state.best_model_checkpoint
        path = Path(best or "", "trainer_state.json")
        if not best or not path.exists():
            return
        last = [g.get("sparsity_level") for g in self.sparsifier.groups]
        self._load(TrainerState.load_from_json(str(path)))
        for group, level in zip(self.sparsifier.groups, last, strict=True):
            if group.get("sparsity_level") != level:
                warnings.warn(
                    f"SparsifierCallback: the trainer went back to its best checkpoint, {path.parent.name}, in "
                    f"which {group['tensor_fqn']} has sparsity_level {group['sparsity_level']:.4g}; its last "
                    f"one was {level:.4g}. To choose among checkpoints of the last level, evaluate only after the end "
                    "of the schedule (eval_delay).",
                    stacklevel=2,
                )
                return

    def state(self) -> dict[str, Any]:
        """The state for `trainer_state.json`: everything but the masks, which are in the model."""
        if not self.sparsifier.groups:
            return {"args": {}, "attributes": {}}
        saved = {k: v for k, v in self.sparsifier.state_dict().items() if k != "state"}
        schedulers = [s.state_dict() for s in self.schedulers]
        return {"args": {}, "attributes": {"sparsifier": saved, "schedulers": schedulers}}

    def _load(self, trainer_state: Any) -> None:
        """Restore the state from a checkpoint's; the trainer has loaded the model by now, masks included."""
        entry = trainer_state.stateful_callbacks.get(type(self).__name__)
        if isinstance(entry, list):  # the trainer has several callbacks of this class
            names = {g["tensor_fqn"] for g in self.sparsifier.groups}
            same = [s for s in entry if {g["tensor_fqn"] for g in s["attributes"]["sparsifier"]["groups"]} == names]
            if len(same) != 1:
                raise SparsityError(
                    f"SparsifierCallback: of {len(entry)} sparsifiers in the checkpoint {len(same)} have the tensors "
                    "of this one, but exactly 1 is required; prepare one model with names that differ"
                )
            entry = same[0]
        if not entry or not entry["attributes"]:
            raise SparsityError(
                "SparsifierCallback: the checkpoint that training resumes from has no sparsifier; to begin with its "
                "weights, load them by model.load_state_dict and train without resume_from_checkpoint"
            )
        saved = entry["attributes"]
        masks = {fqn: {"mask": s["mask"].clone()} for fqn, s in self.sparsifier.state.items()}
        self.sparsifier.load_state_dict({**saved["sparsifier"], "state": masks})
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
