"""Every Python block of the README and of the site runs, and its figures are those of the committed CSVs."""

import ast
import csv
import pathlib
import re
from collections import OrderedDict

import figures
import printed
import pytest
import torch
from grids import nightly_for

import sparsekit_ao
from sparsekit_ao import removal

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_generated" not in path.parts
}
README = PAGES["README.md"]
LONG = ("compact", "experts", "larger", "integrations/checkpoints", "integrations/exporters", "integrations/trainer")
WITH_BLOCKS = [name for name, text in PAGES.items() if printed.BLOCK.search(text)]


def table_rows(name):
    with (ROOT / f"examples/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_figures_of_the_readme_are_those_of_the_csvs():
    """Sentences and the table; and no other figure of this form stands in it."""
    values = figures.values()
    sentences = (
        "needs {small_flops} % of the FLOPs and {small_time} % of the time after half",
        "removed, and its file is {small_file} % as large",
        "its embeddings have a cosine similarity of {small_cosine} to those of the dense model",
        "with 1,024 sentences takes {seconds_2_4_recovered} s on two CPU cores",
        "have a cosine similarity of {cosine_2_4_recovered} to the dense model's",
        "If you only drop the smallest weights, the similarity is {cosine_2_4_magnitude}.",
        "with {kinds_recovered_tokens} tokens of six kinds of text and no labels, the logits of SmolLM2-135M diverge",
        "by {kinds_recovered} nats per token with `recover=2`, {kinds_admm} without it and {kinds_sparsegpt} with",
        "after recovery by {kinds_recovered_worst} on {kinds_recovered_worst_kind}, the worst kind, and by",
        "and by {kinds_recovered_german} on [German]",
        "removed units from [{exact_ours} of {architectures} architectures]",
        "`WeightNormSparsifier` updates its masks {faster_drop_in} times as fast as torch.ao does",
        "`ScopeSparsifier` {faster_scope} times as fast",
    )
    prose = " ".join(re.sub("```.*?```", "", README, flags=re.DOTALL).split())
    for sentence in sentences:
        assert sentence.format(**values) in prose
    table = figures.markdown(figures.one_pass())
    assert table in README
    known = {*values.values(), *re.findall(r"0\.\d+", table)}
    assert not [number for number in re.findall(r"\b0\.\d{2,4}\b(?!\.\d)", prose) if number not in known]


def test_the_readme_is_short_and_says_before_its_first_block_whom_it_is_for_and_how_to_install_it():
    beginning = " ".join(README.partition("```")[0].split())
    assert len(README.splitlines()) <= 150
    for text in (
        "people who ship a trained model",
        "people who train sparse",
        "`pip install .`",
        "torch 2.11 or newer",
    ):
        assert text in beginning


def test_pages_name_figures_and_tables_that_exist():
    values = figures.values()
    named = {name for text in PAGES.values() for name in re.findall(r"\{\{ (\w+) \}\}", text)}
    tables = {name for text in PAGES.values() for name in re.findall(r"_generated/table_(\w+)\.md", text)}
    assert len(named) > 50 and named <= values.keys() and tables <= figures.TABLES.keys()
    assert all(len({len(line) for line in table()}) == 1 for table in figures.TABLES.values())


def test_what_pages_say_about_tables_is_true():
    """Sentences without a figure of their own, and what makes rows comparable."""
    digits = table_rows("results/rigl_digits")
    methods = {(r["method"], r["level"]) for r in digits}
    assert all(sum((r["method"], r["level"]) == one for r in digits) == 10 for one in methods)
    for level in ("0.9", "0.95"):
        assert len({r["nonzeros"] for r in table_rows("results/dst_language_model") if r["level"] == level}) == 1
    methods = ["magnitude", "wanda", "sparsegpt", "wanda + least_squares", "admm", "admm", "admm, recovered"]
    for name in ("2_4", "unstructured"):
        rows = table_rows(f"results/prune_minilm_{name}")
        assert [r["method"] for r in rows] == methods and [r["sentences"] for r in rows] == ["192"] * 5 + ["1024"] * 2
    assert all(r["the same"] == r["of kept tokens"] for r in table_rows("results/shrink_vocabulary"))
    runs = [r for r in table_rows("results/proximal") if r["method"] == "Adam, conditioned"]
    assert not any(int(r["inputs left"]) for r in runs if float(r["strength"]) == 15)  # "15 leaves none"
    assert len([r for r in table_rows("benchmarks/results/masked_linear") if r["mode"] == "eager"]) == 128
    for network, (sign, _) in figures.EQUAL_FLOPS.items():
        rows = table_rows(f"benchmarks/results/compare_accuracy_{network.lower()}")
        ours = figures.best(network, "sparsekit_ao", "recovered, fine-tuned")
        theirs = figures.best(network, "Torch-Pruning", "fine-tuned")
        ahead = sign * (float(ours["recovered, fine-tuned"]) - float(theirs["fine-tuned"]))
        assert ahead > max(float(ours["deviation of recovered, fine-tuned"]), float(theirs["deviation of fine-tuned"]))
        assert all(float(r["flops"]) <= (0.5 if network == "MiniLM" else 0.3) for r in rows[1:])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of lightning, peft and DDP's broadcast_buffers
@pytest.mark.parametrize(
    "name",
    nightly_for(WITH_BLOCKS, *(f"docs/{name}.md" for name in LONG)),
)
def test_the_blocks_of_a_page_run_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = printed.run(name, PAGES[name])
    for found, output in zip(printed.BLOCK.finditer(PAGES[name]), outputs, strict=True):
        for line in printed.PRINTS.findall(found[2]):
            assert line in output
    printed.save(name, PAGES[name], outputs)  # for the site


MOVING = {  # sections of the page: the call that takes an argument by itself, names of layers of the model
    "From torchao.sparsity": ("prune(model, {})", "012"),
    "From `torch.nn.utils.prune`": ("ScopeSparsifier(0.3, {})", "012"),
    "From Torch-Pruning": ("shrink(model, inputs, **{{'forward': loss}} | dict({}))", ("body", "middle", "head")),
    "From torch-kirigami": (
        "shrink(model, inputs, **{{'budget': 'layer'}} | dict({}))",
        ("body", "middle", "head"),
    ),
    "From NNCF": ("prune(model, {})", "012"),
    "From SparseML": ("prune(model, {})", "012"),
    "From LLM Compressor": ("prune(model, '2:4', batches=batches, {})", ("mlp", "relu", "lm_head")),
    "From NVIDIA ModelOpt": ("prune(model, {})", "012"),
    "From sparsimony": ("RigL(0.9, optimizer=optimizer, until=75_000, {})", "012"),
}
ROWS = [
    (section, row)
    for section, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)+)", PAGES["docs/moving.md"], flags=re.MULTILINE)
    for table in re.findall(r"^\| there.*\n.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    for row in table.splitlines()
    if "`" in row.split(" | ")[-1]
]


def names_of_rows(layers, code):
    """What the code in rows of tables may name; what takes long to make, only if this code names it."""
    torch.manual_seed(0)
    middle = torch.nn.Linear(128, 128) if "middle" in layers else torch.nn.ReLU()
    modules = zip(layers, (torch.nn.Linear(64, 128), middle, torch.nn.Linear(128, 64)), strict=True)
    model, batches = torch.nn.Sequential(OrderedDict(modules)), [torch.randn(32, 64) for _ in range(2)]
    names = {name: getattr(sparsekit_ao, name) for name in sparsekit_ao.__all__} | vars(removal)
    if re.search(r"\bone\b|couplings\b", code):
        names["one"] = removal.removable(model, batches[0]).couplings[0]
        names["couplings"] = [names["one"]]
    if re.search(r"\breport\b", code):
        names["report"] = removal.shrink(model, batches[0])[1]
    expert = {key: torch.nn.Linear(4, 4) for key in ("w1", "w2", "w3")}
    mixture = {"experts": torch.nn.ModuleList([torch.nn.ModuleDict(expert)]), "gate": torch.nn.Linear(4, 1)}
    return names | {
        **{"torch": torch, "model": model, "module": model[0], "mixture": torch.nn.ModuleDict(mixture)},
        **{"batches": batches, "inputs": batches[0], "loader": [{"x": x} for x in batches]},
        **{"loss": lambda model, batch: model(batch).square().mean(), "optimizer": torch.optim.SGD(model.parameters())},
        **{"name": "weight", "mask": torch.ones(128, 64), "sparsifier": sparsekit_ao.ScopeSparsifier()},
    }


@pytest.mark.parametrize(("section", "row"), ROWS)
def test_the_code_in_each_row_of_the_page_on_moving_runs(section, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, layers = MOVING[section]
    cell = row.split(" | ")[-1]
    shared = names_of_rows(layers, cell)
    if "sparsifier.prepare(" not in cell:
        score = ("taylor" if "loss" in cell else "wanda") if "calibrate(" in cell else None
        shared |= {"sparsifier": sparsekit_ao.ScopeSparsifier(score=score), "name": f"{layers[0]}.weight"}
        entries = shared["one"].entries(shared["model"], sparsity_level=0.5) if "compact(" in cell else None
        shared["sparsifier"].prepare(shared["model"], entries)
        if score is None:
            shared["sparsifier"].step()
    for code in re.findall("`([^`]+)`", cell):
        names = shared if re.search(r"\bsparsifier\b|couplings, inputs", code) else names_of_rows(layers, code)
        is_argument = ast.parse(f"f({code})", mode="eval").body.keywords
        if "on CUDA" in cell:
            with pytest.raises(sparsekit_ao.SparsityError, match="no weight of the model is on CUDA"):
                eval(code, names)
            continue
        found = eval(call.format(code) if is_argument else code, names)
        if code.startswith("{"):
            names["sparsifier"].prepare(names["model"], [found])
        if isinstance(found, sparsekit_ao.sparsifiers.MaskSparsifier):
            found.prepare(names["model"])


def test_compensation_and_recovery_leave_little_of_what_magnitude_loses_in_a_mixture_of_experts():
    lost = {method: float(figures.values()[f"moe_lost_{method}"]) for method in ("admm", "recovered")}
    assert lost["recovered"] < lost["admm"] <= 20 and lost["recovered"] <= 100 / 8
