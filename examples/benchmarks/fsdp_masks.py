"""What masks cost an FSDP2 training step: as a buffer that the library shards, or as a parameter that FSDP2 shards.

    python examples/benchmarks/fsdp_masks.py      # the table, and a CSV under examples/benchmarks/results/

Four 2048 x 2048 layers over two gloo ranks on this machine, one thread each; forward and backward, median, alternated.
"buffer" is what the library does: each rank keeps its part of the mask, and forward gathers it. "parameter" makes each
mask a frozen bool Parameter, which FSDP2 then shards and gathers with its weight, in forward and in backward. "dense"
has no masks.
"""

import argparse
import statistics
import time

import torch
from machine import RESULTS, show, write_csv
from ranks import on_ranks
from torch import distributed, nn

from sparsekit_ao import ScopeSparsifier, WeightMask

KINDS = ("dense", "buffer", "parameter")


def model_of(kind: str, size: int) -> nn.Module:
    """Four sharded layers with half of the weights of each dropped."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))
    sparsifier = ScopeSparsifier(0.5)
    if kind != "dense":
        sparsifier.prepare(model, None)
    for module in [m for m in model.modules() if isinstance(m, WeightMask) and kind == "parameter"]:
        mask = module._buffers.pop("mask")
        module.register_parameter("mask", nn.Parameter(mask, requires_grad=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if kind != "dense":
        sparsifier.step()
    return model


def measure(size: int, rows: list[int], repeat: int) -> dict:
    """Time all kinds."""
    models = {kind: model_of(kind, size) for kind in KINDS}
    found: dict[tuple[int, str], list[float]] = {(n, kind): [] for n in rows for kind in KINDS}
    for _ in range(repeat):
        for (n, kind), times in found.items():
            x = torch.ones(n, size)
            distributed.barrier()
            start = time.perf_counter()
            models[kind](x).square().mean().backward()
            distributed.barrier()
            times.append((time.perf_counter() - start) * 1e3)
            models[kind].zero_grad()
    return found


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: small layers, once, without CSV")
    args = parser.parse_args()
    size, rows, repeat = (32, [2], 1) if args.tiny else (2048, [16, 512], 9)
    found = on_ranks(2, measure, size, rows, repeat)
    lines = [
        show({"masks": kind, "rows": n, "ms": round(statistics.median(times), 1)}) for (n, kind), times in found.items()
    ]
    if not args.tiny:
        write_csv(lines, RESULTS / "fsdp_masks.csv")


if __name__ == "__main__":
    main()
