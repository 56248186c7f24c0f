"""What the fields of a config count, as `shrink` finds it by constructing models with one field doubled."""

import hf_models
import pytest
import torch
import transformers
from discovered import fill
from torch import nn

from sparsekit_ao import shrink
from sparsekit_ao.removal import shrink_layers

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
DECODER = {"vocab_size": 100, "hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = {**DECODER, "intermediate_size": 56, "num_key_value_heads": 2, "max_position_embeddings": 128}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 64, "num_layers": 1}
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}


def changes(report):
    return {text for text in report.changed if text.startswith("config.")}


def test_few_models_are_constructed(monkeypatch):
    model, constructed = fill(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))), []
    construct = transformers.LlamaForCausalLM.__init__

    def counted(self, config):
        constructed.append(config)
        construct(self, config)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", counted)
    _, report = shrink(model, {"input_ids": IDS})
    assert report.not_in_config == "" and len(changes(report)) == 3 and len(constructed) <= 12


SLIDING = {**LLAMA, "hidden_size": 32, "head_dim": 8, "sliding_window": 16, "use_sliding_window": True}
SLIDING |= {"layer_types": ["sliding_attention"] * 4, "pad_token_id": 0}
WIDE_T5 = {**T5, "d_kv": 16, "num_heads": 8, "num_layers": 2}
OF_TOKENS = {  # {case: (class, fields of its config, attribute whose value equals a number of units)}
    "T5": ("T5EncoderModel", WIDE_T5, "encoder.block.0.layer.0.SelfAttention.relative_attention_max_distance"),
    "Gemma 3": ("Gemma3ForCausalLM", SLIDING, "model.layers.0.self_attn.sliding_window"),
    "Qwen 3": ("Qwen3ForCausalLM", SLIDING, "model.layers.0.self_attn.sliding_window"),
    "Mistral": ("MistralForCausalLM", {**SLIDING, "sliding_window": 4}, "model.layers.0.self_attn.sliding_window"),
    "EXAONE": (
        "Exaone4ForCausalLM",
        SLIDING,
        "model.layers.0.self_attn.sliding_window_pattern",
    ),
}


@pytest.mark.parametrize("case", OF_TOKENS)
@torch.no_grad()
def test_attributes_that_count_no_units_stay_though_their_values_are_the_same(case):
    name, keys, path = OF_TOKENS[case]
    model_class = getattr(transformers, name)
    model = fill(model_class(model_class.config_class(**keys))).double()
    small, report = shrink(model, {"input_ids": IDS}, 0.5, score="norm")
    holder, _, attribute = path.rpartition(".")
    before, after = (getattr(one.get_submodule(holder), attribute, "") for one in (model, small))
    assert before == after and report.not_in_config == "" and report.after.parameters < report.before.parameters
    again = type(small)(small.config).double().eval()
    again.load_state_dict(small.state_dict())
    long = {"input_ids": IDS.repeat(1, 6)}  # more tokens than there were
    assert torch.equal(first_of(small(**long)), first_of(again(**long)))
    attributes = [
        {(name, key): value for name, m in one.named_modules() for key, value in vars(m).items() if type(value) is int}
        for one in (small, again)
    ]
    assert attributes[0] == attributes[1]  # a T5's first block once had its width halved twice


def first_of(output):
    return next(value for key, value in output.items() if key != "past_key_values")


class Windowed(nn.Module):
    """An attention over as many tokens as it has heads, if the example has fewer tokens than that."""

    def __init__(self):
        super().__init__()
        self.heads, self.window = 8, 8
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = (distance >= 0) & (distance < self.window)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def test_a_window_is_no_number_of_heads():
    torch.manual_seed(0)
    small, report = shrink(Windowed(), torch.randn(2, 4, 32), 0.5, score="norm")
    assert (small.heads, small.window) == (4, 8) and report.difference <= 1e-5


class Flat(nn.Module):
    """An MLP that counts its units in an attribute, which only another branch reads."""

    def __init__(self, name):
        super().__init__()
        self.name, self.norm, self.up, self.down = name, nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        setattr(self, name, 24)

    def forward(self, x, flat=False):
        x = self.up(self.norm(x)).relu()
        return self.down(x.reshape(-1, getattr(self, self.name)) if flat else x)


@pytest.mark.parametrize("name", ["layer_size", "n_hidden_per_layer", "kernel_dim", "mlp_idim", "n_mlp_generations"])
def test_names_that_end_as_numbers_of_units_do_follow(name):
    small, _ = shrink(Flat(name), torch.randn(2, 3, 8), 0.5, score="norm")
    assert getattr(small, name) == 12 and small(torch.randn(2, 3, 8), flat=True).shape == (6, 8)


@pytest.mark.parametrize(
    "name",
    [
        *("layer_number", "layer_num", "layer_index", "layer_idx", "linear_conv_kernel_dim", "patch_dim"),
        *("capacity", "max_batch_size", "queue_size"),
    ],
)
def test_names_of_positions_pixels_and_samples_do_not_follow(name):
    small, _ = shrink(Flat(name), torch.randn(2, 3, 8), 0.5, score="norm")
    assert getattr(small, name) == 24 and small.up.out_features == 12


@pytest.mark.slow
def test_couplings_that_share_a_field_keep_equal_fractions():
    # One `d_ff` holds the MLPs of both halves, and one `num_heads` all three attentions.
    model = fill(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, feed_forward_proj="gated-gelu")))
    small, report = shrink(model, BOTH, 0.4, budget="parameters")
    assert report.not_in_config == "" and report.after.parameters <= 0.6 * report.before.parameters
    assert {text.split(":")[0] for text in changes(report)} == {"config.d_ff", "config.num_heads"}
    fresh = type(small)(type(small.config).from_dict(small.config.to_dict())).eval()
    fresh.load_state_dict(small.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fresh(**BOTH).logits, small(**BOTH).logits)


@pytest.mark.parametrize(
    ("name", "keys", "fields"),
    [
        ("GPT-2", {}, {"config.n_inner: None -> 64"}),  # a field that the config computes as long as it is None
        ("GPT-2", {"n_inner": 60}, {"config.n_inner: 60 -> 30"}),
        ("HuBERT", {}, {"config.conv_dim[0]: 16 -> 8", "config.intermediate_size: 48 -> 24"}),  # under weight_norm
        # as large as the hidden size and the vocabulary
        ("Llama", {"intermediate_size": 32, "vocab_size": 32}, {"config.intermediate_size: 32 -> 16"}),
    ],
)
def test_a_field_is_known_by_what_it_counts_even_if_others_have_its_value(name, keys, fields):
    model, inputs = hf_models.deep(name, 2, **keys)
    inputs = {key: x % 32 if key == "input_ids" else x for key, x in inputs.items()}
    _, report = shrink(model, inputs, {"mlp": 0.5, "conv channels": 0.5} if name == "HuBERT" else {"mlp": 0.5})
    assert changes(report) == fields and report.not_in_config == ""


@pytest.mark.parametrize("heads", [2, 4])  # the second is the number of layers too
def test_the_field_that_counts_blocks_follows_them(heads):
    config = transformers.LlamaConfig(**{**LLAMA, "num_attention_heads": heads, "num_key_value_heads": heads})
    model = fill(transformers.LlamaForCausalLM(config))
    small, report = shrink_layers(model, [{"input_ids": IDS}], 0.25)
    assert report.not_in_config == "" and small.config.num_hidden_layers == 3
    assert small.config.num_attention_heads == heads


def test_a_field_whose_double_changes_which_tensors_there_are_is_tripled():
    model, inputs = hf_models.make("ResNet")  # twice its embedding_size is the first hidden size: no shortcut there
    _, report = shrink(model, inputs, 0.5)
    assert changes(report) == {"config.embedding_size: 8 -> 4"} and report.not_in_config == ""


class OwnConfig(transformers.PretrainedConfig):
    """A config whose size of heads is None unless it is given, and which may refer back to itself."""

    model_type = "own_of_this_test"

    def __init__(self, size=32, heads=4, head_dim=None, **keys):
        self.size, self.heads, self.head_dim = size, heads, head_dim
        super().__init__(**keys)


class OwnModel(transformers.PreTrainedModel):
    """One attention whose scale is that of the dense number of heads, so that no config describes fewer heads."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.heads, self.head_dim = config.heads, config.head_dim or config.size // config.heads
        inner = self.heads * self.head_dim
        self.q, self.k, self.v = (nn.Linear(config.size, inner) for _ in range(3))
        self.o, self.scale = nn.Linear(inner, config.size), (config.size // config.heads) ** -0.5
        self.post_init()

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("refers_back", [False, True])
def test_a_config_that_cannot_follow_keeps_its_fields(refers_back):
    model = fill(OwnModel(OwnConfig()))
    if refers_back:
        model.config.to_dict = lambda: {"size": 32, "heads": 4}  # without the reference
        model.config.parent = model.config
    before = {key: value for key, value in vars(model.config).items() if key in ("size", "heads", "head_dim")}
    small, report = shrink(model, {"x": torch.randn(2, 5, 32)}, 0.5, keep_config=False)
    assert report.not_in_config and small.q.out_features == 16
    assert {key: vars(small.config)[key] for key in before} == before
