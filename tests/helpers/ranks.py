"""Run many cases on several gloo ranks of this machine, which are forks of one process; each is reported by itself."""

import datetime
import json
import os
import pathlib
import traceback
import warnings

import torch
from forks import begin, end
from torch import distributed


def run_worlds(worlds):
    """Run `cases()`, which yields (name, function of no arguments), for each {number of ranks: cases}, in this order.

    Every rank lists and runs the same cases in the same order. Prints {number of ranks: {name: the first rank's error,
    or None}} as JSON. The working folder takes the rendezvous files, and what cases save.
    """
    import torch._dynamo.convert_frame  # what every rank imports sooner or later
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    found = {}
    for world, cases in worlds.items():
        codes = list(map(end, [begin(_rank, k, world, cases) for k in range(world)]))
        results = [torch.load(path) for path in sorted(pathlib.Path().glob(f"{world}_rank*.pt"))]
        if any(codes) or len(results) != world:
            raise RuntimeError(f"{world} ranks ended with {codes} and left {len(results)} results")
        found[world] = {name: next((r[name] for r in results if r[name]), None) for name in results[0]}
    print(json.dumps(found))


def _rank(rank, world, cases):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if world > 1:
        rendezvous = pathlib.Path(f"{world}_rendezvous").absolute().as_uri()
        timeout = datetime.timedelta(seconds=60)
        distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    found = {}
    for name, case in cases():
        try:
            case()
            found[name] = None
        except BaseException:  # pytest.fail raises one too
            found[name] = f"rank {rank}: {traceback.format_exc()}"
        if world > 1:  # so that ranks go on together
            distributed.barrier()
    torch.save(found, f"{world}_rank{rank}.pt")
    if world > 1:
        distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that exits normally
