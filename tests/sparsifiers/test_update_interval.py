"""`update_every` and `until`: of `ScopeSparsifier` and of the callbacks; when masks change, and what resumes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from stock import linear_model
from torch import nn

from sparsekit_ao import DynamicSparsifier, ScopeSparsifier, SparsityError, WeightNormSparsifier, schedules


def prepared(kind=ScopeSparsifier, **options):
    sparsifier = kind(**options)
    sparsifier.prepare(linear_model(8, 8))
    return sparsifier


def changes(sparsifier, step, count):
    """In which of some steps the mask changes, with new weights in each."""
    found = []
    for k in range(count):
        before = sparsifier.mask("0.weight").clone()
        with torch.no_grad():
            sparsifier.model[0].parametrizations.weight.original.normal_()
        step(k)
        found.append(not torch.equal(before, sparsifier.mask("0.weight")))
    return [k for k, changed in enumerate(found) if changed]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"update_every": 3}, [0, 3, 6]),
        ({"until": 2}, [0, 1]),
        ({"update_every": 3, "until": 4}, [0, 3]),
    ],
)
def test_steps_that_update_masks(options, expected):
    torch.manual_seed(0)
    sparsifier = prepared(**options)
    assert changes(sparsifier, lambda _: sparsifier.step(), 8) == expected
    sparsifier.squash_mask()


def test_the_count_is_saved_and_begins_anew_with_another_model():
    torch.manual_seed(0)
    sparsifier = prepared(update_every=4)
    changes(sparsifier, lambda _: sparsifier.step(), 3)
    resumed = prepared(update_every=4)
    resumed.load_state_dict(sparsifier.state_dict())
    for one in (resumed, sparsifier, copy.deepcopy(sparsifier)):
        assert changes(one, lambda _, one=one: one.step(), 3) == [1]
    old = {k: v for k, v in sparsifier.state_dict().items() if k != "steps"}
    prepared().load_state_dict(old)
    sparsifier.squash_mask()
    sparsifier.prepare(linear_model(8, 8))
    assert changes(sparsifier, lambda _: sparsifier.step(), 4) == [0]


def test_frozen_masks_are_squashed_without_a_warning():
    sparsifier = prepared(sparsity_level=0.0, until=2)
    scheduler = schedules.ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 4))
    for _ in range(4):
        sparsifier.step()
        scheduler.step()
    sparsifier.squash_mask()


def callback_of(library, *args, **options):
    if library == "lightning":
        pytest.importorskip("lightning")
        from sparsekit_ao.integrations.lightning import SparsifierCallback

        callback = SparsifierCallback(*args, **options)
        return callback, lambda k: callback.on_train_batch_end(SimpleNamespace(global_step=k + 1), None, None, None, k)
    pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import SparsifierCallback

    callback = SparsifierCallback(*args, **options)
    return callback, lambda k: callback.on_step_end(None, SimpleNamespace(global_step=k + 1), None)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_callbacks(library):
    torch.manual_seed(0)
    sparsifier = prepared()
    callback, step = callback_of(library, sparsifier, update_every=3, until=5)
    assert changes(sparsifier, step, 8) == [0, 3]
    if library == "lightning":
        resumed, step = callback_of(library, sparsifier, update_every=3)
        resumed.load_state_dict(callback.state_dict())
        assert changes(sparsifier, step, 3) == [1]
    with pytest.raises(SparsityError, match="DynamicSparsifier must be called in every step; give update_every and"):
        callback_of(library, prepared(DynamicSparsifier), update_every=2)


@pytest.mark.parametrize("options", [{"update_every": 0}, {"until": 0}, {"update_every": 1.5}])
def test_numbers_that_cannot_be_meant(options):
    with pytest.raises(SparsityError, match=f"{next(iter(options))} must be an int >= 1, got"):
        ScopeSparsifier(**options)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier, DynamicSparsifier])
def test_optimizer_state_that_was_saved_before_prepare(kind, make):
    def trained(model, optimizer):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        return optimizer

    model = nn.Sequential(nn.Linear(8, 4))
    saved = trained(model, make(model.parameters())).state_dict()
    sparsifier = kind()
    sparsifier.prepare(model)
    optimizer = make(model.parameters())
    optimizer.load_state_dict(saved)  # torch compares no shapes
    text = r"of 0.bias is \(4, 8\), but the parameter is \(4,\): its state was saved for a model in which other"
    with pytest.raises(SparsityError, match=text):
        sparsifier.attach(optimizer)
    with pytest.raises(SparsityError, match=text):
        sparsifier.attach([optimizer])
    fresh = nn.Sequential(nn.Linear(8, 4))
    before = make(fresh.parameters())
    before.load_state_dict(saved)
    again = kind()
    again.prepare(fresh)
    again.attach(before)  # parameters stay the same objects
    trained(fresh, before)
