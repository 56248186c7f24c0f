"""Many steps of training with masks: is memory flat, are threads and files as many, does a step take as much work?

    python examples/benchmarks/soak.py      # the table, and a CSV under examples/benchmarks/results/

RigL and a ScopeSparsifier in one process. Exits with an error unless after the first
twentieth resident memory stays within 2 %, and threads and open files stay as many.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait would count as CPU time; read by torch

import torch
from machine import RESULTS, resident, show, write_csv
from torch import nn

from sparsekit_ao import RigL, ScopeSparsifier

SIZE, ROWS, PARTS = 160, 8, 20  # PARTS rows of the table for each run
MOST = 1.02  # resident memory at any later row over that of the first one


def training(kind: str, steps: int) -> Callable[[], None]:
    """One step of training with masks: forward, backward, optimizer, masks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if kind == "RigL":
        sparsifier = RigL(0.8, optimizer, until=steps, update_every=10, scope_shape=(1, -1))
    else:
        sparsifier = ScopeSparsifier(0.5, scope_shape=(1, 4))
    sparsifier.prepare(model)
    x = torch.randn(ROWS, SIZE)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        sparsifier.step()

    return step


def soak(kind: str, steps: int) -> Iterator[dict]:
    """A row for each part of the steps: median CPU time of a step, and what the process holds at the end."""
    step = training(kind, steps)
    for part in range(PARTS):
        times = []
        for _ in range(steps // PARTS):
            start = time.process_time()
            step()
            times.append((time.process_time() - start) * 1e3)
        yield {
            "kind": kind,
            "step": (part + 1) * (steps // PARTS),
            "cpu ms": round(statistics.median(times), 3),
            "resident MiB": round(resident() / 2**20, 2),
            "os threads": len(list(Path("/proc/self/task").iterdir())),
            "python threads": threading.active_count(),
            "open files": len(list(Path("/proc/self/fd").iterdir())),
        }


def growth(rows: list[dict]) -> list[str]:
    """What has grown since the first row of a run."""
    first, found = rows[0], []
    for row in rows[1:]:
        if row["resident MiB"] > MOST * first["resident MiB"]:
            found.append(f"{row['resident MiB']} MiB are resident after {first['resident MiB']} MiB")
        found += [f"{row[k]} {k} after {first[k]}" for k in ("os threads", "open files") if row[k] != first[k]]
    return found


def main() -> int:
    """Print the table, write the CSV; the number of runs in which something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: few steps, without CSV")
    args = parser.parse_args()
    steps = 40 if args.tiny else 20_000
    torch.set_num_threads(2)
    lines, bad = [], 0
    for kind in ("RigL", "ScopeSparsifier"):
        rows = [show(row) for row in soak(kind, steps)]
        times = [statistics.median(r["cpu ms"] for r in half) for half in (rows[1:11], rows[10:])]
        found = growth(rows) if not args.tiny else []
        ratio = times[1] / times[0]
        print(f"{kind}: CPU time of later over earlier steps {ratio:.3f}; {found or 'no growth'}")
        bad, lines = bad + bool(found), lines + rows
    if not args.tiny:
        write_csv(lines, RESULTS / "soak.csv")
    return bad


if __name__ == "__main__":
    sys.exit(main())
