"""What users of the library tried that no other test does: modules, wrappers, numbers, callbacks and mistakes."""

import copy
import io
import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stock import linear_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sparsekit_ao import (
    BlockCoupling,
    BlockSpec,
    Coupling,
    DynamicSparsifier,
    RigL,
    ScopeCoupling,
    ScopeSparsifier,
    ScopeSpec,
    SparsityError,
    coupling,
    dynamic,
    export,
    keep_mask,
    one_shot,
    patterns,
    removal,
    schedules,
)
from sparsekit_ao.plot import plot_layers, plot_mask
from sparsekit_ao.schedules import ScheduleSL


def prepared(model=None, config=None, **options):
    sparsifier = ScopeSparsifier(**options)
    sparsifier.prepare(linear_model(8, 8, 4) if model is None else model, config)
    return sparsifier


# modules and wrappers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_masked_recurrent_module_is_copied_after_a_forward_pass(kind):
    model, x = nn.Sequential(kind(4, 4)), torch.randn(3, 2, 4)
    sparsifier = prepared(model, [{"tensor_fqn": "*weight*"}], sparsity_level=0.75)
    dense = model(x)[0]
    sparsifier.step()
    masked = model(x)[0]
    assert not torch.equal(masked, dense)
    copied = copy.deepcopy(model)  # the module holds the weights of the forward pass, with their graph
    model.double().float()
    again = copy.deepcopy(model)
    sparsifier.squash_mask(model=copied)
    sparsifier.squash_mask()
    for one in (model, copied, again, pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(x)[0], masked)
    assert model[0]._flat_weights[0] is model[0].weight_ih_l0 and copied[0]._flat_weights[0] is copied[0].weight_ih_l0


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_masks_inside_checkpoint_wrappers(when):
    model, x = linear_model(8, 8, 4), torch.randn(2, 8)
    if when == "before prepare":
        model[0] = checkpoint_wrapper(model[0])
    sparsifier = prepared(model)
    sparsifier.step()
    if when == "after prepare":
        model[0] = checkpoint_wrapper(model[0])
    plain = linear_model(8, 8, 4)
    plain.load_state_dict(export.dense_state_dict(model))
    assert torch.equal(plain(x), model(x))
    model.load_state_dict(plain.state_dict())
    rows = [(row.tensor, row.kind, row.masked) for row in export.report(model)]
    assert rows == [("0.weight", "Linear", True), ("2.weight", "Linear", True)]
    assert [layer.fqn for layer in export.check(model, "quantize")] == ["0.weight", "2.weight"]
    copied = copy.deepcopy(model)  # which leaves the wrapper out
    sparsifier.squash_mask(model=copied)
    assert torch.equal(copied(x), model(x)) and sparsifier.check(copied) == 2


def test_a_wrapper_that_passes_on_the_attributes_of_what_it_wraps():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    model = nn.Sequential(Wrapper(nn.Linear(8, 4)))
    sparsifier = prepared(model)
    sparsifier.step()
    dense = export.dense_state_dict(model)
    assert (
        list(dense) == ["0.inner.bias", "0.inner.weight"]
        and [r.tensor for r in export.report(model)] == list(dense)[1:]
    )


def test_a_layer_that_was_replaced_after_prepare_is_named():
    sparsifier = prepared()
    sparsifier.step()
    sparsifier.model[2] = nn.Linear(8, 3)
    with pytest.warns(
        UserWarning, match="step: 2.weight: its layer was replaced or removed after prepare, .*prepare ag"
    ):
        sparsifier.step()
    sparsifier.step()  # once
    with pytest.warns(UserWarning, match="squash_mask: 2.weight: its layer was replaced or removed"):
        sparsifier.squash_mask()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_refused_and_left_alone_beside_others():
    scripted = torch.jit.script(nn.Linear(8, 4))
    with pytest.raises(SparsityError, match="prepare: model is scripted or traced; give the one that"):
        prepared(scripted, [{"tensor_fqn": "weight"}])
    model = nn.Sequential(nn.Linear(8, 8), scripted)
    with pytest.raises(SparsityError, match="'1.weight' is in a scripted or traced module, .*prune the model before"):
        prepared(model, [{"tensor_fqn": "1.weight"}])
    sparsifier = prepared(model)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight"]
    sparsifier.step()
    model(torch.ones(2, 8)).sum().backward()
    sparsifier.squash_mask()


def test_weights_without_values_after_prepare():
    sparsifier = prepared()
    sparsifier.step()
    weight = sparsifier.model[0].parametrizations.weight.original
    sparsifier.model[0].parametrizations.weight.original = nn.Parameter(weight.to("meta"))  # as offloading does
    with pytest.raises(
        SparsityError, match="0.weight has no values, since it was moved to the meta device or offloaded"
    ):
        sparsifier.step()
    moved = prepared()
    moved.step()
    saved = moved.state_dict()
    moved.model.to("meta")
    with pytest.raises(SparsityError, match="check: 0.weight is on the meta device, so its mask has no values"):
        moved.check()
    saved["state"]["0.weight"]["mask"] = saved["state"]["0.weight"]["mask"].to("meta")
    with pytest.raises(SparsityError, match="load_state_dict: 0.weight: the saved mask is on the meta device"):
        prepared().load_state_dict(saved)


# numbers


@pytest.mark.parametrize(
    "given", [{"sparsity_level": np.float32(0.5)}, {"nnz": np.int64(32)}, {"block_shape": (np.int64(2), 1)}]
)
def test_numbers_of_numpy_in_a_config_are_saved_as_plain_ones(given):
    sparsifier = prepared(config=[{"tensor_fqn": "0.weight", **given}])
    sparsifier.step()
    sparsifier.groups[0]["sparsity_level"] = np.float64(0.5)  # as a scheduler may write
    torch.save(sparsifier.state_dict(), file := io.BytesIO())
    file.seek(0)
    sparsifier.load_state_dict(torch.load(file, weights_only=True))
    assert sparsifier.check() == 1 and int(sparsifier.mask("0.weight").sum()) == 32


def test_a_schedule_of_numpy_gives_plain_numbers():
    sparsifier = prepared()
    scheduler = ScheduleSL(sparsifier, lambda step: np.clip(step / 4, 0, 1))
    assert type(sparsifier.groups[0]["sparsity_level"]) is float and json.dumps(scheduler.state_dict()["_last_sl"])


# callbacks


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
    with pytest.warns(
        UserWarning, match=r"went back to its best checkpoint, .* 0.weight has sparsity_level 0.5; its last"
    ):
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
            with pytest.raises(
                SparsityError, match=r"EMAWeightAveraging averages buffers, .* Give it use_buffers=False"
            ):
                callback.on_train_start(trainer, sparsifier.model)
        else:
            callback.on_train_start(trainer, sparsifier.model)


def test_a_copy_whose_masks_were_averaged():
    sparsifier = prepared()
    sparsifier.step()
    average = copy.deepcopy(sparsifier.model)
    sparsifier.model[0].parametrizations.weight.original.data.normal_()
    sparsifier.step()
    for mean, value in zip(average.state_dict().values(), sparsifier.model.state_dict().values(), strict=True):
        mean.copy_(0.9 * mean + 0.1 * value)
    with pytest.warns(UserWarning, match=r"masks of the given copy keep \d+ elements, those of the sparsifier 48: it"):
        sparsifier.squash_mask(model=average)


def test_arguments_of_the_callbacks():
    pytest.importorskip("transformers")
    from sparsekit_ao.integrations.transformers import SparsifierCallback

    sparsifier, other = prepared(), prepared()
    cases = {
        "sparsifier must be a sparsifier, got str": ("adam",),
        r"schedulers must be a list of torch.ao schedulers, such as \[ScheduleSL": (
            sparsifier,
            schedules.constant(0.5),
        ),
        "the ScheduleSL was made for another sparsifier": (sparsifier, [ScheduleSL(other, schedules.constant(0.5))]),
    }
    for text, given in cases.items():
        with pytest.raises(SparsityError, match=text):
            SparsifierCallback(*given)
    with pytest.raises(
        SparsityError, match=r"the sparsifier is not prepared; call prepare\(model, config\) before train"
    ):
        SparsifierCallback(ScopeSparsifier()).on_train_begin(None, None, None, model=sparsifier.model)


# calibration data


@pytest.mark.parametrize(
    ("batches", "options", "text"),
    [
        (
            [(torch.ones(2, 8), torch.ones(2))],
            {},
            r"batch \(a tuple\) is passed to Sequential as 2 positional .*forward=",
        ),
        ([{"x": torch.ones(2, 8)}], {}, r"as the keyword arguments x, which its forward does not take .* Give forward"),
        (None, {}, "batches must be a list of batches or a data loader, got NoneType"),
        (
            [torch.ones(2, 8)],
            {"token_mask": "mask"},
            "token_mask='mask' is a key of each batch, but a batch is a Tensor and no dict",
        ),
        ([torch.ones(2, 8)], {"forward": "model"}, "forward must be a function .* got 'model'"),
    ],
)
def test_calibration_data_that_the_model_does_not_take(batches, options, text):
    sparsifier = prepared(score="wanda")
    before = sparsifier.model.state_dict()["0.parametrizations.weight.original"].clone()
    with pytest.raises(SparsityError, match=text):
        one_shot(sparsifier, batches, progress=False, **options)
    if batches is not None:
        with pytest.raises(SparsityError, match=text):
            sparsifier.calibrate(batches, progress=False, **options)
    assert torch.equal(sparsifier.model[0].parametrizations.weight.original, before)


def test_layers_whose_inputs_are_not_recorded_are_named_as_such():
    model = nn.Bilinear(4, 4, 2)
    sparsifier = prepared(model, [{"tensor_fqn": "weight"}], score="wanda")
    with pytest.warns(UserWarning, match="one_shot: inputs of Bilinear are not recorded, so weight are pruned without"):
        report = one_shot(sparsifier, [(torch.ones(2, 4), torch.ones(2, 4))], progress=False)
    assert report.rows[0].note == "no inputs recorded: not compensated"


# mistakes, and what the errors say


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.table = nn.Parameter(torch.ones(4, 4)), nn.Buffer(torch.ones(4, 4))

    def save_pretrained(self, path):
        pass


def entry(**keys):
    return lambda: prepared(config=[{"tensor_fqn": "0.weight", **keys}])


MISTAKES = {
    "resume: masks must be a dict of names and masks, got 3": lambda: dynamic.inits.resume(3),
    "sparsity level must lie in [0, 1], got 50; it is a fraction, so 50 % is 0.5": entry(sparsity_level=50),
    "must lie in [0, 1], got a Tensor, which is no number": entry(sparsity_level=torch.tensor(0.5)),
    "got patterns.n_m(2, 4); give a pattern as pattern=": lambda: ScopeSparsifier(patterns.n_m(2, 4)),
    "got a Linear; give the model to prepare(model, config)": lambda: ScopeSparsifier(nn.Linear(2, 2)),
    "got 'n_m(2, 4)'; give one such as patterns.n_m(2, 4)": entry(pattern="n_m(2, 4)"),
    "unknown key 'sparsity'. Did you mean 'sparsity_level'?": entry(sparsity=0.5),
    "unknown key 'exclude'. It is an argument of prepare": entry(exclude=["2"]),
    "unknown key 'strength'. ProximalSparsifier takes it, this sparsifier does not": entry(strength=1.0),
    "unknown key 'score'. ScopeSparsifier takes it": lambda: DynamicSparsifier().prepare(
        nn.Linear(2, 2), [{"tensor_fqn": "weight", "score": "wanda"}]
    ),
    "got dict; give one such as [{'tensor_fqn': 'fc.weight'}]": lambda: prepared(config={"0.weight": 0.5}),
    "'table' matches no parameter of the model. It is a buffer": lambda: prepared(Own(), [{"tensor_fqn": "table"}]),
    "Its parameters are kernel.": lambda: prepared(Own(), [{"tensor_fqn": "weight"}]),
    "score must be a function (weight, name) -> saliency, got one of (w)": entry(score=lambda w: w),
    "is stored as torch.sparse_coo; only dense weights": lambda: prepared(
        nn.ParameterList([nn.Parameter(torch.eye(4).to_sparse())]), [{"tensor_fqn": "0"}]
    ),
    "params_to_keep_per_layer must be a dict {module: keys}, got ['0']": lambda: prepared().squash_mask(
        params_to_keep_per_layer=["0"]
    ),
    "its mask was removed in the given model, or that is no deep copy": lambda: prepared().squash_mask(
        model=linear_model(8, 8, 4)
    ),
    "0.weight: model must be a torch.nn.Module, got str": lambda: prepared().check("model"),
    "schedule must be a function (step -> number), such as schedules.cubic(": lambda: ScheduleSL(prepared(), "cubic"),
    "ScheduleSL: a schedule must give a sparsity level, a number in [0, 1]; at step 0 it gave 'x'": lambda: ScheduleSL(
        prepared(), lambda step: "x"
    ),
    "end of a schedule must be a finite number, got nan": lambda: schedules.linear(0.0, float("nan"), 3),
    "join: schedules must be a function": lambda: schedules.join([schedules.constant(0.0), 0.5], [3]),
    "join: schedules must be a list of at least one": lambda: schedules.join([], []),
    "drop_fraction: target is a sparsity": lambda: schedules.drop_fraction("a", 0.5),
    "until must be an int >= 1, got 'end'": lambda: RigL(0.5, until="end"),
    "export: model must be a torch.nn.Module, got ScopeSparsifier; pass its .model": lambda: export.report(prepared()),
    "Own.save_pretrained takes no state_dict. Squash a deep copy": lambda: export.save_pretrained(Own(), {}, "x"),
    "multiple_of must be a positive int, got 0": lambda: removal.shrink(
        linear_model(8, 8, 4), torch.ones(2, 8), multiple_of=0
    ),
    "for_model: model must be a torch.nn.Module, got str": lambda: coupling.for_model("bert"),
    "coupling 'a': model must be a torch.nn.Module, got list": lambda: Coupling({"a": "u"}).entries([]),
    "joint_entries: couplings must be a list of Coupling, got Linear": lambda: coupling.joint_entries(
        nn.Linear(2, 2), nn.Linear(2, 2)
    ),
    "the parameter must be a tensor, got ndarray": lambda: BlockSpec(np.ones((2, 2))),
    "BlockCoupling takes a list of BlockSpec, got Tensor": lambda: BlockCoupling([torch.ones(2)]),
    "ScopeCoupling takes a list of ScopeSpec, got Tensor": lambda: ScopeCoupling([torch.ones(2)]),
    "soft_threshold needs a number or a tensor, got '1'": lambda: ScopeSpec(torch.ones(2)).soft_threshold("1"),
    "scores must be a tensor [scopes, members], got list": lambda: keep_mask([[1.0]], 1),
    "plot_mask needs a mask, such as sparsifier.mask(name), got str": lambda: plot_mask("0.weight"),
    "plot_layers needs sparsekit_ao.export.report(model), got a Report": lambda: plot_layers(prepared().report()),
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_explained(text):
    with pytest.raises(SparsityError, match=re.escape(text)):
        MISTAKES[text]()
