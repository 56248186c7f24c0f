"""Two ranks under DDP: growth sees the reduced gradient, ranks agree without sending masks, `no_sync` included."""

import contextlib
import datetime
import multiprocessing
import sys

import pytest
import torch
from growing import Recorder, batch, dense_gradients, mlp, weights
from torch.nn import functional as F

from sparsekit_ao import SNFS, DynamicSparsifier

RULES = {
    "RigL": {"update_fraction": 0.3},
    "SET": {"grow": "random"},
    "SNFS": {"kind": SNFS, "until": 100},
}


CASES = [  # rules, whether the first micro-batch synchronizes, whether DDP sends masks
    ("RigL", True, False),
    ("RigL", False, True),
    ("RigL", False, False),
    ("SET", False, False),
    ("SNFS", False, False),
]


def train_rank(rank, folder):
    """All cases, one after the other."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    for at, case in enumerate(CASES):
        torch.save(train(rank, *case), f"{folder}/case{at}rank{rank}.pt")
    torch.distributed.destroy_process_group()


def train(rank, name, syncs, broadcasts):
    """Half of every batch, in two micro-batches of which the first does not synchronize unless `syncs`."""
    arguments = {**RULES[name], "update_every": 2}
    kind = arguments.pop("kind", DynamicSparsifier)
    recorder = Recorder() if name == "RigL" else None
    arguments |= {"grow": recorder} if recorder else {}
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sparsifier = kind(sparsity_level=0.75, optimizer=optimizer, **arguments)
    sparsifier.prepare(model, None)
    parallel = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=broadcasts)  # off: nobody sends masks
    worst = 0.0
    for step in range(1, 7):
        want = dense_gradients(model, step)
        x, y = batch(step)
        optimizer.zero_grad()
        for part in range(2):
            rows = slice(4 * rank + 2 * part, 4 * rank + 2 * part + 2)
            with contextlib.nullcontext() if syncs or part else parallel.no_sync():
                (F.cross_entropy(parallel(x[rows]), y[rows]) / 2).backward()
        optimizer.step()
        sparsifier.step()
        for tensor, gradient in (recorder.seen.get(step, {}) if recorder else {}).items():
            worst = max(worst, float((gradient - want[tensor]).abs().max()))
    sparsifier.check()
    masks = {g["tensor_fqn"]: sparsifier.mask(g["tensor_fqn"]) for g in sparsifier.groups}
    updates = sorted(recorder.seen) if recorder else [sparsifier.last_update.iteration]
    return [weights(model), masks, worst, updates]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two ranks have saved what each case gave."""
    found, spawn = tmp_path_factory.mktemp("ranks"), multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=train_rank, args=(k, str(found))) for k in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
        if rank.is_alive():
            rank.terminate()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return found


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32", reason="needs gloo")
@pytest.mark.parametrize("at", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_two_ranks_agree(at, folder):
    first, second = (torch.load(folder / f"case{at}rank{k}.pt") for k in range(2))
    for a, b in zip(first[:2], second[:2], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    assert first[2] <= 1e-6 and second[2] <= 1e-6
    assert first[3] == ([2, 4, 6] if CASES[at][0] == "RigL" else [6])
