"""Removals in branches that change the outputs by little, and integers that only some ways of attention read."""

import copy
import itertools

import pytest
import torch
import transformers
from grids import turns
from networks import Net
from torch import nn

from sparsekit_ao.removal import shrink


class Attention(nn.Module):
    """Attention that infers the size of a head, so that it runs with the wrong number of heads too."""

    def __init__(self, gain, form):
        super().__init__()
        self.h, self.form = 4, form
        if form == "packed":
            self.qkv = nn.Linear(32, 96)
        else:
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.o, self.gain = nn.Linear(32, 32), nn.Parameter(torch.tensor(float(gain)))

    def forward(self, x):
        b, n, _ = x.shape
        if self.form == "packed":
            q, k, v = self.qkv(x).view(b, n, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (layer(x).view(b, n, self.h, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return x + self.gain * self.o(heads.transpose(1, 2).flatten(2))


def zero_output(model):
    for attention in model[1:3]:
        nn.init.zeros_(attention.o.weight), nn.init.zeros_(attention.o.bias)


def large_bias(model):
    model[-1].bias += 1e4


def layer_scale(model):
    for attention in model[1:3]:
        attention.gain = nn.Parameter(torch.full((32,), 1e-5))


CASES = {"as it is": (1, None), "ReZero": (0, None), "small factor": (1e-3, None)}
CASES |= {"LayerScale": (1, layer_scale), "zero output": (1, zero_output), "large bias": (1, large_bias)}
CASES |= {"small factor and large bias": (1e-3, large_bias)}


FORMS = itertools.product(["packed", "separate"], [torch.float32, torch.float64])


@pytest.mark.parametrize(("case", "form", "dtype"), turns(CASES, FORMS))
def test_heads_are_counted_where_their_branch_changes_little(case, form, dtype):
    torch.manual_seed(0)
    gain, change = CASES[case]
    blocks = (Attention(gain, form) for _ in range(2))
    model = nn.Sequential(nn.Linear(6, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 3)).to(dtype).eval()
    with torch.no_grad():
        if change is not None:
            change(model)
    small, report = shrink(model, torch.randn(2, 7, 6, dtype=dtype), 0.5)
    assert [attention.h for attention in small[1:3]] == [2, 2] and small[1].o.in_features == 16
    assert report.difference <= 1e-5


FACTORS = {  # {name: (a module's part, the factor of a branch that it gives)}
    "sigmoid of a gate": (nn.Parameter(torch.tensor(-14.0)), torch.sigmoid),
    "exponential": (nn.Parameter(torch.tensor(-14.0)), torch.exp),
    "a float": (1e-6, lambda factor: factor),
    "powers": (nn.Parameter(torch.tensor(0.02)), lambda factor: factor**4),
    "a large bias": (nn.Parameter(torch.full((), 1e-6)), lambda factor: factor),
}


@pytest.mark.parametrize("name", FACTORS)
def test_heads_are_counted_or_kept_where_a_stronger_branch_hides_them(name):
    torch.manual_seed(0)
    part, factor = FACTORS[name]
    attention, mlp = Attention(1, "packed"), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def run(m, x):
        x = m.embed(x)
        return m.head(m.mlp(x) + x + factor(m.part) * (m.attention(x) - x))

    parts = {"embed": nn.Linear(6, 32), "attention": attention, "mlp": mlp, "head": nn.Linear(32, 3)}
    model = Net(run, part=copy.deepcopy(part), **parts).eval()
    small, _ = shrink(model, torch.randn(2, 7, 6), 0.5)
    heads = small.attention
    assert small.mlp[0].out_features == 32 and heads.o.in_features == 8 * heads.h


POSITIVE = {  # functions of a parameter that must be positive
    "logarithm": lambda m, x: m.head(x) + m.part.log(),
    "root": lambda m, x: m.head(x) / m.part.sqrt(),
    "probabilities": lambda m, x: m.head(x) + torch.distributions.Categorical(m.part).entropy(),
    "deviations": lambda m, x: torch.distributions.Normal(m.head(x), m.part[0]).cdf(torch.zeros(())),
    "power": lambda m, x: m.head(x) * m.part**0.5,
}


@pytest.mark.parametrize("name", POSITIVE)
def test_parameters_that_are_small_and_positive_stay_so_in_trials(name):
    layers = {"body": nn.Linear(8, 16), "head": nn.Linear(16, 200), "part": nn.Parameter(torch.full((1, 200), 5e-3))}
    small = shrink(Net(lambda m, x: POSITIVE[name](m, m.body(x).relu()), **layers), torch.randn(6, 8), 0.5)[0]
    assert small.body.out_features == 8


@pytest.mark.parametrize("config", [torch.zeros(3), {"to_dict": 1}, [1, 2], None])
def test_an_attribute_of_the_name_config_may_be_anything(config):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.config = config
    assert shrink(model, torch.randn(3, 4), 0.5)[0][0].out_features == 4


SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8}
DECODERS = [
    ("Llama", {"num_key_value_heads": 2}, {"query heads": 0.5}),
    ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}, 0.5),
    ("Qwen2", {"num_key_value_heads": 1, "num_attention_heads": 7, "hidden_size": 56}, 0.5),
    ("Mistral", {"num_key_value_heads": 1}, 0.5),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 8}, 0.5),
]


@pytest.mark.parametrize(
    ("name", "sizes", "ratio", "has_mask"),
    [
        *((*one, at % 2 > 0) for at, one in enumerate(DECODERS[:3])),
        *(pytest.param(*one, True, marks=pytest.mark.nightly) for one in DECODERS[3:]),
    ],
)
def test_a_decoder_without_query_heads_runs_in_every_way(name, sizes, ratio, has_mask):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes, pad_token_id=0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(1, 97, (2, 9))
    mask = torch.ones_like(ids)
    small, report = shrink(model, {"input_ids": ids, **({"attention_mask": mask} if has_mask else {})}, ratio)
    assert small.config.num_attention_heads < config.num_attention_heads and report.difference <= 1e-5
    padded = mask.clone()
    padded[0, :4] = 0
    outputs = {}
    with torch.no_grad():
        for way in ("sdpa", "eager"):
            small.set_attn_implementation(way)
            outputs[way] = small(input_ids=ids, attention_mask=padded).logits[padded.bool()]
            small.generate(ids, attention_mask=padded, max_new_tokens=2)
    torch.testing.assert_close(outputs["sdpa"], outputs["eager"])


def test_a_config_with_sizes_by_layer_is_read():
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 4, "layer_types": kinds}
    sizes["num_hidden_layers"] = 2
    sizes |= {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SIZES | sizes)).eval()
    small, report = shrink(model, {"input_ids": torch.randint(97, (2, 9))}, {"mlp": 0.5})
    assert small.config.intermediate_size == 48 and report.difference <= 1e-5
