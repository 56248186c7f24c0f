"""Whole experts of an `nn.ModuleList`: masks, removal with their rows of the router, and the manifest."""

import copy
import json

import pytest
import torch
from compact_models import rebuilt
from networks import Net
from stock import same
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import Coupling, CouplingError, ScopeSparsifier, SparsityError
from sparsekit_ao.coupling import expert_couplings, joint_entries
from sparsekit_ao.removal import compact, cut_to, removable


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Tokens to their `top` experts, of some groups only if there are groups."""

    def __init__(self, width=4, experts=6, top=2, groups=1):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, 6) for _ in range(experts))
        self.num_experts, self.top, self.gate.n_group = experts, top, groups

    def forward(self, x):
        scores = self.gate(x).unflatten(-1, (self.gate.n_group, -1)).softmax(-1).flatten(-2)
        weights, chosen = scores.topk(self.top)
        share = (F.one_hot(chosen, self.num_experts) * weights.unsqueeze(-1)).sum(-2)
        return x + sum(share[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


def make(**keys):
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.Sequential(Mixture(**keys), Mixture(**keys))}).layers


X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))


def pruned(model, couplings, **keys):
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, joint_entries(couplings, model, **keys))
    sparsifier.step()
    masks = {name: sparsifier.mask(name) for group in sparsifier.groups for name in [group["tensor_fqn"]]}
    sparsifier.squash_mask()
    return masks


def dropped_experts(layer):
    return [k for k, expert in enumerate(layer.experts) if not any(p.any() for p in expert.parameters())]


def test_listed_experts_are_masked_whole_by_the_norm_of_all_their_parameters():
    model = make()
    whole = expert_couplings(model)["experts"]
    assert whole == Coupling(
        {"*.gate.weight": "u i", "*.gate.bias": "u"}, attrs={"*.num_experts": "u"}, lists=["*.experts"], name="experts"
    )
    norms = [[sum(p.square().sum() for p in e.parameters()) for e in layer.experts] for layer in model]
    masks = pruned(model, [whole], nnz=4)
    assert not any("gate" in name for name in masks) and len(masks) == 2 * 6 * 6
    for layer, own in zip(model, norms, strict=True):
        assert dropped_experts(layer) == sorted(torch.stack(own).argsort()[:2].tolist())
        assert layer.gate.weight.all()


@pytest.mark.parametrize("groups", [1, 2])
def test_dropped_experts_are_removed_with_their_rows_as_if_the_router_never_chose_them(groups):
    model = make(groups=groups)
    whole = expert_couplings(model)["experts"]
    pruned(model, [whole], nnz=4 // groups)
    with pytest.raises(SparsityError, match="the compacted model gives other outputs"):
        compact(model, whole, X)
    small, report = compact(model, whole, X, tolerance=10)
    assert report.difference > 1e-4 and "\nexperts 0  " in str(report)
    assert [len(layer.experts) for layer in small] == [layer.num_experts for layer in small] == [4, 4]
    for layer, smaller in zip(model, small, strict=True):
        dropped = dropped_experts(layer)
        kept = [k for k in range(6) if k not in dropped]
        assert torch.equal(smaller.gate.weight, layer.gate.weight[kept])
        assert groups == 1 or [sum(k // 3 == group for k in dropped) for group in range(2)] == [1, 1]
        layer.gate.bias[dropped] = -1e9  # never chosen now
    assert torch.allclose(small(X), model(X), atol=1e-6)
    exact, report = compact(model, whole, X)
    assert report.difference <= 1e-5 and torch.equal(exact(X), small(X))


def test_units_inside_of_experts_are_pruned_and_removed_together_with_whole_ones_and_rebuilt_by_the_manifest():
    model = make()
    ready = expert_couplings(model)
    couplings = [ready["expert_units"], ready["experts"]]
    pruned(model, couplings, sparsity_level=0.5)
    small, report = compact(model, couplings, X, tolerance=10)
    assert [expert.w1.out_features for layer in small for expert in layer.experts] == [3] * 6
    assert torch.equal(rebuilt(make(), small, report)(X), small(X))


def test_units_of_dropped_experts_are_not_counted():
    model = make()
    for layer in model:
        layer.hidden = 6
    ready = expert_couplings(model)
    couplings = [Coupling(ready["expert_units"].members, attrs={"**.hidden": "u"}), ready["experts"]]
    pruned(model, couplings, sparsity_level=0.5)
    small, report = compact(model, couplings, X, tolerance=10)
    assert [(layer.num_experts, layer.hidden) for layer in small] == [(3, 3), (3, 3)]
    assert len(report.couplings) == 2 * 3 + 2 and {row.kept for row in report.couplings} == {3}


def test_an_expert_with_a_bias_is_not_dropped():
    model = make()
    assert compact(model, expert_couplings(model)["experts"], X)[1].changed == ()  # nothing is dropped yet
    for name, parameter in model[0].experts.named_parameters():
        parameter.mul_(name == "1.w2.bias" or int(name[0]) > 1)
    small, _ = compact(model, expert_couplings(model)["experts"].of_layers(model)[0], X, tolerance=10)
    assert len(small[0].experts) == 5 and small[0].experts[0].w2.bias.all()


def test_a_list_inside_of_modules_of_another_list():
    def run(m, x):
        share = m.gate(x).softmax(-1)
        return sum(share[..., k : k + 1] * layer(x) for k, layer in enumerate(m.layers))

    def outer():
        return Net(run, layers=nn.ModuleList(make()), gate=nn.Linear(4, 2))

    model = outer()
    layers = Coupling({"gate.weight": "u i", "gate.bias": "u"}, lists=["layers"], name="layers")
    expert = Coupling(
        {"layers.*.gate.weight": "u i", "layers.*.gate.bias": "u"},
        attrs={"layers.*.num_experts": "u"},
        lists=["layers.*.experts"],
    )
    for module in (model.layers[0], model.layers[1].experts[2]):
        for parameter in module.parameters():
            parameter.zero_()
    small, report = compact(model, [layers, expert], X, tolerance=10)
    assert len(small.layers) == 1
    kept = [one.w1.weight for k, one in enumerate(model.layers[1].experts) if k != 2]
    assert all(torch.equal(one.w1.weight, w) for one, w in zip(small.layers[0].experts, kept, strict=True))
    assert torch.equal(rebuilt(outer(), small, report)(X), small(X))


def test_experts_of_different_kinds_move_up():
    model = make()
    for layer in model:
        layer.experts[2] = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 6), nn.Linear(6, 4))
        layer.experts[3] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 4))
        layer.experts = type("List", (nn.ModuleList,), {})(layer.experts)
        layer.experts.scale = nn.Parameter(torch.ones(3))  # of no module, so of no unit
    whole = expert_couplings(model)["experts"]
    for layer in model:
        for parameter in layer.experts[0].parameters():
            parameter.zero_()
    units = Coupling({"0.experts.2.1.weight": "u i", "0.experts.2.1.bias": "u", "0.experts.2.2.weight": "o u"})
    pruned(model, [units], nnz=3)
    small, _ = compact(model, [units, whole], X, tolerance=10)
    assert small[0].experts[1][1].out_features == 3
    assert [type(one) for one in small[0].experts] == [Expert, nn.Sequential, nn.Sequential, Expert, Expert]


def test_removable_leaves_whole_listed_experts_to_compact():
    model = make()
    ((name, why),) = removable(model, X, [expert_couplings(model)["experts"]]).left_out
    assert name == "experts" and "its units are modules of a list" in why


def test_lists_that_do_not_fit_and_changed_manifests_are_errors_that_change_nothing():
    model = make()
    gate = {"*.gate.weight": "u i"}
    for lists, message in (
        ("*.experts", "lists must be a list of names"),
        (["*.nothing"], "'\\*.nothing' in lists matches no nn.ModuleList"),
        (["0.experts"], "'0.experts' has 0 '\\*'"),
    ):
        with pytest.raises(SparsityError, match=message):
            Coupling(gate, lists=lists).bind(model)
    with pytest.raises(SparsityError, match="sets 'scope_coupling' from the coupling"):
        Coupling(gate, lists=["*.experts"]).entries(model, scope_coupling="all")
    with pytest.raises(CouplingError, match="the list 0.experts has 6 modules, but the coupling has 4 units"):
        Coupling({"*.gate.weight": "o u"}, lists=["*.experts"]).bind(model)
    with pytest.raises(CouplingError, match="order 'u s', but with lists it must be 's u'"):
        Coupling({"*.gate.weight": "(u s) i"}, scope="s", sizes={"s": 2}, lists=["*.experts"]).bind(model)
    with pytest.raises(SparsityError, match="two patterns in lists match '0.experts'"):
        Coupling({"0.gate.weight": "u i"}, lists=["0.experts", "**0.experts"]).bind(model)
    shared = make()
    shared[1].experts[3].w1.weight = shared[1].experts[2].w1.weight
    with pytest.raises(CouplingError, match="1.experts.2.w1.weight and 1.experts.3.w1.weight are one parameter, but"):
        Coupling(gate, lists=["*.experts"]).bind(shared)
    shared[1].experts[3] = shared[1].experts[2]
    with pytest.raises(SparsityError, match="1.experts.3 has no parameters of its own, .* may be in one place only"):
        Coupling(gate, lists=["*.experts"]).bind(shared)
    whole = expert_couplings(model)["experts"]
    pruned(model, [whole], nnz=4)
    with pytest.raises(SparsityError, match="both drop modules of '0.experts'"):
        compact(model, [whole, Coupling(gate, lists=["*.experts"], name="again")], X, tolerance=10)
    manifest = json.loads(json.dumps(compact(model, whole, X, tolerance=10)[1].manifest))
    for lists in (["0"], ["0.gate"], [""], ["0.experts"] * 2, ["1.experts"], ["0.__class__"], [3], "0.experts"):
        fresh, changed = make(), copy.deepcopy(manifest)
        changed["groups"][0]["lists"] = lists
        before = copy.deepcopy(fresh.state_dict())
        with pytest.raises(SparsityError, match="cut_to: "):
            cut_to(fresh, changed)
        assert same(fresh.state_dict(), before)
