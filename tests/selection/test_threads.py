"""Parts of a window on helper threads: the reference's masks, torch's thread count, errors and modes."""

import signal
import threading
import time

import pytest
import torch
from sparsekit_ao.selection.tiling import Blocks, Scopes

from sparsekit_ao.selection import Update, cpu, parallel, scope_masks, threads
from sparsekit_ao.selection.api import scope_mask


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def masks_of(weight, steps, impl):
    mask = torch.ones(weight.shape, dtype=torch.bool)
    for at, (block, scope, keep) in enumerate(steps):
        group = Scopes(members=(Blocks(shape=block, values=weight, mask=mask),), shape=scope)
        scope_mask([group], keep, among_kept=at > 0, impl=impl)
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "steps",
    [
        [((1, 1), (1, 8), 4)],
        [((1, 1), (1, 1024), 500)],
        [((1, 1), (1024, 1), 500)],
        [((1, 2), (1, 4), 2)],
        [((32, 1), (1, 8), 4), ((1, 1), (1, 8), 2)],
        [((1, 1), (1, 8), 4), ((1, 1), (1024, 1), 300)],
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_several_parts_give_the_reference_masks(steps, dtype, ties):
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    weight = (weight * 2).round().to(dtype) if ties else weight.to(dtype)
    weight[3, 5], weight[7, 9] = float("nan"), float("-inf")
    with torch.inference_mode():
        found = masks_of(weight, steps, "cpu")
    assert torch.equal(found, masks_of(weight, steps, "reference"))


def updates_of(sizes):
    """2:4 updates of weights of 4 columns each, and their masks."""
    weights = [torch.randn(size, 4, generator=torch.Generator().manual_seed(size)) for size in sizes]
    scopes = [
        Scopes(members=(Blocks(shape=(1, 1), values=w, mask=torch.ones(w.shape, dtype=torch.bool)),), shape=(1, 4))
        for w in weights
    ]
    return [Update(scopes=(s,), keep=2) for s in scopes]


def sizes_of(updates):
    return [u.scopes[0].members[0].window.shape[0] for u in updates]


def test_small_updates_run_side_by_side_and_give_the_reference_masks(monkeypatch):
    seen, fill, me = {}, cpu.fill, threading.get_ident()

    def watched(update):
        here = threading.get_ident() == me
        seen[sizes_of([update])[0]] = "here" if here else torch.get_num_threads()
        fill(update)

    monkeypatch.setattr(cpu, "fill", watched)
    small = list(range(40_000, 40_012))
    updates = updates_of([*small, 200_000, 30_000])
    scope_masks(updates, impl="cpu")
    assert seen == {**dict.fromkeys(small, 1), 200_000: "here", 30_000: "here"}
    for update in updates:
        (member,) = update.members
        want = torch.ones_like(member.mask)
        scopes = Scopes(members=(Blocks(shape=(1, 1), values=member.values, mask=want),), shape=(1, 4))
        scope_mask([scopes], 2, update.norm, impl="reference")
        assert torch.equal(member.mask, want)


def test_updates_that_would_leave_threads_idle_are_cut_instead(monkeypatch):
    assert parallel.side_by_side(updates_of([8] * 20)) == []  # so small that the lock costs more than the work
    monkeypatch.setattr(parallel, "APART", 1)
    assert sizes_of(parallel.side_by_side(updates_of([8, 9, 10, 100]))) == []
    assert sizes_of(parallel.side_by_side(updates_of([8, 9, 10, 11, 100]))) == []
    assert sizes_of(parallel.side_by_side(updates_of([8, 9, 10, 11, 12, 100]))) == [12, 11, 10, 9, 8]


def test_torch_is_kept_to_one_thread_inside_and_to_its_own_number_after():
    seen = []
    threads.run_apart([lambda: seen.append(torch.get_num_threads())] * 5)
    assert seen == [1] * 5
    assert torch.get_num_threads() == 2


def test_the_first_error_is_raised_and_later_calls_work():
    def fail():
        raise ValueError("this part")

    with pytest.raises(ValueError, match="this part"):
        threads.run_apart([fail, lambda: None])
    done = []
    threads.run_apart([lambda: done.append(1)] * 3)
    assert done == [1, 1, 1]


@pytest.fixture
def restored_interrupt():
    """Interrupts raise KeyboardInterrupt, also where a shell started the tests in the background, ignoring them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="a thread cannot be interrupted by another here")
def test_an_interrupt_while_waiting_ends_the_round_and_leaves_nothing_running(restored_interrupt):
    done = []

    def piece():
        time.sleep(0.02)
        done.append(1)

    def interrupt():
        while len(done) < 4:  # the caller waits by then
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        threads.run_apart([piece] * 100)
    written = len(done)
    threads.run_apart([lambda: None] * 2)  # after whatever a thread might still have to do
    assert len(done) == written < 100


def test_every_piece_is_called_once_and_results_come_in_order():
    called = []
    found = threads.run_all([lambda i=i: called.append(i) or i * i for i in range(50)])
    assert found == [i * i for i in range(50)]
    assert sorted(called) == list(range(50))


def test_an_error_of_one_round_does_not_show_in_the_next():
    def fail():
        raise ValueError("this round")

    with pytest.raises(ValueError, match="this round"):
        threads.run_all([fail] * 4)
    assert threads.run_all([lambda: 1] * 4) == [1] * 4


def test_a_round_inside_a_round_stays_on_its_thread():
    seen = []

    def inner():
        threads.run_apart([lambda: seen.append(threading.get_ident())] * 3)
        return threads.run_all([threading.get_ident] * 3)

    found = []
    threads.run_apart([lambda: found.append(inner())] * 4)
    assert all(len(set(one)) == 1 for one in found)
    assert set(seen) == {one[0] for one in found}
