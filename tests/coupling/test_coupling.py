"""Couplings: names with stars, sizes worked out across members, entries that a sparsifier takes, errors that help."""

import pytest
import torch
from compact_models import rebuilt
from networks import Net
from stock import refuses
from torch import nn

from sparsekit_ao import Coupling, CouplingError, DynamicSparsifier, ScopeSparsifier, SparsityError
from sparsekit_ao.coupling import joint_entries
from sparsekit_ao.coupling.coupling import merged_couplings
from sparsekit_ao.removal import compact

MLP = {"layers.*.gate.weight": "u i", "layers.*.up.weight": "u i", "layers.*.down.weight": "o u"}


def stack(*hidden):
    """An embedding, and gated layers with so many units."""

    def gated(n):
        return nn.ModuleDict({"gate": nn.Linear(4, n), "up": nn.Linear(4, n, bias=False), "down": nn.Linear(n, 4)})

    return nn.ModuleDict({"embed": nn.Embedding(9, 4), "layers": nn.ModuleList(map(gated, hidden))})


def masks(model, entries):
    torch.manual_seed(0)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, entries)
    sparsifier.step()
    sparsifier.check()
    return {group["tensor_fqn"]: sparsifier.mask(group["tensor_fqn"]) for group in sparsifier.groups}


def test_a_star_makes_one_coupling_for_each_of_its_values():
    bound = Coupling(MLP).bind(stack(6, 10))
    assert [(g.name, g.captured, g.grid) for g in bound] == [
        ("layers.0.gate.weight", ("0",), (6,)),
        ("layers.1.gate.weight", ("1",), (10,)),
    ]
    assert [m.fqn for m in bound[1].members] == ["layers.1.gate.weight", "layers.1.up.weight", "layers.1.down.weight"]
    assert [g.name for g in Coupling(MLP, name="mlp").bind(stack(6, 10))] == ["mlp 0", "mlp 1"]
    assert [g.name for g in Coupling(MLP, name="mlp of layer *").bind(stack(6))] == ["mlp of layer 0"]
    model = nn.ModuleDict({f"layer{n}": nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3)) for n in (1, 2)})
    bound = Coupling({"layer*.*.weight": "u i"}).bind(model)
    assert [g.captured for g in bound] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert bound[2].name == "layer2.0.weight"


def test_two_stars_put_all_layers_into_one_coupling():
    stream = {"embed.weight": "v u", "layers.**.gate.weight": "o u", "layers.**.up.weight": "o u"}
    stream |= {"layers.**.down.weight": "u i", "layers.**.down.bias": "u"}
    (bound,) = Coupling(stream, name="stream").bind(stack(6, 10))
    assert bound.grid == (4,) and bound.captured == () and len(bound.members) == 9


def test_entries_of_every_layer_drop_the_same_units_of_all_members():
    model = stack(6, 10)
    entries = Coupling(MLP).entries(model, sparsity_level=0.5)
    assert entries[1] == {
        "tensor_fqn": "layers.0.up.weight",
        "axes": "u i",
        "unit": "u",
        "block_coupling": "layers.0.gate.weight",
        "sparsity_level": 0.5,
    }
    found = masks(model, [*entries, {"tensor_fqn": "embed.weight", "nnz": 7}])  # they mix with other entries
    for layer, keep in ((0, 3), (1, 5)):
        gate, up, down = (found[f"layers.{layer}.{n}.weight"] for n in ("gate", "up", "down"))
        assert torch.equal(gate, up) and torch.equal(gate[:, 0], down[0]) and int(gate[:, 0].sum()) == keep
    assert int(found["embed.weight"].sum()) == 7


def test_sizes_are_worked_out_across_members():
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8 * 4, 2)})
    chain = {"conv.weight": "u i h w", "norm.weight": "u", "norm.running_mean": "u", "head.weight": "o (u hw)"}
    (bound,) = Coupling(chain).bind(model)
    assert bound.grid == (8,)
    assert [m.is_parameter for m in bound.members] == [True, True, False, True]
    entries = Coupling(chain).entries(model, nnz=4)
    assert [e["tensor_fqn"] for e in entries] == ["conv.weight", "norm.weight", "head.weight"]  # no mask on a buffer
    assert entries[2]["sizes"] == {"u": 8} and "sizes" not in entries[0]
    assert masks(model, entries)["head.weight"].view(2, 8, 4).all(2).sum(1).tolist() == [4, 4]
    kernels = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1))  # whose heights and widths differ
    assert Coupling({"0.weight": "u i h w", "1.weight": "o u h w"}).bind(kernels)[0].grid == (8,)


def test_one_parameter_alone_needs_no_coupling():
    (entry,) = Coupling({"weight": "u i"}).entries(nn.Linear(2, 3), nnz=1)
    assert "block_coupling" not in entry


def test_a_prepared_model_is_found_by_the_same_names():
    model = stack(6)
    coupling = Coupling(MLP)
    before = coupling.bind(model)
    ScopeSparsifier().prepare(model, coupling.entries(model))
    assert coupling.bind(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("scores", ["sum", "mean"])
def test_scores_of_a_unit_add_over_members_as_sums_or_as_means(scores, p, dtype):
    torch.manual_seed(3)
    model = stack(40).to(dtype)
    layer = model.layers[0]
    rows = [layer.gate.weight, layer.gate.bias[:, None], layer.up.weight, layer.down.weight.T]  # one a unit
    powers = [t.detach().double().abs().pow(p) for t in rows]
    score = sum(t.sum(1) if scores == "sum" else t.mean(1) for t in powers)
    coupling = Coupling({"layers.*.gate.weight": "u i", "layers.*.gate.bias": "u"} | MLP, member_scores=scores)
    kept = masks(model, coupling.entries(model, nnz=11, norm=p))["layers.0.gate.bias"]
    assert kept.nonzero()[:, 0].tolist() == sorted(score.topk(11).indices.tolist())


def test_a_coupling_is_a_value():
    members = dict(MLP)
    coupling = Coupling(members)
    members.clear()
    assert coupling == Coupling(MLP) != Coupling({"weight": "u i"}) and hash(coupling) == hash(Coupling(MLP))
    named, turned = Coupling(MLP, name="mlp"), Coupling(dict(reversed(MLP.items())), name="mlp")
    assert named == turned and hash(named) == hash(turned)


BAD = [  # (members, other arguments, message)
    ({}, {}, "Coupling: members must be a dict {name: axes}, got {}"),
    ({"q": 3}, {}, "coupling 'q': members must map names to axes, both of type str, got 'q': 3"),
    ({"q": "(u d"}, {}, "q: axes '(u d': "),
    ({"q": "h d"}, {}, "coupling 'q': q 'h d' lacks the axis 'u'; every member needs the unit axis and the scope"),
    ({"q": "u d"}, {"scope": "kv"}, "coupling 'q': q 'u d' lacks the axis 'kv'"),
    ({"q": "u d"}, {"unit": "u d"}, "coupling 'q': unit must be one axis that is not in scope, got 'u d'"),
    ({"q": "u d"}, {"unit": 3}, "Coupling: unit must be a str, got 3"),
    ({"q": "u d"}, {"sizes": {"d": 0}}, "coupling 'q': sizes['d'] must be a positive int, got 0"),
    ({"q": "u d"}, {"sizes": [1]}, "coupling 'q': sizes must be a dict {axis: length}, got [1]"),
    ({"q": "u d"}, {"sizes": {"v": 3}}, "coupling 'q': unknown axis 'v' in sizes; the members' axes are d, u"),
    ({"q": "u d"}, {"member_scores": "max"}, "coupling 'q': member_scores must be 'sum', 'mean' or 'consumers', got"),
    ({"q": "u d"}, {"attrs": [1]}, "coupling 'q': attrs must be a dict {name of an attribute: axes} of strs, got [1]"),
    ({"q": "u d"}, {"attrs": {"n": 3}}, "attrs must be a dict {name of an attribute: axes} of strs, got {'n': 3}"),
    ({"layers.*.q": "u d", "embed": "v u"}, {}, "coupling 'layers.*.q': 'embed' has 0 '*', but 'layers.*.q' has 1"),
    ({"layers.*.q": "u d"}, {"attrs": {"a.*.*.n": "u"}}, "coupling 'layers.*.q': 'a.*.*.n' has 2 '*', but"),
]


@pytest.mark.parametrize(("members", "keys", "message"), BAD, ids=range(len(BAD)))
def test_a_coupling_with_wrong_arguments_is_refused(members, keys, message):
    with refuses(message):
        Coupling(members, **keys)


UNFIT = [  # (members, sizes, message); sizes that differ are a CouplingError
    ({"layers.*.gat.weight": "u i"}, {}, "coupling 'layers.*.gat.weight': 'layers.*.gat.weight' matches no"),
    (
        {"layers.*.gate.weight": "u i", "layers.*.extra.weight": "u i"},
        {},
        "the model has no tensor 'layers.1.extra.",
    ),
    ({"layers.*.gate.weight": "u i", "layers.*.down.bias": "u"}, {}, "gate.weight has u=6. Units must correspond"),
    ({"layers.*.gate.weight": "(u d) i"}, {}, "layers.0.gate.weight: axes '(u d) i': dimension 0 (u d) has size 6"),
    ({"layers.*.gate.weight": "(u d) i"}, {"d": 4}, "has size 6, which is not a multiple of d=4"),
    ({"embed.weight": "v u w"}, {}, "embed.weight: axes 'v u w': it has 3 dimensions, but the tensor has 2: (9, 4)"),
    ({"layers.**.gate.weight": "u i", "layers.0.**": "u i"}, {}, "layers.0.gate.weight matches both"),
    ({"layers.0.gate.weight": "(8 + u) i"}, {}, "dimension 0 has size 6, so nothing is left beside 8 + 0"),
    ({"embed.weight": "v u", "layers.0.gate.weight": "o (u + 4)"}, {}, "has size 4, so nothing is left beside 0 + 4"),
    ({"again.weight": "u i"}, {}, "'again.weight' is a second name of 'layers.0.extra.weight'; use that one"),
    ({"again.wait": "u i"}, {}, "'again.wait' matches no parameter or buffer of the model"),
    *(
        (
            {"layers.0.up.weight": one, "layers.1.up.weight": other},
            {axis: 2 for axis in "d" if axis in one},
            "are one tensor, but have the units in different places",
        )
        for one, other in (("(2 + u) i", "(u + 2) i"), ("(u d) i", "(d u) i"), ("(u d) i", "(u + 3) i"))
    ),
]


@pytest.mark.parametrize(("members", "sizes", "message"), UNFIT, ids=range(len(UNFIT)))
def test_a_coupling_that_does_not_fit_the_model_is_refused(members, sizes, message):
    model = stack(6, 6)
    model["again"] = model.layers[0].extra = nn.Linear(1, 6)
    model.layers[1]["up"].weight = model.layers[0]["up"].weight
    with pytest.raises(SparsityError) as e:
        Coupling(members, sizes=sizes).bind(model)
    assert message in str(e.value) and isinstance(e.value, CouplingError) == ("Units must correspond" in message)


def test_entries_refuse_keys_of_the_coupling_itself_and_couplings_of_buffers():
    with pytest.raises(SparsityError, match="coupling 'weight': entries sets 'axes' from the coupling; do not pass it"):
        Coupling({"weight": "u i"}).entries(nn.Linear(2, 3), axes="o u")
    with pytest.raises(SparsityError, match="no member is a parameter, so there is nothing to put a mask on"):
        Coupling({"running_mean": "u"}).entries(nn.BatchNorm1d(3))


MEANS = [
    ({"member_scores": "max"}, "weight: member_scores must be 'sum', 'mean' or 'consumers', got 'max'"),
    ({"member_scores": "mean"}, "weight: member_scores needs a block_coupling"),
    ({"member_scores": "mean", "norm": float("inf")}, "weight: member_scores='mean' needs norm 1 or 2, whose powers"),
]


@pytest.mark.parametrize(("keys", "message"), MEANS, ids=range(len(MEANS)))
def test_member_scores_with_wrong_values_are_refused(keys, message):
    with pytest.raises(SparsityError) as e:
        ScopeSparsifier().prepare(nn.Linear(2, 3), [{"tensor_fqn": "weight", **keys}])
    assert message in str(e.value)


def test_coupled_members_must_agree_on_their_scores_and_dynamic_masks_have_none():
    entries = Coupling({"weight": "u i", "bias": "u"}, member_scores="mean").entries(nn.Linear(2, 3), nnz=1)
    with pytest.raises(CouplingError, match="members need the same member_scores, but weight gives 'mean' and bias"):
        ScopeSparsifier().prepare(nn.Linear(2, 3), [entries[0], {**entries[1], "member_scores": "sum"}])
    model = nn.Linear(2, 3)
    moving = DynamicSparsifier(sparsity_level=0.5, optimizer=torch.optim.SGD(model.parameters()), init="uniform")
    with pytest.raises(SparsityError, match="unknown key 'member_scores'"):
        moving.prepare(model, entries)


def test_a_size_that_was_given_and_does_not_fit_is_not_blamed_on_a_member():
    model = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 2))
    with pytest.raises(SparsityError, match=r"^0.weight: .*99") as e:
        Coupling({"0.weight": "u i", "1.weight": "o u"}, sizes={"u": 99}).bind(model)
    assert not isinstance(e.value, CouplingError) and "0.weight has" not in str(e.value)


def test_the_parts_of_a_concatenation_have_units_of_their_own_and_are_removed_one_by_one():
    def branches():
        parts = {"a": nn.Linear(3, 4), "b": nn.Linear(3, 6), "c": nn.Linear(10, 2)}
        return Net(lambda m, x: m.c(torch.cat([m.a(x), torch.tanh(m.b(x))], -1)), **parts)

    torch.manual_seed(0)
    model, inputs = branches(), torch.randn(5, 3)
    first, second = (
        Coupling({f"{name}.weight": "u i", f"{name}.bias": "u", "c.weight": part}, name=name)
        for name, part in (("a", "o (u + 6)"), ("b", "o (4 + u)"))
    )
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, joint_entries([first, second], model, sparsity_level={"a": 0.5, "b": 2 / 3}))
    sparsifier.step()
    sparsifier.check()
    kept = sparsifier.mask("c.weight")[0]
    assert [int(part.sum()) for part in kept.split([4, 6])] == [2, 2]
    sparsifier.squash_mask()
    small, report = compact(model, [first, second], inputs)
    assert small.c.weight.equal(model.c.weight[:, kept]) and report.after.parameters == 26
    assert torch.equal(rebuilt(branches(), small, report)(inputs), small(inputs))
    with pytest.raises(CouplingError, match="of its .2, 10. that do not form a rectangle"):
        compact(model, [second, Coupling({"c.weight": "o (3 + u)"}, name="c")], inputs)


KINDS = [
    ({"l.*.attn.q.weight": "(u g d) i", "l.*.attn.k.weight": "(u d) i", "l.*.attn.o.weight": "o (u g d)"}, "key heads"),
    ({"l.*.attn.q.weight": "(s u d) i", "l.*.attn.o.weight": "o (s u d)"}, "query heads"),
    ({"l.*.attention.qkv.weight": "(u g d) i", "l.*.attention.dense.weight": "o (u d)"}, "heads"),
    ({"l.*.attn.q.weight": "(u d) i", "l.*.attn.table": "o u", "l.*.attn.o.weight": "o (u d)"}, "heads"),
    ({"l.*.attn.c_attn.weight": "o (d s u)", "l.*.attn.c_proj.weight": "(s u) i"}, "head size"),
    ({"l.*.mlp.up_proj.weight": "u i", "l.*.mlp.down_proj.weight": "o u"}, "mlp"),
    ({"0.weight": "u i", "2.weight": "o u"}, "mlp"),
    ({"l.*.conv2.weight": "u i h w", "l.*.bn2.weight": "u", "l.*.conv3.weight": "o (u + 4) 1 1"}, "conv2 channels"),
    ({"embed.weight": "o u", "l.**.attn.q.weight": "o u"}, "width"),
    ({"embed.weight": "o u", "l.0.attn.q.weight": "o u", "l.1.attn.q.weight": "o u"}, "width"),
    ({"features.0.0.weight": "u i h w", "features.1.0.weight": "o u h w"}, "features channels"),  # a chain of layers
    ({"0.0.weight": "u i h w", "0.**.bias": "u", "0.1.weight": "u", "1.0.weight": "o u h w"}, "channels"),
    ({"f.2.conv.0.0.weight": "u i h w", "f.2.conv.1.0.weight": "u 1 h w", "f.2.conv.1.1.weight": "u"}, "conv channels"),
    ({"blocks.0.fc.weight": "u i", "blocks.1.fc.weight": "u i", "blocks.1.norm.weight": "u"}, "width"),  # a sum
    ({"l.*.mlp.experts.gate_up_proj": "o (d u) h", "l.*.mlp.experts.down_proj": "o i u"}, "expert units"),
    ({"l.*.mlp.experts.gate_up_proj": "u a b", "l.*.mlp.gate.weight": "u i"}, "experts"),
    ({"experts.*.conv.weight": "u i h w", "experts.*.out.weight": "o u h w"}, "expert units"),
    ({"rnn.weight_ih_l0": "(g u) i", "rnn.weight_hh_l0": "(g u) u"}, "rnn units"),
]


@pytest.mark.parametrize(("members", "kind"), KINDS)
def test_the_kind_of_units_is_named_for_people(members, kind):
    text = next(iter(members.values()))
    assert Coupling(members, scope="s" if "s" in text else "").kind == kind


def test_a_name_that_several_couplings_would_have_is_refused():
    members = {"layers.*.experts.*.up.weight": "u i", "layers.*.experts.*.down.weight": "o u"}
    with refuses(
        "coupling 'layer *': the name has 1 '*', but 'layers.*.experts.*.up.weight' has 2, so several couplings would "
        "have the same name; write 2 '*' in the name, or none"
    ):
        Coupling(members, name="layer *")
    experts = {name: nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for name in "ab"}
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleDict(experts)})])})
    for name, names in (
        ("experts", ["experts 0 a", "experts 0 b"]),
        ("* of layer *", ["0 of layer a", "0 of layer b"]),
    ):
        assert [bound.name for bound in Coupling(members, name=name).bind(model)] == names


def test_axes_of_merged_couplings_stay_apart():
    model = nn.ModuleDict({"q": nn.Linear(3, 8), "v": nn.Linear(8, 12)})
    first = Coupling({"q.weight": "(s d u) i"}, scope="s", sizes={"s": 2, "d": 2})
    for axes in ("(t u) d", "(t u) s", "(t u) i"):
        merged = merged_couplings(first, Coupling({"v.weight": axes}, scope="t", sizes={"t": 2}), model)
        assert merged.bind(model)[0].grid == (2, 2)
    merged = merged_couplings(Coupling({"q.weight": "u i"}), Coupling({"v.weight": "o v"}, unit="v"), model)
    assert merged.members == {"q.weight": "u i", "v.weight": "o u"}
    merged = merged_couplings(Coupling({"q.weight": "u i"}), Coupling({"v.weight": "u v"}, unit="v"), model)
    assert merged.bind(model)[0].grid == (8,)


def test_layers_of_different_sizes_cannot_share_units():
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(3, 8), nn.Linear(3, 6)]), "b": nn.Linear(3, 8)})
    layers, single = Coupling({"a.*.weight": "u i"}), Coupling({"b.weight": "u i"})
    assert merged_couplings(layers, single, model) is None
    model["a"][1] = nn.Linear(3, 8)
    assert merged_couplings(layers, single, model).members == {"a.**.weight": "u i", "b.weight": "u i"}
