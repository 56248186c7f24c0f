"""Models that really get smaller: a convolutional network and a Llama, down to ONNX

Zeros alone make no dense kernel faster. This tutorial removes the pruned units from models: first channels of a
residual network, in one call and then by hand, and then hidden units and heads of a Llama. Each smaller model is
checked against the masked one, and the last runs in onnxruntime."""

import pathlib
import tempfile

import torch
from data import TINY, ResidualNetwork, fit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekit_ao import ScopeSparsifier, coupling, shrink
from sparsekit_ao.removal import compact, removable

net, images = ResidualNetwork(), torch.randn(8, 1, 8, 8)
print(f"dense: accuracy {fit(net, 1 if TINY else 40):.3f}")
small, report = shrink(net, images, ratio={"*": 0.5, "width": 0.5})
print(report)
print(f"half of all channels, trained on: accuracy {fit(small, 1 if TINY else 20):.3f}")

# %%
# `"width"` is what passes between the blocks. It stays unless it is named, since networks that are not trained further
# seldom survive its removal. The network, which is defined in `examples/tutorials/data`, has a stem, two residual
# blocks and a classifier, and is trained on scikit-learn's digits. To choose yourself what is removed, do the steps of
# `shrink` by hand.
#
# ## Which channels go together?
#
# `discover` runs a copy of the model once and finds the couplings. Printed, they are code that you can copy, edit and
# keep, with one line for each tensor. The channels inside a block couple its two convolutions and the norm between
# them.

found = coupling.discover(net, images)
print(found)

# %%
# Here only half of the channels inside the blocks are pruned. `*` stands for the number of the block.

inner = coupling.Coupling(
    {
        "blocks.*.first.weight": "u i h w",
        "blocks.*.first.bias": "u",
        "blocks.*.norm.weight": "u",
        "blocks.*.norm.bias": "u",
        "blocks.*.norm.running_mean": "u",
        "blocks.*.norm.running_var": "u",
        "blocks.*.second.weight": "o u h w",
    },
    name="channels of block *",
)
sparsifier = ScopeSparsifier()
sparsifier.prepare(net, inner.entries(net, sparsity_level=0.5))
sparsifier.step()
sparsifier.squash_mask()
small, report = compact(net, inner, images)
print(report)

# %%
# The smaller network is an ordinary one, which can be trained further.

print(f"smaller, trained on: accuracy {fit(small, 1 if TINY else 20):.3f}")
print(small.blocks[0].first)

# %%
# ## A Llama
#
# `removable` finds the couplings that `compact` can remove from a model, and the integers of the config that must
# change with them. The model here is a small Llama with grouped queries and random weights, because this example is
# about its shapes; use your own model. Two kinds of couplings are chosen here: hidden units, and whole key heads with
# their query heads. They have no tensor in common.

size = 64 if TINY else 256
config = LlamaConfig(
    hidden_size=size,
    intermediate_size=3 * size,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=512,
)
llama = LlamaForCausalLM(config).eval()
tokens = torch.randint(0, 512, (2, 16))
inputs = {"input_ids": tokens, "use_cache": False}
found = removable(llama, inputs).couplings
for one in found:
    print(one.name, dict(one.sizes))
chosen = [one for one in found if "mlp" in one.name or one.sizes == {"d": size // 8, "g": 2}]
sparsifier = ScopeSparsifier()
sparsifier.prepare(llama, [entry for one in chosen for entry in one.entries(llama, sparsity_level=0.5)])
sparsifier.step()
sparsifier.squash_mask()
small_llama, report = compact(llama, chosen, inputs)
print(report)

# %%
# ## To ONNX
#
# The smaller model is dense, so every exporter takes it. onnxruntime's outputs are compared with PyTorch's.


class Logits(nn.Module):
    """Tensors in, tensors out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens):
        """Logits of every token."""
        return self.model(input_ids=tokens, use_cache=False).logits


import onnxruntime  # noqa: E402

with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    path = pathlib.Path(folder) / "llama.onnx"
    torch.onnx.export(Logits(small_llama).eval(), (tokens,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})[0]
    difference = (torch.from_numpy(outputs) - Logits(small_llama)(tokens)).abs().max()
print(f"onnxruntime differs by less than 1e-4: {bool(difference < 1e-4)}")

# %%
# `examples/shrink_minilm.py` makes a trained model smaller, and measures its quality and speed before and after. The
# results are on the page [Benchmarks](../benchmarks.md#made-smaller).
