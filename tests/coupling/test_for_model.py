"""for_model: it returns what discover finds, its couplings leave outputs unchanged, and unknown models are errors."""

import functools

import einops
import hf_models
import pytest
import torch
from discovered import assert_exact, fill, pruned
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError
from sparsekit_ao.coupling import discover, for_model
from sparsekit_ao.removal import compact

KNOWN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "BERT", "DistilBERT", "ViT")


def units(model, couplings):
    """Every coupled coupling as {tensor: the number of the unit that each element belongs to}, comparable."""
    found = []
    for bound in (bound for coupling in couplings for bound in coupling.bind(model)):
        numbers = torch.arange(torch.Size(bound.grid).numel()).reshape(bound.grid)
        rows = {}
        for member in bound.members:
            shape = model.get_submodule(member.fqn.rpartition(".")[0])
            tensor = getattr(shape, member.fqn.rpartition(".")[2])
            pattern = member.pattern
            inner = {axis: n for axis, n in pattern.lengths(tuple(tensor.shape)).items() if axis not in pattern.unit}
            label = einops.repeat(numbers, f"{' '.join(pattern.unit)} -> {pattern.axes}", **inner)
            rows[member.fqn] = tuple(label.flatten().tolist())
        found.append(frozenset(rows.items()))
    return set(found)


@pytest.mark.parametrize("name", KNOWN)
def test_couplings_are_what_discover_finds_and_half_of_every_kind_is_removed_exactly(name):
    model, inputs = hf_models.make(name)
    ready = for_model(model)
    assert list(ready) == ["mlp", "heads", *(["kv_heads", "residual"] if hasattr(model, "lm_head") else [])]
    found = units(model, discover(model, inputs).couplings)
    for kind, coupling in ready.items():
        assert units(model, [coupling]) <= found, kind
        assert_exact(model, coupling, inputs)


def test_a_submodule_and_an_untied_model_work_as_well():
    model, _ = hf_models.make("Llama")
    assert list(for_model(model.model)) == ["mlp", "heads", "kv_heads"]  # its hidden size is its output
    assert for_model(model.model)["mlp"].members["layers.*.mlp.up_proj.bias"] == "u"
    assert "lm_head.weight" in for_model(model)["residual"].members
    model.lm_head.weight = model.model.embed_tokens.weight
    assert "lm_head.weight" not in for_model(model)["residual"].members


def test_mlps_may_differ_in_width_which_one_number_of_the_config_cannot_hold():
    model, inputs = hf_models.make("BERT")
    assert for_model(model)["mlp"].attrs == {"config.intermediate_size": "u"}
    second = model.encoder.layer[1]
    second.intermediate.dense, second.output.dense = nn.Linear(32, 20), nn.Linear(20, 32)
    assert for_model(model)["mlp"].attrs == {}
    assert_exact(fill(model), for_model(model)["mlp"], inputs)


def test_transformers_4_names_its_vit_differently():
    dense = {n: nn.Linear(8, 8) for n in ("query", "key", "value")}
    attention = nn.ModuleDict({"attention": nn.ModuleDict(dense), "output": nn.ModuleDict({"dense": nn.Linear(8, 8)})})
    attention["attention"].num_attention_heads, attention["attention"].attention_head_size = 2, 4
    ends = {"intermediate": nn.Linear(8, 16), "output": nn.Linear(16, 8)}
    layer = nn.ModuleDict({"attention": attention, **{k: nn.ModuleDict({"dense": m}) for k, m in ends.items()}})
    heads = for_model(nn.ModuleDict({"layer": nn.ModuleList([layer])}))["heads"]
    assert heads.members["layer.*.attention.output.dense.weight"] == "o (u d)"
    assert heads.attrs == {"layer.*.attention.attention.num_attention_heads": "u"}


def test_an_unknown_model_gets_the_names_that_were_looked_for_and_the_alternatives():
    for name in ("GPT-2", "T5", "ConvNeXt", "ResNet", "Falcon"):
        with pytest.raises(SparsityError) as caught:
            for_model(hf_models.make(name)[0])
        message = str(caught.value)
        assert message.startswith(f"for_model does not know {type(hf_models.make(name)[0]).__name__}. It looked for")
        assert "'*.self_attn.q_proj.weight'" in message and "'*.attention.self.query.weight'" in message
        assert "Use coupling.discover(model, example_inputs), which suggests couplings for any model" in message


def two_decoders(model):
    return nn.ModuleDict({"a": model.model, "b": hf_models.make("Llama")[0].model})


def without_head_sizes(model):
    for layer in model.layers:
        del layer.attention.head_dim
    del model.config


def with_long_norms(model):
    for layer in model.layers:
        layer.self_attn.q_norm.weight = nn.Parameter(torch.ones(32))


LLAMA = "^for_model: model.layers.0 is named as in Llama-.* but also has mlp.adapter.bias and"
BERT = "encoder.layer.1 is named as in BERT-like encoders, but also has adapter.bias and 1 more. .*discover"
DIFFER = r"^for_model: layers differ: layers.1.self_attn.k_proj.weight is \(32, 32\), in the first .*\(16, 32\)"
MISSING = "^for_model: layers differ: layers.1.mlp.up_proj.bias is missing, in the first layer there"
UNKNOWN = "^for_model: the head size is unknown. layers.0.attention has no head_dim or .* no head_dim, nor hidden"
REFUSED = [  # (name, what is passed of it, a change, error)
    ("Llama", lambda m: m, lambda m: m.model.layers[0].mlp.add_module("adapter", nn.Linear(2, 2)), LLAMA),
    ("BERT", lambda m: m, lambda m: m.encoder.layer[1].add_module("adapter", nn.Linear(2, 2)), BERT),
    (
        "BERT",
        lambda m: m,
        lambda m: delattr(m.encoder.layer[1].output, "dense"),
        "layer.1 .* lacks output.dense.weight",
    ),
    ("Llama", lambda m: m.model, lambda m: setattr(m.layers[1].self_attn, "k_proj", nn.Linear(32, 32)), DIFFER),
    ("Llama", lambda m: m.model, lambda m: setattr(m.layers[1].mlp.up_proj, "bias", None), MISSING),
    (
        "Qwen3",
        lambda m: m.model,
        with_long_norms,
        r"layers.\*.self_attn.q_norm normalizes 32 values, not one head of 8",
    ),
    ("Llama", two_decoders, len, "^for_model: there are several stacks of Llama-.*: a.layers., b."),
    ("ViT", lambda m: m.vit, without_head_sizes, UNKNOWN),
]


@pytest.mark.parametrize(("name", "part", "change", "error"), REFUSED, ids=range(len(REFUSED)))
def test_layers_with_unknown_tensors_and_those_that_differ_are_refused(name, part, change, error):
    model = part(hf_models.make(name)[0])
    change(model)
    with pytest.raises(SparsityError, match=error):
        for_model(model)


def test_head_sizes_come_from_the_module_else_from_the_config():
    model, _ = hf_models.make("ViT")
    model.config.num_attention_heads = 8
    assert for_model(model)["heads"].sizes == {"d": 8}  # the module's own
    for layer in model.vit.layers:
        del layer.attention.head_dim
    assert for_model(model)["heads"].sizes == {"d": 4}
    model.config.head_dim = 16
    assert for_model(model)["heads"].sizes == {"d": 16}


def test_a_prepared_model_has_the_same_couplings_as_a_plain_one():
    model, _ = hf_models.make("BERT")
    plain = for_model(model)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, plain["heads"].entries(model, sparsity_level=0.5))
    assert for_model(model) == plain


def routed_without(model, dropped):
    """The model whose routers never choose some experts."""

    def route(own, router, inputs, output):
        logits = torch.where(own, -torch.inf, output[0])
        top = torch.topk(logits.softmax(-1), router.top_k)
        return logits, top.values / top.values.sum(-1, keepdim=True), top.indices

    for own, layer in zip(dropped, model.model.layers, strict=True):
        layer.mlp.gate.register_forward_hook(functools.partial(route, own))
    return model


def test_whole_experts_are_removed_as_if_no_router_chose_them_which_is_not_what_zero_rows_do():
    model, inputs = hf_models.make("Mixtral")
    experts = for_model(model)["experts"]
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, experts.entries(model, nnz=2))
    sparsifier.step()
    dropped = [~sparsifier.mask(f"model.layers.{k}.mlp.gate.weight").any(1) for k in range(2)]
    sparsifier.squash_mask()
    with pytest.raises(SparsityError, match="(?s)^the compacted model gives other outputs.*'experts 0' by itself"):
        compact(model, experts, inputs)
    small, report = compact(model, experts, inputs, tolerance=10)
    assert report.difference > 1e-3 and small.config.num_local_experts == 2
    assert torch.allclose(small(**inputs).logits, routed_without(model, dropped)(**inputs).logits, atol=1e-6)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_units_inside_of_experts_and_whole_ones_of_packed_experts(name):
    model, inputs = hf_models.make(name)
    ready = for_model(model)
    assert_exact(model, ready["expert_units"], inputs)
    small, _ = compact(pruned(model, [ready["experts"]]), ready["experts"], inputs, tolerance=10)
    again = type(model)(small.config)
    again.load_state_dict(small.state_dict())
    assert torch.equal(again.eval()(**inputs).logits, small(**inputs).logits)


def test_listed_experts_have_units_and_a_router_in_groups_keeps_as_many_in_each():
    experts = nn.ModuleList(
        nn.ModuleDict({k: nn.Linear(4, 4, bias=False) for k in ("w1", "w2", "w3")}) for _ in range(2)
    )
    assert for_model(nn.ModuleDict({"experts": experts}))["expert_units"].members == {
        "experts.*.w1.weight": "u i",
        "experts.*.w3.weight": "u i",
        "experts.*.w2.weight": "o u",
    }
    model, _ = hf_models.make("DeepSeek-V3")
    model.model.layers[1].mlp.gate.num_group = 2
    ready = for_model(model)["experts"]
    assert (ready.scope, ready.sizes) == ("s", {"s": 2})
    assert ready.members["model.layers.*.mlp.gate.e_score_correction_bias"] == "(s u)"
