"""Models of users: recurrent layers, wrappers, numbers of numpy; and what the report prints."""

import copy
import json
import pickle
import re

import numpy as np
import pytest
import torch
from stock import linear_model, prepared, reloaded, stepped
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparsekit_ao import ScopeSparsifier, SparsityError, export
from sparsekit_ao.schedules import ScheduleSL


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_masked_recurrent_module_is_copied_after_a_forward_pass(kind):
    model, x = nn.Sequential(kind(4, 4)), torch.randn(3, 2, 4)
    sparsifier = prepared(model, [{"tensor_fqn": "*weight*"}], sparsity_level=0.75)
    dense = model(x)[0]
    sparsifier.step()
    masked = model(x)[0]
    assert not torch.equal(masked, dense)
    copied = copy.deepcopy(model)  # the module holds the weights of the forward pass, with their graph
    model.double().float()
    again = copy.deepcopy(model)
    sparsifier.squash_mask(model=copied)
    sparsifier.squash_mask()
    for one in (model, copied, again, pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(x)[0], masked)
    assert model[0]._flat_weights[0] is model[0].weight_ih_l0 and copied[0]._flat_weights[0] is copied[0].weight_ih_l0


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_masks_inside_checkpoint_wrappers(when):
    model, x = linear_model(8, 8, 4), torch.randn(2, 8)
    if when == "before prepare":
        model[0] = checkpoint_wrapper(model[0])
    sparsifier = prepared(model)
    sparsifier.step()
    if when == "after prepare":
        model[0] = checkpoint_wrapper(model[0])
    plain = linear_model(8, 8, 4)
    plain.load_state_dict(export.dense_state_dict(model))
    assert torch.equal(plain(x), model(x))
    model.load_state_dict(plain.state_dict())
    rows = [(row.tensor, row.kind, row.masked) for row in export.report(model)]
    assert rows == [("0.weight", "Linear", True), ("2.weight", "Linear", True)]
    assert [layer.fqn for layer in export.check(model, "quantize")] == ["0.weight", "2.weight"]
    copied = copy.deepcopy(model)  # which leaves the wrapper out
    sparsifier.squash_mask(model=copied)
    assert torch.equal(copied(x), model(x)) and sparsifier.check(copied) == 2


def test_a_wrapper_that_passes_on_the_attributes_of_what_it_wraps():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    model = nn.Sequential(Wrapper(nn.Linear(8, 4)))
    sparsifier = prepared(model)
    sparsifier.step()
    dense = export.dense_state_dict(model)
    assert (
        list(dense) == ["0.inner.bias", "0.inner.weight"]
        and [r.tensor for r in export.report(model)] == list(dense)[1:]
    )


@pytest.mark.parametrize(
    "given", [{"sparsity_level": np.float32(0.5)}, {"nnz": np.int64(32)}, {"block_shape": (np.int64(2), 1)}]
)
def test_numbers_of_numpy_in_a_config_are_saved_as_plain_ones(given):
    sparsifier = prepared(config=[{"tensor_fqn": "0.weight", **given}])
    sparsifier.step()
    sparsifier.groups[0]["sparsity_level"] = np.float64(0.5)  # as a scheduler may write
    sparsifier.load_state_dict(reloaded(sparsifier.state_dict()))
    assert sparsifier.check() == 1 and int(sparsifier.mask("0.weight").sum()) == 32


def test_a_schedule_of_numpy_gives_plain_numbers():
    sparsifier = prepared()
    scheduler = ScheduleSL(sparsifier, lambda step: np.clip(step / 4, 0, 1))
    assert type(sparsifier.groups[0]["sparsity_level"]) is float and json.dumps(scheduler.state_dict()["_last_sl"])


def test_materialized_weights_are_masked_once():
    sparsifier = prepared()
    sparsifier.step()
    layer, x = sparsifier.model[0], torch.randn(2, 8)
    expected = layer(x)
    with torch.no_grad(), sparsifier.materialized():
        assert layer.weight is layer.weight and torch.equal(layer(x), expected)
        with pytest.raises(SparsityError, match="step: weights are not masked anew inside materialized"):
            sparsifier.step()
    assert layer.weight is not layer.weight
    with pytest.raises(SparsityError, match="materialized"), ScopeSparsifier().materialized():
        pass


def test_the_report_names_nearly_empty_tensors():
    sparsifier = prepared(sparsity_level=1.0)
    sparsifier.step()
    advice = "give it a level of its own, or a shared budget max_sparsity"
    assert f"nearly empty: 0.weight keeps 0.00% of its elements; {advice}" in str(sparsifier.report())
    for options in ({"sparsity_level": 0.5}, {"scope_coupling": "all", "sparsity_level": 0.95, "max_sparsity": 0.96}):
        followed = prepared(**options)
        followed.step()
        assert "nearly empty" not in str(followed.report())


def test_like_tensors_of_a_large_model_share_a_line_of_a_printed_report(tmp_path):
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(45)), "head": nn.Linear(8, 4)})
    sparsifier = stepped(model)
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


def test_without_a_config_attention_and_recurrent_weights_are_covered_too():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "other": nn.MultiheadAttention(8, 2, kdim=4),
            "lstm": nn.LSTM(8, 8, num_layers=2, proj_size=4),
            "gru": nn.GRU(8, 8, bidirectional=True),
            "norm": nn.LayerNorm(8),
        }
    )
    sparsifier = stepped(model)
    report = sparsifier.report()
    matrices = [name for name, p in model.named_parameters() if p.ndim > 1]
    assert len(report) == len(matrices) == 2 + 4 + 6 + 4 and report.matrices == 1.0 and not report.others
    assert "covers 100.0% of the weights of two or more dimensions" in str(report) and "bias" not in str(report)
    assert report["attention.in_proj_weight"].shape == (24, 8)
    x = torch.randn(3, 1, 8)
    masked = [model["gru"](x)[0], model["attention"](x, x, x)[0]]
    sparsifier.squash_mask()
    assert torch.equal(model["gru"](x)[0], masked[0]) and torch.equal(model["attention"](x, x, x)[0], masked[1])
    assert int((model["lstm"].weight_hh_l1 == 0).sum()) == model["lstm"].weight_hh_l1.numel() // 2


def test_every_report_has_the_same_methods(tmp_path):
    from sparsekit_ao import Coupling, one_shot, removal

    model, batches = linear_model(8, 8, 4), [torch.randn(16, 8)]
    sparsifier = prepared(model, nnz=4, scope_shape=(1, -1))
    recovered = one_shot(sparsifier, batches, recover=copy.deepcopy(model), progress=False).recovery
    sparsifier.squash_mask()
    pair = linear_model(8, 8, 4)
    hidden = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"}, name="hidden")
    _, compaction = removal.compact(pair, hidden, batches[0])
    masked = prepared(linear_model(8, 4))
    masked.step()
    layers = one_shot(prepared(linear_model(8, 4)), batches, progress=False)
    named = {"0.weight": [masked.report(), layers, export.report(pair)], "hidden": [compaction], "": [recovered]}
    for name, reports in named.items():
        for report in reports:
            assert report[name] is report[0] and len(report.table().splitlines()) >= 1 + len(report)
            assert report.table() in str(report) and report._repr_html_().startswith("<table><tr><th>")
            assert len(report.to_csv().splitlines()) == 1 + len(report)
            assert all(k.startswith("a/") and type(v) is float for k, v in report.log_dict("a/").items())
            report.plot(tmp_path / "report.svg")
    with pytest.raises(KeyError, match=r"'1.weight'; the rows are 0.weight"):
        masked.report()["1.weight"]


def test_the_level_that_was_asked_for_is_reported_as_it_was():
    sparsifier = prepared(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3)), [{"tensor_fqn": "*.weight"}])
    assert [row.asked for row in sparsifier.report()] == [0.5, 0.5]  # of 3 blocks, 2 are kept
    counted = prepared(nn.Sequential(nn.Linear(4, 4)), nnz=1, scope_shape=(1, 4))
    assert counted.report()["0.weight"].asked == 0.75
