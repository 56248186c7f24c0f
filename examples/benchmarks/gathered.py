"""Layers of groups of rows that keep the same inputs (`export.to_gathered`), on a CPU, against the dense Linear.

    python examples/benchmarks/gathered.py         # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/gathered.py --tiny  # a smoke test: one small size, without CSV

Square layers with biases in float32, pruned by `patterns.row_groups`. Outputs are compared with the pruned layer's
before anything is timed. The layers of one width and number of tokens run interleaved in one process, in another order
each time, small ones several times in a run. A gain is the dense layer's time over the gathered layer's, of the fastest
runs and of the median ones.
"""

import argparse
import random
import statistics
import time

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, export, patterns

WIDTHS, TOKENS, ROWS, LEVELS = (1024, 2048, 4096), (1, 16, 512), (32, 128, 1024), (0.5, 0.75)
DENSE = ("dense", 0.0)


def gathered(width: int, rows: int, level: float, x: Tensor) -> nn.Module:
    """A pruned layer after its conversion; it must give the pruned layer's outputs."""
    model = nn.Sequential(nn.Linear(width, width))
    sparsifier = ScopeSparsifier(pattern=patterns.row_groups(rows, level))
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    expected = model(x)
    export.to_gathered(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    return model[0]


def times(layers: dict, x: Tensor, repeat: int) -> dict:
    """Milliseconds of a call in every run of each layer."""
    calls, order = max(1, 2**25 // (x.numel() * x.shape[-1])), random.Random(0)
    found: dict = {name: [] for name in layers}
    for _ in range(repeat + 2):
        for name in order.sample(list(layers), len(layers)):
            start = time.perf_counter()
            for _ in range(calls):
                layers[name](x)
            found[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: values[2:] for name, values in found.items()}  # the first runs touch new memory


@torch.no_grad()
def rows_of(width: int, tokens: int, rows: tuple[int, ...], repeat: int) -> list[dict]:
    """The rows of one width and number of tokens, printed."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width)
    layers: dict = {DENSE: nn.Linear(width, width)}
    layers |= {(n, level): gathered(width, n, level, x) for n in rows for level in LEVELS}
    found, lines = times(layers, x, repeat), []
    for (name, level), values in found.items():
        line = {"width": width, "tokens": tokens, "rows of a group": name, "sparsity": level}
        for key, value in (("fastest", min), ("median", statistics.median)):
            line |= {
                f"{key} ms": round(value(values), 4),
                f"gain, {key}": round(value(found[DENSE]) / value(values), 2),
            }
        lines.append(show(line))
    return lines


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=31, help="runs of each layer")
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without CSV")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    widths, tokens, rows = ((128,), (1, 4), (32, 128)) if args.tiny else (WIDTHS, TOKENS, ROWS)
    lines = []
    for width in widths:
        for n in tokens:
            lines += rows_of(width, n, rows, 1 if args.tiny else args.repeat)
    if not (args.no_csv or args.tiny):
        write_csv(lines, RESULTS / "gathered.csv")


if __name__ == "__main__":
    main()
