"""What is refused: targets out of reach, arguments without effect, answers of rules that are no answers."""

import numpy as np
import pytest
import torch
from growing import backward, equal, masks, mlp, prepared, train
from stock import refuses
from torch import nn

from sparsekit_ao import (
    GMP,
    DynamicSparsifier,
    RigL,
    ScopeSparsifier,
    Static,
    StraightThrough,
    densities,
    patterns,
    schedules,
)
from sparsekit_ao.dynamic import inits


def two(a, b):
    return nn.ModuleDict({"a": nn.Linear(*a, bias=False), "b": nn.Linear(*b, bias=False)})


def uneven():
    """A saved mask whose scopes of five and two rows keep ten elements each."""
    mask = torch.zeros(7, 8)
    mask[:5].view(-1)[:10] = 1
    mask[5:].view(-1)[:10] = 1
    return inits.lottery_ticket({"a.weight": mask, "b.weight": mask})


def weight_normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))


def other_optimizer(model):
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def densities_of(answer):
    return {"init": lambda shapes, density, fixed: answer(shapes), "sparsity_level": 0.5}


def target_of(schedule, grow="random"):
    return {"target": schedule, "grow": grow, "update_every": 2, "until": 8, "scope_shape": (1, 4)}


FIXED = [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight", "sparsity_level": 0.0}]
ROWS_OF_5 = [{"tensor_fqn": "*.weight", "scope_shape": (5,), "edge": "partial"}]
TWO_SIZES = {"prune": "global", "target": lambda t: 0.5, "block_shape": (1, -1)}
BY_ROW = {"sparsity_level": 0.5, "redistribute": "gradient", "scope_shape": (1, -1)}
REFUSED = [  # arguments, message, and what is not as usual
    ({}, "0.weight: exactly one optimizer must train it, but 0 of the 1 given do", {"optimizer": other_optimizer}),
    (
        {},
        "an optimizer was given that trains none of the sparsified",
        {"optimizer": lambda m: [sgd(m), other_optimizer(m)]},
    ),
    ({"grow": "momentum"}, "0.weight: its optimizer (SGD) keeps no momentum. Use SGD with momentum > 0", {}),
    ({"nnz": 2, "redistribute": "nonzero"}, "redistribute moves budgets between tensors, but every", {}),
    ({"nnz": 2, "prune": "global"}, "prune='global' moves budgets between tensors, but every", {}),
    ({"sparsity_level": 0.999}, "the overall budget leaves 1 blocks for the tensors that share it, but", {}),
    (
        {},
        "an overall density of 0.1 is not possible: with the fixed tensors it must be in [0.571429",
        {"config": FIXED},
    ),
    ({"scope_shape": (5,), "edge": "partial"}, "0.weight: its scopes differ in size, so they cannot", {}),
    (TWO_SIZES, "prune='global' with a target counts blocks of all tensors together, so all must have", {}),
    (
        {},
        "0.weight: another parametrization computes this weight, so it has no grad",
        {"make": weight_normed, "optimizer": lambda model: None},
    ),
    (
        {"init": uneven(), "redistribute": "gradient"},
        "a.weight: its scopes differ in size, so they cannot share one distributed budget",
        {"make": lambda: two((8, 7), (8, 7)), "config": ROWS_OF_5},
    ),
    (
        BY_ROW,
        "redistribute: no block could ever move between a.weight and the others: one more block in every scope means "
        "[300, 7] elements",
        {"make": lambda: two((64, 300), (64, 7))},
    ),
    # targets are looked at before training
    (target_of(lambda t: 0.5 if t != 4 else 0.9), "the overall budget leaves 58 blocks for the tensors that share", {}),
    (target_of(lambda t: 0.7 - t / 20, None), "target: falls from 0.7 to 0.6 at iteration 2, and grow=None never", {}),
    (
        target_of(lambda t: "much" if t else 0.5),
        "target: a schedule must return a number, got 'much' at iteration 2",
        {},
    ),
    (target_of(lambda t: 0.5 + t), "target: an overall sparsity must be in [0, 1], got 2.5 at iteration 2", {}),
    # densities that are none
    (densities_of(lambda shapes: dict.fromkeys(shapes, 2.0)), "0.weight: init must give it a density in [0, 1]", {}),
    (densities_of(lambda shapes: {"0.weight": 0.5}), "2.weight: init must give it a density in [0, 1], got None", {}),
    (densities_of(lambda shapes: 0.5), "0.weight: init must give it a density in [0, 1], got None", {}),
    (densities_of(lambda shapes: dict.fromkeys(shapes, "all")), "a density in [0, 1], got 'all'", {}),
]


@pytest.mark.parametrize(("arguments", "message", "unusual"), REFUSED, ids=range(len(REFUSED)))
def test_models_and_rules_that_do_not_fit_are_refused_and_the_model_is_left_alone(arguments, message, unusual):
    model = unusual.get("make", mlp)()
    before = model.state_dict().keys()
    sparsifier = DynamicSparsifier(optimizer=unusual.get("optimizer", sgd)(model), **arguments)
    with refuses(message):
        sparsifier.prepare(model, unusual.get("config"))
    assert model.state_dict().keys() == before and not sparsifier.groups


def test_a_target_that_falls_is_followed_where_something_grows():
    target = schedules.linear(0.8, 0.2, 10)
    model, optimizer, sparsifier = prepared(sparsity_level=None, target=target, update_every=1, init="uniform")
    train(model, optimizer, sparsifier, range(1, 12))
    assert sum(int(sparsifier.mask(g["tensor_fqn"]).sum()) for g in sparsifier.groups) == round(0.8 * 576)


def test_numbers_of_numpy_are_numbers():
    settings = DynamicSparsifier(
        update_fraction=np.float32(0.25), update_every=np.int64(10), until=np.int32(20)
    ).settings
    assert settings.update_fraction(3) == 0.25 and settings.due() == range(10, 21, 10)
    assert GMP(until=np.int64(200), update_every=np.int32(100), begin=np.int64(0)).settings.until == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grow": lambda s: torch.zeros(3)}, "must return float scores of shape (1, 192), got torch.float32 (3,)"),
        ({"grow": lambda s: 1.0}, "must return float scores of shape (1, 192), got float"),
        ({"prune": lambda s: None}, "must return float scores of shape (1, 192), got NoneType"),
        ({"prune": lambda s: s.active}, "must return float scores of shape (1, 192), got torch.bool (1, 192)"),
        ({"redistribute": lambda s: torch.ones(2)}, "must return one number for redistribution, got tensor([1., 1.])"),
        ({"redistribute": lambda s: None}, "must return one number for redistribution, got None"),
        ({"update_fraction": lambda t: 1.5}, "the update fraction must be in [0, 1), so that no layer is emptied"),
        ({"update_fraction": lambda t: "x"}, "update_fraction: a schedule must return a number, got 'x' at"),
    ],
)
def test_answers_of_rules_that_are_none_change_nothing(arguments, message):
    model, optimizer, sparsifier = prepared(update_every=1, **arguments)
    backward(model, optimizer, 1)
    optimizer.step()
    before = masks(sparsifier)
    with refuses(message):
        sparsifier.step()
    assert equal(before, masks(sparsifier)) and sparsifier.iteration == 0


def test_densities_are_those_of_whole_tensors_and_budgets_are_counted_in_blocks():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    sparsifier = Static(sparsity_level=0.7, block_shape=(1, 16))
    sparsifier.prepare(model, None)
    want = densities.erdos_renyi_kernel({"0.weight": (128, 64), "1.weight": (32, 128)}, 0.3)
    for name, density in want.items():
        mask = sparsifier.mask(name)
        assert abs(float(mask.mean()) - density) * mask.numel() <= 16


# leaving out what does not fit


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda: DynamicSparsifier(0.85, scope_shape=(1, -1)), None),  # the small tensor alone keeps one in each row
        (lambda: DynamicSparsifier(0.05, init=inits.random_blocks(first_dense=True)), None),
        (
            lambda: DynamicSparsifier(0.5),
            [{"tensor_fqn": "*.weight", "block_coupling": "rows", "block_shape": (1, -1)}],
        ),
        (lambda: ScopeSparsifier(0.5), [{"tensor_fqn": "*.weight", "scope_coupling": "all", "max_sparsity": 0.6}]),
        (lambda: ScopeSparsifier(nnz=20), [{"tensor_fqn": "*.weight", "scope_coupling": "all"}]),
        (lambda: StraightThrough(0.5, backward_level=0.2), None),
    ],
)
def test_leaving_out_what_does_not_fit_changes_nothing_where_all_fit(make, config):
    found = []
    for skip_unfit in (False, True):
        model, sparsifier = two((16, 8), (2, 8)), make()
        sparsifier.prepare(model, config, skip_unfit=skip_unfit)
        assert not sparsifier.report().skipped
        found.append(
            (masks(sparsifier), [(g["nnz"] if "nnz" in g else g["sparsity_level"]) for g in sparsifier.groups])
        )
    assert equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_the_overall_budget_is_spread_over_the_tensors_that_fit():
    sparsifier = DynamicSparsifier(0.75, init="uniform", pattern=patterns.blocks(1, 4))
    sparsifier.prepare(two((16, 8), (6, 8)), skip_unfit=True)
    assert "b.weight" in sparsifier.report().skipped and sparsifier.report().sparsity == 0.75


def test_a_prepare_that_fails_leaves_no_initial_masks_behind(monkeypatch):
    sparsifier = DynamicSparsifier(0.5, init="uniform")
    monkeypatch.setattr(DynamicSparsifier, "_after_prepare", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)))
    assert not sparsifier._initial_masks and not sparsifier.groups


def test_an_end_before_the_first_update_is_refused():
    optimizer = torch.optim.SGD(mlp().parameters(), 0.1)
    with refuses("until=50 allows no update, since the first one is in iteration update_every=100"):
        RigL(0.8, optimizer, until=50)
    for never in ({"until": 50, "update_every": None}, {"until": 50, "update_every": 50}):
        RigL(0.8, optimizer, **never)
