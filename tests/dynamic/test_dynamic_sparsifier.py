"""A dynamic sparsifier from start to end: initial masks, optimizer state, resuming, copies, wrong arguments."""

import copy
import itertools
import re
from functools import partial

import pytest
import torch
from grids import grid
from growing import OPTIMIZERS, backward, equal, loss_of, masks, mlp, prepared, train, weights
from stock import refuses, reloaded, same, stepped
from torch import nn

from sparsekit_ao import (
    GMP,
    SET,
    SNFS,
    DynamicSparsifier,
    ProximalSparsifier,
    RigL,
    ScopeSparsifier,
    SparsityError,
    Static,
    dynamic,
    patterns,
)
from sparsekit_ao.dynamic import inits
from sparsekit_ao.sparsifiers.optimizer_state import reset_state


def original(model, fqn):
    return model.get_submodule(fqn.removesuffix(".weight")).parametrizations.weight.original


# initial masks


def test_lenet_starts_with_the_golden_counts():
    model = nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10))
    sparsifier = Static(sparsity_level=0.9)
    sparsifier.prepare(model, None)
    assert [int(m.sum()) for m in masks(sparsifier).values()] == [18714, 6906, 1000]
    assert sparsifier.check() == 3


def test_uniform_and_first_dense():
    _, _, sparsifier = prepared(init="uniform")
    assert [r.sparsity for r in sparsifier.report()] == [0.75] * 3
    _, _, sparsifier = prepared(init=inits.random_blocks("erk", first_dense=True), sparsity_level=0.5)
    assert sparsifier.mask("0.weight").all()
    assert sum(int(m.sum()) for m in masks(sparsifier).values()) == 288


def test_a_lottery_ticket_from_masks_a_checkpoint_or_a_sparsifier():
    model, _, first = prepared(seed=3)
    want = masks(first)
    for source in (want, first.state_dict(), model.state_dict()):
        _, _, second = prepared(sparsity_level=None, init=inits.lottery_ticket(source))
        assert equal(want, masks(second)) and second.check() == 3


def test_a_shuffled_ticket_keeps_counts_and_moves_places():
    _, _, first = prepared(scope_shape=(1, -1))
    ticket = inits.lottery_ticket(first.state_dict(), shuffle=True)
    _, _, second = prepared(sparsity_level=None, init=ticket, scope_shape=(1, -1))
    for name, kept in masks(second).items():
        assert torch.equal(kept.sum(1), masks(first)[name].sum(1))
        assert not torch.equal(kept, masks(first)[name])


def test_resume_takes_the_zeros_of_the_weights():
    model = mlp()
    scope = stepped(model, sparsity_level=0.75)
    want = masks(scope)
    scope.squash_mask()
    _, _, sparsifier = prepared(model=model, init="resume", sparsity_level=None)
    assert equal(want, masks(sparsifier))


@pytest.mark.parametrize(
    ("saved", "structure", "message"),
    [
        ({"9.weight": torch.ones(2)}, {}, "0.weight: the saved masks have none for it, only for ['9.weight']"),
        ({"0.weight": torch.ones(2)}, {}, "0.weight: the saved mask is (2,), the weight (16, 12)"),
        ("half", {"block_shape": (2, 2)}, "0.weight: the saved mask keeps parts of blocks; give the block_shape"),
        ("half", {"scope_shape": (1, -1)}, "0.weight: scopes of the saved mask keep from 5 to 6 blocks, and every"),
        ("half", {"nnz": 7}, "mutually exclusive; give one"),
    ],
)
def test_saved_masks_that_do_not_fit(saved, structure, message):
    if saved == "half":
        half = torch.arange(16 * 12).reshape(16, 12) % 2 == 0
        half[0, 0] = False
        saved = {"0.weight": half}
    model = mlp()
    before = weights(model)
    with refuses(message):
        DynamicSparsifier(init=inits.lottery_ticket(saved), **structure).prepare(model, [{"tensor_fqn": "0.weight"}])
    assert equal(before, weights(model))


def test_a_saved_mask_must_agree_with_an_entry_that_has_a_budget():
    config = [{"tensor_fqn": "0.weight", "nnz": 7}]
    sparsifier = DynamicSparsifier(init=inits.lottery_ticket({"0.weight": torch.ones(16, 12)}))
    with pytest.raises(SparsityError, match="the saved mask keeps 192 .. 192 blocks in each scope, but its config"):
        sparsifier.prepare(mlp(), config)


# optimizer state


@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k != "sgd"])
def test_grown_and_pruned_weights_and_their_state_are_zero(kind):
    model, optimizer, sparsifier = prepared(kind, update_every=3)
    train(model, optimizer, sparsifier, range(1, 3))
    old = masks(sparsifier)
    train(model, optimizer, sparsifier, [3])
    moved = 0
    for name, new in masks(sparsifier).items():
        weight = original(model, name)
        changed = new ^ old[name]
        moved += int(changed.sum())
        assert not weight[changed].any()
        state = [t for t in optimizer.state[weight].values() if torch.is_tensor(t) and t.shape == weight.shape]
        assert state
        for tensor in state:
            assert not tensor[changed].any() and tensor[new & old[name]].any()
    assert moved > 0


def test_state_of_any_depth_is_zeroed():
    class Odd(torch.optim.SGD):
        pass

    w = nn.Parameter(torch.ones(2, 2))
    optimizer = Odd([w], 0.1)
    inner = torch.ones(2, 2)
    optimizer.state[w] = {"nested": [{"deep": inner}], "other": torch.ones(3), "step": torch.tensor(5.0)}
    reset_state([optimizer], w, torch.eye(2, dtype=torch.bool))
    assert inner.tolist() == [[0, 1], [1, 0]]
    assert optimizer.state[w]["other"].all() and optimizer.state[w]["step"] == 5


def first_step(state_init):
    """How far grown weights move in their first step, in learning rates, late in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    sparsifier = DynamicSparsifier(sparsity_level=0.5, optimizer=optimizer, update_every=2, state_init=state_init)
    sparsifier.prepare(model, None)
    weight = model[0].parametrizations.weight.original
    gradient = torch.randn(16, 16).sign()
    for _ in range(2):
        weight.grad = gradient.clone()
        optimizer.step()
        sparsifier.step()
    grown = (sparsifier.mask("0.weight") != 0) & (weight == 0)
    optimizer.state[weight]["step"].fill_(10_000)  # late in training
    weight.grad = gradient.clone()
    optimizer.step()
    return (weight.detach()[grown].abs() / 1e-3).mean().item()


def test_adam_makes_a_long_first_step_from_zero_and_none_from_the_gradient():
    assert first_step("zero") == pytest.approx(3.16, abs=0.01)
    assert first_step("grad") == pytest.approx(0.1, abs=0.001)


@pytest.mark.filterwarnings("ignore")  # torchao's, when it is compiled
@pytest.mark.parametrize("kind", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (RigL, {"until": 20}),
        (SET, {}),
        (GMP, {"until": 20}),
        (SNFS, {"until": 4}),
        (DynamicSparsifier, {"state_init": "grad"}),
    ],
)
def test_quantized_state_of_torchaos_optimizers(kind, make, options):
    optimizers = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = getattr(optimizers, kind)(model.parameters(), lr=1e-2)
    sparsifier = make(0.75, optimizer, update_every=2, **options)
    sparsifier.prepare(model)
    parameter, (x, y) = model[0].parametrizations.weight.original, torch.randn(2, 32, 64)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(6):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            before = optimizer.state[parameter]["exp_avg"].dequantize()
            sparsifier.step()
    assert sparsifier.check() and sparsifier.last_update.iteration == (4 if make is SNFS else 6)
    dropped, state = sparsifier.mask("0.weight") == 0, optimizer.state[parameter]
    after = state["exp_avg"].dequantize()
    assert type(state["exp_avg"]).__name__.startswith("OptimState") and (parameter[dropped] == 0).all()
    assert (after[dropped] == 0).all() and (after[~dropped] != 0).any()
    kept = ~dropped & (after != 0)
    torch.testing.assert_close(after[kept], before[kept], rtol=0.3, atol=float(before.abs().max()) / 4)


@pytest.mark.parametrize("late", [False, True])
def test_state_that_only_the_optimizer_can_read_is_refused_before_anything_changes(late):
    model, optimizer, sparsifier = prepared("momentum", update_every=1)
    before = weights(model)
    if late:
        backward(model, optimizer, 0)
        optimizer.step()
        before = weights(model)
    for parameter in model.parameters():
        optimizer.state[parameter]["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
    with pytest.raises(SparsityError, match=r"0.weight: its optimizer keeps state as Tensor of torch.uint8, which can"):
        sparsifier.step() if late else sparsifier.attach(optimizer)
    assert equal(weights(model), before)
    sparsifier = ScopeSparsifier()  # as the error advises
    sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))
    sparsifier.attach(optimizer)


def test_second_moments_of_grown_weights_are_squared_gradients():
    model, optimizer, sparsifier = prepared("adam", update_every=2, state_init="grad", grow="random")
    train(model, optimizer, sparsifier, [1])
    backward(model, optimizer, 2)
    weight = model[2].parametrizations.weight.original
    gradient, old = weight.grad.clone(), masks(sparsifier)["2.weight"]
    optimizer.step()
    sparsifier.step()
    grown = masks(sparsifier)["2.weight"] & ~old
    assert grown.any()
    for key in ("exp_avg_sq", "max_exp_avg_sq"):
        assert torch.equal(optimizer.state[weight][key][grown], gradient[grown] ** 2)
    assert not optimizer.state[weight]["exp_avg"][grown].any()


NO_SQUARES = "0.weight: state_init='grad' sets second moments, but its optimizer keeps none"


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_state_init_grad_is_refused_in_prepare_where_no_second_moments_will_be(kind):
    model = mlp()
    with pytest.raises(SparsityError, match=NO_SQUARES):
        prepared(kind, model=model, state_init="grad")
    assert type(model[0]) is nn.Linear
    sparsifier = DynamicSparsifier(state_init="grad")
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match=NO_SQUARES):
        sparsifier.attach(OPTIMIZERS[kind](model.parameters()))


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.NAdam])
def test_state_init_grad_goes_with_every_optimizer_that_squares(make):
    model = mlp()
    optimizer = make(model.parameters())
    sparsifier = DynamicSparsifier(sparsity_level=0.75, optimizer=optimizer, update_every=2, state_init="grad")
    sparsifier.prepare(model, None)
    train(model, optimizer, sparsifier, [1, 2])
    assert sparsifier.last_update.iteration == 2


def test_second_moments_that_turn_out_missing_are_refused_before_anything_changes():
    model = mlp()
    optimizer = torch.optim.Adamax(model.parameters())  # has Adam's options, and a norm that is no mean of squares
    sparsifier = DynamicSparsifier(sparsity_level=0.75, optimizer=optimizer, state_init="grad", update_every=1)
    sparsifier.prepare(model, None)
    loss_of(model, 1).backward()
    optimizer.step()
    before, old = weights(model), masks(sparsifier)
    with pytest.raises(SparsityError, match=NO_SQUARES):
        sparsifier.step()
    assert equal(before, weights(model)) and equal(old, masks(sparsifier))


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.SGD])
def test_momentum_is_asked_for_only_where_masks_move_by_it(make):
    model = mlp()
    optimizer = make(model.parameters())
    with pytest.raises(SparsityError, match=f"0.weight: its optimizer .{make.__name__}. keeps no momentum. Use SGD"):
        SNFS(0.75, optimizer=optimizer, until=100).prepare(model, None)
    assert type(model[0]) is nn.Linear
    Static(0.75, optimizer=optimizer, grow="momentum").prepare(model, None)


def test_new_weights_may_take_other_values():
    def small(weight, generator):
        return torch.rand(weight.shape, generator=generator) + 1

    model, optimizer, sparsifier = prepared(update_every=1, new_values=small)
    old = masks(sparsifier)
    train(model, optimizer, sparsifier, [1])
    for name, new in masks(sparsifier).items():
        weight = original(model, name)
        assert bool((weight[new & ~old[name]] >= 1).all()) and not weight[~new].any()


# resuming

METHODS = {
    "RigL": partial(RigL, until=20, update_every=3),
    "SET": partial(SET, update_every=3),
    "SNFS": partial(SNFS, until=20, update_every=3),
    "GMP": partial(GMP, until=12, update_every=3),
    "RigL rows, global": partial(
        RigL, until=20, update_every=3, prune="global", redistribute="gradient", scope_shape=(1, -1)
    ),
    "proximal": ProximalSparsifier,
}
MOMENTS = ["after the iteration", "before the sparsifier's step"]
RESUMED = (METHODS, ["momentum", "adam"], [2, 3, 6], MOMENTS)


def fresh(kind):
    model = mlp()
    return model, OPTIMIZERS[kind](model.parameters())


def setup(method, kind):
    model, optimizer = fresh(kind)
    sparsifier = METHODS[method](sparsity_level=0.8, optimizer=optimizer)
    sparsifier.prepare(model, None)
    return model, optimizer, sparsifier


def continued(run, how, method, kind):
    """The run as it is now, in other objects."""
    if how == "copy":
        return copy.deepcopy(run)
    model, optimizer = fresh(kind)
    states = reloaded([part.state_dict() for part in run])
    sparsifier = METHODS[method](sparsity_level=0.8)
    calls = {
        "prepare": lambda: sparsifier.prepare(model),
        "attach": lambda: sparsifier.attach(optimizer),
        "load": lambda: sparsifier.load_state_dict(states[2]),
        "weights": lambda: (model.load_state_dict(states[0]), optimizer.load_state_dict(states[1])),
    }
    for name in how.split(", "):
        calls[name]()
    return model, optimizer, sparsifier


LOADED = "prepare, attach, weights, load"
OTHERWISE = ["prepare, load, attach, weights", "attach, prepare, weights, load", "copy"]


@pytest.mark.parametrize(
    ("method", "kind", "at", "moment", "how"), [*grid(*RESUMED, [LOADED]), *grid(*RESUMED, OTHERWISE)]
)
def test_a_resumed_or_copied_run_equals_an_uninterrupted_one(method, kind, at, moment, how):
    straight, resumed = setup(method, kind), None
    for step in range(1, 10):
        for run in filter(None, (straight, resumed)):
            backward(run[0], run[1], step)
            if step != 6:  # a skipped step defers this update
                run[1].step()
        if step == at and moment != "after the iteration":
            resumed = continued(straight, how, method, kind)
        for run in filter(None, (straight, resumed)):
            run[2].step()
        if step == at and moment == "after the iteration":
            resumed = continued(straight, how, method, kind)
    assert equal(weights(straight[0]), weights(resumed[0])) and equal(masks(straight[2]), masks(resumed[2]))
    for p, q in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert same(straight[1].state[p], resumed[1].state[q])
    assert resumed[2].iteration == straight[2].iteration == (8 if method == "proximal" else 9)
    if method != "proximal":
        assert resumed[2].last_update == straight[2].last_update and straight[2].last_update.iteration == 9


def test_moving_to_bf16_keeps_training():
    model, optimizer, sparsifier = prepared(update_every=1)
    model.to(torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 12, dtype=torch.bfloat16)
        model(x).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    assert sparsifier.check() == 3 and sparsifier.mask("0.weight").dtype == torch.bfloat16


def test_updates_stop_while_disabled_and_after_until():
    model, optimizer, sparsifier = prepared(update_every=1, until=3)
    sparsifier.enable_mask_update = False
    train(model, optimizer, sparsifier, [1])
    assert sparsifier.last_update is None
    sparsifier.enable_mask_update = True
    train(model, optimizer, sparsifier, range(2, 7))
    assert sparsifier.last_update.iteration == 3


def test_the_documentation_names_modules_that_exist():
    named = set(re.findall(r"(?:from|criterion of) `(\w+)`", DynamicSparsifier.__doc__))
    assert named == {"inits", "criteria"} and all(hasattr(dynamic, name) for name in named)


def test_the_level_comes_first_and_the_optimizer_second():
    optimizer = torch.optim.SGD(mlp().parameters(), 0.1)
    for make in (Static, SET, partial(RigL, until=900), partial(SNFS, until=900), partial(GMP, until=200)):
        sparsifier = make(0.8, optimizer)
        assert sparsifier._capture.optimizers == [optimizer]
        target = sparsifier.settings.target
        assert (sparsifier.defaults["sparsity_level"] if target is None else target(200)) == 0.8
        with pytest.raises(SparsityError, match="the first argument is sparsity_level, got SGD; pass the optimizer as"):
            make(optimizer, 0.8)
        with pytest.raises(SparsityError, match="the first argument is sparsity_level, got SGD; pass the optimizer as"):
            make([optimizer])


# wrong arguments


def half(iteration):
    return 0.5


ARGUMENTS = [
    ({"target": half, "update_every": None}, "target takes effect in updates, and update_every=None means that"),
    ({"target": half, "grow": None, "update_fraction": 0.5}, "update_fraction has no effect, because nothing"),
    ({"update_every": 0}, "update_every must be an int >= 1, got 0"),
    ({"until": -1}, "until must be an int >= 0, got -1"),
    ({"seed": 0.5}, "seed must be an int >= 0, got 0.5"),
    ({"update_fraction": 1.0}, "update_fraction must be a schedule or a number in [0, 1), got 1.0"),
    ({"prune": "smallest"}, "prune must be one of 'magnitude', 'global', 'random', a Criterion or a function"),
    ({"prune": None}, "prune must be a criterion; for masks that never change use update_every=None"),
    ({"grow": "grad"}, "grow must be one of 'gradient', 'momentum', 'random', 'none', a Criterion or a function"),
    ({"redistribute": 3}, "redistribute must be one of 'gradient', 'momentum', 'nonzero', 'none', a Criterion or"),
    ({"grow": None, "redistribute": "nonzero"}, "redistribute distributes what grows, but grow is None"),
    ({"init": "rigl"}, "init must be one of 'random', 'uniform', 'er', 'erk', 'resume', an Init or a function"),
    ({"target": 0.5}, "target must be a schedule (iteration -> sparsity) or None, got 0.5"),
    ({"state_init": "one"}, "state_init must be 'zero' or 'grad', got 'one'"),
    ({"new_values": 0.1}, "new_values must be a function (weight, generator) -> values or None, got 0.1"),
    ({"sparsity_level": 0.5, "nnz": 2}, "sparsity_level and nnz are mutually exclusive; give one"),
    ({"sparsity_level": 0.5, "target": half}, "sparsity_level and target are mutually exclusive; give one"),
    ({"sparsity_level": 0.5, "init": "resume"}, "sparsity_level and init='resume' are mutually exclusive; give one"),
    ({"target": lambda t: 2.0}, "target: an overall sparsity must be in [0, 1], got 2.0 at iteration 0"),
    ({"optimizer": 3}, "optimizer must be a torch optimizer or several, got int"),
    ({"optimizer": []}, "attach: no optimizer was given"),
]
OF_GMP = [
    ({"update_every": 0}, "GMP: update_every must be an int >= 1, got 0"),
    ({"update_every": None}, "GMP: update_every must be an int >= 1, got None"),
    ({"until": "1000"}, "GMP: until must be an int >= 1, got '1000'"),
    ({"begin": "a"}, "GMP: begin must be an int, got 'a'"),
    ({"until": 99}, "GMP: no update falls between begin=0 and until=99 (every 100)"),
    ({"target": half}, "GMP: the target is made from sparsity_level, begin"),
]
OF_RULES = [
    (lambda: dynamic.criteria.magnitude("sum"), "magnitude: pooling must be a function such as torch.amax, or None"),
    (lambda: inits.random_blocks("ER"), "distribution must be one of uniform, er, erk, or a function, got 'ER'"),
    (lambda: inits.lottery_ticket({}), "lottery_ticket needs a non-empty mapping of masks, got dict"),
]
CALLS = [*((partial(DynamicSparsifier, **given), text) for given, text in ARGUMENTS), *OF_RULES]
CALLS += [(partial(GMP, **{"until": 200, **given}), text) for given, text in OF_GMP]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_arguments_that_do_not_fit(call, message):
    with refuses(message):
        call()


@pytest.mark.parametrize("key", ["stages", "score", "member_scores", "levle"])
def test_arguments_that_it_does_not_have(key):
    with pytest.raises(TypeError, match=f"DynamicSparsifier has no argument '{key}'..*It takes axes, block_coupling,"):
        DynamicSparsifier(**{key: None})
    with pytest.raises(SparsityError, match=f"unknown key '{key}'"):
        DynamicSparsifier().prepare(mlp(), [{"tensor_fqn": "0.weight", key: None}])


def test_patterns_with_a_count_a_level_or_stages():
    model = mlp()
    DynamicSparsifier(pattern=patterns.n_m(2, 4)).prepare(model, [{"tensor_fqn": "0.weight"}])
    mask = model[0].parametrizations.weight[0].mask
    assert mask.view(-1, 4).sum(1).eq(2).all()
    sparsifier = DynamicSparsifier(pattern=patterns.rows(0.5), init="uniform")
    sparsifier.prepare(mlp(), None)
    assert sparsifier.defaults["sparsity_level"] == 0.5 and sparsifier.mask("0.weight").any(1).float().mean() == 0.5
    with refuses("0.weight: patterns.v_n_m(2, 2, 4) needs the key 'stages', which this sparsifier"):
        DynamicSparsifier(pattern=patterns.v_n_m(2, 2, 4)).prepare(mlp(), None)


def test_update_mask_keeps_the_largest_weights_at_the_present_budget():
    model, _, sparsifier = prepared(update_every=None)
    kept = int(sparsifier.mask("0.weight").sum())
    weight = model[0].parametrizations.weight.original
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view(weight.shape))
    sparsifier.update_mask(model[0], "weight")
    assert sparsifier.mask("0.weight").flatten().nonzero()[:, 0].tolist() == [
        *range(weight.numel() - kept, weight.numel())
    ]
    assert (weight != 0).sum() == kept


def test_calls_out_of_place():
    sparsifier = DynamicSparsifier()
    with pytest.raises(SparsityError, match="take_gradients: no model has been prepared"):
        sparsifier.take_gradients()
    model = mlp()
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match=r"attach: no optimizer was given"):
        sparsifier.attach([])
    with pytest.raises(SparsityError, match="call sparsifier.attach"):
        sparsifier.step()
    assert sparsifier.iteration == 0


def test_a_rule_that_does_not_declare_what_it_needs():
    def careless(slots):
        return slots.scores(slots.gradients)

    model, optimizer, sparsifier = prepared(update_every=1, grow=careless)
    backward(model, optimizer, 1)
    optimizer.step()
    with pytest.raises(SparsityError, match="0.weight: a criterion reads values that were not gathered; list them"):
        sparsifier.step()
    with pytest.raises(SparsityError, match="needs are some of"):
        dynamic.Criterion(name="x", score=careless, needs=("gradients",))


@pytest.mark.parametrize("loads", ["model", "sparsifier"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_dropped_weights_are_zero_in_the_step_after_a_load(loads, make):
    model = mlp()
    dense = copy.deepcopy(model.state_dict())
    optimizer = make(model.parameters(), 0.1)
    sparsifier = RigL(0.8, optimizer, until=100, update_every=5)
    sparsifier.prepare(model)
    if loads == "model":
        model.load_state_dict(dense)
    else:
        other_model = mlp()
        other = RigL(0.8, torch.optim.SGD(other_model.parameters(), 0.1), until=100, update_every=5, seed=7)
        other.prepare(other_model)
        sparsifier.load_state_dict(other.state_dict())
    loss_of(model, 1).backward()
    optimizer.step()
    sparsifier.step()
    for group in sparsifier.groups:
        weight = group["module"].parametrizations.weight.original
        assert not weight[sparsifier.mask(group["tensor_fqn"]) == 0].any()


def test_a_squash_that_fails_on_a_gradient_can_be_repeated():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = RigL(0.8, optimizer, until=100)
    sparsifier.prepare(model)
    parameter = model[0].parametrizations.weight.original
    parameter.grad = torch.zeros_like(parameter).to_sparse()
    with pytest.raises(Exception, match=r".+"):
        sparsifier.squash_mask()
    parameter.grad = None
    sparsifier.squash_mask()
    assert type(model[0]) is nn.Linear and (model[0].weight == 0).any()


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("saved", "loaded"), [((8, 4, 3), (8, 2, 3)), ((8, 6, 3), (8, 4, 5)), ((8, 4), (4, 8))])
def test_state_of_another_model_is_refused(saved, loaded, biases):
    other, model = (
        nn.Sequential(*(nn.Linear(a, b, bias=biases) for a, b in itertools.pairwise(widths)))
        for widths in (saved, loaded)
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (other, model)]
    other(torch.randn(2, 8)).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    sparsifier = RigL(0.5, until=1000)
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="in another order, or for another model"):
        sparsifier.attach(optimizers[1])


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (3, 16)])
def test_state_of_low_rank_may_have_the_shape_of_another_parameter(shape):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model[0].weight] = {"exp_avg": torch.zeros(shape), "step_size": torch.ones(())}
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, None)
    sparsifier.attach(optimizer)


def test_state_of_low_rank_is_no_state_of_another_parameter():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model)
    weight = model[0].parametrizations.weight.original
    optimizer.state[weight] = {"exp_avg": torch.zeros(2, weight.shape[1] + 1)}  # as GaLore keeps it
    sparsifier.attach(optimizer)
    optimizer.state[weight] = {"exp_avg": torch.zeros_like(model[0].bias)}  # loaded from another order
    with pytest.raises(SparsityError, match="its state was saved for a model in which other tensors"):
        sparsifier.attach(optimizer)
