"""What fails or goes wrong with torch.ao's sparsifiers and works here, by number."""

import copy
import pickle

import pytest
import torch
from stock import linear_model, reloaded
from torch import nn
from torch.ao.pruning import CubicSL
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from sparsekit_ao import (
    STE,
    ProximalSparsifier,
    ScopeSparsifier,
    SparsityError,
    Static,
    WeightNormSparsifier,
    patterns,
)


def prepared(model: nn.Module, sparsifier=None, config=None, step: bool = True):
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4)) if sparsifier is None else sparsifier
    sparsifier.prepare(model, config)
    if step:
        sparsifier.step()
    return sparsifier


def test_1_compiles_with_fullgraph_and_a_mask_update_does_not_recompile():
    model = linear_model(8, 8, 4)
    sparsifier = prepared(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(3, 8)
    for level in (0.25, 0.5, 0.75):
        sparsifier.groups[0]["sparsity_level"] = level
        sparsifier.step()
        assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
def test_2_low_precision_weights_keep_their_dtype(dtype, kind):
    model = linear_model(8, 8, dtype=dtype)
    prepared(model, kind(0.5))
    out = model(torch.randn(3, 8, dtype=dtype))
    out.sum().backward()
    assert out.dtype == dtype
    assert model[0].weight.dtype == dtype


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
def test_4_strict_round_trip_of_the_models_state_dict(kind):
    first, second = linear_model(8, 4, seed=0), linear_model(8, 4, seed=1)
    prepared(first, kind(0.5))
    prepared(second, kind(0.5))
    second.load_state_dict(first.state_dict(), strict=True)
    assert "0.parametrizations.weight.0.mask" in first.state_dict()
    assert torch.equal(first[0].weight, second[0].weight)


def test_4_the_state_is_a_plain_copy_and_loading_pops_nothing_aliases_nothing_and_keeps_the_storage():
    score = ScopeSparsifier(score=lambda weight, name: weight.abs(), view=lambda w: w.unflatten(0, (2, 2)))
    sparsifier = prepared(linear_model(8, 4), score)
    saved, mask = sparsifier.state_dict(), sparsifier.mask("0.weight")
    own, storage = saved["state"]["0.weight"], mask.data_ptr()
    assert type(saved["state"]) is dict and torch.equal(reloaded(saved)["state"]["0.weight"]["mask"], mask)
    sparsifier.load_state_dict(saved)
    assert list(own) == ["mask"] and sparsifier.mask("0.weight").data_ptr() == storage != own["mask"].data_ptr()
    own["mask"].fill_(False)
    assert mask.any()


def test_5_a_copied_sparsifier_refers_to_the_copied_model():
    model = linear_model(8, 4)
    sparsifier = prepared(model, step=False)
    CubicSL(sparsifier)  # wraps step
    copied = copy.deepcopy(sparsifier)
    copied.step()
    assert copied.groups[0]["module"] is copied.model[0]
    assert sparsifier.mask("0.weight").all()


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier, STE, Static, ProximalSparsifier])
def test_5_a_sparsifier_is_pickled_without_a_model_and_saved_by_its_state_dict_with_one(kind):
    arguments = {"sparsity_level": 0.5, "conditioner": None} if kind is ProximalSparsifier else {}
    sparsifier = prepared(linear_model(8, 4), kind(**arguments))
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(SparsityError, match=rf"a {type(sparsifier).__name__} that was prepared cannot be pickled"):
            copied(sparsifier)
    again = pickle.loads(pickle.dumps(kind(**arguments)))
    again.prepare(linear_model(8, 4, seed=5))
    again.load_state_dict(sparsifier.state_dict())
    assert torch.equal(again.mask("0.weight"), sparsifier.mask("0.weight"))
    again.step()
    again.squash_mask()


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
def test_7_masks_are_filled_in_place(kind):
    model = linear_model(8, 4)
    sparsifier = prepared(model, kind(0.5), step=False)
    mask = model[0].parametrizations.weight[0].mask
    view, storage = mask.view(-1), mask.data_ptr()
    for level in (0.0, 0.5, 1.0, 0.25):
        sparsifier.groups[0]["sparsity_level"] = level
        sparsifier.step()
        assert sparsifier.mask("0.weight").data_ptr() == storage
        assert int(view.sum()) == int((1 - level) * 32)


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_8_masked_means_exactly_zero_in_forward_backward_and_squash(kind, bad):
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    sparsifier = prepared(model, kind(0.5, **({"scope_shape": (1, 4)} if kind is ScopeSparsifier else {})))
    mask = sparsifier.mask("0.weight")
    dropped = mask == 0
    with torch.no_grad():
        model[0].parametrizations.weight.original[dropped] = bad
    weight = model[0].weight
    assert torch.equal(weight[dropped], torch.zeros(int(dropped.sum())))
    weight.backward(torch.full_like(weight, bad))
    assert torch.equal(model[0].parametrizations.weight.original.grad[dropped], torch.zeros(int(dropped.sum())))
    sparsifier.squash_mask()
    assert torch.equal(model[0].weight[dropped], torch.zeros(int(dropped.sum())))


@pytest.mark.parametrize("options", [{"pattern": patterns.n_m(2, 4)}, {"block_shape": (1, -1), "sparsity_level": 0.5}])
def test_9_weight_norm_below_is_kept_through_step_and_squash(options):
    model = nn.Sequential(nn.Linear(8, 8), weight_norm(nn.Linear(8, 4)))
    sparsifier = prepared(model, ScopeSparsifier(**options))
    masked = model[1].weight.detach().clone()
    kept = (masked != 0).view(-1, 4).sum(1) == 2 if "block_shape" not in options else (masked == 0).all(1).sum() == 2
    assert kept.all()
    sparsifier.squash_mask()
    assert [type(p).__name__ for p in model[1].parametrizations.weight] == ["_WeightNorm"]
    assert torch.equal(model[1].weight == 0, masked == 0) and bool(model[1].weight.isfinite().all())
    torch.testing.assert_close(model[1].weight.detach(), masked)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_9_a_parametrization_above_is_kept():
    model = linear_model(8, 4)
    sparsifier = prepared(model)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    masked = model[0].weight.detach().clone()
    sparsifier.step()
    sparsifier.squash_mask()
    assert [type(p).__name__ for p in model[0].parametrizations.weight] == ["Doubled"]
    assert torch.equal(model[0].weight, masked)
    assert int((masked == 0).sum()) == 16


class NoEmptyRows(nn.Module):
    def forward(self, x):
        return x + 0

    def right_inverse(self, x):
        if not x.any(1).all():
            raise ValueError("a row is zero")
        return x


def test_9_what_cannot_be_expressed_is_refused_and_nothing_changes():
    model = linear_model(8, 8, 4)
    parametrize.register_parametrization(model[2], "weight", NoEmptyRows())
    sparsifier = prepared(model, ScopeSparsifier(0.5, block_shape=(1, -1)))
    before = [m.clone() for m in model.state_dict().values()]
    with pytest.raises(SparsityError, match="through NoEmptyRows: its right_inverse says a row is zero. Leave the"):
        sparsifier.squash_mask()
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (nn.utils.parametrizations.spectral_norm, "_SpectralNorm: its right_inverse does not give the masked weight"),
        (nn.utils.parametrizations.orthogonal, "_Orthogonal: its right_inverse does not give the masked weight"),
        (
            lambda layer: parametrize.register_parametrization(layer, "weight", Doubled(), unsafe=True),
            "Doubled: it has no right_inverse",
        ),
    ],
)
def test_9_what_could_never_be_squashed_is_refused_in_prepare(make, text):
    model = nn.Sequential(make(nn.Linear(8, 8)), nn.Linear(8, 4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(SparsityError, match=rf"0.weight': squash_mask could not write zeros through {text}"):
        ScopeSparsifier().prepare(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model[0].parametrizations.weight[0].training
    ScopeSparsifier().prepare(copy.deepcopy(model), exclude=["0.weight"])  # as the error says
    parametrize.remove_parametrizations(model[0], "weight")
    sparsifier = prepared(model)
    sparsifier.squash_mask()
    assert int((model[0].weight == 0).sum()) == 32
