"""expert_couplings: units inside of experts are removed exactly, whole experts as if no router chose them."""

import re

import hf_models
import pytest
import torch
from discovered import assert_exact, fill, pruned
from grids import nightly_except
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sparsekit_ao import ScopeSparsifier, SparsityError
from sparsekit_ao.coupling import expert_couplings, expert_scores
from sparsekit_ao.coupling.experts import packed_experts
from sparsekit_ao.export import save_pretrained
from sparsekit_ao.removal import compact, shrink_experts


def test_a_model_without_experts_gets_the_names_that_were_looked_for_and_the_alternatives():
    for name in (None, "mlp.experts"):
        with pytest.raises(SparsityError, match=r"^expert_couplings: Llama\w+ has no experts: no '\*.gate_up_proj'"):
            expert_couplings(hf_models.make("Llama")[0], name)


def listed():
    return nn.ModuleList([nn.ModuleDict({w: nn.Linear(4, 4) for w in ("w1", "w3", "w2")}) for _ in range(2)])


@pytest.mark.parametrize("has_packed", [False, True])
def test_experts_are_named_or_an_error_lists_them(has_packed):
    layers = [nn.ModuleDict({"experts": listed()}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "own": nn.ModuleDict({"experts": listed()})})
    known = "layers.*.experts (2), own.experts"
    if has_packed:
        mixtral = hf_models.make("Mixtral")[0]
        model["packed"], path = mixtral, packed_experts(dict(mixtral.named_parameters()))[0]
        members = expert_couplings(model, f"packed.{path}")["expert_units"].members
        assert members == expert_couplings(model)["expert_units"].members and "gate_up_proj" in next(iter(members))
        known = f"packed.{path.replace('.0.', '.*.')} (2), {known}"
    assert "own.experts.*.w1.weight" in expert_couplings(model, "own.experts")["expert_units"].members
    for wrong in ("experts", "own.experts.0", ""):
        with pytest.raises(SparsityError, match=re.escape(f"list of experts, got {wrong!r}; the model has {known}")):
            expert_couplings(model, wrong)


def test_a_prepared_model_has_the_same_couplings_as_a_plain_one():
    model, _ = hf_models.make("Mixtral")
    plain = expert_couplings(model)
    ScopeSparsifier().prepare(model, plain["expert_units"].entries(model, sparsity_level=0.5))
    assert expert_couplings(model) == plain


class NeverChosen(TorchFunctionMode):
    """Logits of some rows of routers are -inf."""

    def __init__(self, rows):
        self.rows = rows  # {router weight: bool}
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for weight, rows in self.rows.items() if func is F.linear else ():
            output = output.masked_fill(rows, -torch.inf) if args[1].data_ptr() == weight.data_ptr() else output
        return output


PACKED = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS", "MiniMax-M2", "LFM2-MoE", "Llama 4"]


@pytest.mark.parametrize("name", PACKED)
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


def grouped(model):
    """The same architecture with eight experts in two groups, of which a router chooses one."""
    model.config.n_routed_experts, model.config.n_group = 8, 2
    return fill(type(model)(model.config))


@pytest.mark.parametrize("name", nightly_except(PACKED, "Mixtral", "DeepSeek-V3", "GPT-OSS"))
def test_the_experts_with_the_lowest_scores_are_removed_as_if_no_router_chose_them(name, tmp_path):
    model, inputs = hf_models.make(name)
    model = grouped(model) if name == "DeepSeek-V3" else model
    other = {"input_ids": inputs["input_ids"].flip(1)}
    scores = expert_scores(model, [inputs, other])
    with torch.no_grad():
        want = model(**inputs).logits
        small, report = shrink_experts(model, [inputs, other], 0.5)
        assert torch.equal(model(**inputs).logits, want) and report.not_in_config == ""
        groups, rows = (2 if name == "DeepSeek-V3" else 1), {}
        for path, values in scores.items():
            parts = values.reshape(groups, -1)
            lowest = parts < parts.sort(1, descending=True).values[:, parts.shape[1] // 2 - 1, None]
            moe = model.get_submodule(path.rpartition(".")[0])
            router = moe.router if name in ("GPT-OSS", "Llama 4") else moe.gate
            rows[router.weight] = lowest.flatten()
            for bias in moe.buffers():
                bias[lowest.flatten()] = -torch.inf
        with NeverChosen(rows):
            masked = model(**inputs).logits
        torch.testing.assert_close(small(**inputs).logits, masked)
        assert not torch.allclose(masked, want) and report.error_to_dense > 1e-3 and report.difference < 1e-5
        save_pretrained(small, report, tmp_path)
        again = type(model).from_pretrained(tmp_path)
        torch.testing.assert_close(again(**inputs).logits, masked)


def test_scores_of_experts_are_mean_gates_times_norms_over_their_own_tokens():
    model, inputs = hf_models.make("Mixtral")
    layer, calls = model.model.layers[0].mlp, []
    layer.register_forward_pre_hook(lambda _, args: calls.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        found = expert_scores(model, [inputs])["model.layers.0.mlp.experts"]
        tokens, experts = calls[0], layer.experts
        top = F.linear(tokens, layer.gate.weight).softmax(-1).topk(2)
        gates = torch.zeros(len(tokens), 4).scatter(1, top.indices, top.values / top.values.sum(1, keepdim=True))
        for expert in range(4):
            gate, up = F.linear(tokens, experts.gate_up_proj[expert]).chunk(2, -1)
            norms = F.linear(F.silu(gate) * up, experts.down_proj[expert]).norm(dim=-1)
            chosen = gates[:, expert] > 0
            want = (gates[:, expert] * norms)[chosen].mean() if chosen.any() else torch.tensor(0.0)
            torch.testing.assert_close(found[expert].float(), want)
        padded = torch.cat([inputs["input_ids"], torch.zeros_like(inputs["input_ids"][:, :2])], 1)
        mask = torch.ones_like(padded)
        mask[:, -2:] = 0  # these tokens count nowhere
        again = expert_scores(model, [{"input_ids": padded, "attention_mask": mask}])
        torch.testing.assert_close(again["model.layers.0.mlp.experts"], found)


def test_what_has_no_packed_experts_or_would_keep_too_few_is_refused():
    with pytest.raises(SparsityError, match="expert_scores: Llama\\w+ has no packed experts; see expert_couplings"):
        expert_scores(hf_models.make("Llama")[0], [{}])
    model, inputs = hf_models.make("Mixtral")
    with pytest.raises(SparsityError, match="a token needs 2 experts, but ratio=0.75 keeps 1"):
        shrink_experts(model, [inputs], 0.75)
    with pytest.raises(SparsityError, match="no token reached an expert"):
        expert_scores(model, [])
    with pytest.raises(SparsityError, match="batches must be a list of batches, got one tensor"):
        expert_scores(model, inputs["input_ids"])
    with pytest.raises(SparsityError, match="shrink_experts: multiple_of must be a positive int, got 0"):
        shrink_experts(model, [inputs], 0.5, multiple_of=0)
    assert shrink_experts(model, [inputs], 0.75, multiple_of=2)[0].config.num_local_experts == 2
