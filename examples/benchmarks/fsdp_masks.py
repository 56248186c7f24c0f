"""What masks cost an FSDP2 training step, and where they had better live: a buffer beside the shard, or a parameter.

    python examples/benchmarks/fsdp_masks.py      # the table, and a CSV under examples/benchmarks/results/

Four 2048 x 2048 layers over two gloo ranks on this machine, one thread each; forward and backward, median, alternated.
"buffer" is what the library does: each rank keeps its part of the mask, and forward gathers it. "parameter" makes each
mask a frozen bool Parameter, which FSDP2 then shards and gathers with its weight, in forward and in backward. "dense"
has no masks.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time

import torch
from machine import RESULTS, show, write_csv
from torch import distributed, nn

from sparsekit_ao import ScopeSparsifier, WeightMask

KINDS = ("dense", "buffer", "parameter")


def model_of(kind: str, size: int) -> nn.Module:
    """Four layers, sharded, half of each layer's weights dropped."""
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


def on_rank(rank: int, world: int, folder: str, size: int, rows: list[int], repeat: int) -> None:
    """Time all kinds; the first rank tells."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
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
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    distributed.barrier()  # nobody leaves while another still reads
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small layers, once, without CSV: does it run")
    args = parser.parse_args()
    size, rows, repeat = (32, [2], 1) if args.tiny else (2048, [16, 512], 9)
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=on_rank, args=(k, 2, folder, size, rows, repeat)) for k in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("a rank failed")
        found = torch.load(f"{folder}/found.pt")
    lines = [
        show({"masks": kind, "rows": n, "ms": round(statistics.median(times), 1)}) for (n, kind), times in found.items()
    ]
    if not args.tiny:
        write_csv(lines, RESULTS / "fsdp_masks.csv")


if __name__ == "__main__":
    main()
