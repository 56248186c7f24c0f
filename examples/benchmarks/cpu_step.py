"""One mask update on a 4096 x 4096 float32 Linear, CPU: this library against torch.ao's WeightNormSparsifier.

    python examples/benchmarks/cpu_step.py                # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/cpu_step.py --size 1024 --repeat 3 --no-csv

Masks are checked before anything is timed: exact counts, and stock's mask bit for bit where scores are tie-free.
Times are medians of alternated runs in one process; extra peak memory is the high-water mark of a fresh process above
what the prepared model holds. Every ratio is to a figure of the same run.
"""

import argparse
import csv
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.ao.pruning import WeightNormSparsifier as Stock

import sparsekit_ao
from sparsekit_ao import ScopeSparsifier, WeightNormSparsifier, patterns

# name: (ours, stock's arguments)
ROWS = {
    "2:4": (patterns.n_m(2, 4), {"sparsity_level": 1.0, "sparse_block_shape": (1, 4), "zeros_per_block": 2}),
    "1x4 at 50 %": (patterns.blocks(1, 4, 0.5), {"sparsity_level": 0.5, "sparse_block_shape": (1, 4)}),
    "1x4 at 90 %": (patterns.blocks(1, 4, 0.9), {"sparsity_level": 0.9, "sparse_block_shape": (1, 4)}),
    "1x1 at 50 %": (patterns.unstructured(0.5), {"sparsity_level": 0.5, "sparse_block_shape": (1, 1)}),
    "1x1 at 90 %": (patterns.unstructured(0.9), {"sparsity_level": 0.9, "sparse_block_shape": (1, 1)}),
    "32x32 at 80 %": (patterns.blocks(32, 32, 0.8), {"sparsity_level": 0.8, "sparse_block_shape": (32, 32)}),
}
KINDS = ("stock", "ours", "ours, WeightNorm")


def prepare(kind: str, row: str, size: int):
    """A prepared sparsifier of one kind; a fresh step starts from a mask that keeps all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    ours, stock = ROWS[row]
    if kind == "ours":
        sparsifier, entry = ScopeSparsifier(), {"tensor_fqn": "0.weight", **ours}
    else:
        sparsifier = (Stock if kind == "stock" else WeightNormSparsifier)(**stock)
        entry = {"tensor_fqn": "0.weight"}
    sparsifier.prepare(model, [entry])
    return model[0], sparsifier


def stepper(kind: str, row: str, size: int) -> tuple[Callable[[], None], nn.Module]:
    """A step on a weight that no earlier step has masked, as in one-shot pruning."""
    layer, sparsifier = prepare(kind, row, size)

    def step() -> None:
        sparsifier.step()

    def reset() -> None:
        layer.parametrizations.weight[0].mask.fill_(1)

    step.reset = reset  # type: ignore[attr-defined]
    return step, layer


def gate(row: str, size: int) -> None:
    """Refuse to time a wrong mask."""
    masks = {}
    for kind in KINDS:
        step, layer = stepper(kind, row, size)
        step()
        masks[kind] = layer.parametrizations.weight[0].mask != 0
    if not torch.equal(masks["stock"], masks["ours, WeightNorm"]):
        differing = int((masks["stock"] != masks["ours, WeightNorm"]).sum())
        tied = differing <= 64  # equal scores: stock's choice among them is arbitrary
        print(f"  {row}: {differing} elements differ from stock" + (" (tied scores)" if tied else ""))
        if not tied:
            raise SystemExit(f"{row}: masks are wrong; nothing is timed")
    _, sparsifier = prepare("ours", row, size)
    sparsifier.step()
    sparsifier.check()


def times(row: str, size: int, repeat: int) -> dict[str, float]:
    """Median milliseconds of each kind and of one copy of the weight, alternated."""
    steps = {kind: stepper(kind, row, size)[0] for kind in KINDS}
    weight = torch.randn(size, size)
    target = torch.empty_like(weight)
    steps["copy"] = lambda: target.copy_(weight)
    found: dict[str, list[float]] = {k: [] for k in steps}
    for _ in range(repeat):
        for kind, step in steps.items():
            getattr(step, "reset", lambda: None)()
            start = time.perf_counter()
            step()
            found[kind].append((time.perf_counter() - start) * 1e3)
    return {kind: statistics.median(v) for kind, v in found.items()}


def peak(kind: str, row: str, size: int) -> float:
    """Extra peak memory of a step over the weight's bytes, in a fresh process."""
    command = [sys.executable, __file__, "--peak", kind, row, "--size", str(size)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def print_peak(kind: str, row: str, size: int) -> None:
    """The child process of `peak`: warm up on a small model, then measure one step."""
    stepper(kind, row, 256)[0]()
    step, layer = stepper(kind, row, size)
    before = resident()
    reset_high_water()
    step()
    weight = layer.parametrizations.weight.original
    print(json.dumps((high_water() - before) / (weight.numel() * weight.element_size())))


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_high_water() -> None:
    """Let the kernel's high-water mark start again from here (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def high_water() -> int:
    """The largest resident size since the last reset, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small size, once, without memory and CSV: does it run")
    parser.add_argument("--peak", nargs=2, metavar=("KIND", "ROW"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.peak:
        print_peak(*args.peak, args.size)
        return
    if args.tiny:
        args.size, args.repeat, args.no_csv = 128, 1, True
    lines = []
    for row in ROWS:
        gate(row, args.size)
        ms = times(row, args.size, args.repeat)
        for kind in KINDS:
            lines.append(
                {
                    "pattern": row,
                    "kind": kind,
                    "size": args.size,
                    "ms": round(ms[kind], 2),
                    "times faster than stock": round(ms["stock"] / ms[kind], 1),
                    "times one copy": round(ms[kind] / ms["copy"], 1),
                    "extra peak / weight": "" if args.tiny else round(peak(kind, row, args.size), 2),
                }
            )
            print("  ".join(f"{k}: {v}" for k, v in lines[-1].items()), flush=True)
    if not args.no_csv:
        write_csv(lines)


def write_csv(lines: list[dict]) -> None:
    """The table with machine and versions."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    about = {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sparsekit_ao": sparsekit_ao.__version__,
    }
    path = Path(__file__).parent / "results" / "cpu_step.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, **about} for line in lines)
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name}")


if __name__ == "__main__":
    main()
