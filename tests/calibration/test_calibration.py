"""Statistics of layers: what is recorded, for which layers, and what an error leaves behind."""

import copy
import io
import math
import sys
import threading

import pytest
import torch
from networks import Net
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError, prune
from sparsekit_ao.calibration import Recorder, adapter_of
from sparsekit_ao.calibration.products import Products

torch.manual_seed(0)


def conv1d_of_transformers():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(4, 6)


LAYERS = {
    "Linear": (lambda: nn.Linear(6, 4), (2, 3, 6)),
    "Conv1D of transformers": (conv1d_of_transformers, (2, 3, 6)),
    "Conv1d, strided, dilated, grouped": (
        lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        (2, 4, 11),
    ),
    "Conv2d, same, reflected": (lambda: nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="reflect"), (2, 4, 7, 8)),
    "Conv2d, valid, depthwise": (lambda: nn.Conv2d(4, 4, 3, padding="valid", groups=4), (2, 4, 7, 8)),
    "Conv2d, one image": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 7, 8)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=(1, 0, 1)), (2, 2, 4, 5, 4)),
    "ConvTranspose1d, dilated": (lambda: nn.ConvTranspose1d(4, 6, 4, stride=3, padding=2, dilation=2), (2, 4, 5)),
    "ConvTranspose2d, grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 5, 4),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 4, 2), (1, 2, 3, 3, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_is_a_product_of_recorded_rows_and_its_matrix(name):
    """Its output, computed by torch, equals rows @ matrix^T: the columns of both are in one order."""
    make, shape = LAYERS[name]
    layer, x = make().eval(), torch.randn(shape)
    nn.init.zeros_(layer.bias)
    adapter = adapter_of(layer, "weight", {})
    matrix = adapter.matrix(layer.weight)
    assert torch.equal(adapter.weight(matrix, layer.weight.shape), layer.weight)
    products = []
    with Products({"weight": (layer, "weight")}, lambda product, place: products.append(product), lambda: None):
        output = layer(x)
    rows = torch.cat(list(adapter.rows(products[0], None)), 1)
    product = (rows @ matrix.mT).mT.flatten(0, 1)  # [outputs, tokens]
    channel = -1 - len(layer.kernel_size) if hasattr(layer, "kernel_size") else -1
    torch.testing.assert_close(product, output.movedim(channel, 0).flatten(1), rtol=1e-4, atol=1e-5)


def prepared(model, *, score="wanda", config=None, **options):
    sparsifier = ScopeSparsifier(score=score, **options)
    sparsifier.prepare(model, config)
    return sparsifier


def mlp():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def hooks_of(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()) + sum(
        len(p._backward_hooks or ()) for p in model.parameters()
    )


def test_sums_of_squares_and_gram_matrices_over_batches():
    model = mlp().train()
    batches = [torch.randn(n, 8) for n in (3, 1, 5)]
    sparsifier = prepared(model)
    sparsifier.calibrate(batches, needs=["input_gram"])
    x = torch.cat(batches)
    hidden = model[1](model[0](x)).detach()
    for name, rows in {"0.weight": x, "2.weight": hidden}.items():
        found = sparsifier.statistics[name]
        torch.testing.assert_close(found.input_gram[0], rows.T @ rows)
        torch.testing.assert_close(found.input_square, (rows.T @ rows).diagonal().expand(found.shape))
        assert found.tokens == 9 and found.input_gram.dtype == torch.float32
    assert model.training and hooks_of(model) == 0


def test_calibrations_add_up_until_statistics_are_forgotten():
    sparsifier, batches = prepared(mlp()), [torch.randn(4, 8), torch.randn(2, 8)]
    sparsifier.calibrate(batches[:1])
    sparsifier.calibrate(batches[1:], needs=["input_gram"])
    found, x = sparsifier.statistics["0.weight"], torch.cat(batches)
    torch.testing.assert_close(found.input_square[0], x.square().sum(0))
    torch.testing.assert_close(found.input_gram[0], batches[1].T @ batches[1])
    assert found.tokens == 6
    sparsifier.forget_statistics()
    assert not sparsifier.statistics
    context = sparsifier.calibrate()
    for batch in batches:  # a context that is entered twice adds each pass once
        with context:
            sparsifier.model(batch)
    torch.testing.assert_close(sparsifier.statistics["0.weight"].input_square[0], x.square().sum(0))


def test_padding_is_left_out_by_a_token_mask():
    def run(m, x, attention_mask):
        return {"logits": m.pooled(m.layer(x)[:, 0])}

    x, keep = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    sparsifier = prepared(Net(run, layer=nn.Linear(4, 4), pooled=nn.Linear(4, 2)))
    batch = {"x": x, "attention_mask": keep}
    sparsifier.calibrate([batch], token_mask="attention_mask")
    found = sparsifier.statistics
    torch.testing.assert_close(found["layer.weight"].input_square[0], x[keep.bool()].square().sum(0))
    assert found["layer.weight"].tokens == 3 and found["pooled.weight"].tokens == 2
    sparsifier.calibrate([batch], token_mask=lambda batch: batch["attention_mask"] == 0)
    assert sparsifier.statistics["layer.weight"].tokens == 6
    with sparsifier.calibrate() as c:
        c.token_mask = keep
        sparsifier.model(**batch)
    assert sparsifier.statistics["layer.weight"].tokens == 9


class Batch:
    """A batch of one's own class, with something beside the inputs."""

    def __init__(self, x, more):
        self.x, self.more = x, more


@pytest.mark.parametrize(
    "make", [threading.Lock, lambda: nn.Linear(2, 2)(torch.ones(2)), lambda: iter([]), lambda: (n for n in range(2))]
)
def test_batches_may_hold_what_cannot_be_copied(make):
    x, more = torch.randn(4, 8), make()
    batches = [Batch(x, more), {"x": x, "more": more}, (Batch(x, [more]), more)]
    model = nn.Sequential(nn.Linear(8, 8))
    sparsifier = ScopeSparsifier(score="wanda")
    sparsifier.prepare(model, None)

    def forward(model, batch):
        batch = batch[0] if isinstance(batch, tuple) else batch
        return model(batch["x"] if isinstance(batch, dict) else batch.x)

    sparsifier.calibrate(batches, forward=forward)
    assert sparsifier.recorder.of("0.weight").tokens == 12
    prune(nn.Sequential(nn.Linear(8, 8)), 0.5, batches=batches, forward=forward)


def test_an_embedding_counts_its_tokens():
    model = nn.Sequential(nn.Embedding(5, 3))
    sparsifier = prepared(model, config=[{"tensor_fqn": "0.weight"}])
    sparsifier.calibrate([torch.tensor([[0, 1, 1], [4, 1, 0]])])
    assert sparsifier.statistics["0.weight"].input_square[:, 0].tolist() == [2, 3, 0, 0, 1]
    with pytest.raises(SparsityError, match=r"0.weight: an embedding has no input_gram"):
        sparsifier.calibrate([torch.tensor([0])], needs=["input_gram"])


def test_attention_with_a_query_and_keys_of_its_own():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
    query, key, value = torch.randn(1, 3, 8), torch.randn(1, 5, 6), torch.randn(1, 5, 4)
    names = ["0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight"]
    sparsifier = prepared(nn.ModuleList([attention]), config=[{"tensor_fqn": names}])
    sparsifier.calibrate([0], forward=lambda model, _: model[0](query, key=key, value=value))
    for name, x in zip(names, (query, key, value), strict=True):
        torch.testing.assert_close(sparsifier.statistics[name].input_square[0], x[0].square().sum(0))
    both = prepared(nn.ModuleList([nn.MultiheadAttention(8, 2)]), config=[{"tensor_fqn": "0.in_proj_weight"}])
    reads = [torch.randn(n, 1, 8) for n in (3, 5, 5)]  # of different lengths: each third has its own inputs
    both.calibrate([0], forward=lambda m, _: m[0](*reads))
    expected = torch.stack([x.square().sum((0, 1)) for x in reads]).repeat_interleave(8, 0)
    torch.testing.assert_close(both.statistics["0.in_proj_weight"].input_square, expected)


def test_layers_that_read_one_tensor_share_its_sums_unless_it_changes_in_place():
    def run(m, x):
        first = m.a(x) + m.b(x)
        x.mul_(2)
        return first + m.c(x)

    x = torch.randn(3, 4)
    expected = x.square().sum(0)
    sparsifier = prepared(Net(run, **{name: nn.Linear(4, 4) for name in "abc"}))
    sparsifier.calibrate([x])
    for name, factor in {"a.weight": 1, "b.weight": 1, "c.weight": 4}.items():
        torch.testing.assert_close(sparsifier.statistics[name].input_square[0], expected * factor)


def loss(model, batch):
    return model(batch).square().sum()


def test_gradients_of_the_users_loss():
    model, batches = mlp(), [torch.randn(3, 8), torch.randn(2, 8)]
    sparsifier = prepared(model, score="taylor")
    model[0].bias.grad = torch.ones(6)
    sparsifier.calibrate(batches, loss, needs=["gradient_square", "movement"])
    weight = model[2].parametrizations.weight.original
    gradients = [torch.autograd.grad(loss(model, b), weight)[0] for b in batches]
    found = sparsifier.statistics["2.weight"]
    torch.testing.assert_close(found.gradient, sum(gradients))
    torch.testing.assert_close(found.gradient_square, sum(g.square() for g in gradients) / 2)
    torch.testing.assert_close(found.movement, -sum(weight.detach() * g for g in gradients))
    assert weight.grad is None and torch.equal(model[0].bias.grad, torch.ones(6)) and hooks_of(model) == 0


def test_movement_is_recorded_while_the_user_trains():
    model = mlp()
    sparsifier = prepared(model, score="movement")
    weight = model[0].parametrizations.weight.original
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(6, 8)
    with sparsifier.calibrate():
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, torch.randn(4, 8)).backward()
            expected -= weight.detach() * weight.grad
            optimizer.step()
    torch.testing.assert_close(sparsifier.statistics["0.weight"].movement, expected)


def test_statistics_are_saved_and_copied():
    model = mlp()
    sparsifier, other = prepared(model), prepared(mlp())
    sparsifier.calibrate([torch.randn(8, 8)])
    sparsifier.step()
    other.model.load_state_dict(model.state_dict())
    other.load_state_dict(sparsifier.state_dict())
    twin = copy.deepcopy(sparsifier)
    other.step()
    twin.step()
    for name in sparsifier.state:
        masks = [s.mask(name) for s in (sparsifier, other, twin)]
        assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
        assert torch.equal(other.statistics[name].input_square, sparsifier.statistics[name].input_square)
    other.statistics["0.weight"].sums["input_square"].zero_()
    assert sparsifier.statistics["0.weight"].input_square.any()


@pytest.mark.parametrize(
    ("need", "value"),
    [("hessian", torch.ones(8)), ("input_square", [1.0] * 8), ("input_square", torch.ones(1, 8, dtype=torch.int64))],
)
def test_saved_statistics_of_another_kind_are_refused(need, value):
    sparsifier = prepared(mlp())
    sparsifier.calibrate([torch.randn(8, 8)])
    state = copy.deepcopy(sparsifier.state_dict())
    before = sparsifier.statistics["0.weight"].input_square.clone()
    state["statistics"]["0.weight"]["sums"][need] = value
    with pytest.raises(SparsityError, match=f"0.weight: statistics have an unknown entry.*{need}"):
        sparsifier.load_state_dict(state)
    assert torch.equal(sparsifier.statistics["0.weight"].input_square, before)


# errors: nothing is kept, hooks are removed


def check_error(sparsifier, text, *args, **kwargs):
    with pytest.raises(SparsityError, match=text):
        sparsifier.calibrate(*args, **kwargs)
    assert hooks_of(sparsifier.model) == 0 and not sparsifier.statistics


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (1, "a token mask must be a tensor .batch, tokens., got int"),
        (torch.ones(2, 1, 1, 5), r"got one of shape \(2, 1, 1, 5\)"),
        (torch.zeros(2, 5), "of which no token counts"),
    ],
)
def test_bad_token_masks(mask, text):
    check_error(prepared(mlp()), text, [torch.ones(2, 5, 8)], token_mask=lambda batch: mask)


def test_bad_calls():
    check_error(prepared(mlp()), "calibrate: there are no batches", [])
    check_error(prepared(mlp()), r"got one tensor \(3, 8\).*give \[batch\]", torch.ones(3, 8))
    check_error(prepared(mlp()), "forward and token_mask need batches", forward=loss)
    check_error(prepared(mlp()), "needs are some of 'input_square'.*got 'hessian'", [0], needs=["hessian"])
    check_error(prepared(mlp(), score=None), "no score of this sparsifier needs statistics", [torch.ones(1, 8)])
    check_error(prepared(mlp(), score="taylor"), r"a scalar; got a tensor \(1, 4\)", [torch.ones(1, 8)])
    check_error(prepared(mlp(), score="taylor"), "got dict", [torch.ones(1, 8)], lambda m, b: {})
    check_error(
        prepared(mlp(), score="taylor"),
        "the loss of batch 1 is nan",
        [1.0, float("nan")],
        lambda m, b: loss(m, torch.ones(1, 8)) * b,
    )
    check_error(prepared(mlp()), "0.weight: the inputs of this layer are not finite", [torch.full((1, 8), torch.inf)])
    with pytest.raises(SparsityError, match="calibrate: "):
        ScopeSparsifier(score="wanda").calibrate([0])


def test_parameters_without_inputs_and_frozen_ones():
    model = mlp()
    sparsifier = prepared(model, config=[{"tensor_fqn": "0.bias"}])
    check_error(sparsifier, "0.bias: inputs cannot be recorded for 'bias' of .*Linear", [torch.ones(1, 8)])
    model = mlp().requires_grad_(False)
    check_error(prepared(model, score="fisher"), "0.weight: gradient statistics need requires_grad", [0], loss)


def test_an_error_of_the_model_keeps_nothing():
    def forward(model, batch):
        model(torch.ones(1, 8))
        raise RuntimeError("mine")

    sparsifier = prepared(mlp().train())
    with pytest.raises(RuntimeError, match="mine"):
        sparsifier.calibrate([0], forward)
    assert hooks_of(sparsifier.model) == 0 and not sparsifier.statistics and sparsifier.model.training


def test_a_step_without_statistics_tells_how_to_collect_them():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    sparsifier = prepared(model)
    text = r"used.weight: wanda\(\) needs input_square, .*run sparsifier.calibrate\(batches\) before step"
    with pytest.raises(SparsityError, match=text):
        sparsifier.step()
    sparsifier.calibrate([torch.ones(1, 4)], lambda model, x: model["used"](x))
    with pytest.raises(SparsityError, match=r"unused.weight: wanda\(\) needs input_square"):
        sparsifier.step()


def test_sums_are_float32_under_autocast_and_recorded_in_inference_mode():
    sparsifier, x = prepared(nn.Sequential(nn.Linear(16, 4)), score="obs"), torch.randn(100, 16)
    with torch.autocast("cpu", torch.bfloat16):
        sparsifier.calibrate([x])
    torch.testing.assert_close(sparsifier.statistics["0.weight"].input_gram[0], x.T @ x)
    sparsifier.forget_statistics()
    with torch.inference_mode(), sparsifier.calibrate():
        sparsifier.model(x)
    torch.testing.assert_close(sparsifier.statistics["0.weight"].input_gram[0].clone(), x.T @ x)


def test_a_token_mask_fits_inputs_whose_first_dimension_is_tokens():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)  # batch_first=False
    sparsifier = prepared(layer, config=[{"tensor_fqn": "linear1.weight"}])
    x, keep, read = torch.randn(5, 3, 8), torch.rand(3, 5) < 0.6, []
    layer.linear1.register_forward_pre_hook(lambda module, args: read.append(args[0].detach()))
    sparsifier.calibrate([x], token_mask=lambda batch: keep)
    found = sparsifier.statistics["linear1.weight"]
    assert found.tokens == keep.sum()
    torch.testing.assert_close(found.input_square[0], read[0][keep.T].square().sum(0))


class TokensFirst(nn.Module):
    """A model of token numbers [batch, tokens] that computes with [tokens, batch, width], or with batches first."""

    def __init__(self, kind, is_batch_first):
        super().__init__()
        self.is_batch_first, self.embedding = is_batch_first, nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=is_batch_first)
        self.inner = {
            "linear": lambda: nn.Linear(8, 8),
            "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=is_batch_first),
            "raw": lambda: Raw(8),
            "mixed": lambda: nn.Sequential(nn.Linear(8, 8), nn.Unflatten(2, (1, 8)), nn.Flatten(2), nn.Linear(8, 8)),
            "embedding": nn.Identity,
        }[kind]()

    def forward(self, ids):
        return self.inner(self.lstm(self.embedding(ids if self.is_batch_first else ids.T))[0])


class Raw(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return torch.einsum("abi,oi->abo", x, self.weight)


@pytest.mark.parametrize("kind", ["linear", "encoder", "raw", "mixed", "embedding"])
def test_a_mask_of_as_many_sequences_as_tokens_is_that_of_the_layout_seen_before(kind):
    first, square = torch.randint(20, (2, 5)), torch.randint(20, (4, 4))
    masks = {2: torch.arange(5) < torch.tensor([[5], [3]]), 4: torch.arange(4) < torch.tensor([[4], [1], [2], [3]])}
    sums = []
    torch.manual_seed(0)
    state = TokensFirst(kind, True).state_dict()
    for is_batch_first in (True, False):
        model = TokensFirst(kind, is_batch_first)
        model.load_state_dict(state)
        matrices = [{"tensor_fqn": name} for name, p in model.named_parameters() if p.ndim > 1]
        sparsifier = prepared(model, config=matrices)
        with pytest.raises(SparsityError, match="mask of 4 sequences of as many tokens.*let the first batch have"):
            sparsifier.calibrate([square], token_mask=lambda ids: masks[len(ids)])
        assert not sparsifier.statistics
        sparsifier.calibrate([first, square], token_mask=lambda ids: masks[len(ids)])
        sums.append({name: found.input_square for name, found in sparsifier.statistics.items()})
    assert sums[0].keys() == sums[1].keys() and len(sums[0]) > 2
    for name, expected in sums[0].items():
        torch.testing.assert_close(sums[1][name], expected)


def test_a_symmetric_mask_of_as_many_sequences_as_tokens_needs_no_layout():
    sparsifier, x = prepared(mlp()), torch.randn(4, 4, 8)
    for keep in (torch.ones(4, 4), torch.eye(4)):
        sparsifier.calibrate([x], token_mask=lambda batch, keep=keep: keep)
    assert sparsifier.statistics["0.weight"].tokens == 20


def test_attention_called_by_keywords_leaves_the_random_numbers_alone():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    sparsifier = prepared(attention, config=[{"tensor_fqn": ["out_proj.weight", "in_proj_weight"]}], score="obs")
    before = torch.get_rng_state()
    with sparsifier.calibrate(), torch.no_grad():
        attention.eval()(query=x, key=x, value=x)
    assert {s.tokens for s in sparsifier.statistics.values()} == {6}
    assert torch.equal(torch.get_rng_state(), before)
    sparsifier.step()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_advice_and_encoders_make_none():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    sparsifier = prepared(encoder, config=[{"tensor_fqn": "*.weight", "module": nn.Linear}])
    padding, x = torch.tensor([[False, False, True], [False, False, False]]), torch.randn(2, 3, 8)
    sparsifier.calibrate([{"src": x, "src_key_padding_mask": padding}], token_mask=lambda batch: ~padding)
    assert {s.tokens for s in sparsifier.statistics.values()} == {5}
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(SparsityError, match="nested tensor.*enable_nested_tensor=False"):
        prepared(mlp()).calibrate([nested])


def test_statistics_are_those_of_the_model_that_was_prepared_last():
    sparsifier = ScopeSparsifier(score="wanda")
    for factor in (1, 2):
        model = nn.Sequential(nn.Linear(4, 4))
        sparsifier.prepare(model)
        assert not sparsifier.statistics
        sparsifier.calibrate([torch.full((3, 4), float(factor))])
        found = sparsifier.statistics["0.weight"]
        assert found.adapter.module is model[0] and (found.input_square == 3 * factor**2).all()
        sparsifier.step()
        sparsifier.squash_mask()


@pytest.mark.parametrize(("is_terminal", "progress"), [(True, True), (True, False), (False, True)])
def test_a_progress_bar_is_shown_on_a_terminal_only(is_terminal, progress, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", screen)
    sparsifier = ScopeSparsifier(score="wanda")
    sparsifier.prepare(nn.Sequential(nn.Linear(6, 4)))
    sparsifier.calibrate(iter([torch.randn(3, 6)]), progress=progress)
    assert ("calibrate" in screen.getvalue()) is (is_terminal and progress)


@pytest.mark.parametrize("need", ["input_square", "input_gram"])
@pytest.mark.parametrize("values", [(math.inf, -math.inf), (math.inf, 0.0), (0.0, math.nan), (3e38, 1.0)])
@pytest.mark.parametrize("rows", [2, 40])
def test_sums_keep_what_is_not_finite(need, values, rows):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    batches = [torch.ones(rows, 8) for _ in values]
    for batch, value in zip(batches, values, strict=True):
        batch[0, :2] = torch.tensor([value, 0.0])
    recorder = Recorder(model, {f"{k}.weight": (model[k], "weight") for k in (0, 1)})
    with pytest.raises(SparsityError, match="^0.weight: the inputs of this layer are not finite"):
        recorder.run(batches, {name: [need] for name in recorder.tensors})
    assert not recorder.collected
