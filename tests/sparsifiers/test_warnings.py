"""Calls that have no effect, or not the expected one, in the order or on the model on which they are made."""

import contextlib
import copy
import math
import re
import warnings

import pytest
import torch
import torch.nn.utils.prune
from stock import linear_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsekit_ao import (
    GMP,
    STE,
    DynamicSparsifier,
    RigL,
    ScopeSparsifier,
    SparsityError,
    WeightNormSparsifier,
    one_shot,
    schedules,
    scores,
)
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


def test_what_keeps_everything_on_purpose_is_squashed_without_a_warning():
    sparsifier = prepared(sparsity_level=0.0)
    one_shot(sparsifier, [torch.randn(4, 8)])
    sparsifier.squash_mask()
    forgotten = prepared()
    LambdaSL(forgotten, lambda epoch: epoch / 10)  # of torch.ao, which starts at level 0
    with pytest.warns(UserWarning, match="step was never called"):
        forgotten.squash_mask()
    own = prepared()  # a mask of the user, as of torch.nn.utils.prune.custom_from_mask
    own.mask("0.weight")[0] = False
    own.enable_mask_update = False
    own.squash_mask()


def trained(make, steps, model=None):
    """A sparsifier after some steps, with its scheduler, if it has one."""
    model = linear_model(8, 8, 4) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier, schedule, options = make(optimizer)
    sparsifier.prepare(model, None)
    scheduler = None if schedule is None else schedules.ScheduleSL(sparsifier, schedule, **options)
    train(sparsifier, scheduler, optimizer, steps)
    return sparsifier, scheduler


def train(sparsifier, scheduler, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        sparsifier.model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        sparsifier.step()
        if scheduler is not None:
            scheduler.step()
    sparsifier.step()


def scope(schedule, **options):
    return lambda optimizer: (ScopeSparsifier(), schedule, options)


def dynamic(**options):
    return lambda optimizer: (DynamicSparsifier(optimizer=optimizer, grow=None, **options), None, {})


UP = schedules.linear(0.0, 0.5, 20)
CUT_SHORT = {  # {name: (a function that makes a sparsifier, the level that it has after 5 of 20 steps, the last one)}
    "cubic": (scope(schedules.cubic(0.0, 0.5, 20)), 0.2891, 0.5),
    "linear, every second step": (scope(UP, interval=2), 0.1, 0.5),
    "cosine that begins late": (scope(schedules.cosine(0.25, 0.75, 18, begin=2)), 0.2835, 0.75),
    "joined": (scope(schedules.join([schedules.constant(0.0), schedules.linear(0.25, 0.5, 15)], [4])), 0.2667, 0.5),
    "a schedule for each group": (scope([schedules.constant(0.25), UP]), 0.125, 0.5),
    "straight-through": (lambda _: (STE(0.5), UP, {}), 0.125, 0.5),
    "falling": (scope(schedules.linear(0.5, 0.0, 20)), 0.375, 0),
    "GMP": (lambda optimizer: (GMP(0.75, optimizer, until=20, update_every=5), None, {}), 0.4336, 0.75),
    "target": (dynamic(target=UP, update_every=2), 0.15, 0.5),
    "target after until": (dynamic(target=UP, update_every=2, until=4), 0.1, 0.5),
}


@pytest.mark.parametrize("name", CUT_SHORT)
def test_a_schedule_that_was_cut_short(name):
    make, level, last = CUT_SHORT[name]
    sparsifier, _ = trained(make, 5)
    step = sparsifier.iteration if isinstance(sparsifier, DynamicSparsifier) else 5
    text = f"the schedule is at step {step} with sparsity {level} of .*, but ends with {last}"
    assert re.search(text, str(sparsifier.report()))
    sparsifier.squash_mask(model=copy.deepcopy(sparsifier.model))  # to look at the model in the middle of training
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparsifier.squash_mask()
    assert any(re.match(f"squash_mask: {text}; train until its end", str(warning.message)) for warning in caught)
    if not isinstance(sparsifier, DynamicSparsifier):  # whose target begins anew
        sparsifier.prepare(linear_model(8, 8))
        assert "schedule" not in str(sparsifier.report())


ENDED = {
    **{name: (make, 21) for name, (make, _, _) in CUT_SHORT.items() if name != "target after until"},
    "constant": (scope(schedules.constant(0.5)), 5),
    "constant at the end": (scope(schedules.join([UP, schedules.constant(0.125)], [5])), 5),
    "a function whose end is not known": (scope(lambda step: 0.01 * step), 5),
    "no schedule": (lambda optimizer: (ScopeSparsifier(), None, {}), 5),
    "constant target": (dynamic(target=schedules.constant(0.5), update_every=2), 5),
    "RigL": (lambda optimizer: (RigL(0.5, optimizer, until=20, update_every=2), None, {}), 5),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_schedule_that_has_ended_or_has_no_known_end(name):
    make, steps = ENDED[name]
    sparsifier, _ = trained(make, steps)
    sparsifier.squash_mask()  # without a warning


def test_levels_that_a_user_sets_after_a_schedule_was_cut_short():
    sparsifier, _ = trained(scope(UP), 5)
    for group in sparsifier.groups:
        group["sparsity_level"] = 0.25
    sparsifier.step()
    assert "schedule" not in str(sparsifier.report())
    sparsifier.squash_mask()  # without a warning


@pytest.mark.parametrize("name", ["cubic", "GMP"])
def test_a_schedule_that_is_resumed_knows_where_it_is(name):
    make, level, last = CUT_SHORT[name]
    sparsifier, scheduler = trained(make, 5)
    resumed, own = trained(make, 0)
    resumed.load_state_dict(sparsifier.state_dict())
    if own is not None:
        own.load_state_dict(scheduler.state_dict())
    assert f"with sparsity {level} of" in str(resumed.report())
    with pytest.warns(UserWarning, match=f"with sparsity {level} of .*, but ends with {last}"):
        resumed.squash_mask()


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
    text = (
        r"was prepared at sparsity_level 0.75, and continues at 0.5, .* keep 0.75, set group\['sparsity_level'\] = 0.75"
    )
    with pytest.warns(UserWarning, match=text) as warned:
        sparsifier.load_state_dict(state)
    assert [w.filename for w in warned] == [__file__]
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


@pytest.mark.parametrize(
    ("saved", "live", "text"),
    [
        ({"block_shape": (1, 4), "norm": 1}, {"block_shape": (1, 4), "norm": 2}, "norm=2, and continues with norm=1"),
        ({"score": "random"}, {"score": "magnitude"}, "score='magnitude', and continues with score='random'"),
        ({"score": "wanda"}, {}, "score=None, and continues with score='wanda'"),
        ({"block_shape": (1, 4), "norm": 1}, {"block_shape": (1, 4)}, "norm=2, and continues with norm=1"),
    ],
)
def test_a_state_with_another_score_or_norm_warns_and_the_advice_works(saved, live, text):
    sparsifiers = [ScopeSparsifier(0.5, **keys) for keys in (saved, live)]
    for sparsifier in sparsifiers:
        sparsifier.prepare(linear_model(8, 8, 8))
    state, (own, _) = sparsifiers[0].state_dict(), text.split(", and")
    text = rf"0.weight \(and 1 more\) was prepared with {text} of the state. To keep {own}, set group"
    with pytest.warns(UserWarning, match=text) as warned:
        sparsifiers[1].load_state_dict(state)
    assert [w.filename for w in warned] == [__file__]
    sparsifiers[1].load_state_dict(state)  # now both are the same
    for group in sparsifiers[1].groups:
        group["score" if "score" in own else "norm"] = {"norm=2": 2, "score=None": None}.get(own, "magnitude")
    sparsifiers[1].step()


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"score": "magnitude"}, {"score": scores.magnitude()}),
        ({"score": scores.magnitude()}, {"score": "magnitude"}),
        ({"block_shape": (1, 4), "norm": "inf"}, {"block_shape": (1, 4), "norm": math.inf}),
        ({"block_shape": (1, 4), "norm": 2}, {"block_shape": (1, 4)}),
    ],
)
def test_a_state_that_says_the_same_in_other_words_is_no_other_one(saved, live):
    sparsifiers = [ScopeSparsifier(0.5, **keys) for keys in (saved, live)]
    for sparsifier in sparsifiers:
        sparsifier.prepare(linear_model(8, 8))
    sparsifiers[1].load_state_dict(sparsifiers[0].state_dict())


def test_a_state_with_other_zeros_of_a_block_warns():
    sparsifiers = [WeightNormSparsifier(1.0, (1, 4), zeros) for zeros in (2, 4)]
    for sparsifier in sparsifiers:
        sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)), None)
    with pytest.warns(UserWarning, match="zeros_per_block=4, and continues with zeros_per_block=2 of the st") as warned:
        sparsifiers[1].load_state_dict(sparsifiers[0].state_dict())
    assert [w.filename for w in warned] == [__file__]


def replaced_layer(sparsifier):
    sparsifier.prepare(linear_model(8, 8))
    sparsifier.model[0] = nn.Linear(8, 8)
    return sparsifier


WARNINGS = {  # what warns at its own line
    "a step of a model whose layer was replaced": lambda: replaced_layer(ScopeSparsifier()).step(),
    "the same of another class": lambda: replaced_layer(WeightNormSparsifier()).step(),
    "a step that a scheduler wraps": lambda: (
        LambdaSL(s := replaced_layer(ScopeSparsifier()), lambda _: 1.0) and s.step()
    ),
    "a level out of range": lambda: WeightNormSparsifier(1.5),
    "the same in a config": lambda: WeightNormSparsifier().prepare(
        linear_model(8, 8), [{"tensor_fqn": "0.weight", "sparsity_level": -1}]
    ),
    "a squash before a step": lambda: prepared().squash_mask(),
    "a prepare after a scheduler": lambda: (
        LambdaSL(s := ScopeSparsifier(), lambda _: 1.0) and s.prepare(linear_model(8, 8))
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_names_the_line_that_called_the_library(name):
    with pytest.warns(UserWarning, match="^(step|squash_mask|prepare): |sparsity level") as warned:
        WARNINGS[name]()
    assert {w.filename for w in warned} == {__file__}
