"""Densities: golden values of ER and ERK, fixed tensors, and whole budgets that sum exactly."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stock import refuses
from strategies import examples

from sparsekit_ao import SparsityError, densities

LENET = {"fc1": (300, 784), "fc2": (100, 300), "fc3": (10, 100)}
CONVS = {"a": (64, 3, 3, 3), "b": (64, 64, 3, 3), "c": (128, 64, 3, 3), "d": (256, 128, 3, 3), "e": (10, 256)}


def rounded(found):
    return [round(d, 5) for d in found.values()]


@pytest.mark.parametrize("distribution", [densities.erdos_renyi, densities.erdos_renyi_kernel])
def test_lenet_golden(distribution):
    assert rounded(distribution(LENET, 0.1)) == [0.07957, 0.23019, 1.0]
    assert rounded(distribution(LENET, 0.02)) == [0.01539, 0.04453, 0.36740]


def test_conv_golden():
    assert rounded(densities.erdos_renyi_kernel(CONVS, 0.1)) == [1, 0.18473, 0.13648, 0.06720, 1]
    assert rounded(densities.erdos_renyi(CONVS, 0.1)) == [1, 0.18579, 0.13934, 0.06967, 0.61776]


def test_power_is_between_uniform_and_erk():
    assert densities.power(CONVS, 0.1, exponent=0) == densities.uniform(CONVS, 0.1)
    assert densities.power(CONVS, 0.1, exponent=1) == densities.erdos_renyi_kernel(CONVS, 0.1)
    assert 0.1 > densities.power(CONVS, 0.1, exponent=0.5)["d"] > densities.erdos_renyi_kernel(CONVS, 0.1)["d"]


def test_the_rest_makes_up_for_fixed_tensors():
    found = densities.erdos_renyi_kernel(LENET, 0.1, {"fc2": 0.5})
    assert found["fc2"] == 0.5
    kept = sum(found[n] * math.prod(s) for n, s in LENET.items())
    assert math.isclose(kept, 0.1 * 266200)


def test_a_total_out_of_reach_names_the_range():
    with pytest.raises(SparsityError, match=r"density of 0.1 is not possible: .* must be in \[0.883546, 1\]"):
        densities.erdos_renyi(LENET, 0.1, {"fc1": 1.0})
    with pytest.raises(SparsityError, match=r"density of 0.99 is not possible: .* must be in \[0, 0.116454\]"):
        densities.uniform(LENET, 0.99, {"fc1": 0.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LENET, 1.5), "the overall density: a density must be in [0, 1], got 1.5"),
        ((LENET, 0.1, {"fc1": -1}), "fc1: a density must be in [0, 1], got -1"),
        ((LENET, 0.1, {"fc9": 1}), "unknown tensor 'fc9' in fixed; the tensors are ['fc1', 'fc2', 'fc3']"),
        (({}, 0.1), "densities need tensors with elements"),
    ],
)
def test_mistakes(arguments, message):
    with refuses(message):
        densities.uniform(*arguments)


def test_a_negative_power_is_refused():
    with pytest.raises(SparsityError, match="exponent must be at least 0, got -1"):
        densities.power(LENET, 0.1, exponent=-1)


shape = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@examples(150)
@given(st.lists(shape, min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 2))
def test_densities_average_to_the_overall_one(found, density, exponent):
    shapes = {str(k): tuple(s) for k, s in enumerate(found)}
    out = densities.power(shapes, density, exponent=exponent)
    assert all(0 <= d <= 1 for d in out.values())
    total = sum(math.prod(s) for s in shapes.values())
    assert math.isclose(sum(out[n] * math.prod(s) for n, s in shapes.items()), density * total, abs_tol=1e-6)


@st.composite
def allocations(draw):
    high = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    low = [draw(st.integers(0, h)) for h in high]
    total = draw(st.integers(sum(low), sum(high)))
    ideals = [draw(st.floats(0, 60)) for _ in high]
    return ideals, total, low, high


@examples(300)
@given(allocations())
def test_whole_budgets_sum_exactly_inside_their_bounds(drawn):
    ideals, total, low, high = drawn
    out = densities.allocate(ideals, total, low, high, [1] * len(high))
    assert sum(out) == total
    assert all(a <= n <= b for a, n, b in zip(low, out, high, strict=True))


@examples(200)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5), st.data())
def test_budgets_are_multiples_of_units_and_miss_by_less_than_one(members, data):
    unit, high = [u for u, _ in members], [u * k for u, k in members]
    total = data.draw(st.integers(0, sum(high)))
    weights = [data.draw(st.floats(0.1, 5)) for _ in members]
    out = densities.allocate(densities.shares(weights, total, high), total, [0] * len(high), high, unit)
    assert all(n % u == 0 for n, u in zip(out, unit, strict=True))
    spare = [u for n, u, h in zip(out, unit, high, strict=True) if n < h]
    assert 0 <= total - sum(out) < min(spare, default=1)


def test_totals_that_are_no_multiple_of_units_are_rounded_down():
    assert densities.allocate([5.0, 5.0], 10, [0, 0], [9, 8], [3, 4]) == [6, 4]
    assert densities.allocate([3.0, 2.0], 5, [0, 0], [4, 4], [4, 4]) == [4, 0]


def test_out_of_reach_budgets_are_refused():
    with pytest.raises(SparsityError, match=r"a budget of 9 is not possible; the tensors allow 2 to 8"):
        densities.allocate([1.0, 1.0], 9, [1, 1], [4, 4], [1, 1])


@examples(200)
@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 20)), min_size=1, max_size=6), st.data())
def test_shares_stay_within_capacities(members, data):
    weights, capacity = [w for w, _ in members], [r for _, r in members]
    total = data.draw(st.floats(0, sum(capacity)))
    out = densities.shares(weights, total, capacity)
    assert math.isclose(sum(out), total, abs_tol=1e-6)
    assert all(-1e-9 <= g <= r + 1e-6 for g, r in zip(out, capacity, strict=True))


def test_shares_ignore_numbers_that_are_not_finite_and_refuse_too_much():
    assert densities.shares([math.nan, 1.0, math.inf], 2, [4, 4, 4]) == [0.0, 2.0, 0.0]
    assert densities.shares([0.0, 0.0], 3, [4, 2]) == [2.0, 1.0]
    with pytest.raises(SparsityError, match="shares: a total of 5 exceeds the sum of capacities, 4"):
        densities.shares([1.0], 5, [4])
