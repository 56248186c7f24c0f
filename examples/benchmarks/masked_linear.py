"""A masked Linear on a CPU, in training and in evaluation: against torch.ao's FakeSparsity and the dense layer.

    python examples/benchmarks/masked_linear.py              # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/masked_linear.py --no-compile # eager only (compiling needs a C++ compiler)

Every layer has the same mask; outputs and gradients are compared before anything is timed. Masks do not change
between the runs: an update of them is what `cpu_step.py` times. Runs of all layers alternate in one process, in
another order each time, since what ran before decides which memory is there. Small layers are called several times
in a run, as a model calls its layers. Medians; the ratio to stock is the median of the ratios of neighbouring runs.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn
from torch.ao.pruning import FakeSparsity
from torch.nn.utils import parametrize

from sparsekit_ao import WeightMask

KINDS = (
    "dense",  # no mask
    "stock",  # torch.ao's FakeSparsity: a product with a float mask, which keeps NaN
    "float mask",  # WeightNormSparsifier's, with exact zeros
    "bool mask",  # ScopeSparsifier's, with exact zeros
)
SIZES, BATCHES = (512, 1024, 2048, 4096), (1, 8, 64, 256)


def build(kind: str, size: int) -> nn.Module:
    """A Linear under one kind of mask; the same weight and the same mask for all."""
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    keep = torch.rand(size, size) > 0.5
    if kind == "stock":
        parametrize.register_parametrization(layer, "weight", FakeSparsity(keep.float()))
    elif kind != "dense":
        mask = keep.float() if kind == "float mask" else keep
        parametrize.register_parametrization(layer, "weight", WeightMask(mask), unsafe=True)
    return layer


def train(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """One forward and backward."""
    layer(x).sum().backward()


@torch.no_grad()
def evaluate(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """One forward without gradients."""
    layer(x)


PASSES = {"training": train, "evaluation": evaluate}


def check_layers(layers: dict[str, nn.Module], x: Tensor) -> None:
    """Refuse to time layers whose outputs or gradients differ."""
    outputs, gradients = {}, {}
    for kind, layer in layers.items():
        if kind == "dense":
            continue
        train(layer, x)
        outputs[kind] = layer(x).detach()
        gradients[kind] = next(layer.parameters()).grad
    for found in (outputs, gradients):
        if not all(torch.equal(t, found["stock"]) for t in found.values()):
            raise SystemExit("the layers differ; nothing is timed")


def times(
    layers: dict[str, Callable[[Tensor], Tensor]], models: dict[str, nn.Module], x: Tensor, repeat: int, what: str
) -> dict[str, list[float]]:
    """Milliseconds of a call in every run of every kind, in random order."""
    found: dict[str, list[float]] = {kind: [] for kind in layers}
    calls, order = min(8, max(1, 4096 // x.shape[1])), random.Random(0)
    for _ in range(repeat + 3):
        for kind in order.sample(list(layers), len(layers)):
            start = time.perf_counter()
            for _ in range(calls):
                models[kind].zero_grad()
                PASSES[what](layers[kind], x)
            found[kind].append((time.perf_counter() - start) * 1e3 / calls)
    return {kind: values[3:] for kind, values in found.items()}  # the first ones compile and touch new memory


def rows(mode: str, what: str, size: int, batch: int, repeat: int) -> list[dict]:
    """The rows of one size and batch, printed."""
    x, lines = torch.randn(batch, size), []
    models = {kind: build(kind, size) for kind in KINDS}
    check_layers(models, x)
    if mode == "compiled":
        del models["stock"]  # Dynamo skips modules of torch.ao, so stock's layer cannot be compiled
    layers = {kind: torch.compile(m) if mode == "compiled" else m for kind, m in models.items()}
    found = times(layers, models, x, repeat, what)
    base = "stock" if mode == "eager" else "dense"
    for kind, values in found.items():
        ratio = statistics.median(a / b for a, b in zip(values, found[base], strict=True))
        line = {"mode": mode, "pass": what, "layer": kind, "size": size, "batch": batch}
        lines.append(
            show({**line, "ms": round(statistics.median(values), 3), "relative to": base, "ratio": round(ratio, 2)})
        )
    return lines


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, eager, without CSV")
    args = parser.parse_args()
    torch.set_num_threads(2)
    sizes, batches = ((64,), (8,)) if args.tiny else (SIZES, BATCHES)
    lines = []
    for what, size, batch in itertools.product(PASSES, sizes, batches):
        lines += rows("eager", what, size, batch, 1 if args.tiny else 41)
    if not (args.tiny or args.no_compile):
        lines += rows("compiled", "training", 4096, 64, 21)
    if not (args.no_csv or args.tiny):
        write_csv(lines, RESULTS / "masked_linear.csv")


if __name__ == "__main__":
    main()
