"""Group lasso on the inputs of a network, of which a few matter: proximal steps in Adam's metric, and Euclidean ones.

    python examples/proximal.py                 # seeds 0 to 2: some minutes on one core
    python examples/proximal.py --tiny          # every method, in seconds

Of 64 inputs with scales from 0.1 to 10, 6 determine the target. The blocks are the columns of the first layer, one for
each input. Every method has the same strengths and two learning rates; of these runs the one is chosen that has the
largest strength (of several the lowest error) within 5 % of the lowest error of the method on held-out data. The test
error is on other data. Writes one row for each run (CSV) and a plot.
"""

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import ProximalSparsifier, patterns, schedules

INPUTS, RELEVANT, ROWS, STEPS = 64, 6, 1000, 1200
STRENGTHS = (0.05, 0.15, 0.5, 1.5, 5.0, 15.0)
Make = Callable[[nn.Module, float], torch.optim.Optimizer]
METHODS: dict[str, tuple[Make, Any, tuple[float, ...], tuple[float, ...]]] = {
    # optimizer, conditioner, learning rates, strengths
    "Adam, none": (lambda m, rate: torch.optim.Adam(m.parameters(), rate), None, (0.003, 0.01), (0.0,)),
    "SGD, Euclidean": (
        lambda m, rate: torch.optim.SGD(m.parameters(), rate, momentum=0.9),
        None,
        (0.001, 0.003),
        STRENGTHS,
    ),
    "Adam, Euclidean": (lambda m, rate: torch.optim.Adam(m.parameters(), rate), None, (0.003, 0.01), STRENGTHS),
    "Adam, conditioned": (lambda m, rate: torch.optim.Adam(m.parameters(), rate), "auto", (0.003, 0.01), STRENGTHS),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train every method from every seed; print the table, write the rows and the plot."""
    args = parse(argv)
    torch.set_num_threads(1)
    start, rows, curves = time.perf_counter(), [], {}
    for seed in range(args.seeds):
        data = make_data(seed)
        for name, (_, _, rates, strengths) in METHODS.items():
            grid = list(itertools.product(rates, strengths))[: args.runs]
            runs = [train(name, *at, seed, data, args.steps) for at in grid]
            best = chosen(grid, [found["held-out error"][-1] for found in runs])
            rows += [row(name, *at, seed, runs[k], is_chosen=k == best) for k, at in enumerate(grid)]
            if seed == 0:
                curves[name] = runs[best]
        print(f"seed {seed} done after {time.perf_counter() - start:.0f} s", flush=True)
    print_table(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    write_rows(rows, args.out / "proximal.csv", machine)
    plot(rows, curves, args.out / "proximal.png")
    print(f"rows and plot: {args.out}")


def chosen(grid: Sequence[tuple[float, float]], errors: Sequence[float]) -> int:
    """The index of the run with the largest strength of those within 5 % of the lowest error, then the lowest error."""
    near = [k for k, error in enumerate(errors) if error <= 1.05 * min(e for e in errors if e == e)]
    return max(near, key=lambda k: (grid[k][1], -errors[k]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to this minus 1 (default: 3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"(default: {STEPS})")
    parser.add_argument("--out", type=Path, default=Path("out/proximal"), help="folder (default: out/proximal)")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: one seed, one run of each method, 60 steps")
    args = parser.parse_args(argv)
    args.runs = 1 if args.tiny else None
    if args.tiny:
        args.seeds, args.steps = 1, 60
    if args.seeds < 1 or args.steps < 1:
        parser.error("--seeds and --steps must be at least 1")
    return args


def make_data(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and targets to train on, to choose the strength by, and to test on."""
    g = torch.Generator().manual_seed(seed)
    scales = 10 ** (torch.rand(INPUTS, generator=g) * 2 - 1)  # from 0.1 to 10
    relevant = torch.randperm(INPUTS, generator=g)[:RELEVANT]
    teacher = nn.Sequential(nn.Linear(RELEVANT, 16), nn.Tanh(), nn.Linear(16, 1))
    for parameter in teacher.parameters():
        nn.init.normal_(parameter, std=0.8, generator=g)
    found = {}
    for name, count in {"train": ROWS, "held-out": 1000, "test": 4000}.items():
        x = torch.randn(count, INPUTS, generator=g)
        with torch.no_grad():
            y = teacher(x[:, relevant]) + 0.1 * torch.randn(count, 1, generator=g)
        found[name] = (x * scales, y)
    found["relevant"] = (relevant, relevant)
    return found


def train(
    name: str, rate: float, strength: float, seed: int, data: dict[str, tuple[Tensor, Tensor]], steps: int
) -> dict[str, list]:
    """One run; 60 times during it: errors, inputs left, and relevant ones of these."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 1))
    make, conditioner, *_ = METHODS[name]
    optimizer = make(model, rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=rate / 300)
    sparsifier = ProximalSparsifier(
        strength=schedules.constant(strength), optimizer=optimizer, conditioner=conditioner, pattern=patterns.columns()
    )
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    found: dict[str, list] = {k: [] for k in ("step", "held-out error", "test error", "inputs", "relevant")}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        F.mse_loss(model(data["train"][0]), data["train"][1]).backward()
        optimizer.step()
        sparsifier.step()
        decay.step()
        if step % max(steps // 60, 1) == 0 or step == steps:
            record(found, step, model, data)
    return found


@torch.no_grad()
def record(found: dict[str, list], step: int, model: nn.Sequential, data: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Append errors (mean squares) and counts of inputs with any weight."""
    left = model[0].weight.ne(0).any(0)
    found["step"].append(step)
    for split in ("held-out", "test"):
        found[f"{split} error"].append(float(F.mse_loss(model(data[split][0]), data[split][1])))
    found["inputs"].append(int(left.sum()))
    found["relevant"].append(int(left[data["relevant"][0]].sum()))


def row(
    method: str, rate: float, strength: float, seed: int, found: dict[str, list], *, is_chosen: bool
) -> dict[str, Any]:
    """One run as a row of the CSV."""
    return {
        "method": method,
        "seed": seed,
        "rate": rate,
        "strength": strength,
        "chosen": int(is_chosen),
        "held-out error": round(found["held-out error"][-1], 5),
        "inputs left": found["inputs"][-1],
        "relevant left": found["relevant"][-1],
        "test error": round(found["test error"][-1], 5),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the chosen runs of every method."""
    print(f"\nof {INPUTS} inputs {RELEVANT} are relevant; one number for each seed")
    print("| method | strength | inputs left | relevant ones | test error | mean |\n|---|---|---|---|---|---|")
    for name in METHODS:
        own = [r for r in rows if r["method"] == name and r["chosen"]]
        cells = [" ".join(str(r[k]) for r in own) for k in ("strength", "inputs left", "relevant left", "test error")]
        print(f"| {name} | {' | '.join(cells)} | {statistics.mean(r['test error'] for r in own):.4f} |")


def plot(rows: Sequence[dict[str, Any]], curves: dict[str, dict[str, list]], path: Path) -> None:
    """Plot inputs left and test error of all runs, and both over the steps of the chosen runs of seed 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    runs, inputs, errors = figure.subplots(1, 3)
    for k, name in enumerate(METHODS):
        for is_chosen, style in ((0, {"marker": ".", "alpha": 0.4}), (1, {"marker": "o", "label": name})):
            own = [r for r in rows if r["method"] == name and r["chosen"] == is_chosen]
            x, y = ([r[key] for r in own] for key in ("inputs left", "test error"))
            runs.plot(x, y, linestyle="", color=f"C{k}", **style)
        inputs.plot(curves[name]["step"], curves[name]["inputs"], color=f"C{k}")
        errors.plot(curves[name]["step"], curves[name]["test error"], color=f"C{k}")
    for axes in (runs, inputs):
        line = axes.axvline if axes is runs else axes.axhline
        line(RELEVANT, color="black", linestyle=":", label="relevant inputs" if axes is runs else None)
    runs.set(xlabel="inputs left", ylabel="test error", yscale="log", title="all runs, the chosen ones large")
    runs.legend(fontsize="small")
    inputs.set(xlabel="step", ylabel="inputs left", title="seed 0")
    errors.set(xlabel="step", ylabel="test error", yscale="log", title="seed 0")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
