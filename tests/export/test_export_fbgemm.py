"""export.fbgemm: the kernel's integers are those of dense int8, and converted models can be saved and loaded."""

import copy
import csv
import io
from pathlib import Path

import pytest
import torch
from exported import batches, looks, mlp, pruned, same
from torch import nn

from sparsekit_ao import SparsityError, export, patterns
from sparsekit_ao.export.fbgemm import LEAST_ZEROS
from sparsekit_ao.export.int8_linear import SparseInt8Linear
from sparsekit_ao.export.ranges import Range, Steps

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this build of torch has no fbgemm"
)

SHAPES = [(1, 4), (3, 16), (16, 4), (33, 100), (64, 64), (130, 516)]
BATCHES = [1, 2, 17, 64]
LEVELS = [0.5, 0.9, 1.0]
KINDS = ("dense", "sparse")


def sparse_linear(rows, columns, level, bias=True, extreme=False):
    """A Linear of which a fraction of the 1x4 blocks is zero; with `extreme`, all others have the largest int8."""
    generator = torch.Generator().manual_seed(rows * columns)
    layer = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        weight = torch.randn(rows, columns, generator=generator)
        weight = torch.ones_like(weight) if extreme else weight
        drop = torch.rand(rows, columns // 4, 1, generator=generator) < level
        layer.weight.copy_((weight.unflatten(1, (-1, 4)) * ~drop).flatten(1))
    return layer


def dense_int8(layer, x):
    """The same integers through torch's dense int8 kernel."""
    weight = torch._make_per_channel_quantized_tensor(
        layer.int8_weight(), layer.scales.double(), torch.zeros(len(layer.scales), dtype=torch.long), 0
    )
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        packed = torch.ops.quantized.linear_prepack(weight, layer.bias)
        q = torch.quantize_per_tensor(x, layer._inputs.scale, layer._inputs.zero_point, torch.quint8)
        return torch.ops.quantized.linear(q, packed, layer._outputs.scale, layer._outputs.zero_point).int_repr()
    finally:
        torch.backends.quantized.engine = before


def in_float(layer, x):
    """The same product in float64, in steps of the output, before rounding."""
    q = torch.quantize_per_tensor(x, layer._inputs.scale, layer._inputs.zero_point, torch.quint8).dequantize()
    weight = layer.int8_weight().double() * layer.scales.double()[:, None]
    y = torch.nn.functional.linear(q.double(), weight, None if layer.bias is None else layer.bias.double())
    return (y / layer._outputs.scale + layer._outputs.zero_point).clamp(0, 255)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extreme", [False, True])
def test_the_kernel_is_dense_int8_within_a_step_of_float(shape, extreme):
    for level in LEVELS:
        linear = sparse_linear(*shape, level, bias=shape[0] != 16, extreme=extreme)
        for rows in BATCHES:
            x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
            x = x.sign().clamp(min=0) if extreme else x  # activations of 0 and 127 against weights of 127
            low, high = (float(t) for t in linear(x).detach().aminmax())
            seen = Range(inputs=(float(x.min()), float(x.max())), outputs=(low, high))
            layer = SparseInt8Linear.of(linear, seen)
            y = layer(x)
            steps = torch.round(y / layer._outputs.scale) + layer._outputs.zero_point
            assert torch.equal(steps.int(), dense_int8(layer, x).int())
            assert (steps - in_float(layer, x)).abs().max() <= 1


def test_eight_bits_of_activations_would_be_wrong_silently():
    linear = sparse_linear(8, 64, 0.0, extreme=True)
    x = torch.ones(1, 64)
    seen = Range(inputs=(0.0, 1.0), outputs=(0.0, 70.0))
    wrong = SparseInt8Linear.of(linear, seen, bits=8)
    steps = torch.round(wrong(x) / wrong._outputs.scale) + wrong._outputs.zero_point
    assert (steps - in_float(wrong, x)).abs().max() > 100
    model, _ = pruned()
    for bits in (8, 0, True, 6.5):
        with pytest.raises(SparsityError, match="bits must be 1 to 7"):
            export.fbgemm(model, batches(), bits=bits)


def test_a_model_is_converted_and_reported():
    model, _ = pruned()
    before, engine = looks(model), torch.backends.quantized.engine
    converted, report = export.fbgemm(model, batches())
    assert same(before, model) and torch.backends.quantized.engine == engine
    assert report.converted == ("0.weight", "2.weight")
    assert dict(report.left) == {"4.weight": "less than 10% of it is zero"}
    assert 0 < report.difference < 0.1 and report.after < 0.15 * report.before
    assert "bytes: 66,304 -> " in str(report) and "left: 4.weight" in str(report)
    assert [type(m).__name__ for m in converted][::2] == ["SparseInt8Linear", "SparseInt8Linear", "Linear"]
    assert "in_features=64, out_features=128, bias=True, blocks=" in repr(converted[0])
    one, rest = export.fbgemm(model, batches(), tensors=["2.*"])
    assert rest.converted == ("2.weight",) and type(one[0]) is nn.Linear
    assert rest.left["0.weight"] == "not in `tensors`"


def test_values_outside_the_range_are_clamped():
    layer = SparseInt8Linear.of(sparse_linear(8, 16, 0.5), Range(inputs=(-1.0, 2.0), outputs=(-9.0, 9.0)))
    x = torch.randn(4, 16) * 10
    assert torch.equal(layer(x), layer(x.clamp(-1.0, 2.0)))
    q = torch.quantize_per_tensor(x.clamp(layer._inputs.low, layer._inputs.high), *_steps(layer._inputs), torch.quint8)
    assert int(q.int_repr().max()) == 127 and int(q.int_repr().min()) == 0


def _steps(steps):
    return steps.scale, steps.zero_point


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_inputs_of_any_rank(shape):
    layer = export.fbgemm(pruned()[0], batches())[0][0]
    x = torch.randn(shape)
    assert layer(x).shape == (*shape[:-1], 128)
    assert torch.equal(layer(x), layer(x.reshape(-1, 64)).reshape(*shape[:-1], 128))
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert (layer.in_features, layer.out_features) == (64, 128)
    with pytest.raises(SparsityError, match="the layer has 64 inputs, got a tensor"):
        layer(torch.randn(3, 60))


def test_only_a_whole_model_on_the_cpu_in_float32():
    converted, _ = export.fbgemm(pruned()[0], batches())
    x, y = batches()[0], converted(batches()[0])
    assert torch.equal(converted.float().cpu().eval()(x), y)
    with pytest.raises(SparsityError, match="on the CPU in float32 only, not as torch.bfloat16 on cpu"):
        converted.bfloat16()


def test_copies_pickles_and_state_dicts_give_the_same_bits(tmp_path):
    from safetensors.torch import load_file, save_file

    converted, _ = export.fbgemm(pruned()[0], batches())
    x = batches()[1]
    want = converted(x)
    assert torch.equal(copy.deepcopy(converted)(x), want)
    buffer = io.BytesIO()
    torch.save(converted, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), want)
    save_file(converted.state_dict(), tmp_path / "model.safetensors")
    fresh = export.load_fbgemm(mlp(), load_file(tmp_path / "model.safetensors"))
    assert torch.equal(fresh(x), want)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.25 * 4 * sum(p.numel() for p in mlp().parameters())
    torch.save(converted.state_dict(), tmp_path / "model.pt")
    other, _ = export.fbgemm(pruned(nn.Sequential(*map(copy.deepcopy, mlp())))[0], batches(1))
    assert not torch.equal(other(x), want)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(other(x), want)


DAMAGED = [
    ("0.columns", lambda t: t + 100, "columns must be from 0 to 15, got"),
    ("0.counts", lambda t: t + 1, "counts must add up to"),
    ("0.blocks", lambda t: t.float(), "blocks must be torch.int8 of 2 dimensions, got torch.float32 of 2"),
    ("0.scales", lambda t: t * torch.nan, "scales must be positive"),
    ("0.steps", lambda t: t * 2.1, "a largest value of at most 127, got"),
    ("0.shape", lambda t: t * 2, r"counts must have shape \(256,\), got \(128,\)"),
    ("0.shape", lambda t: t[:1], "shape must be"),
    ("0.bias", lambda t: t[:3], "bias must have shape"),
    ("0.bias", lambda t: None, "with bias=False inside the model, got Linear"),
    ("0.blocks", lambda t: None, "the state dict is of another model: 0.columns is in one only"),
    ("4.weight", lambda t: t[:1], r"4.weight of the model is \(3, 64\) on cpu, in the state dict \(1, 64\)"),
]


@pytest.mark.parametrize(("key", "change", "text"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_state_dict_is_refused_before_anything_changes(key, change, text):
    converted, _ = export.fbgemm(pruned()[0], batches(1))
    changed = {**converted.state_dict(), key: change(converted.state_dict()[key])}
    state = {k: t for k, t in changed.items() if t is not None}
    model = mlp()
    before = looks(model)
    with pytest.raises(SparsityError, match=f"load_fbgemm: .*{text}"):
        export.load_fbgemm(model, state)
    assert same(before, model)
    with pytest.raises(RuntimeError, match=r"0 holds no SparseInt8Linear that fits|Missing key|size mismatch"):
        converted.load_state_dict(state)


def test_a_loaded_model_shares_no_memory_and_other_tensors_may_be_named_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = pruned()[0][0]
            self.register_buffer("blocks", torch.ones(2))

        def forward(self, x):
            return self.layer(x)

    converted, _ = export.fbgemm(Model(), batches())
    fresh = export.load_fbgemm(Model().eval(), converted.state_dict())
    assert fresh.layer.blocks.data_ptr() != converted.layer.blocks.data_ptr() and not fresh.layer.training
    assert torch.equal(fresh(batches()[0]), converted(batches()[0]))
    with torch.device("meta"):
        empty = mlp()
    with pytest.raises(SparsityError, match="to_empty"):
        export.load_fbgemm(empty, export.fbgemm(pruned()[0], batches())[0].state_dict())


def test_a_state_dict_of_another_model_is_refused():
    converted, _ = export.fbgemm(pruned()[0], batches())
    for model in (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))):
        before = looks(model)
        with pytest.raises(SparsityError, match="load_fbgemm: "):
            export.load_fbgemm(model, converted.state_dict())
        assert same(before, model)


def test_a_converted_model_compiles():
    converted, _ = export.fbgemm(pruned()[0], batches())
    x = batches()[2]
    with torch.no_grad():
        assert torch.equal(torch.compile(converted, backend="eager")(x), converted(x))


def test_a_transformer_layer_that_reads_its_weights_itself_is_refused():
    layer = nn.TransformerEncoderLayer(64, 2, dim_feedforward=64, batch_first=True)
    model, _ = pruned(layer, names=["linear1.weight"])
    before = looks(model)
    with pytest.raises(SparsityError, match="the converted model does not run"):
        export.fbgemm(model, [torch.randn(2, 3, 64)])
    assert same(before, model)


def test_forward_can_be_given():
    model, _ = pruned()
    rows = [{"x": batch} for batch in batches()]
    _, report = export.fbgemm(model, rows, forward=lambda m, batch: {"out": m(batch["x"])})
    assert report.converted == ("0.weight", "2.weight")


def test_steps_hold_zero_and_the_ends():
    for low, high in ((-1.0, 3.0), (0.5, 2.0), (-3.0, -1.0), (0.0, 0.0), (-1e-42, 1e-42)):
        steps = Steps.of(low, high, bits=7)
        assert 0 <= steps.zero_point <= 127 and steps.low <= 0 <= steps.high
        if high > 1e-30:
            assert abs(steps.high - max(high, 0)) <= steps.scale and abs(steps.low - min(low, 0)) <= steps.scale


def test_the_committed_figures_are_those_of_the_page():
    root = Path(__file__).parent.parent.parent
    page = (root / "docs/export.md").read_text()
    with (root / "examples/benchmarks/results/fbgemm_linear.csv").open() as file:
        rows = list(csv.DictReader(file))
    for level, batch in {(r["level"], r["batch"]) for r in rows}:
        own = [r for r in rows if (r["level"], r["batch"]) == (level, batch)]
        assert [r["caches"] for r in own] == ["warm", "cold"]
        cells = [c for r in own for c in (*(f"{r[f'{k} int8 ms']} ms" for k in KINDS), r["times dense int8"])]
        assert f"| {float(level):.0%} | {batch} | {' | '.join(cells)} |" in page
    best = [float(r["times dense int8"]) for r in rows if (r["level"], r["caches"]) == ("0.9", "warm")]
    assert max(best) >= 1.8


def test_the_least_level_is_taken_whatever_its_budget_rounds_to():
    for columns in (60, 64, 72):
        model, _ = pruned(nn.Sequential(nn.Linear(columns, 3)), patterns.blocks(1, 4, LEAST_ZEROS), ["0.weight"])
        assert export.check(model, "fbgemm")
