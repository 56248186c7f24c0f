"""shrink_layers fits the block before removed ones: compared with torch's least squares on the same rows."""

import copy

import hf_models
import pytest
import torch
from grids import nightly_except
from torch import nn

from sparsekit_ao import SparsityError, prune
from sparsekit_ao.models import loading
from sparsekit_ao.models.running import output_error
from sparsekit_ao.removal import shrink_layers

RIDGE = 0.3  # as in block_fitting.py


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


class Block(nn.Module):
    """A block with a residual connection, a bias, and a scale of what is added."""

    def __init__(self, bias=True, scale=None):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=bias)
        self.scale = None if scale is None else nn.Parameter(torch.linspace(0, scale, 8))

    def forward(self, x):
        added = self.down(torch.relu(self.up(x)))
        return x + (added if self.scale is None else self.scale * added)


class Normed(Block):
    """A block whose norm comes after the sum, as in the first Transformers."""

    def forward(self, x):
        return nn.functional.layer_norm(super().forward(x), (8,))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(count=6, kind=Block, **keys):
    torch.manual_seed(0)
    model = Stack(*(kind(**keys) for _ in range(count))).double()
    return model, [torch.randn(2, 40, 8, dtype=torch.float64) for _ in range(3)]


def weaken(blocks, numbers, factor=0.5):
    """Lower what blocks add to their input, so that these leave."""
    for at in numbers:
        for name, p in blocks[at].named_parameters():
            if p.ndim > 1 or name.endswith("bias"):
                p.mul_(factor)


def recorded(model, batches, module, before):
    """The inputs (`before`) or outputs of a module for all batches, one after another, as rows."""
    found = []

    def hook(module, args, output):
        of = args[0] if before else output[0] if isinstance(output, tuple) else output
        found.append(of.reshape(-1, of.shape[-1]).clone())

    with module.register_forward_hook(hook):
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    return torch.cat(found)


def expected(dense, small, batches, path, last, kept):
    """A copy of `small` with the matrix `last` of each block before removed ones fitted by torch.linalg.lstsq."""
    small = copy.deepcopy(small)
    blocks, dense_blocks = small.get_submodule(path), dense.get_submodule(path)
    for at, (number, after) in enumerate(zip(kept, [*kept[1:], len(dense_blocks)], strict=True)):
        if after == number + 1:
            continue
        layer = blocks[at].get_submodule(last)
        x, output = recorded(small, batches, layer, True), recorded(small, batches, blocks[at], False)
        target = recorded(dense, batches, dense_blocks[after - 1], False)
        norms = target.square().sum(1)
        typical = norms.log().mean().exp()
        root = (typical / norms.clamp(min=typical)).sqrt()[:, None]
        bias = getattr(layer, "bias", None)
        x = x if bias is None else torch.cat([x, torch.ones_like(x[:, :1])], 1)
        gram = (root * x).mT @ (root * x)
        held = (RIDGE * gram.diagonal().mean()).sqrt() * torch.eye(len(gram), dtype=x.dtype)
        rest = torch.cat([root * (target - output), torch.zeros(len(gram), target.shape[1], dtype=x.dtype)])
        step = torch.linalg.lstsq(torch.cat([root * x, held]), rest).solution
        weight = step if bias is None else step[:-1]
        layer.weight.add_(weight if layer.weight.shape == weight.shape and type(layer) is not nn.Linear else weight.mT)
        if bias is not None:
            bias.add_(step[-1])
    return small


def shrunk(model, batches, ratio, kept, path, **keys):
    """The model without a fit, and the fitted one with its report; both keep the same blocks."""
    plain, _ = shrink_layers(model, batches, ratio, layers=path, compensate=None)
    small, report = shrink_layers(model, batches, ratio, layers=path, **keys)
    pairs = zip(plain.get_submodule(path), kept, strict=True)
    dense = model.get_submodule(path)
    assert all(
        torch.equal(a, b) for one, at in pairs for a, b in zip(one.parameters(), dense[at].parameters(), strict=True)
    )
    return plain, small, report


def is_same(block, other):
    return all(torch.equal(p, q) for p, q in zip(block.parameters(), other.parameters(), strict=True))


def assert_equal_weights(small, wanted):
    for (name, p), q in zip(small.named_parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7), name


LAST = {  # the list of blocks, and the last matrix of a block
    "Llama": ("model.layers", "mlp.down_proj"),
    "GPT-2": ("transformer.h", "mlp.c_proj"),  # a transposed weight
    "ViT": ("vit.layers", "mlp.fc2"),
    "T5": ("decoder.block", "layer.2.DenseReluDense.wo"),
    "GPT-NeoX": ("gpt_neox.layers", "mlp.dense_4h_to_h"),  # attention and MLP side by side
}


@pytest.mark.parametrize("name", nightly_except(LAST, "GPT-2", "GPT-NeoX"))
def test_blocks_before_two_runs_are_fitted_one_after_another(name):
    path, last = LAST[name]
    keys = {"num_layers": 1, "num_decoder_layers": 7} if name == "T5" else {}
    model, inputs = hf_models.deep(name, 7, **keys)
    model = model.double().eval()
    batches = [{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}]
    removed = [1, 2, 5]
    kept = [0, 3, 4, 6]
    weaken(model.get_submodule(path), removed, 0.2)
    plain, small, report = shrunk(model, batches, 3 / 7, kept, path)
    assert [row.tensor for row in report.compensation] == [f"{path}.{at}.{last}.weight" for at in (0, 2)]
    assert all(row.after < row.before for row in report.compensation)
    assert_equal_weights(small, expected(model, plain, batches, path, last, kept))
    output, lost, gained = (one(**batches[0]).logits for one in (model, plain, small))
    assert (output - gained).norm() < (output - lost).norm()
    assert report.error_to_dense == pytest.approx(output_error(model(**batches[0]), small(**batches[0])))


@pytest.mark.parametrize("keys", [{}, {"bias": False}], ids=["bias", "none"])
def test_a_run_at_the_end_and_a_bias(keys):
    model, batches = stack(**keys)
    weaken(model.blocks, [4, 5])
    plain, small, report = shrunk(model, batches, 1 / 3, [0, 1, 2, 3], "blocks")
    assert [row.tensor for row in report.compensation] == ["blocks.3.down.weight"]
    assert_equal_weights(small, expected(model, plain, batches, "blocks", "down", [0, 1, 2, 3]))


def test_a_scale_of_what_is_added_is_known_and_an_output_scaled_by_zero_stays():
    model, batches = stack(scale=2.0)  # the first of eight outputs is scaled by 0
    weaken(model.blocks, [2])
    plain, small, report = shrunk(model, batches, 1 / 6, [0, 1, 3, 4, 5], "blocks")
    (row,) = report.compensation
    before, after = plain.blocks[1].down, small.blocks[1].down
    assert torch.equal(before.weight[0], after.weight[0]) and not torch.equal(before.weight[1:], after.weight[1:])
    target = recorded(model, batches, model.blocks[2], False)
    errors = [(target - recorded(one, batches, one.blocks[1], False)).norm() / target.norm() for one in (plain, small)]
    assert errors[1] < 0.9 * errors[0]  # in the report, rows that are large count by their relative error
    assert row.before == pytest.approx(float(errors[0]), rel=0.1)
    assert row.after == pytest.approx(float(errors[1]), rel=0.1)


def test_zeros_of_a_pruned_model_stay_and_others_make_up_for_them():
    dense, batches = stack()
    model, _ = prune(dense, "2:4", batches=batches)
    weaken(model.blocks, [2])
    plain, small, report = shrunk(model, batches, 1 / 6, [0, 1, 3, 4, 5], "blocks")
    weight = small.blocks[1].down.weight
    assert torch.equal(weight == 0, model.blocks[1].down.weight == 0)
    assert not torch.equal(weight, model.blocks[1].down.weight) and "weights that are zero" in report.zeros
    # Where weights may change, the gradient of the squared error and the ridge is zero.
    now, before = (
        torch.cat([one.down.weight, one.down.bias[:, None]], 1) for one in (small.blocks[1], plain.blocks[1])
    )
    x = recorded(small, batches, small.blocks[1].down, True)
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    target = recorded(model, batches, model.blocks[2], False)
    rest = target - recorded(small, batches, small.blocks[1], False)
    norms = target.square().sum(1)
    typical = norms.log().mean().exp()
    weighted = x * (typical / norms.clamp(min=typical))[:, None]
    gradient = rest.mT @ weighted - RIDGE * (weighted * x).sum(0).mean() * (now - before)
    mask = torch.cat([weight != 0, torch.ones_like(weight[:, :1], dtype=torch.bool)], 1)
    assert gradient[mask].abs().max() < 1e-4 * gradient[~mask].abs().max()


def test_removed_blocks_that_no_block_comes_before_are_named():
    model, batches = stack()
    weaken(model.blocks, [0, 1, 4])
    plain, small, report = shrunk(model, batches, 0.5, [2, 3, 5], "blocks")
    assert [row.tensor for row in report.compensation] == ["blocks.1.down.weight"]
    assert "blocks: the first blocks were removed, and no block before them makes up for them" in report.left_out
    assert_equal_weights(small, expected(model, plain, batches, "blocks", "down", [2, 3, 5]))


def test_a_shared_weight_is_not_fitted():
    model, batches = stack()
    model.other = nn.Linear(12, 8)
    model.other.weight = model.blocks[1].down.weight
    weaken(model.blocks, [2])
    plain, small, report = shrunk(model, batches, 1 / 6, [0, 1, 3, 4, 5], "blocks")
    assert not report.compensation and torch.equal(small.blocks[1].down.weight, plain.blocks[1].down.weight)
    assert any(text.startswith("blocks.1 (of the smaller model): not fitted") for text in report.left_out)


def test_a_block_that_ends_with_a_norm_is_not_fitted():
    model, batches = stack(kind=Normed)
    weaken(model.blocks, [2, 3], 0.01)
    _, small, report = shrunk(model, batches, 1 / 3, [0, 1, 4, 5], "blocks")
    assert not report.compensation and any(
        text.startswith("blocks.1 (of the smaller model): not fitted") for text in report.left_out
    )
    assert all(
        torch.equal(p, q) for p, q in zip(small.blocks[1].parameters(), model.blocks[1].parameters(), strict=True)
    )


@pytest.mark.parametrize(("name", "last"), [("Mixtral", None), ("DeepSeek-V3", "mlp.shared_experts.down_proj.weight")])
def test_of_a_mixture_the_shared_expert_is_fitted(name, last):
    model, inputs = hf_models.deep(name, 4, **({"first_k_dense_replace": 0} if last else {}))
    weaken(model.model.layers, [2])
    _, _, report = shrunk(model, [inputs], 0.25, [0, 1, 3], "model.layers")
    assert [row.tensor for row in report.compensation] == ([f"model.layers.1.{last}"] if last else [])
    assert any(text.startswith("model.layers.1 (of") for text in report.left_out) is (last is None)
    if last:
        assert report.compensation[0].after < report.compensation[0].before


def test_tokens_that_do_not_count_change_nothing():
    model = hf_models.deep("Llama", 4)[0].double()
    weaken(model.model.layers, [2])
    ids = torch.randint(3, 50, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    other = torch.where(mask == 1, ids, 7)
    batches = [[{"input_ids": one, "attention_mask": mask}] for one in (ids, other)]
    fits = [shrink_layers(model, batch, 0.25)[0].model.layers[1].mlp.down_proj.weight for batch in batches]
    assert torch.allclose(*fits, atol=1e-6) and not torch.equal(fits[0], model.model.layers[1].mlp.down_proj.weight)
    all_tokens = shrink_layers(model, batches[1], 0.25, token_mask=False)[0].model.layers[1].mlp.down_proj.weight
    assert not torch.allclose(all_tokens, fits[0], atol=1e-4)


@pytest.mark.parametrize("emulated", [frozenset(), frozenset({torch.bfloat16})])  # by CPUs without such instructions
def test_a_model_in_bfloat16_that_accelerate_keeps_on_disk_is_fitted_to_the_same_bits(emulated, tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(loading, "_emulated", lambda: emulated)
    model, inputs = hf_models.deep("Llama", 5)
    model = model.to(torch.bfloat16)
    weaken(model.model.layers, [1, 3])
    batches = [inputs, {"input_ids": inputs["input_ids"] + 1}]
    small, report = shrink_layers(model, batches, 0.4)
    wanted = small(**inputs).logits
    assert len(report.compensation) == 2 and all(row.after < row.before for row in report.compensation)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    offloaded, other = shrink_layers(model, batches, 0.4)
    assert torch.equal(offloaded(**inputs).logits, wanted)
    assert [row.after for row in other.compensation] == [row.after for row in report.compensation]


def test_blocks_that_are_no_chain_are_named():
    class Numbered(Block):
        def forward(self, x, at):
            return super().forward(x)

    class Counting(Stack):
        def forward(self, x):
            for at, block in enumerate(self.blocks):
                x = block(x, at)
            return self.head(x)

    torch.manual_seed(0)
    model = Counting(*(Numbered() for _ in range(4))).double()
    model.blocks[2].down.weight.data *= 0.1
    _, report = shrink_layers(model, [torch.randn(2, 40, 8, dtype=torch.float64)], 0.25)
    assert not report.compensation and any(
        "does not read what the one before gives alone" in text for text in report.left_out
    )


def test_an_unknown_method_is_refused_and_none_fits_nothing():
    model, batches = stack()
    with pytest.raises(SparsityError, match="shrink_layers: compensate must be 'least_squares' or None, got 'admm'"):
        shrink_layers(model, batches, 0.5, compensate="admm")
    before = copy.deepcopy(model.state_dict())
    _, report = shrink_layers(model, batches, 0.5, compensate=None)
    assert not report.compensation and all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())


def test_rows_of_zeros_do_not_change_what_is_typical():
    model, batches = stack(bias=False)
    for block in model.blocks:
        block.up.bias.fill_(-0.1)
    for batch in batches:
        batch[:, :5] = 0
    weaken(model.blocks, [4, 5])
    _, _, report = shrunk(model, batches, 1 / 3, [0, 1, 2, 3], "blocks")
    (row,) = report.compensation
    assert row.after < 0.9 * row.before
