"""compact and cut_to beyond the exact cases: what is kept, what is reported, and the errors."""

import math

import einops
import pytest
import torch
from compact_models import (
    CASES,
    MLP,
    NET,
    PAIR,
    STREAM,
    Attention,
    Decoder,
    GatedMLP,
    Residual,
    RootMeanSquare,
    dropping,
    pair,
    pruned,
    refusal,
    shaken,
    x,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import Net
from torch import nn

from sparsekit_ao import Coupling, CouplingError, ScopeSparsifier, SparsityError
from sparsekit_ao.removal import compact, cut_to
from sparsekit_ao.removal.remove import find_removal

STREAM_COUPLING = Coupling(STREAM, name="stream")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.data())
def test_what_is_left_is_the_dense_models_slice(width, data):
    drop = data.draw(st.lists(st.integers(0, width - 1), unique=True, max_size=width - 1))
    multiple = data.draw(st.integers(1, 4))
    model = dropping(pair(width), *drop)
    small, report = compact(model, PAIR, x(), multiple_of=multiple)
    keep = sorted(set(range(width)) - set(drop))
    wanted = min(-(-len(keep) // multiple) * multiple, width)
    keep = sorted(keep + sorted(drop)[: wanted - len(keep)])
    assert report.couplings[0].kept == wanted == small[0].out_features == small[2].in_features
    assert torch.equal(small[0].weight, model[0].weight[keep]) and torch.equal(small[0].bias, model[0].bias[keep])
    assert torch.equal(small[2].weight, model[2].weight[:, keep]) and torch.equal(small[2].bias, model[2].bias)


def test_a_weight_that_is_not_zero_keeps_its_unit():
    model = dropping(pair(), 1, 4)
    with torch.no_grad():
        model[2].weight[0, 4] = 1e-30
        model[0].weight[1, 0] = float("nan")
    assert find_removal(dropping(model, 2), PAIR.bind(model)[0], 1).kept == 7


def test_a_coupling_without_a_unit_left_keeps_one():
    small, report = compact(dropping(pair(), *range(8)), PAIR, x())
    assert report.couplings[0].kept == 1 and small[0].out_features == 1


def test_multiples_may_be_given_by_coupling():
    couplings = [Coupling(MLP, name="mlp of *"), STREAM_COUPLING]
    model = pruned(Decoder(RootMeanSquare), couplings, level=0.4)
    rows = {
        r.name: r.kept for r in compact(model, couplings, torch.arange(6)[None], multiple_of={"stream": 4})[1].couplings
    }
    assert rows == {"mlp of 0": 8, "mlp of 1": 8, "stream": 8}
    rows = {r.name: r.kept for r in compact(model, couplings, torch.arange(6)[None], multiple_of=5)[1].couplings}
    assert rows == {"mlp of 0": 10, "mlp of 1": 10, "stream": 5}
    message = refusal(SparsityError, model, couplings, x(), multiple_of={"streams": 4})
    assert message == "multiple_of names 'streams', but the couplings are 'mlp of *', 'stream'"
    assert "multiple_of must be a positive int, got 0" in refusal(SparsityError, model, couplings, x(), multiple_of=0)


def test_the_report_as_text():
    _, report = compact(dropping(pair(), 0, 1, 2, 3, 4, 5), PAIR, x())
    assert str(report).splitlines()[:5] == [
        "coupling  kind  kept",
        "hidden    mlp   2 of 8 units",
        "parameters: 58 -> 16 (0.276)",
        "bytes: 232 -> 64 (0.276)",
        "flops: 288 -> 72 (0.250)",
    ]


def test_units_that_are_zero_in_some_members_only_are_kept_and_reported():
    model = dropping(pair(), 0, 1)
    with torch.no_grad():
        model[0].weight[5] = 0
    _, report = compact(model, PAIR, x())
    assert str(report).startswith(
        "coupling  kind  kept\nhidden    mlp   6 of 8 units (1 of them zero in some members only)\n"
    )
    name = "units inside every packed expert"
    torch.manual_seed(0)
    _, report = compact(pruned(CASES[name][0](), [CASES[name][1]]), CASES[name][1], CASES[name][2]())
    assert str(report).startswith("coupling  kind      kept\nup        channels  4 of 8 units in each of 6 scopes\n")


def test_the_model_is_left_as_it_is_even_while_it_trains():
    torch.manual_seed(0)
    model = nn.Sequential(*pair()[:2], nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    model[0].weight.requires_grad_(False)
    names = {"0.weight": "u i", "0.bias": "u", "4.weight": "o u"}
    coupling = Coupling({**names, **{f"2.{t}": "u" for t in ("weight", "bias", "running_mean", "running_var")}})
    pruned(model, [coupling])
    state = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    small, _ = compact(model, coupling, x())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training for module in (*model.modules(), *small.modules()))
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not small[0].weight.requires_grad and small[4].weight.requires_grad
    assert {p.data_ptr() for p in small.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


def test_a_tensor_of_two_names_is_made_smaller_once_and_stays_one():
    torch.manual_seed(0)
    model = Decoder(nn.RMSNorm, tied=True)
    with torch.no_grad():
        for name in STREAM:
            for fqn, p in model.named_parameters():
                if fqn == name or (name.split("**.")[-1] in fqn and "**" in name):
                    view = p if p.ndim == 1 else p.T if STREAM[name].endswith(" u") else p
                    view[::2] = 0
    for names in (STREAM, {k: v for k, v in STREAM.items() if k != "head.weight"}):
        small, report = compact(model, Coupling(names), torch.arange(6)[None])
        assert small.embed.weight is small.head.weight and small.head.in_features == 4 == small.embed.embedding_dim
        assert report.after.parameters == sum(p.numel() for p in small.parameters())
        fresh = cut_to(Decoder(nn.RMSNorm, tied=True), report.manifest)
        assert fresh.embed.weight is fresh.head.weight and fresh.head.weight.shape == (11, 4)


def test_a_16_bit_model_is_compared_in_float32():
    model = dropping(pair(64).bfloat16(), *range(16, 64))
    small, report = compact(model, PAIR, x().bfloat16())
    assert report.difference <= 1e-6 and small[0].weight.dtype == torch.bfloat16
    assert report.after.bytes == 2 * report.after.parameters


def test_where_rounding_alone_is_too_much_float64_decides():
    def amplified(m, x):  # so that the last bits of float32 count; the order of a sum depends on its length everywhere
        hidden = m.net[:2](x)
        return torch.sin(1e4 * (m.net[2](hidden) + hidden.sum(-1, keepdim=True)))

    model = Net(amplified, net=dropping(pair(64), *range(0, 64, 3)))
    nn.init.zeros_(model.net[0].bias)
    inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    report = compact(model, NET, inputs)[1]
    assert report.difference > 1e-5 and report.in_float64 < 1e-9
    assert "rounding: in float64 it is" in str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folded_weights_of_16_bits_are_rounded_only_after_the_comparison(dtype):
    torch.manual_seed(0)
    model = pruned(shaken(Decoder(nn.RMSNorm)).to(dtype), [STREAM_COUPLING])
    report = compact(model, STREAM_COUPLING, torch.arange(6)[None])[1]
    assert report.difference <= 1e-5 and len(report.notes) == 3
    assert f"not exact: norm.weight: its folded weight is rounded to {dtype}" in str(report)


def test_positional_and_named_inputs():
    model = Net(lambda m, a, b: {"sum": [m.net(a + b)], "flag": True}, net=dropping(pair(), 3))
    for inputs in ((x(), x()), [x(), x()], {"a": x(), "b": x()}):
        assert compact(model, NET, inputs)[1].couplings[0].kept == 7


def test_a_fresh_model_may_be_on_the_meta_device():
    small, report = compact(dropping(pair(), 1, 5), PAIR, x())
    with torch.device("meta"):
        fresh = pair()
    cut_to(fresh, report.manifest).load_state_dict(small.state_dict(), assign=True)
    assert torch.equal(fresh(x()), small(x()))


def test_cut_to_refuses_other_models_and_changes_nothing():
    small, report = compact(dropping(pair(), 1, 5), PAIR, x())
    with pytest.raises(SparsityError, match=r"cut_to: 0.weight is \(6, 4\), but the dense model's was \(8, 4\)"):
        cut_to(small, report.manifest)
    assert small[0].weight.shape == (6, 4)
    with pytest.raises(SparsityError, match="cut_to: the manifest is of another model"):
        cut_to(nn.Linear(2, 2), report.manifest)
    with pytest.raises(SparsityError, match="cut_to: the manifest has version 7, this library reads 1"):
        cut_to(pair(), {**report.manifest, "version": 7})


def test_cut_to_refuses_other_attributes_and_changes_nothing():
    make, coupling, inputs = CASES["packed qkv"]
    _, report = compact(pruned(make(), [coupling]), coupling, inputs())
    other = make()
    other.num_heads = 8
    before = repr(other)
    with pytest.raises(SparsityError, match="^cut_to: 'num_heads' is 8, but was 4 in the dense model; construct"):
        cut_to(other, report.manifest)
    del other.num_heads
    with pytest.raises(SparsityError, match="^cut_to: the model has no attribute 'num_heads'"):
        cut_to(other, report.manifest)
    assert repr(other) == before and other.qkv.weight.shape == make().qkv.weight.shape


def test_the_memory_format_of_weights_is_preserved():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    coupling = Coupling({"0.weight": "u i h w", "0.bias": "u", "2.weight": "o u h w"})
    model = pruned(model, [coupling]).to(memory_format=torch.channels_last)
    small, _ = compact(model, coupling, torch.randn(1, 3, 9, 9))
    for at in (0, 2):
        assert small[at].weight.is_contiguous(memory_format=torch.channels_last), at
        assert not small[at].weight.is_contiguous(), at


@pytest.mark.parametrize("tolerance", [-1, "x", True, float("nan"), None])
def test_a_tolerance_is_a_number(tolerance):
    assert refusal(SparsityError, dropping(pair(), 1), PAIR, x(), tolerance=tolerance) == (
        f"tolerance must be a number >= 0, got {tolerance!r}"
    )


def test_attributes_that_cannot_be_set_are_refused_before_anything_runs():
    class Told(Residual):
        hidden = property(lambda self: self.layers[0].up_proj.out_features)

    model = Told(GatedMLP())
    coupling = Coupling(MLP, name="mlp", attrs={"hidden": "u"})
    assert refusal(SparsityError, pruned(model, [coupling]), coupling, torch.randn(2, 6)) == (
        "coupling 'mlp 0': attrs 'hidden' is a property that cannot be set; list what it is computed from"
    )
    message = refusal(SparsityError, pruned(model, [coupling]), coupling, torch.randn(2, 6), attrs={3: "u"})
    assert message == "attrs must be a dict {name of an attribute: axes} of strs, got {3: 'u'}"


def test_masks_must_be_squashed_first():
    model, sparsifier = pair(), ScopeSparsifier()
    sparsifier.prepare(model, PAIR.entries(model))
    sparsifier.step()
    assert refusal(SparsityError, model, PAIR, x()) == (
        "0.weight is still parametrized (masked, perhaps), so nothing can be removed from it; call squash_mask first"
    )


def test_a_layer_norm_over_a_pruned_axis_is_reported_as_not_exact():
    torch.manual_seed(0)
    model = pruned(Decoder(nn.LayerNorm), [Coupling({**STREAM, "norm.bias": "u", "norms.**.bias": "u"}, name="stream")])
    coupling = Coupling({**STREAM, "norm.bias": "u", "norms.**.bias": "u"}, name="stream")
    message = refusal(SparsityError, model, coupling, torch.arange(6)[None])
    assert message.startswith("the compacted model gives other outputs: a relative difference of ")
    assert "zeroed units that act on others (through a softmax or a norm)." in message
    assert "\n  coupling 'stream' by itself gives other outputs" in message
    assert "not exact: norm.weight: a LayerNorm over a pruned axis has statistics of fewer values" in message
    small, report = compact(model, coupling, torch.arange(6)[None], tolerance=10)
    assert len(report.notes) == 3 and report.difference > 1e-2 and "not exact: norm.weight" in str(report)
    assert small.norm.normalized_shape == (4,)


def test_a_norm_that_cannot_be_folded_is_reported_as_not_exact():
    class Cubed(RootMeanSquare):
        def forward(self, x):
            return super().forward(x) * x.shape[-1]

    model = pruned(Decoder(Cubed), [STREAM_COUPLING])
    assert "not exact: norm.weight: a Cubed over a pruned axis" in refusal(
        SparsityError, model, STREAM_COUPLING, torch.arange(6)[None]
    )


@pytest.mark.parametrize("names", ["norms.**.weight", "norms.0.weight", "norms.1.weight"])
def test_norms_that_share_one_weight_are_all_folded_or_none(names):
    def tied(second):
        torch.manual_seed(0)
        model = shaken(Decoder(RootMeanSquare))
        model.norms[1] = second(8)
        model.norms[1].weight = model.norms[0].weight
        return pruned(model, [coupling])

    coupling = Coupling({name: axes for name, axes in STREAM.items() if name != "norms.**.weight"} | {names: "u"})
    model, tokens = tied(RootMeanSquare), torch.arange(6)[None]
    with torch.no_grad():
        model.embed.weight.mul_(1e-2)  # so that eps matters
        small, report = compact(model, coupling, tokens)
        assert [norm.variance_epsilon for norm in small.norms] == [2 * norm.variance_epsilon for norm in model.norms]
        assert torch.allclose(small(tokens), model(tokens), rtol=1e-5, atol=1e-7) and not report.notes
    assert "a LayerNorm over a pruned axis" in refusal(SparsityError, tied(nn.LayerNorm), coupling, tokens)


def test_the_coupling_that_is_wrong_is_named_and_no_other():
    wrong = {name: axes for name, axes in MLP.items() if "up_proj.bias" not in name}
    model = Residual(GatedMLP(), GatedMLP(), GatedMLP())
    layer = {0: MLP, 1: wrong, 2: MLP}
    couplings = [
        Coupling({n.replace("*", str(k)): a for n, a in names.items()}, name=f"mlp {k}") for k, names in layer.items()
    ]
    message = refusal(SparsityError, pruned(model, couplings), couplings, torch.randn(2, 5, 6))
    assert message.startswith("the compacted model does not run: ")
    assert "\n  coupling 'mlp 1' by itself does not run: " in message
    assert "'mlp 0'" not in message and "'mlp 2'" not in message


def test_a_size_that_is_not_listed_is_reported():
    _, couplings, inputs = CASES["packed qkv"]
    unlisted = Coupling(couplings.members, sizes=couplings.sizes, name="heads")
    torch.manual_seed(0)
    model = pruned(CASES["packed qkv"][0](), [couplings])
    message = refusal(SparsityError, model, unlisted, inputs())
    assert "possibly a removed size (list it in attrs): num_heads = 4, as 'heads' had" in message
    small, report = compact(model, unlisted, inputs(), attrs={"num_heads": "u"})
    assert small.num_heads == 2 and not report.unlisted
    model = Residual(GatedMLP())
    model.hidden = 12
    report = compact(pruned(model, [Coupling(MLP)]), Coupling(MLP, name="mlp"), torch.randn(2, 6))[1]
    assert report.unlisted == () and model.hidden == 12  # not near the members


ATTRS = [
    ({"heads": "u"}, "coupling 'heads': attrs the model has no attribute 'heads'"),
    ({"num_heads": "u d"}, "coupling 'heads': attrs 'num_heads' is 4, but u=4 * d=3 is 12; name other axes"),
    ({"size": "d"}, "coupling 'heads': attrs 'size' = 'd' lacks the unit axis 'u', so it would not change"),
    ({"num_heads": "u x"}, "coupling 'heads': attrs 'num_heads' = 'u x': unknown axis 'x'; the coupling has sizes of "),
    ({"layers.**.num_heads": "u"}, "coupling 'heads': attrs the model has no attribute 'layers.**.num_heads'"),
]


@pytest.mark.parametrize(("attrs", "message"), ATTRS, ids=range(len(ATTRS)))
def test_attributes_that_do_not_fit_are_refused(attrs, message):
    make, coupling, inputs = CASES["packed qkv"]
    coupling = Coupling(coupling.members, sizes=coupling.sizes, attrs=attrs, name="heads")
    assert refusal(SparsityError, pruned(make(), [coupling]), coupling, inputs()).startswith(message)


def layer_couplings(model, *levels):
    """A coupling a layer, which all list one number; each is pruned to its level."""
    couplings = [
        Coupling({n.replace("*", str(k)): a for n, a in MLP.items()}, name=f"mlp {k}", attrs={"hidden": "u"})
        for k in range(len(levels))
    ]
    for coupling, level in zip(couplings, levels, strict=True):
        pruned(model, [coupling], level=level)
    return couplings


def test_couplings_of_several_layers_that_agree_shrink_one_number_once():
    model, inputs = Residual(GatedMLP(), GatedMLP(), GatedMLP()), torch.randn(2, 5, 6)
    model.hidden = 12
    small, report = compact(model, layer_couplings(model, 0.5, 0.5, 0.5), inputs)
    assert small.hidden == 6 and [c["now"] for c in report.manifest["attributes"]] == [6]
    other = Residual(GatedMLP(), GatedMLP())
    other.hidden = 12
    assert refusal(SparsityError, other, layer_couplings(other, 0.5, 0.25), inputs) == (
        "coupling 'mlp 1': attrs 'hidden' is one number for several layers, but 'mlp 0' keeps 6 of 12 and 'mlp 1' 9 of "
        "12. Keep equal numbers, or do not list it."
    )
    assert other.hidden == 12


def test_two_couplings_of_one_tensor_cannot_both_hold_the_whole_of_one_number():
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
    model.hidden = 12
    first = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"}, name="first", attrs={"hidden": "u"})
    second = Coupling({"2.weight": "u i", "2.bias": "u", "4.weight": "o u"}, name="second", attrs={"hidden": "u"})
    assert refusal(SparsityError, pruned(model, [first, second]), [first, second], x()) == (
        "coupling 'second': attrs 'hidden' is 12, and other couplings that list it leave 6, no multiple of the 12 "
        "units here. Each coupling must count a factor of its own; if all hold the same number, list it in one of them."
    )
    assert model.hidden == 12


def test_attributes_given_to_compact_go_to_the_one_coupling_that_has_their_axes():
    make, coupling, inputs = CASES["packed qkv"]
    model = pruned(make(), [coupling])
    message = refusal(SparsityError, model, [coupling, coupling], inputs(), attrs={"num_heads": "u"})
    assert message == (
        "attrs['num_heads'] = 'u' must name the unit axis of one coupling, its scope axes and its sizes, but fits "
        "'qkv.weight', 'qkv.weight'. Pass it to its coupling: Coupling(..., attrs={...}), or name units differently."
    )
    assert "but fits none" in refusal(SparsityError, model, coupling, inputs(), attrs={"num_heads": "v"})


def test_different_numbers_of_query_heads_are_refused():
    _, coupling, inputs = CASES["query heads inside every kv head"]
    torch.manual_seed(0)
    model = pruned(Attention(), [coupling])
    with torch.no_grad():
        kept = model.q.weight.view(4, 3, -1).ne(0).any(2)
        model.q.weight.view(4, 3, -1)[2, kept[2].nonzero()[0]] = 0
        model.o.weight.view(10, 4, 3, 4)[:, 2, kept[2].nonzero()[0]] = 0
    assert refusal(CouplingError, model, coupling, inputs()) == (
        "coupling 'q.weight': scope 0 of kv keeps 2 of 3 units, but scope 2 keeps 1; a dense layer needs the same "
        "number in each. Prune with the coupling's own entries, which give every scope the same budget."
    )


def test_couplings_that_keep_no_rectangle_are_refused():
    model = nn.Sequential(nn.Linear(2, 12))
    with torch.no_grad():
        model[0].weight[:6] = 0
        model[0].weight[::3] = 0
    couplings = [
        Coupling({"0.weight": "(u b) i", "0.bias": "(u b)"}, sizes={"b": 6}, name="halves"),
        Coupling({"0.weight": "(b u) i", "0.bias": "(b u)"}, sizes={"b": 4}, name="thirds"),
        Coupling({"0.weight": "(u b) i", "0.bias": "(u b)"}, sizes={"b": 1}, name="rows"),
    ]
    assert (
        "0.weight: the couplings 'halves', 'rows' keep elements of its (12, 2) that do not form a rectangle"
        in refusal(CouplingError, model, [couplings[0], couplings[2]], x(2))
    )


def test_scopes_inside_the_unit_of_a_tensor_of_two_couplings_are_refused():
    model = nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        model.weight.view(2, 2, 2)[0, 0] = 0
        model.weight.view(2, 2, 2)[1, 1] = 0
        model.weight[:, 0] = 0
    model.forward = lambda: model.weight[model.weight != 0].sum()
    couplings = [
        Coupling({"weight": "(u s) i"}, scope="s", sizes={"s": 2}, name="pairs"),
        Coupling({"weight": "o u"}, name="in"),
    ]
    assert refusal(CouplingError, model, couplings, ()) == (
        "weight: the couplings 'pairs', 'in' share one tensor, and one of them keeps different units in scopes that "
        "vary faster than the unit; compact by one coupling after the other"
    )
    small, _ = compact(compact(model, couplings[0], ())[0], couplings[1], ())
    assert torch.equal(small.weight, model.weight[[2, 1], 1:])


PARTS = [
    (nn.Conv2d(8, 8, 1, groups=2), "a Conv2d of 2 groups can lose whole groups, or equally many channels of each"),
    (nn.GroupNorm(2, 8), "a GroupNorm of 2 groups can lose whole groups, or equally many channels of each"),
]


@pytest.mark.parametrize(("layer", "message"), PARTS, ids=["conv", "norm"])
def test_parts_of_groups_cannot_be_removed(layer, message):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer)
    second = "u i h w" if isinstance(layer, nn.Conv2d) else "u"
    coupling = Coupling({"0.weight": "u i h w", "0.bias": "u", "1.weight": second, "1.bias": "u"})
    with torch.no_grad():
        model[0].weight[1:4] = 0
        model[1].weight[1:4] = 0
    text = refusal(SparsityError, model, coupling, torch.randn(1, 3, 2, 2))
    assert text.startswith(f"1.weight: axes {second!r}: ") and message in text
    assert text.endswith("write its first dimension as factors of which the first make 2")


def test_a_model_that_does_not_run_or_returns_nothing_is_refused():
    text = refusal(SparsityError, pair(), PAIR, x(5))
    assert text.startswith("the model does not run on example_inputs: ") and "mat1 and mat2 shapes" in text
    silent = Net(lambda m, x: (m.net(x), None)[1], net=pair())
    assert refusal(SparsityError, silent, NET, x()) == "the model returned no tensor, so there is nothing to compare"
    assert "no member is a parameter" in refusal(
        SparsityError, nn.BatchNorm1d(3), Coupling({"running_mean": "u"}), x(3)
    )


@pytest.mark.parametrize("couplings", [[], {"0.weight": "u i"}, [{"0.weight": "u i"}], None])
def test_couplings_must_be_couplings(couplings):
    assert (
        refusal(SparsityError, pair(), couplings, x())
        == f"couplings must be a Coupling or a list of them, got {couplings!r}"
    )


def test_outputs_that_are_not_finite_are_never_called_equal():
    model = dropping(pair(), 1)
    with torch.no_grad():
        model[2].bias[0] = float("nan")
    assert refusal(SparsityError, model, PAIR, x()) == (
        "the model's output contains nan on example_inputs, and nan equals nothing. Pass inputs and attention "
        "masks for which every output is a number."
    )
    with torch.no_grad():
        model[2].bias[0] = float("inf")
    assert compact(model, PAIR, x())[1].difference <= 1e-5  # the same infinity is no difference


@st.composite
def packed(draw):
    """Axes s, u, a, b packed into dimensions in some order, with their sizes and the units that each scope keeps."""
    sizes = {axis: draw(st.integers(1, 4)) for axis in "suab"}
    order = draw(st.permutations("suab"))
    cuts = sorted(draw(st.sets(st.integers(1, 3))))
    dimensions = [order[i:j] for i, j in zip([0, *cuts], [*cuts, 4], strict=True)]
    kept = draw(st.integers(1, sizes["u"]))
    keep = [sorted(draw(st.permutations(range(sizes["u"])))[:kept]) for _ in range(sizes["s"])]
    return " ".join(f"({' '.join(d)})" for d in dimensions), sizes, keep


@settings(max_examples=150, deadline=None)
@given(packed())
def test_a_tensor_packed_in_any_order_loses_what_its_scopes_drop(case):
    axes, sizes, keep = case
    model = nn.Module()
    shape = [math.prod(sizes[a] for a in d.split()) for d in axes.strip("()").split(") (")]
    dense = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    model.w = nn.Parameter(dense.clone())
    by_axis = einops.rearrange(model.w.data, f"{axes} -> s u a b", **sizes)  # a view: zeros go to the parameter
    for scope, units in enumerate(keep):
        by_axis[scope, [u for u in range(sizes["u"]) if u not in units]] = 0
    model.w.data = einops.rearrange(by_axis, f"s u a b -> {axes}")
    model.forward = lambda: model.w[model.w != 0].sum()
    coupling = Coupling({"w": axes}, scope="s", sizes={axis: sizes[axis] for axis in "sab"})
    small, report = compact(model, coupling, ())
    rows = torch.stack(
        [einops.rearrange(dense, f"{axes} -> s u a b", **sizes)[s, units] for s, units in enumerate(keep)]
    )
    assert torch.equal(small.w, einops.rearrange(rows, f"s u a b -> {axes}"))
    assert (report.couplings[0].kept, report.couplings[0].scopes) == (len(keep[0]), sizes["s"])


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_damaged_manifest_is_refused(data, tmp_path):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(SparsityError, match=r"cut_to: .*manifest.json' is not what `report.save` writes: "):
        cut_to(pair(), tmp_path / "manifest.json")


def test_a_model_that_was_not_pruned_says_so():
    small, report = compact(pair(), PAIR, x())
    assert "left out: hidden: no unit is zero in all of its weights" in str(report)
    assert [tensor.shape for tensor in small.parameters()] == [tensor.shape for tensor in pair().parameters()]
