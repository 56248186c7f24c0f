"""Models that really get smaller: a convolutional network and a Llama, down to ONNX

Zeros alone make no dense kernel faster. This tutorial removes what was pruned: channels of a residual network whose
couplings are discovered, then hidden units and heads of a Llama whose couplings are known. Both smaller models are
checked against the masked ones, and the second runs in onnxruntime.
"""

import pathlib
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekit_ao import ScopeSparsifier, coupling
from sparsekit_ao.removal import compact, removable

TINY = "--tiny" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

# %%
# ## A convolutional network
#
# A stem, two residual blocks, and a classifier, trained on scikit-learn's digits.


class Block(nn.Module):
    """Two convolutions around a residual connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, width, 3, padding=1)

    def forward(self, x):
        """The input with a correction added."""
        return x + self.second(F.relu(self.norm(self.first(x))))


class Net(nn.Module):
    """Images of 8 x 8 pixels to ten classes."""

    def __init__(self, width: int = 16, inner: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


digits = load_digits()
images, labels = torch.tensor(digits.data).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:1400], order[1400:]
net = Net()


def fit(model, epochs):
    """Train with Adam; the accuracy on the held-out images."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(epochs):
        for at in train[torch.randperm(len(train))].split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(images[at]), labels[at]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


print(f"dense: accuracy {fit(net, 1 if TINY else 40):.3f}")

# %%
# ## Which channels go together?
#
# `discover` runs the model once and prints a line for each coupling, which you can copy into code, edit and keep. The
# channels inside of a block are coupled in the two convolutions and the norm between them.

found = coupling.discover(net, images[:4])
print(found)

# %%
# Here only the channels inside of the blocks are pruned, half of them. `*` stands for the number of the block.

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
small, report = compact(net, inner, images[:8])
print(report)

# %%
# The smaller network is an ordinary one, which can be trained on.

print(f"smaller, trained on: accuracy {fit(small, 1 if TINY else 20):.3f}")
print(small.blocks[0].first)

# %%
# ## A Llama
#
# `removable` finds the couplings of any model, with the integers of its config that hold the removed sizes. The model
# here has the shape of a Llama with grouped queries and random weights, since the point is what happens to its shapes;
# use your own. Hidden units and whole key heads with their queries are chosen here; they share no tensor.

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
# A trained model, with its accuracy before and after and its measured times, is pruned in `examples/shrink_minilm.py`;
# its numbers are on the page [Removing what was pruned](../compact.md).
