"""Growth sees the gradient of a plain dense model, in every kind of training loop, and training does not notice."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from grids import EXHAUSTIVE, turns
from growing import (
    OPTIMIZERS,
    Recorder,
    backward,
    batch,
    dense_gradients,
    loss_of,
    mlp,
    prepared,
    step_by_closure,
    weights,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparsekit_ao import DynamicSparsifier, SparsityError, Static, dynamic

STEPS = 7


def plain(model, optimizer, sparsifier, step, state, scales=False, clips=False, parts=1):
    scaler = state.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scales))
    x, y = batch(step)
    optimizer.zero_grad()
    for rows, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
        scaler.scale(F.cross_entropy(model(rows), wanted) / parts).backward()
    if clips:
        scaler.unscale_(optimizer)
        sparsifier.take_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()


accumulated, clipped, scaled = partial(plain, parts=4), partial(plain, clips=True), partial(plain, scales=True)


def checkpointed(model, optimizer, sparsifier, step, state, reentrant=False):
    x, y = batch(step)
    optimizer.zero_grad()
    hidden = checkpoint(model[:3], x.requires_grad_(reentrant), use_reentrant=reentrant)
    F.cross_entropy(checkpoint(model[3:], hidden, use_reentrant=reentrant), y).backward()
    optimizer.step()


def by_closure(model, optimizer, sparsifier, step, state):
    step_by_closure(model, optimizer, step)


def taken_before_a_closure_that_makes_none(model, optimizer, sparsifier, step, state):
    backward(model, optimizer, step)
    sparsifier.take_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step(lambda: None)


def taken_before_a_state_is_loaded(model, optimizer, sparsifier, step, state):
    backward(model, optimizer, step)
    sparsifier.take_gradients()
    sparsifier.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    optimizer.step()  # its hook finds masked gradients


def taken_after_every_part(model, optimizer, sparsifier, step, state):
    x, y = batch(step)
    optimizer.zero_grad()
    for rows in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
        sparsifier.take_gradients()
    optimizer.step()


LOOPS = [plain, accumulated, clipped, scaled, partial(plain, scales=True, clips=True), checkpointed, by_closure]
LOOPS += [partial(checkpointed, reentrant=True), taken_before_a_state_is_loaded, taken_after_every_part]
CASES = [(loop, "momentum") for loop in LOOPS]
CASES += [(taken_before_a_closure_that_makes_none, kind) for kind in ("momentum", "adam")]
CASES += [(loop, kind) for kind, loop in turns(OPTIMIZERS, [(plain,), (scaled,), (clipped,)])]


@pytest.mark.parametrize(("loop", "kind"), CASES)
def test_growth_sees_the_gradient_of_a_dense_model(loop, kind):
    recorder = Recorder()
    model, optimizer, sparsifier = prepared(kind, grow=recorder)
    state = {}
    for step in range(1, STEPS):
        want = dense_gradients(model, step)
        loop(model, optimizer, sparsifier, step, state)
        sparsifier.step()
        recorder.compare(step, want)
        for name, gradient in recorder.seen.get(step, {}).items():
            assert bool((gradient[sparsifier.mask(name) == 0] != 0).any()), "only masked gradients were seen"


@pytest.mark.parametrize(("loop", "kind"), CASES)
def test_open_iterations_train_as_closed_ones(loop, kind):
    runs = []
    for arguments in ({"update_fraction": 0.0}, {"kind": Static, "update_every": None}):
        model, optimizer, sparsifier = prepared(kind, **arguments)
        state = {}
        for step in range(1, STEPS):
            loop(model, optimizer, sparsifier, step, state)
            sparsifier.step()
        runs.append(weights(model))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_gradients_are_dense_only_in_iterations_that_feed_an_update():
    model, optimizer, sparsifier = prepared(update_every=3, until=6)
    dense = []
    for step in range(1, 10):
        backward(model, optimizer, step)
        hidden = model[0].parametrizations.weight.original.grad[sparsifier.mask("0.weight") == 0]
        dense.append(bool((hidden != 0).any()))
        optimizer.step()
        sparsifier.step()
    assert [k for k, is_dense in enumerate(dense, 1) if is_dense] == [3, 6]


def test_random_growth_never_opens_the_masks():
    model, optimizer, sparsifier = prepared(grow="random", update_every=1)
    for step in range(3):
        backward(model, optimizer, step)
        assert not model[0].parametrizations.weight.original.grad[sparsifier.mask("0.weight") == 0].any()
        optimizer.step()
        sparsifier.step()
    assert sparsifier.last_update.iteration == 3


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if EXHAUSTIVE else [])])
def test_one_graph_and_no_recompiles(backend):
    recorder = Recorder()
    model, optimizer, sparsifier = prepared(grow=recorder)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(1, 6):
        want = dense_gradients(model, step)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            loss_of(compiled, step).backward()
        optimizer.step()
        sparsifier.step()
        recorder.compare(step, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["momentum", "adam", "fused adam", "fused sgd"])
@pytest.mark.parametrize("grow", ["gradient", "random"])
def test_a_step_that_the_scaler_skips_defers_the_update(kind, grow):
    model, optimizer, sparsifier = prepared(kind, grow=grow, update_every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    updated = []
    for step in range(1, 7):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * math.inf if step in (3, 4) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
        updated.append(sparsifier.last_update and sparsifier.last_update.iteration)
    assert updated == [None, None, None, None, 5, 6]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_gradient_that_is_not_finite_defers_the_update():
    model, optimizer, sparsifier = prepared()
    for step in range(1, 4):
        backward(model, optimizer, step)
        if step == 2:
            hidden = (sparsifier.mask("2.weight") == 0).nonzero()[0]
            model[2].parametrizations.weight.original.grad[tuple(hidden)] = math.nan
        optimizer.step()
        sparsifier.step()
    assert sparsifier.last_update.iteration == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_missing_gradient_defers_the_update_and_warns_when_the_next_is_due():
    model, optimizer, sparsifier = prepared(update_every=2, until=4)
    for step in range(1, 6):
        optimizer.zero_grad()
        loss_of(model[:3], step).backward()  # the last layer gets none
        optimizer.step()
        if step >= 4:  # another is due, and then `until` is over
            due = {4: 2, 5: 4}[step]
            with pytest.warns(UserWarning, match=f"due in iteration {due} never happened: an optimizer took no step"):
                sparsifier.step()
        else:
            sparsifier.step()
    assert sparsifier.last_update is None
    assert not sparsifier.state_dict()["dynamic"]["pending"]  # `until` has passed


def test_momentum_growth_sees_momentum_of_dense_gradients_also_when_clipped():
    seen = {}

    def recording(slots):
        seen[slots.iteration] = {
            slots.name: next(iter(slots.momenta.values())).clone(),
            **seen.get(slots.iteration, {}),
        }
        return slots.scores(slots.momenta)

    recording.needs = ("momentum",)
    for clips in (False, True):
        seen.clear()
        model, optimizer, sparsifier = prepared("momentum", grow=recording, update_every=4)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        expected = {}
        for step in range(1, 5):
            for name, gradient in dense_gradients(model, step).items():
                expected[name] = gradient if step == 1 else 0.9 * expected[name] + gradient
            backward(model, optimizer, step)
            if clips:
                sparsifier.take_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            hidden = {n: sparsifier.mask(n) == 0 for n in expected}
            sparsifier.step()
            for group in sparsifier.groups:  # momentum moved hidden weights; they are zero again
                weight = group["module"].parametrizations.weight.original
                assert not weight[sparsifier.mask(group["tensor_fqn"]) == 0].any()
        for name, want in expected.items():
            torch.testing.assert_close(seen[4][name], want, rtol=0, atol=1e-6)
            assert bool(seen[4][name][hidden[name]].any())


@pytest.mark.parametrize("clips", [False, True])
def test_a_bad_gradient_of_a_hidden_weight_does_not_stay_in_the_momentum(clips):
    model, optimizer, sparsifier = prepared("momentum", grow="momentum", update_every=2)
    for step in range(1, 5):
        backward(model, optimizer, step)
        if step in (1, 2):
            hidden = tuple((sparsifier.mask("2.weight") == 0).nonzero()[0])
            model[2].parametrizations.weight.original.grad[hidden] = math.inf
        if clips:
            sparsifier.take_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sparsifier.step()
        assert (sparsifier.last_update is not None) == (step >= 3)  # it waited in iteration 2
    assert sparsifier.last_update.iteration == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(torch.isfinite(s["momentum_buffer"]).all() for s in optimizer.state.values())


def test_an_update_waits_until_every_optimizer_has_stepped():
    model = mlp()
    optimizers = [OPTIMIZERS[kind](part.parameters()) for kind, part in (("sgd", model[0]), ("adam", model[2:]))]
    sparsifier = DynamicSparsifier(sparsity_level=0.75, optimizer=optimizers, update_every=2)
    sparsifier.prepare(model, None)
    for step in range(1, 4):
        model.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers[: 1 if step == 2 else 2]:
            optimizer.step()
        sparsifier.step()
    assert sparsifier.last_update.iteration == 3


def test_a_backward_mask_is_no_part_of_a_checkpoint_unless_it_is_chosen():
    names = dynamic.DynamicMask(torch.ones(2, 2)).state_dict().keys()
    assert set(names) == {"mask"}
    assert set(dynamic.DynamicMask(torch.ones(2, 2), with_backward_mask=True).state_dict()) == {"mask", "backward_mask"}


def test_masked_infinities_stay_out_of_an_open_forward_and_backward():
    mask = dynamic.DynamicMask(torch.tensor([1.0, 0.0]))
    weight = torch.tensor([2.0, math.inf], requires_grad=True)
    for is_open, want in ((False, [3.0, 0.0]), (True, [3.0, 5.0])):
        weight.grad = None
        mask.set_open(is_open)
        out = mask(weight)
        assert out.tolist() == [2.0, 0.0]
        (out * torch.tensor([3.0, 5.0])).sum().backward()
        assert weight.grad.tolist() == want


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(SparsityError, match=r"mask \(2,\) does not fit the weight \(3,\)"):
        dynamic.DynamicMask(torch.ones(2))(torch.ones(3))


def test_second_derivatives_and_per_sample_gradients_work_through_open_masks():
    mask = dynamic.DynamicMask(torch.tensor([1.0, 0.0]))
    mask.set_open(True)
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    (first,) = torch.autograd.grad((mask(weight) ** 3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert first.tolist() == [12.0, 0.0] and second.tolist() == [12.0, 0.0]
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (mask(w) * x).sum()), (None, 0))(weight, torch.eye(2))
    assert per_sample.tolist() == [[1.0, 0.0], [0.0, 1.0]]
