"""An update of dynamic masks on a GPU waits for the device at most once or twice, and its tensors share launches.

The meta device takes the place of the GPU: its tensors take the same paths, and reading a number from one is an error.
"""

import pytest
import torch
from growing import mlp, prepared, train
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekit_ao.dynamic import apply, choose
from sparsekit_ao.dynamic.apply import run_update
from sparsekit_ao.dynamic.budgets import Budgets
from sparsekit_ao.dynamic.optimizers import original


class Reads(TorchDispatchMode):
    """Counts the operations that wait for a device before they return."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in self.WAITING
        return function(*args, **(kwargs or {}))


def arguments_of(sparsifier, gradients, momenta):
    """What `run_update` takes, of a sparsifier whose tensors may since have moved."""
    budgets = Budgets(
        components=sparsifier._planned(sparsifier.groups).components,
        groups=sparsifier.groups,
        settings=sparsifier.settings,
    )
    capture = sparsifier._capture
    capture.gradients = gradients
    return budgets, capture, momenta, dict(sparsifier._level_given), 4, [None] * len(sparsifier.groups), lambda: None


SETTINGS = {  # how often the update itself reads numbers, after the test of all gradients
    "RigL": ({}, 0),
    "SET": ({"grow": "random"}, 0),
    "constant fan-in": ({}, 0),
    "SNFS": ({"grow": "momentum", "redistribute": "momentum"}, 1),
    "GMP": ({"sparsity_level": None, "target": lambda step: 0.8, "grow": None}, 1),
    "a target and growth": ({"sparsity_level": None, "target": lambda step: 0.75}, 0),
    "competing tensors": ({"prune": "global"}, 1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_on_a_device_reads_numbers_at_most_once_and_shares_selections(name, monkeypatch):
    settings, reads = SETTINGS[name]
    config = [{"tensor_fqn": "*.weight", "scope_shape": (1, -1)}] if name == "constant fan-in" else None
    model, optimizer, sparsifier = prepared(config=config, **settings)
    train(model, optimizer, sparsifier, range(1, 4))
    given = {g["tensor_fqn"]: torch.randn(original(g).shape) for g in sparsifier.groups}
    seen, selections = [], []

    def record(found, real=choose.read_numbers):
        numbers = real(found)
        seen.extend([numbers] * any(isinstance(n, torch.Tensor) for n in found))
        return numbers

    real_keep_masks = choose.keep_masks
    monkeypatch.setattr(choose, "keep_masks", lambda rows: selections.append(len(rows)) or real_keep_masks(rows))
    monkeypatch.setattr(choose, "read_numbers", record)
    with torch.no_grad():
        run_update(*arguments_of(sparsifier, given, given))
        assert len(seen) == reads
        model.to("meta")
        on_meta = {name: gradient.to("meta") for name, gradient in given.items()}
        replayed = iter(seen)
        monkeypatch.setattr(choose, "read_numbers", lambda found: next(replayed))
        monkeypatch.setattr(apply, "read_numbers", lambda found: [float(t) for t in found])  # of budgets, on the host
        selections.clear()
        moved = run_update(*arguments_of(sparsifier, on_meta, on_meta))
    assert set(selections) - {0} == {3} and len(selections) <= 4  # all three tensors in each
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        moved.kept["0.weight"]


def test_whether_an_update_can_happen_is_read_once_for_all_gradients_and_optimizers():
    model = mlp()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in model[::2]]
    _, _, sparsifier = prepared(model=model)
    sparsifier.attach(optimizers)
    capture = sparsifier._capture
    gradients = {g["tensor_fqn"]: torch.randn(original(g).shape) for g in sparsifier.groups}
    for broken, skipped, expected in ((None, 0.0, True), ("2.weight", 0.0, False), (None, 1.0, False)):
        for value in (torch.nan, torch.inf, -torch.inf) if broken else (0.0,):
            capture.gradients = {n: g.clone().index_fill(0, torch.tensor(3), value) for n, g in gradients.items()}
            if broken is None:
                capture.gradients = gradients
            capture.stepped = [True, True, True]
            capture.keep, optimizers[1].found_inf = True, torch.tensor([skipped])
            with Reads() as counted:
                capture._after(optimizers[1], (), {})
                assert counted.count == 0
                assert bool(capture.is_ready(True, {})) is expected
            assert counted.count == 1
    assert capture.restorable() == [True, False, True]


@pytest.mark.parametrize("settings", [{"grow": "momentum", "redistribute": "momentum"}, {"prune": "global"}])
def test_whether_an_update_happens_is_read_with_what_its_budgets_depend_on(settings, monkeypatch):
    model, optimizer, sparsifier = prepared(update_every=2, **settings)
    train(model, optimizer, sparsifier, range(1, 2))
    assert sparsifier.settings.can_choose_first
    before = {name: m.clone() for name, m in model.state_dict().items()}
    reads = []
    real = choose.read_numbers
    monkeypatch.setattr(choose, "read_numbers", lambda found: reads.append(found) or real(found))
    for value, happens in ((torch.nan, False), (1.0, True)):
        momenta = {g["tensor_fqn"]: torch.randn(original(g).shape) for g in sparsifier.groups}
        momenta["2.weight"][0, 0] = value
        monkeypatch.setattr(sparsifier._capture, "momenta", lambda found=momenta: found)
        sparsifier._capture.gradients, sparsifier._capture.stepped = momenta, [True]
        reads.clear()
        sparsifier._pending, earlier = True, sparsifier.last_update
        sparsifier._update_all()
        assert len(reads) == 1 and isinstance(reads[0][-1], torch.Tensor)  # the last is whether it happens
        assert (sparsifier.last_update is not earlier) is happens
        assert happens or all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_an_update_that_needs_no_gradient_reads_nothing():
    _, _, sparsifier = prepared(grow="random")
    sparsifier._capture.stepped = [True]
    with Reads() as counted:
        assert sparsifier._capture.is_ready(False, {})
    assert counted.count == 0


def test_what_moved_is_read_when_it_is_looked_at(monkeypatch):
    model, optimizer, sparsifier = prepared()
    reads = []
    real = apply.read_numbers
    monkeypatch.setattr(apply, "read_numbers", lambda found: reads.append(1) or real(found))
    train(model, optimizer, sparsifier, range(1, 3))
    before = len(reads)
    moved = sparsifier.last_update
    assert moved.kept == {g["tensor_fqn"]: int(sparsifier.mask(g["tensor_fqn"]).sum()) for g in sparsifier.groups}
    assert moved.kept["0.weight"] == moved.kept["0.weight"] and len(reads) == before + 1
