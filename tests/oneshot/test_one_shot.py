"""Pruning in one pass: structures, blocks, couplings, interruptions and bad input."""

import copy
import dataclasses
import math
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from grids import turns
from hf_models import make
from networks import Net
from pruned_models import STRUCTURES, Model, correlated, distance, interrupted, layer_of, prepared
from stock import same
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import (
    Coupling,
    DynamicSparsifier,
    ScopeSparsifier,
    SparsityError,
    one_shot,
    patterns,
    prune,
    recover,
    removal,
)
from sparsekit_ao.calibration import LayerAdapter, RowGram, Statistics
from sparsekit_ao.oneshot import walk
from sparsekit_ao.oneshot.solving import prune_layer

METHODS = [(how, one) for one, how in turns(STRUCTURES, [(m,) for m in ("admm", "obs", "least_squares", None)], each=2)]


@pytest.mark.parametrize(("method", "structure"), [*METHODS, ("sparsegpt", "2:4"), ("sparsegpt", "unstructured")])
def test_every_structure_is_exact_and_compensation_helps(structure, method):
    batches, options = correlated(), STRUCTURES[structure]
    config = [{"tensor_fqn": ["blocks.*.weight", "head.weight"], **options}]
    sparsifier, plain = prepared(config=config), prepared(config=config)
    dense = prepared(config=config).model
    report = one_shot(sparsifier, batches, compensate=method)
    sparsifier.check()
    plain.step()
    for row in report:
        mask, group = sparsifier.mask(row.tensor), next(g for g in sparsifier.groups if g["tensor_fqn"] == row.tensor)
        assert not sparsifier._dense(group)[~mask].any() and row.density == mask.float().mean().item()
        assert row.after < row.before if method is not None else math.isnan(row.after)
    masks = {name: own["mask"].clone() for name, own in sparsifier.state.items()}
    if structure not in ("partial edge", "V:N:M"):  # dropped weights are zero, so the same masks are chosen again
        sparsifier.step()
        assert all(torch.equal(sparsifier.mask(n), m) for n, m in masks.items())
    if method is not None:
        assert distance(dense, sparsifier.model, batches) < distance(dense, plain.model, batches)
    else:
        assert all(torch.equal(m, plain.mask(n)) or n != "blocks.0.up.weight" for n, m in masks.items())


@pytest.mark.parametrize("returns", [lambda x: x, lambda x: (x, None)], ids=["tensor", "tuple"])
def test_blocks_give_what_single_layers_give_up_to_the_inputs_within_a_block(returns):
    """The walk finds the blocks; layers between blocks are pruned from the same statistics as without blocks."""
    dense, batches = Model(returns=returns), correlated()
    one = prepared(copy.deepcopy(dense))
    report = one_shot(one, batches)
    order = [row.tensor for row in report]
    assert order[0] == "first.weight" and order[-1] == "head.weight" and order.index("blocks.0.up.weight") == 1
    # the same by hand: a calibration of the whole model as it was when the pass reached each unit
    two = prepared(dense)
    names = [g["tensor_fqn"] for g in two.groups]
    for unit in ("first", "blocks.0", "blocks.1", "head"):
        two.forget_statistics()
        two.calibrate(batches, needs=["input_gram"])
        for name in (n for n in names if n.startswith(unit)):
            layer = layer_of(two, names.index(name))
            weight, mask, _ = prune_layer(layer, {g["tensor_fqn"]: g for g in two.groups}, "admm")
            two.mask(name).copy_(mask)
            with torch.no_grad():
                layer.target.parameter.copy_(weight)
    for name in one.state:
        assert torch.equal(one.mask(name), two.mask(name)), name


def test_a_model_without_blocks_and_blocks_that_are_none():
    parts = nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 4)
    report = one_shot(prepared(nn.Sequential(*parts), sparsity_level=0.5), [b[:, None] for b in correlated()])
    assert [r.tensor for r in report] == ["0.weight", "2.weight", "4.weight"]
    assert all(r.after < r.before for r in report)
    with pytest.raises(SparsityError, match="layers='block' is not a module of the model"):
        one_shot(prepared(), correlated(), layers="block")
    with pytest.raises(SparsityError, match="layers='head' is a ParametrizedLinear, not a ModuleList"):
        one_shot(prepared(), correlated(), layers="head")


CALLED = {
    "in reverse": lambda blocks, x: blocks[::-1],
    "all but one": lambda blocks, x: blocks if len(x) > 20 else blocks[::2],
    "none": lambda blocks, x: blocks if len(x) > 20 else [],
}


@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
def test_blocks_that_do_not_form_a_chain(called):
    class Other(Model):
        def forward(self, x):
            x = self.first(x)
            for block in called(list(self.blocks), x):
                x = block(x)
            return self.head(x)

    batches = [*correlated(), *correlated(2, 10, seed=1)]
    report = one_shot(prepared(Other(blocks=3)), batches)
    assert report.blocks == 0 and all(r.after < r.before for r in report)
    with pytest.raises(SparsityError, match="layers='blocks' do not form a chain"):
        one_shot(prepared(Other(blocks=3)), batches, layers="blocks")


@pytest.mark.parametrize("name", ["BERT", "Llama", "GPT-2", "Mixtral", "T5"])
def test_transformers(name):
    model, inputs = make(name)
    sparsifier = ScopeSparsifier(pattern=patterns.n_m(2, 4))
    sparsifier.prepare(model, exclude=["*lm_head*"] if name in ("T5",) else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "Mixtral" else "error")
        report = one_shot(sparsifier, [inputs])
    sparsifier.check()
    assert all(r.after <= r.before for r in report if r.before == r.before)


@pytest.mark.parametrize("recovers", [False, True])
def test_an_attention_mask_in_the_batches_leaves_out_padding(recovers):
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = Net(lambda m, inputs_embeds, attention_mask=None: m.blocks(inputs_embeds), blocks=blocks)
    x, keep = torch.stack(correlated(4, 6)), torch.ones(4, 6, dtype=torch.int64)
    keep[0, 4:], keep[2, 2:] = 0, 0
    batch = {"inputs_embeds": torch.where(keep[..., None] > 0, x, 100.0), "attention_mask": keep}
    results = [
        prune(model, 0.5, batches=[batch], token_mask=mask, recover=recovers)
        for mask in (None, "attention_mask", False)
    ]
    for p, named, other in zip(*(m.parameters() for m, _ in results), strict=True):
        assert torch.equal(p, named) and (p.ndim < 2 or not torch.equal(p, other))
    assert "18 of 24 tokens count, by their mask" in str(results[0][1]) and results[2][1].tokens == ""
    clean, _ = prune(model, 0.5, batches=[{"inputs_embeds": x[keep > 0]}])
    assert torch.equal(results[0][0].blocks[0].weight != 0, clean.blocks[0].weight != 0)
    additive = dict(batch, attention_mask=torch.where(keep > 0, 0.0, -100.0))
    other, _ = prune(model, 0.5, batches=[additive], recover=recovers)
    assert torch.equal(other.blocks[0].weight, results[2][0].blocks[0].weight)


def loss(model, batch):
    return model(batch).square().mean()


def test_scores_of_gradients_in_prune():
    model, batches = Model(), correlated()
    one = prepared(copy.deepcopy(model), pattern="2:4", score="taylor")
    one.calibrate(batches, loss)
    one_shot(one, batches, loss, compensate="least_squares")
    one.squash_mask()
    keys = {"sparsity_level": "2:4", "batches": batches, "score": "taylor", "compensate": "least_squares"}
    two, _ = prune(model, **keys, forward=loss)
    assert all(torch.equal(p, one.model.get_parameter(name)) for name, p in two.named_parameters())
    for text, call in {
        r"score='taylor' needs gradients of a loss; give forward=": lambda: prune(model, **keys),
        r"score='taylor' needs a forward that returns the loss, but recover": lambda: prune(
            model, **keys, forward=loss, recover=True
        ),
        r"score='wanda' needs batches to record input_square; give batches=": lambda: prune(model, score="wanda"),
    }.items():
        with pytest.raises(SparsityError, match=text):
            call()


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([torch.ones(3, 8), torch.ones(0, 8)], r"a batch has no rows, only tensors of shape \(0, 8\)"),
        ([[1, 2, 3], [4, 5]], r"got a list of numbers; give token ids as batches=\[torch.tensor\(\[ids\]\)\]"),
        ([1, 2, 3], "a batch must have tensors, got the number 1"),
    ],
)
def test_batches_without_rows_and_batches_of_numbers_are_refused(batches, text):
    sparsifier, model = prepared(score="wanda"), Model()
    for call in (
        lambda: prune(model, batches=batches),
        lambda: one_shot(sparsifier, batches),
        lambda: sparsifier.calibrate(batches),
    ):
        with pytest.raises(SparsityError, match=text):
            call()
    assert not sparsifier.statistics
    ids = torch.tensor([[1, 2, 3]])
    assert prune(nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8)), batches=[ids])[1].rows  # the advice


def test_a_report_without_batches_says_so_and_weight_norm_stays_in_eval_mode():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))).eval()
    pruned, report = prune(model)
    assert re.search(r"^1 layers in \d+\.\d s, without batches$", str(report), re.MULTILINE)
    assert not any(module.training for module in pruned.modules())


def test_token_masks_of_other_kinds_and_batches_of_padding_are_refused():
    sparsifier, x = prepared(score="wanda"), torch.ones(2, 8)
    for mask in (torch.ones(2), 0, 3.5):
        with pytest.raises(SparsityError, match="token_mask must be a key of the batches, a function, or False"):
            sparsifier.calibrate([x], token_mask=mask)
    batch = {"input": x, "attention_mask": torch.zeros(2, 8)}
    with pytest.raises(SparsityError, match="of which no token counts; leave such a batch out, or give token_mask"):
        sparsifier.calibrate([batch], lambda model, batch: model(batch["input"]))
    sparsifier.calibrate([batch], lambda model, batch: model(batch["input"]), token_mask=False)
    assert sparsifier.statistics["first.weight"].tokens == 2
    for more in ({}, {"attention_mask": torch.ones(2, 8), "decoder_attention_mask": torch.zeros(2, 8)}):
        decoder = {**batch, "decoder_input_ids": torch.ones(2, 8), **more}
        with pytest.raises(SparsityError, match="of which no token counts; leave such a batch out, or give token_mask"):
            sparsifier.calibrate([decoder], lambda model, batch: model(batch["input"]))


def test_check_after_an_interruption_in_the_first_block_names_one_shot():
    sparsifier = prepared()
    with pytest.raises(KeyboardInterrupt):
        one_shot(sparsifier, correlated(), lambda model, batch: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SparsityError, match=r"no masks were chosen yet; call step\(\) or one_shot"):
        sparsifier.check()
    one_shot(sparsifier, correlated())
    assert sparsifier.check()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: prune(Model(), sparsity=0.5), "prune() has no argument 'sparsity'. Did you mean 'sparsity_level'?"),
        (lambda: prune(Model(), ratio=0.5), "Did you mean 'sparsity_level'?"),
        (lambda: prune(Model(), pattern="2:4"), "prune() has no argument 'pattern'. Did you mean 'sparsity_level'?"),
        (lambda: one_shot(prepared(), [], tokenmask="x"), "Did you mean 'token_mask'?"),
        (lambda: recover(Model(), Model(), [], epochs=3, rat=1), "recover() has no argument 'epochs'."),
        (lambda: removal.shrink(Model(), torch.ones(1, 8), sparsity_level=0.5), "Did you mean 'ratio'?"),
        (lambda: one_shot(prepared(), [], blocks="h"), "one_shot() has no argument 'blocks'. Did you mean 'layers'?"),
        (
            lambda: recover(Model(), Model(), [], blocks="h"),
            "recover() has no argument 'blocks'. Did you mean 'layers'?",
        ),
        (lambda: removal.shrink_layers(Model(), [], blocks="h"), "no argument 'blocks'. Did you mean 'layers'?"),
    ],
)
def test_unknown_arguments_are_explained(call, text):
    with pytest.raises(TypeError) as error:
        call()
    assert text in str(error.value)


def units(model):
    members = {"blocks.*.up.weight": "u i", "blocks.*.up.bias": "u", "blocks.*.down.weight": "o u"}
    coupling = Coupling(members, member_scores="consumers")
    return coupling, list(coupling.entries(model, sparsity_level=0.5))


@pytest.mark.parametrize("score", ["obd", "obs"])
def test_removed_units_are_made_up_for_by_the_consumers_and_compact_is_exact(score):
    torch.manual_seed(0)
    dense, batches = Model(), correlated(12)
    distances = {}
    for method in (None, "least_squares"):
        model = copy.deepcopy(dense)
        coupling, config = units(model)
        sparsifier = ScopeSparsifier(score=score)
        sparsifier.prepare(model, config)
        report = one_shot(sparsifier, batches, compensate=method)
        sparsifier.check()
        kept = sparsifier.mask("blocks.0.up.bias")
        assert int(kept.sum()) == 16 and {r.tensor for r in report} == set(sparsifier.state)
        assert torch.equal(sparsifier.mask("blocks.0.down.weight"), kept.expand(16, 32))
        distances[method] = distance(dense, model, batches)
        sparsifier.squash_mask()
        small, _ = removal.compact(model, coupling, batches[0])
        assert small.blocks[0].up.weight.shape == (16, 16)
        assert distance(dense, small, batches) == pytest.approx(distances[method], rel=1e-3)
    assert distances["least_squares"] < 0.7 * distances[None]


def test_a_budget_over_all_tensors_is_chosen_before_anything_changes():
    batches, options = correlated(), {"sparsity_level": 0.6, "score": "wanda", "scope_coupling": "all"}
    plain, sparsifier = prepared(**options), prepared(**options)
    plain.calibrate(batches)
    plain.step()
    report = one_shot(sparsifier, batches)
    for name in sparsifier.state:
        assert torch.equal(sparsifier.mask(name), plain.mask(name))
    assert all(r.after <= r.before for r in report) and sparsifier.check()


def test_an_interruption_leaves_layers_as_they_were_or_finished_and_the_same_call_goes_on(tmp_path):
    batches, dense = correlated(), Model()
    whole = prepared(copy.deepcopy(dense))
    expected = one_shot(whole, batches, recover=True)
    for at in (8, 20, 26, 33):  # calls of the model or of a block
        sparsifier = prepared(copy.deepcopy(dense))
        before = {g["tensor_fqn"]: sparsifier._dense(g).clone() for g in sparsifier.groups}
        model = sparsifier.model
        with interrupted((model.first, *model.blocks, model.head), at):
            one_shot(sparsifier, batches, recover=True, checkpoint=tmp_path)
        done = [n for n in before if not sparsifier.mask(n).all()]
        assert len(done) < len(before)
        for group in sparsifier.groups:
            name = group["tensor_fqn"]
            if name not in done:
                assert torch.equal(sparsifier._dense(group), before[name])
            else:
                assert torch.equal(sparsifier.mask(name), whole.mask(name))
    again = prepared(copy.deepcopy(dense))
    report = one_shot(again, batches, recover=True, checkpoint=tmp_path)
    assert [r.after for r in report] == [r.after for r in expected]
    assert [r.after for r in report.recovery] == [r.after for r in expected.recovery]
    assert same(again.model.state_dict(), whole.model.state_dict())
    with pytest.raises(SparsityError, match="was written by a call with another model; to continue"):
        one_shot(again, batches, recover=True, checkpoint=tmp_path)


def test_bfloat16_weights_and_a_model_in_train_mode():
    dense = Model().to(torch.bfloat16).train()
    batches = [b.to(torch.bfloat16) for b in correlated()]
    sparsifier = prepared(dense)
    report = one_shot(sparsifier, batches)
    assert dense.training and all(r.after < r.before for r in report)
    assert sparsifier._dense(sparsifier.groups[0]).dtype == torch.bfloat16 and sparsifier.check()


def test_one_token_dead_inputs_and_frozen_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    batch = torch.randn(1, 8)
    batch[0, :4] = 0
    report = one_shot(prepared(model), [batch])
    assert report[0].note == "1 tokens for 8 inputs" and all(r.after <= r.before + 1e-6 for r in report)


@pytest.mark.parametrize("method", [None, "least_squares", "admm", "obs"])
def test_the_report_says_where_a_method_chose_the_mask_without_the_score(method):
    model, inputs = nn.Sequential(nn.Linear(8, 8)), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    score, two_four = lambda weight, name: -torch.arange(8.0).expand(8, 8), {"nnz": 2, "scope_shape": (1, 4)}
    first = prepared(model, score=score, **two_four)
    (row,) = one_shot(first, [inputs], compensate=method)
    vain = f"{method} chose the mask without the score; compensate='least_squares' uses it"
    assert row.note == (vain if method in ("admm", "obs") else "")
    assert row.note or first.mask("0.weight").view(8, 2, 4)[..., :2].all()  # the first two of four


class Grouped(nn.Linear):
    """A Linear that multiplies each group of its inputs by other rows of its weight, as DeepSeek-V4's `o_a_proj`."""

    def forward(self, x):
        x = x.unflatten(-1, (-1, self.in_features))
        rows = self.weight.view(x.shape[-2], -1, self.in_features)
        return torch.bmm(x.flatten(0, -3).transpose(0, 1), rows.mT).transpose(0, 1).reshape(*x.shape[:-2], -1)


class Summed(nn.Linear):
    def forward(self, x):
        return (x[:, None] * self.weight).sum(-1)


class Mapped(nn.Linear):
    def forward(self, x):
        return torch.vmap(lambda row: self.weight @ row)(x)


@pytest.mark.parametrize("kind", [Grouped, Summed, Mapped])
@pytest.mark.parametrize("keys", [{}, {"compensate": "obs"}, {"compensate": None, "score": "wanda"}])
def test_the_report_says_that_a_layer_was_pruned_by_magnitude_and_why(kind, keys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), kind(4 if kind is Grouped else 16, 16), nn.Linear(16, 8))
    pruned, report = prune(model, 0.5, batches=[torch.randn(32, 8)], progress=False, **keys)
    notes = {row.tensor: row.note for row in report}
    assert notes["0.weight"] == notes["2.weight"] == ""
    assert re.search("no product of the forward with this weight is of a known kind.*pruned by magnitude", str(report))
    assert notes["1.weight"].endswith("pruned by magnitude where the score needs inputs, not compensated")
    by_magnitude = prune(model, 0.5, exclude=["0", "2"], progress=False)[0]
    assert torch.equal(pruned[1].weight, by_magnitude[1].weight)


def test_no_gram_matrix_is_recorded_that_nothing_needs(monkeypatch):
    model = nn.Sequential(nn.Conv1d(4, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    monkeypatch.setattr(LayerAdapter, "gram", lambda *_: pytest.fail("a Gram matrix was recorded"))
    few = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))  # 12 positions of 20 inputs, 3 rows of 32
    for method, score in ((None, "wanda"), ("admm", None)):
        sparsifier = prepared(copy.deepcopy(model), sparsity_level=0.5, score=score)
        rows = one_shot(sparsifier, [few], compensate=method)
        assert sparsifier.check() and all(math.isnan(r.after) or r.after < r.before for r in rows)
    assert [r.note for r in rows] == ["12 tokens for 20 inputs", "3 tokens for 32 inputs"]


def test_what_would_invert_too_large_a_matrix_is_refused_and_the_advice_works():
    model = nn.Sequential(nn.Conv1d(2048, 2, 17))
    sparsifier = prepared(model, sparsity_level=0.5)
    with pytest.raises(SparsityError, match=r"0.weight has 34,816 inputs, and compensate='obs' .* use 'admm'"):
        one_shot(sparsifier, [torch.randn(1, 2048, 18)], compensate="obs")
    assert sparsifier.mask("0.weight").all() and one_shot(sparsifier, [torch.randn(1, 2048, 18)], compensate="admm")


class Inputs:
    """A score by magnitude that remembers what it is given."""

    needs = ("input_square",)

    def __init__(self):
        self.seen = {}

    def __call__(self, weight, statistics):
        self.seen[statistics.name] = statistics
        return weight.abs()

    def tokens(self):
        return {name: statistics.tokens for name, statistics in self.seen.items()}


def test_batches_of_any_size_are_summed():
    model, rows = nn.Sequential(nn.Linear(8, 4)), torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    for sizes in ((3, 2, 30, 5), (7, 33), (40,), (2, 2), (3, 5)):
        inputs, used = Inputs(), rows[: sum(sizes)]
        sparsifier = prepared(copy.deepcopy(model), sparsity_level=0.5, score=inputs)
        one_shot(sparsifier, used.split(sizes), compensate="least_squares")
        statistics = inputs.seen["0.weight"]
        assert statistics.tokens == len(used) and isinstance(statistics.gram, RowGram) == (len(used) < 8)
        torch.testing.assert_close(statistics.input_square[0], used.square().sum(0))
        torch.testing.assert_close(torch.eye(8)[None] @ statistics.gram, (used.T @ used)[None])
        torch.testing.assert_close(statistics.input_gram, (used.T @ used)[None])


def test_positions_of_a_convolution_are_sampled(monkeypatch):
    monkeypatch.setattr(walk, "SAMPLED", 2 * 12 * 30)
    inputs, model = Inputs(), nn.Sequential(nn.Conv2d(3, 8, 2), nn.ConvTranspose2d(8, 4, 2))
    sparsifier, batches = prepared(model, sparsity_level=0.5, score=inputs), [torch.randn(2, 3, 9, 7)] * 2
    state = torch.get_rng_state()
    one_shot(sparsifier, batches, compensate="least_squares")
    assert inputs.tokens() == {"0.weight": 2 * 30, "1.weight": 2 * 11} and torch.equal(torch.get_rng_state(), state)


def test_bad_calls_change_nothing():
    sparsifier = prepared()
    before = {g["tensor_fqn"]: sparsifier._dense(g).clone() for g in sparsifier.groups}
    nan = [torch.full((2, 8), torch.nan)]
    for text, call in {
        "one_shot: there are no batches": lambda: one_shot(sparsifier, iter([])),
        "must be one of None, 'least_squares'.*got 'lsq'": lambda: one_shot(sparsifier, [0], compensate="lsq"),
        "first.weight: the inputs of this layer are not finite": lambda: one_shot(sparsifier, nan),
        "needs a ScopeSparsifier, got DynamicSparsifier": lambda: one_shot(DynamicSparsifier(0.5), [0]),
        "one_shot": lambda: one_shot(ScopeSparsifier(), [0]),
    }.items():
        with pytest.raises(SparsityError, match=text):
            call()
    for group in sparsifier.groups:
        assert torch.equal(sparsifier._dense(group), before[group["tensor_fqn"]]) and sparsifier.live_mask(group).all()
    with torch.no_grad():
        sparsifier.model.head.parametrizations.weight.original[0, 0] = torch.nan
    with pytest.raises(SparsityError, match="one_shot: head.weight has weights that are not finite"):
        one_shot(sparsifier, correlated())
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    with pytest.raises(SparsityError, match="one_shot: 0.weight has another parametrization below its mask"):
        one_shot(prepared(model), correlated())


def test_scores_of_gradients_are_collected_before():
    batches = correlated()
    sparsifier = prepared(score="fisher", nnz=2, scope_shape=(1, 4))
    with pytest.raises(SparsityError, match=r"one_shot: first.weight: fisher\(\) needs gradient_square; run"):
        one_shot(sparsifier, batches, compensate="least_squares")


def test_the_report_prints_and_plots(tmp_path):
    report = one_shot(prepared(), correlated(), progress=False)
    assert str(report).splitlines()[0].split()[:3] == ["tensor", "before", "after"]
    assert (
        f"{len(report)} layers in" in str(report) and len(report) == 6 and ", 2 blocks\ncovers 100.0% of" in str(report)
    )
    assert set(report.metrics()) == {"seconds", *(f"output_error/{r.tensor}" for r in report)}
    report.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 1000


def test_the_layers_with_the_largest_errors_can_be_excluded():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    with torch.no_grad():
        for at, layer in enumerate(model):
            layer.weight.mul_(torch.tensor([1.0, 1.0, 0.001 if at != 2 else 1.0, 0.001 if at != 2 else 1.0]).repeat(4))
    batches = [torch.randn(64, 16)]
    report = prune(model, "2:4", batches=batches, exclude=["1"])[1]
    assert report.worst(1) == ["2.weight"] and report.worst(9)[0] == "2.weight" and len(report.worst(9)) == 3
    pruned = prune(model, "2:4", batches=batches, exclude=report.worst(1))[0]
    assert (pruned[2].weight != 0).all() and not (pruned[3].weight != 0).all()
    assert prune(model, "2:4")[1].worst(3) == []  # without batches, no errors are known


@pytest.mark.parametrize("count", [0.5, -1, 2.0, True, None, "2", [1]])
def test_a_count_of_worst_layers_is_a_whole_number(count):
    report = prune(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "2:4", batches=[torch.randn(16, 8)])[1]
    with pytest.raises(SparsityError, match=rf"worst: count must be a whole number .* got {re.escape(repr(count))}"):
        report.worst(count)
    assert report.worst(0) == []  # where a sweep begins


def stack(blocks):
    def run(m, x):
        x = x.clone()
        for block in m.blocks:
            x = block(x)
        return x

    return Net(run, blocks=nn.ModuleList(blocks))


def in_place(m, x):
    x += m.up(x.relu())
    return x


def linear_blocks(count, shared=None):
    parts = [[nn.Linear(8, 8), nn.ReLU(), shared or nn.Linear(8, 8)] for _ in range(count)]
    return [nn.Sequential(*p) for p in parts]


CHAINS = {
    "middle blocks without layers": (lambda: linear_blocks(4), ["blocks.0.0", "blocks.3.0"]),
    "changes in place": (
        lambda: [Net(in_place, up=nn.Linear(8, 8)) for _ in range(3)],
        [f"blocks.{k}.up" for k in range(3)],
    ),
    "a layer of all blocks": (lambda: linear_blocks(3, nn.Linear(8, 8)), ["blocks.0.0", "blocks.0.2"]),
}


@pytest.mark.parametrize(("make_blocks", "names"), CHAINS.values(), ids=CHAINS)
def test_blocks_read_the_inputs_that_a_whole_forward_pass_gives(make_blocks, names, monkeypatch):
    torch.manual_seed(0)
    dense, config = stack(make_blocks()), [{"tensor_fqn": f"{name}.weight"} for name in names]
    reports = []
    for is_walked in (True, False):
        if not is_walked:
            monkeypatch.setattr(walk, "find_chains", lambda *_: [])
        sparsifier = prepared(copy.deepcopy(dense), config=config, sparsity_level=0.5)
        reports.append([(r.tensor, r.before, r.after) for r in one_shot(sparsifier, correlated())])
    assert reports[0] == reports[1]


def test_a_cache_is_as_it_was_whenever_a_block_runs():
    dense, inputs = make("Gemma2")
    reports = []
    for use_cache in (True, False):
        sparsifier = prepared(copy.deepcopy(dense))
        report = one_shot(sparsifier, [{**inputs, "use_cache": use_cache}])
        reports.append([(r.tensor, r.before, r.after) for r in report])
    assert reports[0] == reports[1]


def test_both_calls_of_a_layer_that_is_called_twice_count():
    inputs, layer = Inputs(), nn.Linear(8, 8)
    sparsifier = prepared(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(8, 4)), score=inputs, **STRUCTURES["2:4"])
    report = one_shot(sparsifier, correlated(2), compensate="least_squares")
    assert inputs.tokens() == {"0.weight": 128, "3.weight": 64} and all(r.after < r.before for r in report)


def test_autocast_is_for_the_model_alone():
    (one, two), batches = (prepared() for _ in range(2)), correlated()
    first = one_shot(one, batches)[0]
    with torch.autocast("cpu", torch.bfloat16):
        second = one_shot(two, batches)[0]
    assert (first.before, first.after) == (second.before, second.after)
    with torch.inference_mode():
        assert all(r.after < r.before for r in one_shot(prepared(), batches))


@pytest.mark.parametrize("method", ["obs", "admm", "least_squares"])
def test_elements_outside_a_view_are_kept(method):
    layer = nn.Sequential(nn.Linear(16, 8))
    options = {"nnz": 2, "view": ((4, 4, 4), (16, 4, 1)), "scope_shape": (1, 1, -1)}  # the first 4 of 8 rows
    sparsifier = prepared(layer, **options)
    report = one_shot(sparsifier, correlated(width=16), compensate=method)
    assert sparsifier.mask("0.weight")[4:].all() and sparsifier.check() and report[0].after < report[0].before
    sparsifier = prepared(nn.Sequential(nn.Linear(16, 8)), sparsity_level=0.5, view=((4, 16), (16, 1)))
    with pytest.raises(SparsityError, match="compensate='sparsegpt' knows only"):
        one_shot(sparsifier, correlated(width=16), compensate="sparsegpt")


def test_experts_that_no_batch_reaches_are_pruned_by_magnitude_and_named():
    model = Net(lambda m, x: m.experts[0](x), experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
    by_magnitude = prepared(copy.deepcopy(model))
    by_magnitude.step()
    sparsifier = prepared(model, score="wanda", nnz=2, scope_shape=(1, 4))
    with pytest.warns(UserWarning, match="no batch reached experts.1.weight; they are pruned without .*by") as w:
        report = one_shot(sparsifier, correlated(), compensate="least_squares")
    assert w[0].filename == __file__
    assert torch.equal(sparsifier.mask("experts.1.weight"), by_magnitude.mask("experts.1.weight"))
    assert [r.note for r in report] == ["", "not reached by any batch"] and sparsifier.check()


@pytest.mark.parametrize("compensate", ["admm", "least_squares", None])
def test_a_layer_whose_inputs_cannot_be_recorded_is_pruned_by_magnitude_in_a_block_too(compensate):
    def blocks():
        parts = {"fc": lambda: nn.Linear(8, 8), "pair": lambda: nn.Bilinear(8, 8, 8)}
        made = [Net(lambda m, x: x + m.fc(x) + m.pair(x, x), **{k: f() for k, f in parts.items()}) for _ in range(3)]
        return nn.Sequential(*made)

    torch.manual_seed(0)
    model = blocks()
    config = [{"tensor_fqn": ["*.fc.weight", "*.pair.weight"]}]
    by_magnitude = ScopeSparsifier(0.5)
    by_magnitude.prepare(copy.deepcopy(model), config)
    by_magnitude.step()
    sparsifier = ScopeSparsifier(0.5, score="wanda")
    sparsifier.prepare(model, config)
    with pytest.warns(UserWarning, match="inputs of Bilinear are not recorded, so 0.pair.weight, 1.pair.weight, 2.pa"):
        report = one_shot(sparsifier, correlated(), compensate=compensate)
    assert report.blocks == 3 and sparsifier.check()
    for k in range(3):
        assert torch.equal(sparsifier.mask(f"{k}.pair.weight"), by_magnitude.mask(f"{k}.pair.weight"))
        assert not torch.equal(sparsifier.mask(f"{k}.fc.weight"), by_magnitude.mask(f"{k}.fc.weight"))
    assert all((report[f"{k}.fc.weight"].after < report[f"{k}.fc.weight"].before) == bool(compensate) for k in range(3))
    # In a budget that all of them share, magnitudes could not be compared with the scores of the others.
    sparsifier, model = ScopeSparsifier(0.5, score="wanda", scope_coupling="all"), blocks()
    sparsifier.prepare(model, config)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparsityError, match="inputs cannot be recorded for .weight. of ParametrizedBilinear; give it"):
        one_shot(sparsifier, correlated(), compensate=compensate)
    assert same(model.state_dict(), before)


def test_at_most_two_blocks_have_gram_matrices_in_memory_at_a_time(monkeypatch):
    class Watched(nn.Sequential):
        def forward(self, x):
            held = [s() for s in recorded if s() is not None]
            live.append(len({id(s.sums["input_gram"]) for s in held if "input_gram" in s.sums}))
            return super().forward(x)

    def statistics(**arguments):
        found = Statistics(**arguments)
        recorded.append(weakref.ref(found))
        return found

    live, recorded = [], []
    monkeypatch.setattr("sparsekit_ao.calibration.statistics.Statistics", statistics)
    blocks = [Watched(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(6)]
    report = one_shot(prepared(stack(blocks)), correlated())
    assert report.blocks == 6 and len(recorded) >= 12
    assert 2 <= max(live) <= 4  # two layers in a block


def test_blocks_may_take_arrays_and_objects_that_hold_tensors():
    @dataclasses.dataclass
    class Options:
        scale: torch.Tensor

    def block(m, x, array, options):
        return m.layer(x).relu() * float(array[0]) * options.scale

    def chain(m, x):
        for k, block in enumerate(m.blocks):
            x = block(x, np.ones(2), Options(torch.ones(8) + (k if m.differs else 0)))
        return x

    for differs in (False, True):
        blocks = nn.ModuleList(Net(block, layer=nn.Linear(8, 8)) for _ in range(3))
        model = Net(chain, blocks=blocks, differs=differs)
        assert one_shot(prepared(model), correlated()).blocks == (0 if differs else 3)


class Reader(nn.Module):
    """A layer, and a function that reads the weight of another one, or filters, without calling it."""

    def __init__(self, layer, other, run):
        super().__init__()
        self.layer, self.other, self.run = layer, other, run

    def forward(self, x):
        return self.run(self.layer(x).relu(), self.other)


LINEAR, CONVOLUTION = (lambda: (nn.Linear(6, 8), nn.Linear(8, 4))), (lambda: (nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)))
READERS = {
    "linear": (LINEAR, lambda x, m: F.linear(x, m.weight, m.bias)),
    "weight first": (LINEAR, lambda x, m: (m.weight @ x.mT).mT + m.bias),
    "transposed": (LINEAR, lambda x, m: torch.addmm(m.bias, x.flatten(0, 1), m.weight.T)),
    "normalized": (LINEAR, lambda x, m: F.linear(x, F.normalize(m.weight))),
    "normalized after it was transposed": (LINEAR, lambda x, m: x @ F.normalize(m.weight.T, dim=0)),
    "bounded after it was transposed": (LINEAR, lambda x, m: x @ m.weight.t().clamp(-1, 1)),
    "convolution": (CONVOLUTION, lambda x, m: F.conv2d(x, m.weight, m.bias)),
    "standardized filters": (CONVOLUTION, lambda x, m: F.conv2d(x, (m.weight - m.weight.mean()) / m.weight.std())),
}


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_weights_that_are_read_without_a_call_of_their_layer_have_statistics(name, is_block):
    torch.manual_seed(0)
    make, run = READERS[name]
    layers = make()
    inputs = torch.randn(16, 5, 6) if make is LINEAR else torch.randn(4, 3, 8, 8)
    model = Reader(*layers, run)
    pruned, report = prune(nn.Sequential(model) if is_block else model, batches=[inputs], progress=False)
    expected, of_layers = prune(nn.Sequential(layers[0], nn.ReLU(), layers[1]), batches=[inputs], progress=False)
    reader = pruned[0] if is_block else pruned
    assert torch.equal(reader.other.weight, expected[2].weight)
    assert [row.note for row in report] == ["", ""] and report.rows[1].after == of_layers.rows[1].after


def test_masked_weights_that_are_read_without_a_call_have_statistics():
    torch.manual_seed(0)
    model, sparsifier = Reader(*LINEAR(), READERS["linear"][1]), ScopeSparsifier(0.5)
    sparsifier.prepare(model)
    assert all(row.after < row.before for row in one_shot(sparsifier, [torch.randn(16, 5, 6)], progress=False))


@pytest.mark.parametrize("pattern", [None, "2:4"])
@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_a_module_of_ones_own_are_pruned_as_those_of_a_layer(groups, pattern):
    torch.manual_seed(0)
    filters, inputs = nn.Conv2d(8, 4, 3, groups=groups), torch.randn(4, 8, 7, 7)

    class Filters(nn.Module):
        def __init__(self):
            super().__init__()
            self.groups, self.own, self.bias = groups, nn.Parameter(filters.weight.detach()), filters.bias

        def forward(self, x):
            return F.conv2d(x, self.own, self.bias, groups=self.groups)

    pruned, report = prune(nn.Sequential(Filters()), pattern, batches=[inputs], progress=False)
    expected = prune(nn.Sequential(filters), pattern, batches=[inputs], progress=False)[0]
    assert torch.equal(pruned[0].own, expected[0].weight) and not report.dense


def test_the_warning_of_weights_that_no_batch_reaches_names_the_call():
    model = Reader(*LINEAR(), lambda x, m: x)
    with pytest.warns(UserWarning, match=r"^prune: no batch reached other\.weight; they are pruned without"):
        prune(model, batches=[torch.randn(16, 5, 6)], progress=False)
