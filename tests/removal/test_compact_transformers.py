"""Tiny random transformers models: pruned by couplings, compacted, saved and read back by transformers itself."""

import pytest
import torch
from compact_models import close, pruned, rebuilt, shaken

from sparsekit_ao import Coupling
from sparsekit_ao.removal import compact

transformers = pytest.importorskip("transformers")

ATTENTION = Coupling(
    {
        "model.layers.*.self_attn.q_proj.weight": "(u g d) i",
        "model.layers.*.self_attn.k_proj.weight": "(u d) i",
        "model.layers.*.self_attn.v_proj.weight": "(u d) i",
        "model.layers.*.self_attn.o_proj.weight": "o (u g d)",
    },
    sizes={"g": 2, "d": 4},
    name="kv heads",
    attrs={"config.num_key_value_heads": "u", "config.num_attention_heads": "u g"},
)
QUERIES = Coupling(
    {
        "model.layers.*.self_attn.q_proj.weight": "(kv u d) i",
        "model.layers.*.self_attn.o_proj.weight": "o (kv u d)",
    },
    scope="kv",
    sizes={"kv": 4, "d": 4},
    name="queries",
    attrs={"model.layers.*.self_attn.num_key_value_groups": "u", "config.num_attention_heads": "kv u"},
)
MLP = Coupling(
    {
        "model.layers.*.mlp.gate_proj.weight": "u i",
        "model.layers.*.mlp.up_proj.weight": "u i",
        "model.layers.*.mlp.down_proj.weight": "o u",
    },
    name="mlp",
    attrs={"config.intermediate_size": "u", "model.layers.*.mlp.intermediate_size": "u"},
)
STREAM = Coupling(
    {
        "model.embed_tokens.weight": "v u",
        "model.layers.**.q_proj.weight": "o u",
        "model.layers.**.k_proj.weight": "o u",
        "model.layers.**.v_proj.weight": "o u",
        "model.layers.**.o_proj.weight": "u i",
        "model.layers.**.gate_proj.weight": "o u",
        "model.layers.**.up_proj.weight": "o u",
        "model.layers.**.down_proj.weight": "u i",
        "model.layers.**layernorm.weight": "u",
        "model.norm.weight": "u",
        "lm_head.weight": "o u",
    },
    name="stream",
    attrs={"config.hidden_size": "u", "model.layers.**.hidden_size": "u"},
)


SIZES = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2}


def llama():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **heads, intermediate_size=24, rms_norm_eps=1e-3)
    return transformers.LlamaForCausalLM(config).eval()


def tokens():
    return {"input_ids": torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1))}


HEADS = [([ATTENTION, MLP], (4, 2)), ([QUERIES, MLP], (4, 4)), ([ATTENTION, QUERIES], (2, 2)), ([MLP], (8, 4))]


@pytest.mark.parametrize(("couplings", "heads"), HEADS)
def test_llama_is_saved_and_read_back_by_transformers_with_equal_outputs(couplings, heads, tmp_path):
    model, x = pruned(shaken(llama()), couplings), tokens()
    small, report = compact(model, couplings, x)
    with torch.no_grad():
        want = small(**x).logits
        assert close(model(**x).logits, want) and report.difference <= 1e-5 and not report.notes
        small.save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(again(**x).logits, want)
    assert not [text for text in report.unlisted if text.startswith("config.intermediate")]
    assert (again.config.num_attention_heads, again.config.num_key_value_heads) == heads
    if MLP in couplings:
        assert again.config.intermediate_size == 12 == again.model.layers[0].mlp.intermediate_size


@pytest.mark.parametrize("extra", [[], [ATTENTION, MLP]], ids=["stream", "all"])
def test_the_residual_stream_of_llama_is_pruned_and_its_norms_are_folded(extra, tmp_path):
    couplings = [STREAM, *extra]
    model, x = pruned(shaken(llama()), couplings), tokens()
    small, report = compact(model, couplings, x)
    assert report.difference <= 1e-5 and small.config.hidden_size == 8
    assert small.model.norm.variance_epsilon == pytest.approx(2e-3)
    assert [text for text in report.unlisted if "hidden_size" in text] == []
    assert small.config.rms_norm_eps == small.model.norm.variance_epsilon and not report.notes
    small.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert all(torch.equal(one(**x).logits, small(**x).logits) for one in (again, rebuilt(llama(), small, report)))


EXPERTS = "model.layers.*.mlp.experts"


def test_units_inside_every_expert_of_mixtral(tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **heads, intermediate_size=16)).eval()
    units = Coupling(
        {f"{EXPERTS}.gate_up_proj": "e (two u) i", f"{EXPERTS}.down_proj": "e o u"},
        scope="e",
        sizes={"two": 2},
        attrs={"config.intermediate_size": "u"},
    )
    model, x = pruned(mixtral, [units], level=0.6), tokens()
    # 7 of 16 units are left, but torch's grouped matmul wants rows of 16 bytes
    with pytest.raises(ValueError, match="by itself does not run: strides should be multiple of 16 bytes"):
        compact(model, units, x)
    small, report = compact(model, units, x, multiple_of=4)
    assert report.couplings[0].scopes == 4 and report.couplings[0].kept == 8
    small.save_pretrained(tmp_path)
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert close(model(**x).logits, small(**x).logits)
        assert close(again(**x).logits, small(**x).logits)


def test_norms_that_keep_different_epsilons_do_not_fit_into_one_field_of_the_config():
    model = shaken(llama())
    model.model.layers[0].self_attn.q_norm = type(model.model.norm)(8, eps=model.config.rms_norm_eps)  # not pruned
    small, report = compact(pruned(model, [STREAM]), STREAM, tokens())
    assert report.notes == (
        "config.rms_norm_eps cannot hold the different epsilons of folded norms, so save_pretrained loses them; use "
        "the manifest",
    )
    assert small.config.rms_norm_eps == model.config.rms_norm_eps
