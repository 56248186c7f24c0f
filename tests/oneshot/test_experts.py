"""`prune` of mixtures of experts of transformers, and of weights that other modules than Linear multiply by."""

import re

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import prune, recover
from sparsekit_ao.removal import shrink_experts

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
        **LATENT,
    },
    "Olmoe": {"num_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "Llama4": {
        "num_local_experts": 4,
        "head_dim": 8,
        "intermediate_size_mlp": 32,
        "layer_types": ["full_attention"] * 2,
    },
    "Phimoe": {"num_local_experts": 4},
}
DENSE = re.compile(r"embed_tokens|lm_head|norm|router|\.gate\.weight|bias")
BATCHES = [torch.randint(1, 50, (4, 24), generator=torch.Generator().manual_seed(k)) for k in range(4)]


def mixture(kind):
    """A small random model."""
    torch.manual_seed(0)
    name = {"Llama4": "Llama4ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**SIZES, **MIXTURES[kind]})
    return model_class(config).eval()


@pytest.mark.parametrize("kind", MIXTURES)
def test_half_of_every_scope_is_zero_and_the_model_loads_and_generates(kind, tmp_path):
    model = mixture(kind)
    pruned, report = prune(model, pattern="2:4", batches=BATCHES, progress=False)
    weights = {name: p for name, p in pruned.named_parameters() if p.ndim > 1 and not DENSE.search(name)}
    assert {row.tensor for row in report} == weights.keys()
    assert report.left_out.keys() == set(report.dense)  # routers, and the output embedding
    for row in report:
        weight, dense = weights[row.tensor], model.get_parameter(row.tensor)
        along = 1 if kind in ("GptOss", "Llama4") and weight.ndim == 3 else -1  # the dimension of the inputs
        zeros = weight.movedim(along, -1).unflatten(-1, (-1, 4)).eq(0).sum(-1)
        assert zeros.eq(2).all() and row.density == 0.5, row.tensor
        assert 0 < row.after < row.before and dense.ne(0).all()
    for name, p in pruned.named_parameters():
        assert name in weights or torch.equal(p, model.get_parameter(name)), name
    pruned.save_pretrained(tmp_path)
    again = type(pruned).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(BATCHES[0]).logits, pruned(BATCHES[0]).logits)
    ids = again.generate(BATCHES[0][:, :4], max_new_tokens=4, do_sample=False)
    assert ids.shape == (4, 8)


def test_the_report_counts_the_tokens_of_experts():
    model, chosen = mixture("Mixtral"), []
    _, report = prune(model, pattern="2:4", batches=BATCHES, progress=False)
    hook = lambda _, args: chosen.append(args[1])  # noqa: E731
    with torch.no_grad(), model.model.layers[0].mlp.experts.register_forward_pre_hook(hook):
        for ids in BATCHES:
            model(ids)
    counts = torch.cat(chosen).flatten().bincount(minlength=4)
    note = f"tokens of an expert: {counts.min()} at least, {counts.median()} in the median"
    assert {row.note for row in report if row.tensor.startswith("model.layers.0.mlp.experts")} == {note}


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
@pytest.mark.parametrize("level", [0.5, 0.7])
def test_sparsegpt_keeps_the_same_share_of_every_expert(kind, level):
    keys = {"compensate": "sparsegpt", "batches": BATCHES, "progress": False}
    pruned, report = prune(mixture(kind), level, **keys)
    for row in report:
        weight = pruned.get_parameter(row.tensor)
        assert int((weight == 0).sum()) == int(level * weight.numel()) and 0 < row.after < row.before
        if weight.ndim == 3:
            zeros = (weight == 0).sum((1, 2))
            assert int(zeros.max() - zeros.min()) <= 1


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3", "Llama4"])
def test_a_mixture_that_lost_experts_is_recovered(kind):
    dense = mixture(kind)
    small, _ = shrink_experts(dense, BATCHES, 0.5)
    rows = recover(small, dense, BATCHES, passes=8, progress=False)
    assert len(rows) == 2 and 0 < rows[1].after < rows[1].before  # the first block of DeepSeek has no experts
    assert small.model.layers[1].get_submodule("feed_forward" if kind == "Llama4" else "mlp").experts.down_proj.shape[
        0
    ] == (4 if kind == "DeepseekV3" else 2)


class Raw(nn.Module):
    """Raw Parameters, one of them transposed, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.straight, self.transposed = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
        self.twice = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        x = F.linear(x, self.straight).relu() @ self.transposed
        return F.linear(F.linear(x, self.twice).relu(), self.twice)


class Tagger(nn.Module):
    """An LSTM, and a label for each token."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Attention(nn.Module):
    """Attention of tokens to themselves."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


NAMES = {
    Raw: ["straight", "transposed", "twice"],
    Tagger: [*(f"lstm.weight_{w}_l0{way}" for way in ("", "_reverse") for w in ("ih", "hh")), "head.weight"],
    Attention: ["attention.in_proj_weight", "attention.out_proj.weight"],
}


@pytest.mark.parametrize("make", NAMES)
def test_weights_that_other_products_read_are_compensated_and_outputs_are_nearer(make):
    torch.manual_seed(0)
    model = make().eval()
    mix = torch.randn(16, 16) / 4
    batches = [torch.randn(8, 12, 16) @ mix for _ in range(4)]
    pruned, report = prune(model, pattern="2:4", batches=batches)
    by_size, _ = prune(model, pattern="2:4", batches=batches, compensate=None)
    assert sorted(row.tensor for row in report) == sorted(NAMES[make]) and not report.dense
    for row in report:
        weight = pruned.get_parameter(row.tensor)
        weight = weight.T if row.tensor == "transposed" else weight  # along the inputs
        assert weight.unflatten(-1, (-1, 4)).eq(0).sum(-1).eq(2).all()
        assert 0 < row.after < row.before and not row.note
    with torch.no_grad():
        errors = [sum(float((one(x) - model(x)).norm()) for x in batches) for one in (pruned, by_size)]
    assert errors[0] < errors[1]
