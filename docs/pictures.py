"""The pictures of the site: masks and drawings as small SVG files, plots of the committed CSVs.

`python docs/pictures.py FOLDER` writes all of them; `python docs/pictures.py` writes those of the README anew.
Every mask is chosen by the library, and every plot reads a CSV of `examples/`, which the page below it names.
"""

import pathlib
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence

import torch
from figures import MINILM, of_smollm2, read, smollm2_at_equal_tokens
from torch import Tensor, nn

from sparsekit_ao import BlockSpec, Coupling, ScopeCoupling, ScopeSparsifier, ScopeSpec, keep_mask, patterns

HERE = pathlib.Path(__file__).parent
README_PICTURE, README_PLOT = HERE / "_static/patterns.svg", HERE / "_static/models.svg"
CELL = 8  # pixels of an element
KEPT, DROPPED = "#2b3a67", "#e9ebf2"
TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'
COLOURS = (KEPT, "#d95f02", "#1b7837", "#8a94b3", "#c9762f", "#5b9e72", "#b9bfd3")  # of plots: few, dark ones first
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],  # the site's font where it is installed
    "font.size": 9,
    "text.color": "#222",
    "axes.labelcolor": "#222",
    "axes.edgecolor": "#999",
    "xtick.color": "#555",
    "ytick.color": "#555",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text stays text: light files
    "svg.hashsalt": "0",
}


def draw_matrix(mask: Tensor, *, outlines: Mapping[str, Tensor] | None = None) -> str:
    """A mask [rows, columns] as an SVG file: kept elements dark; sets of elements outlined, {colour: bool mask}."""
    return _svg(*_panel(mask, outlines=outlines or {}))


def draw_panels(panels: Sequence[tuple[str, Tensor, Mapping[str, Tensor]]], columns: int = 9) -> str:
    """Matrices side by side, in rows of `columns`; (caption, mask or values in [0, 1], outlines) each."""
    found, left, top, right, bottom = [], 0, 0, 0, 0
    for at, (caption, values, outlines) in enumerate(panels):
        if at and at % columns == 0:
            left, top = 0, bottom + 16
        width, height, body = _panel(values, outlines=outlines)
        width = max(width, 6 * len(caption))
        text = f'<text x="0" y="10" font-family="sans-serif" font-size="11" fill="#222">{caption}</text>'
        found.append(f'<g transform="translate({left} {top})">{text}<g transform="translate(0 16)">{body}</g></g>')
        right, bottom = max(right, left + width), max(bottom, top + height + 16)
        left += width + 24
    return _svg(right, bottom, "".join(found))


def _panel(values: Tensor, outlines: Mapping[str, Tensor]) -> tuple[int, int, str]:
    rows, columns = values.shape
    if values.dtype == torch.bool:
        cells = f'<path fill="{KEPT}" d="{_runs(values)}"/>'
    else:
        cells = "".join(
            f'<rect x="{c}" y="{r}" width="1" height="1" fill="{KEPT}" fill-opacity="{values[r, c]:.2f}"/>'
            for r in range(rows)
            for c in range(columns)
        )
    grid = "".join(f"M{c} 0v{rows}" for c in range(1, columns)) + "".join(f"M0 {r}h{columns}" for r in range(1, rows))
    lines = "".join(
        f'<path d="{_edges(chosen)}" stroke="{colour}" stroke-width=".28" stroke-linecap="square"/>'
        for colour, chosen in outlines.items()
    )
    body = (
        f'<g transform="translate(2 2) scale({CELL})"><rect width="{columns}" height="{rows}" fill="{DROPPED}"/>{cells}'
        f'<path d="{grid}" stroke="#fff" stroke-width=".12"/>{lines}</g>'
    )
    return columns * CELL + 4, rows * CELL + 4, body


def _svg(width: int, height: int, body: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def _runs(mask: Tensor) -> str:
    """Kept elements as a path, one rectangle for each run in a row."""
    path = []
    for r, row in enumerate(mask.tolist()):
        c = 0
        while c < len(row):
            start = c
            while c < len(row) and row[c]:
                c += 1
            if c > start:
                path.append(f"M{start} {r}h{c - start}v1h{start - c}z")
            c += 1
    return "".join(path)


def _edges(chosen: Tensor) -> str:
    """The border of a set of elements as a path."""
    padded = nn.functional.pad(chosen.int(), (1, 1, 1, 1))
    across, down = padded[1:-1].diff(dim=1).ne(0).nonzero(), padded[:, 1:-1].diff(dim=0).ne(0).nonzero()
    return "".join([f"M{c} {r}v1" for r, c in across.tolist()] + [f"M{c} {r}h1" for r, c in down.tolist()])


def concepts() -> str:
    """Weight, blocks, scopes and the mask of one matrix."""
    torch.manual_seed(2)
    weight = torch.randn(8, 16)
    blocks = BlockSpec(weight, (2, 2))
    scopes = ScopeSpec(blocks, (1, 4))

    def elements(block_ids: Tensor) -> Tensor:
        return blocks.get_masks(block_ids)[blocks]

    one_block, one_scope = torch.zeros(2, 4, 8, dtype=torch.bool)
    one_block[1, 2] = True
    one_scope[1, :4] = True
    size = weight.abs() / weight.abs().max()
    norms = blocks.norms()
    by_block = blocks.view.broadcast_block_to_element(norms / norms.max(), (2, 2))
    mask = scopes.get_masks(nnz=2)[blocks]
    block, scope = {"#1b7837": elements(one_block)}, {"#d95f02": elements(one_scope)}
    return draw_panels(
        [
            ("weight: |w|", size, {}),
            ("block 2 x 2: its norm", by_block, block),
            ("scope: 4 blocks compete", by_block, scope),
            ("budget: 2 of 4 are kept", mask, scope),
        ],
        columns=2,
    )


def rule() -> str:
    """Three scopes of four scored blocks, of which two stay; one of them has equal scores."""
    scores = torch.tensor([[3.0, 9, 4, 7], [5, 5, 5, 5], [8, 2, 6, 6]])
    mask = keep_mask(scores, 2)
    size, found = 40, []
    for r, row in enumerate(scores.tolist()):
        top = 22 + r * 62
        found.append(f'<text x="0" y="{top - 7}" {TEXT}>scope {r + 1}</text>')
        for c, score in enumerate(row):
            kept = bool(mask[r, c])
            fill, ink, left = (KEPT, "#fff", c * (size + 4)) if kept else (DROPPED, "#222", c * (size + 4))
            found.append(f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="{fill}"/>')
            middle = f'x="{left + size // 2}" y="{top + size // 2 + 5}" text-anchor="middle" font-weight="bold"'
            found.append(f"<text {middle} {TEXT.replace('#222', ink)}>{score:.0f}</text>")
        note = ("the two highest stay", "ties: lower index stays", "a tie: lower index stays")[r]
        found.append(f'<text x="{4 * size + 24}" y="{top + size // 2 + 5}" {TEXT}>{note}</text>')
    return _svg(372, 22 + 3 * 62, "".join(found))


def views() -> str:
    """One matrix under two views: heads, and pairs of columns that are apart."""
    heads = torch.arange(16)[:, None].div(4, rounding_mode="floor").expand(16, 16)
    column = torch.arange(16).expand(16, 16)
    pair = column % 8 == 2
    return draw_panels(
        [
            ("(h d) i: head 1 of 4", heads == 1, {"#1b7837": heads == 1}),
            ("o (p s): columns 2 and 10", pair, {"#1b7837": pair}),
        ]
    )


def coupling() -> str:
    """The three matrices of a gated MLP, half of whose units are dropped."""
    torch.manual_seed(1)
    model = nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in _GATED.items()})
    mlp = Coupling({"gate.weight": "u i", "up.weight": "u i", "down.weight": "o u"})
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, mlp.entries(model, sparsity_level=0.5))
    sparsifier.step()
    masks = {name: sparsifier.mask(f"{name}.weight") for name in _GATED}
    unit = torch.zeros(16, dtype=torch.bool)
    unit[int(masks["gate"][:, 0].nonzero()[0])] = True
    outlines = {n: {"#1b7837": (unit[:, None] if n != "down" else unit[None]).expand_as(m)} for n, m in masks.items()}
    return draw_panels([(f"{n}: {'o u' if n == 'down' else 'u i'}", m, outlines[n]) for n, m in masks.items()])


_GATED = {"gate": (12, 16), "up": (12, 16), "down": (16, 12)}


def one_budget() -> str:
    """Two layers that share one budget: the layer with larger weights keeps more."""
    torch.manual_seed(0)
    first, second = torch.randn(12, 16), 0.5 * torch.randn(12, 16)
    specs = [BlockSpec(first), BlockSpec(second)]
    masks = ScopeCoupling([ScopeSpec(s) for s in specs]).get_masks(nnz=192)
    return draw_panels([(f"layer {k + 1} keeps {int(masks[s].sum())}", masks[s], {}) for k, s in enumerate(specs)])


def overview() -> str:
    """Six patterns side by side, for the README."""
    torch.manual_seed(0)
    found = {
        "unstructured": patterns.unstructured(0.5),
        "2:4": patterns.n_m(2, 4),
        "blocks 4 x 4": patterns.blocks(4, 4, 0.5),
        "rows": patterns.rows(0.5),
        "heads": patterns.heads(4, 0.5),
        "V:N:M": patterns.v_n_m(8, 2, 8),
    }
    model = nn.ModuleDict({f"m{k}": nn.Linear(16, 16, bias=False) for k in range(len(found))})
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(
        model, [{"tensor_fqn": f"m{k}.weight", "pattern": pattern} for k, pattern in enumerate(found.values())]
    )
    sparsifier.step()
    return draw_panels([(name, sparsifier.mask(f"m{k}.weight"), {}) for k, name in enumerate(found)], columns=3)


def plot_mask_update(path: pathlib.Path) -> None:
    """Time of one mask update, by pattern and implementation."""
    rows = read("benchmarks/results/cpu_step")
    names = list(dict.fromkeys(r["pattern"] for r in rows))
    kinds = {"torch.ao": "stock"} | {kind: kind for kind in ("ScopeSparsifier", "WeightNormSparsifier")}
    ms = {(r["pattern"], r["kind"]): float(r["ms"]) for r in rows}
    _bars(path, names, {k: [ms[n, kind] for n in names] for k, kind in kinds.items()}, "ms, one mask update", log=True)


def plot_smollm2(path: pathlib.Path) -> None:
    """Perplexity of SmolLM2 at 2:4, by the time that pruning took, with few tokens and with more."""
    dense, rows = of_smollm2()
    figure, axes = _figure(3.4)
    for method in ("magnitude", "wanda", "sparsegpt", "admm", "recovered"):
        own = [r for r in rows if (r["structure"], r["method"]) == ("2:4", method)]
        axes.plot(*zip(*((float(r["seconds"]), float(r["perplexity"])) for r in own), strict=True), "o-", label=method)
    axes.axhline(float(dense["perplexity"]), color="#999", lw=1)
    axes.annotate("dense", (60, float(dense["perplexity"])), xytext=(0, 3), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([60, 300, 1800], ["1 minute", "5", "30"])
    axes.set_xlim(right=7000)
    axes.set_yticks([20, 50, 100, 500, 2000], ["20", "50", "100", "500", "2,000"])
    axes.minorticks_off()
    axes.set_ylabel("perplexity, 2:4")
    for line in axes.lines[:-1]:
        place = line.get_xdata()[-1], line.get_ydata()[-1]
        keys = {"xytext": (6, 4), "textcoords": "offset points", "color": line.get_color()}
        axes.annotate(line.get_label(), place, annotation_clip=False, **keys)
    figure.savefig(path, metadata={"Date": None})


def plot_models(path: pathlib.Path) -> None:
    """Quality of MiniLM and SmolLM2: dense, smaller, and at 2:4, with what it took."""
    from matplotlib.figure import Figure

    dense, small = read("results/shrink_minilm")
    file = 100 * int(small["file bytes"]) / int(dense["file bytes"])
    size = f"file {file:.0f} %, time {100 * float(small['of dense']):.0f} %"
    bars = [("dense", 1.0, ""), ("fewer units and heads", float(small["cosine"]), size)]
    rows = read(MINILM["2_4"])
    for label, r in (("2:4, smallest weights", rows[0]), ("2:4, prune", rows[-2]), ("2:4, and recover", rows[-1])):
        bars.append((label, float(r["cosine"]), f"{float(r['seconds']):.0f} s"))
    panels = {"MiniLM: cosine to dense, higher is better": bars}
    _, named = smollm2_at_equal_tokens()
    labels = {
        "dense": ("dense", ""),
        "fewer units": ("a quarter of the MLP units", "obs"),
        "2:4, smallest weights": ("2:4", "magnitude"),
        "2:4, prune": ("2:4", "admm"),
        "2:4, and recover": ("2:4", "recovered"),
    }
    bars = panels["SmolLM2: perplexity, lower is better"] = []
    for label, key in labels.items():
        r = named[key]
        has_time = bool(key[1]) and r["threads"] == "2"
        bars.append((label, float(r["perplexity"]), f"{float(r['seconds']) / 60:.0f} min" * has_time))
    figure = Figure(figsize=(4.8, 4), layout="constrained")
    for axes, (title, own) in zip(figure.subplots(len(panels)), panels.items(), strict=True):
        values = [value for _, value, _ in own]
        is_perplexity = max(values) > 1
        start = 10 if is_perplexity else 0
        colours = [COLOURS[3], *[KEPT] * (len(own) - 1)]
        axes.barh(range(len(own)), [value - start for value in values], 0.7, left=start, color=colours)
        for k, (_, value, note) in enumerate(own):
            text = f"{value:,.4g}" if is_perplexity else f"{value:.3f}"
            keys = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{text}{', ' * bool(note)}{note}", (value, k), **keys)
        if is_perplexity:
            axes.set_xscale("log")
        axes.set_yticks(range(len(own)), [label for label, _, _ in own])
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=9)
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(length=0, labelbottom=False)
        axes.minorticks_off()
    figure.savefig(path, metadata={"Date": None})


def plot_sentences(path: pathlib.Path) -> None:
    """Cosine of MiniLM at 2:4 to the dense model, by the number of calibration sentences."""
    rows = [r for name in ("", "_more") for r in read(f"{MINILM['2_4']}{name}")]
    figure, axes = _figure(3)
    for method in ("admm", "admm, recovered"):
        points = sorted((int(r["sentences"]), float(r["cosine"])) for r in rows if r["method"] == method)
        axes.plot(*zip(*points, strict=True), marker="o", label=method)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("calibration sentences")
    axes.set_ylabel("cosine to the dense model, 2:4")
    _name_lines(axes)
    figure.savefig(path, metadata={"Date": None})


def plot_digits(path: pathlib.Path) -> None:
    """Accuracy of methods of dynamic sparse training at 95 %, each of the ten runs."""
    rows = [r for r in read("results/rigl_digits") if r["level"] == "0.95"]
    names = list(dict.fromkeys(r["method"] for r in rows))
    figure, axes = _figure(3)
    for k, name in enumerate(names):
        runs = [float(r["accuracy"]) for r in rows if r["method"] == name]
        axes.plot([k] * len(runs), runs, "o", color=KEPT, alpha=0.35, markeredgewidth=0)
        axes.plot([k - 0.25, k + 0.25], [statistics.median(runs)] * 2, color=COLOURS[1])
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("accuracy (%), digits, 95 % sparse")
    figure.savefig(path, metadata={"Date": None})


def plot_block_errors(path: pathlib.Path) -> None:
    """Error of each block of MiniLM at 2:4, before and after it was matched to the dense one."""
    rows = read(f"{MINILM['2_4']}_blocks")
    names = [r["block"].rpartition(".")[2] for r in rows]
    series = {f"{when} matching": [float(r[when]) for r in rows] for when in ("before", "after")}
    _bars(path, names, series, "relative error of the block", x="block of MiniLM, 2:4")


def plot_quality(path: pathlib.Path) -> None:
    """Cosine of MiniLM to the dense model by the share of weights kept, for each method."""
    rows = {level: read(f"{MINILM['unstructured']}_{level}") for level in (0.5, 0.7, 0.8)}
    figure, axes = _figure(4)
    kept = [100 * (1 - level) for level in rows]
    for k, first in enumerate(rows[0.5]):
        axes.plot(kept, [float(own[k]["cosine"]) for own in rows.values()], "o-", label=first["method"])
    axes.set_xlabel("single weights kept, %")
    axes.set_ylabel("cosine to the dense model")
    axes.invert_xaxis()
    _name_lines(axes)
    figure.savefig(path, metadata={"Date": None})


def plot_walk_memory(path: pathlib.Path) -> None:
    """Memory of a walk over a model on disk, and the size of the model, by number of blocks."""
    rows = read("benchmarks/results/walk_memory")
    blocks = [int(r["blocks"]) for r in rows]
    figure, axes = _figure(3)
    for name, column in (("the model, on disk", "model MiB"), ("peak of the walk", "peak MiB")):
        axes.plot(blocks, [int(r[column]) for r in rows], "o-", label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("blocks of the model")
    axes.set_ylabel("MiB")
    _name_lines(axes)
    figure.savefig(path, metadata={"Date": None})


def _bars(  # type: ignore[no-untyped-def]
    path: pathlib.Path,
    names: Sequence[str],
    series: dict[str, list[float]],
    label: str,
    *,
    x: str = "",
    log: bool = False,
):
    figure, axes = _figure(3.8)
    width = 0.8 / len(series)
    for k, (kind, values) in enumerate(series.items()):
        axes.bar([i + width * (k - (len(series) - 1) / 2) for i in range(len(names))], values, width, label=kind)
    axes.set_xticks(range(len(names)), [textwrap.fill(name, 8) for name in names])
    axes.set_xlabel(x)
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _name_lines(axes) -> None:  # type: ignore[no-untyped-def]
    """Write the name of each line beside its last point, in its colour, without overlaps."""
    low, high = axes.get_ylim()
    least, place = 0.065 * (high - low), low  # between two names
    for line in sorted(axes.lines, key=lambda line: line.get_ydata()[-1]):
        x, y = line.get_xdata()[-1], line.get_ydata()[-1]
        place = max(y, place + least)
        keys = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": line.get_color()}
        axes.annotate(line.get_label(), (x, place), annotation_clip=False, **keys)


def _figure(height: float):  # type: ignore[no-untyped-def]
    from matplotlib import cycler
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, height), layout="constrained")  # inches: text is read at the width of a phone
    axes = figure.add_subplot()
    axes.set_prop_cycle(cycler(color=COLOURS))
    return figure, axes


DRAWINGS = {"concepts": concepts, "rule": rule, "views": views, "coupling": coupling, "one_budget": one_budget}
PLOTS = {
    "mask_update": plot_mask_update,
    "smollm2": plot_smollm2,
    "models": plot_models,
    "sentences": plot_sentences,
    "digits": plot_digits,
    "block_errors": plot_block_errors,
    "quality": plot_quality,
    "walk_memory": plot_walk_memory,
}


def write_all(folder: pathlib.Path) -> None:
    """Write every picture but those of the gallery."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw())
    for name in PLOTS:
        write_plot(name, folder / f"{name}.svg")


def write_plot(name: str, path: pathlib.Path) -> None:
    """Write a plot in the style of the site."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        PLOTS[name](path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_all(pathlib.Path(sys.argv[1]))
    else:
        README_PICTURE.write_text(overview())
        write_plot("models", README_PLOT)
