"""Calls that have no effect, or not the expected one, in the order or on the model on which they are made."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.utils.prune
from stock import linear_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsekit_ao import DynamicSparsifier, ScopeSparsifier, SparsityError, WeightNormSparsifier, one_shot, schedules
from sparsekit_ao.torch_ao import LambdaSL


def prepared(*sizes, **options):
    sparsifier = ScopeSparsifier(**options)
    sparsifier.prepare(linear_model(*(sizes or (8, 8))))
    return sparsifier


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
def test_squash_without_a_step(kind):
    sparsifier = kind()
    sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))
    with pytest.warns(UserWarning, match=r"step was never called, .*nothing is pruned; call step\(\) first"):
        sparsifier.squash_mask()
    filled = prepared()
    filled.mask("0.weight")[0] = False  # by hand
    with pytest.warns(UserWarning, match="keeps 56 blocks, its budget is 32"):
        filled.squash_mask()


def test_squash_one_level_short():
    sparsifier = prepared(sparsity_level=0.0)
    scheduler = schedules.ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 4))
    for _ in range(4):
        sparsifier.step()
        scheduler.step()
    twin = copy.deepcopy(sparsifier)
    text = r"the mask of 0.weight was chosen at sparsity_level 0.375, and its level is 0.5 now; call step\(\) once more"
    with pytest.warns(UserWarning, match=text):
        sparsifier.squash_mask()
    twin.step()
    twin.squash_mask()
    assert (twin.model[0].weight == 0).sum() == 32


@pytest.mark.parametrize("saved", [0.625, 0.9375])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_squash_after_masks_of_another_level_were_loaded_with_the_model(saved, has_stepped):
    checkpoint = prepared(8, 8, 8, sparsity_level=saved)
    checkpoint.step()
    sparsifier = prepared(8, 8, 8, sparsity_level=0.75)
    if has_stepped:
        sparsifier.step()
    sparsifier.model.load_state_dict(checkpoint.model.state_dict())
    twin, kept = copy.deepcopy(sparsifier), copy.deepcopy(sparsifier)
    text = rf"0.weight: .*keeps {int((1 - saved) * 64)} blocks, its budget is 16 .*and 1 more.*Call step\(\)"
    with pytest.warns(UserWarning, match=text):
        sparsifier.squash_mask()
    twin.step()
    twin.squash_mask()
    assert (twin.model[0].weight == 0).sum() == 48
    kept.enable_mask_update = False
    kept.squash_mask()
    assert (kept.model[0].weight == 0).sum() == saved * 64


def test_a_squashed_copy_and_a_paused_sparsifier_cause_no_warning():
    sparsifier = prepared()
    sparsifier.step()
    sparsifier.squash_mask(model=copy.deepcopy(sparsifier.model))
    sparsifier.groups[0]["sparsity_level"] = 0.75
    sparsifier.enable_mask_update = False
    sparsifier.squash_mask()


def test_a_scheduler_before_prepare():
    sparsifier = ScopeSparsifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LambdaSL(sparsifier, lambda epoch: 0.1)
    with pytest.warns(UserWarning, match="a scheduler was constructed before prepare, so it has no groups"):
        sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))


def test_a_layer_that_was_replaced_after_prepare_is_named():
    sparsifier = prepared(8, 8, 4)
    sparsifier.step()
    sparsifier.model[2] = nn.Linear(8, 3)
    with pytest.warns(UserWarning, match="step: 2.weight: its layer was replaced or removed after prepare"):
        sparsifier.step()
    sparsifier.step()  # once
    with pytest.warns(UserWarning, match="squash_mask: 2.weight: its layer was replaced or removed"):
        sparsifier.squash_mask()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_is_made_after_prepare_and_copies_the_masks(use_buffers):
    model, sparsifier = linear_model(8, 8, 4), ScopeSparsifier(0.5)
    early = AveragedModel(model, use_buffers=use_buffers)
    sparsifier.prepare(model)
    with pytest.raises(SparsityError, match=r"it is not a copy made after prepare \(as an EMA must be\)"):
        sparsifier.squash_mask(model=early.module)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    for _ in range(4):
        sparsifier.model[0].parametrizations.weight.original.data.normal_()
        sparsifier.step()
        average.update_parameters(model)
    copied = torch.equal(average.module[0].parametrizations.weight[0].mask, sparsifier.mask("0.weight"))
    assert copied is not use_buffers
    text = r"masks of the given copy keep \d+ elements, but the sparsifier's keep 48.*averaged the masks too"
    with pytest.warns(UserWarning, match=text) if use_buffers else contextlib.nullcontext():
        sparsifier.squash_mask(model=average.module)
    assert (int((average.module[0].weight == 0).sum()) == 32) is not use_buffers


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


@pytest.mark.parametrize(
    ("kind", "saved", "prepared"),
    [
        (ScopeSparsifier, {"sparsity_level": 0.5}, {"sparsity_level": 0.75}),
        (ScopeSparsifier, {"nnz": 2, "scope_shape": (1, 4)}, {"nnz": 1, "scope_shape": (1, 4)}),
        (WeightNormSparsifier, {"sparsity_level": 0.5}, {"sparsity_level": 0.75}),
        (DynamicSparsifier, {"sparsity_level": 0.5, "grow": None}, {"sparsity_level": 0.75, "grow": None}),
        (
            DynamicSparsifier,
            {"sparsity_level": 0.5, "grow": "momentum", "redistribute": "momentum"},
            {"sparsity_level": 0.75, "grow": "momentum", "redistribute": "momentum"},
        ),
    ],
)
def test_a_state_of_another_level_is_loaded_with_a_warning_whose_advice_works(kind, saved, prepared):
    def made(options):
        sparsifier = kind(**options)
        sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))
        return sparsifier

    state = made(saved).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(saved).load_state_dict(state)
        scheduled = made(prepared)
        LambdaSL(scheduled, lambda epoch: 1.0)  # whoever resumes a schedule restores its levels next
        scheduled.load_state_dict(state)
    sparsifier = made(prepared)
    text = r"was prepared at sparsity_level 0.75, and continues at 0.5, .*set group\['sparsity_level'\] = 0.75 in"
    with pytest.warns(UserWarning, match=text):
        sparsifier.load_state_dict(state)
    assert sparsifier.groups[0]["sparsity_level"] == 0.5
    if kind is not DynamicSparsifier:
        for group in sparsifier.groups:
            group["sparsity_level"] = 0.75
        sparsifier.step()
        assert int((sparsifier.mask("0.weight") != 0).sum()) == 16


def test_squashing_after_an_interrupted_pass_names_what_stays_dense():
    def stop(*_):
        calls.append(None)
        if len(calls) == 2:  # the first finds the order of layers, the second is recorded
            raise KeyboardInterrupt

    calls, sparsifier = [], ScopeSparsifier(nnz=2, scope_shape=(1, 4))
    sparsifier.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    sparsifier.model[2].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        one_shot(sparsifier, [torch.randn(16, 8)])
    with pytest.warns(UserWarning, match=r"1 of 2 masks keep everything, so 2.weight stay dense.*call one_shot"):
        sparsifier.squash_mask()
