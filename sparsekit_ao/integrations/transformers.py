"""A callback for `transformers.Trainer` that calls `step` after every optimizer step; checkpoints contain its state.

A model of transformers is saved as plain, masked weights. Dense weights and masks are in a file beside them, from which
training resumes. For other models, they are in the checkpoint itself. The rest of a sparsifier's state is saved in
`trainer_state.json`.
"""

import functools
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from ..errors import SparsityError, warn
from ..masking import find_mask, parameters_under, parametrized_names, rebuilt_originals, select
from ..models.names import plain_name
from ..sparsifiers.usage import refuse_other_model
from . import StepCallback

__all__ = ["SparsifierCallback"]

STATE = "masked_state.safetensors"  # dense weights and masks, beside the plain weights of a checkpoint


@functools.wraps(PreTrainedModel.save_pretrained)  # its signature; and by its name, pickle finds the class's own method
def save_plain_weights(
    self: Any, save_directory: str | Path, *args: Any, state_dict: Any = None, **options: Any
) -> None:
    """Save plain weights, and dense weights and masks in a file of their own; a trained model's method."""
    state = self.state_dict() if state_dict is None else state_dict
    plain: dict[str, Any] = {**_plain(state)}
    plain |= _rebuilt(self, state)
    plain = {name: tensor for name, tensor in plain.items() if tensor is not None}
    masked = {name: tensor.contiguous() for name, tensor in state.items() if plain.get(name) is not tensor}
    first_names = {t.data_ptr(): name for name, t in reversed(masked.items())}
    # Tied tensors are copied, since a file cannot hold one under two names.
    masked = {name: t if first_names[t.data_ptr()] == name else t.clone() for name, t in masked.items()}
    type(self).save_pretrained(self, save_directory, *args, state_dict=plain, **options)
    if masked and options.get("is_main_process", True):
        save_file(masked, str(Path(save_directory, STATE)))


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with masked weights under their plain names, in place of dense ones and masks."""
    plain, by_address = dict[str, Tensor](), dict[int, Tensor]()
    for key, tensor in state.items():
        found = re.match(r"(.*\b)parametrizations\.([^.]+)\.", key)
        mask = found and state.get(f"{found[0]}0.mask")
        if found is None or mask is None:
            plain[key] = tensor
        elif key == f"{found[0]}original":
            if tensor.data_ptr() not in by_address:  # one tensor for a tied parameter
                by_address[tensor.data_ptr()] = select(tensor.detach(), mask)
            plain[found[1] + found[2]] = by_address[tensor.data_ptr()]
    return plain


def _rebuilt(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the entries of masks above other parametrizations: {parameter: its value without the mask, mask: None}."""
    found = dict[str, Tensor | None]()
    for path, module in model.named_modules():
        for tensor in (name for name in parametrized_names(module) if find_mask(module, name) is not None):
            chain: Any = module.parametrizations[tensor]
            prefix = f"{plain_name(path)}.parametrizations.{tensor}.".removeprefix(".")
            names = {id(p): prefix + name for name, p in chain.named_parameters(recurse=False)}
            originals = [names[id(p)] for p in parameters_under(module, tensor)]
            mask = state.get(f"{prefix}{len(chain) - 1}.mask")
            given = [state[name] for name in originals] if state.keys() >= {*originals} else []
            if given and (values := rebuilt_originals(module, tensor, given, mask)):
                found |= zip(originals, values, strict=True)
                found |= {f"{prefix}{len(chain) - 1}.{name}": None for name in chain[-1].state_dict()}
    return found


class SparsifierCallback(StepCallback, TrainerCallback, ExportableState):
    """Call a prepared sparsifier from a `transformers.Trainer`.

    After every optimizer step the sparsifier steps, then the schedulers. After the last one, the sparsifier steps once
    more to apply the last level. The trainer's optimizer is attached when training begins. `from_pretrained` loads the
    checkpoints as plain weights. To resume, `resume_from_checkpoint` is enough; leave
    `restore_callback_states_from_checkpoint` off, because it would construct another callback without the sparsifier.

    Args:
        sparsifier: A sparsifier that was prepared on the trainer's model before the trainer is constructed.
        schedulers: A list of schedulers of this sparsifier, such as `ScheduleSL`.
        update_every: Masks are updated after those optimizer steps whose number is a multiple of this; 1 by default.
        until: The last optimizer step after which masks are updated; None (default) sets no end.

    Raises:
        SparsityError: Raised when training begins, if the sparsifier was prepared on another model, or if the trainer
            clips gradients that an update reads; see `watch_clipping`.
    """

    _watched: Any = None  # the trainer whose clipping is watched
    _model: Any = None  # the one that is trained

    def watch_clipping(self, trainer: Any) -> "SparsifierCallback":
        """Mask dense gradients before the trainer clips them.

        A trainer clips gradients before it calls any callback. If the sparsifier uses gradients, call this for each
        trainer with `max_grad_norm > 0`, after the trainer is constructed.
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

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the model save plain weights from now on."""
        self._model = kwargs.get("model")
        if isinstance(self._model, PreTrainedModel):
            self._model.save_pretrained = types.MethodType(save_plain_weights, self._model)  # type: ignore[method-assign]

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
        self.on_init_end(args, state, control, **kwargs)
        if state.global_step:
            chosen = getattr(args, "resume_from_checkpoint", None)
            last = Path(getattr(args, "output_dir", None) or "", f"checkpoint-{state.global_step}")
            self._load(state, [Path(chosen), last] if isinstance(chosen, str) else [last])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step the sparsifier and its schedulers."""
        self._step(state.global_step)
        if state.global_step == getattr(state, "max_steps", None):
            self._finish(warns=False)  # the end of training follows

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the last level; where the trainer went back to its best checkpoint, restore the state of that one.

        Warns if its sparsity levels are not the last ones, since the model then has fewer zeros than the schedule says.
        """
        best = args.load_best_model_at_end and state.best_model_checkpoint
        path = Path(best or "", "trainer_state.json")
        if not best or not path.exists():
            self._finish()
            return
        last = [g.get("sparsity_level") for g in self.sparsifier.groups]
        self._load(TrainerState.load_from_json(str(path)), [path.parent])
        for group, level in zip(self.sparsifier.groups, last, strict=True):
            if group.get("sparsity_level") != level:
                warn(
                    f"SparsifierCallback: the trainer went back to its best checkpoint, {path.parent.name}, in "
                    f"which {group['tensor_fqn']} has sparsity_level {group['sparsity_level']:.4g}; its last "
                    f"one was {level:.4g}. To choose among checkpoints of the last level, evaluate only after the end "
                    "of the schedule (eval_delay).",
                )
                return

    def state(self) -> dict[str, Any]:
        """Return the state for `trainer_state.json`: everything but the masks, which the model has."""
        if not self.sparsifier.groups:
            return {"args": {}, "attributes": {}}
        schedulers, is_plain = [s.state_dict() for s in self.schedulers], isinstance(self._model, PreTrainedModel)
        attributes = {"sparsifier": self.sparsifier.without_masks(), "schedulers": schedulers, "is_plain": is_plain}
        return {"args": {}, "attributes": attributes}

    def _load(self, trainer_state: Any, folders: list[Path]) -> None:
        """Restore the state of a checkpoint whose model is loaded; masks that it lacks must be in one of `folders`."""
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
        if saved.get("is_plain") and self._model is not None:
            self._load_masked(folders)
        masks = {fqn: {"mask": s["mask"]} for fqn, s in self.sparsifier.state.items()}
        self.sparsifier.load_state_dict({**saved["sparsifier"], "state": masks})
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def _load_masked(self, folders: list[Path]) -> None:
        """Load dense weights and masks from the first folder whose masked weights equal the model's plain weights."""
        now = {k: t for k, t in self._model.state_dict().items() if k.endswith(".original")}
        for folder in folders:
            masked = load_file(str(folder / STATE)) if (folder / STATE).exists() else {}
            masks = {k: masked.get(f"{k.removesuffix('original')}0.mask") for k in now}
            if all(m is not None and torch.equal(select(masked[k], m), now[k].cpu()) for k, m in masks.items()):
                self._model.load_state_dict(masked, strict=False)
                return
        raise SparsityError(
            f"SparsifierCallback: the checkpoint has plain weights, and training resumes from {STATE} beside them, but "
            f"{' and '.join(map(str, folders))} has no such file that fits. If the checkpoint is in another folder, "
            "give that one as TrainingArguments(resume_from_checkpoint=...) too."
        )
