"""discover on real architectures: half of every axis that it finds can be removed exactly, or an error tells why not.

Some axes need an integer of the forward changed too (such as a head size), which shapes do not show: without it
`compact` must raise, never return a wrong model; with it, listed by hand, the axis is removed exactly.
"""

from dataclasses import replace

import hf_models
import pytest
from discovered import pruned
from grids import nightly_except

from sparsekit_ao import SparsityError
from sparsekit_ao.coupling import discover
from sparsekit_ao.removal import compact

DECODER = "model.layers.*.self_attn."
ROPE = {DECODER.replace("*", "**") + "head_dim": "d u"}  # a pair of rotated values is one unit
# By architecture: axes that go together because the forward has one number for them, by their place in what discover
# finds, with the integers that hold their size, listed once. Axes that are not here need none.
HEAD = [{3: ROPE, 4: {}}]
TOGETHER = {
    "Llama": HEAD,
    "Qwen2": HEAD,
    "Qwen3": HEAD,
    "Mistral": HEAD,
    "Gemma2": [{2: {DECODER + "num_key_value_groups": "u"}}, *HEAD],
    "Mixtral": [{0: {f"model.layers.**.mlp.{module}.hidden_dim": "u" for module in ("gate", "experts")}}, *HEAD],
    "GPT-2": [
        {0: {"transformer.h.*.attn.split_size": "u d"}},
        {1: {"transformer.h.*.attn.split_size": "s u", "transformer.h.*.attn.head_dim": "u"}},
    ],
    "T5": [
        {1: {"encoder.block.*.layer.0.SelfAttention.key_value_proj_dim": "u"}, 2: {}},
        {5: {"decoder.block.*.layer.0.SelfAttention.key_value_proj_dim": "u"}, 6: {}},
        {7: {"decoder.block.**.layer.1.EncDecAttention.n_heads": "u"}},
        {8: {"decoder.block.*.layer.1.EncDecAttention.key_value_proj_dim": "u"}, 9: {}},
    ],
    "BERT": [{1: {"encoder.layer.*.attention.self.attention_head_size": "u"}, 2: {}}],
    "DistilBERT": [{1: {"transformer.layer.*.attention.attention_head_size": "u"}, 2: {}}],
    "ViT": [{1: {"vit.layers.*.attention.head_dim": "u"}, 2: {}}],
}
COUNTS = {  # kinds of axes that discover finds, so that one which it no longer finds fails the test
    **dict.fromkeys(("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Mixtral"), 6),
    **dict.fromkeys(("BERT", "DistilBERT", "ViT"), 4),
    **{"GPT-2": 3, "GPT-NeoX": 2, "T5": 11, "ConvNeXt": 1, "ResNet": 5, "MobileNetV2": 10},
}


def halved(model, couplings, inputs):
    """(fraction of parameters left, largest difference) of the model without half of the couplings' units."""
    _, report = compact(pruned(model, couplings), couplings, inputs)
    assert all("cannot hold the different epsilons" in note for note in report.notes)  # of Qwen3, by the head
    return report.after.parameters / report.before.parameters, report.difference


@pytest.mark.parametrize("name", nightly_except(hf_models.NAMES, "Llama", "GPT-2", "BERT", "ResNet"))
def test_half_of_every_discovered_axis_is_removed_exactly(name):
    model, inputs = hf_models.make(name)
    couplings = discover(model, inputs).couplings
    assert len(couplings) == COUNTS[name]
    steps = TOGETHER.get(name, [])
    listed = {at for step in steps for at in step}
    for step in [*steps, *({at: {}} for at in range(len(couplings)) if at not in listed)]:
        left, difference = halved(model, [replace(couplings[at], attrs=attrs) for at, attrs in step.items()], inputs)
        assert left < 1 and difference <= 1e-5
    for at in listed:  # without the integers compact raises and is never wrong
        with pytest.raises(SparsityError, match="^the compacted model (does not run|gives other outputs): ") as caught:
            halved(model, [couplings[at]], inputs)
        assert couplings[at].name.partition("*")[0] in str(caught.value)


def test_experts_whose_shapes_depend_on_values_are_followed_in_another_implementation():
    model, inputs = hf_models.make("Mixtral")
    wanted = discover(model, inputs).couplings
    model.set_experts_implementation("eager")
    assert discover(model, inputs).couplings == wanted
    assert model.config._experts_implementation == "eager"


def test_discover_takes_an_attention_mask():
    model, inputs = hf_models.make("Llama")
    inputs |= {"attention_mask": inputs["input_ids"].new_ones(2, 7)}
    assert len(discover(model, inputs).couplings) == 6
