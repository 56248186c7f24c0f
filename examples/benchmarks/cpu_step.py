"""One mask update in the middle of training, on a 4096 x 4096 float32 Linear, CPU: this library, torch.ao and others.

    python examples/benchmarks/cpu_step.py                # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/cpu_step.py --size 1024 --repeat 3 --no-csv

Timed are later steps, from the state that training leaves: masks are not reset, and before each timed step the kept
weights change as by a few steps of SGD, outside of the timing. Masks are checked before: exact counts, and stock's mask
bit for bit where scores have no ties. Times are medians of alternated runs in one process; a copy is one clone of the
weight; extra peak memory is the high-water mark of a fresh process over two steps minus the memory of the prepared
model, the median of three. Every ratio is to a figure of the same run. Rows that miss one of `TARGETS` are listed last.
"""

import argparse
import contextlib
import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from contenders import contenders
from machine import RESULTS, high_water, medians, reset_high_water, resident, show, write_csv
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier as Stock

from sparsekit_ao import ScopeSparsifier, WeightNormSparsifier, patterns

# pattern: (config keys of ScopeSparsifier, arguments of both WeightNormSparsifiers, block, (n, m), level)
ROWS = {
    "2:4": (patterns.n_m(2, 4), {"sparsity_level": 1.0, "zeros_per_block": 2}, (1, 4), (2, 4), 0.5),
    "1x4 at 50 %": (patterns.blocks(1, 4, 0.5), {"sparsity_level": 0.5}, (1, 4), None, 0.5),
    "1x4 at 90 %": (patterns.blocks(1, 4, 0.9), {"sparsity_level": 0.9}, (1, 4), None, 0.9),
    "1x1 at 50 %": (patterns.unstructured(0.5), {"sparsity_level": 0.5}, (1, 1), None, 0.5),
    "1x1 at 90 %": (patterns.unstructured(0.9), {"sparsity_level": 0.9}, (1, 1), None, 0.9),
    "32x32 at 80 %": (patterns.blocks(32, 32, 0.8), {"sparsity_level": 0.8}, (32, 32), None, 0.8),
}
STOCK, SCOPE, NORM = KINDS = ("stock", "ScopeSparsifier", "WeightNormSparsifier")
FASTER, COPIES, PEAK = "times faster than stock", "times one copy", "extra peak / weight"
TARGETS = {SCOPE: {FASTER: 15, COPIES: 8, PEAK: 0.8}, NORM: {FASTER: 12, COPIES: 10, PEAK: 0.8}}
STEPS = 3  # of SGD before each step of a sparsifier


class Training:
    """A layer under one sparsifier: `train` changes its weights, `step` chooses its masks."""

    def __init__(self, kind: str, row: str, size: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(size, size, bias=False))
        keys, arguments, block, *_ = ROWS[row]
        entry = {"tensor_fqn": "0.weight", **(keys if kind == SCOPE else {})}
        self.sparsifier = {
            STOCK: lambda: Stock(**arguments, sparse_block_shape=block),
            SCOPE: ScopeSparsifier,
            NORM: lambda: WeightNormSparsifier(**arguments, sparse_block_shape=block),
        }[kind]()
        self.sparsifier.prepare(model, [entry])
        self.layer, self.step = model[0], self.sparsifier.step
        noise = torch.randn(size * size + 4096, generator=torch.Generator().manual_seed(1))
        self._gradients = noise.mul_(0.01 * self.weight.std())
        self._offsets = torch.Generator().manual_seed(2)

    @property
    def weight(self) -> Tensor:
        """The dense weight."""
        return self.layer.parametrizations.weight.original.detach()

    @property
    def mask(self) -> Tensor:
        """The mask, of any dtype."""
        return self.layer.parametrizations.weight[0].mask

    def train(self) -> None:
        """Add random gradients to the kept weights, a few rows at a time, so that memory stays as it is."""
        for _ in range(STEPS):
            offset = int(torch.randint(4096, (), generator=self._offsets))
            gradients = self._gradients[offset : offset + self.weight.numel()].view_as(self.weight)
            for rows in zip(self.weight.split(64), gradients.split(64), self.mask.split(64), strict=True):
                rows[0].addcmul_(rows[1], rows[2].to(rows[0].dtype))


def check_masks(row: str, size: int) -> None:
    """Refuse to time a wrong mask: three steps with training between them, of each kind."""
    made = {kind: Training(kind, row, size) for kind in KINDS}
    for _ in range(3):
        for training in made.values():
            training.step()
            training.train()
    differing = int(((made[STOCK].mask != 0) != (made[NORM].mask != 0)).sum())
    if differing:
        print(f"  {row}: {differing} elements differ from stock")
    if differing > 64:  # more than ties explain, for which stock's choice is arbitrary
        raise SystemExit(f"{row}: masks are wrong; nothing is timed")
    made[SCOPE].sparsifier.check()


def times(row: str, size: int, repeat: int) -> dict[str, float]:
    """Median milliseconds of a later step of each kind, of each contender, and of one clone of the weight."""
    made = {kind: Training(kind, row, size) for kind in KINDS}
    for training in made.values():
        training.step()
    _, _, block, n_m, level = ROWS[row]
    weight = made[SCOPE].weight
    calls: dict[str, Callable] = {kind: training.step for kind, training in made.items()}
    calls |= {"copy": weight.clone, **contenders(weight, block, n_m, level)}
    return medians(calls, repeat, before=lambda name: made[name].train() if name in made else None)


def peak(kind: str, row: str, size: int) -> float:
    """Extra peak memory of two steps over the weight's bytes: the median of three fresh processes."""
    command = [sys.executable, __file__, "--peak", kind, row, "--size", str(size)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)]
    return statistics.median(json.loads(run) for run in runs)


def print_peak(kind: str, row: str, size: int) -> None:
    """Run in the child process of `peak`: warm up the same code on a smaller model, then measure two steps."""
    Training(kind, row, min(size, 2048)).step()
    training = Training(kind, row, size)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but not yet returned, would hide as much of the steps' memory
    before = resident()
    reset_high_water()
    for _ in range(2):
        training.step()
        training.train()
    print(json.dumps((high_water() - before) / (training.weight.numel() * training.weight.element_size())))


def missed(line: dict) -> list[str]:
    """The targets that a row of the table misses."""
    targets = TARGETS.get(line["kind"], {})
    wrong = [
        k for k, limit in targets.items() if line[k] != "" and (line[k] < limit if k == FASTER else line[k] > limit)
    ]
    return [f"{key} {line[key]}, not {targets[key]}" for key in wrong]


def main() -> None:
    """Print the table and the targets that it misses, write the CSV."""
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
            line = {
                "pattern": row,
                "kind": kind,
                "size": args.size,
                "ms": round(ms[kind], 2),
                "stock ms": round(ms[STOCK], 2),
                FASTER: round(ms[STOCK] / ms[kind], 1),
                COPIES: round(ms[kind] / ms["copy"], 1),
                PEAK: round(peak(kind, row, args.size), 2) + 0.0 if kind in KINDS and not args.tiny else "",
            }
            lines.append(show(line))
    misses = [f"  {line['pattern']}, {line['kind']}: {'; '.join(found)}" for line in lines if (found := missed(line))]
    print(f"Targets: {TARGETS}", *(["missed by:", *misses] if misses else ["all are met"]), sep="\n")
    if not args.no_csv:
        write_csv(lines, RESULTS / "cpu_step.csv")


if __name__ == "__main__":
    main()
