"""Cases for `test_sharded`, under DDP: growth sees the reduced gradient, ranks agree without sending masks."""

import contextlib
import functools
import warnings

import torch
from growing import Recorder, batch, dense_gradients, mlp, weights
from torch import distributed
from torch.nn import functional as F

from sparsekit_ao import SNFS, DynamicSparsifier

RULES = {"RigL": {"update_fraction": 0.3}, "SET": {"grow": "random"}, "SNFS": {"kind": SNFS, "until": 100}}


CASES = [  # rules, whether the first micro-batch synchronizes, whether DDP sends masks
    ("RigL", True, False),
    ("RigL", False, True),
    ("RigL", False, False),
    ("SET", False, False),
    ("SNFS", False, False),
]


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates broadcast_buffers; off: nobody sends masks
        parallel = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=broadcasts)
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


def agree(name, syncs, broadcasts):
    """Both ranks have one result, and growth saw the gradient of the whole batch."""
    found = train(distributed.get_rank(), name, syncs, broadcasts)
    both = [None, None]
    distributed.all_gather_object(both, found)
    for a, b in zip(*(tensors for *tensors, _, _ in both), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert found[2] <= 1e-6
    assert found[3] == ([2, 4, 6] if name == "RigL" else [6])


def cases():
    for case in CASES:
        yield "DDP " + "-".join(map(str, case)), functools.partial(agree, *case)
