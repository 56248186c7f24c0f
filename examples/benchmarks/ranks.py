"""Helper of benchmarks over ranks: run a function in several processes that are connected by gloo."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, multiprocessing

__all__ = ["on_ranks"]


def on_ranks(world: int, measure: Callable[..., Any], *args: Any) -> Any:
    """Call `measure(*args)` in `world` processes and return what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=_on_rank, args=(k, world, folder, measure, args)) for k in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("a rank failed")
        return torch.load(f"{folder}/found.pt")


def _on_rank(rank: int, world: int, folder: str, measure: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = measure(*args)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    distributed.barrier()  # no rank exits while another still communicates
    os._exit(0)  # gloo's threads sometimes abort a process that exits normally
