"""Tied parameters: one mask under all names, one original, squashed once, and couplings under either name."""

import copy
import pickle

import hf_models
import pytest
import torch
from discovered import assert_exact, fill
from stock import EVERYTHING, refuses, stepped
from test_config import Language, prepared
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from sparsekit_ao import (
    SRSTE,
    Coupling,
    DynamicSparsifier,
    ProximalSparsifier,
    ScopeSparsifier,
    SparsityError,
    TopKAST,
    WeightNormSparsifier,
    prune,
)
from sparsekit_ao.coupling import joint_entries
from sparsekit_ao.export import dense_state_dict
from sparsekit_ao.removal import compact, removable, shrink

EMBED, HEAD = "embed.weight", "lm_head.weight"
NAMES = [  # configs, and the name that has the group
    ([{"tensor_fqn": HEAD}], HEAD),
    ([{"tensor_fqn": EMBED}], EMBED),
    ([{"tensor_fqn": "*e*.weight"}, {"tensor_fqn": HEAD}], HEAD),
    ([{"tensor_fqn": [EMBED, "lm*"]}], EMBED),
    ([{"module": (nn.Linear, nn.Embedding)}], EMBED),
]


@pytest.mark.parametrize(("config", "name"), NAMES)
def test_there_is_one_mask_under_all_names(config, name):
    model = fill(Language())
    dense = model.embed.weight.detach().clone()
    original = model.embed.weight
    sparsifier = prepared(model, config)
    assert [g["tensor_fqn"] for g in sparsifier.groups if "layers" not in g["tensor_fqn"]] == [name]
    mask = sparsifier.mask(name)
    for module in (model.embed, model.lm_head):
        assert module.parametrizations.weight.original is original and module.parametrizations.weight[0].mask is mask
        assert torch.equal(module.weight, dense * mask)
    other = {EMBED: HEAD, HEAD: EMBED}[name]
    if len(config) > 1 or "lm*" in config[0].get("tensor_fqn", ()):
        assert sparsifier.report().skipped[other] == f"tied to {name!r}, which has the mask of both"
    sparsifier.squash_mask()
    assert model.embed.weight is model.lm_head.weight is original
    assert not parametrize.is_parametrized(model.embed) and not parametrize.is_parametrized(model.lm_head)
    assert torch.equal(original, dense * mask)


def test_training_adds_the_gradients_of_both_uses():
    def run(model):
        out = model.lm_head(model.layers[0](model.embed(torch.arange(5))))
        out.square().sum().backward()

    model, plain = fill(Language()), fill(Language())
    sparsifier = prepared(model, [{"tensor_fqn": HEAD}])
    mask = sparsifier.mask(HEAD)
    with torch.no_grad():
        plain.embed.weight.mul_(mask)
    run(model)
    run(plain)
    assert torch.allclose(model.embed.parametrizations.weight.original.grad, plain.embed.weight.grad * mask)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    sparsifier.step()  # between forward and backward, too
    assert sparsifier.check() == 1


class OneName(Language):
    """The same model, in which the head reads the embedding's parameter, so that it has one name."""

    def __init__(self):
        super().__init__()
        self.lm_head = None

    def forward(self, x):
        return F.linear(self.layers[0](self.embed(x)), self.embed.weight)


class TwoNames(Language):
    def forward(self, x):
        return self.lm_head(self.layers[0](self.embed(x)))


TRAINED = {
    "RigL": lambda o: DynamicSparsifier(0.5, optimizer=o, update_every=2, grow="gradient", init="uniform"),
    "SNFS": lambda o: DynamicSparsifier(0.5, optimizer=o, update_every=2, grow="momentum", init="uniform"),
    "SR-STE": lambda o: SRSTE(0.5, decay=0.1),
    "Top-KAST": lambda o: TopKAST(0.7, backward_level=0.3),
    "proximal": lambda o: ProximalSparsifier(strength=0.5, optimizer=o),
    "proximal, budget": lambda o: ProximalSparsifier(sparsity_level=0.5, optimizer=o, scope_shape=(1, -1)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_that_of_one_parameter_with_one_name(name):
    results = []
    for model in (TwoNames(), OneName()):
        model.load_state_dict(fill(TwoNames()).state_dict(), strict=False)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        sparsifier = TRAINED[name](optimizer)
        sparsifier.prepare(model, [{"tensor_fqn": EMBED}])
        sparsifier.attach(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.arange(10)), torch.arange(10).roll(step)).backward()
            optimizer.step()
            sparsifier.step()
        mask = sparsifier.mask(EMBED).clone()
        sparsifier.squash_mask()
        results.append((mask, model.embed.weight.detach()))
        assert not mask.all() and not model.embed.weight[mask == 0].any()
        assert model.lm_head is None or model.lm_head.weight is model.embed.weight
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_zeros_of_a_tied_parameter_become_masks_that_move():
    model = fill(TwoNames())
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    sparsifier = ProximalSparsifier(nnz=40, optimizer=optimizer)
    sparsifier.prepare(model, [{"tensor_fqn": "*e*.weight"}, {"tensor_fqn": HEAD}])
    assert sparsifier.report().skipped[EMBED] == f"tied to {HEAD!r}, which has the mask of both"
    model(torch.arange(10)).square().sum().backward()
    optimizer.step()
    sparsifier.step()
    moving = sparsifier.to_masks(DynamicSparsifier(optimizer=optimizer, init="resume", update_every=1))
    assert torch.equal(model.embed.weight, model.lm_head.weight) and int(model.embed.weight.ne(0).sum()) == 40
    assert parametrize.is_parametrized(model.embed) and moving.mask(HEAD).sum() == 40


def test_state_dicts_copies_and_pickles_have_both_names_of_one_tensor():
    model = fill(Language())
    sparsifier = prepared(model, [{"tensor_fqn": EMBED, "sparsity_level": 0.25}])
    dense = dense_state_dict(model)
    assert dense[EMBED].data_ptr() == dense[HEAD].data_ptr() and int((dense[HEAD] == 0).sum()) == 20
    plain = Language()
    plain.load_state_dict(dense)
    assert torch.equal(plain.lm_head.weight, dense[EMBED])
    other = fill(Language())
    again = prepared(other, [{"tensor_fqn": EMBED, "sparsity_level": 0.25}])
    again.load_state_dict(pickle.loads(pickle.dumps(sparsifier.state_dict())))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.lm_head.weight, model.embed.weight)
    snapshot = copy.deepcopy(model)
    assert snapshot.embed.parametrizations.weight[0] is snapshot.lm_head.parametrizations.weight[0]
    sparsifier.squash_mask(model=snapshot)
    assert snapshot.embed.weight is snapshot.lm_head.weight and torch.equal(snapshot.embed.weight, model.lm_head.weight)
    assert parametrize.is_parametrized(model.lm_head)
    model.to(torch.float64)
    assert model.embed.parametrizations.weight.original is model.lm_head.parametrizations.weight.original


def test_a_name_may_be_excluded_but_not_named_twice_or_parametrized_otherwise():
    with refuses("config[1]: 'lm_head.weight' is named here, but it is tied to 'embed.weight', "):
        ScopeSparsifier().prepare(Language(), [{"tensor_fqn": EMBED}, {"tensor_fqn": HEAD}])
    with refuses("'embed.weight' is named here, but it is tied to 'lm_head.weight', left out by ex"):
        ScopeSparsifier().prepare(Language(), [{"tensor_fqn": EMBED}], exclude=["lm_head"])
    model = Language()
    sparsifier = prepared(model, [{"tensor_fqn": "*.weight"}], exclude=["lm_head"])
    assert EMBED not in sparsifier.report().skipped or "exclude[0]" in sparsifier.report().skipped[EMBED]
    assert not parametrize.is_parametrized(model.embed)
    model = Language()
    before = list(model.state_dict())
    with pytest.raises(SparsityError):  # the second tensor has no rows of 5, so the first mask is taken away again
        ScopeSparsifier().prepare(
            model, [{"tensor_fqn": EMBED}, {"tensor_fqn": "layers.0.weight", "block_shape": (5, 1)}]
        )
    assert list(model.state_dict()) == before and model.embed.weight is model.lm_head.weight


def test_other_sparsifiers_and_other_parametrizations():
    model = fill(Language())
    prepared(model, [{"tensor_fqn": HEAD}], WeightNormSparsifier(0.5))
    assert torch.equal(model.embed.weight, model.lm_head.weight) and bool((model.embed.weight == 0).any())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parametrizations.weight_norm(model[0])
    model[1].weight = model[0].parametrizations.weight.original0
    with pytest.raises(SparsityError, match="several names .* some of them are parametrized otherwise"):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": "1.weight"}])


@pytest.mark.parametrize("members", [{EMBED: "v u"}, {HEAD: "v u"}, {EMBED: "v u", HEAD: "o u"}])
def test_a_coupling_may_name_either_or_both(members):
    class Model(Language):
        def forward(self, x):
            return self.lm_head(self.layers[1](torch.relu(self.layers[0](self.embed(x)))))

    stream = {**members, "layers.0.weight": "o u", "layers.1.weight": "u i", "layers.1.bias": "u"}
    hidden = Coupling({"layers.0.weight": "u i", "layers.0.bias": "u", "layers.1.weight": "o u"}, name="hidden")
    coupling, model, x = Coupling(stream, name="stream"), fill(Model()), torch.arange(6)
    entries = joint_entries([hidden, coupling, Coupling({HEAD: "u i"}, name="vocabulary")], model, sparsity_level=0.5)
    assert [entry["tensor_fqn"] for entry in entries if entry["tensor_fqn"] in (EMBED, HEAD)] == [next(iter(members))]
    small = assert_exact(model, coupling, x)
    assert small.embed.weight is small.lm_head.weight and small.embed.embedding_dim == 4 == small.lm_head.in_features
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    with pytest.raises(SparsityError, match="have the units in different places: 'u o' and 'v u'"):
        Coupling({"0.weight": "v u", "1.weight": "u o"}).bind(model)


def test_a_tied_model_of_transformers_is_shrunk_saved_and_read_back(tmp_path):
    model, inputs = hf_models.make("Gemma2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = removable(model, inputs)
    assert "model.embed_tokens.weight" in found.couplings[0].members
    small, report = shrink(model, inputs, EVERYTHING, exclude=["*.self_attn"])
    assert small.lm_head.weight is small.model.embed_tokens.weight and report.difference <= 1e-5
    masked = copy.deepcopy(model)
    sparsifier = stepped(masked, found.couplings[0].entries(masked), sparsity_level=0.5)
    masked.save_pretrained(tmp_path, state_dict=dense_state_dict(masked))
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, masked(**inputs).logits)
    sparsifier.squash_mask()
    assert compact(masked, found.couplings[0], inputs)[1].difference <= 1e-5


def of_one_buffer(slices):
    """Two Linears whose weights are views of one tensor."""
    first, second = slices(torch.randn(32, 32))
    layers = [nn.Linear(w.shape[1], w.shape[0]) for w in (first, second)]
    for layer, weight in zip(layers, (first, second), strict=True):
        layer.weight = nn.Parameter(weight)
    return nn.Sequential(*layers)


OVERLAPPING = {
    "transposed": lambda w: (w[:16], w[:16].t()),
    "the same": lambda w: (w, w.data),
    "slice": lambda w: (w, w[4:12]),
    "expanded": lambda w: (w, w[:1].expand(16, 32)),
    "ranges of a flat buffer": lambda w: (w.view(-1)[:256].view(8, 32), w.view(-1)[128:384].view(8, 32)),
    "another dtype": lambda w: (w, w.view(torch.int32)[:8].view(torch.float16)),
}
DISTINCT = {
    "ranges of a flat buffer": lambda w: (w.view(-1)[:256].view(8, 32), w.view(-1)[256:512].view(8, 32)),
    "columns": lambda w: (w[:, :16], w[:, 16:]),
    "every other row": lambda w: (w[::2], w[1::2]),
    "meta": lambda w: (w[:16].to("meta"), w[16:].to("meta")),
}


def test_units_of_weights_that_share_memory_are_removed_from_a_copy_that_does_not():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[2].weight = nn.Parameter(model[0].weight.data.t())
    small = shrink(model, torch.randn(8, 16), 0.5)[0]
    assert [len(small[at].weight) for at in (0, 2)] == [8, 8]
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()


@pytest.mark.parametrize("name", OVERLAPPING)
def test_weights_that_share_memory_are_left_out_or_refused(name):
    model = of_one_buffer(OVERLAPPING[name])
    before = [w.detach().clone() for w in model.parameters()]
    with refuses("config[0]: '1.weight' shares memory with '0.weight'"):
        ScopeSparsifier(0.5).prepare(model, [{"tensor_fqn": "1.weight"}])
    model.append(nn.Linear(32, 128))
    sparsifier = prepared(model, None)
    assert sparsifier.report().skipped == {
        "0.weight": "shares memory with '1.weight'",
        "1.weight": "shares memory with '0.weight'",
    }
    sparsifier.squash_mask()
    _, report = prune(model, 0.5, inplace=True)  # a deep copy has no memory in common
    assert [row.tensor for row in report] == ["2.weight"] and report.left_out.keys() == {"0.weight", "1.weight"}
    assert all(torch.equal(w.nan_to_num(), b.nan_to_num()) for w, b in zip(model.parameters(), before, strict=False))


@pytest.mark.parametrize("name", DISTINCT)
def test_weights_that_lie_in_one_buffer_without_overlap_are_masked(name):
    model = of_one_buffer(DISTINCT[name])
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model)
    assert len(sparsifier.groups) == 2
    if name != "meta":
        sparsifier.step()
        sparsifier.squash_mask()
        assert [(layer.weight == 0).float().mean().item() for layer in model] == [0.5, 0.5]


def test_squash_mask_refuses_a_weight_that_began_to_share_memory_after_prepare():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    original = model[0].parametrizations.weight.original
    model[1].register_buffer("kept", original.data[2:4])
    with refuses("squash_mask: 0.weight shares memory with '1.kept'"):
        sparsifier.squash_mask()
    model[1].kept = model[1].kept.clone()
    sparsifier.squash_mask()
    assert (model[0].weight == 0).sum() == 32
