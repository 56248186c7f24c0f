"""The front door: which entry a tensor follows, what is left out, what a pattern means on each module, scores."""

import copy

import numpy as np
import pytest
import torch
from stock import linear_model, reloaded
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError, keep_mask, patterns, prune


class Language(nn.Module):
    """An embedding, two layers, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.embed.weight


def prepared(model, config=None, sparsifier=None, **kwargs):
    sparsifier = ScopeSparsifier() if sparsifier is None else sparsifier
    sparsifier.prepare(model, config, **kwargs)
    sparsifier.step()
    return sparsifier


def levels(sparsifier):
    return {g["tensor_fqn"]: g["sparsity_level"] for g in sparsifier.groups}


# precedence


def test_an_exact_name_has_precedence_over_globs_and_the_later_glob_over_the_earlier():
    config = [
        {"tensor_fqn": "2.weight", "sparsity_level": 0.1},
        {"tensor_fqn": "*.weight", "sparsity_level": 0.2},
        {"tensor_fqn": "re:[46].weight", "sparsity_level": 0.3},
    ]
    found = levels(prepared(linear_model(8, 8, 8, 8, 8), config))
    assert found == {"2.weight": 0.1, "0.weight": 0.2, "4.weight": 0.3, "6.weight": 0.3}


def test_a_list_of_names_and_module_classes():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 8), nn.LayerNorm(8))
    config = [
        {"module": nn.Linear, "sparsity_level": 0.25},
        {"module": (nn.Conv1d, nn.LayerNorm), "sparsity_level": 0.75},
        {"tensor_fqn": ["2.weight", "0.b*"], "sparsity_level": 0.5},
    ]
    expected = {"0.weight": 0.25, "1.weight": 0.75, "3.weight": 0.75, "2.weight": 0.5, "0.bias": 0.5}
    assert levels(prepared(model, config)) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"tensor_fqn": "0.bias"}, ["0.bias"]),
        ({"tensor_fqn": ["2.bias", "0.weight"]}, ["2.bias", "0.weight"]),
        ({"tensor_fqn": "*.bias"}, ["0.bias", "2.bias"]),
        ({"tensor_fqn": "*"}, ["0.weight", "2.weight"]),  # of all tensors of a class, its weights
        ({"tensor_fqn": "*", "tensor_name": "bias"}, ["0.bias", "2.bias"]),
        ({"tensor_name": "bias"}, ["0.bias", "2.bias"]),
        ({"tensor_fqn": ["re:.*bias", "0.*"]}, ["0.weight", "0.bias", "2.bias"]),
        ({"tensor_fqn": "again.bias"}, ["again.bias"]),
    ],
)
def test_a_name_beside_a_module_class_is_that_of_any_tensor_of_its_modules(entry, expected):
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 8))
    if "again.bias" in expected:
        model = Shared()
    assert sorted(levels(prepared(model, [{"module": nn.Linear, **entry}]))) == sorted(expected)


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.last = nn.Linear(8, 8)


def test_a_module_with_two_names_gets_one_mask():
    config = [{"tensor_fqn": "*.weight"}, {"tensor_fqn": "again.weight", "sparsity_level": 0.9}]
    with pytest.raises(SparsityError, match=r"'first.weight' and 'again.weight' are one tensor of one module"):
        ScopeSparsifier().prepare(Shared(), config)
    assert list(levels(prepared(Shared()))) == ["first.weight", "last.weight"]
    for name in ("first", "again"):
        assert list(levels(prepared(Shared(), exclude=[name]))) == ["last.weight"]
    report = prepared(Shared(), config[1:]).report()
    assert report.covered == 64 / 144 and "first.weight" not in report.others


# what is left out


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["0.weight"], ["2.weight", "4.weight"]),
        (["0", "re:4.*"], ["2.weight"]),
        (["[02].*"], ["4.weight"]),
        ([nn.LayerNorm], ["0.weight", "2.weight", "4.weight"]),
    ],
)
def test_exclude_takes_names_of_tensors_and_modules_globs_and_classes(exclude, left):
    for config in (None, [{"tensor_fqn": "*.weight"}]):
        assert list(levels(prepared(linear_model(8, 8, 8, 8), config, exclude=exclude))) == left


def test_excluding_a_class_leaves_out_what_is_inside_its_modules():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 8))
    assert list(levels(prepared(model, exclude=[nn.MultiheadAttention]))) == [
        "0.linear1.weight",
        "0.linear2.weight",
        "1.weight",
    ]
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 8))
    assert list(levels(prepared(model, exclude=[nn.TransformerEncoderLayer]))) == ["1.weight"]


def test_without_a_config_a_tied_head_is_left_out_and_the_report_says_so():
    sparsifier = prepared(Language())
    assert list(levels(sparsifier)) == ["layers.0.weight", "layers.1.weight"]
    report = sparsifier.report()
    assert report.skipped == {"lm_head.weight": "tied to 'embed.weight'"}
    assert report.total == 80 + 2 * 72 + 16 and report.covered == 128 / 240
    assert next(iter(report.others)) == "embed.weight" and report.others["embed.weight"] == 80
    text = str(report)
    assert "covers 61.5% of the weights of two or more dimensions, and 53.3% of all 240 parameters" in text
    assert "left out: lm_head.weight (tied to 'embed.weight')" in text
    assert "named by no entry: embed.weight (80)" in text


def test_a_reason_that_many_tensors_share_is_written_once():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
    names, why = "0.weight, 1.weight, 2.weight, 3.weight, 4.weight and 2 more", "needs block-grid dimension 1"
    with pytest.raises(SparsityError, match=f"is left out: {names}: scope .* {why} divisible by 5, got 8") as error:
        ScopeSparsifier(pattern="2:5").prepare(model, skip_unfit=True)
    assert str(error.value).count(why) == 1
    sparsifier, wide = ScopeSparsifier(pattern="2:5"), nn.Sequential(*model, nn.Linear(8, 5), nn.Linear(5, 8))
    sparsifier.prepare(wide, skip_unfit=True)
    assert sparsifier.report().skipped.keys() == {f"{k}.weight" for k in range(8)}
    text = str(sparsifier.report())
    assert text.count(why) == 1 and f"left out: {names.replace('2 more', '3 more')} (scope" in text


def test_without_a_config_adapters_are_left_out():
    class Adapted(nn.Module):
        adapter_layer_names = ("lora_A", "lora_B")

        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8)})

    sparsifier = prepared(nn.Sequential(Adapted()))
    assert list(levels(sparsifier)) == ["0.base_layer.weight"]
    assert set(sparsifier.report().skipped.values()) == {"part of an adapter"}


def test_without_a_config_packed_experts_are_taken_and_routers_and_heads_left_dense():
    class PackedExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(4, 8, 32))  # (experts, inputs, gates and units)
            self.down_proj = nn.Parameter(torch.randn(4, 16, 8))

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts, self.shared = nn.Linear(8, 4), PackedExperts(), nn.Linear(8, 8)
            self.shared_expert_gate = nn.Linear(8, 1)
            self.listed = nn.ModuleDict({"gate": nn.Linear(8, 3), "experts": linear_model(8, 8, 8, 8)})
            self.listed["experts"] = nn.ModuleList(m for m in self.listed["experts"] if isinstance(m, nn.Linear))
            self.tower = nn.Linear(8, 1)  # a layer with one output that is no gate
            self.head = nn.Linear(8, 32)

        def get_output_embeddings(self):
            return self.head

    sparsifier = ScopeSparsifier(pattern="2:4")
    sparsifier.prepare(Mixture())
    kept = ["experts.gate_up_proj", "experts.down_proj", "shared.weight", "tower.weight"]
    assert sorted(levels(sparsifier)) == sorted([*kept, *(f"listed.experts.{n}.weight" for n in range(3))])
    assert sparsifier.report().skipped == {
        "router.weight": "a router, whose outputs choose experts",
        "shared_expert_gate.weight": "the gate of a shared expert",
        "listed.gate.weight": "a router, whose outputs choose experts",
        "head.weight": "the output embedding",
    }
    sparsifier.step()
    for name in kept[:2]:  # along the inputs, dimension 1 here
        assert (sparsifier.mask(name).unflatten(1, (-1, 4)).sum(2) == 2).all()
    named = ScopeSparsifier(pattern="2:4")
    named.prepare(Mixture(), [{"tensor_fqn": ["head.weight", "router.weight"]}])
    assert list(levels(named)) == ["head.weight", "router.weight"]


def test_the_report_names_each_tensors_rule_and_so_does_a_copy_of_the_sparsifier():
    config = [{"tensor_fqn": "*.weight"}, {"tensor_fqn": "2.weight", "sparsity_level": 0.25}]
    sparsifier = prepared(linear_model(8, 8, 8), config)
    expected = {"0.weight": "config[0] ('*.weight')", "2.weight": "config[1] ('2.weight')"}
    assert {r.tensor: r.entry for r in sparsifier.report()} == expected
    assert {r.tensor: r.entry for r in copy.deepcopy(sparsifier).report()} == expected
    assert prepared(linear_model(8, 8)).report()[0].entry == "config=None"


# patterns that fit themselves


def transposed(linear):
    """A layer like transformers' Conv1D, which stores (inputs, outputs)."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(linear.out_features, linear.in_features)
    conv1d.weight = nn.Parameter(linear.weight.detach().t().contiguous())
    return conv1d


@pytest.mark.parametrize(
    "pattern", [patterns.n_m(2, 4), patterns.rows(0.5), patterns.filters(0.5), patterns.blocks(2, 4, 0.5)], ids=repr
)
@pytest.mark.parametrize("spread", [False, True])
def test_patterns_are_defaults_for_layers_of_any_rank(pattern, spread):
    model = nn.Sequential(nn.Conv1d(8, 4, 3), nn.Conv2d(8, 4, 3), nn.Conv3d(4, 8, 2), nn.Linear(8, 4))
    sparsifier = prepared(model, None, ScopeSparsifier(**pattern) if spread else ScopeSparsifier(pattern=pattern))
    assert sparsifier.check() > 0
    for name in ("0.weight", "1.weight", "2.weight", "3.weight"):
        mask = sparsifier.mask(name)
        assert mask.float().mean() == 0.5
        if pattern.kind == "n_m":
            assert mask.unflatten(1, (-1, 4)).sum(2).eq(2).all()
        elif pattern.kind != "blocks":
            assert mask.flatten(1).all(1).sum() == mask.shape[0] // 2
    assert "pattern" not in sparsifier.groups[0]
    assert list(pattern) == ["pattern"] and "sparsity_level" not in pattern


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.n_m(2, 4),
        patterns.rows(0.5),
        patterns.columns(0.5),
        patterns.heads(2, 0.5),
    ],
)
def test_inputs_and_outputs_mean_what_they_say_where_weights_are_stored_transposed(pattern):
    linear = nn.Linear(8, 4)
    conv1d = transposed(linear)
    for config in (None, [{"tensor_fqn": "0.weight"}]):
        masks = [
            prepared(nn.Sequential(m), config, ScopeSparsifier(pattern=pattern)).mask("0.weight")
            for m in copy.deepcopy((linear, conv1d))
        ]
        assert torch.equal(masks[0], masks[1].t())


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_a_transposed_convolution_are_its_output_channels(kind, groups):
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[kind - 1](8, 4, 3, groups=groups)
    sparsifier = prepared(nn.Sequential(layer), None, ScopeSparsifier(pattern=patterns.filters(0.5)))
    sparsifier.squash_mask()
    out = layer(torch.randn(1, 8, *(5,) * kind)) - layer.bias.view(-1, *(1,) * kind)
    assert out.flatten(2).eq(0).all(2).sum() == 2  # two of four output channels hold the bias alone


@pytest.mark.parametrize("groups", [1, 2])
def test_columns_of_a_convolution_are_its_input_channels(groups):
    layer = nn.Conv2d(8, 4, 3, groups=groups, bias=False)
    prepared(nn.Sequential(layer), None, ScopeSparsifier(pattern=patterns.columns(0.5))).squash_mask()
    x = torch.randn(1, 8, 5, 5, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad.flatten(2).eq(0).all(2).sum() == 4


@pytest.mark.parametrize("is_transposed", [False, True])
def test_packed_experts_are_matrices_of_their_own(is_transposed):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.is_transposed = is_transposed
            self.up = nn.Parameter(torch.randn(3, 8, 4) * torch.tensor([1.0, 10.0, 100.0])[:, None, None])

    for pattern, unit in (
        (patterns.rows(0.5), 2 if is_transposed else 1),
        (patterns.columns(0.5), 1 if is_transposed else 2),
    ):
        mask = prepared(Experts(), [{"tensor_fqn": "up", **pattern}]).mask("up")
        kept = mask.all(3 - unit)
        assert torch.equal(kept, mask.any(3 - unit)) and kept.sum(1).eq(kept.shape[1] // 2).all()
    mask = prepared(Experts(), [{"tensor_fqn": "up", **patterns.n_m(2, 4)}]).mask("up")
    grouped = mask.unflatten(1, (-1, 4)).sum(2) if is_transposed else mask.unflatten(2, (-1, 4)).sum(3)
    assert grouped.eq(2).all()


@pytest.mark.parametrize("pattern", ["2:4", "4x2", "rows", patterns.n_m(1, 4), patterns.columns(0.25)])
def test_a_pattern_may_stand_in_the_place_of_the_level(pattern):
    masks = []
    for sparsifier in (ScopeSparsifier(pattern), ScopeSparsifier(pattern=pattern)):
        torch.manual_seed(0)
        masks.append(prepared(nn.Sequential(nn.Linear(16, 8)), None, sparsifier).mask("0.weight"))
    assert torch.equal(*masks)
    torch.manual_seed(0)
    pruned, report = prune(nn.Sequential(nn.Linear(16, 8)), pattern)
    assert torch.equal(pruned[0].weight != 0, masks[0]) and report[0].density == masks[0].float().mean()


def test_an_entry_overrides_the_default_pattern_and_its_budget():
    model = linear_model(8, 8, 8, 8)
    config = [
        {"tensor_fqn": "0.weight"},
        {"tensor_fqn": "2.weight", "sparsity_level": 0.75},
        {"tensor_fqn": "4.weight", "block_shape": (1, -1), "sparsity_level": 0.25},
    ]
    sparsifier = prepared(model, config, ScopeSparsifier(pattern=patterns.n_m(2, 4)))
    assert sparsifier.mask("0.weight").view(-1, 4).sum(1).eq(2).all()
    assert sparsifier.mask("2.weight").view(-1, 4).sum(1).eq(1).all()
    assert sparsifier.mask("4.weight").all(1).sum() == 6


def test_experts_of_transformers_that_are_stored_transposed_and_their_biases():
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = llama4.Llama4TextConfig(hidden_size=8, intermediate_size=16, num_local_experts=2)
    for experts in (
        llama4.Llama4TextExperts(config),
        gpt_oss.GptOssExperts(gpt_oss.GptOssConfig(hidden_size=8, intermediate_size=16, num_local_experts=2)),
    ):
        for parameter in experts.parameters():
            nn.init.normal_(parameter)
        mask = prepared(experts, [{"tensor_fqn": "*_proj", **patterns.n_m(2, 4)}]).mask("gate_up_proj")
        assert mask.shape == (2, 8, 32) and mask.unflatten(1, (2, 4)).sum(2).eq(2).all()
    with pytest.raises(SparsityError, match=r"needs a weight with inputs and outputs, got shape \(2, 8\)"):
        ScopeSparsifier().prepare(experts, [{"tensor_fqn": "down_proj_bias", **patterns.n_m(2, 4)}])


# scores


def test_a_score_is_evaluated_on_the_parameter_before_any_view():
    weight, importance = torch.randn(8, 16), torch.rand(8, 16)
    seen = []

    def score(w, name):
        seen.append((name, tuple(w.shape)))
        return importance

    model = nn.Sequential(nn.Linear(16, 8))
    model[0].weight = nn.Parameter(weight)
    entry = {"tensor_fqn": "0.weight", "axes": "(r a) (c b)", "unit": "r c", "sizes": {"a": 2, "b": 4}, "score": score}
    mask = prepared(model, [entry]).mask("0.weight")
    sums = importance.view(4, 2, 4, 4).sum((1, 3)).view(1, -1)
    expected = keep_mask(sums, 8).view(4, 1, 4, 1).expand(4, 2, 4, 4).reshape(8, 16)
    assert torch.equal(mask, expected) and set(seen) == {("0.weight", (8, 16))}


# update_mask


def test_values_given_to_update_mask_override_the_group_as_an_entry_overrides_defaults():
    model = linear_model(8, 8)
    sparsifier = prepared(model, [{"tensor_fqn": "0.weight", "axes": "o i", "unit": "o"}])
    mask = sparsifier.mask("0.weight")
    sparsifier.update_mask(model[0], "weight", pattern=patterns.n_m(1, 4))
    assert mask.view(-1, 4).sum(1).eq(1).all()
    sparsifier.update_mask(model[0], "weight", block_shape=(1, 1), scope_shape=(1, -1), nnz=3)
    assert mask.sum(1).eq(3).all()
    sparsifier.groups[0]["sparsity_level"] = 0.25  # as a scheduler does
    sparsifier.update_mask(model[0], "weight", nnz=5)
    assert mask.all(1).sum() == 5
    sparsifier.update_mask(**sparsifier.groups[0])
    assert mask.all(1).sum() == 6 and "nnz" not in sparsifier.groups[0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nnz": 1}, "update_mask: 0.weight: nnz has no effect, because every stage has a budget of its own"),
        ({"norm": 1, "score": keep_mask}, "update_mask: 0.weight: 'norm' and 'score' are mutually exclusive"),
        ({"tensor_fqn": "2.weight"}, "update_mask: unknown key 'tensor_fqn'"),
    ],
)
def test_what_update_mask_cannot_take(given, text):
    model = linear_model(8, 8)
    sparsifier = prepared(model, None, ScopeSparsifier(pattern=patterns.v_n_m(4, 2, 8)))
    before = sparsifier.mask("0.weight").clone()
    with pytest.raises(SparsityError, match=text):
        sparsifier.update_mask(model[0], "weight", **given)
    assert torch.equal(sparsifier.mask("0.weight"), before)


def test_a_state_of_a_counted_budget_is_loaded_where_a_level_was_given():
    counted, level = ScopeSparsifier(nnz=2, scope_shape=(1, 4)), ScopeSparsifier(scope_shape=(1, 4))
    states = []
    for sparsifier in (counted, level):
        sparsifier.prepare(nn.Sequential(nn.Linear(8, 4)))
        sparsifier.step()
        states.append(sparsifier.state_dict())
    level.load_state_dict(states[0])
    level.step()
    assert level.check() == 8


def test_a_stage_with_a_count_for_each_scope_is_loaded_again():
    stages = [{"scope_shape": (1, 8), "nnz": torch.full((4, 1), 6)}, {"scope_shape": (1, 4), "nnz": 2}]
    made = []
    for _ in range(2):
        made.append(ScopeSparsifier(stages=stages))
        made[-1].prepare(linear_model(8, 4))
    made[0].step()
    made[1].load_state_dict(reloaded(made[0].state_dict()))
    assert torch.equal(made[0].mask("0.weight"), made[1].mask("0.weight"))
    made[1].step()
    made[1].update_mask(made[1].model[0], "weight", stages=copy.deepcopy(stages))
    assert made[1].check() == 12


def test_a_module_of_the_model_is_named_by_itself():
    model = linear_model(8, 8, 8)
    sparsifier = prepared(model, [{"module": model[2], "sparsity_level": 0.75}])
    assert levels(sparsifier) == {"2.weight": 0.75}
    linear = nn.Linear(8, 8)
    assert list(levels(prepared(linear, [{"module": linear, "tensor_name": "bias"}]))) == ["bias"]


def test_numbers_may_be_tensors_of_one_element_and_shapes_arrays():
    given = {"nnz": torch.tensor([2]), "scope_shape": np.array((1, 4)), "norm": "inf"}
    for sparsifier in (prepared(linear_model(8, 8), [{"tensor_fqn": "0.weight", **given}]), ScopeSparsifier(**given)):
        if not sparsifier.groups:
            prepared(linear_model(8, 8), None, sparsifier)
        assert sparsifier.check() == 16 and sparsifier.groups[0]["scope_shape"] == [1, 4]
        assert type(sparsifier.groups[0]["nnz"]) is int
    assert prepared(linear_model(8, 8), None, ScopeSparsifier(torch.tensor(0.75))).report().sparsity == 0.75


@pytest.mark.parametrize("stage", [{"nnz": 2, "sparsity_level": None}, {"nnz": None, "sparsity_level": 0.5}])
def test_none_in_a_stage_is_no_budget(stage):
    model, sparsifier = nn.Sequential(nn.Linear(8, 4)), ScopeSparsifier()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "stages": [{"scope_shape": (1, 4), **stage}]}])
    sparsifier.step()
    assert (sparsifier.mask("0.weight").view(-1, 4).sum(1) == 2).all() and sparsifier.check() == 8


@pytest.mark.parametrize("key", ["a*", "b[0]", "a?", "[!a]", "a"])
@pytest.mark.parametrize("kind", ["tensor", "module name", "module"])
def test_names_with_the_characters_of_globs_mean_themselves(key, kind):
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a*", "b[0]", "a?", "[!a]", "a", "ab", "b0", "c")})
    entry = {"tensor": f"{key}.weight", "module name": key, "module": model[key]}[kind]
    sparsifier = prepared(model, None, exclude=[entry])
    assert [g["tensor_fqn"] for g in sparsifier.groups] == [f"{name}.weight" for name in model if name != key]
    assert {*sparsifier.report().skipped} == {f"{key}.weight"}
    sparsifier.squash_mask()
    named = prepared(model, [{"module": entry} if kind == "module" else {"tensor_fqn": f"{key}.weight"}])
    assert [g["tensor_fqn"] for g in named.groups] == [f"{key}.weight"]
