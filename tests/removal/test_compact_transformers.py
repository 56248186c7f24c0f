"""Tiny random Llama models: pruned by couplings, compacted, saved and read back by transformers itself."""

import hf_models
import pytest
import torch
from compact_models import close, pruned, shaken

from sparsekit_ao import Coupling
from sparsekit_ao.coupling import for_model
from sparsekit_ao.removal import compact, cut_to

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "hidden_size": 32}
KINDS = [  # kinds of couplings, and the sizes in the config of the smaller model
    (["mlp"], {"intermediate_size": 24}),
    (["heads"], {"num_attention_heads": 2}),
    (["kv_heads", "mlp"], {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}),
    (["kv_heads", "heads"], {"num_attention_heads": 1, "num_key_value_heads": 1}),
    (["residual"], {"hidden_size": 16}),
    (["residual", "kv_heads"], {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("kinds", "sizes"), KINDS, ids=["+".join(kinds) for kinds, _ in KINDS])
def test_llama_is_saved_and_read_back_by_transformers_with_equal_outputs(kinds, sizes, tmp_path):
    model, x = hf_models.make("Llama")
    couplings = [for_model(model)[kind] for kind in kinds]
    small, report = compact(pruned(shaken(model), couplings), couplings, x)
    assert report.difference <= 1e-5 and not report.notes
    with torch.no_grad():
        want = small(**x).logits
        assert close(model(**x).logits, want)
        small.save_pretrained(tmp_path)
        report.save(tmp_path / "manifest.json")
        fresh = cut_to(hf_models.make("Llama")[0], tmp_path / "manifest.json")
        fresh.load_state_dict(small.state_dict())
        again = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(again(**x).logits, want) and torch.equal(fresh(**x).logits, want)
    assert {name: getattr(again.config, name) for name in SIZES} == {**SIZES, **sizes}
    assert small.config.rms_norm_eps == small.model.norm.variance_epsilon


def test_layers_that_keep_different_numbers_cannot_share_a_field_of_the_config():
    model, x = hf_models.make("Llama")
    mlp = for_model(model)["mlp"]
    pruned(model, [Coupling({name.replace("*", "0"): axes for name, axes in mlp.members.items()})])
    with pytest.raises(
        ValueError,
        match=r"coupling 'mlp 1': attrs 'config.intermediate_size' is one number for several layers, but 'mlp 0' keeps "
        r"24 of 48 and 'mlp 1' 48 of 48. Keep equal numbers, or do not list it.",
    ):
        compact(model, mlp, x)


def test_norms_that_keep_different_epsilons_do_not_fit_into_one_field_of_the_config():
    model, x = hf_models.make("Llama")
    model.model.layers[0].self_attn.q_norm = type(model.model.norm)(8, eps=model.config.rms_norm_eps)  # not pruned
    residual = for_model(hf_models.make("Llama")[0])["residual"]
    small, report = compact(pruned(shaken(model), [residual]), residual, x)
    assert report.notes == (
        "config.rms_norm_eps cannot hold the different epsilons of folded norms, so save_pretrained loses them; use "
        "the manifest",
    )
    assert small.config.rms_norm_eps == model.config.rms_norm_eps
