"""Forward and backward of a masked Linear(4096), batch 64, CPU: against torch.ao's FakeSparsity and the dense layer.

    python examples/benchmarks/masked_linear.py              # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/masked_linear.py --no-compile # eager only (compiling needs a C++ compiler)

Every layer has the same mask; outputs and gradients are compared before anything is timed. Medians of alternated
runs in one process; the ratio to stock is the median of the ratios of neighbouring runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import write_csv
from torch import Tensor, nn
from torch.ao.pruning import FakeSparsity
from torch.nn.utils import parametrize

from sparsekit_ao import WeightMask

KINDS = {
    "dense": "no mask",
    "stock": "torch.ao FakeSparsity: product with a float mask, keeps NaN",
    "float mask": "WeightNormSparsifier's: exact zeros",
    "bool mask": "ScopeSparsifier's: exact zeros",
}


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


def times(layers: dict[str, Callable[[Tensor], Tensor]], models: dict[str, nn.Module], x: Tensor, repeat: int):
    """Milliseconds of every run of every kind, alternated."""
    found: dict[str, list[float]] = {kind: [] for kind in layers}
    for _ in range(repeat):
        for kind, layer in layers.items():
            for parameter in models[kind].parameters():
                parameter.grad = None
            start = time.perf_counter()
            train(layer, x)
            found[kind].append((time.perf_counter() - start) * 1e3)
    return {kind: values[1:] or values for kind, values in found.items()}  # the first one compiles


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, eager, without CSV")
    args = parser.parse_args()
    size, repeat = (64, 1) if args.tiny else (4096, 21)
    torch.set_num_threads(2)
    x = torch.randn(64, size)
    lines = []
    for mode in ["eager"] if args.tiny or args.no_compile else ["eager", "compiled"]:
        models = {kind: build(kind, size) for kind in KINDS}
        check_layers(models, x)
        if mode == "compiled":
            del models["stock"]  # Dynamo skips modules of torch.ao, so stock's layer cannot be compiled
        layers = {kind: torch.compile(m) if mode == "compiled" else m for kind, m in models.items()}
        found = times(layers, models, x, repeat)
        base = "stock" if mode == "eager" else "dense"
        for kind, values in found.items():
            ratio = statistics.median(a / b for a, b in zip(values, found[base], strict=True))
            line = {"mode": mode, "layer": kind, "size": size, "ms": round(statistics.median(values), 1)}
            lines.append({**line, "relative to": base, "ratio": round(ratio, 2)})
            print("  ".join(f"{k}: {v}" for k, v in lines[-1].items()), f" ({KINDS[kind]})", flush=True)
    if not (args.no_csv or args.tiny):
        write_csv(lines, Path(__file__).parent / "results" / "masked_linear.csv")


if __name__ == "__main__":
    main()
