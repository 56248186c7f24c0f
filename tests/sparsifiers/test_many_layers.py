"""Each further layer takes as many operations as the one before, however many layers a model has."""

import gc
import sys
from functools import partial

import pytest
import torch
from stock import linear_model, prepared

from sparsekit_ao import SET, ProximalSparsifier, ScopeSparsifier, WeightNormSparsifier, export
from sparsekit_ao.oneshot import chain


def operations(call):
    """The number of Python's operations in a call, also in the comprehensions and methods that it runs."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    gc.disable()  # what earlier tests left would be collected, and counted, at any time
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def masks_of(kind):
    def masks(model):
        sparsifier = prepared(model, kind=kind)
        return lambda: [sparsifier.mask(group["tensor_fqn"]) for group in sparsifier.groups]

    return masks


KINDS = {
    "scopes": ScopeSparsifier,
    "proximal": partial(ProximalSparsifier, sparsity_level=0.5),
    "dynamic": partial(SET, 0.5, until=100),
    "blocks": WeightNormSparsifier,
}
CALLS = {  # other calls are in package/test_growth.py
    **{f"masks of {name}": masks_of(kind) for name, kind in KINDS.items()},
    "dense_state_dict": lambda model: (prepared(model), lambda: export.dense_state_dict(model))[1],
}


@pytest.mark.parametrize("name", CALLS)
def test_operations_for_each_further_layer(name):
    calls = [CALLS[name](linear_model(*[2] * (layers + 1))) for layers in (10, 10, 20, 30)]
    _, few, more, most = map(operations, calls)  # the first call fills caches
    assert abs((most - more) - (more - few)) < 10 * 10


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_mask_by_name_is_that_of_the_layer_now(kind):
    sparsifier = prepared(linear_model(4, 4, 4), kind=kind)
    names = [group["tensor_fqn"] for group in sparsifier.groups]
    before = [sparsifier.mask(name) for name in names]
    sparsifier.groups.reverse()
    assert all(sparsifier.mask(name) is mask for name, mask in zip(names, before, strict=True))
    assert all(sparsifier.mask(name) is sparsifier.state[name]["mask"] for name in names)


def test_a_mask_by_name_is_that_of_the_model_that_was_prepared_last():
    sparsifier = prepared(linear_model(4, 4, 4))
    names = [group["tensor_fqn"] for group in sparsifier.groups]
    sparsifier.step()
    old = sparsifier.mask(names[0])
    sparsifier.squash_mask()
    assert sparsifier.mask(names[0]) is old
    sparsifier.prepare(linear_model(4, 4, 4))
    sparsifier.mask(names[0]).zero_()
    assert [bool(sparsifier.mask(name).all()) for name in names] == [False, True]
    assert [bool(sparsifier.state[name]["mask"].any()) for name in names] == [False, True]


def test_kept_values_are_counted_once(monkeypatch):
    summed = []

    def counted(values):
        values = list(values)
        summed.extend(values)
        return sum(values)

    monkeypatch.setattr(chain, "sum", counted, raising=False)
    kept = chain.Kept(limit=12)
    for key in (*range(20), 1, 0, 19):  # of 4 bytes each: three fit into memory
        kept.put(key, torch.tensor([key], dtype=torch.int32))
    assert summed == [4] * 23 and sorted(kept._values) == [0, 1, 2]
    kept.put(2, None)
    kept.put(19, torch.zeros(1))
    assert sorted(kept._values) == [0, 1, 2, 19]
    assert kept.get(19) == 0 and kept.get(18) == 18
