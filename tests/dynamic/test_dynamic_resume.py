"""Going on in the middle of an update: states that do not fit, and errors after which it may be tried again."""

import pytest
import torch
from growing import backward, equal, masks, mlp, prepared, train, weights
from stock import refuses

from sparsekit_ao import DynamicSparsifier, SparsityError


def in_the_middle(kind="momentum", **arguments):
    """Between the optimizer's step and the sparsifier's, where an update is due."""
    model, optimizer, sparsifier = prepared(kind, **arguments)
    train(model, optimizer, sparsifier, [1])
    backward(model, optimizer, 2)
    optimizer.step()
    return model, optimizer, sparsifier


def same(first, second):
    assert first[2].last_update == second[2].last_update and first[2].last_update is not None
    assert equal(masks(first[2]), masks(second[2])) and equal(weights(first[0]), weights(second[0]))


def test_what_was_restored_counts_for_one_iteration():
    saved = in_the_middle()[2].state_dict()
    _, optimizer, sparsifier = prepared()
    sparsifier.load_state_dict(saved)
    sparsifier.step()
    sparsifier.attach(optimizer)
    assert not sparsifier.state_dict()["dynamic"]["stepped"]


def halves(model):
    return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (model[0], model[2:])]


def test_a_state_after_the_sparsifiers_step_goes_on_with_any_split_of_optimizers():
    saved = prepared()[2].state_dict()
    model = mlp()
    sparsifier = DynamicSparsifier(sparsity_level=0.75, optimizer=halves(model))
    sparsifier.prepare(model)
    sparsifier.load_state_dict(saved)
    assert sparsifier.iteration == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration": None}, "'dynamic' needs 'iteration' of type int, as state_dict() gives, got None"),
        ({"iteration": "x"}, "'dynamic' needs 'iteration' of type int, as state_dict() gives, got 'x'"),
        ({"pending": 1}, "'dynamic' needs 'pending' of type bool, as state_dict() gives, got 1"),
        ({"stepped": 2}, "'dynamic' needs 'stepped' of type bool, as state_dict() gives, got 2"),
        ({"gradients": {"0.weight": torch.ones(3)}}, "the saved gradient is (3,), but the weight is (16, 12)"),
        ({"gradients": {"0.weight": 3}}, "the saved gradient is int, but the weight is (16, 12)"),
        (None, "'dynamic' needs 'iteration' of type int, as state_dict() gives, got None"),
    ],
)
def test_a_progress_that_does_not_fit_is_refused_before_anything_changes(change, message):
    saved = in_the_middle()[2].state_dict()
    saved["dynamic"] = {} if change is None else {**saved["dynamic"], **change}
    _, _, sparsifier = prepared(seed=5)
    before = masks(sparsifier)
    with refuses(message):
        sparsifier.load_state_dict(saved)
    assert equal(before, masks(sparsifier)) and sparsifier.iteration == 0


# when something raises in the middle


def later_call(answer):
    """A function that raises at its second call, of the second tensor, and answers at all others."""
    calls = []

    def call(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not yet")
        return answer(*arguments)

    return call


@pytest.mark.parametrize("name", ["prune", "grow", "redistribute", "new_values"])
def test_an_update_that_raises_has_changed_nothing_and_may_be_tried_again(name):
    answers = {
        "prune": lambda slots: slots.scores(slots.weights),
        "grow": lambda slots: slots.random("grow"),
        "redistribute": lambda slots: 1.0,
        "new_values": lambda weight, generator: torch.zeros_like(weight),
    }
    rules = {"state_init": "grad", **answers, name: later_call(answers[name])}
    runs = [in_the_middle("adam", **rules), in_the_middle("adam", **{**rules, **answers})]
    model, _, sparsifier = runs[0]
    before = weights(model), masks(sparsifier), sparsifier.state_dict()["dynamic"]
    with pytest.raises(RuntimeError, match="not yet"):
        sparsifier.step()
    after = sparsifier.state_dict()["dynamic"]
    assert equal(before[0], weights(model)) and equal(before[1], masks(sparsifier))
    assert equal(before[2]["gradients"], after["gradients"])
    assert after["iteration"] == 1 and after["stepped"] is True
    for run in runs:
        run[2].step()
    same(*runs)


@pytest.mark.parametrize("values", [torch.ones(3), 0.5], ids=str)
def test_new_values_of_another_shape_are_refused(values):
    _, _, sparsifier = in_the_middle(new_values=lambda weight, generator: values)
    with pytest.raises(SparsityError, match="0.weight: new_values must return a tensor of the weight's shape"):
        sparsifier.step()
    assert sparsifier.iteration == 1


def test_entries_for_gradients_that_were_not_captured_do_not_count():
    runs = [in_the_middle(), in_the_middle()]
    runs[0][2].step()
    state = runs[0][2].state_dict(with_gradients=True)
    assert all(not bool(g.any()) for g in state["dynamic"]["gradients"].values())
    assert list(state["dynamic"]["gradients"]) == [g["tensor_fqn"] for g in runs[0][2].groups]
    other = in_the_middle()[2]
    other.load_state_dict(state)
    assert other.state_dict()["dynamic"]["gradients"] == {}
    state = runs[1][2].state_dict(with_gradients=True)["dynamic"]
    assert equal(state["gradients"], runs[1][2].state_dict()["dynamic"]["gradients"])
    assert state["taken"] == list(state["gradients"])
