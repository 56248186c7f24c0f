"""shrink: budgets of a whole model, levels by coupling, rounding, repeated shrinking, and what a config can hold."""

import copy
import itertools
import warnings
from types import SimpleNamespace

import hf_models
import pytest
import torch
import transformers
from compact_models import close, rebuilt
from discovered import fill
from networks import NETWORKS, Net
from stock import EVERYTHING, linear_model
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import Coupling, ProximalSparsifier, SparsityError, prune
from sparsekit_ao.export import load_pretrained, save_pretrained
from sparsekit_ao.removal import compact, config_fields, cut_to, removable, shrink, shrink_layers, verify
from sparsekit_ao.removal.verify import Reference, count_flops


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def mlp(*sizes, **options):
    return linear_model(*sizes, **options).eval()


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("multiples", "groups", "width"),
    [(None, 4, 2), ({"0.weight (s u) i 1 1": 4, "1.weight": 4}, 2, 4)],  # with these, no group loses channels
)
def test_of_couplings_that_divide_one_dimension_those_that_remove_most_are_chosen(multiples, groups, width):
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 2, 1))
    small, report = shrink(model, torch.randn(2, 3, 5, 5), multiple_of=multiples)
    assert (small[1].groups, *small[1].weight.shape[:2]) == (groups, 8, width)
    assert report.left_out and all("only one coupling may divide" in t for t in report.left_out)


@pytest.mark.parametrize("cost", ["layer", "parameters"])
def test_layers_of_different_widths_in_one_coupling_lose_a_fraction_of_their_own(cost):
    blocks = [nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)) for width in (4, 32)]
    model, hidden = nn.Sequential(*blocks), Coupling({"*.0.weight": "u i", "*.0.bias": "u", "*.2.weight": "o u"})
    model.config = SimpleNamespace()  # so layers of equal widths would keep equal numbers
    small, report = shrink(model, torch.randn(3, 4), 0.5, budget=cost, couplings=[hidden])
    widths = [block[0].out_features for block in small]
    assert widths == [2, 16] if cost == "layer" else 2 * parameters(small) <= parameters(model)
    assert report.difference <= 1e-5 and [row.kept for row in report.couplings] == widths


def test_a_layer_of_one_coupling_may_have_the_name_of_another_coupling():
    blocks = [nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 6), nn.ReLU(), nn.Linear(6, 4)) for n in (4, 8)]
    first = Coupling({"*.0.weight": "u i", "*.0.bias": "u", "*.2.weight": "o u"}, name="a")
    second = Coupling({"0.2.weight": "u i", "0.2.bias": "u", "0.4.weight": "o u"}, name="a 0")
    small, report = shrink(nn.Sequential(*blocks), torch.randn(3, 4), 0.5, couplings=[first, second])
    assert [layer.out_features for layer in itertools.chain(*small) if hasattr(layer, "weight")] == [2, 3, 4, 4, 6, 4]
    assert len({row.name for row in report.couplings}) == 3


def test_with_one_step_more_a_model_would_cost_more():
    model, x, costs = mlp(4, 24, 48, 3), torch.randn(3, 4), []

    def cost(m):
        costs.append(parameters(m))
        return costs[-1]

    small, report = shrink(model, x, 0.55, budget=cost, multiple_of=4)
    now, was = report.after.parameters, costs[0]
    steps = [parameters(mlp(4, *(m.out_features + 4 * (m is one) for m in small[::2][:-1]), 3)) for one in small[::2]]
    assert was == parameters(model) and now <= 0.45 * was and min(steps[:2]) > 0.45 * was
    assert all(m.out_features % 4 == 0 for m in small[::2][:-1])


@pytest.mark.parametrize("cost", ["flops", "parameters", parameters])
def test_a_layer_that_is_large_before_and_small_after_is_counted(cost):
    model = mlp(32, 4 * verify.LARGE // 32, 32)
    small, _ = shrink(model, torch.randn(2, 32), 0.85, budget=cost, multiple_of=1)
    assert small[0].weight.numel() < verify.LARGE and 0.149 <= parameters(small) / parameters(model) <= 0.15


@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
def test_whole_heads_leave_a_model_close_to_its_budget(ratio):
    model, hidden = mlp(16, 96, 8, 96, 48, 8), Coupling({"6.weight": "u i", "6.bias": "u", "8.weight": "o u"})
    first = Coupling({"0.weight": "(h d) i", "0.bias": "(h d)", "2.weight": "o (h d)"}, unit="h", sizes={"d": 24})
    second = Coupling({"4.weight": "(h d) i", "4.bias": "(h d)", "6.weight": "o (h d)"}, unit="h", sizes={"d": 24})
    small, report = shrink(model, torch.randn(3, 16), ratio, budget="parameters", couplings=[first, second, hidden])
    allowed = (1 - ratio) * report.before.parameters
    assert 0.97 * allowed <= parameters(small) <= allowed


def test_units_of_one_coupling_are_dropped_exactly_down_to_the_budget():
    model, x = mlp(4, 64, 2), torch.randn(3, 4)
    for ratio in (0.1, 0.35, 0.8):
        small, report = shrink(model, x, ratio, budget="parameters")
        kept = small[0].out_features
        assert 7 * kept + 2 == report.after.parameters <= (1 - ratio) * 450 < 7 * (kept + 1) + 2


def test_units_that_cost_more_or_matter_less_are_dropped_first():
    model, x = mlp(4, 16, 64, 16, 4), torch.randn(3, 4)
    for parameter in model.parameters():
        parameter.fill_(1.0)
    small, _ = shrink(model, x, 0.5, budget="flops")
    widths = [m.out_features / n for m, n in zip(small[::2], (16, 64, 16), strict=False)]
    assert widths[1] < widths[0] and widths[0] == pytest.approx(widths[2], abs=0.1)
    model[2].weight[8:] = 1e-3
    model[4].weight[:, 8:] = 1e-3
    assert shrink(model, x, 0.5, budget="flops")[0][2].out_features < widths[1] * 64


def test_layers_keep_equal_numbers_only_where_there_is_a_config():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))).eval()
    units = Coupling({"*.0.weight": "u i", "*.0.bias": "u", "*.2.weight": "o u"}, name="units *")
    layers[1][0].weight[4:] *= 1e-3
    layers[1][2].weight[:, 4:] *= 1e-3
    kept = []
    for layers.config in (None, nn.Module):
        if layers.config is None:
            del layers.config
        _, report = shrink(layers, torch.randn(3, 8), 0.3, budget="flops", couplings=[units])
        assert [row.name for row in report.couplings] == ["units 0", "units 1"]
        kept.append([row.kept for row in report.couplings])
    assert kept[0][0] > kept[0][1] and kept[1][0] == kept[1][1]


def test_limits_by_coupling():
    model, x = mlp(4, 16, 16, 4), torch.randn(3, 4)
    small, _ = shrink(model, x, 0.4, budget="flops", max_sparsity={"2.weight": 0.25})
    assert small[2].out_features >= 12
    with pytest.raises(SparsityError, match="a ratio of 0.95 allows a cost of .* but without all units that may be"):
        shrink(model, x, 0.95, budget="parameters", max_sparsity=0.5)


def test_what_keeps_units_is_in_the_report():
    model, x = nn.Sequential(nn.Linear(4, 30), nn.LayerNorm(30), nn.Linear(30, 4)), torch.randn(3, 4)
    small, report = shrink(model, x)
    assert parameters(small) == parameters(model) and len(report.frozen) == 1
    assert report.frozen[0].startswith("30 in 0.weight[0]: ") and f"frozen: {report.frozen[0]}" in str(report)
    model = mlp(4, 30, 30, 2)
    _, report = shrink(model, x, multiple_of={"0.weight": 64})
    assert report.left_out == ("0.weight: a multiple of 64 keeps all of its 30 units",) and not report.frozen
    small, report = shrink(model, x, 1.0, exclude=["2"])
    assert small[0].out_features == 30 and not report.couplings
    small, report = shrink(model, x, {"0.weight": 1.0})
    assert small[0].out_features == 1
    assert report.left_out[-1] == "0.weight: a layer needs a unit, so 1 of 30 are kept in each scope"


def test_sizes_that_need_no_change_take_one_line_of_a_report():
    model, x = hf_models.deep("Llama", 1)
    _, report = shrink(model, x, exclude=["*embed_tokens*"])
    lines = [line for line in str(report).split("\n") if "removed size" in line]
    assert lines == [
        f"unchanged, and outputs are the same: {len(report.unlisted)} integers equal a removed size (report.unlisted)"
    ]


def test_models_without_values_and_tolerances_are_refused_first():
    for call in (shrink, removable):
        with pytest.raises(SparsityError, match="0.weight is on the meta device, so it has no values to be compared"):
            call(mlp(4, 8, 2).to("meta"), torch.ones(2, 4, device="meta"))
    with pytest.raises(SparsityError, match="tolerance must be a number >= 0, got '1e-5'"):
        removable(mlp(4, 8, 2), torch.randn(3, 4), tolerance="1e-5")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ratio": {"nothing": 0.5}}, "ratio names 'nothing', but the couplings are '0.weight'"),
        ({"max_sparsity": {"nothing": 0.5}, "budget": "units"}, "max_sparsity names 'nothing'"),
        ({"multiple_of": {"nothing": 4}}, "multiple_of names 'nothing'"),
        ({"ratio": {"0.weight": 0.5}, "budget": "flops"}, "a dict of ratios, .* cannot be combined with a budget="),
        ({"ratio": 1.5}, r"ratio: sparsity level must lie in \[0, 1\], got 1.5"),
        ({"budget": "time"}, "budget must be 'layer', 'units', 'flops', 'parameters' or a function .*, got 'time'"),
    ],
)
def test_wrong_arguments(keys, message):
    with pytest.raises(SparsityError, match=message):
        shrink(mlp(4, 8, 2), torch.randn(3, 4), **keys)


def test_former_names_of_arguments_are_answered_by_the_new_ones():
    names = {"cost": "budget", "scope": "budget", "uniform": "keep_config", "kinds": "ratio"}
    names["tensor_parallel"] = "multiple_of"
    for former, name in names.items():
        with pytest.raises(TypeError, match=f"has no argument '{former}'. Did you mean '{name}'"):
            shrink(mlp(4, 8, 2), torch.randn(3, 4), **{former: 1})


def test_dimensions_of_16_bit_weights_stay_multiples_of_8():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    kept = [shrink(mlp(8, 32, 8, dtype=torch.bfloat16), x, 0.4, multiple_of=m)[0][0].out_features for m in (None, 1)]
    assert kept == [24, 20]
    small, _ = shrink(mlp(8, 64, 64, 8, dtype=torch.bfloat16), x, 0.5, budget="flops")
    assert small[0].out_features % 8 == small[2].out_features % 8 == 0


def test_units_without_a_norm_are_left_out_where_its_scale_is_the_score():
    model, x = fill(NETWORKS["VGG"][0]()), torch.randn(2, 3, 12, 12)
    small, report = shrink(model, x, 0.5, "scale")
    assert report.left_out == ("5.weight: the score rates all of its units 0",)
    scale = model[0][1].weight.abs()
    assert torch.equal(small[0][0].weight[:, :, 1, 1], model[0][0].weight[scale >= scale.sort().values[4]][:, :, 1, 1])


def test_a_smaller_model_is_trained_and_shrunk_again_with_the_same_couplings():
    network, inputs = NETWORKS["MobileNet v3"]
    dense, x = fill(network()), inputs()
    couplings, model, manifests = removable(dense, x).couplings, dense, []
    for _ in range(2):
        model, report = shrink(model, x, 0.3, couplings=couplings)
        manifests.append(report.manifest)
        assert report.difference <= 1e-5 and report.after.flops < report.before.flops
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
        with torch.enable_grad():
            model(x).square().mean().backward()
        optimizer.step()
        model.eval()
    again = fill(network())
    for manifest in manifests:
        again = cut_to(again, manifest)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("name", ["ResNeXt", "DenseNet", "LeViT"])
def test_couplings_of_the_larger_model_have_their_sizes_derived_anew(name):
    network, inputs = NETWORKS.get(name, (None, None))
    model, x = (fill(network()), inputs()) if network else hf_models.make(name)
    couplings, state = removable(model, x).couplings, torch.random.get_rng_state()
    small, first = shrink(model, x, 0.3, couplings=couplings)
    _, second = shrink(small, x, 0.5, couplings=couplings)
    assert second.after.parameters < 0.8 * first.after.parameters and second.difference <= 1e-5
    assert not any("no longer fits" in text for text in second.left_out)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(SparsityError, match="matches no parameter or buffer"):
        shrink(small, x, couplings=[*couplings, Coupling({"nothing": "u"})])


class Biased(nn.Module):
    """Remembers a part of its weights in eval mode until the next train or eval, as some attention biases do."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.known = nn.Linear(4, 8), nn.Linear(8, 3), {}

    def train(self, mode=True):
        self.known = {}
        return super().train(mode)

    def forward(self, x):
        bias = self.a.bias if self.training else self.known.setdefault("bias", self.a.bias.detach().clone())
        return self.b(F.relu(F.linear(x, self.a.weight) + bias))


@pytest.mark.parametrize("training", [False, True])
def test_what_a_model_remembers_of_larger_weights_is_dropped(training):
    model, x = fill(Biased()).train(training), torch.randn(3, 4)
    model(x)
    small, report = shrink(model, x)
    assert small(x).shape == (3, 3) and small.a.out_features == 4 and small.training == small.a.training == training
    assert report.difference <= 1e-5


@pytest.mark.parametrize(
    ("axes", "rows"), [("u u", lambda w: w), ("(g u) u", lambda w: w.unflatten(0, (2, -1)).transpose(0, 1).flatten(1))]
)
def test_units_in_both_dimensions_of_a_weight_are_rated_as_a_whole(axes, rows):
    def run(m, x):
        h = m.a(x)
        for _ in range(2):
            h = m.w(h).unflatten(-1, (-1, h.shape[-1])).prod(-2)
        return m.b(h)

    model = fill(Net(run, a=nn.Linear(4, 6), w=nn.Linear(6, 12 if "g" in axes else 6), b=nn.Linear(6, 2)))
    model.w.weight[:, :3] *= 9
    members = {"a.weight": "u i", "a.bias": "u", "w.weight": axes, "w.bias": axes[:-2], "b.weight": "o u"}
    coupling = Coupling(members, sizes={"g": 2} if "g" in axes else {})
    parts = [model.a.weight, model.a.bias[:, None], rows(model.w.weight), rows(model.w.bias[:, None]), model.b.weight.T]
    columns = model.w.weight.clone()
    for k in range(len(columns)):
        columns[k, k % 6] = 0  # is in the row of the unit already
    norms = torch.cat([*parts, columns.T], 1).norm(dim=1)
    kept = norms.argsort(descending=True)[:3].sort().values
    small, _ = shrink(model, torch.randn(3, 4), 0.5, "norm", couplings=[coupling])
    assert torch.equal(small.a.weight, model.a.weight[kept])


def test_proximal_training_makes_whole_units_of_couplings_zero_which_compact_removes():
    model, x = mlp(6, 16, 16, 3), torch.randn(64, 6)
    couplings = removable(model, x).couplings
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparsifiers = [ProximalSparsifier(strength=0.03, optimizer=optimizer) for _ in couplings]
    for one, sparsifier in zip(couplings, sparsifiers, strict=True):  # both couplings have 2.weight
        sparsifier.prepare(model, one.entries(model))
    for _ in range(60):
        optimizer.zero_grad()
        with torch.enable_grad():
            F.mse_loss(model(x), x[:, :3]).backward()
        optimizer.step()
        for sparsifier in sparsifiers:
            sparsifier.step()
    for sparsifier in sparsifiers:
        sparsifier.squash_mask()
    small, report = compact(model, couplings, x)
    assert all(1 < row.kept < row.of for row in report.couplings) and close(model(x), small(x))


WEIGHTS = {"weight": "u i", "bias": "u"}
MLP = {
    **{f"model.layers.*.mlp.{up}_proj.{name}": axes for up in ("gate", "up") for name, axes in WEIGHTS.items()},
    "model.layers.*.mlp.down_proj.weight": "o u",
}


def test_what_the_config_cannot_hold_is_rebuilt_by_one_line(tmp_path):
    model, inputs = hf_models.make("GPT-2")
    small, report = shrink(model, inputs, EVERYTHING, keep_config=False)
    found = save_pretrained(small, report, tmp_path)
    assert "c_attn" in report.not_in_config and "from_pretrained cannot load it" in str(report)
    assert found.notes[0].endswith(f"export.load_pretrained({str(tmp_path)!r}, GPT2LMHeadModel) does")
    with pytest.raises(RuntimeError, match="mismatched"):
        type(model).from_pretrained(tmp_path)
    assert torch.equal(load_pretrained(tmp_path, type(model))(**inputs).logits, small(**inputs).logits)


UNIFORM = {  # {model: the fields of its config that change}
    "GPT-2": {"n_inner"},
    "Qwen3": {"num_attention_heads", "num_key_value_heads", "intermediate_size"},
    "Mixtral": {"head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"},
}


@pytest.mark.parametrize("name", ["GPT-2", nightly("Qwen3"), "Mixtral"])
def test_what_the_config_cannot_hold_is_left_out_by_default_so_from_pretrained_loads_the_result(name, tmp_path):
    model, inputs = hf_models.make(name)
    small, report = shrink(model, inputs, EVERYTHING, exclude=[] if name == "GPT-2" else ["model.embed_tokens"])
    changed = {text.split(":")[0].removeprefix("config.") for text in report.changed if text.startswith("config.")}
    assert changed == UNIFORM[name] and report.not_in_config == ""
    assert any("the config cannot hold it (" in text and "keep_config=False" in text for text in report.left_out)
    assert cut_to(hf_models.make(name)[0], report.manifest).config.to_dict() == small.config.to_dict()
    assert save_pretrained(small, report, tmp_path).notes == (f"{type(model).__name__}.from_pretrained loads it",)
    for again in (type(model).from_pretrained(tmp_path), load_pretrained(tmp_path, type(model))):
        torch.testing.assert_close(next(iter(again(**inputs).values())), next(iter(small(**inputs).values())))


def test_the_first_line_says_where_the_config_allows_little_and_what_helps():
    model, inputs = hf_models.make("HuBERT")
    report = shrink(model, inputs)[1]
    share = report.after.parameters / report.before.parameters
    text = "of the parameters are removed; keep_config=False also removes what the config cannot hold"
    assert share > 0.75 and str(report).startswith(f"{1 - share:.1%} {text}")
    more = shrink(model, inputs, keep_config=False)[1]  # as it advises
    assert more.after.parameters / more.before.parameters < 0.6 and text not in str(more)


@pytest.mark.parametrize(
    "keys",
    [
        nightly({"hidden_size": 32, "intermediate_size": 64}),  # the number of units of a Mamba layer too
        nightly({"hidden_size": 32, "intermediate_size": 64, "expert_layer_period": 4}),
        {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2},
    ],
)
def test_dense_mlps_and_experts_that_share_a_field_of_the_config_go_together(keys):
    common = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    common |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    common |= {"num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "pad_token_id": 0}
    model = fill(transformers.JambaForCausalLM(transformers.JambaConfig(**(common | keys))))
    small, report = shrink(model, {"input_ids": torch.arange(14).view(2, 7)})
    assert small.config.intermediate_size == keys["intermediate_size"] // 2 and report.not_in_config == ""
    assert {"mlp", "expert units"} <= {row.kind for row in report.couplings}


@pytest.mark.parametrize(
    ("heads", "key_heads", "keep_config", "cost"),
    [
        nightly(8, 4, None, "parameters"),
        (4, 4, True, "flops"),
        nightly(12, 12, None, "parameters"),
        nightly(8, 4, True, "flops"),
    ],
)
def test_with_a_cost_only_widths_that_the_config_can_hold_are_chosen(heads, key_heads, keep_config, cost):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=key_heads)
    model = fill(transformers.LlamaForCausalLM(config)).eval()
    small, report = shrink(
        model,
        {"input_ids": torch.arange(14).view(2, 7)},
        0.4,
        budget=cost,
        keep_config=keep_config,
        max_sparsity={"width": 0.9},
    )
    assert report.not_in_config == "" and small.config.hidden_size % small.config.num_attention_heads == 0
    assert small.config.hidden_size < 48 and getattr(report.after, cost) <= 0.6 * getattr(report.before, cost)


def test_the_config_of_a_model_of_transformers_alone_can_be_kept():
    with pytest.raises(SparsityError, match="keep_config=True needs a model of transformers, got Sequential"):
        shrink(mlp(4, 8, 2), torch.randn(3, 4), keep_config=True)


def test_a_config_that_can_hold_nothing_is_no_reason_to_remove_nothing_unless_it_is_asked_for():
    model, inputs = hf_models.make("SegFormer")
    exclude = ["*.attention.*", "*patch_embeddings*"]
    small, report = shrink(model, inputs, EVERYTHING, exclude=exclude)
    assert report.not_in_config and parameters(small) < parameters(model)
    small, report = shrink(model, inputs, EVERYTHING, exclude=exclude, keep_config=True)
    assert parameters(small) == parameters(model) and "the config cannot hold it" in report.left_out[-1]


def _only_64(data):
    if data["hidden"] != 64:
        raise ValueError("hidden must be 64")
    return data


READ = {  # what the class of a config makes of the fields in its file
    "as_written": dict,
    "at_least_48": lambda data: {**data, "hidden": max(data["hidden"], 48)},
    "a_multiple_of_48": lambda data: {**data, "hidden": -(-data["hidden"] // 48) * 48 if data["hidden"] < 64 else 64},
    "always_64": lambda data: {**data, "hidden": 64},
    "of_another_field": lambda data: {**data, "hidden": 8 * data["ratio"]},
    "raising": _only_64,
    "at_most_half_or_all": lambda data: {**data, "hidden": min(data["hidden"], 24) if data["hidden"] < 64 else 64},
}


def of_transformers(read, nested):
    """A perceptron with a config, perhaps within another one, that is changed when it is read."""

    class Inner(transformers.PreTrainedConfig):
        hidden: int = 64
        ratio: int = 8

        @classmethod
        def from_dict(cls, data, **keys):
            return super().from_dict(read(data), **keys)

    class Outer(transformers.PreTrainedConfig):
        inner: dict | Inner | None = None

        def __post_init__(self, **keys):
            self.inner = Inner.from_dict(self.inner) if isinstance(self.inner, dict) else self.inner or Inner()
            super().__post_init__(**keys)

    class Perceptron(transformers.PreTrainedModel):
        config_class = Outer if nested else Inner

        def __init__(self, config):
            super().__init__(config)
            hidden = getattr(config, "inner", config).hidden
            self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
            self.post_init()

        def forward(self, x):
            return self.down(self.up(x).relu())

    return fill(Perceptron(Perceptron.config_class()))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("read", READ)
def test_a_config_that_is_computed_anew_when_it_is_read_is_judged_as_it_is_read(read, nested, tmp_path):
    model, x = of_transformers(READ[read], nested), torch.randn(4, 8)
    small, report = shrink(model, x, 0.5)
    assert small.up.out_features == 32 and (report.not_in_config == "") == (read == "as_written")
    small, report = shrink(model, x, 0.5, keep_config=True)
    assert small.up.out_features == (32 if read == "as_written" else 64) and not report.not_in_config
    save_pretrained(small, report, tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(x), small(x))


def test_a_config_that_computes_the_size_of_heads_when_it_is_read_can_be_saved(tmp_path):
    keys = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    keys |= {"moe_intermediate_size": 32, "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    keys |= {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 8, "vocab_size": 96, "pad_token_id": 0}
    keys |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "max_position_embeddings": 64}
    model = fill(transformers.UnlimitedOcrTextModel(transformers.UnlimitedOcrTextModel.config_class(**keys)))
    inputs = {"input_ids": torch.randint(3, 90, (2, 9))}
    small, report = shrink(model, inputs, 0.5)
    save_pretrained(small, report, tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**inputs).last_hidden_state, small(**inputs).last_hidden_state)


def test_a_config_that_is_no_class_of_transformers_is_copied():
    class Config:
        def __init__(self):
            self.hidden, self.model_type = 64, "perceptron"

        def to_dict(self):
            return dict(vars(self))

        def get_text_config(self):
            return self

    class Perceptron(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.up, self.down = nn.Linear(8, config.hidden), nn.Linear(config.hidden, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

        def save_pretrained(self, folder):
            raise NotImplementedError

    small, report = shrink(fill(Perceptron(Config())), torch.randn(4, 8), 0.5)
    assert report.not_in_config == "" and small.config.hidden == small.up.out_features == 32


@pytest.mark.parametrize("name", ["Gemma2", "GPT-2"])  # sliding and full attention alternate in the first
def test_the_layers_that_change_their_input_least_are_removed(name, tmp_path):
    model, inputs = hf_models.deep(name, 5)
    config = copy.deepcopy(model.config)
    layers = model.transformer.h if name == "GPT-2" else model.model.layers
    other = {"input_ids": inputs["input_ids"].flip(1)}
    cosines, hooks = torch.zeros(5), []
    for at, layer in enumerate(layers):

        def record(_, args, output, at=at):
            cosines[at] += F.cosine_similarity(args[0], output if torch.is_tensor(output) else output[0], dim=-1).mean()

        hooks.append(layer.register_forward_hook(record))
    _, want = model(**other), model(**inputs).logits
    for hook in hooks:
        hook.remove()
    small, report = shrink_layers(model, [inputs, other], 0.4, compensate=None)
    assert torch.equal(model(**inputs).logits, want) and report.not_in_config == "" and report.error_to_dense > 1e-3
    dropped = cosines.topk(2).indices.tolist()
    for at in dropped:
        layers[at].register_forward_hook(lambda _, args, output: args[0] if torch.is_tensor(output) else (args[0],))
    assert torch.equal(small(**inputs).logits, model(**inputs).logits)
    kept = [at for at in range(5) if at not in dropped]
    if name == "Gemma2":
        assert small.config.layer_types == [config.layer_types[at] for at in kept]
    save_pretrained(small, report, tmp_path)
    fresh = rebuilt(type(model)(config).eval(), small, report)
    for one in (type(model).from_pretrained(tmp_path), fresh):
        assert one.generate(**inputs, max_new_tokens=3).equal(small.generate(**inputs, max_new_tokens=3))


def test_layers_that_cannot_be_left_out_are_refused():
    with pytest.raises(SparsityError, match=r"the model has no nn.ModuleList; its blocks must be"):
        shrink_layers(mlp(4, 8, 2), [torch.randn(3, 4)], layers="layers")

    stages = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 6)])
    model = Net(lambda m, x: m.stages[1](m.stages[0](x)), stages=stages)
    with pytest.raises(SparsityError, match=r"stages.1 gives no tensor of its input's shape"):
        shrink_layers(model, [torch.randn(3, 4)])
    with pytest.raises(SparsityError, match="shrink_layers: there are no batches"):
        shrink_layers(model, [])


def encoder(x):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    # Of each of 10 tokens: queries, keys, values and output; two layers of 32 and 64. Attention: 4 heads of width 8.
    by_hand = 2 * (2 * 10 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 2 * 4 * 5 * 5 * 16)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), x, by_hand


def recurrent(x):
    layers = {"lstm": nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), "last": nn.Linear(32, 5)}
    return Net(lambda m, x: m.last(m.lstm(x)[0]), **layers), x, 2 * 21 * (2 * 64 * (8 + 16) + 2 * 64 * (32 + 16) + 160)


MATRICES = {"a": nn.Parameter(torch.randn(8, 8)), "w": nn.Parameter(torch.randn(3, 8))}


def llama():
    model, inputs = hf_models.make("Llama")
    # Of each of 14 tokens: queries, output, keys, values; the MLP; once the head.
    layer = 2 * 14 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 2 * 2 * 4 * 7 * 7 * 16
    return model, inputs, 2 * layer + 2 * 14 * 32 * 50


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: encoder(torch.randn(2, 5, 32)),
        lambda: recurrent(torch.randn(3, 7, 8)),
        lambda: (nn.GRU(8, 16), torch.randn(7, 3, 8), 2 * 21 * 48 * (8 + 16)),
        lambda: (Net(lambda m, x: m.w @ torch.addmv(m.a[0], m.a, x), **MATRICES), torch.randn(8), 2 * (64 + 24)),
        llama,
    ],
)
def test_flops_are_those_counted_by_hand(make, training):
    torch.manual_seed(0)
    model, inputs, by_hand = make()
    assert Reference(model.train(training), inputs).flops == by_hand
    assert count_flops(copy.deepcopy(model), inputs) == by_hand


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_flops_of_experts_are_those_of_the_chosen_ones(implementation):
    model, inputs = hf_models.deep("Mixtral", 1)
    model.set_experts_implementation("eager")
    by_loop = count_flops(model, inputs)
    model.set_experts_implementation(implementation)
    assert count_flops(model, inputs) == by_loop


@pytest.mark.parametrize("count", [3, 4])
def test_couplings_of_one_reason_share_a_line_if_there_are_more_than_three(count):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count + 1)])
    why = "left out by exclude[0] (Linear)"
    lines = [f"{at}.weight: {why}" for at in range(3)] if count == 3 else [f"0.weight and 3 more: {why}"]
    assert [*shrink(model, torch.randn(3, 4), exclude=[nn.Linear])[1].left_out] == lines


def test_flops_of_attention_are_saved():
    model, x, by_hand = encoder(torch.randn(2, 5, 32))
    _, report = shrink(model, x, 0.5, budget="flops")
    assert report.before.flops == by_hand and 0.45 * by_hand < report.after.flops <= 0.5 * by_hand
    assert "embed_dim" not in str(report)


def weight_norm_of_before(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


NORMS = {"new": nn.utils.parametrizations.weight_norm, "old": weight_norm_of_before}


@pytest.mark.parametrize("norm", NORMS)
def test_weights_of_weight_norm_lose_units_and_are_normalized_anew(norm):
    def make():
        layers = [nn.Conv1d(3, 8, 3), nn.ReLU(), nn.ConvTranspose1d(8, 6, 3), nn.ReLU(), nn.Conv1d(6, 2, 1)]
        with torch.enable_grad():  # the old one then has a weight that cannot be copied
            return nn.Sequential(*(layer if isinstance(layer, nn.ReLU) else NORMS[norm](layer) for layer in layers))

    model, x = make(), torch.randn(2, 3, 7)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small, report = shrink(model, x)
    assert [row.kept for row in report.couplings] == [4, 3] and report.difference <= 1e-5 and not report.left_out
    assert list(state) == list(small.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert report.before.parameters == parameters(model) and report.after.parameters == parameters(small)
    assert removable(model, x).frozen  # the old one can be copied
    again = rebuilt(make(), small, report)
    assert torch.equal(again(x), small(x)) and not torch.equal(model(x), small(x))
    with torch.enable_grad():
        again(x).sum().backward()
    assert all(p.grad is not None for p in again.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        (nn.Linear(16, 64), nn.Linear(64, 8), (32, 16)),
        (nn.Conv1d(4, 64, 3), nn.Conv1d(64, 8, 1), (8, 4, 9)),
        (nn.ConvTranspose2d(4, 64, 3), nn.Conv2d(64, 8, 3), (2, 4, 5, 5)),
    ],
)
def test_lengths_of_weight_norm_that_16_bits_round_are_a_note(first, second, shape, norm, dtype):
    model = nn.Sequential(NORMS[norm](copy.deepcopy(first)), nn.ReLU(), NORMS[norm](copy.deepcopy(second))).to(dtype)
    small, report = shrink(model, torch.randn(shape, dtype=dtype), EVERYTHING)
    assert report.couplings[0].kept == 32 and report.difference <= 1e-5
    assert any("rounded to 16 bits" in note for note in report.notes)
    assert all(p.dtype == dtype for p in small.parameters())


def test_a_weight_of_zeros_keeps_a_direction():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    model[0].parametrizations.weight.original0[:3] = 0.0
    small, report = shrink(model, torch.randn(5, 4), 0.5, "norm", multiple_of=2)
    assert [row.kept for row in report.couplings] == [2] and report.difference <= 1e-5
    assert sorted((small[0].weight != 0).any(1).tolist()) == [False, True]


def test_what_is_computed_or_read_from_values_is_reported_and_the_rest_is_removed():
    def run(m, x):
        y = F.relu(m.a(x))
        return m.c(F.relu(m.b(y if x.sum().item() > -1e9 else -y)))

    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
    model = Net(run, a=spectral, b=nn.Linear(8, 8), c=nn.Linear(8, 2), unused=nn.Linear(2, 2))
    _, report = shrink(model, torch.randn(5, 4))
    assert [row.kept for row in report.couplings] == [4] and report.difference <= 1e-5
    assert "unused: never called with these example inputs" in report.left_out
    assert any("a.weight is computed by a parametrization" in text for text in report.frozen)
    (value,) = report.values
    assert "return m.c(F.relu(m.b(y if x.sum().item() > -1e9 else -y))) (read " in value and value in str(report)


def test_packed_experts_keep_multiples_of_16_bytes_in_any_dtype():
    model, inputs = hf_models.deep("Mixtral", 1)
    model.set_experts_implementation("grouped_mm")
    small, report = shrink(model, inputs, {"*": 0.3, "width": 0.3})
    assert not any("does not run" in text for text in report.left_out) and report.difference <= 1e-5
    assert small.model.layers[0].mlp.experts.down_proj.shape == (4, 24, 36)  # of 32 and 48; 23 and 34 would not run


class Splines(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.grid = nn.Parameter(torch.randn(o, i, 5)), nn.Buffer(torch.linspace(-1, 1, 5))

    def forward(self, x):
        return torch.einsum("big,oig->bo", (self.grid - x[..., None]).sin() - self.grid.sin(), self.weight)


def test_three_dimensions_that_are_no_experts_keep_any_number():
    small, report = shrink(nn.Sequential(Splines(6, 10), Splines(10, 3)), torch.randn(5, 6), 0.5)
    assert small[0].weight.shape[0] == small[1].weight.shape[1] == 5 and report.difference <= 1e-5


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(4, 8), *(nn.Parameter(torch.randn(s)) for s in ((3, 8, 6), (3, 6, 2)))

    def forward(self, x):
        hidden = F.relu(torch.einsum("bi,eih->beh", F.relu(self.stem(x)), self.up))
        return torch.einsum("beh,eho->bo", hidden, self.down)


def test_a_score_that_does_not_fit_one_coupling_leaves_that_one_out():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Experts())
    _, report = shrink(model, torch.randn(5, 4), 0.5, "wanda", exclude=["3.stem.*"])
    assert [row.name for row in report.couplings] == ["0.weight"]
    assert any(text.startswith("3.up u i h: ") and "consumers" in text for text in report.left_out)
    with pytest.raises(SparsityError, match="needs a tensor whose blocks are inputs of its layer"):
        shrink(Experts(), torch.randn(5, 4), 0.5, "wanda", exclude=["stem.*"])


def test_a_cost_of_a_model_that_does_not_run_says_which():
    def cost(model):
        if model[0].out_features % 4:
            raise RuntimeError("strides should be multiple of 16 bytes")
        return parameters(model)

    x = torch.randn(3, 8)
    with pytest.raises(SparsityError, match="with [0-9]+ of 16 '0.weight' does not run: strides .*; give another"):
        shrink(mlp(8, 16, 8), x, 0.1, budget=cost)
    _, report = shrink(mlp(8, 16, 8), x, 0.1, budget=cost, multiple_of=4)
    assert report.couplings[0].kept == 12


def test_kinds_choose_couplings_and_whole_heads_come_before_numbers_of_each():
    model, inputs = hf_models.deep("BERT", 1)
    _, report = shrink(model, inputs, 0.3, keep_config=False)
    assert [(row.kept, row.of) for row in report.couplings] == [(3, 4), (34, 48)]
    _, report = shrink(model, inputs, {"mlp": 0.25, "heads": 0.5}, multiple_of={"mlp": 16})
    assert [(row.kept, row.of) for row in report.couplings] == [(2, 4), (48, 48)]
    with pytest.raises(SparsityError, match="ratio names 'mpl', but the couplings are .*'mlp'"):
        shrink(model, inputs, {"mpl": 0.5})


def test_an_encoder_with_fewer_heads_takes_padding_masks():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    inputs, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    small, report = shrink(model, {"src": inputs, "src_key_padding_mask": padding}, {"heads": 0.5})
    assert [row.kept for row in report.couplings] == [2, 2]
    with torch.no_grad():
        assert small(inputs, src_key_padding_mask=padding).shape == inputs.shape
    assert not cut_to(copy.deepcopy(model), report.manifest).use_nested_tensor


@pytest.mark.parametrize(("is_read", "kind"), [(True, "heads"), (True, "mlp"), (False, "heads")])
def test_what_torchs_fused_encoder_gives_at_padded_positions_is_noted_where_it_is_read(is_read, kind):
    def run(m, x, padding):
        states = m.encoder(x, src_key_padding_mask=padding)
        return m.head(states.mean(1) if is_read else states.masked_fill(padding[..., None], 0).mean(1))

    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    model = Net(run, encoder=encoder, head=nn.Linear(16, 3)).eval()
    inputs, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    is_fused = torch.backends.mha.get_fastpath_enabled()
    _, report = shrink(model, (inputs, padding), {kind: 0.5})
    assert torch.backends.mha.get_fastpath_enabled() == is_fused
    assert all(row.kept < row.of for row in report.couplings) and report.difference <= 1e-5
    noted = is_read and kind == "heads"
    assert ("not exact: in eval mode without gradients torch fuses" in str(report)) == noted


def test_inputs_of_equal_tokens_do_not_hide_a_wrong_removal():
    def run(m, x):
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(-2, -3) for f in (m.q, m.k, m.v))
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))

    torch.manual_seed(0)
    model = Net(run, **{name: nn.Linear(12, 24) for name in "qkv"}, o=nn.Linear(24, 12))
    with pytest.raises(SparsityError, match="with other values of inputs that are equal along a dimension"):
        shrink(model, torch.ones(2, 5, 12))
    small, _ = shrink(model, torch.randn(2, 5, 12))  # what the message asks for
    assert small.v.weight.shape != model.v.weight.shape


def test_a_config_that_refuses_the_numbers_does_not_describe_the_model(tmp_path):
    model, inputs = hf_models.deep("Llama", 1)
    small, report = shrink(model, inputs, 0.6)
    save_pretrained(small, report, tmp_path)
    assert report.not_in_config == ""
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**inputs).logits, small(**inputs).logits)


def test_a_model_that_is_constructed_without_random_values_may_draw_until_values_fit():
    parameter = nn.Parameter(torch.full((64,), 9.0))  # what its memory may hold
    with config_fields._Unfilled():
        assert (nn.init.normal_(parameter) == 9).all()
        assert (torch.full((64,), 9.0).normal_() != 9).all()  # or the next line would never return
        nn.init.trunc_normal_(parameter)  # as ViT does
    assert not (parameter.abs() > 2).any()


def test_with_a_cost_small_scopes_and_large_multiples_do_what_they_can():
    torch.manual_seed(0)
    x, narrow = torch.randn(3, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
    assert shrink(narrow, x, 0.2, budget="flops")[0][0].out_features == 3
    fixed = Net(lambda m, x: m.b(m.a(x).relu().view(*x.shape[:-1], 8)), a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    report = shrink(fixed, torch.randn(2, 6), 0.2, multiple_of=4)[1]
    assert not report.couplings and "a.weight" in report.left_out[0]
    wide = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
    for limits in (0.9, {"0.weight": 0.9}):
        with pytest.raises(SparsityError, match="still costs"):
            shrink(wide, x, 0.97, budget="parameters", max_sparsity=limits)


def test_16_bit_norms_are_folded_where_a_mask_is_all_ones():
    model, inputs = hf_models.deep("Llama", 1)
    ids = inputs["input_ids"]
    small, report = shrink(
        model.to(torch.bfloat16), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, EVERYTHING
    )
    assert small.config.hidden_size == model.config.hidden_size // 2 and report.not_in_config == ""


def test_operators_without_a_formula_are_named_in_the_report():
    library = torch.library.Library("uncounted", "DEF")
    library.define("matmul(Tensor a, Tensor b) -> Tensor")
    library.impl("matmul", torch.matmul, "CompositeExplicitAutograd")

    class Model(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y + torch.ops.uncounted.matmul(y, y.mT).sum() + torch.cdist(y, y).sum()

    model = Model(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    _, report = shrink(model, torch.randn(3, 8))
    assert report.uncounted == ("uncounted.matmul", "aten._cdist_forward")
    assert "flops leave out uncounted.matmul, aten._cdist_forward, without a formula" in str(report)
    assert report.before.flops == 2 * 3 * (8 * 16 + 16 * 4)
    assert not shrink(nn.Sequential(*model), torch.randn(3, 8))[1].uncounted


def test_rows_of_the_report_have_kinds_beside_names():
    model, inputs = hf_models.make("Llama")
    _, report = shrink(model, inputs, EVERYTHING, keep_config=False, dry_run=True)
    kinds = {row.name.rpartition(".layers.")[2]: row.kind for row in report.couplings}
    assert {"width", "mlp", "key heads"} <= {*kinds.values()} and kinds["0.mlp.gate_proj.weight"] == "mlp"
    assert report.to_csv().startswith("name,kind,kept,of") and " width " in str(report)


@pytest.mark.parametrize("name", [nightly("Llama"), "GPT-2", nightly("BERT"), "VGG", "LSTM"])
def test_weights_that_are_computed_when_they_are_read_give_the_same_smaller_model(name, monkeypatch):
    if name in NETWORKS:
        network, make = NETWORKS[name]
        model, inputs = fill(network()).to(memory_format=torch.channels_last), make()
    else:
        model, inputs = hf_models.deep(name, 1)
        model = model.to(torch.bfloat16) if name == "Llama" else model
    model.requires_grad_(False)
    (copied, _), report = shrink(model, inputs, EVERYTHING), shrink(model, inputs, EVERYTHING)[1]
    monkeypatch.setattr(verify, "LARGE", 1)
    monkeypatch.setattr(verify, "_PART", 64)  # so that products read few rows at a time
    computed, again = shrink(model, inputs, EVERYTHING)
    pairs = zip(copied.named_parameters(), computed.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) and p.stride() == q.stride() for (a, p), (b, q) in pairs)
    assert all(type(p) is nn.Parameter and not p.requires_grad for p in computed.parameters())
    assert again.left_out == report.left_out and again.changed == report.changed
    assert again.difference <= 1e-5 and parameters(computed) < parameters(model)


def test_a_list_of_batches_is_refused_and_the_first_is_taken():
    linear, x = mlp(8, 32, 4), torch.randn(2, 8)
    named, inputs = Net(lambda m, x: m.body(x), body=linear), {"x": x}
    for model, batches in ((named, [inputs, inputs]), (named, [inputs]), (linear, [x, x, x])):
        with pytest.raises(SparsityError, match=r"shrink: example_inputs is one batch.* give the first, batches\[0\]"):
            shrink(model, batches)
        assert shrink(model, batches[0])[1].couplings


def test_a_layer_of_zeros_is_named_where_the_model_returns_only_zeros():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    with pytest.raises(SparsityError, match="returns only zeros .*; 2.weight is all zeros: initialize that layer"):
        shrink(model, torch.randn(2, 8))
    nn.init.normal_(model[2].weight)
    assert shrink(model, torch.randn(2, 8))[1].couplings


def test_scores_read_all_batches_and_the_first_is_the_example():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batches = [torch.randn(5, 8) * torch.logspace(-2, 2, 8)[torch.randperm(8)] for _ in range(6)]
    whole, _ = shrink(model, torch.cat(batches), 0.5, score="obd")
    small, report = shrink(model, ratio=0.5, score="obd", batches=iter(batches))
    first, _ = shrink(model, batches[0], 0.5, score="obd")
    assert torch.equal(small[0].weight, whole[0].weight) and not torch.equal(small[0].weight, first[0].weight)
    assert torch.equal(shrink(model, batches[0], 0.5, score="obd", batches=batches[:1])[0][0].weight, first[0].weight)
    assert report.difference >= 0
    for text, keys in {
        r"shrink: give example_inputs \(one batch of inputs\), or batches": {},
        "shrink: there are no batches": {"batches": []},
        "shrink: batches must be a list of batches, got one tensor": {"batches": batches[0]},
    }.items():
        with pytest.raises(SparsityError, match=text):
            shrink(model, **keys)


PREFERRED_MULTIPLE = {  # {case: (units, arguments of shrink, kept units)}
    "SmolLM2": (1536, {"ratio": 0.338}, 1024),
    "a third": (1000, {"ratio": 1 / 3}, 672),
    "as asked": (768, {"ratio": 0.25}, 576),
    "16 bits": (1536, {"ratio": 0.338, "dtype": torch.bfloat16}, 1024),
    "parameters": (1536, {"ratio": 0.338, "budget": "parameters"}, 992),
    "by another name": (1536, {"ratio": 0.338, "multiple_of": {"width": 2}}, 1024),
    "too far": (320, {"ratio": 0.34}, 212),
    "too few": (224, {"ratio": 0.01}, 222),
    "taken back": (1536, {"ratio": 0.338, "multiple_of": 1}, 1017),
    "taken back by name": (1536, {"ratio": 0.338, "multiple_of": {"mlp": 1}}, 1017),
    "another number": (1536, {"ratio": 0.338, "multiple_of": 10}, 1020),
}


@pytest.mark.parametrize("case", PREFERRED_MULTIPLE)
def test_large_mlps_keep_a_multiple_of_32_units_if_this_moves_the_ratio_little(case):
    units, options, kept = PREFERRED_MULTIPLE[case]
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, units), nn.ReLU(), nn.Linear(units, 8))).to(dtype)
    report = shrink(model, torch.randn(6, 8, dtype=dtype), score="norm", **options)[1]
    assert [(row.kind, row.kept) for row in report.couplings] == [("mlp", kept)]
    line = "rounded: 0.0.weight: keeps a multiple of 32 of its units; multiple_of=1 keeps any number"
    assert (line in str(report)) == (kept % 32 == 0) == bool(report.multiples)


def test_layers_of_other_kinds_and_single_layers_keep_their_numbers():
    model = nn.Sequential(nn.Conv1d(3, 512, 1), nn.ReLU(), nn.Conv1d(512, 4, 1))
    report = shrink(model, torch.randn(2, 3, 5), 0.338, score="norm")[1]
    assert [(row.kept, row.of) for row in report.couplings] == [(339, 512)] and not report.multiples


@pytest.mark.parametrize("normalize", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.parametrize("frozen", ["lengths", "directions"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_lengths_and_directions_of_weight_norm_train_as_before(normalize, frozen):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), normalize(nn.Linear(32, 16, bias=False)))
    [*model[2].parameters()][frozen == "directions"].requires_grad = False
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    made = [shrink(model, torch.randn(4, 8), 0.5)[0], prune(model, 0.5)[0]]
    for one in (*made, cut_to(copy.deepcopy(model), shrink(model, torch.randn(4, 8), 0.5)[1].manifest)):
        assert {name: p.requires_grad for name, p in one.named_parameters()} == before


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(16, 48), nn.Linear(16, 16), 4

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", ["_attention", "stage-1", "attention"])
def test_manifests_are_read_whatever_modules_are_called(name):
    def make():
        return Net(lambda m, x: m.last(x + m.of[name](x)), of=nn.ModuleDict({name: Attention()}), last=nn.Linear(16, 3))

    x = torch.randn(2, 5, 16)
    small, report = shrink(make(), x, 0.5)
    again = cut_to(make(), report.manifest)
    again.load_state_dict(small.state_dict())
    assert again.of[name].heads == 2 and torch.equal(again(x), small(x))
    report.manifest["attributes"][0]["path"] = f"of.{name}._backward_hooks"
    with pytest.raises(SparsityError, match="cannot be set to 2 by a manifest"):
        cut_to(make(), report.manifest)


def test_layers_that_share_an_integer_keep_a_multiple_of_both_numbers():
    model, inputs = hf_models.make("Llama")
    multiples = {"model.layers.0.mlp": 8, "model.layers.1.mlp": 12}
    for ratio in (0.08, 0.2):
        options = {
            "budget": "parameters",
            "multiple_of": multiples,
            "exclude": ["query heads", "key heads", "head size"],
        }
        small, _ = shrink(model, inputs, ratio, **options)
        kept = [layer.mlp.gate_proj.out_features for layer in small.model.layers]
        assert kept[0] == kept[1] == 24
