"""Methods of dynamic sparse training compared on scikit-learn's digits at equal nonzeros: static < SET < RigL < SNFS.

    python examples/rigl_digits.py                 # seeds 0 to 9, levels 0.90 and 0.95: a few minutes on one core
    python examples/rigl_digits.py --tiny          # every method, in seconds

The model is an MLP 64-64-32-10, small enough that 95 % sparsity reduces its accuracy: random masks disconnect most of
its inputs, so accuracy depends on which connections are kept. On a much wider MLP at 90 % all methods are equal, and
with many noise inputs growth by gradients is no better than random growth. Writes one row for each run (CSV) and a plot
of accuracy and of the change of masks.
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
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from sparsekit_ao import GMP, SET, SNFS, DynamicSparsifier, RigL, Static, schedules

SIZES = (64, 64, 32, 10)
BATCH, EPOCHS, UPDATE_EVERY, FRACTION = 64, 60, 40, 0.3
LEVELS = (0.90, 0.95)
Make = Callable[[torch.optim.Optimizer, float, int], DynamicSparsifier]

METHODS: dict[str, Make] = {
    "static": lambda o, level, until: Static(level, optimizer=o),
    "SET": lambda o, level, until: SET(level, optimizer=o, init="erk", until=until, **replaces(until)),
    "RigL": lambda o, level, until: RigL(level, optimizer=o, until=until, **replaces(until)),
    "SNFS": lambda o, level, until: SNFS(level, optimizer=o, until=until, **replaces(until)),
    "GMP": lambda o, level, until: GMP(level, optimizer=o, until=until, update_every=UPDATE_EVERY, prune="global"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train every method at every level from every seed; print the table, write the rows and the plot."""
    args = parse(argv)
    torch.set_num_threads(1)
    start, rows, curves = time.perf_counter(), [], {}
    for seed in range(args.seeds):
        data = split_digits(seed)
        rows.append(row("dense", 0.0, seed, train(None, 0.0, seed, data, args.epochs)))
        for level in LEVELS:
            for name, make in METHODS.items():
                found = train(make, level, seed, data, args.epochs)
                rows.append(row(name, level, seed, found))
                if seed == 0 and level == LEVELS[-1]:
                    curves[name] = found
        print(f"seed {seed} done after {time.perf_counter() - start:.0f} s", flush=True)
    print_table(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    write_rows(rows, args.out / "rigl_digits.csv", machine)
    plot(rows, curves, args.out / "rigl_digits.png")
    print(f"rows and plot: {args.out}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to this minus 1 (default: 10)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"(default: {EPOCHS})")
    parser.add_argument("--out", type=Path, default=Path("out/rigl_digits"), help="folder (default: out/rigl_digits)")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: one seed, eight epochs")
    args = parser.parse_args(argv)
    if args.tiny:
        args.seeds, args.epochs = 1, 8
    if args.seeds < 1 or args.epochs < 1:
        parser.error("--seeds and --epochs must be at least 1")
    return args


def replaces(until: int) -> dict[str, Any]:
    """When SET, RigL and SNFS update and how much they replace, the same for all three."""
    return {"update_every": UPDATE_EVERY, "update_fraction": schedules.cosine(FRACTION, 0.0, until)}


def split_digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,257 images to train on and 540 to test, drawn by seed; centred by the mean of the former."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    fit, held = order[:1257], order[1257:]
    images = images - images[fit].mean(0)
    return images[fit], labels[fit], images[held], labels[held]


def train(make: Make | None, level: float, seed: int, data: tuple[Tensor, ...], epochs: int) -> dict[str, list[float]]:
    """One run; after every epoch: held-out accuracy, nonzeros, and the share of the first mask that is still kept."""
    images, labels, held, held_labels = data
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(SIZES) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = epochs * -(-len(labels) // BATCH)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sparsifier = None if make is None else make(optimizer, level, int(0.75 * steps))
    if sparsifier is not None:
        sparsifier.prepare(model, None)
    scale_to_fan_in(model)
    first, found = masks_of(model), {"accuracy": [], "nonzeros": [], "first mask left": []}
    for _ in range(epochs):
        for at in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[at]), labels[at]).backward()
            optimizer.step()
            decay.step()
            if sparsifier is not None:
                sparsifier.step()
        with torch.no_grad():
            found["accuracy"].append((model(held).argmax(1) == held_labels).float().mean().item() * 100)
        now = masks_of(model)
        found["nonzeros"].append(int(now.sum()))
        found["first mask left"].append(float((now & first).sum() / first.sum()))
    return found


def scale_to_fan_in(model: nn.Sequential) -> None:
    """Draw normal weights with the variance for ReLU (2 / number of kept inputs) for each neuron, for every method."""
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                kept = layer.weight != 0
                size = (2 / kept.sum(1, keepdim=True).clamp(min=1)).sqrt()
                dense = layer.parametrizations.weight.original if hasattr(layer, "parametrizations") else layer.weight
                dense.copy_(torch.where(kept, torch.randn(kept.shape) * size, 0.0))
                layer.bias.zero_()


def masks_of(model: nn.Sequential) -> Tensor:
    """The masks of all weights as one flat tensor; all True for a dense model."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    masks = [
        m.parametrizations.weight[0].mask if hasattr(m, "parametrizations") else torch.ones_like(m.weight)
        for m in layers
    ]
    return torch.cat([m.flatten() for m in masks]) != 0


def row(method: str, level: float, seed: int, found: dict[str, list[float]]) -> dict[str, Any]:
    """One run as a row of the CSV."""
    return {
        "method": method,
        "level": level,
        "seed": seed,
        "accuracy": round(found["accuracy"][-1], 3),
        "nonzeros": int(found["nonzeros"][-1]),
        "first mask left": round(found["first mask left"][-1], 4),
    }


def accuracies(rows: Sequence[dict[str, Any]], method: str, level: float) -> list[float]:
    """The accuracies of one method at one level."""
    return [r["accuracy"] for r in rows if r["method"] == method and r["level"] == level]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print mean and standard error of accuracy, and the differences SET - static and RigL - SET."""
    dense = accuracies(rows, "dense", 0.0)
    print(f"\naccuracy (%), mean and standard error of {len(dense)} seeds; dense {statistics.mean(dense):.2f}")
    print("| sparsity | nonzeros | " + " | ".join(METHODS) + " |")
    for level in LEVELS:
        nonzeros = {r["nonzeros"] for r in rows if r["level"] == level}
        cells = [accuracies(rows, name, level) for name in METHODS]
        errors = [statistics.stdev(c) / len(c) ** 0.5 if len(c) > 1 else 0.0 for c in cells]
        texts = [f"{statistics.mean(c):.2f} +- {e:.2f}" for c, e in zip(cells, errors, strict=True)]
        print(f"| {level:.2f} | {'/'.join(map(str, sorted(nonzeros)))} | " + " | ".join(texts) + " |")
    static, random, gradient = (
        statistics.mean(accuracies(rows, name, LEVELS[-1])) for name in ("static", "SET", "RigL")
    )
    print(f"at {LEVELS[-1]:.2f}: SET - static = {random - static:.2f}, RigL - SET = {gradient - random:.2f} points")


def plot(rows: Sequence[dict[str, Any]], curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Plot the accuracy of all runs, and for seed 0 accuracy and the kept share of the first mask over epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    runs, accuracy, changes = figure.subplots(1, 3)
    for at, level in enumerate(LEVELS):
        for k, name in enumerate(METHODS):
            points = accuracies(rows, name, level)
            runs.plot(
                [at + 0.15 * (k - 2)] * len(points),
                points,
                "o",
                alpha=0.5,
                color=f"C{k}",
                label=name if not at else None,
            )
    runs.axhline(statistics.mean(accuracies(rows, "dense", 0.0)), color="black", linestyle=":", label="dense")
    runs.set(
        xticks=range(len(LEVELS)),
        xticklabels=[f"{level:.0%}" for level in LEVELS],
        ylabel="accuracy (%)",
        xlabel="sparsity",
    )
    runs.legend(fontsize="small")
    for k, (name, found) in enumerate(curves.items()):
        epochs = range(1, len(found["accuracy"]) + 1)
        accuracy.plot(epochs, found["accuracy"], color=f"C{k}", label=name)
        changes.plot(epochs, found["first mask left"], color=f"C{k}", label=name)
    accuracy.set(xlabel="epoch", ylabel="accuracy (%)", title=f"seed 0 at {LEVELS[-1]:.0%}")
    changes.set(
        xlabel="epoch", ylabel="share of the first mask kept", ylim=(0, 1.05), title=f"seed 0 at {LEVELS[-1]:.0%}"
    )
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
