"""The figures of the site: tables and single numbers, read from the CSVs of `examples/` when the site is built.

A page shows a table of `TABLES` by including `_generated/table_NAME.md`, and a number of `values()` by writing its name
in double braces. So a page has no figure of its own, and a script that is run again changes them all.
"""

import csv
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
Row = Mapping[str, str]
Table = list[list[str]]  # the header first


def read(name: str) -> list[dict[str, str]]:
    """The rows of a CSV below `examples/`."""
    with (EXAMPLES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def three(number: str | float) -> str:
    """A number with three decimals."""
    return f"{float(number):.3f}"


def span(numbers: Iterable[float], places: int = 0) -> str:
    """The least and the largest number: "12 to 25"."""
    known = list(numbers)
    return f"{min(known):.{places}f} to {max(known):.{places}f}"


MINILM = {name: f"results/prune_minilm_{name}" for name in ("2_4", "unstructured", "1x4", "16x16")}
DIGITS = ("static", "SET", "RigL", "SNFS", "GMP")
METHODS = "wanda + least_squares"  # as the CSVs write it
HALF, BOTH = "half of the MLP units", "half of the MLP units and a third of the heads"


def mask_update() -> Table:
    """Time and memory of one mask update, by pattern, for torch.ao and two sparsifiers."""
    rows = read("benchmarks/results/cpu_step")
    cells = {(r["pattern"], r["kind"]): r for r in rows}
    kinds = ("ScopeSparsifier", "WeightNormSparsifier")
    found = [["pattern", "torch.ao", *kinds, "memory of the three"]]
    for pattern in dict.fromkeys(r["pattern"] for r in rows):
        stock, *ours = (cells[pattern, kind] for kind in ("stock", *kinds))
        line = [pattern, f"{float(stock['ms']):.0f} ms"]
        line += [f"{float(r['ms']):.0f} ms ({r['times faster than stock']}x)" for r in ours]
        found.append([*line, ", ".join(r["extra peak / weight"] for r in (stock, *ours))])
    return found


def targets() -> Table:
    """MiniLM on every target of a machine without a GPU."""
    rows = read("results/export_minilm")
    names = ["pattern", "target", "ms, 1 sentence", "ms, 32 sentences", "MB", "cosine", "ran sparse"]
    return [[*names[:-1], "sparse layers"], *([r[name] for name in names] for r in rows)]


def one_pass() -> Table:
    """Cosine of MiniLM by method, on 192 sentences and on 1,024."""
    header = [
        "",
        "magnitude",
        "wanda",
        "sparsegpt",
        "wanda + least squares",
        "admm",
        "admm (1,024)",
        "recovered (1,024)",
    ]
    names = {"2_4": "2:4", "unstructured": "single weights, 50 %"}
    return [header, *([label, *(three(r["cosine"]) for r in read(MINILM[n]))] for n, label in names.items())]


def one_pass_blocks() -> Table:
    """Cosine of MiniLM with blocks at 50 %."""
    return [["blocks", "admm", "recovered"]] + [
        [name, *(three(r["cosine"]) for r in read(MINILM[name]))] for name in ("1x4", "16x16")
    ]


def one_layer() -> Table:
    """Relative output error and seconds of one layer at 2:4, by method."""
    rows = [r for r in read("benchmarks/results/one_shot_layers") if r["structure"] == "2:4"]
    found = [["outputs x inputs", "magnitude", "wanda", "wanda + least squares", "sparsegpt", "obs", "admm"]]
    for name, size in LAYERS.items():
        own = [r for r in rows if r["layer"] == f"encoder.layer.{name}" and r["method"] != "obs alone"]
        found.append([size, *(f"{three(r['error'])}, {three(r['seconds'])} s" for r in own)])
    return found


LAYERS = {
    "4.attention.output.dense": "384 x 384",
    "2.intermediate.dense": "1536 x 384",
    "3.output.dense": "384 x 1536",
}


def of_smollm2() -> tuple[Row, list[Row]]:
    """The row of the dense SmolLM2 and those of pruned ones; each run of the script has measured the dense one."""
    dense, *rows = read("results/prune_smollm2")
    return dense, [r for r in rows if r["structure"] != "dense"]


def smollm2_at_equal_tokens() -> tuple[int, dict[tuple[str, str], Row]]:
    """The most tokens with which all methods have been measured, and the last row of each method with at most these."""
    dense, rows = of_smollm2()
    compared = ("sparsegpt", "admm", "recovered")
    counts = [{int(r["tokens"]) for r in rows if (r["structure"], r["method"]) == ("2:4", one)} for one in compared]
    most = max(set.intersection(*counts))
    return most, {(r["structure"], r["method"]): r for r in (dense, *rows) if int(r["tokens"]) <= most}


def smollm2() -> Table:
    """Perplexity and seconds of SmolLM2, by structure and method."""
    dense, rows = of_smollm2()
    names = ["tokens", "passes", "perplexity", "seconds", "threads", "peak GiB"]
    rows = [r | {"passes": r["passes"].replace("0", "")} for r in rows]
    found = [["", *names], ["dense", "", "", dense["perplexity"], "", "", ""]]
    return found + [
        [f"{r['structure'].replace('unstructured', '50 %')}, {r['method']}", *(r[name] for name in names)] for r in rows
    ]


def of_mix() -> list[dict[str, str]]:
    """The rows of SmolLM2, calibrated on a mix of kinds of text."""
    return [r for r in read("results/quality_by_kind") if (r["model"], r["calibrated on"]) == ("SmolLM2", "a mix")]


def of_kinds() -> dict[tuple[str, str], dict[str, float]]:
    """The divergence of pruned SmolLM2 by (structure, method) and kind of text; "mean" is without German."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for r in of_mix():
        found.setdefault((r["structure"], r["method"]), {})[r["kind"]] = float(r["divergence"])
    return found


def quality_by_kind() -> Table:
    """The divergence from the dense model in nats per token, by method and kind of text."""
    rows = of_kinds()
    kinds = [*next(iter(rows.values()))]
    lines = [[f"{structure}, {method}", *(f"{row[k]:.2f}" for k in kinds)] for (structure, method), row in rows.items()]
    return [["", *kinds], *lines]


def solved_tasks() -> Table:
    """Programming tasks that a pruned Qwen2.5-Coder solves, its divergence from the dense model, and the cost."""
    ways = dict[tuple[str, str], list[dict[str, str]]]()
    for r in read("results/quality_qwen"):
        ways.setdefault((r["structure"], r["method"]), []).append(r)
    found = [["", "calibrated on", "tokens", "tasks solved", "divergence, mean", "worst kind", "seconds", "peak GiB"]]
    for (structure, method), rows in ways.items():
        six = {r["kind"]: float(r["divergence"]) for r in rows if r["kind"] not in ("mean", "German", "functions")}
        worst, mean = max(six, key=six.__getitem__), sum(six.values()) / len(six)
        cells = [rows[0][name] for name in ("calibrated on", "tokens", "solved")]
        cells += [f"{mean:.2f}", f"{worst}, {six[worst]:.2f}"]
        found.append([f"{structure}, {method}", *cells, rows[0]["seconds"], rows[0]["peak GiB"]])
    return found


def look_first() -> Table:
    """What the dry run says of two models, what then happens, and the same without the worst layers."""
    rows = read("benchmarks/results/look_first")
    names = {"model": "model", "left dense": "left dense", "quality": "cosine or perplexity"}
    names |= {"seconds": "seconds", "estimated": "estimated", "MiB": "MiB", "MiB, estimated": "MiB, estimated"}
    return [list(names.values()), *([r[name] for name in names] for r in rows)]


def networks() -> Table:
    """Trained networks: pruned, with new statistics of their batch norms where these were measured, and recovered."""
    names = ("network", "structure", "before", "statistics", "recovered", "seconds")
    titles = ["network", "structure", "pruned", "new statistics", "recovered", "seconds"]
    return [titles, *([r[name] for name in names] for r in read("results/prune_networks"))]


def units() -> Table:
    """Cosine of MiniLM without units, by score, without compensation and with."""
    found = [["removed", "score", "without compensation", "least squares"]]
    for removed, name in ((HALF, "units"), (BOTH, "heads_and_units")):
        for r in read(f"results/one_shot_{name}"):
            found.append([removed, r["score"], three(r["cosine"]), three(r["with least squares"])])
    return found


def units_recovered() -> Table:
    """The same, recovered."""
    rows = read("results/shrink_minilm_recovered")
    return [
        ["removed", "before", "recovered"],
        *([name, three(r["before"]), three(r["recovered"])] for name, r in zip((HALF, BOTH), rows, strict=True)),
    ]


def digits() -> Table:
    """Accuracy of a small MLP by method of training sparse."""
    rows = read("results/rigl_digits")
    found = [["sparsity", *DIGITS]]
    for level in ("0.9", "0.95"):
        runs = [[float(r["accuracy"]) for r in rows if (r["method"], r["level"]) == (m, level)] for m in DIGITS]
        errors = [statistics.stdev(own) / len(own) ** 0.5 for own in runs]
        cells = [f"{statistics.mean(own):.2f} ± {error:.2f}" for own, error in zip(runs, errors, strict=True)]
        found.append([f"{float(level):.2f}", *cells])
    return found


def sparse_language_model() -> Table:
    """Loss of the small transformer that is trained sparse."""
    _, *rows = read("results/dst_language_model")
    methods = list(dict.fromkeys(r["method"] for r in rows))
    loss = {(r["level"], r["method"]): three(r["loss"]) for r in rows}
    levels = dict.fromkeys(r["level"] for r in rows)
    return [["sparsity", *methods], *([f"{float(one):.2f}", *(loss[one, m] for m in methods)] for one in levels)]


def proximal() -> Table:
    """Inputs that a penalty leaves, in three seeds."""
    rows = read("results/proximal")
    found = [["method", "inputs left", "relevant ones", "test error, mean"]]
    for method in dict.fromkeys(r["method"] for r in rows):
        runs = [r for r in rows if r["method"] == method and r["chosen"] == "1"]
        cells = [", ".join(r[name] for r in runs) for name in ("inputs left", "relevant left")]
        found.append([method, *cells, f"{statistics.mean(float(r['test error']) for r in runs):.2f}"])
    return found


def torch_pruning() -> Table:
    """What became of the networks that both libraries pruned."""
    rows, ours, theirs = read("benchmarks/results/compare_torch_pruning"), "sparsekit_ao", "Torch-Pruning"
    kinds = {
        "exact": "smaller, with the outputs of the masked model",
        "other outputs": "other outputs (LayerNorms and GroupNorms that lost channels, channel shuffles)",
        "does not run": "does not run",
        "error": "error, or not finished within 6 s plus 1 s for each million parameters",
        "nothing removed": "nothing removed",
    }
    found = [["", ours, theirs]]
    for kind, label in kinds.items():
        found.append([label, *(str(sum(r[f"{one} result"] == kind for r in rows)) for one in (ours, theirs))])
    both = [r for r in rows if r[f"{ours} result"] == r[f"{theirs} result"] == "exact"]
    times = [statistics.median(float(r[f"{one} seconds"]) for r in rows) for one in (ours, theirs)]
    removed = [statistics.mean(float(r[f"{one} removed"]) for r in both) for one in (ours, theirs)]
    found.append(["median seconds", f"{times[0]:.1f}", f"{times[1]:.2f}"])
    return [
        *found,
        [f"parameters removed, mean of the {len(both)} where both are exact", *(f"{x:.2f}" for x in removed)],
    ]


EQUAL_FLOPS = {"digits": (1, 1), "text": (-1, 3), "MiniLM": (1, 3)}  # is more better, decimals
COLUMNS = ("fine-tuned", "longer", "recovered", "recovered, fine-tuned")


def best(network: str, method: str, column: str) -> Row:
    """The best run of a library at equal FLOPs, or of one of its scores."""
    rows = read(f"benchmarks/results/compare_accuracy_{network.lower()}")
    own = [r for r in rows if r["method"].startswith(method) and r[column] != "-"]
    return max(own, key=lambda r: EQUAL_FLOPS[network][0] * float(r[column]))


def equal_flops() -> Table:
    """Quality at equal FLOPs beside Torch-Pruning."""

    def cell(network: str, method: str, column: str) -> str:
        row, places = best(network, method, column), EQUAL_FLOPS[network][1]
        deviation = row.get(f"deviation of {column}")
        return f"{float(row[column]):.{places}f}" + (f" ± {float(deviation):.{places}f}" if deviation else "")

    found = [["", "random, fine-tuned", *COLUMNS]]
    for network in EQUAL_FLOPS:
        for library in ("sparsekit_ao", "Torch-Pruning"):
            random = cell(network, f"{library} random", "fine-tuned")
            found.append([f"{network}, {library}", random, *(cell(network, library, c) for c in COLUMNS)])
    return found


def walk_memory() -> Table:
    """Memory and time of a walk over models on disk."""
    names = {
        **{"blocks": "blocks", "model MiB": "model", "peak MiB": "peak above the start"},
        **{"resident MiB in all": "whole process", "seconds a block": "seconds per block"},
        **{"of which solving": "of which pruning", "of which matching": "of which recovery"},
    }
    return [list(names.values()), *([r[name] for name in names] for r in read("benchmarks/results/walk_memory"))]


def pattern_cost() -> Table:
    """What patterns cost in one pass with recovery."""
    cosine = {name: three(read(path)[-1]["cosine"]) for name, path in MINILM.items()}
    removed = {r["removed"]: three(r["recovered"]) for r in read("results/shrink_minilm_recovered")}
    return [
        ["for", "pattern and level", "cosine of MiniLM"],
        ["smaller files; the least loss of quality", "50 %, single weights", cosine["unstructured"]],
        ["sparse tensor cores of NVIDIA", "2:4", cosine["2_4"]],
        ["any device, as a smaller dense model", HALF, removed[HALF]],
        ["the same, smaller still", BOTH, removed["and a third of the heads"]],
        ["vector kernels", "1x4 blocks at 50 %", cosine["1x4"]],
        ["block kernels", "16x16 blocks at 50 %", cosine["16x16"]],
    ]


def method_cost() -> Table:
    """What each way to prune costs in quality and time: the table of the decision page."""
    perplexity = {key: r["perplexity"] for key, r in smollm2_at_equal_tokens()[1].items()}
    _, small = read("results/shrink_minilm")
    removed = {r["removed"]: three(r["recovered"]) for r in read("results/shrink_minilm_recovered")}

    def line(label: str, call: str, name: str, at: int, structure: str, method: str) -> list[str]:
        row = read(MINILM[name])[at]
        count = f"{float(row['seconds']):.0f} s on {int(row['sentences']):,} sentences"
        return [label, call, three(row["cosine"]), perplexity.get((structure, method), ""), count]

    recovered = "`prune(..., recover=True)`"
    return [
        ["what is pruned", "how", "cosine of MiniLM", "perplexity of SmolLM2", "time, MiniLM, two cores"],
        line("2:4", "by magnitude, without data", "2_4", 0, "2:4", "magnitude"),
        line("2:4", '`prune(..., score="wanda", compensate=None)`', "2_4", 1, "2:4", "wanda"),
        line("2:4", '`prune(..., compensate="sparsegpt")`', "2_4", 2, "2:4", "sparsegpt"),
        line("2:4", "`prune(...)`", "2_4", 4, "2:4", "admm"),
        line("2:4", recovered, "2_4", -1, "2:4", "recovered"),
        line("50 %, single weights", recovered, "unstructured", -1, "unstructured", "recovered"),
        line("1x4 blocks at 50 %", recovered, "1x4", -1, "", ""),
        line("16x16 blocks at 50 %", recovered, "16x16", -1, "", ""),
        [
            HALF,
            "`one_shot` and `compact` with couplings, then `recover`",
            removed[HALF],
            perplexity.get((HALF, "recovered"), ""),
            "",
        ],
        [
            BOTH,
            "the same",
            three(small["cosine"]),
            "",
            "",
        ],
    ]


def _of_structure(structure: str) -> dict[str, Row]:
    """The rows of the trained mixture of experts for one structure, by method."""
    return {r["method"]: r for r in read("results/moe_language_model") if r["structure"] == structure}


def mixture() -> Table:
    """The loss of a trained mixture of experts at equal sparsity, by method."""
    rows = {structure: _of_structure(structure) for structure in ("2:4", "50 %")}
    return [["", *rows["2:4"]], *([name, *(three(r["loss"]) for r in by.values())] for name, by in rows.items())]


def mixture_bytes() -> Table:
    """The same mixture with 2:4 in its experts, narrower experts, and fewer: bytes, and the loss."""
    table = [["", "bytes", "in one pass", "recovered"]]
    for name, method in {"2:4 in experts": "admm", "narrower experts": "wanda", "half of the experts": "reap"}.items():
        rows = _of_structure(name)
        losses = [three(rows[m]["loss"]) for m in (method, "recovered")]
        table.append([name, f"{int(rows[method]['bytes']) / 1e6:.2f} MB", *losses])
    return table


def prune_ranks() -> Table:
    """Quality and time of pruning over ranks."""
    names = ["ranks", "same zeros", "cosine", "cosine, recovered", "seconds, recovered"]
    rows = read("benchmarks/results/prune_ranks")
    return [["processes", *names[1:]], *([r["ranks"], *(three(r[n]) for n in names[1:4]), r[names[4]]] for r in rows)]


def offloaded() -> Table:
    """Time and memory of one pass over a model on disk, beside LLM Compressor."""
    rows = read("benchmarks/results/compare_offloaded")
    return [["", "seconds", "peak MiB"], *([r["method"], r["seconds"], r["peak MiB"]] for r in rows)]


def shrink_time() -> Table:
    """Seconds of `shrink`, as models grow."""
    names = ["model", "threads", "parameters", "seconds", "peak MiB"]
    rows = read("benchmarks/results/shrink_time")
    return [names, *([f"{int(r[n]):,}" if n == "parameters" else r[n] for n in names] for r in rows)]


TABLES: dict[str, Callable[[], Table]] = {
    one.__name__: one
    for one in (
        *(
            mask_update,
            targets,
            one_pass,
            one_pass_blocks,
            one_layer,
            smollm2,
            quality_by_kind,
            solved_tasks,
            look_first,
            networks,
        ),
        *(units, units_recovered, digits, sparse_language_model, proximal, torch_pruning, equal_flops),
        *(walk_memory, pattern_cost, method_cost, mixture, mixture_bytes),
        *(prune_ranks, offloaded, shrink_time),
    )
}


def values() -> dict[str, str]:
    """Single numbers that sentences of pages quote, by name."""
    return {**_of_pruning(), **_of_smaller_models(), **_of_training(), **_of_speed()}


def _of_pruning() -> dict[str, str]:
    found = {}
    for name in ("2_4", "unstructured"):
        for r in read(MINILM[name])[:5]:
            found[f"cosine_{name}_{r['method'].split()[0]}{'_fitted' * (r['method'] == METHODS)}"] = three(r["cosine"])
    for name, path in MINILM.items():
        recovered = read(path)[-1]
        found |= {f"cosine_{name}_recovered": three(recovered["cosine"])}
        found |= {f"seconds_{name}_recovered": f"{float(recovered['seconds']):.0f}"}
    more = read("results/prune_minilm_2_4_more")[-1]
    found |= {"cosine_more": three(more["cosine"]), "seconds_more": f"{float(more['seconds']):.0f}"}
    (dense, rows), (most, at_most) = of_smollm2(), smollm2_at_equal_tokens()
    lost = {key: float(r["perplexity"]) - float(dense["perplexity"]) for key, r in at_most.items()}
    for name, method in {"closed": "admm", "recovered": "recovered"}.items():
        found[f"smollm2_{name}"] = f"{100 * (1 - lost['2:4', method] / lost['2:4', 'sparsegpt']):.0f}"
    found |= {"smollm2_tokens": f"{most:,}", "smollm2_dense": dense["perplexity"]}
    found["smollm2_prune_minutes"] = f"{float(at_most['2:4', 'admm']['seconds']) / 60:.0f}"
    found["smollm2_minutes"] = f"{float(at_most['2:4', 'recovered']['seconds']) / 60:.0f}"
    last = {(r["structure"], r["method"]): r for r in rows}
    by_default = read("results/prune_smollm2_default")  # the seconds of the logits include those of the recovery
    seconds = {(r["structure"], r["method"].replace("and logits", "recovered")): r["seconds"] for r in by_default}
    found["smollm2_script_minutes"] = f"{sum(map(float, seconds.values())) / 60:.0f}"
    found["smollm2_script_tokens"] = f"{int(by_default[-1]['tokens']):,}"
    half_of_all = "unstructured", "recovered"
    more, half = last["2:4", "recovered"], last[half_of_all]
    found |= {"smollm2_more_tokens": f"{int(more['tokens']):,}", "smollm2_more": more["perplexity"]}
    found["smollm2_more_minutes"] = f"{float(more['seconds']) / 60:.0f}"
    lost = {key: float(r["perplexity"]) - float(dense["perplexity"]) for key, r in last.items()}
    for name, key in {"more": ("2:4", "recovered"), "logits": ("2:4", "and logits"), "half": half_of_all}.items():
        closed = 1 - lost[key] / lost[key[0], "sparsegpt"]  # at equal tokens, 65,536
        found[f"smollm2_{name}_closed"] = f"{100 * closed:.0f}"
    found["smollm2_half"] = half["perplexity"]
    for name, structure in {"units": "a quarter of the MLP units", "more_units": "half of the MLP units"}.items():
        found[f"smollm2_{name}"] = last[structure, "recovered"]["perplexity"]
    for name, method in {"blocks": "influence", "blocks_recovered": "recovered", "blocks_logits": "and logits"}.items():
        found[f"smollm2_{name}"] = last["a quarter of the blocks", method]["perplexity"]
    for (structure, method), row in of_kinds().items():
        name = f"kinds_{'blocks_' * (structure != '2:4')}{method}"
        worst = max((k for k in row if k not in ("mean", "German")), key=row.__getitem__)
        found |= {name: f"{row['mean']:.2f}", f"{name}_worst": f"{row[worst]:.2f}", f"{name}_worst_kind": worst}
        found[f"{name}_german"] = f"{row['German']:.2f}"
        tokens = next(r["tokens"] for r in of_mix() if (r["structure"], r["method"]) == (structure, method))
        found[f"{name}_tokens"] = f"{int(tokens):,}"
        if structure == "2:4":
            found[f"{name}_share"] = f"{row['mean'] / of_kinds()['2:4', 'sparsegpt']['mean']:.2f}"
    of_spliced = {
        (r["method"], int(r["tokens"]) > 10_000, int(r["copies"])): r
        for r in read("results/quality_spliced")
        if r["kind"] == "mean"
    }
    rows = {"few_plain": of_spliced["recovered", False, 0], "few_spliced": of_spliced["recovered", False, 3]}
    rows |= {"few_later": of_spliced["recovered later", False, 3], "all_later": of_spliced["recovered later", True, 3]}
    rows |= {"all_spliced": of_spliced["recovered", True, 3], "all_logits": of_spliced["and logits", True, 3]}
    found |= {name: f"{float(row['divergence']):.2f}" for name, row in rows.items()}
    found |= {"few_tokens": rows["few_plain"]["tokens"], "all_tokens": rows["all_later"]["tokens"]}
    found |= {name: f"{int(found[name]):,}" for name in ("few_tokens", "all_tokens")}
    of_sparsegpt = of_kinds()["2:4", "sparsegpt"]["mean"]
    found |= {f"{name}_share": f"{float(rows[name]['divergence']) / of_sparsegpt:.2f}" for name in rows}
    found["few_times"] = f"{float(rows['few_spliced']['seconds']) / float(rows['few_plain']['seconds']):.1f}"
    of_qwen = {
        r["kind"]: r for r in read("results/quality_qwen") if (r["structure"], r["method"]) == ("2:4", "recovered")
    }
    found["tasks_dense"] = of_qwen["code"]["dense solved"]
    found |= {f"tasks_{kind.lower()}": f"{float(of_qwen[kind]['divergence']):.2f}" for kind in ("code", "German")}
    units = next(r for r in read("results/quality_qwen") if "units" in r["structure"] and r["kind"] == "code")
    found["tasks_units_code"] = f"{float(units['divergence']):.2f}"
    blocks = {r["kind"]: r for r in read("results/quality_qwen") if r["method"] == "fitted"}
    found["tasks_blocks"] = blocks["code"]["solved"]
    found["tasks_blocks_recovered"] = next(
        r["solved"]
        for r in read("results/quality_qwen")
        if ("blocks" in r["structure"], r["method"]) == (True, "recovered")
    )
    found |= {f"tasks_blocks_{kind.lower()}": f"{float(blocks[kind]['divergence']):.2f}" for kind in ("code", "German")}
    for r in read("benchmarks/results/look_first"):
        name = f"look_{r['model'].lower()}{'' if r['left dense'] == '-' else '_excluded'}"
        found |= {name: r["quality"], f"{name}_pruned": f"{100 * float(r['weights pruned']):.0f}"}
    found["loss_dense"] = three(read("results/dst_language_model")[0]["loss"])
    layers = [r for r in read("benchmarks/results/one_shot_layers") if (r["structure"], r["method"]) == ("2:4", "admm")]
    seconds = {r["layer"].removeprefix("encoder.layer."): f"{float(r['seconds']):.2f}" for r in layers}
    found |= {
        "seconds_short_layer": seconds["4.attention.output.dense"],
        "seconds_wide_layer": seconds["3.output.dense"],
    }
    walks = read("benchmarks/results/walk_memory")
    few, many = (int(walks[k]["peak MiB"]) for k in (0, -1))
    size = [int(walks[k]["model MiB"]) for k in (0, -1)]
    found |= {
        "walk_model_times": f"{size[1] / size[0]:.0f}",
        "walk_few_blocks": walks[0]["blocks"],
    }
    found |= {
        "walk_few": str(few),
        "walk_many": str(many),
        "walk_many_blocks": walks[-1]["blocks"],
        "walk_model": walks[-1]["model MiB"],
    }
    large = read("benchmarks/results/walk_memory_large")[0]
    found |= {"large_model": f"{int(large['model MiB']) / 1024:.1f}", "large_seconds": f"{float(large['seconds']):.0f}"}
    found["large_resident"] = f"{int(large['resident MiB in all']) / 1024:.1f}"
    found["walk_block"] = walks[0]["block MiB in float32"]
    dense, rows = read("results/moe_language_model")[0], _of_structure("2:4")
    lost = {method: float(r["loss"]) - float(dense["loss"]) for method, r in rows.items()}
    found |= {"moe_dense": three(dense["loss"]), "moe_bytes": f"{int(dense['bytes']) / 1e6:.2f}"}
    found |= {f"moe_lost_{m}": f"{100 * lost[m] / lost['magnitude']:.0f}" for m in ("admm", "recovered")}
    return found


def _of_smaller_models() -> dict[str, str]:
    dense, small = read("results/shrink_minilm")
    found = {
        "small_flops": f"{100 * int(small['flops']) / int(dense['flops']):.0f}",
        "small_time": f"{100 * float(small['of dense']):.0f}",
        "small_file": f"{100 * int(small['file bytes']) / int(dense['file bytes']):.0f}",
        "small_cosine": f"{float(small['cosine']):.2f}",
    }
    minilm, smollm2 = read("results/shrink_vocabulary")
    for name, r in (("minilm", minilm), ("smollm2", smollm2)):
        keys = ("sentences", "tokens", "kept", "held out", "of kept tokens")
        found |= {f"vocabulary_{name}_{key.replace(' ', '_')}": f"{int(r[key]):,}" for key in keys}
    for key in ("parameters", "kept parameters"):
        found[f"vocabulary_{key.replace(' ', '_')}"] = f"{int(minilm[key]) / 1e6:.1f}"
    rows = read("benchmarks/results/compare_torch_pruning")
    found |= {"architectures": str(len(rows))}
    for name, library in (("ours", "sparsekit_ao"), ("theirs", "Torch-Pruning")):
        found[f"exact_{name}"] = str(sum(r[f"{library} result"] == "exact" for r in rows))
    removed = {
        r["network"]: tuple(float(r[f"{library} removed"]) for library in ("sparsekit_ao", "Torch-Pruning"))
        for r in rows
        if r["sparsekit_ao result"] == r["Torch-Pruning result"] == "exact"
    }
    found |= {"exact_both": str(len(removed))}
    found |= {"removed_as_many": str(sum(ours >= theirs for ours, theirs in removed.values()))}
    for name, network in (("inception", "Inception"), ("dla", "timm dla34")):
        found[f"removed_{name}"] = " against ".join(map(three, removed[network]))
    narrowed = best("text", "Torch-Pruning taylor, global, residual stream narrowed", "fine-tuned")
    found |= {"narrowed_text": three(narrowed["fine-tuned"])}
    for name, (sign, places) in EQUAL_FLOPS.items():
        columns = {"recovered": COLUMNS[-1], "fine_tuned": COLUMNS[0]}
        for label, column in columns.items():
            ours, theirs = (
                float(best(name, m, c)[c]) for m, c in (("sparsekit_ao", column), ("Torch-Pruning", COLUMNS[0]))
            )
            found[f"ahead_{name.lower()}_{label}"] = f"{sign * (ours - theirs):.{places}f}"
        dense_row, *others = read(f"benchmarks/results/compare_accuracy_{name.lower()}")
        found[f"dense_{name.lower()}"] = f"{float(dense_row['pruned']):.{places}f}"
        seconds = [float(r["seconds of recover"]) for r in others if r["seconds of recover"] != "-"]
        found[f"recover_{name.lower()}"] = span(seconds)
    return found


def _of_training() -> dict[str, str]:
    output = (EXAMPLES / "tutorials/outputs/trainer_2_4.txt").read_text()
    found = {}
    for name in ("dense", "2:4"):
        accuracy = re.search(rf"{name}: accuracy (\S+?),?\s", output)
        assert accuracy is not None
        found[f"accuracy_{name.replace(':', '_')}"] = accuracy[1]
    dense = [float(r["accuracy"]) for r in read("results/rigl_digits") if r["method"] == "dense"]
    found["accuracy_digits"] = f"{statistics.mean(dense):.2f}"
    loss = {(r["method"], r["level"]): three(r["loss"]) for r in read("results/dst_language_model")}
    found |= {f"loss_{m.lower()}": loss[m, "0.9"] for m in ("GMP", "RigL")}
    runs = [r for r in read("results/proximal") if r["method"] == "Adam, conditioned"]
    for name, strength in (("weak", 0.15), ("strong", 0.5)):
        found[f"inputs_left_{name}"] = span(int(r["inputs left"]) for r in runs if float(r["strength"]) == strength)
    steps = [r for r in read("benchmarks/results/dst_overhead") if r["step"] == "closed"]
    found |= {f"dynamic_step_{r['model'].split()[3].strip(',')}": f"{float(r['times stock']):.2f}" for r in steps}
    return found


def _of_speed() -> dict[str, str]:
    rows = read("benchmarks/results/cpu_step")
    scope = {r["pattern"]: float(r["ms"]) for r in rows if r["kind"] == "ScopeSparsifier"}
    found = {}
    for name, kind in (("scope", "ScopeSparsifier"), ("drop_in", "WeightNormSparsifier")):
        found[f"faster_{name}"] = span(float(r["times faster than stock"]) for r in rows if r["kind"] == kind)
    others = {"topk": "torch.topk", "kthvalue": "torch.kthvalue", "l1_unstructured": "prune.l1_unstructured"}
    for name, kind in (
        others | {"pat_blocks": "PAT MinSparsityConstraint", "pat_n_m": "PAT NMSparseConstraint"}
    ).items():
        times = [float(r["ms"]) / scope[r["pattern"]] for r in rows if r["kind"] == kind]
        found[f"slower_{name}"] = span(times, 1) if len(times) > 1 else f"{times[0]:.1f}"
    clones = [float(r["ms"]) / float(r["times one copy"]) for r in rows if r["kind"] == "stock"]
    found["clone_ms"] = f"{statistics.median(clones):.0f}"
    for dtype in ("float32", "bfloat16"):
        patterns = [r for r in read("benchmarks/results/cpu_patterns") if r["dtype"] == dtype]
        found[f"copy_ms_{dtype}"] = f"{statistics.median(float(r['copy ms']) for r in patterns):.0f}"
        copies, pattern = max((float(r["times one copy"]), r["pattern"]) for r in patterns)
        found[f"slowest_{dtype}"] = f"{copies} copies ({pattern})"
    proximal = {r["block"]: r for r in read("benchmarks/results/proximal_map")}
    conditioned = {block: float(r["conditioned copies"]) for block, r in proximal.items()}
    found |= {f"proximal_{block}": f"{conditioned[block]:.0f}" for block in ("1x16", "1x4", "1x1")}
    found |= {"proximal_long": span(conditioned[block] for block in ("rows", "columns", "32x32", "the whole"))}
    found |= {"proximal_plain": span(float(r["plain copies"]) for r in proximal.values())}
    found |= {"proximal_copy": f"{statistics.median(float(r['copy ms']) for r in proximal.values()):.1f}"}
    growth = {(r["pattern"], r["size"]): float(r["ns an element"]) for r in read("benchmarks/results/cpu_growth")}
    found["growth"] = span((growth[p, "8192"] / ns for (p, size), ns in growth.items() if size == "1024"), 2)
    layers = read("benchmarks/results/masked_linear")
    masked = [r for r in layers if r["layer"] in ("bool mask", "float mask") and r["mode"] == "eager"]
    for what in ("training", "evaluation"):
        ratios = [float(r["ratio"]) for r in masked if r["pass"] == what]
        found |= {f"masked_{what}": span(ratios, 2), f"masked_{what}_median": f"{statistics.median(ratios):.2f}"}
    compiled = {r["layer"]: r["ratio"] for r in layers if r["mode"] == "compiled"}
    found |= {"compiled_bool": compiled["bool mask"], "compiled_float": compiled["float mask"]}
    prepare = {r["kind"]: f"{float(r['prepare ms']):.0f}" for r in read("benchmarks/results/prepare")}
    found |= {"prepare_ours": prepare["ScopeSparsifier"], "prepare_stock": prepare["stock"]}
    bisection, gather = (int(r["bytes"]) for r in read("benchmarks/results/selection_bytes"))
    found |= {"selection_bytes": str(bisection), "selection_gather": f"{gather // 10**6} MB"}
    targets = {(r["pattern"], r["target"]): r for r in read("results/export_minilm")}
    for name, key in (
        ("dense", ("dense", "float32")),
        ("2_4", ("2:4", "float32")),
        ("bsr", ("16x16 blocks at 80%", "BSR")),
    ):
        found[f"ms_{name}"] = targets[key]["ms, 32 sentences"]
    found |= {"ms_16x16": targets["16x16 blocks at 80%", "float32"]["ms, 32 sentences"]}
    found |= {"cosine_16x16_80": three(targets["16x16 blocks at 80%", "float32"]["cosine"])}
    found |= {"ms_int8": targets["dense", "torch.ao dynamic int8"]["ms, 32 sentences"]}
    return found


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]) + "\n"


def write_all(folder: pathlib.Path) -> None:
    """Write every table as `table_NAME.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in TABLES.items():
        (folder / f"table_{name}.md").write_text(markdown(table()))
