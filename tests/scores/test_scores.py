"""Every score against its formula, written out by loops; scores in configs, couplings and rules."""

import itertools
import math

import pytest
import torch
from stock import prepared
from torch import nn

from sparsekit_ao import Coupling, CouplingError, DynamicSparsifier, ScopeSparsifier, SparsityError, keep_mask, scores
from sparsekit_ao.calibration import Statistics, adapter_of
from sparsekit_ao.dynamic import criteria

OUT, IN, TOKENS = 4, 6, 20


@pytest.fixture
def case():
    """A weight, its statistics, and what the formulas need, in float64."""
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(IN, OUT, bias=False), torch.randn(TOKENS, IN, generator=generator)
    weight, gradient = layer.weight.detach(), torch.randn(OUT, IN, generator=generator)
    sums = {"input_gram": (x.T @ x)[None], "gradient": gradient, "gradient_square": gradient.square() * 2}
    sums["movement"] = -weight * gradient
    found = Statistics(
        name="w", shape=(OUT, IN), adapter=adapter_of(layer, "weight", {}), tokens=TOKENS, passes=2, sums=sums
    )
    return weight, found, x.double()


def damped(x, damp=0.01):
    gram = x.T @ x
    return torch.linalg.inv(gram + damp * gram.diagonal().mean() * torch.eye(IN, dtype=x.dtype))


def formula(name, w, x, g, i, j):
    """One element of a score."""
    w, square = w.double(), x[:, j].square().sum()
    return {
        "magnitude": lambda: abs(w[i, j]),
        "scale": lambda: 0.0,
        "lamp": lambda: w[i, j] ** 2 / w[w.abs() >= abs(w[i, j])].square().sum(),
        "wanda": lambda: abs(w[i, j]) * math.sqrt(square),
        "ria": lambda: (abs(w[i, j]) / w[i].abs().sum() + abs(w[i, j]) / w[:, j].abs().sum()) * square**0.25,
        "obd": lambda: w[i, j] ** 2 * square / 2,
        "obs": lambda: w[i, j] ** 2 / (2 * damped(x)[j, j]),
        "taylor": lambda: abs(w[i, j] * g[i, j]),
        "fisher": lambda: w[i, j] ** 2 * g[i, j] ** 2,
        "movement": lambda: -w[i, j] * g[i, j],
    }[name]()


@pytest.mark.parametrize(
    "name", ["magnitude", "scale", "lamp", "wanda", "ria", "obd", "obs", "taylor", "fisher", "movement"]
)
def test_formulas(name, case):
    weight, statistics, x = case
    found = scores.saliency_of(scores.NAMES[name], weight, "w", statistics)
    gradient = statistics.gradient.double()
    for i, j in itertools.product(range(OUT), range(IN)):
        expected = torch.as_tensor(formula(name, weight, x, gradient, i, j)).double()
        torch.testing.assert_close(found[i, j].double(), expected, rtol=1e-3, atol=1e-6)


LABELS = {
    "pairs of neighbours": torch.arange(OUT * IN // 2).repeat_interleave(2).view(OUT, IN),
    "columns": torch.arange(IN).expand(OUT, IN),
    "2 rows, 3 columns apart": torch.tensor([[0, 1, 2], [3, 4, 5]]).repeat(1, 2).repeat_interleave(2, 0),
    "smaller at an edge": torch.tensor([0, 0, 0, 0, 1, 1]).expand(OUT, IN),
    "rows": torch.arange(OUT)[:, None].expand(OUT, IN),
    "single elements": torch.arange(OUT * IN).view(OUT, IN),
    "other columns in every row": torch.tensor([[0, 1] * 3, [2, 2, 2, 3, 3, 3], [4, 5] * 3, [6, 7, 7, 7, 6, 6]]),
}


@pytest.mark.parametrize("name", LABELS)
def test_the_joint_saliency_of_a_block(name, case):
    """Its elements' shares sum up to w_b^T (C_bb)^-1 w_b / 2 over the block's rows."""
    weight, statistics, x = case
    labels, inverse = LABELS[name], damped(x)
    found = scores.saliency_of(scores.obs_block(), weight, "w", statistics, lambda: labels)
    for block in labels.unique():
        expected = 0.0
        for i in range(OUT):
            columns = (labels[i] == block).nonzero().flatten()
            if columns.numel():
                w = weight[i, columns].double()
                expected += w @ torch.linalg.inv(inverse[columns][:, columns]) @ w / 2
        torch.testing.assert_close(found[labels == block].sum().double(), expected, rtol=1e-3, atol=1e-5)


def test_random_scores_depend_on_seed_and_name_alone():
    one, again, other, seed = (
        scores.saliency_of(s, torch.zeros(3, 4), name)
        for s, name in [(scores.random(), "a"), (scores.random(), "a"), (scores.random(), "b"), (scores.random(1), "a")]
    )
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, seed)
    assert one.min() >= 0 and one.max() < 1


def test_a_singular_gram_matrix_is_damped_and_dead_inputs_are_an_error(case):
    weight, statistics, _ = case
    statistics.sums["input_gram"] = torch.ones(1, IN, IN)  # rank one
    assert scores.saliency_of(scores.obs(), weight, "w", statistics).isfinite().all()
    with pytest.raises(SparsityError, match=r"w: X\^T X is singular; .*more calibration tokens or a larger damp than"):
        scores.saliency_of(scores.obs(damp=0.0), weight, "w", statistics)
    statistics.sums["input_gram"] = torch.zeros(1, IN, IN)
    with pytest.raises(SparsityError, match="w: all inputs of this layer are zero in the calibration data"):
        scores.saliency_of(scores.obs(), weight, "w", statistics)


# in configs


def calibrated(score, model=None, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) if model is None else model
    sparsifier = prepared(model, score=score, **options)
    sparsifier.calibrate([torch.randn(16, 8)])
    sparsifier.step()
    return sparsifier


class Activation:
    """A score of a user: one small class."""

    needs = ("input_square",)

    def __call__(self, weight, statistics):
        return statistics.input_square.expand_as(weight)


def test_names_objects_functions_and_classes_of_the_user_are_scores():
    by_name = calibrated("wanda", scope_shape=(1, -1))
    by_object = calibrated(scores.wanda(), scope_shape=(1, -1))
    for name in by_name.state:
        saliency = scores.wanda()(by_name._dense(by_name.groups[0 if name[0] == "0" else 1]), by_name.statistics[name])
        expected = keep_mask(saliency, saliency.shape[1] // 2)
        assert torch.equal(by_name.mask(name), expected) and torch.equal(by_object.mask(name), expected)
    mine = calibrated(Activation(), block_shape=(-1, 1))
    square = mine.statistics["0.weight"].input_square[0]
    assert torch.equal(mine.mask("0.weight")[0], keep_mask(square[None], 4)[0])
    assert ScopeSparsifier(score="ria").defaults["score"] == "ria"


@pytest.mark.parametrize("score", ["wanda", "ria", "obd", "obs", "obs_block"])
@pytest.mark.parametrize(
    "structure",
    [{}, {"nnz": 2, "scope_shape": (1, 4)}, {"block_shape": (2, 1), "scope_shape": (1, -1)}, {"block_shape": (1, 2)}],
    ids=str,
)
def test_counts_are_exact_with_every_score(score, structure):
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
    structure = structure if structure.get("scope_shape") != (1, 4) else {**structure, "edge": "partial"}
    calibrated(score, model, **structure).check()


def test_a_score_of_blocks_knows_them_under_views_and_axes():
    """obs_block on heads: the mask is that of the joint saliencies, computed here by hand."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    sparsifier = ScopeSparsifier(0.5)
    heads = {"axes": "o (h d)", "unit": "h", "sizes": {"h": 4}}
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "score": "obs_block", **heads}])
    x = torch.randn(32, 8)
    sparsifier.calibrate([x])
    sparsifier.step()
    gram = (x.T @ x).double()
    inverse = torch.linalg.inv(gram + 0.01 * gram.diagonal().mean() * torch.eye(8))
    weight = sparsifier._dense(sparsifier.groups[0]).double()
    parts = [slice(2 * h, 2 * h + 2) for h in range(4)]
    joint = [(weight[:, s] @ torch.linalg.inv(inverse[s][:, s]) * weight[:, s]).sum() for s in parts]
    kept = keep_mask(torch.stack(joint)[None].float(), 2)[0].repeat_interleave(2)
    assert torch.equal(sparsifier.mask("0.weight"), kept.expand(6, 8))


@pytest.mark.parametrize(
    ("score", "text"),
    [
        ("wand", "score must be one of 'magnitude', .*, a function .* got 'wand'"),
        (scores.ria, r"score=ria is a class; call it, score=ria\(\)"),
        ("input_square", "score: needs must be a tuple of names, got 'input_square'"),
        (("hessian",), "score: needs are some of .*, got 'hessian'"),
    ],
)
def test_bad_scores(score, text):
    if "needs" in text:
        needs, score = score, Activation()
        score.needs = needs
    with pytest.raises(SparsityError, match=text):
        ScopeSparsifier(score=score)


# couplings


def coupled(how, score="obd"):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
    coupling = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"}, member_scores=how)
    sparsifier = prepared(model, [*coupling.entries(model, nnz=3)], score=score)
    return sparsifier


def test_only_consumers_of_a_coupling_count():
    """A unit's score is that of the layer whose inputs are the units; producers and biases add nothing."""
    sparsifier, x = coupled("consumers"), torch.randn(16, 8)
    sparsifier.calibrate([x])
    assert set(sparsifier.statistics) == {"2.weight"}
    sparsifier.step()
    weight = sparsifier._dense(next(g for g in sparsifier.groups if g["tensor_fqn"] == "2.weight"))
    assert torch.equal(sparsifier.mask("0.bias"), sparsifier.mask("2.weight")[0])
    expected = sparsifier.statistics["2.weight"].input_square[0] * weight.square().sum(0)
    assert torch.equal(sparsifier.mask("2.weight")[0], keep_mask(expected[None], 3)[0])


def test_saliencies_of_members_add_up():
    def ones(weight, name):
        return torch.arange(6.0)[:, None].expand(6, 8) if name == "0.weight" else torch.zeros_like(weight)

    sparsifier = coupled("sum", ones)
    sparsifier.step()
    assert sparsifier.mask("2.weight")[0].tolist() == [False] * 3 + [True] * 3


def test_a_coupling_without_consumers():
    with pytest.raises(SparsityError, match="member_scores='consumers' needs a score"):
        ScopeSparsifier(member_scores="consumers").prepare(nn.Sequential(nn.Linear(8, 6)))
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(8, 6))
    coupling = Coupling({"0.weight": "u i", "1.weight": "u i"}, member_scores="consumers")
    sparsifier = prepared(model, [*coupling.entries(model, nnz=3)], score="wanda")
    with pytest.raises(CouplingError, match="'consumers' needs a tensor whose blocks are inputs of its layer"):
        sparsifier.calibrate([torch.ones(1, 8)])


# rules


def dynamic(**options):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = DynamicSparsifier(0.5, optimizer, init="uniform", update_every=1, **options)
    sparsifier.prepare(model)
    optimizer.step()
    return sparsifier, torch.randn(16, 8)


@pytest.mark.parametrize("grow", ["obd", scores.wanda(), criteria.by_score(Activation())], ids=["obd", "wanda", "own"])
def test_scores_are_rules_of_a_dynamic_sparsifier(grow):
    sparsifier, x = dynamic(update_fraction=0.25, prune="wanda", grow=grow)
    with pytest.raises(SparsityError, match=r"0.weight: wanda\(\) needs input_square"):
        sparsifier.step()
    sparsifier.calibrate([x])
    before, weight = sparsifier.mask("0.weight").bool(), sparsifier._dense(sparsifier.groups[0]).clone()
    sparsifier.step()
    after, moved = sparsifier.mask("0.weight").bool(), sparsifier.last_update.pruned["0.weight"]
    saliency = torch.where(before, weight.abs() * x.square().sum(0).sqrt(), torch.inf)
    dropped = before & ~after
    assert after.sum() == before.sum() and moved <= 6
    assert not dropped.any() or saliency[dropped].max() <= saliency[before & after].max()


def test_an_unknown_rule_names_rules_and_scores():
    with pytest.raises(SparsityError, match="prune must be one of 'magnitude', .* got 'wand'; or a score, .*'wanda'"):
        DynamicSparsifier(0.5, prune="wand")


def test_a_score_of_blocks_is_a_rule():
    sparsifier, x = dynamic(prune="obs_block", grow="random", block_shape=(1, 2))
    sparsifier.calibrate([x])
    sparsifier.step()
    assert sparsifier.last_update.pruned["0.weight"] > 0 and sparsifier.check()


def test_elements_in_no_block_are_blocks_of_their_own():
    torch.manual_seed(0)
    weight, inverse = torch.randn(2, 6), torch.linalg.inv(torch.cov(torch.randn(6, 40)))
    found = scores.joint_saliency(weight, inverse, torch.tensor([[0, 0, -1, 1, 1, -1]] * 2))
    expected = weight.square() / (2 * inverse.diagonal())
    torch.testing.assert_close(found[:, [2, 5]], expected[:, [2, 5]])


@pytest.mark.parametrize("factor", [1e200, 1e-200, 1e-310, -1e308, 1.0])
def test_lamp_of_large_and_small_weights_is_that_of_others(factor):
    weight = torch.tensor([[0.1, -0.3], [0.2, 0.0]], dtype=torch.float64)
    scaled, expected = (scores.saliency_of(scores.lamp(), w, "fc.weight") for w in (weight * factor, weight))
    torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_lamp_keeps_what_is_not_finite(value):
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, 2.0, value, 3.0]])
    sparsifier = ScopeSparsifier(nnz=2, score="lamp")
    sparsifier.prepare(model)
    sparsifier.step()
    assert sparsifier.mask("0.weight").tolist() == [[False, False, True, True]]
