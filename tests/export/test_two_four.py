"""Packed 2:4 weights: the same bits after loading; models and files that do not fit are refused."""

import contextlib
import random

import pytest
import torch
from export_models import TWO_FOUR, Tied, linear, masked, same_bits, squashed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from stock import StockWeightNorm
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

from sparsekit_ao import SparsityError, export
from sparsekit_ao.export import two_four

HALF = torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


@pytest.mark.parametrize(("dtype", "share"), [(HALF, 0.5625), (torch.bfloat16, 0.5625), (torch.int8, 0.625)])
def test_packed_weights_are_the_same_after_loading(dtype, share, tmp_path):
    model = squashed(linear(64, 256), dtype)
    with torch.no_grad():
        model[0].weight[5, 4:8] = 0  # fewer than two of four
    with torch.device("meta"):  # a default device does not matter
        report = export.pack_2_4(model, tmp_path / "x")
    again = linear(64, 256)
    again[0].weight = nn.Parameter(torch.ones_like(model[0].weight), requires_grad=False)
    export.load_2_4(again, tmp_path / "x")
    assert same_bits(again[0].weight, model[0].weight)
    assert sum(part.nbytes for part in load_file(tmp_path / "x").values()) == share * model[0].weight.nbytes
    assert report.before == model[0].weight.nbytes and report.after == (tmp_path / "x").stat().st_size


def test_negative_zeros_are_zeros_when_packed(tmp_path):
    model, again = squashed(linear(), HALF), linear(dtype=HALF)
    with torch.no_grad():
        model[0].weight[model[0].weight == 0] = -0.0
    export.pack_2_4(model, tmp_path / "x")
    export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again[0].weight, model[0].weight) and not again[0].weight[model[0].weight == 0].signbit().any()


def mixed():
    """A packed layer, a dense one, a bias, a buffer, and a weight that two others share; some behind wrappers."""
    model = nn.ModuleDict({"tied": Tied(8, 8), "norm": nn.BatchNorm1d(4), "fc": squashed(linear(), HALF)})
    with torch.no_grad():
        model["tied"].a.weight.normal_()
    return model


def test_everything_else_is_loaded_too(tmp_path):
    model, again = mixed(), mixed()
    wrapped = nn.ModuleDict({**model, "fc": nn.Sequential(checkpoint_wrapper(model["fc"][0]))})
    assert export.pack_2_4(wrapped, tmp_path / "x").converted == ("fc.0.weight",)
    export.load_2_4(again, tmp_path / "x")
    assert all(same_bits(v, model.state_dict()[k]) for k, v in again.state_dict().items())


def test_a_model_that_ties_what_differs_in_the_file(tmp_path):
    model, again = Tied(), Tied()
    model.b.weight = nn.Parameter(model.a.weight * 2)
    again.half().fc = linear(dtype=HALF)
    model.half().fc = squashed(linear(), HALF)
    export.pack_2_4(model, tmp_path / "x")
    before = again.a.weight.clone()
    with pytest.raises(SparsityError, match="a.weight and b.weight differ, but the model ties them; untie them first"):
        export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again.a.weight, before)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Sequential(linear()), "has no tensor '0.0.weight'; load it into the model that was packed"),
        (lambda: linear(64, 64, dtype=HALF), r"0.weight must be torch.float16 of shape \(64, 64\) for this model, got"),
        (lambda: linear(dtype=torch.bfloat16), r"0.weight must be torch.bfloat16 of shape \(32, 64\) for this model"),
        (lambda: linear(), r"0.weight must be torch.float32 .*; call model.to\(torch.float16\) before"),
        (lambda: nn.Sequential(*linear(dtype=HALF), nn.Linear(2, 2)), "has no tensor '1.weight'"),
        (lambda: nn.Sequential(), "has an unknown tensor '0.weight.metadata'"),
        (lambda: linear(dtype=HALF, device="meta"), "the model is on the meta device; model.to_empty"),
    ],
    ids=range(7),
)
def test_models_that_a_packed_file_does_not_fit(make, text, tmp_path):
    export.pack_2_4(squashed(linear(), HALF), tmp_path / "x")
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(SparsityError, match=text):
        export.load_2_4(model, tmp_path / "x")
    assert all(v.is_meta or torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_damaged_files_are_loaded_or_refused(tmp_path):
    path, random_ = tmp_path / "x", random.Random(0)
    export.pack_2_4(squashed(linear(), HALF), path)
    data, state = path.read_bytes(), load_file(path)
    save_file({**state, "0.weight.metadata": torch.zeros_like(state["0.weight.metadata"])}, path)
    with pytest.raises(SparsityError, match="0.weight: its metadata are not those of a 2:4 weight"):
        export.load_2_4(linear(dtype=HALF), path)
    for _ in range(100):
        damaged = bytearray(data[: random_.choice((len(data), random_.randrange(len(data))))])
        for _ in range(2):
            damaged[random_.randrange(len(damaged))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(SparsityError, SafetensorError):
            export.load_2_4(linear(dtype=HALF), path)


def layers(dtype=HALF, device="cpu"):
    """One layer that fits, one whose shape does not, one that is dense, and an embedding."""
    fits, narrow, dense = linear(), linear(8, 64), linear()
    sparsifiers = [masked(model, **TWO_FOUR) for model in (fits, narrow)]
    model = nn.ModuleDict({"fits": fits, "narrow": narrow, "dense": dense, "table": nn.Embedding(4, 8)})
    return model.to(device, dtype), sparsifiers


@pytest.fixture
def _kernels_on_the_cpu(monkeypatch):
    """torch's 2:4 tensors are made on the CPU, where they cannot be multiplied."""

    def pack(weight):
        if weight.shape == (64, 64):
            raise RuntimeError("the shape is not supported")
        parts = two_four._packed(weight)
        return torch.sparse.SparseSemiStructuredTensorCUTLASS(weight.shape, *parts, None, None, None)

    monkeypatch.setattr(two_four, "DEVICE", "cpu")
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", pack)


@pytest.mark.usefixtures("_kernels_on_the_cpu")
def test_loaded_where_torch_has_kernels_packed_weights_are_semi_structured(tmp_path):
    model = squashed(linear(), HALF)
    export.pack_2_4(model, tmp_path / "x")
    parts = [load_file(tmp_path / "x")[f"0.weight.{part}"] for part in ("values", "metadata")]
    again = linear(dtype=HALF)
    export.load_2_4(again, tmp_path / "x")
    weight = again[0].weight
    assert isinstance(weight, torch.sparse.SparseSemiStructuredTensorCUTLASS) and weight.shape == (32, 64)
    assert torch.equal(weight.packed, parts[0]) and torch.equal(weight.meta, parts[1]) and not weight.requires_grad


@pytest.mark.usefixtures("_kernels_on_the_cpu")
def test_a_loaded_weight_that_torch_refuses_stays_dense_with_a_warning(tmp_path):
    model, again = squashed(linear(64, 64), HALF), linear(64, 64, dtype=HALF)
    export.pack_2_4(model, tmp_path / "x")
    with pytest.warns(UserWarning, match="load_2_4: 0.weight stays dense: torch refuses it: the shape is not"):
        export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again[0].weight, model[0].weight)


@pytest.mark.usefixtures("_kernels_on_the_cpu")
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_weights_that_fit_become_semi_structured_and_others_are_listed(dtype, is_masked):
    model, sparsifiers = layers(dtype)
    if not is_masked:
        for sparsifier in sparsifiers:
            sparsifier.squash_mask()
    weight, dense = model["fits"][0].weight.detach().clone(), model["dense"][0].weight.detach().clone()
    report = export.to_2_4(model)
    packed = model["fits"][0].weight
    assert isinstance(packed, torch.sparse.SparseSemiStructuredTensor) and not packed.requires_grad
    assert torch.equal(two_four._unpacked("fits", packed.packed, packed.meta), weight)
    assert report.converted == ("fits.0.weight",) and (report.before, report.after) == (4096, 2304)
    assert report.left["narrow.0.weight"] == "needs dimension 0 to be a multiple of 32, got 8"
    assert report.left["dense.0.weight"].endswith("the weight is dense")
    assert report.left["table.weight"].startswith("needs the weight of Linear")
    assert same_bits(model["dense"][0].weight, dense) and len(report.left) == 3
    if is_masked:
        with pytest.raises(SparsityError, match="its mask was removed"):
            sparsifiers[0].squash_mask()
        sparsifiers[1].squash_mask()


@pytest.mark.usefixtures("_kernels_on_the_cpu")
def test_what_torch_refuses_stays_dense_and_masks_of_torch_ao_and_int8_are_converted():
    model = nn.Sequential(*linear(64, 64), *linear())
    stock = StockWeightNorm(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    stock.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "1.weight"}])
    stock.step()
    model.half().append(squashed(linear(16, 128), torch.int8)[0])
    report = export.to_2_4(model)
    assert report.converted == ("1.weight", "2.weight")
    assert report.left == {"0.weight": "torch refuses it: the shape is not supported"}
    assert not parametrize.is_parametrized(model[1]) and parametrize.is_parametrized(model[0])


@pytest.mark.usefixtures("_kernels_on_the_cpu")
@pytest.mark.parametrize(
    ("make", "tensors", "text"),
    [
        (lambda: squashed(linear()), None, "no weight fits. .* 0.weight: needs float16 or bfloat16 or int8, got float"),
        (lambda: layers()[0], ["narrow*"], "to_2_4 does not take\n  narrow.0.weight: needs dimension 0 to be a mult"),
        (lambda: layers()[0], ["nothing"], "to_2_4: 'nothing' names no weight of the model"),
    ],
    ids=range(3),
)
def test_models_that_to_2_4_refuses(make, tensors, text):
    model = make()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(SparsityError, match=text):
        export.to_2_4(model, tensors)
    assert all(map(torch.equal, model.parameters(), before))


def test_to_2_4_on_the_cpu_says_what_to_do():
    with pytest.raises(SparsityError, match=r"no weight of the model is on CUDA.* Call model.cuda\(\) first"):
        export.to_2_4(layers()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [True, False])
def test_converted_on_a_gpu_weights_give_the_same_outputs(dtype, is_masked):
    model = linear(128, 256)
    sparsifier = masked(model, **TWO_FOUR)
    if not is_masked:
        sparsifier.squash_mask()
    model.to("cuda", dtype)
    x = torch.randn(64, 256).to("cuda", dtype)
    with torch.no_grad():
        expected = model(x)
        report = export.to_2_4(model)
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    assert report.converted == ("0.weight",) and report.after < 0.7 * report.before
    assert isinstance(model[0].weight, torch.sparse.SparseSemiStructuredTensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_loaded_on_a_gpu_weights_are_semi_structured(dtype, tmp_path):
    model = squashed(linear(128, 256), dtype)
    export.pack_2_4(model, tmp_path / "x")
    sparse = linear(128, 256, dtype=dtype).cuda()
    export.load_2_4(sparse, tmp_path / "x")
    assert isinstance(sparse[0].weight, torch.sparse.SparseSemiStructuredTensor)
    x = torch.randn(64, 256).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x.cuda()).cpu().float(), model.float()(x.float()), rtol=2e-2, atol=2e-2)
