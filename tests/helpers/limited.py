"""Steps with too little memory, on one core, with other thread counts, in forks of forks; see `forks_child.py`.

After each fault the next call works, and masks are the same as without it.
"""

import os
import resource
import signal
from collections import Counter

import torch
from forks import begin, call, end, need
from torch import nn

from sparsekit_ao import ProximalSparsifier, RigL, ScopeSparsifier, WeightNormSparsifier

SIZE = 512
SHARES = [1 / 2, 1 / 16, 4, 0, 1, 2]  # of the bytes of a weight that a step may allocate
CONFIG = [
    {"tensor_fqn": "0.weight", "block_shape": (1, -1), "block_coupling": "u"},
    {"tensor_fqn": "1.weight", "block_shape": (-1, 1), "block_coupling": "u", "coupling_order": (1, 0)},
    {
        "tensor_fqn": "2.weight",
        "stages": [{"block_shape": (8, 1), "nnz": 4, "scope_shape": (1, 8)}, {"scope_shape": (1,)}],
    },
    {"tensor_fqn": "3.weight", "scope_shape": (1, 4)},
]


def layers(size):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))


def scope(size):
    model, sparsifier = layers(size), ScopeSparsifier(0.5)
    sparsifier.prepare(model, CONFIG)
    return sparsifier


def stock(size):
    model, sparsifier = layers(size), WeightNormSparsifier(0.5, (4, 4), zeros_per_block=9)
    sparsifier.prepare(model, [{"tensor_fqn": f"{k}.weight"} for k in range(4)])
    return sparsifier


def rigl(size):
    model = layers(size)
    optimizer = torch.optim.Adam(model.parameters())
    sparsifier = RigL(0.5, optimizer, until=100, update_every=1)
    sparsifier.prepare(model)
    model(torch.ones(2, size)).square().sum().backward()
    optimizer.step()
    return sparsifier


def proximal(size):
    model = layers(size)
    sparsifier = ProximalSparsifier(sparsity_level=0.5, conditioner=None, scope_shape=(1, -1), block_shape=(1, 4))
    sparsifier.prepare(model)
    return sparsifier


def masks(sparsifier):
    return [sparsifier.mask(f"{k}.weight").clone() for k in range(4)]


def same(one, other):
    return all(map(torch.equal, one, other))


def starved(make, share, size):
    """A step that may allocate so much, and one without a limit after it."""
    sparsifier, undisturbed = make(size), make(size)
    undisturbed.step()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before, failed = resource.getrlimit(resource.RLIMIT_AS), False
    resource.setrlimit(resource.RLIMIT_AS, (used + int(share * size * size * 4), before[1]))
    try:
        sparsifier.step()
    except (MemoryError, RuntimeError) as e:
        failed = "memory" in str(e) or isinstance(e, MemoryError)
        need(failed, f"{make.__name__}: {e!r}")
    resource.setrlimit(resource.RLIMIT_AS, before)
    need(failed or same(masks(sparsifier), masks(undisturbed)), f"{make.__name__} with {share}: other masks")
    sparsifier.step()
    need(make is not scope or same(masks(sparsifier), masks(undisturbed)), f"{share}: the next step differs")
    os._exit(3 if failed else 0)


def lack_of_memory(count):
    size = SIZE // 2 if count == 1 else SIZE
    kinds = (scope, stock, rigl, proximal)
    codes = Counter(end(begin(starved, make, share, size)) for make in kinds for share in SHARES[:count])
    need(set(codes) <= {0, 3}, f"exit codes {codes}")
    return f"{codes[3]} of {codes.total()} steps had too little memory"


def masks_of(threads):
    """Masks of a new model, chosen by so many threads."""
    torch.set_num_threads(threads)
    sparsifier = scope(SIZE)
    sparsifier.step()
    need(torch.get_num_threads() == threads, f"{threads} threads became {torch.get_num_threads()}")
    return masks(sparsifier)


def other_thread_counts(count):
    first = masks_of(1)
    for threads in (2, 3, 1):
        need(same(masks_of(threads), first), f"other masks with {threads} threads")


def fork_after_a_step(count):
    """On one thread, since torch's own (OpenMP) do not survive a fork, whoever forks."""
    expected = masks_of(1)

    def child():
        signal.alarm(60)
        need(same(masks_of(1), expected), "other masks in a fork")

    call(child)
    need(same(masks_of(2), expected), "other masks after a fork")


def one_core(count):
    expected, core = masks_of(1), {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    need(same(masks_of(2), expected), "other masks on one core")
    need(os.sched_getaffinity(0) == core, "the affinity has changed")


FAULTS = [lack_of_memory, fork_after_a_step, one_core, other_thread_counts]


def run(fault, count):
    """One of FAULTS in a fork, with so many trials of each kind; what it prints is its result."""

    def child():
        print(f"{fault.__name__}: {fault(count) or 'whole'}", flush=True)

    call(child)
