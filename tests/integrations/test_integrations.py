"""The callbacks with the real libraries: a trainer trains as the loop by hand, and resumes from its own checkpoints."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from grids import grid, turns
from growing import batch, mlp
from safetensors.torch import load_file
from stock import same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import sparsekit_ao
from sparsekit_ao import SNFS, DynamicSparsifier, RigL, ScopeSparsifier, SparsityError, export, schedules
from sparsekit_ao.schedules import ScheduleSL

STEPS = 8


def scheduled(model):
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, None)
    return sparsifier, [ScheduleSL(sparsifier, schedules.cubic(0.0, 0.8, 6), interval=2)]


def rigl(model):
    sparsifier = RigL(sparsity_level=0.75, until=20, update_every=2, grow="gradient")
    sparsifier.prepare(model, None)
    return sparsifier, []


def snfs(model):
    sparsifier = SNFS(sparsity_level=0.75, until=20, update_every=3)
    sparsifier.prepare(model, None)
    return sparsifier, []


KINDS = {"scheduled": scheduled, "RigL": rigl, "SNFS": snfs}


def by_hand(kind, clip, steps=STEPS):
    """The loop that the trainers should amount to."""
    model = mlp()
    sparsifier, own = KINDS[kind](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    if isinstance(sparsifier, DynamicSparsifier):
        sparsifier.attach(optimizer)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            if isinstance(sparsifier, DynamicSparsifier):
                sparsifier.take_gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        sparsifier.step()
        for scheduler in own:
            scheduler.step()
    return model, sparsifier


def agree(first, second, sparsifiers):
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
    for group in sparsifiers[0].groups:
        name = group["tensor_fqn"]
        assert torch.equal(sparsifiers[0].mask(name) != 0, sparsifiers[1].mask(name) != 0)
    sparsifiers[0].check()


# transformers


def hugging_face(folder, kind, clip, steps, resume=None, watch=True, **options):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        from transformers import Trainer, TrainingArguments

        from sparsekit_ao.integrations.transformers import SparsifierCallback

        class Classifier(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp()

            def forward(self, x, labels):
                out = self.net(x)
                return {"loss": F.cross_entropy(out, labels), "logits": out}

        class InOrder(Trainer):
            def _get_train_sampler(self, *args):
                return None

        model = Classifier()
        sparsifier, own = KINDS[kind](model.net)
        callback = SparsifierCallback(sparsifier, own)
        rows = [{"x": x, "labels": y} for step in range(STEPS) for x, y in zip(*batch(step), strict=True)]
        settings = {
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "max_steps": steps,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_grad_norm": clip,
            "save_strategy": "steps",
            "save_steps": 5,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_strategy": "no",
            **options,
        }
        trainer = InOrder(model, TrainingArguments(**settings), train_dataset=rows, callbacks=[callback])
        if watch:
            callback.watch_clipping(trainer)
        trainer.train(resume_from_checkpoint=resume)
    return model.net, sparsifier


def test_transformers_clipping_unseen_is_refused(tmp_path):
    with pytest.raises(SparsityError, match="clips gradients before it calls this callback.*watch_clipping"):
        hugging_face(tmp_path, "RigL", 1.0, STEPS, watch=False)


def bert(folder, steps, level=0.5, resume=None, **options):
    """The trainer of a small BERT, after training, and its sparsifier."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from sparsekit_ao.integrations.transformers import SparsifierCallback

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, intermediate_size=16, **dropout)
    model = transformers.BertForSequenceClassification(config)
    sparsifier = ScopeSparsifier(level)
    sparsifier.prepare(model, [{"tensor_fqn": "bert.encoder.*.dense.weight"}])
    own = [ScheduleSL(sparsifier, schedules.linear(0.0, level, steps=4))]
    rows = [{"input_ids": torch.arange(8) % (k + 2), "labels": k % 2} for k in range(16)]
    settings = {"per_device_train_batch_size": 2, "max_steps": steps, "save_steps": 2, "report_to": []}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_strategy": "no"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        arguments = transformers.TrainingArguments(
            str(folder), use_cpu=True, disable_tqdm=True, **{**settings, **options}
        )
        callbacks = [SparsifierCallback(sparsifier, own)]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
    return trainer, sparsifier


def test_transformers_checkpoints_are_plain_and_training_resumes_from_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import STATE

    trainer, sparsifier = bert(tmp_path / "whole", 4)
    model = trainer.model
    sparsifier.check()  # the last level has been applied
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    saved = tmp_path / "whole" / "checkpoint-2"
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    assert float((plain.bert.encoder.layer[0].intermediate.dense.weight == 0).float().mean()) == 0.125
    again, _ = bert(tmp_path / "whole", 4, resume=str(saved))
    assert same(again.model.state_dict(), model.state_dict())  # weights and masks
    with pytest.raises(SparsityError, match=r"training resumes from masked_state.*TrainingArguments\(resume_from"):
        bert(tmp_path / "moved", 4, resume=str(saved))
    bert(tmp_path / "moved", 4, resume=str(saved), resume_from_checkpoint=str(saved))
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    worst, third = bert(tmp_path / "best", 4, metric_for_best_model="loss", **options)  # the lower one is the first
    sparsifier.squash_mask()
    # The best checkpoint is one of a lower level, with the schedule as it was there.
    with (
        pytest.warns(UserWarning, match="its budget is"),
        pytest.warns(UserWarning, match="at step 2 .* ends with 0.5"),
    ):
        third.squash_mask()
    trainer.save_model(str(tmp_path / "squashed"))
    for one, folder in ((trainer, "whole/checkpoint-4"), (trainer, "copy"), (worst, "best/checkpoint-2")):
        saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / folder)
        assert same(saved.state_dict(), one.model.state_dict()), folder
    assert [(tmp_path / folder / STATE).exists() for folder in ("whole/checkpoint-4", "squashed")] == [True, False]


def held_by_a_callback(kind, config=None, level=0.5, **sizes):
    """A small masked language model of transformers whose trainer has the callback, its sparsifier and callback."""
    transformers = pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import SparsifierCallback

    torch.manual_seed(0)
    own = getattr(transformers, kind + "Config")(vocab_size=32, hidden_size=16, num_attention_heads=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(own).eval()
    sparsifier = ScopeSparsifier(level)
    sparsifier.prepare(model, config)
    callback = SparsifierCallback(sparsifier)
    callback.on_init_end(None, None, None, model=model)
    sparsifier.step()
    return model, sparsifier, callback


SIZES = {"num_hidden_layers": 2, "intermediate_size": 16, "max_position_embeddings": 32}
MIXTRAL = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
MODELS = {
    "Bert": {**SIZES, "is_decoder": True},
    "GPTNeoX": SIZES,
    "Llama": SIZES,
    "Mixtral": MIXTRAL,
    "OPT": {"num_hidden_layers": 2, "ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
    "Qwen2": {**SIZES, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_trained_model_is_pickled_without_the_callback(kind, tmp_path):
    model, sparsifier, _ = held_by_a_callback(kind, **MODELS[kind])
    masked = copy.deepcopy(model)
    sparsifier.squash_mask()
    torch.save(model, tmp_path / "model.pt")
    assert b"sparsekit_ao" not in (tmp_path / "model.pt").read_bytes()
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert again.save_pretrained.__func__ is type(model).save_pretrained and same(
        again.state_dict(), model.state_dict()
    )
    for one, folder in ((again, "again"), (pickle.loads(pickle.dumps(again)), "twice"), (masked, "masked")):
        one.save_pretrained(tmp_path / folder)
        loaded = type(model).from_pretrained(tmp_path / folder)
        assert same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["Mixtral", "Llama"])
def test_smaller_models_of_a_trained_one_are_saved_under_their_own_names(kind, tmp_path):
    model, sparsifier, _ = held_by_a_callback(kind, **MODELS[kind])
    sparsifier.squash_mask()
    tokens = torch.arange(8)[None]
    small, report = sparsekit_ao.shrink(
        model, tokens, ratio=0.5, exclude=["model.layers.0", "width"], keep_config=False
    )
    export.save_pretrained(small, report, tmp_path)
    assert (tmp_path / "manifest.json").exists()  # its layers differ, as its config cannot say
    again = export.load_pretrained(tmp_path, type(model))
    assert same(again.state_dict(), small.state_dict())


def load_as_a_trainer(model, sparsifier, callback, folder):
    """Load a checkpoint as a trainer does: the plain weights, and then what the callback restores."""
    for group in sparsifier.groups:
        with torch.no_grad():
            group["module"].parametrizations.weight.original.mul_(sparsifier.mask(group["tensor_fqn"]))
    callback._load(SimpleNamespace(stateful_callbacks={"SparsifierCallback": callback.state()}), [folder])


def test_checkpoints_copy_no_masks(tmp_path, monkeypatch):
    model, sparsifier, callback = held_by_a_callback("Llama", **SIZES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def clone(*_, **__):
        raise AssertionError("a tensor is copied")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        model.save_pretrained(tmp_path)
        load_as_a_trainer(model, sparsifier, callback, tmp_path)
    assert same(model.state_dict(), before)
    assert sparsifier.state_dict().keys() == {"state", *callback.state()["attributes"]["sparsifier"]}


def test_checkpoints_of_tied_masks_load(tmp_path):
    config = [{"tensor_fqn": "model.embed_tokens.weight"}]
    model, sparsifier, callback = held_by_a_callback("Llama", config, tie_word_embeddings=True, **SIZES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.parametrizations.weight.0.mask" in before
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    load_as_a_trainer(model, sparsifier, callback, tmp_path)
    assert same(model.state_dict(), before)


def fake_trainer():
    class Accelerator:
        unscaled = 0

        def clip_grad_norm_(self, *_, **__):
            self.unscale_gradients()
            return "clipped"

        def unscale_gradients(self):
            self.unscaled += 1

    return SimpleNamespace(accelerator=Accelerator(), args=SimpleNamespace(max_grad_norm=1.0))


def transformers_callback(sparsifier, own=()):
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sparsekit_ao.integrations.transformers import SparsifierCallback
    return SparsifierCallback(sparsifier, own)


def test_transformers_clipping_is_watched_in_every_trainer():
    model = mlp()
    callback = transformers_callback(rigl(model)[0])
    first, second = fake_trainer(), fake_trainer()
    state = SimpleNamespace(global_step=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for trainer in (first, second):
        with pytest.raises(SparsityError, match="clips gradients before it calls this callback"):
            callback.on_train_begin(trainer.args, state, None, optimizer=optimizer)
        plain = trainer.accelerator.clip_grad_norm_
        callback.watch_clipping(trainer)
        assert trainer.accelerator.clip_grad_norm_ != plain and trainer.accelerator.clip_grad_norm_() == "clipped"
        assert trainer.accelerator.unscaled == 1  # torch's GradScaler refuses a second time in one step
        callback.on_train_begin(trainer.args, state, None, optimizer=optimizer)


def test_transformers_checkpoints_of_several_callbacks_are_distinguished():
    made = []
    for name in ("0.weight", "2.weight"):
        sparsifier = ScopeSparsifier(nnz=2)
        sparsifier.prepare(mlp(), [{"tensor_fqn": name}])
        made.append(transformers_callback(sparsifier))
    made[1].sparsifier.enable_mask_update = False
    found = [callback.state() for callback in made]
    for callback in made:
        callback.sparsifier.enable_mask_update = True
    state = SimpleNamespace(global_step=5, stateful_callbacks={"SparsifierCallback": found})
    for callback in made:
        callback.on_train_begin(SimpleNamespace(max_grad_norm=0.0), state, None, optimizer=None)
    assert [callback.sparsifier.enable_mask_update for callback in made] == [True, False]
    state.stateful_callbacks["SparsifierCallback"] = [found[0], found[0]]
    with pytest.raises(SparsityError, match="of 2 sparsifiers in the checkpoint 2 have the tensors of this one"):
        made[0].on_train_begin(SimpleNamespace(max_grad_norm=0.0), state, None, optimizer=None)


# lightning


def lightning(folder, kind, clip, steps, resume=None, accumulate=1, manual=False):
    pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader

        from sparsekit_ao.integrations.lightning import SparsifierCallback

        class Classifier(LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.other = mlp(), torch.nn.Linear(8, 8)
                self.automatic_optimization = not manual

            def training_step(self, rows, at):
                x, y = rows
                loss = F.cross_entropy(self.net(x), y)
                if not manual:
                    return loss
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss + self.other(x[:, :8]).square().mean())
                for optimizer in self.optimizers():
                    optimizer.step()

            def configure_optimizers(self):
                parts = (self.net[0], self.net[2:], self.other) if manual else (self.net,)
                return [torch.optim.AdamW(part.parameters(), lr=1e-2, weight_decay=0.0) for part in parts]

        model = Classifier()
        sparsifier, own = KINDS[kind](model.net)
        begin = 5 if resume else 0  # Lightning does not wind a plain loader forward
        rows = [row for step in range(STEPS) for row in zip(*batch((step + begin) % STEPS), strict=True)]
        checkpoints = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=5, save_top_k=-1)
        trainer = Trainer(
            max_steps=steps,
            gradient_clip_val=clip or None,
            accumulate_grad_batches=accumulate,
            default_root_dir=folder,
            callbacks=[checkpoints, SparsifierCallback(sparsifier, own)],
            **{"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False},
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(rows, batch_size=8 // accumulate), ckpt_path=resume)
    return model.net, sparsifier


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_with_several_optimizers_stepped_by_hand(kind, tmp_path):
    model, sparsifier = lightning(tmp_path, kind, 0.0, 3 * STEPS, manual=True)  # it counts steps of all
    want, other = by_hand(kind, 0.0)
    agree(model, want, (sparsifier, other))


# both


LIBRARIES = {"transformers": hugging_face, "lightning": lightning}


@pytest.mark.parametrize(("library", "kind", "clip"), grid(LIBRARIES, KINDS, [0.0, 0.05]))
def test_a_trainer_trains_as_by_hand(library, kind, clip, tmp_path):
    model, sparsifier = LIBRARIES[library](tmp_path, kind, clip, STEPS)
    want, other = by_hand(kind, clip)
    agree(model, want, (sparsifier, other))


@pytest.mark.parametrize(("library", "kind"), turns(LIBRARIES, [("scheduled",), ("SNFS",), ("RigL",)]))
def test_a_trainer_resumes_in_the_middle_of_a_window(library, kind, tmp_path):
    LIBRARIES[library](tmp_path, kind, 0.0, 5)
    (saved,) = [*tmp_path.glob("*.ckpt"), *tmp_path.glob("checkpoint-5")]
    model, sparsifier = LIBRARIES[library](tmp_path, kind, 0.0, STEPS, resume=str(saved))
    want, other = by_hand(kind, 0.0)
    agree(model, want, (sparsifier, other))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_trainer_accumulates_gradients(library, tmp_path):
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options = halves if library == "transformers" else {"accumulate": 2}
    model, sparsifier = LIBRARIES[library](tmp_path, "RigL", 0.0, STEPS, **options)
    want, other = by_hand("RigL", 0.0)
    agree(model, want, (sparsifier, other))


def test_plain_weights_of_masks_above_weight_norm_and_of_other_memory_formats(tmp_path):
    transformers = pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import STATE, save_plain_weights

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.b = nn.Conv2d(4, 8, 3)
            # Other parametrizations, without masks, of a weight and a buffer.
            self.c = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
            self.d = nn.BatchNorm1d(8)
            parametrize.register_parametrization(self.d, "running_mean", nn.Identity())
            self.post_init()

        def _init_weights(self, module):
            pass

    torch.manual_seed(0)
    model = Model(transformers.PretrainedConfig()).to(memory_format=torch.channels_last)
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "a.weight"}, {"tensor_fqn": "b.weight"}])
    sparsifier.step()
    save_plain_weights(model, tmp_path)
    again = Model.from_pretrained(tmp_path)
    for name in "ab":
        torch.testing.assert_close(getattr(again, name).weight, getattr(model, name).weight, rtol=1e-6, atol=1e-7)
        assert int((getattr(again, name).weight == 0).sum()) >= getattr(model, name).weight.numel() // 2
    saved = load_file(tmp_path / STATE)  # from which training goes on
    assert all(torch.equal(saved[n], t) for n, t in model.state_dict().items() if n in saved)
    assert {"a.parametrizations.weight.original1", "a.parametrizations.weight.1.mask"} <= saved.keys()
    state = {name: t * 2 if "original" in name else t for name, t in model.state_dict().items()}  # as FSDP gathers it
    save_plain_weights(model, tmp_path, state_dict=state)
    torch.testing.assert_close(Model.from_pretrained(tmp_path).a.weight, model.a.weight * 2, rtol=1e-6, atol=1e-7)
    halves = {name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}
    save_plain_weights(model, tmp_path, state_dict=halves)
    plain = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in plain.values() if t.is_floating_point()} == {torch.bfloat16}
    save_plain_weights(model, tmp_path, state_dict={"b.bias": model.b.bias})
    assert load_file(tmp_path / "model.safetensors").keys() == {"b.bias"}
