"""`prepare` (and one `step`) on a model of many small Linear layers, against torch.ao's sparsifier.

    python examples/benchmarks/prepare.py      # the table, and a CSV under examples/benchmarks/results/

Each is timed on fresh models in one process, alternated; the median is shown.
"""

import argparse
import statistics
import time

import torch
from machine import RESULTS, show, write_csv
from torch import nn
from torch.ao.pruning import WeightNormSparsifier as Stock

from sparsekit_ao import ScopeSparsifier, WeightNormSparsifier

KINDS = {"stock": Stock, "ScopeSparsifier": ScopeSparsifier, "WeightNormSparsifier": WeightNormSparsifier}


def once(kind: str, layers: int) -> tuple[float, float]:
    """Milliseconds of prepare and of the first step, on a fresh model."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    config = [{"tensor_fqn": f"{i}.weight"} for i in range(layers)]
    sparsifier = KINDS[kind]()
    start = time.perf_counter()
    sparsifier.prepare(model, config)
    middle = time.perf_counter()
    sparsifier.step()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: few layers, once, without CSV")
    args = parser.parse_args()
    layers, repeat = (20, 1) if args.tiny else (2000, 5)
    torch.set_num_threads(2)
    found = {kind: [] for kind in KINDS}
    for _ in range(repeat):
        for kind, values in found.items():
            values.append(once(kind, layers))
    lines = []
    for kind, values in found.items():
        prepared, stepped = (round(statistics.median(column), 1) for column in zip(*values, strict=True))
        lines.append(show({"kind": kind, "layers": layers, "prepare ms": prepared, "step ms": stepped}))
    if not args.tiny:
        write_csv(lines, RESULTS / "prepare.csv")


if __name__ == "__main__":
    main()
