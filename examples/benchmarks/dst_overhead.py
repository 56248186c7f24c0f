"""What dynamic sparse training adds to a training step: outside update windows, inside them, and in an update.

    python examples/benchmarks/dst_overhead.py           # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/dst_overhead.py --no-csv

Against torch.ao's `FakeSparsity` with the same masks and no sparsifier step at all. A step is forward, backward,
`optimizer.step()` and, for ours, `sparsifier.step()`. Medians of alternated runs in one process, one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from machine import RESULTS, write_csv
from torch import Tensor, nn
from torch.ao.pruning import FakeSparsity
from torch.nn.utils import parametrize

from sparsekit_ao import RigL

MODELS = {"MLP 4 x 1024, batch 128": (1024, 4, 128), "MLP 4 x 256, batch 32": (256, 4, 32)}


def network(width: int, depth: int) -> nn.Sequential:
    """Linear layers of one width with ReLU between, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())))


def prepare(kind: str, width: int, depth: int, batch: int) -> Callable[[], None]:
    """One training step: "stock", "closed" (masked gradients), "open" (dense gradients, for an update) or "update"."""
    model = network(width, depth)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    sparsifier = RigL(0.9, optimizer=optimizer, until=10**9, update_every=1 if kind == "update" else 10**9)
    sparsifier.prepare(model, None)
    if kind == "stock":
        masks = [sparsifier.mask(g["tensor_fqn"]).float() for g in sparsifier.groups]
        sparsifier.squash_mask()
        for layer, mask in zip(model[::2], masks, strict=True):
            parametrize.register_parametrization(layer, "weight", FakeSparsity(mask))
    x = torch.randn(batch, width)

    def step() -> None:
        if kind == "open":
            sparsifier.iteration = 10**9 - 1  # the next iteration's gradients are used by an update
            sparsifier._capture.clear()  # as step() does; step() itself would update the masks
            sparsifier._capture.set_open(**sparsifier.settings.opening(10**9, is_pending=False))
        train(model, optimizer, x)
        if kind in ("closed", "update"):
            sparsifier.step()

    return step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def measure(size: tuple[int, int, int], repeat: int) -> dict[str, float]:
    """Median milliseconds of every kind of step, alternated."""
    steps = {kind: prepare(kind, *size) for kind in ("stock", "closed", "open", "update")}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for at in range(repeat + 2):
        for kind, step in steps.items():
            start = time.perf_counter()
            step()
            if at >= 2:
                times[kind].append((time.perf_counter() - start) * 1e3)
    return {kind: statistics.median(found) for kind, found in times.items()}


def main() -> None:
    """Print one line for each model and kind; write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without CSV")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {"MLP 2 x 32, batch 4": (32, 2, 4)} if args.tiny else MODELS
    rows = []
    for name, size in models.items():
        found = measure(size, 1 if args.tiny else args.repeat)
        for kind, ms in found.items():
            rows.append({"model": name, "step": kind, "ms": round(ms, 3), "times stock": round(ms / found["stock"], 3)})
            print("  ".join(f"{k}: {v}" for k, v in rows[-1].items()))
    if not (args.tiny or args.no_csv):
        write_csv(rows, RESULTS / "dst_overhead.csv")


if __name__ == "__main__":
    main()
