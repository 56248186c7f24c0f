"""The example that drops single attentions and MLPs: the smaller model computes what the model with zeros does."""

import copy
import itertools
import runpy
from pathlib import Path

import hf_models
import pytest
import torch
from torch.nn import functional as F

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "drop_sublayers.py"))
by_influence, drop, Zeros = EXAMPLE["by_influence"], EXAMPLE["drop"], EXAMPLE["Zeros"]
FAMILIES = {
    "Llama": ("model.layers", "self_attn", "post_attention_layernorm"),
    "Gemma2": ("model.layers", "self_attn", None),  # a norm of the output, before it is added; two types of attention
    "GPT-2": ("transformer.h", "attn", "ln_2"),
}


def influences(model, inputs, layers, middle):
    """1 - cosine of the hidden states before and after each attention and MLP, by the inputs of the norms between."""
    states, hooks = [], []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, args, kw: states.append(args[0]), with_kwargs=True))
        hooks.append(layer.get_submodule(middle).register_forward_pre_hook(lambda _, args: states.append(args[0])))
    hooks.append(layers[-1].register_forward_hook(lambda _, args, out: states.append(out)))
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return [(1 - F.cosine_similarity(a, b, dim=-1).mean()).item() for a, b in itertools.pairwise(states)]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_what_changes_the_hidden_states_least_gives_zeros(name):
    path, attention, middle = FAMILIES[name]
    model, inputs = hf_models.deep(name, 4)
    model.double().train()
    names = [f"{path}.{at}.{child}" for at in range(4) for child in (attention, "mlp")]
    sublayers = by_influence(model, path, [inputs])
    assert model.training
    model.eval()
    always_kept = {names[0], names[2]} if name == "Gemma2" else {names[0]}
    assert {sublayer.name for sublayer in sublayers} == {*names} - always_kept
    if middle:
        wanted = dict(zip(names, influences(model, inputs, model.get_submodule(path), middle), strict=True))
        assert all(s.influence == pytest.approx(wanted[s.name], abs=1e-12) for s in sublayers)
    assert sublayers == sorted(sublayers, key=lambda s: s.influence)

    small, zeroed = copy.deepcopy(model), copy.deepcopy(model)
    drop(small, sublayers[:4])
    for sublayer in sublayers[:4]:
        assert isinstance(small.get_submodule(sublayer.name), Zeros)
        zeroed.get_submodule(sublayer.name).register_forward_hook(
            lambda _, args, out: (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0
        )
    ids = torch.randint(5, 50, (2, 9))
    for model_inputs in (inputs, {"input_ids": ids}):
        torch.testing.assert_close(small(**model_inputs).logits, zeroed(**model_inputs).logits, rtol=0, atol=1e-12)
    keys = {"max_new_tokens": 4, "eos_token_id": None}
    assert small.generate(ids, **keys).equal(zeroed.generate(ids, **keys, use_cache=False))
    bert, inputs = hf_models.make("BERT")
    with pytest.raises(ValueError, match=r"encoder.layer.0 does not only add .*attention.* to its input"):
        by_influence(bert, "encoder.layer", [inputs])
