"""What the targets fbgemm, openvino and quantize refuse: always with the tensor's name, and the model is unchanged."""

import pytest
import torch
from exported import Tied, batches, looks, mlp, pruned, same
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sparsekit_ao import SparsityError, export, patterns


class Int8:
    """In place of a torchao config: everything here is refused before torchao is imported."""


CONVERT = {
    "fbgemm": export.fbgemm,
    "openvino": export.openvino,
    "quantize": lambda model, found: export.quantize(model, Int8(), found),
}


def broken(fault):
    """A model with one fault, and the name of its first tensor."""
    if fault == "masked":
        return pruned(squash=False)[0]
    if fault == "2:4":
        return pruned(pattern=patterns.n_m(2, 4))[0]
    if fault == "4x1":
        return pruned(pattern=patterns.blocks(4, 1, 0.8))[0]
    if fault == "tied":
        model = Tied()
        with torch.no_grad():
            model.a.weight[:, 4:] = 0
        return model
    if fault == "convolution":
        return pruned(nn.Sequential(nn.Conv2d(8, 4, 1)), pattern=patterns.unstructured(0.8), names=["0.weight"])[0]
    if fault == "shape":
        return pruned(nn.Sequential(nn.Linear(66, 4)), pattern=patterns.unstructured(0.9), names=["0.weight"])[0]
    if fault == "dense":
        return mlp()
    model = pruned()[0]
    if fault == "weight_norm":
        model[0] = weight_norm(model[0])
    elif fault == "float64":
        model.double()
    elif fault in ("nan", "inf"):
        with torch.no_grad():
            model[2].weight[3, 5] = float(fault)
    return model


EVERY = {
    "masked": r"0\.weight still has its mask",
    "tied": r"a\.weight: needs a weight of its own, but it is shared with b\.weight",
    "convolution": r"0\.weight: needs the weight of Linear, got weight of Conv2d",
    "dense": "no weight is masked, and in none a tenth is zero",
    "weight_norm": r"0\.weight: is computed by _WeightNorm",
    "float64": r"0\.weight: needs torch\.float32|0\.weight: needs float32.*, got float64",
    "nan": r"2\.weight: needs finite values, got nan at \[3, 5\]",
    "inf": r"2\.weight: needs finite values, got inf at \[3, 5\]",
}
FBGEMM = {
    "2:4": r"0\.weight: needs at least 60% of its 1x4 blocks .* got 0%; \[0, 0:4\] is the first that holds zeros and",
    "4x1": r"0\.weight: needs at least 60% .*; its blocks are 4x1, along the outputs",
    "shape": r"0\.weight: needs dimension 1 to be a multiple of 4, got 66",
}
OPENVINO = {"shape": r"0\.weight: needs dimension 0 to be a multiple of 64, got 4"}
CASES = [
    *((target, fault, text) for target in CONVERT for fault, text in EVERY.items()),
    *(("fbgemm", fault, text) for fault, text in FBGEMM.items()),
    *(("openvino", fault, text) for fault, text in OPENVINO.items()),
]


@pytest.mark.parametrize(("target", "fault", "text"), CASES, ids=[f"{t}-{f}" for t, f, _ in CASES])
def test_a_fault_is_refused_before_anything_changes(target, fault, text):
    model = broken(fault)
    before = looks(model)
    with pytest.raises(SparsityError, match=text):
        CONVERT[target](model, batches())
    assert same(before, model)
    if fault != "masked":
        with pytest.raises(SparsityError, match=text):
            export.check(model, target)


@pytest.mark.parametrize("target", CONVERT)
def test_a_masked_model_is_checked_before_squash(target):
    model, _ = pruned(squash=False)
    assert [layer.fqn for layer in export.check(model, target)] == ["0.weight", "2.weight"]
    wrong, _ = pruned(pattern=patterns.n_m(2, 4), squash=False)
    if target == "fbgemm":
        with pytest.raises(SparsityError, match=r"0\.weight: needs at least 60%"):
            export.check(wrong, target)


@pytest.mark.parametrize("convert", [export.fbgemm, export.openvino])
def test_batches_must_be_finite_and_reach_every_layer(convert):
    model, _ = pruned()
    before = looks(model)
    with pytest.raises(SparsityError, match=r"0\.weight: the inputs of this layer are not finite"):
        convert(model, [torch.full((2, 64), float("nan"))])
    with pytest.raises(SparsityError, match="there are no batches"):
        convert(model, [])
    attention, _ = pruned(nn.MultiheadAttention(64, 2), names=["out_proj.weight"])
    with pytest.raises(SparsityError, match=r"no batch reached the module of out_proj\.weight"):
        convert(attention, [(torch.randn(3, 1, 64),) * 3])
    assert same(before, model) and not model[0]._forward_hooks
