"""export.quantize: torchao keeps every zero, in the orders that work; the others are clear errors."""

import copy

import pytest
import torch
from export_models import batches, looks, mlp, pruned, same
from networks import Net
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns
from sparsekit_ao.export.quantization import _checked_tensors
from sparsekit_ao.removal import shrink

torchao = pytest.importorskip("torchao.quantization")

INT8 = torchao.Int8WeightOnlyConfig()
INT4 = torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32))
CONFIGS = {
    "int8 weights": lambda: INT8,
    "int8 weights and activations": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
    "int4 weights": lambda: INT4,
    "int4 weights, int8 activations": lambda: torchao.Int8DynamicActivationIntxWeightConfig(torch.int4),
    "float8 weights": lambda: torchao.Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("pattern", [patterns.n_m(2, 4), patterns.unstructured(0.9)], ids=["2:4", "unstructured"])
def test_every_zero_is_kept(config, pattern):
    model, _ = pruned(pattern=pattern)
    before = looks(model)
    converted, report = export.quantize(model, config(), (b for b in batches()))
    assert same(before, model)
    assert set(report.converted) >= {"0.weight", "2.weight"} and report.after < 0.5 * report.before
    assert 0 < report.difference < 0.3
    for k in (0, 2):
        assert not bool((converted[k].weight.dequantize()[model[k].weight == 0]).any())


def test_training_with_simulated_quantization_in_the_order_that_works():
    from torchao.quantization.qat import QATConfig

    base = torchao.Int8DynamicActivationIntxWeightConfig(torch.int4, torchao.PerGroup(32))
    with pytest.raises(KeyError):  # torchao's own error
        torchao.quantize_(pruned(squash=False)[0], INT8)
    with pytest.raises(TypeError):  # torchao's own error
        torchao.quantize_(pruned(squash=False)[0], QATConfig(base, step="prepare"))
    with pytest.raises(SparsityError, match="0.weight still has its mask.*sparsifier.prepare, step, squash_mask"):
        export.quantize(pruned(squash=False)[0], INT8, batches())
    with pytest.raises(SparsityError, match=r"0.weight still.*'prepare'\), sparsifier.prepare, training"):
        export.quantize(pruned(squash=False)[0], QATConfig(base, step="prepare"), batches())
    with pytest.raises(SparsityError, match="by torchao.quantize_ itself. The order that works: torchao"):
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
    with pytest.raises(SparsityError, match=r"torchao (left 2.weight|refuses this model)"):
        export.quantize(model, torchao.FqnToConfig({"0": INT8}), batches())
    assert same(before, model)
    report = export.quantize(model, torchao.FqnToConfig({"0": INT8, "2": INT8}), batches())[1]
    assert report.converted == ("0.weight", "2.weight") and list(report.left) == ["4.weight"]


def sparse_float8():
    from torchao.quantization.quantize_.workflows.float8.float8_packing_format import Float8PackingFormat

    return torchao.Float8DynamicActivationFloat8WeightConfig(
        granularity=torchao.PerRow(), packing_format=Float8PackingFormat.SPARSE_2D_DATA_2D_METADATA
    )


def test_sparse_float8_needs_2_4_on_cuda():
    model = pruned(pattern=patterns.n_m(2, 4))[0].bfloat16()
    with pytest.raises(SparsityError, match=r"0.weight: needs a weight on CUDA for sparse kernels, got one on cpu"):
        export.quantize(model, sparse_float8(), batches())
    with pytest.raises(SparsityError, match=r"0.weight: needs at most 2 nonzeros in every 4"):
        export.quantize(pruned()[0].bfloat16(), sparse_float8(), batches())


def test_only_2_4_weights_may_be_packed_as_2_4():
    class SparseTensor(torch.Tensor):
        """As torchao's: a packed weight."""

        def dequantize(self):
            return self.as_subclass(torch.Tensor)

    model, _ = pruned(pattern=patterns.n_m(2, 4), names=["0.weight"])
    packed, layers = copy.deepcopy(model), export.check(model, "quantize", ["0.weight", "2.weight"])
    packed[0].weight = nn.Parameter(packed[0].weight.detach().as_subclass(SparseTensor))
    _checked_tensors(layers, set(), packed)
    packed[2].weight = nn.Parameter(packed[2].weight.detach().as_subclass(SparseTensor))
    with pytest.raises(SparsityError, match=r"packs 2\.weight as 2:4 as well, which needs at most 2 .*FqnToConfig"):
        _checked_tensors(layers, set(), packed)


def around(function):
    """A pruned layer, and what is computed around it."""
    return Net(function, layer=pruned(nn.Sequential(nn.Linear(64, 64)), names=["0.weight"])[0][0])


def with_a_generator():
    model = around(lambda self, x: self.layer(x))
    model.state = (i for i in range(3))
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (with_a_generator, "or it cannot be copied: cannot pickle 'generator' object"),
        (lambda: around(lambda self, x: self.layer(x).log()), "one of the models returns inf or nan"),
        (lambda: around(lambda self, x: (self.layer(x) * 1e3).long()), "or other integers"),
        (lambda: around(lambda self, x: self.layer(x) and None), None),
        (lambda: around(lambda self, x: (self.layer(x), None)[1]), "the model returns no tensor"),
    ],
    ids=["generator", "nan", "integers", "raises", "nothing"],
)
def test_what_cannot_be_compared_is_refused(make, text):
    model = make()
    before = looks(model)
    with pytest.raises(SparsityError if text else RuntimeError, match=text):
        export.quantize(model, INT4, batches())
    assert same(before, model)


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda self, x: self.layer(x.mul_(2)), 0.1),
        (lambda self, x: nn.functional.dropout(self.layer(x), 0.5, training=True), 0.1),
        (lambda self, x: self.layer(self.layer(x) * 10), 0.2),
    ],
    ids=["writes to its input", "always random", "calls a layer twice"],
)
def test_both_models_see_the_same_inputs_and_random_numbers(function, bound):
    model, inputs = around(function).train(), batches()
    kept, state = [b.clone() for b in inputs], torch.get_rng_state()
    converted, report = export.quantize(model, INT8, inputs)
    assert 0 < report.difference < bound and report.converted == ("layer.weight",)
    assert all(map(torch.equal, kept, inputs)) and torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in [*model.modules(), *converted.modules()])


def test_outputs_of_the_first_batch_are_compared():
    model, inputs, seen = pruned()[0], batches(), []
    report = export.quantize(model, INT8, iter(inputs), forward=lambda m, batch: seen.append(batch) or m(batch))[1]
    assert len(seen) == 2 and all(torch.equal(batch, inputs[0]) for batch in seen)
    assert report.difference == export.quantize(model, INT8, inputs[:1])[1].difference


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (batches()[0], r"got one tensor .* give \[batch\]"),
        ({"input": batches()[0]}, "got dict"),
        (iter(()), "there are no batches; an iterator that was used up"),
    ],
)
def test_batches_are_a_list_of_batches(inputs, text):
    with pytest.raises(SparsityError, match=text):
        export.quantize(pruned()[0], INT8, inputs)


def test_layers_behind_checkpoint_wrappers_and_with_other_strides():
    model, _ = pruned()
    model[2].weight = nn.Parameter(model[2].weight.detach().T.contiguous().T)
    want = export.quantize(model, INT8, batches())[0](batches()[0])
    converted, report = export.quantize(nn.Sequential(checkpoint_wrapper(model[0]), *model[1:]), INT8, batches())
    assert report.converted[:2] == ("0.weight", "2.weight")
    assert torch.equal(converted(batches()[0]), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sparse_float8_on_cuda():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("float8 with 2:4 needs compute capability 9.0")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    model, _ = pruned(model.bfloat16().cuda(), pattern=patterns.n_m(2, 4), names=["0.weight"])
    inputs = [torch.randn(64, 256).bfloat16().cuda()]
    with pytest.raises(SparsityError, match=r"1.weight: needs at most 2 nonzeros"):
        export.quantize(model, sparse_float8(), inputs, tensors=["*.weight"])
    model, _ = pruned(model, pattern=patterns.n_m(2, 4), names=["1.weight"])
    small, report = export.quantize(model, sparse_float8(), inputs)
    assert sorted(report.converted) == ["0.weight", "1.weight"] and report.after < 0.4 * report.before
    assert ((small[0].weight.dequantize() == 0) | (model[0].weight != 0)).all()


def test_weights_that_torchao_has_quantized_are_refused_by_prepare():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torchao.quantize_(model[0], INT8)
    with pytest.raises(SparsityError, match=r"0.weight' is a Int8\w*, which torchao has quantized; prune the model"):
        ScopeSparsifier().prepare(model)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, exclude=["0.weight"])
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["1.weight"]


def test_a_smaller_model_without_zeros_is_quantized_by_torchao_itself():
    small, _ = shrink(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), batches()[0])
    with pytest.raises(SparsityError, match="Smaller models have no zeros to keep: quantize them by torchao.quantize_"):
        export.quantize(small, INT8, batches())
    torchao.quantize_(small, INT8)
    assert small(batches()[0]).isfinite().all()
    with pytest.raises(SparsityError, match=r"tensors=\[...\]$"):
        export.check(mlp(), "to_2_4")
