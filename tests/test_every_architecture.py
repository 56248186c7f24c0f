"""Networks of many architectures: all that `removable` suggests is pruned at once and removed, with the same outputs.

What it leaves out has a reason. A selection runs by default, all with SPARSEKIT_AO_EXHAUSTIVE=1 in the environment.
"""

import hf_models
import pytest
import torch
from discovered import fill
from grids import EXHAUSTIVE
from networks import NETWORKS
from test_compact_exact import close
from torch.utils import _pytree

from sparsekit_ao import ScopeSparsifier
from sparsekit_ao.coupling import joint_entries
from sparsekit_ao.export import compact, removable

ALWAYS = (  # each has constructs that no other one of them has
    "DenseNet",
    "Inception",
    "MobileNet v3",
    "ShuffleNet",
    "Res2Net",
    "U-Net",
    "GAN generator",
    "super-resolution",
    "GroupNorm",
    "ConvNeXt v2",
    "LeViT",
    "Swin",
    "nn.Transformer",
    "graph convolutions",
    "decoder with RMSNorm",
    "LSTM",
    "GPT-NeoX",
    "OPT",
    "DeepSeek-V3",
    "Mamba",
)
NOTHING = {"RepVGG", "gMLP", "LSTM", "bidirectional LSTM", "highway", "maxout", "ConvNeXt-V2"}


def make(name):
    if name not in NETWORKS:
        return hf_models.make(name)
    torch.manual_seed(0)
    network, inputs = NETWORKS[name]
    return fill(network()), inputs()


def tensors(model, inputs):
    args, keys = ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    with torch.no_grad():
        return [leaf for leaf in _pytree.tree_leaves({"out": model(*args, **keys)}) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", [*NETWORKS, *hf_models.NAMES, *hf_models.FAMILIES] if EXHAUSTIVE else ALWAYS)
def test_what_is_suggested_is_pruned_at_once_and_removed(name):
    model, inputs = make(name)
    found = removable(model, inputs)
    assert all(why for _, why in found.left_out) and all(frozen.why for frozen, _ in found.frozen)
    assert bool(found.couplings) == (name not in NOTHING)
    if not found.couplings:
        return
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, joint_entries(found.couplings, model))
    sparsifier.step()
    sparsifier.check()
    sparsifier.squash_mask()
    small, report = compact(model, found.couplings, inputs)
    assert report.after.parameters < report.before.parameters and not report.notes
    assert all(close(a, b) for a, b in zip(tensors(model, inputs), tensors(small, inputs), strict=True))
