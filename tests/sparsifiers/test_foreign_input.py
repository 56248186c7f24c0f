"""State dicts, manifests and configs of other origin, mutated at random: a clear error, and nothing is changed."""

import contextlib
import copy
import json
import math
import random

import pytest
import torch
from stock import reloaded, same
from torch import nn

from sparsekit_ao import (
    Coupling,
    CouplingError,
    ProximalSparsifier,
    RigL,
    ScopeSparsifier,
    SparsityError,
    one_shot,
    patterns,
)
from sparsekit_ao.removal import compact, cut_to
from sparsekit_ao.schedules import ScheduleSL, linear

COUNT = 120  # mutations of each kind
JUNK = [None, True, -1, 0, 1.5, 10**12, 10**30, -(10**30), math.nan, math.inf, 1j, b"x", "", "x", "*", "x" * 3000]
JUNK += ["__class__", "0.__dict__", "weight.__class__.__name__", "(a b", "re:(", [], {}, [[[]]], [1, 2], {"a": 1}]
JUNK += [torch.zeros(2), torch.full((4, 8), math.nan), torch.ones(4, 8, dtype=torch.complex64), torch.ones(4, 8) * 0.5]


def nodes(data):
    """(container, key) of everything inside nested dicts and lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items):
        yield data, key
        yield from nodes(value)


def mutated(data, rng, junk=JUNK):
    """A copy in which something is missing, renamed, repeated or replaced."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        found = list(nodes(data))
        if not found:
            break
        container, key = rng.choice(found)
        kind = rng.choice(["replace", "replace", "replace", "remove", "rename", "repeat"])
        if kind == "remove":
            del container[key]
        elif kind == "rename" and isinstance(container, dict):
            container[rng.choice(["__class__", "x", 3, None, f"{key}.0"])] = container.pop(key)
        elif kind == "repeat" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        else:
            container[key] = copy.deepcopy(rng.choice(junk))
    return data


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))


def scope_sparsifier():
    found = ScopeSparsifier(0.5, score="wanda")
    stages = [{"block_shape": (2, 1), "nnz": 3}, {"scope_shape": (1, 4), "sparsity_level": 0.5}]
    found.prepare(model(), [{"tensor_fqn": "0.weight", "stages": stages}, {"tensor_fqn": "2.weight", "nnz": 3}])
    found.calibrate([torch.randn(3, 8)])
    found.step()
    return found


def dynamic_sparsifier():
    found = RigL(0.5, until=100, update_every=10)
    found.prepare(model())
    return found


def proximal_sparsifier():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    found = ProximalSparsifier(strength=0.1, optimizer=optimizer, block_shape=(1, 2))
    found.prepare(net, [{"tensor_fqn": "0.weight"}])
    net(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    return found


def check_loading(load, original, data, rng):
    """Load mutations of a state dict into copies; each is refused with nothing changed, or works."""
    refused = 0
    for _ in range(COUNT):
        target, bad = copy.deepcopy(original), mutated(data, rng)
        before = copy.deepcopy(target.state_dict())
        try:
            load(target, bad)
        except SparsityError:
            refused += 1
            assert same(target.state_dict(), before)
    assert refused > COUNT // 3


@pytest.mark.parametrize("make", [scope_sparsifier, dynamic_sparsifier, proximal_sparsifier])
def test_mutated_state_dicts(make):
    original, rng = make(), random.Random(1)

    def load(target, bad):
        target.load_state_dict(bad)
        with contextlib.suppress(SparsityError):
            copy.deepcopy(target).step()

    check_loading(load, original, original.state_dict(), rng)
    load(copy.deepcopy(original), reloaded(original.state_dict()))


def test_mutated_states_of_schedulers():
    rng, sparsifier = random.Random(2), ScopeSparsifier(0.5)
    sparsifier.prepare(model())
    scheduler = ScheduleSL(sparsifier, linear(0.0, 0.5, 10))
    original, refused = copy.deepcopy(scheduler.state_dict()), 0
    for _ in range(COUNT):
        try:
            scheduler.load_state_dict(mutated(original, rng))
        except SparsityError:
            refused += 1
            assert scheduler.state_dict() == original
        scheduler.load_state_dict(original)
    assert refused > COUNT // 3


CONFIG = [
    {"tensor_fqn": "0.weight", "block_shape": [1, 2], "scope_shape": [1, -1], "sparsity_level": 0.5, "norm": 1},
    {"tensor_fqn": "2.*", "view": [[8, 2], [4, 1], 1], "nnz": 2, "edge": "partial", "scope_coupling": "a"},
]
STAGES = [
    {"tensor_fqn": "0.weight", "axes": "o (s m)", "unit": "o s m", "scope": "o s", "sizes": {"m": 4}, "nnz": 2},
    {"module": nn.Linear, "stages": [{"block_shape": [2, 1], "nnz": 1}, {"scope_shape": [1, 2]}]},
]


@pytest.mark.parametrize("config", [CONFIG, STAGES])
def test_mutated_configs(config):
    rng, refused = random.Random(3), 0
    junk = [*JUNK, patterns.rows(), len, (2, 3), [-1, 2], [[2] * 40, [0] * 40], [[2] * 40, [1] * 40]]
    for _ in range(COUNT):
        net, sparsifier = model(), ScopeSparsifier()
        before = copy.deepcopy(net.state_dict())
        try:
            sparsifier.prepare(net, mutated(config, rng, junk))
        except SparsityError:
            refused += 1
            assert same(dict(net.state_dict()), dict(before)) and sparsifier.groups == []
            continue
        sparsifier.step()
    assert refused > COUNT // 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.up, self.down = nn.Linear(2, 8, bias=False), nn.Linear(8, 2)

    def forward(self, x):
        return self.down(self.up(x))


def compacted():
    net = Attention()
    with torch.no_grad():
        net.up.weight[4:] = 0
        net.down.weight[:, 4:] = 0
    coupling = Coupling(
        {"up.weight": "(h d) i", "down.weight": "o (h d)"}, unit="h", sizes={"d": 2}, attrs={"num_heads": "h"}
    )
    return compact(net, coupling, torch.ones(1, 2))[1].manifest


def state_of(net):
    plain = {n: {k: v for k, v in vars(m).items() if not k.startswith("_")} for n, m in net.named_modules()}
    return {"attributes": plain, "tensors": dict(net.state_dict()), "classes": [type(m) for m in net.modules()]}


def test_mutated_manifests():
    manifest, rng, refused = json.loads(json.dumps(compacted())), random.Random(4), 0
    assert cut_to(Attention(), manifest).num_heads == 2
    for _ in range(2 * COUNT):
        net, bad = Attention(), mutated(manifest, rng)
        before = copy.deepcopy(state_of(net))
        try:
            cut_to(net, bad)
        except SparsityError:
            refused += 1
            assert same(state_of(net), before)
            continue
        after = state_of(net)
        assert after["classes"] == before["classes"] and vars(nn.Linear(1, 1)).keys() == vars(net.up).keys()
        assert all(type(v) in (int, bool) for own in after["attributes"].values() for v in own.values())
    assert refused > COUNT


@pytest.mark.parametrize("name", ["**" * 5 + ".weight", "a*b*c*d*e*.weight"])
def test_name_patterns_with_too_many_stars_are_refused(name):
    with pytest.raises(CouplingError, match=r"may have at most 4 '\*\*'"):
        Coupling({name: "u i"}).bind(model())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["attributes"][0].update(now=5),
        lambda m: m["attributes"][0].update(path="_hidden"),
        lambda m: m["groups"][0].update(kept=[[0, 0]]),
        lambda m: m["groups"][0].update(kept=[[1, 0]]),
    ],
)
def test_a_manifest_lowers_public_integers_and_lists_units_in_order(change):
    net, manifest = Attention(), json.loads(json.dumps(compacted()))
    net._hidden = 4
    change(manifest)
    before = copy.deepcopy(state_of(net))
    with pytest.raises(SparsityError, match="cut_to"):
        cut_to(net, manifest)
    assert same(state_of(net), before) and net._hidden == 4


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0])
def test_masks_of_other_values_than_0_and_1_are_refused(value):
    target = scope_sparsifier()
    state = target.state_dict()
    state["state"]["0.weight"]["mask"] = torch.full((4, 8), value)
    with pytest.raises(SparsityError, match="a mask must hold 0 and 1 only"):
        target.load_state_dict(state)


def test_other_tensors_than_the_prepared_ones_are_refused_unless_strict_is_false():
    target = scope_sparsifier()
    for change in (
        lambda s: s["state"].pop("2.weight"),
        lambda s: s["groups"].pop(),
        lambda s: s["state"].update({"4.weight": {"mask": torch.ones(2)}}),
    ):
        state = target.state_dict()
        change(state)
        with pytest.raises(SparsityError, match="missing tensors .* unexpected tensors"):
            target.load_state_dict(state)
        target.load_state_dict(state, strict=False)


X = torch.ones(2, 8)
BATCHES = [
    ([(X, X)], {}, r"batch \(a tuple\) is passed to Sequential as 2 positional .*forward="),
    ([{"x": X}], {}, r"as the keyword arguments x, which its forward does not take .* Give forward"),
    (None, {}, "batches must be a list of batches or a data loader, got NoneType"),
    ([X], {"token_mask": "mask"}, "token_mask='mask' is a key of each batch, but a batch is a Tensor and no dict"),
    ([X], {"forward": "model"}, "forward must be a function .* got 'model'"),
]


@pytest.mark.parametrize(("batches", "options", "text"), BATCHES, ids=range(len(BATCHES)))
def test_calibration_data_that_the_model_does_not_take(batches, options, text):
    sparsifier = ScopeSparsifier(score="wanda")
    sparsifier.prepare(model())
    before = sparsifier.model[0].weight.detach().clone()
    with pytest.raises(SparsityError, match=text):
        one_shot(sparsifier, batches, progress=False, **options)
    with pytest.raises(SparsityError, match=text) if batches is not None else contextlib.nullcontext():
        sparsifier.calibrate(batches or [X], progress=False, **options)
    assert torch.equal(sparsifier.model[0].weight, before)
