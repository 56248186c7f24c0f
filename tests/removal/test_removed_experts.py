"""shrink_experts: the smaller model is the dense one whose routers choose among the kept experts alone.

The routers of this file compute the logits of the kept experts only. Models are compared in memory, saved and loaded,
and by the tokens that are generated with and without a cache.
"""

import copy

import pytest
import torch
import transformers
from grids import nightly_except
from test_removed_blocks import _DECODER, _LATENT, assert_same, fill, inputs_of
from torch import nn

from sparsekit_ao import SparsityError
from sparsekit_ao.coupling import expert_scores
from sparsekit_ao.export import load_pretrained, save_pretrained
from sparsekit_ao.removal import shrink_experts

_MIXED = {**_DECODER, "num_hidden_layers": 3, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_NAMED = {**_MIXED, "num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8}
_DEEPSEEK = {**_MIXED, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
_V4 = {**_MIXED, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8}
_V4 |= {"n_routed_experts": 6, "moe_intermediate_size": 16, "layer_types": ["sliding_attention"] * 3, "hc_mult": 2}
_V4 |= {"mlp_layer_types": ["moe"] * 3, "sliding_window": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}


def softmax_first(router, logits, bias):
    gates, chosen = logits.softmax(-1).topk(router.top_k)
    return (gates / gates.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else gates), chosen


def softmax_last(router, logits, bias):
    gates, chosen = logits.topk(router.top_k)
    return gates.softmax(-1), chosen


def sigmoids(router, logits, bias):
    scores, groups = logits.sigmoid(), router.num_group
    wanted = (scores + bias).unflatten(-1, (groups, -1))
    best = wanted.topk(2).values.sum(-1).topk(router.topk_group).indices
    is_best = torch.zeros(wanted.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    chosen = wanted.masked_fill(~is_best[..., None], -torch.inf).flatten(1).topk(router.top_k).indices
    gates = scores.gather(1, chosen)
    return gates / gates.sum(-1, keepdim=True) * router.routed_scaling_factor, chosen


def roots(router, logits, bias):
    scores = nn.functional.softplus(logits).sqrt()
    chosen = (scores + bias).topk(router.top_k).indices
    gates = scores.gather(1, chosen)
    return gates / gates.sum(-1, keepdim=True) * router.routed_scaling_factor, chosen


# {name: (class, fields of its config, gates and chosen experts of the logits)}
MIXTURES = {
    "Mixtral": ("MixtralForCausalLM", {**_MIXED, "num_local_experts": 6, "sliding_window": 4}, softmax_first),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**_NAMED, "norm_topk_prob": True}, softmax_first),
    "Qwen3-MoE, as they are": ("Qwen3MoeForCausalLM", {**_NAMED, "norm_topk_prob": False}, softmax_first),
    "OLMoE": ("OlmoeForCausalLM", {**_NAMED, "norm_topk_prob": False}, softmax_first),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "n_routed_experts": 6, "n_group": 1, "topk_group": 1},
        sigmoids,
    ),
    "DeepSeek-V3, groups": (
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        sigmoids,
    ),
    "DeepSeek-V4": ("DeepseekV4ForCausalLM", _V4, roots),
    "GPT-OSS": (
        "GptOssForCausalLM",
        {
            **_MIXED,
            "num_local_experts": 6,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        softmax_last,
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        {
            **_MIXED,
            "num_local_experts": 6,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
        },
        None,
    ),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def made(name):
    class_name, keys, _ = MIXTURES[name]
    model_class = getattr(transformers, class_name)
    model = fill(model_class(model_class.config_class(**keys)))
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
    return model.double().eval(), inputs_of(model)


def kept_of(report):
    """{name of a layer's router or experts: the experts that are kept}"""
    rows = {}
    for group in report.manifest["groups"]:
        size = group["sizes"][group["unit"]]
        kept = [at + scope * size for scope, units in enumerate(group["kept"]) for at in units]
        rows |= {member["name"].rpartition(".")[0]: torch.tensor(kept) for member in group["members"]}
    return rows


def choosing_among(model, kept, gates_of):
    """A copy whose routers see the logits of the kept experts alone."""
    dense = copy.deepcopy(model)

    def route(router, kept, hidden):
        hidden, bias = hidden.reshape(-1, hidden.shape[-1]), getattr(router, "bias", None)
        dtype = torch.float32 if hasattr(router, "num_group") else hidden.dtype
        logits = nn.functional.linear(
            hidden.to(dtype), router.weight[kept].to(dtype), bias if bias is None else bias[kept]
        )
        if gates_of is None:  # Llama 4: the gates of all experts, zero for those that are not chosen
            gates, chosen = logits.topk(router.top_k)
            scores = logits.new_zeros(len(logits), len(router.weight)).scatter_(1, kept[chosen], gates.sigmoid())
            return scores, logits
        gates, chosen = gates_of(router, logits, getattr(router, "e_score_correction_bias", logits.new_zeros(99))[kept])
        return logits, gates, kept[chosen]

    for name, module in dense.named_modules():
        if name in kept and not name.endswith("experts"):
            module.forward = lambda hidden, router=module, kept=kept[name]: route(router, kept, hidden)
    return dense


@pytest.mark.parametrize(
    "name", nightly_except(MIXTURES, "Qwen3-MoE, as they are", "DeepSeek-V3, groups", "GPT-OSS", "Llama 4")
)
def test_routers_choose_among_kept_experts(name, tmp_path):
    model, inputs = made(name)
    small, report = shrink_experts(model, [inputs], 0.5)
    kept = kept_of(report)
    wanted = choosing_among(model, kept, MIXTURES[name][2])
    save_pretrained(small, report, tmp_path)
    assert report.not_in_config == "" and "shrink_experts(" in (tmp_path / "README.md").read_text()
    again = load_pretrained(tmp_path, type(model), dtype=torch.float64, experts_implementation="batched_mm")
    assert_same(wanted, [small, again.eval()], inputs, True)


def test_padding_does_not_count():
    model, inputs = made("Mixtral")
    ids, mask = torch.cat([inputs["input_ids"], torch.full((2, 5), 7)], 1), torch.ones(2, 14, dtype=torch.long)
    mask[:, 9:] = 0
    padded = {"input_ids": ids, "attention_mask": mask}
    alone, counted = expert_scores(model, [inputs] * 2), expert_scores(model, [padded] * 2, token_mask=False)
    for masked in (
        expert_scores(model, [padded] * 2),
        expert_scores(model, [{"input_ids": ids}], None, lambda _: mask),
    ):
        for name, scores in masked.items():
            torch.testing.assert_close(scores, alone[name])
    assert any(not torch.allclose(alone[name], scores) for name, scores in counted.items())
    kept = [kept_of(shrink_experts(model, [batch], 0.5)[1]) for batch in (inputs, padded)]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    with pytest.raises(SparsityError, match=r"experts get 28 tokens .* is \(2, 7\); give token_mask=False"):
        expert_scores(model, [padded], None, lambda _: mask[:, :7])


def test_a_dry_run_says_which_experts_leave():
    model, inputs = made("OLMoE")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    report = shrink_experts(model, [inputs], 0.5)[1]
    same, plan = shrink_experts(model, [inputs], 0.5, dry_run=True)
    assert same is model and all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert plan.couplings == report.couplings and plan.after.parameters == report.after.parameters
    assert plan.difference < 1e-5 and not plan.manifest and report.error_to_dense > 1e-3


class WithMtp(transformers.MixtralForCausalLM):
    """A model whose layer that predicts further tokens has experts of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.mtp = nn.ModuleList([type(self.model.layers[0])(config, config.num_hidden_layers)])
        self.post_init()

    def forward(self, input_ids, predicts=True, **keys):
        hidden = self.model(input_ids, **keys).last_hidden_state
        if predicts:
            angles = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
            hidden = hidden + self.mtp[0](hidden, position_embeddings=angles)
        return {"logits": self.lm_head(hidden)}


def test_experts_of_layers_that_predict_further_tokens_leave_too(tmp_path):
    _, keys, gates_of = MIXTURES["Mixtral"]
    model = fill(WithMtp(transformers.MixtralConfig(**keys, use_cache=False))).double().eval()
    inputs = inputs_of(model)
    small, report = shrink_experts(model, [inputs], 0.5)
    kept = kept_of(report)
    assert len(small.mtp[0].mlp.experts.down_proj) == 3 and "mtp.0.mlp.gate" in kept
    assert_same(choosing_among(model, kept, gates_of), [small], inputs, False)
    save_pretrained(small, report, tmp_path)
    again = WithMtp.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="batched_mm")
    assert_same(small, [again.eval()], inputs, False)
    with pytest.raises(SparsityError, match=r"no token reached mtp.0.mlp.experts, so its experts cannot be rated"):
        shrink_experts(model, [{**inputs, "predicts": False}], 0.5)


def test_experts_that_a_table_chooses_are_refused():
    class_name, keys, _ = MIXTURES["DeepSeek-V4"]
    config = getattr(transformers, class_name).config_class(**{**keys, "mlp_layer_types": ["hash_moe", "moe", "moe"]})
    model = fill(transformers.DeepseekV4ForCausalLM(config)).double().eval()
    model.model.layers[0].mlp.gate.tid2eid.random_(6)
    with pytest.raises(SparsityError, match=r"layers.0.mlp.gate assigns tokens to experts by a table \(tid2eid\)"):
        shrink_experts(model, [inputs_of(model)], 0.5)
