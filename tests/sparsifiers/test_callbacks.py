"""`update_every` and `until` of `ScopeSparsifier`, and the trainers' callbacks: when masks change, and what resumes."""

import copy
import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from stock import linear_model, prepared, refuses
from torch import nn
from torch.ao import pruning

import sparsekit_ao
from sparsekit_ao import GMP, DynamicSparsifier, ScopeSparsifier, SparsityError, schedules
from sparsekit_ao.schedules import ScheduleSL


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
        ({"update_every": 3}, [2, 5]),
        ({"until": 2}, [0, 1]),
        ({"update_every": 3, "until": 7}, [2, 5]),
        ({"update_every": 3, "until": 6}, [2, 5]),
        ({"update_every": 3, "until": 5}, [2]),
    ],
)
def test_steps_that_update_masks(options, expected):
    """Calls that are multiples of `update_every` (here counted from 0), the last at `until`: of every sparsifier."""
    torch.manual_seed(0)
    sparsifier = prepared(**options)
    assert changes(sparsifier, lambda _: sparsifier.step(), 8) == expected
    assert sparsifier.is_frozen is ("until" in options)
    sparsifier.squash_mask()
    settings = DynamicSparsifier(**{"update_every": 1, **options}).settings
    assert [step - 1 for step in range(1, 9) if settings.is_due(step)] == expected


def test_updates_that_would_never_come():
    with pytest.raises(SparsityError, match="until=5 allows no update, since update_every=6; give a larger until"):
        ScopeSparsifier(update_every=6, until=5)
    sparsifier = prepared(update_every=2)
    sparsifier.step()
    with pytest.warns(UserWarning, match=r"or no call was due \(update_every\), so every mask keeps everything"):
        sparsifier.squash_mask()


def test_the_count_is_saved_and_begins_anew_with_another_model():
    torch.manual_seed(0)
    sparsifier = prepared(update_every=4)
    changes(sparsifier, lambda _: sparsifier.step(), 3)
    resumed = prepared(update_every=4)
    resumed.load_state_dict(sparsifier.state_dict())
    for one in (resumed, sparsifier, copy.deepcopy(sparsifier)):
        assert changes(one, lambda _, one=one: one.step(), 5) == [0, 4]
    old = {k: v for k, v in sparsifier.state_dict().items() if k != "steps"}
    prepared().load_state_dict(old)
    sparsifier.squash_mask()
    sparsifier.prepare(linear_model(8, 8))
    assert changes(sparsifier, lambda _: sparsifier.step(), 5) == [3]


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
    callback, step = callback_of(library, sparsifier, update_every=3, until=6)
    assert changes(sparsifier, step, 10) == [2, 5]
    if library == "lightning":
        resumed, step = callback_of(library, sparsifier, update_every=3)
        resumed.load_state_dict(callback.state_dict())
        assert changes(sparsifier, step, 3) == [1]
    with pytest.raises(SparsityError, match="DynamicSparsifier must be called in every step; give update_every and"):
        callback_of(library, prepared(kind=DynamicSparsifier), update_every=2)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_callbacks_apply_the_last_level(library):
    sparsifier = prepared(update_every=2)
    callback, step = callback_of(library, sparsifier, [ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 4))])
    for k in range(4):
        step(k)
    end = {"lightning": (None, None), "transformers": (SimpleNamespace(load_best_model_at_end=False), None, None)}
    callback.on_train_end(*end[library])
    sparsifier.squash_mask()  # without a warning
    assert (sparsifier.model[0].weight == 0).sum() == 32


@pytest.mark.parametrize("library", ["lightning", "transformers"])
@pytest.mark.parametrize("kind", ["ScheduleSL", "GMP"])
def test_callbacks_warn_at_the_end_of_a_schedule_that_was_cut_short(library, kind):
    if kind == "GMP":
        sparsifier = GMP(0.5, until=8, update_every=2)
        model = nn.Sequential(nn.Linear(8, 8))
        sparsifier.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier.attach(optimizer)
        callback, step = callback_of(library, sparsifier)
    else:
        sparsifier = prepared()
        callback, step = callback_of(library, sparsifier, [ScheduleSL(sparsifier, schedules.cubic(0.0, 0.5, 8))])
    for k in range(4):
        if kind == "GMP":
            sparsifier.model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        step(k)
    end = {"lightning": (None, None), "transformers": (SimpleNamespace(load_best_model_at_end=False), None, None)}
    text = "training ended, but the schedule is at step 4 with sparsity 0.4375 of .*, but ends with 0.5"
    with pytest.warns(UserWarning, match=text):
        callback.on_train_end(*end[library])
    with pytest.warns(UserWarning, match="squash_mask: the schedule is at step 4 with sparsity 0.4375"):
        sparsifier.squash_mask()


@pytest.mark.parametrize("options", [{"update_every": 0}, {"until": 0}, {"update_every": 1.5}])
def test_numbers_that_cannot_be_meant(options):
    with pytest.raises(SparsityError, match=f"{next(iter(options))} must be an int >= 1, got"):
        ScopeSparsifier(**options)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_callback_of_another_model(library):
    callback, other = callback_of(library, prepared())[0], nn.Sequential(nn.Linear(8, 8))
    text = "SparsifierCallback: 0.weight belongs to another model than the one that is trained"
    start = {"lightning": lambda: callback.on_train_start(None, other)}
    start["transformers"] = lambda: callback.on_train_begin(None, None, None, model=other)
    with pytest.raises(SparsityError, match=text):
        start[library]()


def test_arguments_of_the_callbacks():
    pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import SparsifierCallback

    sparsifier, other = prepared(), prepared()
    cases = {
        "sparsifier must be one of sparsekit_ao, got builtins.str": ("adam",),
        r"schedulers must be a list of schedulers, such as \[ScheduleSL": (sparsifier, schedules.constant(0.5)),
        "the ScheduleSL was made for another sparsifier": (sparsifier, [ScheduleSL(other, schedules.constant(0.5))]),
    }
    for text, given in cases.items():
        with pytest.raises(SparsityError, match=text):
            SparsifierCallback(*given)
    with refuses("the sparsifier is not prepared; call prepare(model, config) before train"):
        SparsifierCallback(ScopeSparsifier()).on_train_begin(None, None, None, model=sparsifier.model)


@pytest.mark.parametrize("kind", [pruning.WeightNormSparsifier, pruning.NearlyDiagonalSparsifier])
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_callbacks_refuse_sparsifiers_of_torch_ao(library, kind):
    pytest.importorskip(library)
    integration = importlib.import_module(f"sparsekit_ao.integrations.{library}")
    stock = kind()
    model = linear_model(8, 4)
    stock.prepare(model, [{"tensor_fqn": "0.weight"}])
    text = (
        rf"must be one of sparsekit_ao, got torch\.ao\.pruning\..*{kind.__name__}; .* sparsekit_ao with the same names"
    )
    with pytest.raises(SparsityError, match=text):
        integration.SparsifierCallback(stock)
    integration.SparsifierCallback(getattr(sparsekit_ao, kind.__name__)())  # what the error advises


def test_the_trainer_goes_back_to_a_checkpoint_of_a_lower_level(tmp_path):
    pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import SparsifierCallback

    sparsifier = prepared()
    callback = SparsifierCallback(sparsifier, [ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 2))])
    args = SimpleNamespace(load_best_model_at_end=True)
    state = SimpleNamespace(best_model_checkpoint=None, global_step=1)
    callback.on_step_end(args, state, None)  # masks of level 0, and the level is 0.25
    callback.on_step_end(args, state, None)
    saved, best = callback.state(), copy.deepcopy(sparsifier.model.state_dict())
    (tmp_path / "trainer_state.json").write_text(json.dumps({"stateful_callbacks": {"SparsifierCallback": saved}}))
    callback.on_train_end(args, state, None)
    callback.on_step_end(args, state, None)
    assert sparsifier.check() == 2
    sparsifier.groups[0]["sparsity_level"] = sparsifier.groups[1]["sparsity_level"] = 0.75
    sparsifier.step()
    sparsifier.model.load_state_dict(best)  # as the trainer does
    state.best_model_checkpoint = str(tmp_path)
    with pytest.warns(UserWarning, match=r"went back to its best checkpoint, .* 0.weight has sparsity_level 0.5; its"):
        callback.on_train_end(args, state, None)
    assert [group["sparsity_level"] for group in sparsifier.groups] == [0.5, 0.5]


def test_a_lightning_callback_that_averages_masks():
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from sparsekit_ao.integrations.lightning import SparsifierCallback

    sparsifier = prepared()
    callback = SparsifierCallback(sparsifier)
    for averaging in (EMAWeightAveraging(), EMAWeightAveraging(use_buffers=False)):
        trainer = SimpleNamespace(callbacks=[callback, averaging], global_step=0, optimizers=[])
        if averaging._use_buffers:
            with pytest.raises(SparsityError, match=r"EMAWeightAveraging averages buffers, .* Give it"):
                callback.on_train_start(trainer, sparsifier.model)
        else:
            callback.on_train_start(trainer, sparsifier.model)
