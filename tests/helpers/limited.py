"""Steps with too little memory, one core, other thread counts, in forks of forks; see `forks_child.py`.

After each fault masks and weights are old or new as a whole, those of coupled tensors alike, and the next call works.
"""

import contextlib
import importlib.util
import os
import resource
import signal
from collections import Counter

import torch
from faults_child import prepared
from forks import begin, call, end, need
from torch import nn

from sparsekit_ao import ProximalSparsifier, RigL

SIZE = 512
SHARES = [1 / 2, 1 / 16, 4, 0, 1, 2]  # of the bytes of a weight that a step may allocate
HAS_NUMBA = importlib.util.find_spec("numba") is not None


@contextlib.contextmanager
def limit(what, most):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def layers(size):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))


def trained(model, optimizer):
    model(torch.ones(2, model[0].in_features)).square().sum().backward()
    optimizer.step()


def rigl(size):
    model = layers(size)
    optimizer = torch.optim.Adam(model.parameters())
    sparsifier = RigL(0.5, optimizer, until=100, update_every=1)
    sparsifier.prepare(model)
    trained(model, optimizer)
    return model, sparsifier, [(0, 1, 2, 3)]


def proximal(size):
    model = layers(size)
    sparsifier = ProximalSparsifier(sparsity_level=0.5, conditioner=None, scope_shape=(1, -1), block_shape=(1, 4))
    sparsifier.prepare(model)
    return model, sparsifier, [(0,), (1,), (2,), (3,)]


def on_new_weights(kind):
    def make(size):
        model, sparsifier = prepared(kind, size)
        sparsifier.step()
        generator = torch.Generator().manual_seed(1)
        for layer in model:
            layer.parametrizations.weight.original.data.normal_(generator=generator)
        return model, sparsifier, [(0, 1), (2,), (3,)] if kind == "scope" else [(0,), (1,), (2,), (3,)]

    return make


KINDS = {"scope": on_new_weights("scope"), "stock": on_new_weights("stock"), "RigL": rigl, "proximal": proximal}


def state(model, sparsifier):
    """(mask, weight) of every layer."""
    weights = [next(layer.parameters()).detach().clone() for layer in model]
    return [(sparsifier.mask(f"{k}.weight").clone(), w) for k, w in enumerate(weights)]


def same(one, other):
    return all(map(torch.equal, one, other))


def starved(kind, share, size):
    """A step that may allocate so much, against one without a limit."""
    (model, sparsifier, sets), (other, undisturbed, _) = KINDS[kind](size), KINDS[kind](size)
    old = state(model, sparsifier)
    undisturbed.step()
    new = state(other, undisturbed)
    need(all(map(same, old, state(model, sparsifier))), "two models share memory")
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    failed = False
    with limit(resource.RLIMIT_AS, used + int(share * size * size * 4)):
        try:
            sparsifier.step()
        except (MemoryError, RuntimeError) as e:
            failed = "memory" in str(e) or isinstance(e, MemoryError)
            need(failed, f"{kind}: {e!r}")
    found = state(model, sparsifier)
    for members in sets:
        ages = [all(same(found[k], s[k]) for k in members) for s in (old, new)]
        need(any(ages), f"{kind} with {share} of a weight's memory: tensors {members} are neither old nor new")
    sparsifier.step()
    is_new = all(map(same, state(model, sparsifier), new))
    need(is_new or kind in ("stock", "proximal"), f"{kind}: the next step differs")  # those two start from the last one
    os._exit(3 if failed else 0)


def lack_of_memory(folder, count):
    size = SIZE // 2 if count == 1 else SIZE
    codes = Counter(end(begin(starved, kind, share, size)) for kind in KINDS for share in SHARES[:count])
    need(set(codes) <= {0, 3}, f"exit codes {codes}")
    return f"{codes[3]} of {codes.total()} steps had too little memory"


def masks_of(threads):
    """Masks of a new model, chosen by so many threads."""
    torch.set_num_threads(threads)
    _, sparsifier = prepared("scope", SIZE)
    sparsifier.step()
    return [sparsifier.mask(f"{k}.weight") for k in range(4)]


def other_thread_counts(folder, count):
    first, (_, sparsifier) = masks_of(1), prepared("scope", SIZE)
    for threads in (2, 3, 1):
        torch.set_num_threads(threads)
        sparsifier.step()
        need(same([sparsifier.mask(f"{k}.weight") for k in range(4)], first), f"other masks with {threads} threads")
        need(torch.get_num_threads() == threads, f"{threads} threads became {torch.get_num_threads()}")


def fork_after_threads(folder, count):
    """Helper threads have begun, but torch's own (OpenMP) have not: those do not survive a fork, whoever forks."""
    masks = masks_of(1)
    from sparsekit_ao.selection import threads

    torch.set_num_threads(2)
    need(threads.run_apart([lambda: 1, lambda: 2]) == [1, 2], "helper threads do not work")

    def child():
        signal.alarm(60)
        need(threads.run_apart([lambda: 1, lambda: 2]) == [1, 2], "helper threads do not work in a fork")
        need(same(masks_of(2), masks), "other masks in a fork")

    call(child)
    need(same(masks_of(2), masks), "other masks after a fork")


def one_core(folder, count):
    masks, core = masks_of(1), {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    need(same(masks_of(2), masks), "other masks on one core")
    need(os.sched_getaffinity(0) == core, "the affinity has changed")


def plus_one(x):
    return x + 1


def compiled(folder, *, only_loaded=False):
    from sparsekit_ao.selection.numba import cache

    cache.numba.config.CACHE_DIR = str(folder)
    with cache.only_loaded() if only_loaded else contextlib.nullcontext():
        need(cache.compiled(plus_one)(1) == 2, "compiled code is wrong")


def four_compile_at_once(folder, count):
    if not HAS_NUMBA:
        return "numba is not installed"
    compiled(folder / "first")  # imports numba
    codes = [end(p) for p in [begin(compiled, folder / "four") for _ in range(4)]]
    need(codes == [0] * 4, f"exit codes {codes}")
    compiled(folder / "four", only_loaded=True)


CHEAP = [lack_of_memory, fork_after_threads, one_core]  # what the suite runs
FAULTS = [*CHEAP, other_thread_counts, four_compile_at_once]


def run(fault, folder, count):
    """One of FAULTS in a fork, with so many trials of each kind; what it prints is its result."""

    def child():
        print(f"{fault.__name__}: {fault(folder, count) or 'whole'}", flush=True)

    call(child)
