"""Layers whose groups of rows keep the same inputs: the same outputs and gradients, wherever torch goes; the others."""

import copy

import pytest
import torch
from export_models import Tied, linear, looks, masked, same, squashed
from torch import nn
from torch.ao.pruning import FakeSparsity
from torch.nn.utils import parametrize

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns

GROUPS = {"pattern": patterns.row_groups(8, 0.75)}


def mlp(dtype=torch.float32, squash=True, bias=True):
    """Two layers of groups of rows, and one that stays dense."""
    torch.manual_seed(0)
    sizes = (64, 48), (48, 32), (32, 5)
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b, bias=bias), nn.GELU())][:-1]
    model = nn.Sequential(*layers).to(dtype)
    sparsifier = masked(model, ["0.weight", "2.weight"], **GROUPS)
    if squash:
        sparsifier.squash_mask()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3)])
def test_outputs_and_gradients_are_those_of_the_pruned_model(dtype, squash, bias, shape):
    model = mlp(dtype, squash, bias)
    converted = copy.deepcopy(model)
    report = export.to_gathered(converted)
    assert report.converted == ("0.weight", "2.weight") and list(report.left) == ["4.weight"]
    assert 2 * report.after < report.before == sum(model[at].weight.nbytes for at in (0, 2))
    x = torch.randn(*shape, 64, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [m(i) for m, i in zip((model, converted), inputs, strict=True)]
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(outputs[1], outputs[0], **tolerance)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **tolerance)
    for at in (0, 2):
        layer, old = converted[at], model[at]
        assert isinstance(layer, export.GatheredLinear)
        weight = old.weight if squash else old.parametrizations.weight.original
        assert torch.equal(layer.dense_weight(), old.weight)
        gradient = weight.grad.unflatten(0, (-1, 8)).take_along_dim(layer.indices[:, None], 2)
        torch.testing.assert_close(layer.weight.grad, gradient, **tolerance)
        if bias:
            torch.testing.assert_close(layer.bias.grad, old.bias.grad, **tolerance)


def test_kept_weights_train_and_dropped_ones_stay_away():
    model = mlp()
    export.to_gathered(model)
    before = model[0].dense_weight().detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    after = model[0].dense_weight()
    assert torch.equal(after != 0, before != 0) and not torch.equal(after, before)


def test_state_dicts_and_copies():
    model, other = mlp(), mlp()
    with torch.no_grad():
        other[0].weight *= 2
    for m in (model, other):
        export.to_gathered(m)
    assert model.state_dict().keys() == {f"{at}.{n}" for at in (0, 2) for n in ("weight", "bias", "indices")} | {
        "4.weight",
        "4.bias",
    }
    assert model[0].weight.shape == (6, 8, 16) and model[0].indices.shape == (6, 16)
    copied, x = copy.deepcopy(model), torch.randn(3, 64)
    assert torch.equal(copied(x), model(x))
    copied.load_state_dict(other.state_dict())
    assert torch.equal(copied(x), other(x)) and not torch.equal(copied(x), model(x))


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
def test_compiled_as_one_graph(shape):
    model, x = mlp(), torch.randn(*shape, 64)
    export.to_gathered(model)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning")  # of torch.onnx
def test_exported_by_torch_and_run_by_onnxruntime_with_any_number_of_tokens(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = mlp().eval()
    export.to_gathered(model)
    batch, x = torch.export.Dim("batch"), torch.randn(3, 64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    torch.onnx.export(program, f=tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(program.module()(x), model(x))
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x).detach())


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"block_shape": (4, 1), "scope_shape": (1, -1), "sparsity_level": 0.5}, 4),
        ({"block_shape": (5, 1), "scope_shape": (1, -1), "sparsity_level": 0.5, "edge": "partial"}, 2),  # of 5, 5, 2
        ({"pattern": patterns.columns(0.5)}, 12),
    ],
)
def test_groups_are_the_largest_that_the_mask_has(config, rows):
    model = nn.Sequential(nn.Linear(16, 12))
    if config.get("edge"):
        with torch.no_grad():  # the last group of two keeps its inputs, as the last two of the one before
            model[0].weight[5:] = model[0].weight[5]
    masked(model, **config)
    if "edge" in config:
        with pytest.raises(SparsityError, match="needs equal groups of rows that keep the same"):
            export.to_gathered(model)
        return
    export.to_gathered(model)
    assert model[0].weight.shape == (12 // rows, rows, 8)


def test_kept_values_that_are_zero_stay_while_the_mask_is_there():
    model = mlp(squash=False)
    with torch.no_grad():
        model[0].parametrizations.weight.original.zero_()
    export.to_gathered(model)
    assert model[0].weight.shape == (6, 8, 16) and not model[0].weight.any()


def test_a_few_kept_values_that_are_zero_stay_after_squash():
    model, x = mlp(), torch.randn(3, 64)
    with torch.no_grad():
        for row in (0, 17, 47):
            model[0].weight[row, model[0].weight[row].nonzero()[0]] = 0
    expected = model(x)
    export.to_gathered(model)
    assert model[0].weight.shape == (6, 8, 16) and int((model[0].weight == 0).sum()) == 3
    torch.testing.assert_close(model(x), expected)


def test_masks_of_torch_ao_are_converted():
    model, groups = linear(), squashed(linear(), **GROUPS)
    parametrize.register_parametrization(model[0], "weight", FakeSparsity(groups[0].weight != 0))
    export.to_gathered(model)
    assert torch.equal(model[0].dense_weight(), groups[0].weight)


def test_frozen_weights_stay_frozen_and_eval_mode_stays():
    model = mlp().eval().requires_grad_(False)
    export.to_gathered(model)
    assert not any(p.requires_grad for p in model.parameters()) and not any(m.training for m in model.modules())


class Reader(nn.Linear):
    """A layer whose owner reads its weight."""


def pruned(layer):
    return squashed(nn.Sequential(layer), **GROUPS)


def uneven():
    model = squashed(linear(), **GROUPS)
    with torch.no_grad():
        model[0].weight[8:16, :40] = 1
    return model


def tied():
    model = Tied()
    masked(model, ["a.weight"], **GROUPS)
    return model


def hooked():
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    return model


def in_an_encoder():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    masked(model, ["0.linear1.weight"], **GROUPS).squash_mask()
    return model


REFUSED = [
    (lambda: squashed(linear(), pattern=patterns.unstructured(0.5)), "0.weight: needs equal groups .* after row 0"),
    (lambda: squashed(linear()), "0.weight: needs equal groups of rows that keep the same inputs .*they change"),
    (uneven, r"0.weight: needs the same number of inputs in each group of rows, got 16 in rows 0:8, 4\d in rows 8:16"),
    (lambda: squashed(linear(), pattern=patterns.rows(0.5)), "0.weight: needs the same number of inputs|equal groups"),
    (lambda: pruned(Reader(64, 32)), "0.weight: needs a plain nn.Linear, got Reader"),
    (
        lambda: squashed(nn.Sequential(nn.Conv1d(64, 32, 1)), **GROUPS),
        "needs the weight of Linear, got weight of Conv1d",
    ),
    (hooked, "0.weight: needs a plain nn.Linear, got Linear, or one with hooks"),
    (in_an_encoder, "0.linear1.weight needs a module around it .*, got TransformerEncoderLayer; name"),
    (
        lambda: squashed(nn.Linear(64, 32), **GROUPS),
        "weight needs a module around it that calls it and .*, got Linear;",
    ),
    (tied, "needs a weight of its own, but it is shared with b.weight"),
    (lambda: linear(), "no weight is masked, and none has a tenth of zeros"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_groups_is_refused_before_anything_changes(make, text):
    model = make()
    before = looks(model)
    with pytest.raises(SparsityError, match=text):
        export.to_gathered(model)
    assert same(before, model)


def test_a_dense_weight_that_is_named_and_one_of_zeros():
    with pytest.raises(SparsityError, match="4.weight: needs some of 32 inputs to be kept, got 32"):
        export.to_gathered(mlp(), ["4.weight"])
    model = linear()
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(SparsityError, match="0.weight: needs some of 64 inputs to be kept, got 0"):
        export.to_gathered(model)


def test_a_single_output_is_a_group():
    model = squashed(linear(1, 64), pattern=patterns.row_groups(1, 0.5))
    export.to_gathered(model)
    assert model[0].weight.shape == (1, 1, 32)


def test_check_and_report_know_it_and_others_refuse_the_new_layers_weights():
    model = mlp()
    assert [layer.fqn for layer in export.check(model, "to_gathered")] == ["0.weight", "2.weight"]
    rows = {row.tensor: row.taken_by for row in export.report(model)}
    assert "to_gathered" in rows["0.weight"] and "to_gathered" not in rows["4.weight"]
    export.to_gathered(model)
    with pytest.raises(SparsityError, match="0.weight: needs the weight of Linear, got weight of GatheredLinear"):
        export.to_gathered(model, ["0.weight"])
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model)  # what is converted is no Linear, and stays as it is
    assert [group["tensor_fqn"] for group in sparsifier.groups] == ["4.weight"]
