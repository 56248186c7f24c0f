"""Recovery: blocks come closer to the dense model's, masks and zeros stay, and interruptions lose nothing."""

import copy
import functools
import itertools
import math
import random
from types import SimpleNamespace

import gallery
import numpy as np
import pytest
import torch
import transformers
from grids import nightly_except, turns
from hf_models import deep, make
from networks import Net
from pruned_models import STRUCTURES, Model, correlated, distance, interrupted, prepared
from stock import same
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from sparsekit_ao import ScopeSparsifier, SparsityError, one_shot, patterns, prune, recover, removal
from sparsekit_ao.oneshot import training
from sparsekit_ao.oneshot.prune_report import RecoverReport
from sparsekit_ao.oneshot.teacher import Teacher
from sparsekit_ao.removal import shrink_layers


def pruned(structure="2:4", blocks=2, **options):
    """(sparsifier, dense model, batches) after one pass."""
    torch.manual_seed(0)
    dense, batches = Model(blocks=blocks), correlated()
    config = [{"tensor_fqn": "blocks.*.weight", **STRUCTURES[structure]}]
    sparsifier = prepared(copy.deepcopy(dense), config=config)
    one_shot(sparsifier, batches, **options)
    return sparsifier, dense, batches


@pytest.mark.parametrize("structure", STRUCTURES)
def test_masks_stay_and_outputs_come_closer(structure):
    sparsifier, dense, batches = pruned(structure)
    before, masks = (
        distance(dense, sparsifier.model, batches),
        {n: s["mask"].clone() for n, s in sparsifier.state.items()},
    )
    report = recover(sparsifier.model, dense, batches, passes=8)
    assert sparsifier.check() and [row.block for row in report] == ["blocks.0", "blocks.1"]
    assert all(row.after <= row.before for row in report) and any(row.after < row.before for row in report)
    assert distance(dense, sparsifier.model, batches) < before
    for name, mask in masks.items():
        assert torch.equal(sparsifier.mask(name), mask)
    assert "blocks.1" in str(report) and set(report.metrics()) == {f"recovered_error/blocks.{k}" for k in range(2)}


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_the_count_of_every_pattern_is_exact_after_recovery(entry):
    torch.manual_seed(0)
    names = {"nn": nn, "patterns": patterns}
    dense = nn.Sequential(eval(entry.module, names), nn.ReLU())
    shape = (8, 8, 4, 4) if entry.module.startswith("nn.Conv2d") else (32, dense[0].in_features)
    sparsifier = ScopeSparsifier()
    model = copy.deepcopy(dense)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", **eval(entry.pattern or entry.shapes, names)}])
    report = one_shot(sparsifier, [torch.randn(shape) for _ in range(3)], recover=dense)
    mask, chosen_by_step = sparsifier.mask("0.weight").clone(), gallery.evaluate(entry)[0]
    assert sparsifier.check() > 0 and int(mask.sum()) == int(chosen_by_step.sum())
    assert report.recovery[0].after <= report.recovery[0].before
    assert report.rows[0].density == pytest.approx(mask.float().mean().item())
    sparsifier.squash_mask()
    assert torch.equal(model[0].weight != 0, mask)


def test_every_public_pattern_is_in_the_gallery():
    shown = {entry.pattern.removeprefix("patterns.").partition("(")[0] for entry in gallery.ENTRIES}
    assert set(patterns.__all__) - {"Pattern", "parse"} == shown - {""}


def test_a_squashed_model_is_recovered_to_the_same_weights_as_a_masked_one_and_keeps_its_zeros():
    sparsifier, dense, batches = pruned()
    squashed = copy.deepcopy(sparsifier.model)
    sparsifier.squash_mask(model=squashed)
    recover(sparsifier.model, dense, batches)
    recover(squashed, dense, batches)
    sparsifier.check(squashed)
    sparsifier.squash_mask()
    assert same(squashed.state_dict(), sparsifier.model.state_dict())


def test_an_interrupted_recovery_goes_on_to_the_same_bits(tmp_path, caplog):
    sparsifier, dense, batches = pruned(blocks=3)
    start = copy.deepcopy(sparsifier.model)
    expected = recover(sparsifier.model, dense, batches)
    for at in (40, 70, 100):
        model = copy.deepcopy(start)
        with interrupted(model.blocks, at):
            recover(model, dense, batches, checkpoint=tmp_path)
    with caplog.at_level("INFO", logger="sparsekit_ao"):
        report = recover(start, dense, batches, checkpoint=tmp_path)
    assert caplog.messages[0].startswith("recover: continues an earlier call, of which ")
    assert [(row.block, row.after) for row in report] == [(row.block, row.after) for row in expected]
    assert same(start.state_dict(), sparsifier.model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interruption_in_the_first_pass_of_a_block_leaves_it_as_it_was(dtype):
    sparsifier, dense, batches = pruned(blocks=2)
    model, dense, batches = sparsifier.model.to(dtype), dense.to(dtype), [b.to(dtype) for b in batches]
    before = copy.deepcopy(model.blocks[1].state_dict())
    with interrupted([model.blocks[1]], 5, is_training=True) as error:  # the weights have been changed by four steps
        recover(model, dense, batches)
    assert "1 of 2 steps are finished" in error.value.__notes__[0]
    assert same(model.blocks[1].state_dict(), before)


def test_one_walk_prunes_and_recovers_and_prune_gives_the_same():
    sparsifier, dense, batches = pruned(recover=True)
    given, _, _ = pruned(recover=copy.deepcopy(dense))
    apart, _, _ = pruned()
    recover(apart.model, dense, batches)
    model, report = prune(dense, "2:4", batches=batches, recover=True, exclude=["first", "head"])
    assert [row.block for row in report.recovery] == ["blocks.0", "blocks.1"] and "blocks.1" in str(report)
    assert distance(dense, model, batches) < 1.05 * distance(dense, apart.model, batches)
    sparsifier.squash_mask()
    given.squash_mask()
    assert same(given.model.state_dict(), sparsifier.model.state_dict())
    assert same(model.state_dict(), sparsifier.model.state_dict())


def test_weights_in_16_bits_are_trained_by_wider_copies():
    dense = Model().bfloat16()
    batches = [b.bfloat16() for b in correlated()]
    model, report = prune(dense, 0.75, batches=batches, recover=True, exclude=["first", "head"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(row.after < row.before for row in report.recovery)
    assert all(row.density == (model.get_parameter(row.tensor) != 0).float().mean().item() for row in report)


def test_a_model_that_changes_its_input_in_place_reads_the_same_batches_every_time():
    class Shifted(Model):
        def forward(self, x):
            return super().forward(x.add_(1))

    torch.manual_seed(0)
    dense, batches = Shifted(), correlated()
    plain = Model()
    plain.load_state_dict(dense.state_dict())
    shifted, _ = prune(dense, 0.5, batches=batches, recover=True)
    recover(shifted, dense, batches, outputs="mse")
    assert all(map(torch.equal, batches, correlated()))
    expected, _ = prune(plain, 0.5, batches=[b + 1 for b in batches], recover=True)
    recover(expected, plain, [b + 1 for b in batches], outputs="mse")
    for p, q in zip(shifted.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_blocks_that_remain_after_shrink_layers_are_paired_with_those_they_were():
    (dense, _), batches = deep("Llama", 4), [torch.randint(50, (4, 8)) for _ in range(6)]
    for p in dense.model.layers[1].parameters():
        p.detach().mul_(0.1)
    small, _ = shrink_layers(dense, batches, 0.25)
    report = recover(small, dense, batches)
    assert [row.block for row in report] == [f"model.layers.{k}" for k in range(3)]
    assert max(row.before for row in report) < 0.1  # it is 1 and more where blocks are paired by their names
    smaller, _ = shrink_layers(small, batches, 0.34)
    assert len(recover(smaller, dense, batches)) == 2 and len(recover(smaller, small, batches)) == 2
    assert len(prune(small, 0.5, batches=batches, recover=True)[1].recovery) == 3
    for p in dense.model.layers[3].parameters():
        p.detach().zero_()  # zeros of a removed block are no sign of exchanged models
    assert len(recover(shrink_layers(dense, batches, 0.25)[0], dense, batches)) == 3
    reloaded = type(small)(small.config)
    reloaded.load_state_dict(small.state_dict())
    with pytest.raises(SparsityError, match=r"3 blocks in 'model.layers', but the dense model has 4.*give that model"):
        recover(reloaded, dense, batches)


def test_exchanged_models_and_weights_of_inference_mode_are_refused():
    sparsifier, dense, batches = pruned()
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(SparsityError, match=r"check the order of the arguments, recover\(pruned, dense, batches\)"):
        recover(dense, sparsifier.model, batches)
    assert same(dense.state_dict(), before)
    sparse = prune(dense, 0.9)[0]  # sparser than what is made from it
    recover(prune(sparse, "2:4", batches=batches)[0], sparse, batches)
    with torch.inference_mode():
        made = Model()
    with pytest.raises(SparsityError, match="first.weight was made in inference mode"):
        recover(made, dense, batches)


def test_a_model_without_blocks_and_one_with_labels_as_outputs():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))
    batches = [b[:, None] for b in correlated()]
    model, report = prune(dense, 0.75, batches=batches, recover=True)
    (row,) = report.recovery
    assert row.block == "" and row.after < row.before and "(model)" in str(report)
    (again,) = recover(model, dense, batches, outputs="kl")
    assert again.after < again.before


class Classifier(nn.Module):
    """Logits of four classes, and -inf for the given number of others, as of padding in a vocabulary."""

    def __init__(self, masked):
        super().__init__()
        self.first, self.last, self.masked = nn.Linear(8, 16), nn.Linear(16, 4), masked

    def forward(self, x):
        return nn.functional.pad(self.last(self.first(x).relu()), (0, self.masked), value=float("-inf"))


def test_classes_that_the_model_masks_do_not_count_in_the_divergence():
    batches = [torch.randn(100, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    rows = []
    for masked in (0, 3):
        torch.manual_seed(0)
        dense = Classifier(masked)
        model, _ = prune(dense, "2:4", batches=batches, compensate=None)
        with torch.no_grad():
            logits = [torch.cat([one(x)[:, :4] for x in batches]).log_softmax(-1) for one in (model, dense)]
        expected = nn.functional.kl_div(*logits, reduction="batchmean", log_target=True)
        (row,) = recover(model, dense, batches, outputs="kl", rate=0.05)
        assert row.before == pytest.approx(float(expected)) and row.after < 0.7 * row.before
        rows.append((row.before, row.after, model.first.weight))
    torch.testing.assert_close(rows[0], rows[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_divergence_and_its_gradient_are_those_of_torch(rows, dtype, monkeypatch):
    monkeypatch.setattr(training, "COMPARED", 30)  # three rows at a time
    generator = torch.Generator().manual_seed(0)
    actual, expected = (torch.randn(rows, 10, generator=generator).to(dtype) for _ in range(2))
    actual.requires_grad_()
    values, gradients = [], []
    for loss in (
        training._error(actual, expected, "kl", 1.0)[0],
        nn.functional.kl_div(
            *(t.float().log_softmax(-1) for t in (actual, expected)), reduction="sum", log_target=True
        ),
    ):
        values.append(loss.detach())
        gradients += torch.autograd.grad(loss * 3, actual)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0].dtype == dtype


@pytest.mark.parametrize("outputs", ["mse", "kl"])
def test_outputs_of_one_dimension_are_one_row(outputs):
    torch.manual_seed(0)
    dense, batches = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), [*torch.randn(8, 8)]
    model, _ = prune(dense, "2:4", batches=batches, compensate=None)
    (row,) = recover(model, dense, batches, outputs=outputs)
    assert row.after < row.before


def test_language_models_blocks_first_and_then_logits():
    model, _ = make("Llama")
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(0, 32, (4, 12), generator=generator), "use_cache": False} for _ in range(4)]
    for row in (small := prune(model, 0.5, batches=batches))[1]:
        assert row.density == pytest.approx(0.5, abs=0.02)
    blocks = recover(small[0], model, batches, rate=0.005)
    assert [row.block for row in blocks] == ["model.layers.0", "model.layers.1"]
    (logits,) = recover(small[0], model, batches, outputs="kl", rate=0.005)
    assert logits.block == "" and all(row.after < row.before for row in (*blocks, logits))


class Remembers(nn.Module):
    """A recurrent model whose state stays on it from one forward pass to the next, as those of RecurrentGemma."""

    def __init__(self):
        super().__init__()
        self.config, self.state = SimpleNamespace(use_cache=True), None
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, input_ids):
        x = torch.nn.functional.one_hot(input_ids % 8, 8).float()
        x = x if self.state is None else x + self.state[: len(x), -1:]
        for block in self.blocks:
            x = block(x)
        self.state = x if self.config.use_cache else None
        return x


_SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "intermediate_size": 48}
REMEMBERING = {
    "RecurrentGemma": {**_SMALL, **_HEADS, "lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent"]},
    "Rwkv": {**_SMALL, "attention_hidden_size": 32, "context_length": 16},
    "xLSTM": {**_SMALL, "num_blocks": 2, "num_heads": 4},
    "GPT2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("name", nightly_except([*REMEMBERING, "own"], "Rwkv", "GPT2", "own"))
def test_models_that_keep_a_cache_are_recovered_and_keep_it_afterwards(name):
    torch.manual_seed(0)
    if name == "own":
        dense = Remembers()
    else:
        config = getattr(transformers, f"{name}Config")(**REMEMBERING[name])
        dense = getattr(transformers, f"{name}Model")(config).eval()
    batches = [{"input_ids": torch.randint(50, (2, 7))} for _ in range(2)]
    report = prune(dense, 0.5, batches=batches, recover=True, progress=False)[1]
    assert report.blocks == 2 and len(report.recovery) == 2 and dense.config.use_cache
    model, _ = prune(dense, 0.5, batches=batches, progress=False)
    rows = recover(model, dense, batches, passes=2, progress=False)
    assert all(row.after <= row.before < 1 for row in rows) and model.config.use_cache
    with pytest.raises(ZeroDivisionError):
        prune(model, 0.5, batches=batches, forward=lambda m, b: 1 // 0, progress=False, inplace=True)
    assert model.config.use_cache


@pytest.mark.parametrize("call", ["prune", "shrink", "one_shot"])
def test_training_that_diverges_advises_a_call_that_takes_a_rate(call, monkeypatch):
    monkeypatch.setitem(Teacher.__init__.__kwdefaults__, "rate", 1e30)
    torch.manual_seed(0)
    dense, batches = Model(blocks=2), correlated()
    calls = {
        "prune": lambda **keys: prune(dense, 0.5, batches=batches, progress=False, **keys)[0],
        "shrink": lambda **keys: removal.shrink(dense, batches=batches, score="obd", exclude=["width"], **keys)[0],
        "one_shot": lambda **keys: one_shot(prepared(copy.deepcopy(dense)), batches, progress=False, **keys),
    }
    text = r"are not finite; call recover\(pruned, dense, batches, rate=r\) with r below 1e\+30"
    with pytest.raises(SparsityError, match=text):
        calls[call](recover=True)
    if call != "one_shot":  # the advice works
        recover(calls[call](), dense, batches, rate=0.01, progress=False)
    broken = copy.deepcopy(dense)
    with torch.no_grad():
        broken.blocks[0].up.weight.fill_(3e38)
    with pytest.raises(SparsityError, match="are not finite before it is trained"):
        recover(broken, dense, batches, progress=False)


NOISES = {
    "numpy": lambda x: x + np.random.standard_normal(),
    "random": lambda x: x + random.gauss(0, 1),
    "torch": lambda x: x + torch.randn_like(x),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=True),
    "all": lambda x: x * float(torch.rand(())) + random.random() - torch.from_numpy(np.random.rand(8)).float(),
}


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize(("noise", "has_blocks"), turns(NOISES, [(False,), (True,)]))
def test_the_dense_and_the_pruned_model_draw_the_same_random_numbers(noise, has_blocks):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2 if has_blocks else 1)]
    model, batches = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*blocks)), [torch.randn(16, 8) for _ in range(3)]

    def forward(model, x):
        return model(NOISES[noise](x))

    before = generators()
    same, report = prune(model, 0.0, batches=batches, forward=forward, recover=True, progress=False)
    rows = recover(copy.deepcopy(same), model, batches, forward, progress=False)
    assert report.blocks == (2 if has_blocks else 0) and report.error_to_dense == rows.error_to_dense == 0
    assert [row.before for row in (*report.recovery, *rows)] == [0] * (4 if has_blocks else 2)
    pruned_model, _ = prune(model, 0.5, batches=batches, forward=forward, progress=False)
    assert recover(pruned_model, model, batches, forward, progress=False).rows[-1].after < 0.5
    assert generators() == before


def test_padding_does_not_count():
    sparsifier, dense, batches = pruned()
    x = torch.stack(batches)  # [6, 32, 8]
    keep = torch.arange(32) < 20
    padded = [{"x": torch.where(keep[:, None], row, 1e3)[None], "keep": keep[None]} for row in x]
    short = [{"x": row[None, :20], "keep": keep[None, :20]} for row in x]
    models = [copy.deepcopy(sparsifier.model) for _ in range(2)]
    for model, data in zip(models, (padded, short), strict=True):
        recover(model, dense, data, lambda m, b: m(b["x"]), token_mask="keep")
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_padding_does_not_count_where_tokens_come_before_batches():
    torch.manual_seed(0)
    dense = Model(blocks=2)
    masks = {n: torch.arange(8) < torch.tensor([[k % 8 + 1] for k in range(n)]) for n in (3, 8)}
    batches, reports = [torch.randn(n, 8, 8) for n in (3, 8, 8, 8)], []
    for tokens_first in (False, True):

        def forward(model, x, tokens_first=tokens_first):
            return model(x.transpose(0, 1) if tokens_first else x)

        options = {"token_mask": lambda x: masks[len(x)], "progress": False}
        reports.append(prune(dense, 0.5, batches=batches, forward=forward, recover=True, **options)[1])
        with pytest.raises(SparsityError, match="let the first batch have another number of sequences than of tokens"):
            recover(copy.deepcopy(dense), dense, batches[1:], forward, **options)
    for first, row in zip(reports[0].recovery, reports[1].recovery, strict=True):
        assert row.after == pytest.approx(first.after, rel=0.03)


def test_prune_in_place_without_data_and_what_a_pattern_does_not_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"prune: only 18.6% of the weights were pruned, and these stayed dense"):
        same, report = prune(model, "2:4", exclude=[model[3]], inplace=True)
    assert "covers 18.6% of the weights; left dense: 0.weight, 3.weight" in str(report)
    assert same is model and [row.tensor for row in report] == ["2.weight"]
    assert (model[2].weight.view(-1, 4) != 0).sum(1).eq(2).all() and model[0].weight.all() and model[3].weight.all()
    assert "left out: 0.weight" in str(report) and "needs block-grid dimension 1 divisible by 4" in str(report)
    other, _ = prune(nn.Linear(8, 8))
    assert int((other.weight == 0).sum()) == 32


class Product(nn.Module):
    """A product with a parameter or a buffer of any dtype."""

    def __init__(self, dtype, name):
        super().__init__()
        weight = torch.ones(8, 8).to(dtype)
        setattr(self, name, nn.Parameter(weight, False) if name == "w" else nn.Buffer(weight))
        self.index = nn.Buffer(torch.zeros(8, 8, dtype=torch.int64))
        self.name = name

    def forward(self, x):
        weight = getattr(self, self.name)
        return (x.to(weight.dtype) @ weight).real if weight.is_complex() else x @ weight.float()


@pytest.mark.parametrize("batches", [None, [torch.ones(2, 8)]])
@pytest.mark.parametrize("name", ["w", "weight", "qweight"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_dense_weights_of_other_dtypes_count(dtype, name, batches):
    if dtype == torch.int32 and name == "w":
        pytest.skip("indices")
    model = nn.Sequential(Product(dtype, name), nn.Linear(8, 24))
    _, report = prune(model, "2:4", batches=batches, progress=False)
    assert report.coverage == 0.75 and report.dense == [f"0.{name}"]
    assert f"covers 75.0% of the weights; left dense: 0.{name}" in str(report)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"])
def test_weights_of_weight_norm_are_pruned_in_a_copy_and_normalized_anew(norm):
    torch.manual_seed(0)
    dense, batches = nn.Sequential(norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), correlated()
    before = copy.deepcopy(dense.state_dict())
    dense(batches[0])  # after which torch's deepcopy refuses the computed weight
    model, report = prune(dense, "2:4", batches=batches, recover=True)
    model(batches[0])
    assert [row.tensor for row in report] == ["0.weight", "2.weight"] and report.recovery[0].after < 0.5
    assert model.state_dict().keys() == before.keys()
    assert (model[0].weight.view(-1, 4) != 0).sum(1).eq(2).all() and dense[0].weight.all()
    assert same(dense.state_dict(), before)
    with torch.no_grad():
        wanted, actual = (torch.cat([m(batch) for batch in batches]) for m in (dense, model))
    squares = wanted.square().sum(1)
    weights = squares.clamp(max=4 * squares.log().mean().exp()) / squares
    error = (weights * (wanted - actual).square().sum(1)).sum() / (weights * squares).sum()
    assert float(error) == pytest.approx(report.recovery[0].after ** 2, rel=1e-3)


def test_a_token_of_large_outputs_does_not_rule():
    torch.manual_seed(0)
    dense, mix = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)
    batches = [torch.randn(64, 8) @ mix for _ in range(8)]
    for batch in batches:
        batch[0] *= 1e3
    pruned, _ = prune(dense, "2:4")
    recovered, others = copy.deepcopy(pruned), torch.cat([batch[1:] for batch in batches])
    recover(recovered, dense, batches)
    with torch.no_grad():
        wanted, before, after = (m(others) for m in (dense, pruned, recovered))
    assert (wanted - after).norm() < 0.74 * (wanted - before).norm()  # with squared errors it is 0.83 times


def mistakes():
    dense, x = Model(), correlated()
    model = copy.deepcopy(dense)
    yield "model and dense are the same object", lambda: recover(dense, dense, x)
    shared = nn.ModuleDict({"a": dense})
    yield "both models share the values of a.first.weight", lambda: recover(shared, dense, x)
    yield "passes must be an int >= 1, got 0", lambda: recover(model, dense, x, passes=0)
    yield "rate must be a positive number, got 0", lambda: recover(model, dense, x, rate=0)
    yield "outputs must be 'mse', 'kl' or None, got 'ce'", lambda: recover(model, dense, x, outputs="ce")
    yield (
        "trained on its outputs, so it is trained as a whole; leave out layers, stream_memory",
        lambda: recover(model, dense, x, outputs="mse", layers="blocks", stream_memory=0),
    )
    yield "recover: there are no batches", lambda: recover(model, dense, [])
    yield "the dense model has no module 'blocks.1'", lambda: recover(model, Model(blocks=1), x)
    yield r"\(32, 16\), but the dense model returns \(32, 24\)", lambda: recover(model, Model(width=24), x)
    yield "first.weight has no values: it is on the meta device", lambda: recover(Model().to("meta"), dense, x)
    yield "with r below 1e", lambda: recover(Model(), dense, x, rate=1e30)
    yield "recover, forward and token_mask need batches", lambda: prune(model, recover=True)
    yield "must return a tensor, got str", lambda: recover(nn.Linear(8, 8), nn.Linear(8, 8), x, lambda m, b: str(m(b)))

    yield "seed must be an int >= 0, got 'a'", lambda: recover(model, dense, x, seed="a")
    yield (
        r"is torch.float32 of shape \(\), which has no rows to match; give forward=",
        lambda: recover(Model(), dense, x, lambda m, b: m(b).sum(), outputs="mse"),
    )
    yield (
        "forward runs without gradients",
        lambda: recover(Model(), dense, x, lambda m, b: m(b).detach(), outputs="mse"),
    )
    yield "recover must be True, False or the dense model, got 1", lambda: one_shot(prepared(), x, recover=1)
    for bad in ({"compensate": "foo"}, {"batches": []}, {"token_mask": "k"}, {"forward": 3}, {"exclude": "0.weight"}):
        yield "prune|one_shot|exclude", lambda bad=bad: prune(model, **{"batches": x, "inplace": True, **bad})


@pytest.mark.parametrize("at", range(22))
def test_mistakes_change_nothing(at):
    torch.manual_seed(0)
    text, call = list(mistakes())[at]
    with pytest.raises(SparsityError, match=text):
        call()
    assert len(list(mistakes())) == 22


def test_an_error_in_the_middle_leaves_the_weights_as_they_were():
    sparsifier, dense, batches = pruned()
    before = copy.deepcopy(sparsifier.model.state_dict())
    with pytest.raises(SparsityError, match="not finite"):
        recover(sparsifier.model, dense, batches, rate=1e30)
    assert same(sparsifier.model.state_dict(), before)
    assert all(p.requires_grad and p.grad is None for p in sparsifier.model.parameters())


class Wide(nn.Module):
    """A block whose output is large, as that of a language model's residual stream; one channel is an outlier."""

    def __init__(self):
        super().__init__()
        self.mlp, self.outlier = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.zeros(64)
        self.outlier[0] = 1e3

    def forward(self, x):
        return x * 30 + self.mlp(x) + self.outlier.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_outputs_and_outliers_do_not_stop_the_training(dtype):
    torch.manual_seed(0)
    dense, x = Wide(), torch.randn(8, 1024, 64)
    x[..., 0] = 0  # so that bfloat16 can hold the outlier's channel
    model, report = prune(dense.to(dtype), 0.75, batches=list(x.to(dtype)), recover=True)
    with torch.no_grad():
        errors = [(m.float().mlp(x) - dense.float().mlp(x)).square().sum() for m in (model, prune(dense, 0.75)[0])]
    assert report.recovery[0].passes > 0 and errors[0] < 0.85 * errors[1]


def test_gradients_of_both_models_stay_as_they_were():
    dense, inputs = make("BERT")
    batches = [inputs for _ in range(3)]
    model, _ = prune(dense, 0.5, batches=batches, exclude=["pooler"])
    recover(model, dense, batches, outputs="mse")
    assert all(p.grad is None for m in (model, dense) for p in m.parameters())


def test_the_list_that_was_pruned_is_trained_and_blocks_that_share_a_weight_are_one():
    def two():
        a, b = (nn.ModuleList(nn.Linear(8, 8) for _ in range(n)) for n in (2, 4))
        return Net(lambda m, x: functools.reduce(lambda x, layer: layer(x), (*m.a, *m.b), x), a=a, b=b)

    torch.manual_seed(0)
    dense, batches = two(), correlated()
    model, _ = prune(dense, 0.5, batches=batches, exclude=["b.*"])
    assert [row.block for row in recover(model, dense, batches)] == ["a.0", "a.1"]
    tied = two()
    tied.a[1].weight = tied.a[0].weight
    masked = copy.deepcopy(tied)
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(masked, [{"tensor_fqn": "a.0.weight"}])
    sparsifier.step()
    assert [row.block for row in recover(masked, tied, batches)] == [""]


def test_an_interruption_in_a_later_pass_leaves_the_weights_of_the_best_one():
    sparsifier, dense, batches = pruned(blocks=2)
    model, once = sparsifier.model, copy.deepcopy(sparsifier.model)
    with interrupted([model.blocks[0]], 3 * len(batches) + 2, is_training=True):  # in the last pass
        recover(model, dense, batches, passes=4)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), once.parameters(), strict=True))
    before, after = (recover(m, dense, batches, passes=1).rows[0].before for m in (once, model))
    assert after < before and sparsifier.check()


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01, 0.001])
def test_gradients_beyond_the_range_of_float16_are_skipped(scale):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    for block in blocks:
        for p in block[3].parameters():
            p.data *= scale  # outputs are small, and so are the losses by which gradients are divided
    dense = nn.Sequential(nn.Sequential(*blocks)).eval().half()
    pruned, report = prune(dense, 0.5, batches=[torch.randn(32, 16).half()], recover=True)
    assert len(report.recovery) == 3 and all(row.after <= row.before for row in report.recovery)
    assert all(bool(p.isfinite().all()) for p in pruned.parameters())


def test_weights_in_any_memory_format_are_trained_alike():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    batches = [torch.randn(16, 3, 10, 10) for _ in range(4)]
    pruned = prune(dense, 0.5, batches=batches)[0]
    weights, formats = [], (torch.contiguous_format, torch.channels_last)
    for of_weights, of_inputs in itertools.product(formats, formats):
        model = copy.deepcopy(pruned).to(memory_format=of_weights)
        (row,) = recover(model, dense, [batch.contiguous(memory_format=of_inputs) for batch in batches])
        assert row.after < row.before
        weights.append(model[0].weight.detach().clone())
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0], rtol=1e-3, atol=1e-4)


def test_a_weight_that_is_a_part_of_a_larger_tensor_is_trained_alone():
    torch.manual_seed(0)
    whole, batches = torch.randn(8, 24), [torch.randn(64, 16) for _ in range(4)]
    dense = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    dense[0].weight.data = whole[:, :16].clone()
    model = copy.deepcopy(dense)
    model[0].weight.data = whole[:, :16]
    rest, (first, second) = whole[:, 16:].clone(), (copy.deepcopy(model), model)
    with torch.no_grad():
        for one in (first, second):
            one[0].weight[:, ::2] = 0
    first[0].weight.data = first[0].weight.data.clone()
    rows = [recover(one, dense, batches).rows[0] for one in (first, second)]
    assert torch.equal(whole[:, 16:], rest) and rows[0].after < rows[0].before
    torch.testing.assert_close(second[0].weight, first[0].weight, rtol=1e-3, atol=1e-4)


def test_a_model_without_blocks_has_nothing_to_continue_from(tmp_path):
    layer = nn.Linear(8, 8)
    half = prune(layer, 0.5)[0]
    with pytest.raises(SparsityError, match="has no repeated blocks, .*; leave out checkpoint"):
        recover(half, layer, [torch.randn(16, 8)], checkpoint=tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def normed():
    """(dense model, its pruned copy, batches): a convolution whose outputs became smaller, and a batch norm."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 8))
    batches = [torch.randn(16, 4, 4, 4) for _ in range(8)]
    update_bn(batches, dense)
    model = copy.deepcopy(dense.eval())
    model[0].weight.data *= 0.5 * (model[0].weight.abs() > 0.03)
    return dense, model, batches


@pytest.mark.parametrize("is_whole", [True, False])
def test_statistics_of_batch_norms_are_taken_anew_where_outputs_come_closer(is_whole):
    dense, model, batches = normed()
    norm, is_zero = model[1], model[0].weight == 0
    for net in (dense, model):  # a norm that the forward does not call, such as one of an auxiliary head
        net[0].unused = nn.BatchNorm2d(8).eval()
        net[0].unused.running_var.fill_(2)
        net[0].unused.num_batches_tracked.fill_(77)
    with torch.no_grad():
        outputs = [model[0](batch) for batch in batches]
    (row,) = recover(model, dense, batches, passes=1, rate=1e-9, outputs="mse" if is_whole else None)
    torch.testing.assert_close(norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in outputs]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([x.var((0, 2, 3)) for x in outputs]).mean(0))
    assert row.after < row.before - 0.05 and norm.momentum == 0.1 and not norm.training
    assert torch.equal(model[0].weight == 0, is_zero)
    assert model[0].unused.running_var.eq(2).all() and model[0].unused.num_batches_tracked == 77
    assert norm.num_batches_tracked == len(batches) and row.renewed == row.after
    text = str(RecoverReport(rows=(row,)))
    assert f"new running statistics of batch norms alone reduced the error to {row.after:.4f}" in text


class ReplacesItsTensors(nn.BatchNorm2d):
    def forward(self, x):
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean((0, 2, 3))
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class CalculatesWithMomentum(nn.BatchNorm2d):
    def forward(self, x):
        if self.training:
            self.running_mean.mul_(1 - self.momentum).add_(self.momentum * x.mean((0, 2, 3)))
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


@pytest.mark.parametrize("why", ["other data", "one value", "replaced tensors", "a momentum in products"])
def test_statistics_of_batch_norms_stay_where_new_ones_are_worse_or_cannot_be_taken(why):
    if why == "one value":
        dense = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
        model, batches = copy.deepcopy(dense), [torch.randn(1, 8) for _ in range(8)]
        model[0].weight.data[:4] = 0
    else:
        dense, model, batches = normed()
        kind = {"replaced tensors": ReplacesItsTensors, "a momentum in products": CalculatesWithMomentum}
        for net in (dense, model):
            net[1].__class__ = kind.get(why, nn.BatchNorm2d)
        model[0].weight.data.copy_(dense[0].weight)
        model[4].weight.data *= 1.01
        batches = [3 * batch + 1 for batch in batches]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    (row,) = recover(model, dense, batches, passes=1, rate=1e-9, outputs="mse")
    assert row.after <= row.before and before and not any(module.training for module in model.modules())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert math.isnan(row.renewed) and "batch norms" not in str(RecoverReport(rows=(row,)))


def test_a_batch_with_a_single_value_of_a_channel_is_left_out_of_new_statistics():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    batches = [torch.randn(64, 8) for _ in range(8)]
    update_bn(batches, dense)
    model = copy.deepcopy(dense.eval())
    model[0].weight.data *= 0.5
    with torch.no_grad():
        outputs = [model[0](batch) for batch in batches]
    batches.insert(3, torch.randn(1, 8))
    (row,) = recover(model, dense, batches, passes=1, rate=1e-9)
    assert row.after < row.before / 2 and model[1].num_batches_tracked == 8
    torch.testing.assert_close(model[1].running_mean, torch.stack([x.mean(0) for x in outputs]).mean(0))


@pytest.mark.parametrize("error", [NameError, torch.OutOfMemoryError])
def test_other_errors_of_a_forward_in_training_mode_are_raised(error):
    def forward(model, batch):
        if model[1].training:
            raise error("a bug")
        return model(batch)

    dense, model, batches = normed()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match="a bug"):
        recover(model, dense, batches, passes=1, forward=forward)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_masks_of_batch_norms_stay_while_statistics_are_taken_anew():
    dense, model, batches = normed()
    model[0].weight.data *= 8
    sparsifier = ScopeSparsifier(nnz=6, scope_shape=(8,))
    sparsifier.prepare(model, [{"tensor_fqn": "1.weight"}])
    sparsifier.step()
    kept = model[1].weight != 0
    (row,) = recover(model, dense, batches, passes=1, rate=1e-9)
    assert row.renewed < row.before and int(kept.sum()) == 6 and torch.equal(model[1].weight != 0, kept)


def test_statistics_that_models_share_or_that_cannot_change_are_refused():
    dense, model, batches = normed()
    for net in (dense, model):
        net[1] = nn.BatchNorm2d(8, affine=False).eval()
    with torch.inference_mode():
        model[1].running_var = torch.ones(8)
    with pytest.raises(SparsityError, match=r"recover: 1\.running_var was made in inference mode"):
        recover(model, dense, batches)
    model[1] = dense[1]
    with pytest.raises(SparsityError, match=r"recover: both models share the values of 1\.running_mean"):
        recover(model, dense, batches)
    model[1] = copy.deepcopy(dense[1])
    assert recover(model, dense, batches, passes=1)


def test_statistics_of_batch_norms_are_as_before_after_an_interruption():
    dense, model, batches = normed()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    calls = itertools.count()

    def forward(model, batch):
        if model[1].training and next(calls) == 2:
            raise KeyboardInterrupt
        return model(batch)

    with pytest.raises(KeyboardInterrupt):
        recover(model, dense, batches, forward, outputs="mse")
    assert model[1].momentum == 0.1 and not model[1].training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("outputs", [None, "kl"])
def test_embeddings_and_what_is_tied_to_them_stay(outputs):
    model, inputs = make("Llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    dense, table = copy.deepcopy(model), model.model.embed_tokens.weight.clone()
    pruned, _ = prune(dense, 0.5, exclude=["lm_head"])
    before = copy.deepcopy(pruned.state_dict())
    recover(pruned, dense, [inputs], outputs=outputs, passes=8, rate=0.1)
    changed = {name for name, tensor in pruned.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and torch.equal(pruned.lm_head.weight, table)
    assert not any("embed" in name or "head" in name for name in changed)
