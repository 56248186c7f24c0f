"""RigL from scratch

Train a classifier whose weights are 95 % zero from the first step on. RigL moves the few weights that exist to where
they help most: every 40 steps it prunes the smallest ones and grows others where the gradient is largest. The number
of nonzero weights never changes. The baseline keeps the random mask that it starts with.

The data are scikit-learn's digits, 8 x 8 pixels in ten classes, and the model is small enough that a bad mask hurts.
"""

import itertools

import torch
from data import TINY, digits
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import RigL, Static

EPOCHS = 3 if TINY else 60
STEPS = EPOCHS * 20
METHODS = {
    "dense": None,
    "random mask, never changed": lambda optimizer: Static(0.95, optimizer=optimizer),
    "RigL": lambda optimizer: RigL(0.95, optimizer=optimizer, until=int(0.75 * STEPS), update_every=40),
}
torch.set_num_threads(1)  # the model is too small to gain from more
images, labels, test_images, test_labels = digits()
images, test_images = images - images.mean(0), test_images - images.mean(0)

# %%
# ## The loop
#
# The model and the loop are those of dense training, with three more lines: `prepare` and `widen` (below) before the
# loop, and `sparsifier.step()` after `optimizer.step()`. A sparsifier whose masks change needs the optimizer, so it
# is passed to the constructor.


def fit(make):
    """Train one model, and return the sparsifier and the accuracy on the held-out images in percent."""
    torch.manual_seed(0)
    sizes = (64, 64, 32, 10)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sparsifier = make(optimizer) if make is not None else None
    if sparsifier is not None:
        sparsifier.prepare(model)
        widen(model)
    for _ in range(EPOCHS):
        for at in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[at]), labels[at]).backward()
            optimizer.step()
            if sparsifier is not None:
                sparsifier.step()
    accuracy = 100 * (model(test_images).argmax(1) == test_labels).float().mean()
    return sparsifier, accuracy.item()


# %%
# torch initializes a layer for its full number of inputs. A sparse layer has fewer, so it needs larger weights: the
# weights of a neuron with `k` kept inputs are drawn from a normal distribution with variance 2 / k. When a masked
# weight is assigned, dropped elements stay zero.


@torch.no_grad()
def widen(model):
    """Draw new values for the kept weights, with a variance that fits the number of kept inputs."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            kept = (layer.weight != 0).sum(1, keepdim=True).clamp(min=1)
            layer.weight = torch.where(layer.weight != 0, torch.randn(layer.weight.shape) * (2 / kept).sqrt(), 0.0)


# %%
# ## Dense, static, RigL
#
# `until` is the last step that may change the masks. After it, only the weights are trained. `RigL(...)` is
# `DynamicSparsifier(...)` with the arguments of the paper.

for name, make in METHODS.items():
    sparsifier, accuracy = fit(make)
    print(f"{name:<28} {accuracy:.1f} %")

# %%
# ## What RigL did
#
# The report of the last sparsifier shows how many weights each layer keeps: with `init="erk"`, small layers keep a
# larger fraction of theirs. `check` raises an error if any budget does not hold exactly. `last_update` describes the
# last update. It pruned and grew nothing, because the fraction that is replaced falls to 0 along a cosine.

print(sparsifier.report())
print("scopes that hold their budget:", sparsifier.check())
print(sparsifier.last_update)

# %%
# ## Done
#
# `squash_mask` leaves plain `nn.Linear` layers with zeros.

sparsifier.squash_mask()

# %%
# Over ten seeds, RigL is far ahead of static masks at this sparsity, and random growth (`SET`) is in between. The
# table is on the page [Benchmarks](../benchmarks.md#trained-sparse), and comes from `examples/rigl_digits.py`.
