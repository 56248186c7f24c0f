"""Every Python block of the README and of the site runs, and figures equal those of the committed CSVs."""

import ast
import contextlib
import copy
import csv
import io
import pathlib
import re
import statistics
import warnings
from collections import OrderedDict

import pytest
import torch

import sparsekit_ao
from sparsekit_ao import removal

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_generated" not in path.parts
}
README = PAGES["README.md"]
BLOCK = re.compile(r"```python( before)?\n(.*?)```", flags=re.DOTALL)


def table_rows(name):
    with (ROOT / f"examples/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def page(name):
    """A page of the site, its lines joined."""
    return " ".join(PAGES[f"docs/{name}.md"].split())


def test_the_digits_table_equals_the_csv():
    rows = table_rows("results/rigl_digits")
    dense = [float(r["accuracy"]) for r in rows if r["method"] == "dense"]
    assert f"dense has {statistics.mean(dense):.2f}" in page("benchmarks")
    for level in ("0.90", "0.95"):
        cells = []
        for name in ("static", "SET", "RigL", "SNFS", "GMP"):
            found = [float(r["accuracy"]) for r in rows if r["method"] == name and float(r["level"]) == float(level)]
            assert len(found) == 10
            cells.append(f"{statistics.mean(found):.2f} +- {statistics.stdev(found) / 10**0.5:.2f}")
        assert f"| {level} | {' | '.join(cells)} |" in page("benchmarks")


def test_the_language_model_table_equals_the_csv():
    rows = table_rows("results/dst_language_model")
    assert f"dense has {float(rows[0]['loss']):.3f}" in page("benchmarks")
    for level in ("0.90", "0.95"):
        found = [r for r in rows if float(r["level"]) == float(level)]
        assert len({r["nonzeros"] for r in found}) == 1
        cells = " | ".join(f"{float(r['loss']):.3f}" for r in found)
        assert f"| {level} | {cells} |" in page("benchmarks")


def test_the_cost_of_a_dynamic_step_equals_the_csv():
    rows = table_rows("benchmarks/results/dst_overhead")
    closed = [float(r["times stock"]) for r in rows if r["step"] == "closed"]
    assert max(closed) <= 1.05
    assert f"costs {closed[0]:.2f} and {closed[1]:.2f} times" in page("benchmarks")


def run_before(code, names):
    """Run a block of another library, if that is installed."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(code, names)
        except ModuleNotFoundError as e:
            if not (e.name or "").startswith(("torchao", "torch_pruning", "torch.ao")):
                raise


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of lightning, peft and DDP's broadcast_buffers
@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if BLOCK.search(text)])
def test_the_blocks_of_a_page_run_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for found in BLOCK.finditer(PAGES[name]):
        lines_above = PAGES[name].count("\n", 0, found.start(2))  # so that a traceback names the line of the page
        code = compile("\n" * lines_above + found[2], name, "exec")
        if found[1]:  # what another library did, on copies
            models = {key for key in code.co_names if isinstance(names.get(key), torch.nn.Module)}
            run_before(code, names | {key: copy.deepcopy(names[key]) for key in models})
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        for line in re.findall("^# prints: (.+)$", found[2], flags=re.MULTILINE):
            assert line in printed.getvalue()


MOVING = {  # sections of the page: the call that takes an argument by itself, names of layers of the model
    "From torchao.sparsity": ("prune(model, {})", "012"),
    "From `torch.nn.utils.prune`": ("ScopeSparsifier(0.3, {})", "012"),
    "From Torch-Pruning": ("shrink(model, inputs, **{{'forward': loss}} | dict({}))", ("body", "middle", "head")),
    "From LLM Compressor": ("prune(model, pattern='2:4', batches=batches, {})", ("mlp", "relu", "lm_head")),
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


def names_of_rows(layers):
    """What the code in rows of tables may name."""
    torch.manual_seed(0)
    middle = torch.nn.Linear(128, 128) if "middle" in layers else torch.nn.ReLU()
    modules = zip(layers, (torch.nn.Linear(64, 128), middle, torch.nn.Linear(128, 64)), strict=True)
    model, batches = torch.nn.Sequential(OrderedDict(modules)), [torch.randn(32, 64) for _ in range(2)]
    names = {name: getattr(sparsekit_ao, name) for name in sparsekit_ao.__all__} | vars(removal)
    one = removal.removable(model, batches[0]).couplings[0]
    expert = {key: torch.nn.Linear(4, 4) for key in ("w1", "w2", "w3")}
    mixture = {"experts": torch.nn.ModuleList([torch.nn.ModuleDict(expert)]), "gate": torch.nn.Linear(4, 1)}
    return names | {
        **{"torch": torch, "model": model, "module": model[0], "mixture": torch.nn.ModuleDict(mixture)},
        **{"batches": batches, "inputs": batches[0], "loader": [{"x": x} for x in batches]},
        **{"loss": lambda model, batch: model(batch).square().mean(), "optimizer": torch.optim.SGD(model.parameters())},
        **{"one": one, "couplings": [one], "report": removal.shrink(model, batches[0])[1]},
        **{"name": "weight", "mask": torch.ones(128, 64), "sparsifier": sparsekit_ao.ScopeSparsifier()},
    }


@pytest.mark.parametrize(("section", "row"), ROWS)
def test_the_code_in_each_row_of_the_page_on_moving_runs(section, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, layers = MOVING[section]
    shared, cell = names_of_rows(layers), row.split(" | ")[-1]
    if "sparsifier.prepare(" not in cell:
        score = ("taylor" if "loss" in cell else "wanda") if "calibrate(" in cell else None
        shared |= {"sparsifier": sparsekit_ao.ScopeSparsifier(score=score), "name": f"{layers[0]}.weight"}
        entries = shared["one"].entries(shared["model"], sparsity_level=0.5) if "compact(" in cell else None
        shared["sparsifier"].prepare(shared["model"], entries)
        if score is None:
            shared["sparsifier"].step()
    for code in re.findall("`([^`]+)`", cell):
        names = shared if re.search(r"\bsparsifier\b|couplings, inputs", code) else names_of_rows(layers)
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


def test_the_table_of_mask_updates_and_the_factors_beside_it_equal_the_csv():
    rows = table_rows("benchmarks/results/cpu_step")
    cells = {(r["pattern"], r["kind"]): r for r in rows}
    kinds = ("ScopeSparsifier", "WeightNormSparsifier")
    lines = []
    for pattern in dict.fromkeys(r["pattern"] for r in rows):
        stock, *ours = (cells[pattern, kind] for kind in ("stock", *kinds))
        line = [pattern, f"{float(stock['ms']):.0f} ms"]
        for r in ours:
            line += [f"{float(r['ms']):.0f} ms", f"{r['times faster than stock']}x", r["times one copy"]]
        lines.append(f"| {' | '.join(line + [r['extra peak / weight'] for r in (stock, *ours)])} |\n")
    assert "".join(lines) in PAGES["docs/benchmarks.md"]

    def factors(kind):
        found = [
            float(r["ms"]) / float(cells[r["pattern"], "ScopeSparsifier"]["ms"]) for r in rows if r["kind"] == kind
        ]
        return f"{min(found):.1f} to {max(found):.1f} times"

    sentence = f"`torch.topk` takes {factors('torch.topk')} as long as `ScopeSparsifier`, `torch.kthvalue` "
    assert sentence + factors("torch.kthvalue") in page("benchmarks")
    assert f"`MinSparsityConstraint` {factors('PAT MinSparsityConstraint')}" in page("benchmarks")
    assert f"`prune.l1_unstructured` {factors('prune.l1_unstructured')}" in page("benchmarks")
    faster = [float(r["times faster than stock"]) for r in rows if r["kind"] == "ScopeSparsifier"]
    readme = " ".join(README.split())
    assert f"is {min(faster):.0f} to {max(faster):.0f} times faster than torch.ao's" in readme
    drop_in = [float(r["times faster than stock"]) for r in rows if r["kind"] == "WeightNormSparsifier"]
    assert f"masks are torch.ao's, {min(drop_in):.0f} to {max(drop_in):.0f} times faster on a CPU" in readme


def test_the_figures_of_patterns_and_the_masked_layer_equal_the_csvs():
    rows, text = table_rows("benchmarks/results/cpu_patterns"), page("benchmarks")
    for dtype, sentence in (("float32", "the slowest takes {} copies ({})"), ("bfloat16", "half as long, {} ({})")):
        worst = max((float(r["times one copy"]), r["pattern"]) for r in rows if r["dtype"] == dtype)
        assert sentence.format(*worst) in text
    growth = {(r["pattern"], r["size"]): float(r["ns an element"]) for r in table_rows("benchmarks/results/cpu_growth")}
    ratios = [growth[p, "8192"] / ns for (p, size), ns in growth.items() if size == "1024"]
    assert f"between {min(ratios):.2f} and {max(ratios):.2f} of what it was" in text
    masked = [r for r in table_rows("benchmarks/results/masked_linear") if r["layer"] in ("bool mask", "float mask")]
    for what in ("training", "evaluation"):
        ratios = [float(r["ratio"]) for r in masked if (r["mode"], r["pass"]) == ("eager", what)]
        assert len(ratios) == 32
        assert (
            f"in {what} {min(ratios):.2f} to {max(ratios):.2f} times, {statistics.median(ratios):.2f} in the median"
            in text
        )
    compiled = {r["layer"]: r["ratio"] for r in masked if r["mode"] == "compiled"}
    sentence = "ours costs {} times the dense layer with a bool mask and {} times with a float one"
    assert sentence.format(compiled["bool mask"], compiled["float mask"]) in text


def test_the_memory_of_models_on_disk_equals_the_csv():
    rows, columns = (
        table_rows("benchmarks/results/walk_memory"),
        ("blocks", "model MiB", "peak MiB", "resident MiB in all"),
    )
    for r in rows:
        assert f"| {' | '.join(r[c] for c in columns)} | {r['seconds a block']} |" in page("larger")
    assert f"needs {int(rows[-1]['peak MiB']) / int(rows[0]['peak MiB']):.1f} times the memory" in page("larger")


def test_the_time_of_prepare_equals_the_csv():
    ms = {r["kind"]: float(r["prepare ms"]) for r in table_rows("benchmarks/results/prepare")}
    sentence = f"takes {ms['ScopeSparsifier']:.0f} ms, torch.ao's {ms['stock']:.0f} ms"
    assert sentence in page("benchmarks") and ms["ScopeSparsifier"] < 300  # as stated in the changelog


def test_the_bytes_sent_for_a_selection_equal_the_csv():
    ours, gather = table_rows("benchmarks/results/selection_bytes")
    sentence = f"by sending {ours['bytes']} bytes, not {int(gather['bytes']) // 10**6} MB"
    assert sentence in page("integrations/distributed")


def test_the_figures_of_one_pass_equal_the_csvs():
    def read(name):
        return table_rows(f"results/{name}")

    def three(cell):
        return f"{float(cell):.3f}"

    text = page("benchmarks")
    methods = ["magnitude", "wanda", "sparsegpt", "wanda + least_squares", "admm", "admm", "admm, recovered"]
    for name in ("2_4", "unstructured"):
        rows = read(f"prune_minilm_{name}")
        assert [r["method"] for r in rows] == methods
        row = f"| {rows[0]['pattern']} | {' | '.join(three(r['cosine']) for r in rows)} |"
        assert row in text and row in README
    for name in ("1x4", "16x16"):
        one_pass, recovered = read(f"prune_minilm_{name}")
        assert f"| {name} | {three(one_pass['cosine'])} | {three(recovered['cosine'])} |" in text
    recovered, more = read("prune_minilm_2_4")[-1], read("prune_minilm_2_4_more")[-1]
    sentence = (
        f"is {three(recovered['cosine'])} after {float(recovered['seconds']):.0f} s on two CPU cores. Magnitude pruning"
    )
    assert f"{sentence} has {three(read('prune_minilm_2_4')[0]['cosine'])}" in " ".join(README.split())
    for r, count in ((recovered, "1,024"), (more, "4,096")):
        assert f"{three(r['cosine'])} on {count} sentences after {float(r['seconds']):.0f} s" in text
    for r in read("shrink_minilm_recovered"):
        assert f"| {r['removed']} | {three(r['before'])} | {three(r['recovered'])} |" in text
    dense, *rows = read("one_shot_language_model")
    assert f"dense has {three(dense['loss'])}" in page("benchmarks")
    methods = list(dict.fromkeys(r["method"] for r in rows))
    for structure in dict.fromkeys(r["structure"] for r in rows):
        loss = {r["method"]: three(r["loss"]) for r in rows if r["structure"] == structure}
        assert f"| {structure} | {' | '.join(loss.get(m, '-') for m in methods)} |" in page("benchmarks")
    dense, *rows = table_rows("benchmarks/results/compare_llmcompressor")
    for structure in ("2:4", "50 %"):
        cells = [f"{three(r['loss'])}, {r['seconds']} s" for r in rows if r["structure"] == structure]
        assert f"| {structure} | {' | '.join(cells)} |" in text
    more = [float(r["loss"]) - float(dense["loss"]) for r in rows if r["structure"] == "2:4"]
    assert abs(more[0] - more[1]) < 1e-3 and 0.45 < more[2] / more[0] < 0.55 and 0.2 < more[3] / more[0] < 0.3
    for r in table_rows("benchmarks/results/recover_rate"):
        assert f"| {r['model']} | {' | '.join(three(r[k]) for k in list(r)[1:6])} |" in text
    for removed, name in (("half of the MLP units", "units"), ("and a third of the heads", "heads_and_units")):
        for r in read(f"one_shot_{name}"):
            cells = f"{three(r['cosine'])} | {three(r['with least squares'])}"
            assert f"| {removed} | {r['score']} | {cells} |" in page("benchmarks")


def test_the_figures_of_the_mixture_of_experts_equal_the_csv():
    dense, *rows = table_rows("results/moe_language_model")
    loss = {(r["structure"], r["method"]): float(r["loss"]) for r in rows}
    size = {r["structure"]: int(r["bytes"]) for r in rows}
    lost = {key: one - float(dense["loss"]) for key, one in loss.items()}
    text = page("experts")
    assert f"dense has {float(dense['loss']):.3f} nats" in text
    for structure in ("2:4", "50 %"):
        cells = [f"{x:.3f}" for (s, _), x in loss.items() if s == structure]
        assert f"| {structure} | {' | '.join(cells)} |" in text
        assert lost[structure, "admm"] <= lost[structure, "magnitude"] / 5
        assert lost[structure, "recovered"] <= lost[structure, "magnitude"] / 8
    for structure, one_pass in (
        ("2:4 in experts", "admm"),
        ("narrower experts", "wanda"),
        ("half of the experts", "reap"),
    ):
        cells = f"{loss[structure, one_pass]:.3f} | {loss[structure, 'recovered']:.3f}"
        assert f"| {structure} | {size[structure] / 1e6:.2f} MB | {cells} |" in text
    assert f"of {int(dense['bytes']) / 1e6:.2f} MB" in text
    assert f"leaves {lost['2:4', 'admm'] / lost['2:4', 'magnitude']:.0%} of what magnitude loses" in text
    assert f"with recovery {lost['2:4', 'recovered'] / lost['2:4', 'magnitude']:.0%}" in text


def test_the_guidance_on_patterns_and_settings_equals_the_csvs():
    """Which pattern and level, what a layer costs in one pass, fine-tuning, strengths."""
    text = page("patterns")
    minilm = {n: table_rows(f"results/prune_minilm_{n}")[-1]["cosine"] for n in ("2_4", "unstructured", "1x4", "16x16")}
    units = {r["removed"]: r["recovered"] for r in table_rows("results/shrink_minilm_recovered")}
    loss = {r["structure"]: r for r in table_rows("results/one_shot_language_model") if r["method"] == "recovered"}
    for label, cosine, structure in (
        ("50 %, single weights", minilm["unstructured"], "50 %"),
        ("2:4", minilm["2_4"], "2:4"),
        ("half of the MLP units", units["half of the MLP units"], "half of the MLP units"),
        ("and a third of the heads", units["and a third of the heads"], None),
        ("1x4 blocks at 50 %", minilm["1x4"], None),
        ("8 rows x 1 column, 8 of 16", None, "8 rows x 1 column, 8 of 16"),
        ("16x16 blocks at 50 %", minilm["16x16"], None),
    ):
        cells = ["" if cosine is None else f"{float(cosine):.3f} "]
        cells.append("" if structure is None else f"{float(loss[structure]['loss']):.3f} ")
        assert f"| {label} | {cells[0]}| {cells[1]}|" in text
    trained = {(r["method"], r["level"]): float(r["loss"]) for r in table_rows("results/dst_language_model")}
    gmp, rigl = trained["GMP", "0.9"], trained["RigL", "0.9"]
    assert f"a loss of {gmp:.3f} with `GMP` and {rigl:.3f} with `RigL`" in text

    names = ("4.attention.output.dense", "2.intermediate.dense", "3.output.dense")
    rows = [r for r in table_rows("benchmarks/results/one_shot_layers") if r["structure"] == "2:4"]
    for name, size in zip(names, ("384 x 384", "1536 x 384", "384 x 1536"), strict=True):
        own = [r for r in rows if r["layer"] == f"encoder.layer.{name}" and r["method"] != "obs alone"]
        cells = [f"{float(r['error']):.3f}, {float(r['seconds']):.3f} s" for r in own]
        assert f"| {size} | {' | '.join(cells)} |" in page("benchmarks")
    short, _, wide = (
        next(r["seconds"] for r in rows if name in r["layer"] and r["method"] == "admm") for name in names
    )
    sentence = f"takes {float(short):.2f} s for a layer of 384 x 384 and {float(wide):.2f} s with 1,536 inputs"
    assert sentence in page("one_shot")

    text = page("training")
    output = (ROOT / "examples/tutorials/outputs/trainer_2_4.txt").read_text()
    dense, sparse = (re.search(rf"{name}: accuracy (\S+?),?\s", output)[1] for name in ("dense", "2:4"))
    assert f"has {sparse} at 2:4 (dense {dense})" in text
    runs = [r for r in table_rows("results/proximal") if r["method"] == "Adam, conditioned"]
    left = {s: [int(r["inputs left"]) for r in runs if float(r["strength"]) == s] for s in (0.15, 0.5, 15)}
    first, second = (f"{min(left[s])} to {max(left[s])}" for s in (0.15, 0.5))
    assert f"0.15 leaves {first} of 64 inputs, 0.5 leaves {second}, and 15 none" in text and not any(left[15])


def test_the_figures_of_the_shrunk_minilm_equal_the_csv():
    dense, small = table_rows("results/shrink_minilm")
    flops, size = (int(small[k]) / int(dense[k]) for k in ("flops", "file bytes"))
    sentence = (
        f"{flops:.2f} of the FLOPs, {float(small['of dense']):.2f} of the time of a batch, {size:.2f} of the file"
    )
    text = page("benchmarks")
    assert sentence in text and f"cosine {float(small['cosine']):.2f} to the dense model" in text
    readme = " ".join(README.split())
    assert sentence in readme and f"to the dense model's is {float(small['cosine']):.2f}" in readme


def test_the_table_of_quality_at_equal_flops_equals_the_csvs():
    columns = ("fine-tuned", "longer", "recovered", "recovered, fine-tuned")
    for network, sign, places in (("digits", 1, 1), ("text", -1, 3), ("MiniLM", 1, 3)):
        rows = table_rows(f"benchmarks/results/compare_accuracy_{network.lower()}")

        def best(library, column, sign=sign, rows=rows):
            found = [r for r in rows if r["method"].startswith(library) and r[column] != "-"]
            return max(found, key=lambda r: sign * float(r[column]))

        def cell(row, column, places=places):
            deviation = row.get(f"deviation of {column}")
            return f"{float(row[column]):.{places}f}" + (f" +- {float(deviation):.{places}f}" if deviation else "")

        for library in ("sparsekit_ao", "Torch-Pruning"):
            cells = [cell(best(library, column), column) for column in columns]
            random = cell(best(f"{library} random", "fine-tuned"), "fine-tuned")
            assert f"| {network}, {library} | {random} | {' | '.join(cells)} |" in page("benchmarks")
        ours, theirs = best("sparsekit_ao", columns[-1]), best("Torch-Pruning", columns[0])
        ahead = sign * (float(ours[columns[-1]]) - float(theirs[columns[0]]))
        deviations = (float(ours[f"deviation of {columns[-1]}"]), float(theirs[f"deviation of {columns[0]}"]))
        assert ahead > max(deviations)
        assert all(float(r["flops"]) <= (0.5 if network == "MiniLM" else 0.3) for r in rows[1:])


def test_the_table_of_export_targets_equals_the_csv():
    rows = table_rows("results/export_minilm")
    for r in rows:
        assert f"| {' | '.join(list(r.values())[:7])} |" in PAGES["docs/benchmarks.md"]
