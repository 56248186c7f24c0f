"""export.quantize: torchao keeps every zero, in the orders that work; the others are clear errors."""

import pytest
import torch
from exported import batches, looks, mlp, pruned, same

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns

torchao = pytest.importorskip("torchao.quantization")

CONFIGS = {
    "int8 weights": lambda: torchao.Int8WeightOnlyConfig(),
    "int8 weights and activations": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
    "int4 weights": lambda: torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)),
    "int4 weights, int8 activations": lambda: torchao.Int8DynamicActivationIntxWeightConfig(torch.int4),
    "float8 weights": lambda: torchao.Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("pattern", [patterns.n_m(2, 4), patterns.unstructured(0.9)], ids=["2:4", "unstructured"])
def test_every_zero_is_kept(config, pattern):
    model, _ = pruned(pattern=pattern)
    before = looks(model)
    converted, report = export.quantize(model, config(), batches())
    assert same(before, model)
    assert set(report.converted) >= {"0.weight", "2.weight"} and report.after < 0.5 * report.before
    assert 0 < report.difference < 0.3
    for k in (0, 2):
        assert int((converted[k].weight.dequantize() == 0).sum()) >= int((model[k].weight == 0).sum())
        assert not bool((converted[k].weight.dequantize()[model[k].weight == 0]).any())


def test_on_a_masked_model_the_order_is_named():
    model, sparsifier = pruned(squash=False)
    with pytest.raises(KeyError):  # torchao's own error
        torchao.quantize_(pruned(squash=False)[0], torchao.Int8WeightOnlyConfig())
    before = looks(model)
    with pytest.raises(SparsityError, match="0.weight still has its mask.*sparsifier.prepare, step, squash_mask"):
        export.quantize(model, torchao.Int8WeightOnlyConfig(), batches())
    assert same(before, model)
    sparsifier.squash_mask()
    assert export.quantize(model, torchao.Int8WeightOnlyConfig(), batches())[1].converted


def test_training_with_simulated_quantization_in_the_order_that_works():
    from torchao.quantization.qat import QATConfig

    base = torchao.Int8DynamicActivationIntxWeightConfig(torch.int4, torchao.PerGroup(32))
    masked, _ = pruned(squash=False)
    with pytest.raises(TypeError):  # torchao's own error
        torchao.quantize_(masked, QATConfig(base, step="prepare"))
    with pytest.raises(SparsityError, match=r"0.weight still.*'prepare'\), sparsifier.prepare, training"):
        export.quantize(pruned(squash=False)[0], QATConfig(base, step="prepare"), batches())
    with pytest.raises(SparsityError, match="call torchao.quantize_ itself"):
        export.quantize(pruned()[0], QATConfig(base, step="prepare"), batches())

    model = mlp()
    torchao.quantize_(model, QATConfig(base, step="prepare"))
    sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4))
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        sparsifier.step()
        model(batch).square().sum().backward()
        optimizer.step()
    with pytest.raises(SparsityError, match=r"0.weight still has its mask"):
        export.quantize(model, QATConfig(base, step="convert"), batches())
    sparsifier.squash_mask()
    converted, report = export.quantize(model, QATConfig(base, step="convert"), batches())
    assert {"0.weight", "2.weight"} <= set(report.converted)
    for k in (0, 2):
        zero = ~(sparsifier.mask(f"{k}.weight") != 0)
        assert not bool(converted[k].weight.dequantize()[zero].any())


def test_what_torchao_refuses_or_leaves_is_an_error():
    model, _ = pruned()
    before = looks(model)
    with pytest.raises(SparsityError, match="torchao refuses this model with IntxWeightOnlyConfig"):
        export.quantize(model, torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(48)), batches())
    skipped = torchao.FqnToConfig({"0": torchao.Int8WeightOnlyConfig()})
    with pytest.raises(SparsityError, match=r"torchao (left 2.weight|refuses this model)"):
        export.quantize(model, skipped, batches())
    assert same(before, model)


def test_sparse_float8_needs_2_4_on_cuda():
    from torchao.quantization.quantize_.workflows.float8.float8_packing_format import Float8PackingFormat

    def config():
        return torchao.Float8DynamicActivationFloat8WeightConfig(
            granularity=torchao.PerRow(), packing_format=Float8PackingFormat.SPARSE_2D_DATA_2D_METADATA
        )

    model = pruned(pattern=patterns.n_m(2, 4))[0].bfloat16()
    with pytest.raises(SparsityError, match=r"0.weight: needs a weight on CUDA for sparse kernels, got one on cpu"):
        export.quantize(model, config(), batches())
    with pytest.raises(SparsityError, match=r"0.weight: needs at most 2 nonzeros in every 4"):
        export.quantize(pruned()[0].bfloat16(), config(), batches())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sparse_float8_on_cuda():
    from torchao.quantization.quantize_.workflows.float8.float8_packing_format import Float8PackingFormat

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("float8 with 2:4 needs compute capability 9.0")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    model, _ = pruned(model.bfloat16().cuda(), pattern=patterns.n_m(2, 4), names=["0.weight"])
    config = torchao.Float8DynamicActivationFloat8WeightConfig(
        granularity=torchao.PerRow(), packing_format=Float8PackingFormat.SPARSE_2D_DATA_2D_METADATA
    )
    with pytest.raises(SparsityError, match=r"1.weight: needs at most 2 nonzeros"):
        export.quantize(model, config, [torch.randn(64, 256).bfloat16().cuda()], tensors=["*.weight"])
    model, _ = pruned(model, pattern=patterns.n_m(2, 4), names=["1.weight"])
    small, report = export.quantize(model, config, [torch.randn(64, 256).bfloat16().cuda()])
    assert sorted(report.converted) == ["0.weight", "1.weight"] and report.after < 0.4 * report.before
    assert ((small[0].weight.dequantize() == 0) | (model[0].weight != 0)).all()
