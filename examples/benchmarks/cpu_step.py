"""One mask update on a 4096 x 4096 float32 Linear, CPU: this library, torch.ao's sparsifier and others.

    python examples/benchmarks/cpu_step.py                # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/cpu_step.py --size 1024 --repeat 3 --no-csv

Masks are checked before anything is timed: exact counts, the same masks with and without numba, and stock's mask bit
for bit where scores have no ties. Times are medians of alternated runs in one process; extra peak memory is the
high-water mark of a fresh process minus the memory of the prepared model. Every ratio is to a figure of the same run.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

import torch
from contenders import contenders
from machine import RESULTS, high_water, medians, plain_install, reset_high_water, resident, show, write_csv
from torch import nn
from torch.ao.pruning import WeightNormSparsifier as Stock

from sparsekit_ao import ScopeSparsifier, WeightNormSparsifier, patterns

# pattern: (ours, stock's arguments, block, (n, m), level)
ROWS = {
    "2:4": (patterns.n_m(2, 4), {"sparsity_level": 1.0, "zeros_per_block": 2}, (1, 4), (2, 4), 0.5),
    "1x4 at 50 %": (patterns.blocks(1, 4, 0.5), {"sparsity_level": 0.5}, (1, 4), None, 0.5),
    "1x4 at 90 %": (patterns.blocks(1, 4, 0.9), {"sparsity_level": 0.9}, (1, 4), None, 0.9),
    "1x1 at 50 %": (patterns.unstructured(0.5), {"sparsity_level": 0.5}, (1, 1), None, 0.5),
    "1x1 at 90 %": (patterns.unstructured(0.9), {"sparsity_level": 0.9}, (1, 1), None, 0.9),
    "32x32 at 80 %": (patterns.blocks(32, 32, 0.8), {"sparsity_level": 0.8}, (32, 32), None, 0.8),
}
STOCK, NUMBA, PLAIN, NORM, NORM_PLAIN = KINDS = ("stock", "ours", "ours, plain", "WeightNorm", "WeightNorm, plain")


def prepare(kind: str, row: str, size: int):
    """The layer and the sparsifier of one kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    ours, stock, block, *_ = ROWS[row]
    if kind in (NUMBA, PLAIN):
        sparsifier, entry = ScopeSparsifier(), {"tensor_fqn": "0.weight", **ours}
    else:
        sparsifier = (Stock if kind == STOCK else WeightNormSparsifier)(**stock, sparse_block_shape=block)
        entry = {"tensor_fqn": "0.weight"}
    sparsifier.prepare(model, [entry])
    return model[0], sparsifier


def stepper(kind: str, row: str, size: int) -> tuple[Callable[[], None], Callable[[], None], nn.Module]:
    """(step, reset, layer); after `reset`, which sets all masks, the next step is one-shot pruning again."""
    layer, sparsifier = prepare(kind, row, size)

    def step() -> None:
        with plain_install("plain" in kind):
            sparsifier.step()

    def reset() -> None:
        layer.parametrizations.weight[0].mask.fill_(1)

    return step, reset, layer


def check_masks(row: str, size: int) -> None:
    """Refuse to time a wrong mask."""
    masks = {}
    for kind in KINDS:
        step, _, layer = stepper(kind, row, size)
        step()
        masks[kind] = layer.parametrizations.weight[0].mask != 0
    if not (torch.equal(masks[NUMBA], masks[PLAIN]) and torch.equal(masks[NORM], masks[NORM_PLAIN])):
        raise SystemExit(f"{row}: masks with and without numba differ; nothing is timed")
    differing = int((masks[STOCK] != masks[NORM]).sum())
    if differing:
        print(f"  {row}: {differing} elements differ from stock")
    if differing > 64:  # more than ties explain, for which stock's choice is arbitrary
        raise SystemExit(f"{row}: masks are wrong; nothing is timed")
    _, sparsifier = prepare(NUMBA, row, size)
    sparsifier.step()
    sparsifier.check()


def times(row: str, size: int, repeat: int) -> dict[str, float]:
    """Median milliseconds of each kind, each contender, and one copy of the weight."""
    made = {kind: stepper(kind, row, size) for kind in KINDS}
    weight = made[NUMBA][2].parametrizations.weight.original.detach()
    target = torch.empty_like(weight)
    _, _, block, n_m, level = ROWS[row]
    calls: dict[str, Callable] = {kind: step for kind, (step, _, _) in made.items()}
    calls["copy"] = lambda: target.copy_(weight)
    calls |= contenders(weight, block, n_m, level)
    return medians(calls, repeat, before=lambda name: made[name][1]() if name in made else None)


def peak(kind: str, row: str, size: int) -> float:
    """Extra peak memory of a step over the weight's bytes, in a fresh process."""
    command = [sys.executable, __file__, "--peak", kind, row, "--size", str(size)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def print_peak(kind: str, row: str, size: int) -> None:
    """Run in the child process of `peak`: warm up the same code on a smaller model, then measure one step."""
    stepper(kind, row, min(size, 2048))[0]()
    step, _, layer = stepper(kind, row, size)
    before = resident()
    reset_high_water()
    step()
    weight = layer.parametrizations.weight.original
    print(json.dumps((high_water() - before) / (weight.numel() * weight.element_size())))


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without memory and CSV")
    parser.add_argument("--peak", nargs=2, metavar=("KIND", "ROW"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.peak:
        print_peak(*args.peak, args.size)
        return
    if args.tiny:
        args.size, args.repeat, args.no_csv = 256, 1, True
    lines = []
    for row in ROWS:
        check_masks(row, args.size)
        ms = times(row, args.size, args.repeat)
        for kind in [k for k in ms if k != "copy"]:
            measured = kind in KINDS and not args.tiny
            line = {
                "pattern": row,
                "kind": kind,
                "size": args.size,
                "ms": round(ms[kind], 2),
                "times faster than stock": round(ms[STOCK] / ms[kind], 1),
                "times one copy": round(ms[kind] / ms["copy"], 1),
                "extra peak / weight": round(peak(kind, row, args.size), 2) if measured else "",
            }
            lines.append(show(line))
    if not args.no_csv:
        write_csv(lines, RESULTS / "cpu_step.csv")


if __name__ == "__main__":
    main()
