"""Packed 2:4 weights: the same bits after loading; models and files that do not fit are refused."""

import pytest
import torch
from export_models import Tied, linear, put, rename, rewritten, same_bits, squashed, with_value
from safetensors.torch import load_file
from torch import nn

from sparsekit_ao import SparsityError, export
from sparsekit_ao.export.two_four import _on_cuda


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 0.5625), (torch.bfloat16, 0.5625), (torch.int8, 0.625)])
def test_packed_weights_are_the_same_after_loading(dtype, share, tmp_path):
    model = squashed(linear(64, 256), dtype)
    with torch.no_grad():
        model[0].weight[5, 4:8] = 0  # fewer than two of four
    export.pack_2_4(model, tmp_path / "x")
    again = linear(64, 256)
    again[0].weight = nn.Parameter(torch.ones_like(model[0].weight), requires_grad=False)
    export.load_2_4(again, tmp_path / "x")
    assert same_bits(again[0].weight, model[0].weight)
    assert sum(part.nbytes for part in load_file(tmp_path / "x").values()) == share * model[0].weight.nbytes


def test_negative_zeros_are_zeros_when_packed(tmp_path):
    model = with_value(squashed(linear(), torch.float16), -0.0, at=linear()[0].weight > 9)
    with torch.no_grad():
        model[0].weight[model[0].weight == 0] = -0.0
    export.pack_2_4(model, tmp_path / "x")
    again = linear(dtype=torch.float16)
    export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again[0].weight, model[0].weight) and not again[0].weight[model[0].weight == 0].signbit().any()


def mixed():
    """A packed layer, a dense one, a bias, a buffer, and a weight that two others share."""
    model = nn.ModuleDict({"tied": Tied(8, 8), "norm": nn.BatchNorm1d(4), "fc": squashed(linear(), torch.float16)})
    with torch.no_grad():
        model["tied"].a.weight.normal_()
    return model


def test_everything_else_is_loaded_too(tmp_path):
    model = mixed()
    export.pack_2_4(model, tmp_path / "x")
    again = mixed()
    export.load_2_4(again, tmp_path / "x")
    assert all(same_bits(v, model.state_dict()[k]) for k, v in again.state_dict().items())


def test_a_model_that_ties_what_differs_in_the_file(tmp_path):
    model, again = Tied(), Tied()
    model.b.weight = nn.Parameter(model.a.weight * 2)
    again.half().fc = linear(dtype=torch.float16)
    model.half().fc = squashed(linear(), torch.float16)
    export.pack_2_4(model, tmp_path / "x")
    before = again.a.weight.clone()
    with pytest.raises(SparsityError, match="a.weight and b.weight differ, but the model ties them; untie them first"):
        export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again.a.weight, before)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Sequential(linear()), "0.weight is packed, but no weight of the model that pack_2_4 could pack"),
        (lambda: linear(64, 64, dtype=torch.float16), r"0.weight.values must be torch.float16 of shape \(64, 32\) for"),
        (lambda: linear(dtype=torch.bfloat16), r"must be torch.bfloat16 of shape \(32, 32\) for this model, got F16"),
        (lambda: linear(), "0.weight is packed, but no weight"),
        (lambda: nn.Sequential(*linear(dtype=torch.float16), nn.Linear(2, 2)), "has no tensor '1.bias'"),
    ],
    ids=range(5),
)
def test_models_that_a_packed_file_does_not_fit(make, text, tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(SparsityError, match=text):
        export.load_2_4(model, tmp_path / "x")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_packed_file_needs_a_model_with_values(tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    with pytest.raises(SparsityError, match="load_2_4: the model is on the meta device; model.to_empty"):
        export.load_2_4(linear(dtype=torch.float16, device="meta"), tmp_path / "x")


PACKED = [
    (put("packed", ["1.weight"]), "1.weight is packed, but no weight"),
    (put("packed", 3), "must hold 'packed' and 'aliases'"),
    (put("aliases", "0.weight", "0.weight"), "'0.weight' is stored, and is to be the same tensor as another one"),
    (put("aliases", "0.weight", "1.weight"), "'0.weight' is stored, and is to be the same tensor as another one"),
    (put("aliases", "a", "0.weight"), "a is to be the same tensor as 0.weight, but they differ in the model"),
    (rename("0.weight.metadata", "m"), "has no tensor '0.weight.metadata'"),
]


@pytest.mark.parametrize(("change", "text"), PACKED, ids=range(len(PACKED)))
def test_packed_files_that_contradict_themselves(change, text, tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    rewritten(tmp_path / "x", change)
    with pytest.raises(SparsityError, match=text):
        export.load_2_4(linear(dtype=torch.float16), tmp_path / "x")


def test_metadata_that_are_not_2_4(tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-2] + b"\0\0")  # both values of a group at its first place
    with pytest.raises(SparsityError, match="0.weight: its metadata are not those of a 2:4 weight"):
        export.load_2_4(linear(dtype=torch.float16), tmp_path / "x")


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_the_tensor_of_cutlass_holds_the_file_s_values_and_metadata(monkeypatch, tmp_path):
    model = squashed(linear(), torch.float16)
    export.pack_2_4(model, tmp_path / "x")
    parts = [load_file(tmp_path / "x")[f"0.weight.{part}"] for part in ("values", "metadata")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = _on_cuda("0.weight", model[0].weight, model[0].weight, *parts)
    assert isinstance(found, torch.sparse.SparseSemiStructuredTensorCUTLASS) and found.shape == model[0].weight.shape
    assert torch.equal(found.packed, parts[0]) and torch.equal(found.meta, parts[1])
    model[0].weight = nn.Parameter(found, requires_grad=False)
    with pytest.raises(SparsityError, match="0.weight is packed, but no weight of the model that pack_2_4 could pack"):
        export.load_2_4(model, tmp_path / "x")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dense = linear(dtype=torch.float16)[0].weight
    with pytest.raises(SparsityError, match="torch cannot pack 0.weight for cpu: .*Only CUDA tensors"):
        _on_cuda("0.weight", dense, dense, *parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loaded_on_a_gpu_weights_are_semi_structured(dtype, tmp_path):
    model = squashed(linear(128, 256), dtype)
    export.pack_2_4(model, tmp_path / "x")
    sparse = linear(128, 256, dtype=dtype).cuda()
    export.load_2_4(sparse, tmp_path / "x")
    assert isinstance(sparse[0].weight, torch.sparse.SparseSemiStructuredTensor)
    x = torch.randn(64, 256).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x.cuda()).cpu().float(), model.float()(x.float()), rtol=2e-2, atol=2e-2)
