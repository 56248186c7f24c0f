"""One shot: a trained model pruned without training

Prune all-MiniLM-L6-v2 to 2:4 with 64 sentences, no labels and no training. Layer by layer, `one_shot` chooses each
mask and changes the kept weights such that the layer's outputs change least. Padding should not count: `token_mask`
names the input that marks it.
"""

import copy

import torch
from data import TINY, minilm, sentence_batches
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier, one_shot

dense = minilm().eval()
calibration, held_out = sentence_batches(minilm("AutoTokenizer"))
layers = "re:encoder.layer.0.attention.*.weight" if TINY else "re:encoder.*(query|key|value|dense).weight"
config = [{"tensor_fqn": layers}]


def pruned(**options):
    """A sparsifier of a copy of the model, and the report of the pass."""
    sparsifier = ScopeSparsifier(pattern="2:4", score=options.pop("score", None))
    sparsifier.prepare(copy.deepcopy(dense), config, exclude=[torch.nn.LayerNorm])
    return sparsifier, one_shot(sparsifier, calibration, token_mask="attention_mask", **options)


# %%
# ## From magnitude to ADMM
#
# The measure is the cosine between the embeddings of the pruned and of the dense model, on sentences that were not
# used. With `compensate=None` only masks are chosen, by size or by a score. With `"least_squares"` the kept weights are
# fitted to the masks of the score. The default, `"admm"`, searches for both, so it takes no score.


@torch.no_grad()
def embed(model):
    """Mean over the tokens of each sentence, of length 1."""
    vectors = []
    for batch in held_out:
        weights = batch["attention_mask"][:, :, None]
        vectors.append(F.normalize((model(**batch).last_hidden_state * weights).sum(1) / weights.sum(1)))
    return torch.cat(vectors)


target = embed(dense)
print(f"{16 * len(calibration)} sentences to calibrate on, {len(target)} held out")
for options in (
    {"compensate": None},
    {"score": "wanda", "compensate": None},
    {"score": "wanda", "compensate": "least_squares"},
    {"compensate": "admm"},
):
    sparsifier, report = pruned(**options)
    cosine = (embed(sparsifier.model) * target).sum(1).mean()
    score, compensate = options.get("score"), options["compensate"]
    print(f"score={score}, compensate={compensate}: cosine {cosine:.3f} to the dense model")

# %%
# ## The report
#
# One row for each layer: the relative error of its outputs with the mask alone, and with the weights as they are now.

print("\n".join(str(report).splitlines()[:8]))

# %%
# ## What next
#
# The masks are still on the model, and `step()` has not been called: train on, and they stay as they are. Or finish:

sparsifier.squash_mask()

# %%
# The page [Benchmarks](../benchmarks.md#pruned-in-one-pass) has the measured tables of all scores and methods.
# Calibrate with more sentences where the report says that there were fewer tokens than inputs.
