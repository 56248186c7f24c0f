"""What the benchmarks over ranks share: processes that meet over gloo, and what the first of them found."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, multiprocessing

__all__ = ["on_ranks"]


def on_ranks(world: int, measure: Callable[..., Any], *args: Any) -> Any:
    """Call `measure(*args)` in as many processes; what the first one returns."""
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
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found = measure(*args)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    distributed.barrier()  # nobody leaves while another still reads
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart
