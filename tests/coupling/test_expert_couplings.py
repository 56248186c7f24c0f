"""expert_couplings: units inside of experts are removed exactly, whole experts as if no router chose them."""

import functools

import hf_models
import pytest
import torch
from discovered import assert_exact, pruned

from sparsekit_ao import ScopeSparsifier, SparsityError
from sparsekit_ao.coupling import expert_couplings
from sparsekit_ao.removal import compact


def test_a_model_without_experts_gets_the_names_that_were_looked_for_and_the_alternatives():
    with pytest.raises(SparsityError, match=r"^expert_couplings: Llama\w+ has no experts: no '\*.gate_up_proj'"):
        expert_couplings(hf_models.make("Llama")[0])


def test_a_prepared_model_has_the_same_couplings_as_a_plain_one():
    model, _ = hf_models.make("Mixtral")
    plain = expert_couplings(model)
    ScopeSparsifier().prepare(model, plain["expert_units"].entries(model, sparsity_level=0.5))
    assert expert_couplings(model) == plain


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
    experts = expert_couplings(model)["experts"]
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
    ready = expert_couplings(model)
    assert_exact(model, ready["expert_units"], inputs)
    small, _ = compact(pruned(model, [ready["experts"]]), ready["experts"], inputs, tolerance=10)
    again = type(model)(small.config)
    again.load_state_dict(small.state_dict())
    assert torch.equal(again.eval()(**inputs).logits, small(**inputs).logits)


def test_a_router_in_groups_keeps_as_many_experts_in_each():
    model, _ = hf_models.make("DeepSeek-V3")
    model.model.layers[1].mlp.gate.num_group = 2
    ready = expert_couplings(model)["experts"]
    assert (ready.scope, ready.sizes) == ("s", {"s": 2})
    assert ready.members["model.layers.*.mlp.gate.e_score_correction_bias"] == "(s u)"
