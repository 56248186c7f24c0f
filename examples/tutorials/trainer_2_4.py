"""Fine-tune at 2:4 with the Hugging Face Trainer

Fine-tune a sentence model as a classifier while every Linear layer of its encoder is pruned to 2:4, and save a plain
checkpoint. Compared with dense fine-tuning, four steps are new: make the sparsifier, call `prepare`, pass the callback,
and call `squash_mask` at the end.

The model is all-MiniLM-L6-v2. The task is to tell from a sentence of a docstring which package of the Python standard
library it comes from, so nothing has to be downloaded (`examples/tutorials/data`).
"""

import tempfile

from data import PACKAGES, TINY, minilm, sentences_by_package
from transformers import AutoModelForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from sparsekit_ao import ScopeSparsifier
from sparsekit_ao.integrations.transformers import SparsifierCallback

model = minilm("AutoModelForSequenceClassification", num_labels=len(PACKAGES))
sparsifier = ScopeSparsifier("2:4")
sparsifier.prepare(model, exclude=["classifier", "*.pooler*"])
callback = SparsifierCallback(sparsifier)

# %%
# The classifier is new and small, so `exclude` leaves it dense. The callback calls `sparsifier.step()` after every
# optimizer step, so masks follow the weights while they learn.
#
# ## The Trainer, as usual

tokenizer = minilm("AutoTokenizer")
train, held_out = sentences_by_package(tokenizer)
STEPS = 2 if TINY else 90


def make_trainer(model, callbacks=()):
    """A Trainer that saves nothing and prints nothing."""
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=16 if TINY else 32,
        per_device_eval_batch_size=64,
        learning_rate=2e-4,
        warmup_steps=STEPS // 10,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        compute_metrics=lambda found: {"accuracy": float((found[0].argmax(-1) == found[1]).mean())},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


trainer = make_trainer(model, [callback])
trainer.train()
print(f"{len(train)} sentences to train on, {len(held_out)} held out, {len(PACKAGES)} classes")
print(f"2:4: accuracy {trainer.evaluate()['eval_accuracy']:.3f}, {sparsifier.check():,} groups of four checked")

# %%
# For comparison, fine-tune the same model without a sparsifier:

trainer = make_trainer(minilm("AutoModelForSequenceClassification", num_labels=len(PACKAGES)))
trainer.train()
print(f"dense: accuracy {trainer.evaluate()['eval_accuracy']:.3f}")

# %%
# ## A plain checkpoint
#
# `squash_mask` writes the zeros into the weights and removes the masks. What `save_pretrained` writes then is an
# ordinary checkpoint, which `transformers` loads without this library.

sparsifier.squash_mask()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = AutoModelForSequenceClassification.from_pretrained(folder)
weight = again.bert.encoder.layer[0].intermediate.dense.weight
print("nonzeros in each group of four, at most:", int((weight != 0).view(-1, 4).sum(1).max()))

# %%
# To save a plain checkpoint while training continues, use `export.dense_state_dict(model)`, as
# [Checkpoints](../integrations/checkpoints.md) explains. The page [Deploy](../export.md) lists the hardware and the
# libraries that run 2:4 faster. [Settings to begin with](../training.md#settings-to-begin-with) recommends learning
# rates and numbers of steps for fine-tuning.
