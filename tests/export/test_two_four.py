"""2:4 weights become torch's tensors for CUDA; those that do not fit stay dense, with the reason."""

import pytest
import torch
from export_models import TWO_FOUR, linear, masked, same_bits, squashed
from stock import StockWeightNorm
from torch import nn
from torch.nn.utils import parametrize
from torch.sparse import _semi_structured_conversions as conversions

from sparsekit_ao import SparsityError, export
from sparsekit_ao.export import two_four

HALF = torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


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
        parts = conversions.sparse_semi_structured_from_dense_cutlass(weight)
        return torch.sparse.SparseSemiStructuredTensorCUTLASS(weight.shape, *parts, None, None, None)

    monkeypatch.setattr(two_four, "DEVICE", "cpu")
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", pack)


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
    assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(packed.packed, packed.meta), weight)
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
    model = layers()[0]
    with pytest.raises(SparsityError, match=r"no weight of the model is on CUDA.* Call model.cuda\(\) first"):
        export.to_2_4(model)
    assert [layer.fqn for layer in export.check(model, "to_2_4", ["fits*"])] == ["fits.0.weight"]


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
