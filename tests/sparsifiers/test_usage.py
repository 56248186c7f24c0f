"""Calls that have no effect, or not the expected one, in the order or on the model on which they are made."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.ao.pruning import LambdaSL

from sparsekit_ao import ScopeSparsifier, SparsityError, WeightNormSparsifier, patterns, schedules


def prepared(**options):
    sparsifier = ScopeSparsifier(**options)
    sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))
    return sparsifier


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
def test_squash_without_a_step(kind):
    sparsifier = kind()
    sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))
    with pytest.warns(UserWarning, match=r"step was never called, .*nothing is pruned; call step\(\) first"):
        sparsifier.squash_mask()
    filled = prepared()
    filled.mask("0.weight")[0] = False  # by hand
    filled.squash_mask()


def test_squash_one_level_short():
    sparsifier = prepared(sparsity_level=0.0)
    scheduler = schedules.ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 4))
    for _ in range(4):
        sparsifier.step()
        scheduler.step()
    twin = copy.deepcopy(sparsifier)
    text = r"the mask of 0.weight was chosen at sparsity_level 0.375, and its level is 0.5 now; call step\(\) once more"
    with pytest.warns(UserWarning, match=text):
        sparsifier.squash_mask()
    twin.step()
    twin.squash_mask()
    assert (twin.model[0].weight == 0).sum() == 32


def test_a_squashed_copy_and_a_paused_sparsifier_cause_no_warning():
    sparsifier = prepared()
    sparsifier.step()
    sparsifier.squash_mask(model=copy.deepcopy(sparsifier.model))
    sparsifier.groups[0]["sparsity_level"] = 0.75
    sparsifier.enable_mask_update = False
    sparsifier.squash_mask()


def test_a_scheduler_before_prepare():
    sparsifier = ScopeSparsifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LambdaSL(sparsifier, lambda epoch: 0.1)
    with pytest.warns(UserWarning, match="a scheduler was constructed before it; that one has no groups"):
        sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))


def test_materialized_weights_are_masked_once():
    sparsifier = prepared()
    sparsifier.step()
    layer, x = sparsifier.model[0], torch.randn(2, 8)
    expected = layer(x)
    with torch.no_grad(), sparsifier.materialized():
        assert layer.weight is layer.weight and torch.equal(layer(x), expected)
    assert layer.weight is not layer.weight
    with pytest.raises(SparsityError, match="materialized"), ScopeSparsifier().materialized():
        pass


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_callback_of_another_model(library):
    text = "SparsifierCallback: 0.weight belongs to another model than the one that is trained"
    sparsifier, other = prepared(), nn.Sequential(nn.Linear(8, 8))
    if library == "lightning":
        from sparsekit_ao.integrations.lightning import SparsifierCallback

        with pytest.raises(SparsityError, match=text):
            SparsifierCallback(sparsifier).on_train_start(None, other)
    else:
        from sparsekit_ao.integrations.transformers import SparsifierCallback

        with pytest.raises(SparsityError, match=text):
            SparsifierCallback(sparsifier).on_train_begin(None, None, None, model=other)


def test_messages_say_what_to_do():
    model = nn.Sequential()
    model.add_module("classifier", nn.Linear(8, 4))
    cases = {
        "'classifier' matches no.* It is a module; did you mean 'classifier.weight'": {"tensor_fqn": "classifier"},
        "Did you mean 'classifier.weight'": {"tensor_fqn": "clasifier.weight"},
    }
    for text, entry in cases.items():
        with pytest.raises(SparsityError, match=text):
            ScopeSparsifier().prepare(model, [entry])
    with pytest.raises(SparsityError, match="prepare: model must be a torch.nn.Module, got SGD"):
        ScopeSparsifier().prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SparsityError, match="'0.weight' is of an embedding with sparse=True"):
        ScopeSparsifier().prepare(nn.Sequential(nn.Embedding(8, 4, sparse=True)), [{"tensor_fqn": "0.weight"}])
    sparsifier = prepared()
    with pytest.raises(SparsityError, match="check: every mask keeps everything, as step was never called"):
        sparsifier.check()
    with pytest.raises(SparsityError, match=r"the model to squash is given by name, squash_mask\(model=...\)"):
        sparsifier.squash_mask(sparsifier.model)


def test_leftovers_of_older_torch_utilities_are_named():
    layer = nn.Linear(8, 4)
    torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    with pytest.raises(SparsityError, match=r"masked by torch.nn.utils.prune; .*prune.remove\(model.0, 'weight'\)"):
        ScopeSparsifier().prepare(nn.Sequential(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(8, 4))
    with pytest.raises(SparsityError, match=r"weight_norm; use torch.nn.utils.parametrizations.weight_norm"):
        ScopeSparsifier().prepare(nn.Sequential(old))


def test_n_m_with_one_budget_over_several_tensors():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for options in ({"pattern": patterns.n_m(2, 4), "scope_coupling": "all"}, {"scope_coupling": "all"}):
        config = None if "pattern" in options else [{"tensor_fqn": "*.weight", **patterns.n_m(2, 4)}]
        with pytest.raises(
            SparsityError, match=r"n_m\(2, 4\) keeps a number of every group .*leave out scope_coupling"
        ):
            ScopeSparsifier(**options).prepare(model, config)


def test_the_report_names_nearly_empty_tensors():
    sparsifier = prepared(sparsity_level=1.0)
    sparsifier.step()
    assert "nearly empty: 0.weight keeps 0.00% of its elements" in str(sparsifier.report())


def test_like_tensors_of_a_large_model_share_a_line_of_a_printed_report(tmp_path):
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(45)), "head": nn.Linear(8, 4)})
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.mask("layers.3.weight")[0] = False
    report = sparsifier.report()
    lines = str(report).splitlines()
    first = r"layers\.\*\.weight \(45 tensors\) .* 0\.5000  0\.5000 to 0\.\d{4} +1,43\d +2,880 +2,880"
    assert re.fullmatch(first, lines[1]) and lines[2].startswith("head.weight ") and lines[3].startswith("all ")
    assert len(report.table().splitlines()) == 48 and "layers.44.weight" in report.table()
    rows = report.to_csv(tmp_path / "report.csv").splitlines()
    assert (tmp_path / "report.csv").read_text().splitlines() == rows and len(rows) == 47
    assert rows[1].startswith("layers.0.weight,config=None,8x8,")
    page = report._repr_html_()
    assert page.count("<tr>") == 4 and "<td>layers.*.weight (45 tensors)</td>" in page
    assert report.log_dict("a/")["a/sparsity/head.weight"] == 0.5
    report.plot(tmp_path / "report.svg")
    assert "layers.44.weight" in (tmp_path / "report.svg").read_text()
