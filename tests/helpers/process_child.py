"""Reads the state of its process before and after the library works; run by test_fresh_process.py."""

import gc
import os
import signal
import sys
import threading
import time
import warnings
from unittest import mock

import numpy as np
import pytest
import torch

SIZE = 512
torch.manual_seed(0)  # an initial weight may be exactly 0, which the counts below take for a dropped one

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
torch.set_num_threads(2)
end, asked = threading.Event(), []
early = threading.Thread(target=lambda: (end.wait(), asked.append(torch.get_num_threads())), daemon=True)
early.start()  # begins before anything else, but asks torch only at the end

import sparsekit_ao  # noqa: E402
from sparsekit_ao import BlockSpec, ScopeSpec  # noqa: E402
from sparsekit_ao.selection import Request, cpu, fill_masks  # noqa: E402


def in_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def state():
    return {
        "threads": torch.get_num_threads(),
        "threads of a new thread": in_new_thread(torch.get_num_threads),
        "threads between operations": torch.get_num_interop_threads(),
        "OpenMP and MKL": torch.__config__.parallel_info(),
        "OpenMP and MKL of a new thread": in_new_thread(torch.__config__.parallel_info),
        "affinity": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "environment": sorted(os.environ.items()),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(), len(gc.callbacks)),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "numpy": np.geterr(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "switch interval": sys.getswitchinterval(),
    }


def check(what, before):
    after = state()
    wrong = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert not wrong, f"{what} changed {wrong}"


def model():
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))


def sparsify(before):
    """Single elements and blocks, scopes of a few, a row and a tensor."""
    for scope in ((1, 4), (-1, -1), (1, -1)):
        for block in ((1, 1), (8, 8)):
            sparsifier = sparsekit_ao.ScopeSparsifier(sparsity_level=0.5, block_shape=block, scope_shape=scope)
            sparsifier.prepare(net := model(), [{"tensor_fqn": f"{at}.weight"} for at in range(2)])
            check("prepare", before)
            sparsifier.step()
            check("step", before)
            sparsifier.squash_mask()
            check("squash_mask", before)
            assert int((net[0].weight == 0).sum()) == SIZE * SIZE // 2


def train(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(2, SIZE)).square().sum().backward()
    optimizer.step()


def update_while_training(before):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsifier = sparsekit_ao.DynamicSparsifier(sparsity_level=0.5, update_every=1)
    sparsifier.attach(optimizer)
    sparsifier.prepare(net, [{"tensor_fqn": f"{at}.weight"} for at in range(2)])
    for _ in range(3):
        train(net, optimizer)
        sparsifier.step()
        check("an update of a DynamicSparsifier", before)
    assert sparsifier.last_update.iteration == 3


def fail(before):
    """An exception, then Ctrl-C, from inside the chunks that threads fill."""
    values, mask = torch.randn(1024, 1024), torch.ones(1024, 1024, dtype=torch.bool)
    scope = ScopeSpec(BlockSpec(values), (1, 4))
    request = Request(scope=scope, masks={scope.block: mask}, keep=2)
    real, sent = cpu._fill_pairs, threading.Event()

    def broken(*_, **__):
        raise ZeroDivisionError

    def interrupted(*arguments, **keys):
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
        real(*arguments, **keys)

    for error, fault in ((ZeroDivisionError, broken), (KeyboardInterrupt, interrupted)):
        with mock.patch.object(cpu, "_fill_pairs", fault), pytest.raises(error):
            fill_masks([request])
        check(f"a {error.__name__} in the middle of an update", before)
    fill_masks([request])
    assert int(mask.sum()) == mask.numel() // 2


def prune_and_shrink(before):
    """The first calls in the process, which import what torch's optimizers import."""
    batches, small = [torch.randn(8, 32)], torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
    calls = {
        "prune": lambda: sparsekit_ao.prune(small, "2:4"),
        "recover": lambda: sparsekit_ao.prune(small, "2:4", batches=batches, recover=True),
        "shrink": lambda: sparsekit_ao.shrink(small, batches[0]),
    }
    threads = set(threading.enumerate())
    for what in sys.argv[1:] or calls:
        calls[what]()
        check(what, {"environment": before["environment"]})
        assert set(threading.enumerate()) == threads, what


prune_and_shrink(state())
train(
    first := model(), torch.optim.SGD(first.parameters(), lr=0.1)
)  # torch's optimizers import what sets environment variables and filters
fresh = state()
sparsify(fresh)
update_while_training(fresh)
fail(fresh)
end.set()
early.join()
assert asked == [2], f"a thread that began before the library worked has {asked[0]} threads"
print("nothing has changed")
