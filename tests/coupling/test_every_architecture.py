"""Networks of many architectures: all that `removable` suggests is pruned at once and removed, with the same outputs.

What it leaves out has a reason. A selection runs by default, all with SPARSEKIT_AO_EXHAUSTIVE=1 in the environment;
as a script this file writes a table of all: `python tests/coupling/test_every_architecture.py > architectures.csv`.
"""

import sys
import time

import hf_models
import installed_models
import pytest
import torch
from compact_models import close
from discovered import fill, pruned_jointly
from grids import EXHAUSTIVE
from networks import NETWORKS
from torch.utils import _pytree

from sparsekit_ao.removal import compact, removable

# Each has constructs that no other one of them has.
ALWAYS = ("DenseNet", "Inception", "MobileNet v3", "ShuffleNet", "Res2Net", "U-Net", "GAN generator", "GroupNorm")
ALWAYS += ("super-resolution", "ConvNeXt v2", "LeViT", "Swin", "nn.Transformer", "graph convolutions", "RepVGG")
ALWAYS += ("decoder with RMSNorm", "LSTM", "GRU")
ALWAYS += tuple(f"transformers {name}" for name in ("GPT-NeoX", "OPT", "DeepSeek-V3", "Mamba", "Bloom", "ConvNeXt-V2"))
NOTHING = {  # each with the reason
    "gMLP": "LayerNorm over the gate's channels, and a matrix over tokens",
    "maxout": "a size in the forward's code",
    "transformers EnCodec": "weight_norm computes all weights; shrink makes them plain",
}
ALL = (
    *NETWORKS,
    *(f"transformers {name}" for name in (*hf_models.NAMES, *hf_models.FAMILIES)),
    *installed_models.NAMES,
)


def make(name):
    if name.startswith("transformers "):
        return hf_models.make(name.removeprefix("transformers "))
    if name in installed_models.NAMES:
        return installed_models.make(name)
    torch.manual_seed(0)
    network, inputs = NETWORKS[name]
    return fill(network()), inputs()


def tensors(model, inputs):
    args, keys = ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    with torch.no_grad():
        return [leaf for leaf in _pytree.tree_leaves({"out": model(*args, **keys)}) if isinstance(leaf, torch.Tensor)]


def halved(model, inputs):
    """What `removable` finds, and half of all its units removed: (found, smaller model, report)."""
    found = removable(model, inputs)
    if not found.couplings:
        return found, model, None
    return found, *compact(pruned_jointly(model, found.couplings), found.couplings, inputs)


@pytest.mark.parametrize("name", ALL if EXHAUSTIVE else ALWAYS)
def test_what_is_suggested_is_pruned_at_once_and_removed(name):
    model, inputs = make(name)
    found, small, report = halved(model, inputs)
    assert all(why for _, why in found.left_out) and all(frozen.why for frozen, _ in found.frozen)
    assert bool(found.couplings) == (name not in NOTHING)
    if report is not None:
        assert report.after.parameters < report.before.parameters
        assert all(close(a, b) for a, b in zip(tensors(model, inputs), tensors(small, inputs), strict=True))


def row(name):
    """One line of the table."""
    try:
        model, inputs = make(name)
    except pytest.skip.Exception as e:
        return f"{name},skipped: {e.msg},,,,,,"
    count, start = sum(p.numel() for p in model.parameters()), time.perf_counter()
    try:
        found, small, report = halved(model, inputs)
    except Exception as e:
        return f'{name},error: {type(e).__name__},{count},,,,,"{str(e)[:200]}"'.replace("\n", " ")
    seconds = time.perf_counter() - start
    same = all(close(a, b) for a, b in zip(tensors(model, inputs), tensors(small, inputs), strict=True))
    outcome = "nothing is removable" if report is None else "smaller" if same else "other outputs"
    share = 1 - sum(p.numel() for p in small.parameters()) / count
    why = "; ".join(dict.fromkeys(why.split(":")[0] for _, why in found.left_out)).replace('"', "'")
    return f'{name},{outcome},{count},{share:.3f},{len(found.couplings)},{len(found.left_out)},{seconds:.1f},"{why}"'


if __name__ == "__main__":
    print("model,outcome,parameters,share removed,couplings removed,left out,seconds,reasons of what is left out")
    for name in sys.argv[1:] or ALL:
        print(row(name), flush=True)
