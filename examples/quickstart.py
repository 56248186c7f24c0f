"""A small classifier of handwritten digits: trained dense, pruned to 2:4, trained again. `--tiny` takes a few steps."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns

torch.manual_seed(0)
torch.set_num_threads(1)  # the model is too small to gain from more threads
digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
shuffled = torch.randperm(len(labels))
train, test = shuffled[:1400], shuffled[1400:]
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
steps = 5 if "--tiny" in sys.argv else 200


def fit() -> float:
    """Train for some steps; the accuracy on held-out images."""
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images[train]), labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


dense = fit()
sparsifier = ScopeSparsifier()
sparsifier.prepare(model, [{"tensor_fqn": "*.weight", **patterns.n_m(2, 4)}])  # keep 2 of every 4 inputs
sparsifier.step()  # choose the masks; the optimizer stays valid and trains the kept weights
sparse = fit()
print(sparsifier.report())
sparsifier.squash_mask()  # plain Linear layers again, with zeros in them
print(f"accuracy: dense {dense:.3f}, sparse {sparse:.3f}")
