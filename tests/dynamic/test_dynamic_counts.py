"""Counts are exact in every scope at every update, for every criterion on every structure; choices are right by eye."""

import math
import os
from itertools import product

import pytest
import torch
from grids import covering, turns
from growing import masks, prepared, train
from hypothesis import given
from hypothesis import strategies as st
from stock import Holder
from strategies import examples
from torch import nn

from sparsekit_ao import GMP, DynamicSparsifier, SparsityError, dynamic, schedules
from sparsekit_ao.dynamic import criteria
from sparsekit_ao.dynamic.budgets import exchange
from sparsekit_ao.structure.scopes import counts_after_dropping
from sparsekit_ao.torch_ao import LambdaSL

# A thousand of every combination take some twenty minutes: SPARSEKIT_AO_EXHAUSTIVE=1 SPARSEKIT_UPDATES=1000
UPDATES = int(os.environ.get("SPARSEKIT_UPDATES", "8"))


def drawn(**shapes):
    return Holder(**{name: torch.randn(shape) for name, shape in shapes.items()})


def coupled(kind):
    names = [f"{kind}.{n}" for n in ("gate", "up", "down")]
    shapes = [(1, -1), (1, -1), (-1, 1)]
    return [
        {"tensor_fqn": n, "block_shape": s, "block_coupling": kind, "coupling_order": (1, 0) if s[0] == -1 else None}
        for n, s in zip(names, shapes, strict=True)
    ]


def by_axes(kind):
    axes = {"gate": "u i", "up": "u i", "down": "o u"}
    return [{"tensor_fqn": f"{kind}.{n}", "axes": a, "unit": "u", "block_coupling": kind} for n, a in axes.items()]


def two_mlps():
    sizes = {"a": 16, "b": 24}
    return nn.ModuleDict({k: drawn(gate=(n, 8), up=(n, 8), down=(8, n)) for k, n in sizes.items()})


def matrices():
    return nn.ModuleDict({"a": drawn(w=(16, 16)), "b": drawn(w=(8, 16)), "c": drawn(w=(24, 8))})


def large_matrices():
    return nn.ModuleDict({"a": drawn(w=(32, 32)), "b": drawn(w=(16, 32)), "c": drawn(w=(24, 16))})


def convolutions():
    return nn.ModuleDict({"a": drawn(w=(8, 4, 3, 3)), "b": drawn(w=(16, 8, 3, 3))})


def everywhere(**structure):
    return [{"tensor_fqn": "*.w", **structure}]


STRUCTURES = {
    "single weights": (matrices, everywhere()),
    "one budget over all": (matrices, everywhere(scope_coupling="all")),
    "N of 4": (matrices, everywhere(scope_shape=(1, 4))),
    "rows of constant fan-in": (matrices, everywhere(scope_shape=(1, -1))),
    "8x8 blocks": (large_matrices, everywhere(block_shape=(8, 8))),
    "2x2 blocks of every block row": (matrices, everywhere(block_shape=(2, 2), scope_shape=(1, -1))),
    "conv kernels": (convolutions, everywhere(block_shape=(1, 1, -1, -1))),
    "conv filters": (convolutions, everywhere(block_shape=(1, -1, -1, -1))),
    "kernels of every filter": (convolutions, everywhere(block_shape=(1, 1, -1, -1), scope_shape=(1, -1))),
    "coupled MLP channels": (two_mlps, coupled("a") + coupled("b")),
    "axis pattern of N:4": (matrices, everywhere(axes="o (s m)", unit="o s m", scope="o s", sizes={"m": 4})),
    "axis patterns of coupled channels": (two_mlps, by_axes("a") + by_axes("b")),
    "blocks of several sizes": (
        matrices,
        [{"tensor_fqn": f"{k}.w", "block_shape": b} for k, b in (("a", (4, 4)), ("b", (2, 2)), ("c", (1, 1)))],
    ),
    "partial blocks": (matrices, everywhere(block_shape=(3, 5), edge="partial")),
}
RULES = list(
    product(["magnitude", "global"], ["gradient", "momentum", "random"], [None, "gradient", "momentum", "nonzero"])
)


def run(sparsifier, optimizer, parameters, updates, seen):
    """Train on random gradients: what matters here is counts."""
    source = torch.Generator().manual_seed(0)
    for _ in range(updates):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=source)
        optimizer.step()
        sparsifier.step()
        sparsifier.check()
        seen(sparsifier.last_update, sum(int(sparsifier.mask(g["tensor_fqn"]).sum()) for g in sparsifier.groups))


def built(structure, **arguments):
    torch.manual_seed(0)
    make, config = STRUCTURES[structure]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sparsifier = DynamicSparsifier(
        optimizer=optimizer,
        sparsity_level=0.5,
        update_every=1,
        **{"update_fraction": 0.5, "init": "uniform", **arguments},
    )
    sparsifier.prepare(model, config)
    return list(model.parameters()), optimizer, sparsifier


@pytest.mark.parametrize(  # each criterion with each of another kind, which structures take in turn
    ("structure", "prune", "grow", "redistribute"), turns(STRUCTURES, covering(RULES))
)
def test_nonzeros_never_change(structure, prune, grow, redistribute):
    names = {"prune": prune, "grow": grow, "redistribute": redistribute}
    parameters, optimizer, sparsifier = built(structure, **names)
    counts, moved = [sum(int(sparsifier.mask(g["tensor_fqn"]).sum()) for g in sparsifier.groups)], []

    def seen(movement, count):
        counts.append(count)
        moved.append(sum(movement.pruned.values()))
        assert moved[-1] == sum(movement.grown.values()) or structure == "partial blocks"

    run(sparsifier, optimizer, parameters, UPDATES, seen)
    if structure != "partial blocks":  # edge blocks hold fewer elements; `check` counted blocks
        assert len(set(counts)) == 1
    assert sparsifier.last_update.iteration == UPDATES
    assert all(int(sparsifier.mask(g["tensor_fqn"]).sum()) > 0 for g in sparsifier.groups)
    assert sum(moved) > 0


def one(weight, gradient, **arguments):
    """Masks of one update of one weight, from a given start."""
    start = arguments.pop("start")
    model = Holder(w=torch.ones(1))
    model.w = nn.Parameter(torch.tensor(weight))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    config = [{"tensor_fqn": "w", **arguments.pop("structure", {})}]
    init = dynamic.inits.resume({"w": torch.tensor(start)})
    sparsifier = DynamicSparsifier(optimizer=optimizer, init=init, update_every=1, **arguments)
    sparsifier.prepare(model, config)
    model.parametrizations.w.original.grad = torch.tensor(gradient)
    optimizer.step()
    sparsifier.step()
    return sparsifier.mask("w").int().tolist(), model.parametrizations.w.original.tolist()


ROWS = {"scope_shape": (1, -1)}


@pytest.mark.parametrize(
    ("pooling", "want"),
    [
        (torch.mean, [[1, 1, 0, 0]]),
        (torch.sum, [[1, 1, 0, 0]]),
        (torch.amax, [[0, 0, 1, 1]]),
        (torch.linalg.vector_norm, [[1, 1, 0, 0]]),
    ],
)
def test_blocks_are_pooled_after_taking_absolute_values(pooling, want):
    mask, _ = one(
        [[3.0, -3.0, 0.5, 4.0]],  # the plain mean of the first block is 0
        [[0.0] * 4],
        start=[[1, 1, 1, 1]],
        prune=criteria.magnitude(pooling),
        grow=None,
        update_fraction=0.5,
        structure={"block_shape": (1, 2)},
    )
    assert mask == want


def test_growth_pools_by_its_own_criterion():
    weight, gradient = [[1.0] * 6], [[0.0, 0.0, 3.0, -3.0, 0.5, 4.0]]
    start = {"start": [[1, 1, 1, 1, 0, 0]], "update_fraction": 0.5, "structure": {"block_shape": (1, 2)}}
    assert one(weight, gradient, grow=criteria.gradient(torch.mean), **start)[0] == [[1, 1, 1, 1, 0, 0]]
    assert one(weight, gradient, grow=criteria.gradient(torch.amax), **start)[0] == [[1, 1, 0, 0, 1, 1]]


def test_rules_of_users_are_functions_of_slots():
    def leftmost(slots):
        return -torch.arange(slots.active.shape[1]).float().expand(slots.active.shape)

    mask, _ = one(
        [[1.0, 2.0, 3.0, 4.0]], [[0.0] * 4], start=[[0, 0, 1, 1]], prune=leftmost, grow=leftmost, update_fraction=0.5
    )
    assert mask == [[1, 0, 1, 0]]


def held(weights, gradients=None, structure=None, **arguments):
    """(sparsifier, optimizer) of layers with given weights and gradients, whose zeros are dropped; not stepped."""
    model = nn.ModuleDict({name: Holder(w=torch.ones(1)) for name in weights})
    for name, weight in weights.items():
        model[name].w = nn.Parameter(torch.tensor(weight))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sparsifier = DynamicSparsifier(optimizer=optimizer, update_every=1, **arguments)
    sparsifier.prepare(model, everywhere(**(structure or {})))
    for k, p in enumerate(model.parameters()):
        p.grad = torch.zeros_like(p) if gradients is None else torch.tensor(gradients[k]).expand_as(p).clone()
    return sparsifier, optimizer


def test_global_pruning_lets_layers_compete_and_empties_none():
    weights = {"a": [1.0, 2.0, 3.0, 4.0], "b": [5.0, 6.0, 7.0, 8.0]}
    sparsifier, optimizer = held(weights, init="resume", prune="global", grow=None, update_fraction=0.75)
    optimizer.step()
    sparsifier.step()
    assert sparsifier.mask("a.w").tolist() == [0, 0, 0, 1]  # its largest stays, although b's 6 and 7 are larger
    assert sparsifier.mask("b.w").tolist() == [0, 0, 0, 1]
    optimizer.step()
    with pytest.raises(SparsityError, match="global pruning would keep 1 blocks, but every scope keeps at least one"):
        sparsifier.step()


def test_global_pruning_takes_the_smallest_wherever_they_are():
    weights = {"a": [[1.0, 2.0, 0.0], [9.0, 9.0, 0.0]], "b": [[3.0, 9.0, 0.0], [9.0, 9.0, 0.0]]}
    arguments = {"init": "resume", "prune": "global", "update_fraction": 0.4, "structure": ROWS}
    sparsifier, optimizer = held(weights, [[0.0, 1.0, 2.0]] * 2, **arguments)
    optimizer.step()
    sparsifier.step()  # of 8 weights 3 go: 1, 2 and 3; a's first row loses both, and two of its three grow again
    assert sparsifier.mask("a.w").tolist() == [[0, 1, 1], [1, 1, 0]]
    assert sparsifier.mask("b.w").tolist() == [[0, 1, 1], [1, 1, 0]]


FORTY = {"a": [1.0] * 40, "b": [1.0] * 40}
HALF = {"sparsity_level": 0.5, "init": "uniform", "update_fraction": 0.5}


def test_redistribution_is_in_proportion_and_sums_exactly():
    sparsifier, optimizer = held(FORTY, [3.0, 1.0], redistribute="gradient", **HALF)
    optimizer.step()
    sparsifier.step()
    assert [int(sparsifier.mask(f"{k}.w").sum()) for k in "ab"] == [10 + 15, 10 + 5]  # 20 dropped, shared 3 to 1


@pytest.mark.parametrize("statistic", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_statistic_that_is_no_number_counts_as_zero(statistic):
    def biased(slots):
        return statistic if slots.name == "a.w" else 1.0

    for criterion, want in ((biased, [10, 30]), (lambda slots: statistic, [20, 20])):
        sparsifier, optimizer = held(FORTY, grow="random", redistribute=criterion, **HALF)
        optimizer.step()
        sparsifier.step()
        assert [int(sparsifier.mask(f"{k}.w").sum()) for k in "ab"] == want


def test_nonzero_redistribution_keeps_the_split_of_elements_where_blocks_differ_in_size():
    model = nn.ModuleDict({"a": drawn(w=(40, 8)), "b": drawn(w=(40, 80))})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    arguments = {"init": "uniform", "update_fraction": 0.5, "grow": "random", "redistribute": "nonzero"}
    sparsifier = DynamicSparsifier(
        sparsity_level=0.5, optimizer=optimizer, update_every=1, block_shape=(1, -1), **arguments
    )
    sparsifier.prepare(model, everywhere())

    def seen(*_):
        assert [int(sparsifier.mask(f"{k}.w").sum()) for k in "ab"] == [160, 1600]

    run(sparsifier, optimizer, list(model.parameters()), 4, seen)


@examples(200)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), st.data())
def test_exchanges_never_change_the_sum(drawn, data):
    unit = [u for u, _, _ in drawn]
    now, high = [u * n for u, n, _ in drawn], [u * (n + m) for u, n, m in drawn]
    low = [u * data.draw(st.integers(0, n)) for u, n, _ in drawn]
    ideals = [data.draw(st.floats(a, b)) for a, b in zip(low, high, strict=True)]
    out = exchange(now, ideals, low, high, unit)
    assert sum(out) == sum(now)
    for a, n, b, u, before, ideal in zip(low, out, high, unit, now, ideals, strict=True):
        assert a <= n <= b and n % u == 0
        assert abs(n - ideal) <= abs(before - ideal) + 1e-6


@pytest.mark.parametrize("prune", ["magnitude", "global"])
def test_gradual_pruning_follows_its_target_and_grows_nothing(prune):
    model, optimizer, sparsifier = prepared(kind=GMP, until=20, begin=4, sparsity_level=0.9, prune=prune)
    blocks = sum(sparsifier.mask(g["tensor_fqn"]).numel() for g in sparsifier.groups)
    target, before = schedules.cubic(0.0, 0.9, 16, begin=4), None
    for step in range(1, 25):
        train(model, optimizer, sparsifier, [step])
        sparsifier.check()
        now = torch.cat([sparsifier.mask(g["tensor_fqn"]).flatten() for g in sparsifier.groups]) != 0
        assert before is None or not (now & ~before).any()
        before = now
        if step % 2 == 0:
            assert int(now.sum()) == round((1 - target(step)) * blocks)
    assert not sparsifier.groups[0]["module"].parametrizations.weight.original[sparsifier.mask("0.weight") == 0].any()


@pytest.mark.parametrize("how", ["magnitude", "global"])
def test_a_target_with_growth_replaces_while_it_shrinks(how):
    target = schedules.linear(0.5, 0.9, 40)
    model, optimizer, sparsifier = prepared(sparsity_level=None, target=target, prune=how, update_every=1)
    blocks = sum(sparsifier.mask(g["tensor_fqn"]).numel() for g in sparsifier.groups)
    for step in range(1, 41):
        train(model, optimizer, sparsifier, [step])
        sparsifier.check()
    kept = sum(int(sparsifier.mask(g["tensor_fqn"]).sum()) for g in sparsifier.groups)
    assert kept == round(0.1 * blocks)
    assert sum(sparsifier.last_update.grown.values()) > 0


@pytest.mark.parametrize("how", ["magnitude", "global"])
@pytest.mark.parametrize("change", [-0.1, 0.08])
def test_a_torch_ao_scheduler_may_drive_the_levels(how, change):
    model, optimizer, sparsifier = prepared(update_every=1, init="uniform", prune=how, update_fraction=0.01)
    scheduler = LambdaSL(sparsifier, lambda step: 1 + change * step)
    for step in range(4):
        train(model, optimizer, sparsifier, [step])
        scheduler.step()
    train(model, optimizer, sparsifier, [9])
    assert abs(sparsifier.groups[1]["sparsity_level"] - 0.75) > 0.05
    assert sparsifier.check() == 3
    assert int(sparsifier.mask("2.weight").sum()) == 256 - int(sparsifier.groups[1]["sparsity_level"] * 256 + 1e-9)


def test_a_fixed_tensor_keeps_its_budget_while_others_share():
    config = [
        {"tensor_fqn": "0.weight"},
        {"tensor_fqn": "2.weight", "scope_shape": (1, 4), "nnz": 2},
        {"tensor_fqn": "4.weight"},
    ]
    model, optimizer, sparsifier = prepared(config=config, sparsity_level=0.7, redistribute="gradient")
    total = sum(int(sparsifier.mask(f"{k}.weight").sum()) for k in (0, 2, 4))
    assert total == round(0.3 * (12 * 16 + 256 + 128))
    train(model, optimizer, sparsifier, range(20))
    assert sparsifier.mask("2.weight").view(-1, 4).sum(1).unique().tolist() == [2]
    assert sum(int(sparsifier.mask(f"{k}.weight").sum()) for k in (0, 2, 4)) == total


def test_random_pruning_is_drawn_anew_in_every_update():
    model, optimizer, sparsifier = prepared(prune="random", grow="random", update_every=1)
    stayed = masks(sparsifier)
    for step in range(40):
        train(model, optimizer, sparsifier, [step])
        stayed = {name: stayed[name] & mask for name, mask in masks(sparsifier).items()}
    assert not any(mask.any() for mask in stayed.values())


def test_exact_random_growth_is_drawn_by_name_and_step_alone():
    draws = []
    for order in ([0, 2, 4], [4, 2, 0]):
        config = [{"tensor_fqn": f"{k}.weight"} for k in order]
        model, optimizer, sparsifier = prepared(grow="random", config=config)
        train(model, optimizer, sparsifier, range(4))
        draws.append({n: sparsifier.mask(n).clone() for n in ("0.weight", "2.weight", "4.weight")})
    assert all(torch.equal(draws[0][n], draws[1][n]) for n in draws[0])


@examples(300)
@given(st.integers(1, 1 << 40), st.floats(0, 0.999))
def test_the_fraction_is_taken_exactly_of_any_count(count, fraction):
    assert int(counts_after_dropping(torch.tensor(count), fraction)) == count - math.floor(count * fraction + 1e-9)


@pytest.mark.parametrize("purpose", ["prune", "grow", "redistribute"])
@pytest.mark.parametrize(
    "make", [criteria.magnitude, criteria.gradient, criteria.momentum, criteria.random, criteria.nonzero]
)
def test_every_rule_serves_every_purpose(purpose, make):
    model, optimizer, sparsifier = prepared(update_every=1, **{"grow": "random", purpose: make()})
    train(model, optimizer, sparsifier, [1, 2])
    assert sparsifier.check() == 3 and sparsifier.last_update.iteration == 2


def test_the_share_of_a_rule_is_the_mean_score_of_active_blocks_unless_given():
    criterion, seen = dynamic.Criterion(name="L1", score=lambda slots: slots.scores(slots.weights, 1)), []

    def recording(slots):
        (weight,), (mask,) = slots.weights.values(), slots.masks.values()
        seen.append((criterion.share_of(slots), float(weight.abs()[mask != 0].mean())))
        return slots.random("grow")

    model, optimizer, sparsifier = prepared(update_every=1, grow=recording, redistribute=criterion)
    train(model, optimizer, sparsifier, [1])
    assert len(seen) == 3 and all(found == pytest.approx(want) for found, want in seen)
