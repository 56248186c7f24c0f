"""The command: a tiny decoder, an encoder, their data and recipes, what it writes, and what it refuses."""

import json
import os
import re
import shutil
from pathlib import Path

import hf_models
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sparsekit_ao import __main__ as command

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
    assert "256 tokens to calibrate on, 400 held out" in printed and "perplexity on held-out tokens: " in printed
    loaded = AutoModelForCausalLM.from_pretrained(out)
    weight, excluded = loaded.model.layers[1].mlp.up_proj.weight, loaded.model.layers[1].self_attn.q_proj.weight
    assert bool(((weight.view(-1, 4) != 0).sum(1) == 2).all()) and bool((excluded != 0).all())
    assert not (out / "masks.safetensors").exists() and (out / "tokenizer.json").exists()
    assert run("report", out) == 0
    printed = capsys.readouterr().out
    assert "2:4" in printed and "pattern='2:4'" in printed
    code = (out / "README.md").read_text().split("## How to load it")[1].split("```")[1].removeprefix("python\n")
    exec(code.replace("folder = 'out'", f"folder = {str(out)!r}"), names := {})
    assert torch.equal(names["model"].model.layers[1].mlp.up_proj.weight, weight)
    assert names["tokenizer"]("w1 w2")["input_ids"] == AutoTokenizer.from_pretrained(llama)("w1 w2")["input_ids"]


def test_a_model_larger_than_memory_is_offloaded_and_pruned_the_same(llama, data, tmp_path, monkeypatch):
    argv = ["prune", llama, "--pattern", "2:4", *short(data), "--recover"]
    assert run(*argv, "--out", tmp_path / "a") == 0
    monkeypatch.setattr(command, "_free_memory", lambda: 30_000)
    assert run(*argv, "--dry-run") == 0
    assert run(*argv, "--out", tmp_path / "b") == 0
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_encoder_is_shrunk_and_compared_by_its_embeddings(tmp_path, capsys):
    bert, data = folder_of(tmp_path / "bert", "BERT"), tmp_path / "lines.jsonl"
    held_out = [text(64).replace("w", "v")] * 2
    lines = [text(100)] * 9 + held_out[:1] + [text(100)] * 9 + held_out[1:]
    data.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    assert run("shrink", bert, "--ratio", 0.5, *short(data), "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "dense ones: 1 for the dense model" in printed and "fits: transformers" in printed
    assert AutoModel.from_pretrained(tmp_path / "out").config.intermediate_size == 24


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
    expected = {"pattern": "2:4", "score": "wanda", "compensate": None, "exclude": ["a"]}
    assert seen == {**expected, "batches": None, "dry_run": True, "inplace": True}


def test_the_commands_of_the_page_run(llama, data, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent.parent / "docs/start.md").read_text()
    shutil.copytree(llama, tmp_path / "SmolLM2")
    shutil.copy(data, tmp_path / "text.txt")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^python -m sparsekit_ao (.+)$", page, re.MULTILINE)
    assert len(commands) == 4 and [command.main(line.split()) for line in commands] == [0] * 4
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
        (["shrink", "LLAMA", "--ratio", "0.5", "--out", "OUT"], "example"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, llama, data, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("sparsity: 0.5\n")
    places = {"LLAMA": llama, "DATA": data, "OUT": tmp_path / "out", "RECIPE": tmp_path / "recipe.yaml"}
    argv = [one.replace(name := one.split("/")[0], str(places.get(name, name))) for one in argv]
    before = sorted(os.listdir(llama))
    assert run(*argv) == 2
    *others, error = capsys.readouterr().err.splitlines()  # the others are bars of loading
    assert message in error and error.startswith("sparsekit_ao: ") and "Traceback" not in str(others)
    assert sorted(os.listdir(llama)) == before and not (tmp_path / "out").exists()


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
    assert run("report", tmp_path / "out") == 0 and "prune(..., pattern='2:4'" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text(text())
    assert run("prune", tmp_path / "vit", *short(tmp_path / "text.txt"), "--dry-run") == 2
    assert "--data needs a tokenizer" in capsys.readouterr().err
