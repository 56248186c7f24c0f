"""Schedules give the golden numbers; ScheduleSL updates every interval and resumes exactly."""

import pytest
from stock import linear_model, prepared, reloaded

from sparsekit_ao import ScopeSparsifier, SparsityError, WeightNormSparsifier, schedules
from sparsekit_ao.schedules import ScheduleSL


def test_cosine_golden():
    values = [round(schedules.cosine(0.3, 0.0, 10)(t), 4) for t in range(1, 11)]
    assert values == [0.2927, 0.2714, 0.2382, 0.1964, 0.15, 0.1036, 0.0618, 0.0286, 0.0073, 0.0]
    assert schedules.cosine(0.3, 0.0, 10)(1000) == 0.0
    assert schedules.cosine(0.3, 0.1, 10)(10) == 0.1


def test_cubic_golden():
    s = schedules.cubic(0.0, 0.8, 900, begin=100)
    assert [round(s(t) - s(t - 100), 4) for t in (200, 300, 900, 1000)] == [0.2381, 0.1855, 0.0077, 0.0011]
    assert s(0) == s(100) == 0.0
    assert s(1000) == s(5000) == 0.8


def test_cubic_differences_per_interval_golden():
    change = schedules.difference(schedules.cubic(0.0, 0.8, 900, begin=100), 100)
    assert [round(change(t), 4) for t in (100, 200, 300, 900, 1000, 1100)] == [0, 0.2381, 0.1855, 0.0077, 0.0011, 0]


def test_a_target_as_a_fraction_of_what_is_active():
    assert schedules.drop_fraction(0.75, 0.5) == 0.5
    assert schedules.drop_fraction(1.0, 0.5) == 1.0
    assert schedules.drop_fraction(0.2, 0.5) == 0.0
    with pytest.raises(SparsityError, match=r"target is a sparsity and must be in \[0, 1\], got 1.5"):
        schedules.drop_fraction(1.5, 0.5)


def test_linear_constant_and_join():
    assert [round(schedules.linear(0.3, 0.0, 3)(t), 4) for t in (0, 1, 3, 4)] == [0.3, 0.2, 0.0, 0.0]
    joined = schedules.join([schedules.constant(1.0), schedules.linear(1.0, 0.0, 2), schedules.constant(5.0)], [2, 4])
    assert [joined(t) for t in range(6)] == [1.0, 1.0, 1.0, 0.5, 5.0, 5.0]


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
@pytest.mark.parametrize("make", [schedules.linear, schedules.cosine, schedules.cubic])
def test_bad_steps(make, steps):
    with pytest.raises(SparsityError, match=r"steps must be an int >= 1"):
        make(1.0, 0.0, steps)


@pytest.mark.parametrize("make", [schedules.linear, schedules.cosine, schedules.cubic])
def test_all_take_start_end_steps_and_begin_in_this_order(make):
    schedule = make(0.25, 0.75, 4, 10)
    assert [schedule(t) for t in (0, 10, 14, 20)] == [0.25, 0.25, 0.75, 0.75] and 0.25 < schedule(12) < 0.75


@pytest.mark.parametrize("boundaries", [[], [1, 2], [3, 3]])
def test_bad_boundaries(boundaries):
    three = [schedules.constant(0.0)] * (3 if len(boundaries) == 2 and boundaries[0] == boundaries[1] else 2)
    with pytest.raises(SparsityError, match="join: .* increasing boundaries, got"):
        schedules.join(three, boundaries)


def run(sparsifier, scheduler, steps):
    kept = []
    for _ in range(steps):
        sparsifier.step()
        scheduler.step()
        kept.append(int(sparsifier.mask("0.weight").sum()))
    return kept


@pytest.mark.parametrize("kind", [ScopeSparsifier, WeightNormSparsifier])
def test_masks_change_only_at_the_interval(kind):
    sparsifier = prepared(linear_model(8, 8), kind=kind)
    scheduler = ScheduleSL(sparsifier, schedules.linear(0.0, 0.5, 8), interval=4)
    assert run(sparsifier, scheduler, 10) == [64, 64, 64, 64, 48, 48, 48, 48, 32, 32]


def test_one_schedule_a_group():
    sparsifier = prepared(linear_model(8, 8, 8))
    ScheduleSL(sparsifier, [schedules.constant(0.25), schedules.constant(0.75)])
    sparsifier.step()
    assert [r.sparsity for r in sparsifier.report()] == [0.25, 0.75]


@pytest.mark.parametrize("order", ["sparsifier first", "scheduler first"])
@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_a_resumed_schedule_equals_an_uninterrupted_one(order, at):
    def fresh():
        sparsifier = prepared(linear_model(8, 8))
        return sparsifier, ScheduleSL(sparsifier, schedules.cubic(0.0, 0.9, 9), interval=2)

    straight = run(*fresh(), 10)
    first = fresh()
    begun = run(*first, at)
    saved = reloaded([part.state_dict() for part in first])
    second = fresh()
    for k in (0, 1) if order == "sparsifier first" else (1, 0):
        second[k].load_state_dict(saved[k])
    assert begun + run(*second, 10 - at) == straight


def test_mistakes():
    with pytest.raises(SparsityError, match="needs a prepared sparsifier; call sparsifier.prepare"):
        ScheduleSL(ScopeSparsifier(), schedules.constant(0.5))
    sparsifier = prepared(linear_model(8, 8))
    with pytest.raises(SparsityError, match="interval must be an int >= 1, got 0"):
        ScheduleSL(sparsifier, schedules.constant(0.5), interval=0)
    with pytest.raises(SparsityError, match="2 schedules for 1 groups; give one, or one for each"):
        ScheduleSL(sparsifier, [schedules.constant(0.5)] * 2)
    with pytest.raises(SparsityError, match="needs a sparsifier, got int"):
        ScheduleSL(3, schedules.constant(0.5))
