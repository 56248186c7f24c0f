"""Run many cases on several gloo ranks of this machine with one spawn; every case is reported by itself."""

import datetime
import multiprocessing
import os
import pathlib
import signal
import traceback
import warnings

import torch
from forks import begin, end
from torch import distributed


def run_ranks(world, folder, cases, *, seconds=240):
    """Run `cases()` (a list of (name, function of no arguments)) on every rank.

    Ranks are forks of one new process, so that everything is imported once.

    Args:
        world: number of ranks.
        folder: an empty folder for the rendezvous file and the results.
        cases: a function of a module; every rank lists and runs the same cases in the same order.

    Returns:
        {name: the first rank's error text, or None}.

    Raises:
        AssertionError: a rank exited with an error, or did not end in time.
    """
    ranks = multiprocessing.get_context("spawn").Process(target=_fork, args=(world, str(folder), cases))
    ranks.start()
    ranks.join(seconds)
    if ranks.is_alive():
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.join()
    found = [torch.load(p) for p in sorted(pathlib.Path(folder).glob("rank*.pt"))]
    assert ranks.exitcode == 0 and len(found) == world, (ranks.exitcode, found)
    return {name: next((f[name] for f in found if f[name]), None) for name in found[0]}


def _fork(world, folder, cases):
    os.setpgid(0, 0)  # a group of its own, so that its forks can be ended with it

    os._exit(max(map(abs, map(end, [begin(_rank, k, world, folder, cases) for k in range(world)]))))


def _rank(rank, world, folder, cases):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {}
    for name, case in cases():
        try:
            case()
            found[name] = None
        except BaseException:  # pytest.fail raises one too
            found[name] = f"rank {rank}: {traceback.format_exc()}"
        if _any_failed(found[name] is not None):
            found.setdefault(name, None)
    torch.save(found, f"{folder}/rank{rank}.pt")
    distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that exits normally


def _any_failed(mine):
    """Whether the case failed on any rank; also synchronizes the ranks between cases."""
    flag = torch.tensor(int(mine))
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag)
