"""Interrupts mask updates at random moments, once or twice; run by test_faults.py in a process of its own.

Every mask must be the old or the new one as a whole, those of coupled tensors alike, and the next call must work.
"""

import random
import signal
import sys
import time

import torch
from torch import nn

from sparsekit_ao import ScopeSparsifier, WeightNormSparsifier

CONFIG = [
    {"tensor_fqn": "0.weight", "block_shape": (1, -1), "block_coupling": "u"},
    {"tensor_fqn": "1.weight", "block_shape": (-1, 1), "block_coupling": "u", "coupling_order": (1, 0)},
    {
        "tensor_fqn": "2.weight",
        "stages": [{"block_shape": (8, 1), "nnz": 4, "scope_shape": (1, 8)}, {"scope_shape": (1,)}],
    },
    {"tensor_fqn": "3.weight", "scope_shape": (1, 4)},
]
SIZE = 256


def interrupt(*_):
    raise KeyboardInterrupt


def prepared(kind, size=SIZE):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))
    sparsifier = ScopeSparsifier(0.5) if kind == "scope" else WeightNormSparsifier(0.5, (4, 4), zeros_per_block=9)
    sparsifier.prepare(model, CONFIG if kind == "scope" else [{"tensor_fqn": f"{k}.weight"} for k in range(4)])
    return model, sparsifier


def masks_of(sparsifier):
    return [sparsifier.mask(f"{k}.weight").clone() for k in range(4)]


def main(kind, count):
    rng = random.Random(0)
    model, sparsifier = prepared(kind)
    begin = time.perf_counter()
    sparsifier.step()
    duration = time.perf_counter() - begin
    signal.signal(signal.SIGALRM, interrupt)
    for trial in range(count):
        torch.set_num_threads(rng.choice([1, 2, 3]))
        for layer in model:
            layer.parametrizations.weight.original.data.normal_()
        old = masks_of(sparsifier)
        again = rng.random() * duration / 4 if trial % 2 else 0.0
        try:
            signal.setitimer(signal.ITIMER_REAL, max(rng.random() * duration, 1e-5), again)
            try:
                sparsifier.step()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        found = masks_of(sparsifier)
        for mask, values in zip((sparsifier.mask(f"{k}.weight") for k in range(4)), old, strict=True):
            mask.copy_(values)
        sparsifier.step()
        new = masks_of(sparsifier)
        is_old, is_new = ([torch.equal(a, b) for a, b in zip(found, other, strict=True)] for other in (old, new))
        assert all(a or b for a, b in zip(is_old, is_new, strict=True)), (trial, is_old, is_new)
        assert kind != "scope" or is_old[0] == is_old[1], (trial, "coupled masks differ in age")


if __name__ == "__main__":
    torch.set_num_threads(2)
    try:
        for kind in ("scope", "stock"):
            main(kind, int(sys.argv[1]))
        print("whole")
    except KeyboardInterrupt:  # the second signal came after the step
        sys.exit("interrupted outside of a step")
